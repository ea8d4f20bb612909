// The PIPER tab. The user chooses a run and a step, and sees the planned step above the measured one. With a
// second run, the tab shows two programs side by side.

import {checkName, checkPlan, checkRecord} from "./check.js";
import {KINDS, Memory} from "./memory.js";
import {sideBySide} from "./compared.js";
import {about, deviceTable, directiveTable, make, neighborhood, summary} from "./panels.js";
import {Timeline, navigate, seconds} from "./timeline.js";

const REFRESH = 10_000;  // milliseconds between two looks for new recordings
const state = {runs: [], view: {start: 0, end: 1}, whole: 1, parts: {}, cache: new Map(), shown: null, frame: 0, turn: 0};

async function get(url) {
  const response = await fetch(url);
  const content = await response.json();
  if (!response.ok) throw new Error(content.error || `${url}: ${response.status}`);
  return content;
}

/** Load and check a step file and its plan file. Cache both, because files do not change after they are
 * written. Throw an Error that names the run and the file if a file is missing or not valid. */
async function load(run, name) {
  const file = async (which, check) => {
    const key = JSON.stringify([run, which]);
    if (!state.cache.has(key)) {
      const content = await get(`./file?run=${encodeURIComponent(run)}&name=${encodeURIComponent(which)}`);
      check(content);
      state.cache.set(key, content);
    }
    return state.cache.get(key);
  };
  let which = name;
  try {
    const record = await file(name, checkName);
    which = record.plan;
    const plan = await file(which, checkPlan);
    which = name;
    checkRecord(record, plan);
    return {run, record, plan};
  } catch (error) {
    throw new Error(`run ${run}, ${which}: ${error.message}`);
  }
}

function options(select, names, chosen) {
  const wanted = names.some(([value]) => value === chosen) ? chosen : names[0]?.[0] ?? "";
  select.replaceChildren(...names.map(([value, text]) => make("option", {value}, text)));
  select.value = wanted;
}

const stepsOf = (run) => (state.runs.find(({name}) => name === run)?.steps || []).map(({file, number}) => [file, `step ${number}`]);

function select() {
  const {run, step, otherRun, otherStep} = state.parts;
  const names = state.runs.map(({name}) => [name, name]);
  options(run, names, run.value);
  options(step, stepsOf(run.value), step.value);
  options(otherRun, [["", "nothing"], ...names], otherRun.value);
  options(otherStep, stepsOf(otherRun.value), otherStep.value);
  otherStep.hidden = !otherRun.value;
}

async function refresh() {
  state.runs = (await get("./runs")).runs;
  const there = new Set(state.runs.map(({name}) => name));
  for (const key of state.cache.keys()) if (!there.has(JSON.parse(key)[0])) state.cache.delete(key);  // a new run may get its name
  select();
  if (!state.runs.length) throw new Error("There is no recording in the log directory. Give PiperStrategy(profile=True).");
  const {run, step, otherRun, otherStep} = state.parts;
  const wanted = [run.value, step.value, otherRun.value, otherStep.value].join("\n");
  if (wanted !== state.shown) await show(wanted);
}

async function show(wanted) {
  const {run, step, otherRun, otherStep} = state.parts, turn = ++state.turn;
  const one = await load(run.value, step.value);
  const other = otherRun.value ? await load(otherRun.value, otherStep.value) : null;
  if (turn !== state.turn) return;  // another choice was made meanwhile
  state.shown = wanted;
  // An exchange of local SGD is after the step.
  const end = (step) => step.boxes.reduce((most, box) => Math.max(most, box[2]), step.step_time);
  state.whole = 1.01 * Math.max(...[one, ...(other ? [other] : [])].flatMap(({plan, record}) => [plan, record].map((x) => end(x.step))));
  state.view = {start: 0, end: state.whole};
  tip(null, null);
  build(one, other);
  redraw();
}

const isWait = (kind) => kind === "wait" || kind === "idle";

function timeline(title, id, {plan, record}, step) {
  const short = (node, kind) => isWait(kind) ? "" : (plan.nodes[node].label.match(/=([^,\]]*)/g) || []).map((x) => x.slice(1)).join(".");
  const canvas = make("canvas", {id});
  const chart = new Timeline(canvas, state.view, plan.colors, short);
  chart.show(plan.rows, step.boxes);
  navigate(canvas, state.view, () => state.whole, redraw);
  canvas.addEventListener("mousemove", (event) => {
    const box = chart.at(event.offsetX, event.offsetY);
    tip(event, box && describe(plan, box));
  });
  canvas.addEventListener("mouseleave", () => tip(null, null));
  canvas.addEventListener("click", (event) => {
    const box = chart.at(event.offsetX, event.offsetY);
    if (box) choose(plan, box[3]);
  });
  state.charts.push(chart);
  chart.plan = plan;
  return [make("h2", {}, title, make("small", {}, `${summary(step)}, ${step.boxes.length} boxes`)), canvas];
}

function describe(plan, [row, start, end, node, kind]) {
  const what = kind === "wait" ? "waits for communication:" : kind === "idle" ? "waits for other devices' work, then:" : kind;
  return [`${what} ${seconds(start)} to ${seconds(end)} (${seconds(end - start)})`, ...about(plan, node)].join("\n");
}

