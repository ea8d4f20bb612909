// A timeline on a canvas: rows are the streams of the devices, time runs to the right.
//
// The boxes of a row lie in lanes. The boxes of a lane do not overlap, and are sorted by time. So bisection
// finds the visible boxes. Of boxes narrower than a pixel, one is drawn for each pixel. So the time to draw a
// frame depends on the number of pixels, not on the number of boxes.

export const LEFT = 150;  // pixels for the names of the rows
const ROW = 20, GAP = 3, AXIS = 18;
// Largest number of lanes of a row. A valid recording has few, because a stream does one thing at a time.
const LANES = 200;

/** Divide boxes [row, start, end, node, kind], sorted by start, among the lanes of their rows. Return {rows,
 * height in pixels, count of boxes}. Rows without boxes are left out. */
export function lay(rows, boxes) {
  const byRow = rows.map(([device, stream]) => ({device, stream, lanes: []}));
  for (const box of boxes) {
    const [row, start, end] = box;
    const lanes = byRow[row].lanes;
    let lane = lanes.find((candidate) => candidate.free <= start + 1e-12);
    if (!lane && lanes.length === LANES) throw new Error(`more than ${LANES} boxes of row ${row} overlap`);
    if (!lane) lanes.push(lane = {free: 0, boxes: []});
    lane.free = Math.max(end, start);
    lane.boxes.push(box);
  }
  const shown = byRow.filter((row) => row.lanes.length);
  let y = AXIS, before = null;
  for (const row of shown) {
    if (before !== null && before !== row.device) y += 2 * GAP;
    before = row.device;
    row.y = y;
    const height = ROW / row.lanes.length;
    row.lanes.forEach((lane, k) => { lane.y = y + k * height; lane.height = height; });
    y += ROW + GAP;
  }
  return {rows: shown, height: y + GAP, count: boxes.length};
}

/** Return the index of the first box of a lane that ends after `time`; the number of boxes if none does. */
export function firstAfter(boxes, time) {
  let low = 0, high = boxes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (boxes[middle][2] > time) high = middle; else low = middle + 1;
  }
  return low;
}

