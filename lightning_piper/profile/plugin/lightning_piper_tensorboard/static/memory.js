// Memory over time, one band for each kind, one strip for each device.

import {LEFT, seconds} from "./timeline.js";

const STRIP = 64, TOP = 6;
export const KINDS = [
  ["parameters", "#8da0cb"], ["optimizer", "#bcbddc"], ["activations", "#9cc3e6"], ["gradients", "#f6b26b"],
  ["gathered", "#a9d18e"], ["workspace", "#e3c6d9"], ["other", "#cccccc"],
];

/** 1536 -> "1.5 KiB". */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (Math.abs(count) >= 1024 && k < units.length - 1) { count /= 1024; k++; }
  return `${k ? count.toFixed(1) : count} ${units[k]}`;
}

/** Return the bytes that a device holds over time, by kind: {kind: [[time, bytes], ...]}. Parameters and
 * optimizer states are constant. */
export function curvesOf(record, device) {
  const fixed = record.fixed?.[device] || {}, figures = record.step.devices[device];
  const curves = {...figures.memory_by_kind};
  for (const kind of ["parameters", "optimizer"]) curves[kind] = [[0, fixed[kind] || 0]];
  return curves;
}

/** Return the value of a curve at a time; 0 before the first point of the curve. */
export function valueAt(curve, time) {
  let low = 0, high = curve.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve[middle][0] <= time) low = middle + 1; else high = middle;
  }
  return low ? curve[low - 1][1] : 0;
}

export class Memory {
  constructor(canvas, view) {
    Object.assign(this, {canvas, view, devices: []});
  }

  show(record) {
    this.devices = Object.keys(record.step.devices).map((device) => {
      const curves = curvesOf(record, device);
      const moments = [...new Set(Object.values(curves).flatMap((curve) => curve.map(([time]) => time)))].sort((a, b) => a - b);
      const levels = moments.map((time) => KINDS.map(([kind]) => valueAt(curves[kind] || [], time)));
      const most = levels.reduce((most, row) => Math.max(most, row.reduce((a, b) => a + b, 0)), 1);
      return {device, curves, moments, levels, most, end: record.step.step_time};
    });
    this.canvas.style.height = `${this.devices.length * STRIP}px`;
  }

  draw() {
    const {canvas, view, devices} = this;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = devices.length * STRIP;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11px sans-serif";
    const scale = (width - LEFT) / (view.end - view.start);
    const most = Math.max(...devices.map((d) => d.most));
    devices.forEach((strip, k) => {
      const bottom = (k + 1) * STRIP - 2, tall = (STRIP - TOP - 2) / most;
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, 0, width - LEFT, height);
      pen.clip();
      for (let kind = KINDS.length - 1; kind >= 0; kind--) {  // from the bottom up to the sum of the kinds 0 to `kind`
        pen.fillStyle = KINDS[kind][1];
        pen.beginPath();
        pen.moveTo(LEFT, bottom);
        let y = bottom;
        strip.moments.forEach((time, i) => {
          const x = Math.max(LEFT + (time - view.start) * scale, LEFT);
          pen.lineTo(x, y);
          y = bottom - strip.levels[i].slice(0, kind + 1).reduce((a, b) => a + b, 0) * tall;
          pen.lineTo(x, y);
        });
        const end = Math.max(LEFT + (strip.end - view.start) * scale, LEFT);
        pen.lineTo(end, y);
        pen.lineTo(end, bottom);
        pen.fill();
      }
      pen.restore();
      pen.fillStyle = "#222";
      pen.fillText(`device ${strip.device}`, 4, bottom - STRIP / 2);
      pen.fillText(`peak ${bytes(strip.most)}`, 4, bottom - STRIP / 2 + 14);
    });
  }

  /** Return the bytes of each kind at a point of the canvas, as text; null if no strip is there. */
  at(x, y) {
    const strip = this.devices[Math.floor(y / STRIP)];
    if (!strip || x < LEFT) return null;
    const time = this.view.start + (x - LEFT) / (this.canvas.clientWidth - LEFT) * (this.view.end - this.view.start);
    const lines = KINDS.map(([kind]) => [kind, valueAt(strip.curves[kind] || [], time)]).filter(([, n]) => n);
    const total = lines.reduce((sum, [, n]) => sum + n, 0);
    return [`device ${strip.device} at ${seconds(time)}: ${bytes(total)}`, ...lines.map(([kind, n]) => `${kind} ${bytes(n)}`)].join("\n");
  }
}
