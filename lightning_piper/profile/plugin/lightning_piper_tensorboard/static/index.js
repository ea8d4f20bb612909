// The PIPER tab: choose a run and a step, see the planned step above the measured one, and compare two.

import {checkName, checkPlan, checkRecord} from "./check.js";
import {KINDS, Memory} from "./memory.js";
import {about, deviceTable, directiveTable, make, neighbourhood, summary} from "./panels.js";
import {Timeline, navigate, seconds} from "./timeline.js";

const REFRESH = 10_000;  // milliseconds between two looks for new recordings
const state = {runs: [], view: {start: 0, end: 1}, whole: 1, parts: {}, cache: new Map(), shown: null, frame: 0, turn: 0};

async function get(url) {
  const response = await fetch(url);
  const content = await response.json();
  if (!response.ok) throw new Error(content.error || `${url}: ${response.status}`);
  return content;
}

/** A step file and its plan, checked. Files do not change once they are written. */
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
  state.whole = Math.max(one.plan.step.step_time, one.record.step.step_time, other?.record.step.step_time || 0) * 1.01;
  state.view = {start: 0, end: state.whole};
  tip(null, null);
  build(one, other);
  redraw();
}

const isWait = (kind) => kind === "wait" || kind === "idle";

function timeline(title, id, {plan, record}, step) {
  const short = (node, kind) => isWait(kind) ? "" : (plan.nodes[node].label.match(/=([^,\]]*)/g) || []).map((x) => x.slice(1)).join(".");
  const canvas = make("canvas", {id});
  const chart = new Timeline(canvas, state.view, plan.colours, short);
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
  for (const chart of state.charts) chart.chosen = node;
  const panel = neighbourhood(plan, node, plan.colours, (next) => choose(plan, next));
  state.parts.node.replaceChildren(make("h2", {}, `node %${node}`), panel);
  redraw();
}

function legend(plan, step) {
  const kinds = new Set(step.boxes.map((box) => box[4]));
  return Object.entries(plan.colours).filter(([kind]) => kinds.has(kind)).map(([kind, colour]) => make("span", {}, make("i", {colour}), kind));
}

function build(one, other) {
  const {body} = state.parts, {plan, record} = one;
  state.charts = [];
  state.memory = new Memory(make("canvas", {id: "memory"}), state.view);
  state.memory.show(record);
  navigate(state.memory.canvas, state.view, () => state.whole, redraw);
  state.memory.canvas.addEventListener("mousemove", (event) => tip(event, state.memory.at(event.offsetX, event.offsetY)));
  state.memory.canvas.addEventListener("mouseleave", () => tip(null, null));
  state.parts.node = make("div");
  const compared = other?.record.step;
  const title = compared ? `, compared with ${other.run}, step ${other.record.number}` : "";
  const bands = KINDS.map(([kind, colour]) => make("span", {}, make("i", {colour}), kind));
  body.replaceChildren(
    make("div", {class: "legend"}, ...legend(plan, record.step)),
    ...timeline("planned", "planned", one, plan.step),
    ...timeline("measured", "measured", one, record.step),
    ...(other ? timeline(`measured: ${other.run}, step ${other.record.number}`, "compared", other, compared) : []),
    make("h2", {}, "memory"), make("div", {class: "legend"}, ...bands), state.memory.canvas,
    state.parts.node,
    make("div", {class: "tables"},
      make("section", {}, make("h2", {}, `by device${title}`), deviceTable(record.step, compared)),
      make("section", {}, make("h2", {}, `by directive${title}`), directiveTable(plan, record.step, compared))),
  );
  body.dataset.shown = state.shown;
}

function redraw() {
  if (state.frame) return;
  state.frame = requestAnimationFrame(() => {
    state.frame = 0;
    for (const chart of state.charts) chart.draw();
    state.memory.draw();
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
