// Check that the content of a file is a valid recording (see files.py) before the tab draws it. Anyone who
// may write to the log directory may have written the file.

/** Throw an Error unless `right` is true. The message names the position of `value` in the file (`where`). */
function expect(right, where, value) {
  if (!right) throw new Error(`${where} cannot be ${JSON.stringify(value)?.slice(0, 80)}: this is not a valid recording`);
}

const isNumber = Number.isFinite;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Check that `owner` is an object whose properties `names` are numbers. */
function numbers(owner, names, where) {
  expect(isObject(owner), where, owner);
  for (const name of names) expect(isNumber(owner[name]), `${where}.${name}`, owner[name]);
}

/** Check that `value` is an array, and each item with `check(item, where)`. */
function list(value, where, check) {
  expect(Array.isArray(value), where, value);
  value.forEach((item, i) => check(item, `${where}[${i}]`));
}

/** Check that `value` is an object, and each property with `check(property, where)`. */
function table(value, where, check) {
  expect(isObject(value), where, value);
  for (const [name, item] of Object.entries(value)) check(item, `${where}.${name}`);
}

/** Check the index of a directive. It may be null: a node of the capture does not belong to a directive. */
const index = (plan, value, where) =>
  expect(value === null || (Number.isInteger(value) && value >= 0 && value < plan.directives.length), where, value);

const version = (content) => expect(isObject(content) && content.version === 1, "version", content?.version);

/** Check `step` of a plan file or of a step file, with the rows, nodes and directives of the plan file. */
function checkStep(step, plan) {
  numbers(step, ["step_time", "bubble_fraction", "exposed_fraction"], "step");
  list(step.boxes, "boxes", (box, where) => {
    expect(Array.isArray(box) && box.length === 5, where, box);
    const [row, start, end, node, kind] = box;
    expect(Object.hasOwn(plan.rows, row) && isNumber(row), `${where}, its row,`, row);
    expect(isNumber(start) && isNumber(end) && start <= end, `${where}, its times,`, box);
    expect(isNumber(node) && Object.hasOwn(plan.nodes, node), `${where}, its node,`, node);
    expect(typeof kind === "string", `${where}, its kind,`, kind);
  });
  table(step.devices, "devices", (figures, where) => {
    numbers(figures, ["busy", "exposed", "bubble", "peak_bytes", "peak_in_flight"], where);
    table(figures.memory_by_kind, `${where}.memory_by_kind`, (curve, at) => list(curve, at, (point, here) =>
      expect(Array.isArray(point) && isNumber(point[0]) && isNumber(point[1]), here, point)));
  });
  list(step.directives, "directives", (row, where) => {
    numbers(row, ["busy", "exposed", "bubble"], where);
    index(plan, row.directive, `${where}.directive`);
  });
}

/** Check the content of a plan file. */
export function checkPlan(plan) {
  version(plan);
  expect(Array.isArray(plan.directives), "directives", plan.directives);
  list(plan.rows, "rows", (row, where) => expect(Array.isArray(row) && isNumber(row[0]) && typeof row[1] === "string", where, row));
  table(plan.colors, "colors", (color, where) => expect(/^#[0-9a-f]{3,8}$/i.test(color), where, color));
  table(plan.nodes, "nodes", (node, where) => {
    numbers(node, ["bytes"], where);
    for (const name of ["label", "kind", "stream"]) expect(typeof node[name] === "string", `${where}.${name}`, node[name]);
    expect(isObject(node.tags), `${where}.tags`, node.tags);
    list(node.devices, `${where}.devices`, (device, at) => expect(isNumber(device), at, device));
    index(plan, node.origin, `${where}.origin`);
    index(plan, node.placed_by, `${where}.placed_by`);
  });
  list(plan.edges, "edges", (edge, where) => {
    expect(Array.isArray(edge) && edge.length === 4, where, edge);
    for (const node of edge.slice(0, 2)) expect(isNumber(node) && Object.hasOwn(plan.nodes, node), where, edge);
    index(plan, edge[3], where);
  });
  checkStep(plan.step, plan);
}

/** Check the content of a step file whose plan is known. `checkName` has checked it before. */
export function checkRecord(record, plan) {
  numbers(record, ["number"], "the step");
  table(record.fixed ?? {}, "fixed", (sizes, where) => table(sizes, where, (size, at) => expect(isNumber(size), at, size)));
  checkStep(record.step, plan);
}

/** Check the version of a step file, and that it names a plan file. */
export function checkName(record) {
  version(record);
  expect(typeof record.plan === "string", "plan", record.plan);
}