function tip(event, text) {
  const {tip: element} = state.parts;
  element.hidden = !text;
  if (!text) return;
  element.textContent = text;
  element.style.left = `${Math.min(event.clientX + 14, Math.max(window.innerWidth - element.offsetWidth - 8, 0))}px`;
  element.style.top = `${event.clientY + 16 + element.offsetHeight > window.innerHeight ? event.clientY - element.offsetHeight - 8 : event.clientY + 16}px`;
}

function choose(plan, node) {
  for (const chart of state.charts) chart.chosen = chart.plan === plan ? node : null;  // another program has other nodes
  const panel = neighborhood(plan, node, plan.colors, (next) => choose(plan, next));
  state.parts.node.replaceChildren(make("h2", {}, plan.nodes[node].kind === "exchange" ? "exchange" : `node %${node}`), panel);
  redraw();
}

function legend(both) {
  const kinds = new Set(both.flatMap(({record}) => record.step.boxes.map((box) => box[4])));
  const colors = Object.assign({}, ...both.map(({plan}) => plan.colors).reverse());
  return Object.entries(colors).filter(([kind]) => kinds.has(kind)).map(([kind, color]) => make("span", {}, make("i", {color}), kind));
}

function memory(title, id, {record}) {
  const strips = new Memory(make("canvas", {id}), state.view);
  strips.show(record);
  navigate(strips.canvas, state.view, () => state.whole, redraw);
  strips.canvas.addEventListener("mousemove", (event) => tip(event, strips.at(event.offsetX, event.offsetY)));
  strips.canvas.addEventListener("mouseleave", () => tip(null, null));
  state.memory.push(strips);
  return [make("h2", {}, title), strips.canvas];
}

function build(one, other) {
  const {plan, record} = one, compared = other?.record.step;
  state.charts = [];
  state.memory = [];
  state.parts.node = make("div");
  const of = other ? [" of A", " of B"] : [""];
  const name = ({run, record}) => `${run}, step ${record.number}`;
  const beside = other ? [make("h2", {}, `A: ${name(one)}; B: ${name(other)}`), sideBySide(one, other)] : [];
  const bands = make("div", {class: "legend"}, ...KINDS.map(([kind, color]) => make("span", {}, make("i", {color}), kind)));
  const [heading, strips] = memory(`memory${of[0]}`, "memory", one);
  state.parts.body.replaceChildren(
    make("div", {class: "legend"}, ...legend(other ? [one, other] : [one])),
    ...beside,
    ...timeline(`planned${of[0]}`, "planned", one, plan.step),
    ...(other ? timeline(`planned${of[1]}`, "planned-other", other, other.plan.step) : []),
    ...timeline(`measured${of[0]}`, "measured", one, record.step),
    ...(other ? timeline(`measured${of[1]}`, "compared", other, compared) : []),
    heading, bands, strips,
    ...(other ? memory(`memory${of[1]}`, "memory-other", other) : []),
    state.parts.node,
    make("div", {class: "tables"},
      make("section", {}, make("h2", {}, `by device${other ? ", A → B" : ""}`), deviceTable(record.step, compared)),
      make("section", {}, make("h2", {}, `by directive${other ? ", A → B" : ""}`), directiveTable(one, other))),
  );
  state.parts.body.dataset.shown = state.shown;
}

function redraw() {
  if (state.frame) return;
  state.frame = requestAnimationFrame(() => {
    state.frame = 0;
    for (const drawn of [...state.charts, ...state.memory]) drawn.draw();
  });
}

async function guarded(work) {
  try {
    await work();
  } catch (error) {
    state.shown = null;
    state.parts.body.replaceChildren(make("div", {class: "problem"}, error.message));
  }
}

/** Called by TensorBoard in the tab's frame. */
export async function render() {
  document.head.append(make("link", {rel: "stylesheet", href: "./style.css"}));
  const changed = () => { select(); return guarded(refresh); };
  const chooser = (id) => make("select", {id, onchange: changed});
  state.parts = {
    run: chooser("run"), step: chooser("step"), otherRun: chooser("other-run"), otherStep: chooser("other-step"),
    body: make("div", {id: "body"}), tip: make("div", {class: "tip", id: "tip", hidden: ""}), node: make("div"),
  };
  const {run, step, otherRun, otherStep, body, tip: element} = state.parts;
  const all = make("button", {onclick: () => { Object.assign(state.view, {start: 0, end: state.whole}); redraw(); }}, "show all");
  const help = make("label", {}, "wheel zooms, dragging moves, a click shows the node");
  document.body.append(make("main", {}, make("header", {}, make("label", {}, "run"), run, step,
    make("label", {}, "compare with"), otherRun, otherStep, all, help), body), element);
  window.addEventListener("resize", () => { if (state.shown) redraw(); });
  window.piper = state;  // for the tests, and for a look from the console
  await guarded(refresh);
  setInterval(() => { if (!document.hidden) guarded(refresh); }, REFRESH);
}