/** `time` in seconds as text, in a unit that suits `span`. */
export function seconds(time, span = Math.abs(time)) {
  const [unit, scale] = span >= 1 ? ["s", 1] : span >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${(time * scale).toFixed(span * scale >= 100 ? 0 : span * scale >= 10 ? 1 : 2)} ${unit}`;
}

export class Timeline {
  /** `view` is {start, end} in seconds, and all timelines share this object. `colors` is {kind: color}.
   * `name(node, kind)` returns the text of a box. */
  constructor(canvas, view, colors, name) {
    Object.assign(this, {canvas, view, colors, name, layout: {rows: [], height: 0, count: 0}, chosen: null});
  }

  show(rows, boxes) {
    this.layout = lay(rows, boxes);
    this.canvas.dataset.boxes = String(this.layout.count);
    this.canvas.style.height = `${this.layout.height}px`;
  }

  draw() {
    const before = performance.now();
    const {canvas, layout, view} = this;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = layout.height;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px sans-serif";
    pen.textBaseline = "middle";
    const scale = (width - LEFT) / (view.end - view.start);
    drawAxis(pen, view, scale, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT, height);
    pen.clip();
    let drawn = 0;
    for (const row of layout.rows) for (const lane of row.lanes) drawn += this.drawLane(pen, lane, scale);
    pen.restore();
    pen.fillStyle = "#222";
    for (const row of layout.rows) pen.fillText(`device ${row.device}  ${row.stream}`, 4, row.y + ROW / 2, LEFT - 10);
    canvas.dataset.drawn = String(drawn);
    canvas.dataset.drawMs = (performance.now() - before).toFixed(2);
  }

  drawLane(pen, lane, scale) {
    const {view, colors, chosen} = this;
    const boxes = lane.boxes, height = lane.height - (lane.height > 6 ? 1 : 0);
    let pixel = -1, drawn = 0;
    for (let i = firstAfter(boxes, view.start); i < boxes.length && boxes[i][1] < view.end; i++) {
      const [, start, end, node, kind] = boxes[i];
      const x = Math.max(LEFT + (start - view.start) * scale, LEFT - 2);
      const right = Math.min(LEFT + (end - view.start) * scale, LEFT + (view.end - view.start) * scale + 2);
      const narrow = right - x < 1;
      if (narrow && Math.floor(x) === pixel) continue;
      pixel = narrow ? Math.floor(x) : -1;
      pen.fillStyle = colors[kind] || "#b4a7d6";
      pen.fillRect(x, lane.y, narrow ? 1 : right - x - (right - x > 4 ? 0.6 : 0), height);
      drawn++;
      if (node === chosen) {
        pen.strokeStyle = "#000";
        pen.lineWidth = 1.5;
        pen.strokeRect(x + 0.75, lane.y + 0.75, Math.max(right - x - 2, 1), height - 1.5);
      }
      if (right - x > 22 && height > 12) {
        const text = this.name(node, kind);
        if (text && text.length * 6.2 < right - x - 4) {
          pen.fillStyle = "#222";
          pen.fillText(text, x + 3, lane.y + height / 2);
        }
      }
    }
    return drawn;
  }

  /** Return the box at a point of the canvas, in pixels, or null. Boxes narrower than three pixels count as
   * three pixels wide. */
  at(x, y) {
    const row = this.layout.rows.find((candidate) => y >= candidate.y && y < candidate.y + ROW);
    if (!row || x < LEFT) return null;
    const lane = row.lanes.find((candidate) => y < candidate.y + candidate.height) || row.lanes[row.lanes.length - 1];
    const perPixel = (this.view.end - this.view.start) / (this.canvas.clientWidth - LEFT);
    const time = this.view.start + (x - LEFT) * perPixel;
    const i = firstAfter(lane.boxes, time);
    let nearest = null, distance = 1.5 * perPixel;
    for (const box of [lane.boxes[i - 1], lane.boxes[i]]) {
      if (!box) continue;
      const away = Math.max(box[1] - time, time - box[2], 0);
      if (away < distance) [nearest, distance] = [box, away];
    }
    return nearest;
  }

  /** Return {x, y, box}: the i-th box in the first lane of a row, and the position of its middle in pixels. */
  place(rowIndex, i) {
    const row = this.layout.rows[rowIndex], lane = row.lanes[0], box = lane.boxes[i];
    const scale = (this.canvas.clientWidth - LEFT) / (this.view.end - this.view.start);
    return {x: LEFT + ((box[1] + box[2]) / 2 - this.view.start) * scale, y: lane.y + lane.height / 2, box};
  }
}

/** Return the multiples of a unit from `start` to `end`, in seconds. The unit is 1, 2 or 5 times a power of
 * ten, so that ticks are about 90 pixels apart or more. */
export function ticks(start, end, pixels) {
  const least = (end - start) / Math.max(pixels / 90, 1);
  const power = 10 ** Math.floor(Math.log10(least));
  const unit = [1, 2, 5, 10].map((k) => k * power).find((candidate) => candidate >= least * 0.999);
  const found = [];
  for (let k = Math.ceil(start / unit); k * unit <= end; k++) found.push(k * unit);
  return found;
}

function drawAxis(pen, view, scale, width, height) {
  pen.fillStyle = "#777";
  pen.strokeStyle = "#e6e6e6";
  pen.lineWidth = 1;
  pen.beginPath();
  for (const tick of ticks(view.start, view.end, width - LEFT)) {
    const x = LEFT + (tick - view.start) * scale;
    pen.moveTo(x, AXIS - 4);
    pen.lineTo(x, height);
    pen.fillText(seconds(tick, view.end), x + 3, AXIS / 2);
  }
  pen.stroke();
}

/** Let the mouse change `view`, and call `redraw`. The wheel zooms about the pointer, or with shift moves the
 * view. Dragging moves the view, and a double click shows everything. `whole()` returns the largest length of
 * the view in seconds. */
export function navigate(canvas, view, whole, redraw) {
  const width = () => canvas.clientWidth - LEFT;
  const move = (start, length) => {
    length = Math.min(Math.max(length, whole() * 1e-6), whole());
    view.start = Math.min(Math.max(start, 0), whole() - length);
    view.end = view.start + length;
    redraw();
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const length = view.end - view.start;
    if (event.shiftKey) return move(view.start + (event.deltaY || event.deltaX) / width() * length, length);
    const share = Math.min(Math.max((event.offsetX - LEFT) / width(), 0), 1);
    const zoomed = Math.min(length * 1.0015 ** event.deltaY, whole());
    move(view.start + share * (length - zoomed), zoomed);
  }, {passive: false});
  let last = null, way = 0;
  canvas.addEventListener("pointerdown", (event) => {
    [last, way] = [event.clientX, 0];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { last = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (last === null) return;
    const length = view.end - view.start;
    way += Math.abs(event.clientX - last);
    move(view.start - (event.clientX - last) / width() * length, length);
    last = event.clientX;
  });
  canvas.addEventListener("click", (event) => {  // the click that ends a drag does not choose a box
    if (way > 3) event.stopImmediatePropagation();
  });
  canvas.addEventListener("dblclick", () => move(0, whole()));
}
