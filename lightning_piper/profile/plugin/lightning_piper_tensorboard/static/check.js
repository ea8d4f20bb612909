// Is what a file says a recording, so that it can be drawn? Files come from whoever may write in the log directory.

/** Raises an Error that says where a value is not as files.py writes it. */
function expect(right, where, value) {
  if (!right) throw new Error(`${where} cannot be ${JSON.stringify(value)?.slice(0, 80)}: this is not a valid recording`);
}

const isNumber = Number.isFinite;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function numbers(owner, names, where) {
  expect(isObject(owner), where, owner);
  for (const name of names) expect(isNumber(owner[name]), `${where}.${name}`, owner[name]);
}

function list(value, where, check) {
  expect(Array.isArray(value), where, value);
  value.forEach((item, i) => check(item, `${where}[${i}]`));
}

function table(value, where, check) {
  expect(isObject(value), where, value);
  for (const [name, item] of Object.entries(value)) check(item, `${where}.${name}`);
}

/** Of a directive: null where there is none. */
const index = (plan, value, where) =>
  expect(value === null || (Number.isInteger(value) && value >= 0 && value < plan.directives.length), where, value);

const version = (content) => expect(isObject(content) && content.version === 1, "version", content?.version);

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

export function checkPlan(plan) {
  version(plan);
  expect(Array.isArray(plan.directives), "directives", plan.directives);
  list(plan.rows, "rows", (row, where) => expect(Array.isArray(row) && isNumber(row[0]) && typeof row[1] === "string", where, row));
  table(plan.colours, "colours", (colour, where) => expect(/^#[0-9a-f]{3,8}$/i.test(colour), where, colour));
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

export function checkRecord(record, plan) {
  numbers(record, ["number"], "the step");
  table(record.fixed ?? {}, "fixed", (sizes, where) => table(sizes, where, (size, at) => expect(isNumber(size), at, size)));
  checkStep(record.step, plan);
}

export function checkName(record) {
  version(record);
  expect(typeof record.plan === "string", "plan", record.plan);
}
