// Tables of figures, and the DAG around a node.

import {bytes} from "./memory.js";
import {seconds} from "./timeline.js";

/** Make an element with attributes and children (elements or text). An attribute `onclick` or similar is a
 * listener, and `color` is the background. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "color") element.style.background = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** Return a cell with the text of `value`, "value → other" if `other` is given, or "→ other" if `value` is
 * undefined. The color shows that less is better. */
function cell(value, other, text) {
  if (other === undefined) return make("td", {}, text(value));
  if (value === undefined) return make("td", {}, `→ ${text(other)}`);
  const difference = other - value, tone = Math.abs(difference) < 1e-3 * Math.abs(value) ? "" : difference > 0 ? "worse" : "better";
  return make("td", {}, `${text(value)} `, make("span", {class: tone}, `→ ${text(other)}`));
}

/** Return a table element. `rows` are lists of cells, and `above` are rows of the head above the row with the
 * texts `heads`. */
export function table(heads, rows, ...above) {
  const head = make("tr", {}, ...heads.map((text) => make("th", {}, text)));
  return make("table", {}, make("thead", {}, ...above, head), make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells))));
}

/** Return a table of the times, their shares, the peak memory and the microbatches in flight of each device.
 * `other` is a step to compare with, or undefined. A device of only one of the two steps has a row, too. */
export function deviceTable(step, other) {
  const devices = Object.keys({...step.devices, ...other?.devices});
  const rows = devices.map((device) => {
    const mine = step.devices[device], theirs = other?.devices[device];
    const times = ["busy", "exposed", "bubble"].map((key) => cell(mine?.[key], theirs?.[key], seconds));
    const share = (key) => cell(mine && mine[key] / step.step_time, theirs && theirs[key] / other.step_time, percent);
    return [make("td", {}, `device ${device}`), ...times, share("bubble"), share("exposed"),
      cell(mine?.peak_bytes, theirs?.peak_bytes, bytes), cell(mine?.peak_in_flight, theirs?.peak_in_flight, String)];
  });
  const result = table(["", "busy", "exposed", "bubble", "bubble", "exposed", "peak of the step", "in flight"], rows);
  result.id = "devices";
  return result;
}

/** Return a table of the times of each directive, summed over the devices. Directives of two programs share a
 * row if their texts are equal, whatever their indices. */
export function directiveTable(one, other) {
  const first = rowsOf(one), second = other ? rowsOf(other) : new Map();
  const keys = ["busy", "exposed", "bubble"];
  const rows = [...new Set([...first.keys(), ...second.keys()])].map((says) => {
    const mine = first.get(says), theirs = second.get(says), name = (mine || theirs).name;
    const cells = keys.map((key) => cell(mine?.[key], theirs?.[key], seconds));
    return [make("td", {title: name}, name), ...cells];
  });
  const result = table(["directive", ...keys], rows);
  result.id = "directives";
  return result;
}

/** Return a Map: text of a directive -> its name and times. If directives have equal texts, the later ones get
 * " again" at the end of their texts. */
function rowsOf({plan, record}) {
  const found = new Map();
  for (const {directive, ...figures} of record.step.directives) {
    let says = directive === null ? "capture, and waiting for nothing" : JSON.stringify(plan.directives[directive]);
    const name = directive === null ? says : `${directive} ${says}`;
    while (found.has(says)) says += " again";
    found.set(says, {name, ...figures});
  }
  return found;
}

/** Return a line about a step, for a heading. */
export function summary(step) {
  return `step time ${seconds(step.step_time)}, bubble ${percent(step.bubble_fraction)}, exposed communication ${percent(step.exposed_fraction)}`;
}

/** Return lines of text about a node, with one fact in each line. */
export function about(plan, id) {
  const node = plan.nodes[id];
  if (node.kind === "exchange") return [`exchange of local SGD with the other replicas`, `${bytes(node.bytes)} of device 0 in each round`];
  const tags = Object.entries(node.tags).map(([tag, index]) => `${tag}=${index}`).join(", ");
  const made = node.origin === null ? "made by the capture" : `made by directive ${node.origin}: ${JSON.stringify(plan.directives[node.origin])}`;
  const placed = node.placed_by === null ? [] : [`placed by directive ${node.placed_by}: ${JSON.stringify(plan.directives[node.placed_by])}`];
  return [`%${id} ${node.label} on device ${node.devices.join(", ")}, stream ${node.stream}`, ...(tags ? [`tags ${tags}`] : []),
    `makes ${bytes(node.bytes)}`, made, ...placed];
}

/** Return an element with a node. On its left are the nodes that it waits for, and on its right the nodes that
 * wait for it. A click on one of these nodes calls `choose` with its id. */
export function neighborhood(plan, id, colors, choose) {
  const side = (title, edges, end) => make("div", {}, make("em", {}, edges.length ? title : `${title} nothing`), ...edges.map((edge) => {
    const node = plan.nodes[edge[end]];
    const why = [edge[2] ? "data" : "order only", ...(edge[3] === null ? [] : [`directive ${edge[3]}`])].join(", ");
    const button = make("button", {color: colors[node.kind] || "#eee", onclick: () => choose(edge[end])}, `%${edge[end]} ${node.label} `);
    button.append(make("em", {}, `@${node.devices.join(",")} ${why}`));
    return button;
  }));
  const middle = make("div", {}, make("article", {color: colors[plan.nodes[id].kind] || "#eee"}, ...about(plan, id).flatMap((line) => [line, make("br")])));
  return make("div", {class: "node", id: "node"}, side("waits for", plan.edges.filter((edge) => edge[1] === id), 0), middle,
    side("before", plan.edges.filter((edge) => edge[0] === id), 1));
}
