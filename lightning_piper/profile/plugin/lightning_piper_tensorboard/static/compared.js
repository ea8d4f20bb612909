// Two recorded steps side by side, often of two programs: planned and measured figures of each, and their
// differences.

import {bytes} from "./memory.js";
import {make, percent, table} from "./panels.js";
import {seconds} from "./timeline.js";

/** Return a Map: name of a figure -> [value, function that formats it]. Times are means over the devices.
 * Memory includes parameters and optimizer states. `step` is the planned or the recorded step of `record`. */
function figures(record, step) {
  const devices = Object.entries(step.devices);
  const mean = (key) => devices.reduce((sum, [, of]) => sum + of[key], 0) / Math.max(devices.length, 1);
  const found = new Map([["step time", [step.step_time, seconds]]]);
  for (const [name, key] of [["busy", "busy"], ["exposed communication", "exposed"], ["bubble", "bubble"]]) {
    found.set(name, [mean(key), seconds]);
    found.set(`${name}, share`, [step.step_time ? mean(key) / step.step_time : 0, percent]);
  }
  for (const [device, of] of devices) {
    const fixed = Object.values(record.fixed?.[device] || {}).reduce((sum, size) => sum + size, 0);
    found.set(`memory of device ${device}`, [of.peak_bytes + fixed, bytes]);
  }
  return found;
}

const value = (found) => make("td", {}, found ? found[1](found[0]) : "-");

/** Return a cell with `after` minus `before`, also as a share of `before`; "-" if one of them is missing. Both
 * are entries of `figures`. With `tells`, the color shows that a smaller value is better. */
function difference(before, after, tells) {
  if (!before || !after) return make("td", {}, "-");
  const [[from, text], [to]] = [before, after], more = to - from;
  const share = text === percent || !from ? "" : ` (${more < 0 ? "" : "+"}${percent(more / from)})`;
  const tone = !tells || Math.abs(more) < 1e-3 * Math.abs(from) ? "" : more > 0 ? "worse" : "better";
  return make("td", {class: tone}, `${more < 0 ? "" : "+"}${text(more)}${share}`);
}

/** Return the table of two recorded steps A and B. Each has {plan, record}, the contents of its files. */
export function sideBySide(one, other) {
  const columns = [one, other].flatMap(({plan, record}) => [figures(record, plan.step), figures(record, record.step)]);
  const rows = [...new Set(columns.flatMap((column) => [...column.keys()]))].map((name) => {
    const [a, b, c, d] = columns.map((column) => column.get(name)), tells = !name.startsWith("busy");
    return [make("td", {}, name), value(a), value(b), difference(a, b, false), value(c), value(d), difference(c, d, false),
      difference(a, c, tells), difference(b, d, tells)];
  });
  const head = (text, colspan) => make("th", {colspan}, text);
  const above = make("tr", {}, head("", 1), head("A", 3), head("B", 3), head("B − A", 2));
  const each = ["planned", "measured", "measured − planned"];
  const result = table(["", ...each, ...each, "planned", "measured"], rows, above);
  result.id = "side-by-side";
  return result;
}
