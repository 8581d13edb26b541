// The time line: a compute and a network lane under bands of the passes, memory over the same time; wheel, keys and buttons zoom.

const LANES = { bands: [2, 16], compute: [22, 34], network: [60, 34], memory: [108, 92], axis: [202, 18] };
const HEIGHT = 222;

class Timeline {
  /** `choose(row)` is called with the number of a collective's row. */
  constructor(choose) {
    this.choose = choose;
    this.canvas = h("canvas", {
      class: "lanes", tabindex: 0, role: "application", "aria-label": "Time line of the step: + and − zoom, arrows move, Home shows all",
      onwheel: (e) => { if (!e.ctrlKey && !e.shiftKey && !e.altKey) return; e.preventDefault(); this.zoom(Math.exp(-e.deltaY / 300), this.at(e)); },
      onpointerdown: (e) => { this.drag = { x: e.offsetX, from: this.from, moved: false }; this.canvas.setPointerCapture?.(e.pointerId); },
      onpointermove: (e) => this.pointer(e),
      onpointerup: (e) => { const moved = this.drag?.moved; this.drag = null; if (!moved) this.click(e); },
      onpointerleave: () => { this.read(null); },
      ondblclick: (e) => this.zoom(4, this.at(e)),
      onkeydown: (e) => this.key(e),
    });
    this.reading = h("output", { class: "reading", "aria-live": "polite" });
    const button = (label, name, act) => h("button", { class: "small", title: name, "aria-label": name, onclick: act }, label);
    this.element = h("div", { class: "timeline" },
      h("div", { class: "timeline-head" },
        h("div", { class: "legend" }, h("span", {}, h("i", { class: "compute" }), "compute"), h("span", {}, h("i", { class: "communication" }), "hidden communication"), h("span", {}, h("i", { class: "exposed" }), "exposed communication")),
        h("div", { class: "buttons" }, button("−", "zoom out", () => this.zoom(0.5)), button("+", "zoom in", () => this.zoom(2)), button("all", "whole step", () => this.show(0, this.end)))),
      this.canvas, this.kinds = h("div", { class: "legend" }), this.reading);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  set(data) {
    this.data = data.timeline;
    this.memory = data.memory;
    this.limit = data.figures.limit;
    this.end = Math.max(1, this.data?.end ?? 1);
    [this.from, this.to] = [0, this.end];
    this.texts = this.data?.texts ?? [];
    this.lanes = [0, 1].map((lane) => (this.data?.spans ?? []).filter((s) => s[0] === lane));
    this.selected = -1;
    this.element.hidden = !this.data;
    this.kinds.replaceChildren(...this.memory.kinds.map((kind, n) => h("span", {}, h("i", { class: `m-${/^[a-z]+$/.test(kind) ? kind : "other"}` }), kind, this.memory.at_peak[n] ? ` ${memory(this.memory.at_peak[n])}` : "")));
    this.draw();
  }

  select(row) { this.selected = row; this.draw(); }
  show(from, to) {
    const length = Math.min(this.end, Math.max(this.end / 20000, to - from));
    this.from = Math.max(0, Math.min(this.end - length, from));
    this.to = this.from + length;
    this.draw();
  }
  zoom(by, at = (this.from + this.to) / 2) { this.show(at - (at - this.from) / by, at + (this.to - at) / by); }
  at(e) { return this.from + (this.to - this.from) * e.offsetX / Math.max(1, this.canvas.clientWidth); }
  key(e) {
    const length = this.to - this.from;
    const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[e.key];
    if (move) this.show(this.from + move * length, this.to + move * length);
    else if (e.key === "+" || e.key === "=") this.zoom(2);
    else if (e.key === "-") this.zoom(0.5);
    else if (e.key === "Home") this.show(0, this.end);
    else return;
    e.preventDefault();
  }

  pointer(e) {
    if (this.drag) {
      const dx = e.offsetX - this.drag.x, length = this.to - this.from;
      this.drag.moved ||= Math.abs(dx) > 4;
      if (this.drag.moved) this.show(this.drag.from - dx * length / this.canvas.clientWidth, this.drag.from - dx * length / this.canvas.clientWidth + length);
    } else this.read(e);
  }

  /** The span under a pointer, the one that starts last. */
  hit(e) {
    const lane = ["compute", "network"].findIndex((x) => e.offsetY >= LANES[x][0] && e.offsetY < LANES[x][0] + LANES[x][1]);
    if (lane < 0 || !this.data) return null;
    const t = this.at(e), slack = 2 * (this.to - this.from) / Math.max(1, this.canvas.clientWidth);
    let best = null;
    for (const s of this.lanes[lane]) if (s[1] <= t + slack && s[1] + s[2] >= t - slack && (!best || s[2] < best[2])) best = s;
    return best;
  }

  click(e) { const s = this.hit(e); if (s && s[8] >= 0) this.choose(s[8]); }

  read(e) {
    const s = e && this.hit(e);
    if (s) {
      const [lane, start, length, name, place, phase, exposed, parts] = s;
      const more = lane ? [parts > 1 && `${parts} arrays`, exposed > 0 ? `${seconds(exposed * 1e-9)} exposed` : "hidden"] : [parts > 1 && `${parts} ops in one kernel`];
      this.reading.textContent = [this.texts[name], this.texts[place], this.texts[phase], seconds(length * 1e-9), ...more, `at ${seconds(start * 1e-9)}`].filter(Boolean).join(" · ");
    } else if (e && this.memory.times) {
      const t = this.at(e), times = this.memory.times;
      let n = 0;
      while (n + 1 < times.length && times[n + 1] <= t) n++;
      const total = this.memory.values.reduce((sum, v) => sum + v[n], 0);
      const parts = this.memory.kinds.map((kind, k) => [kind, this.memory.values[k][n]]).filter(([, v]) => v > 0).sort((a, b) => b[1] - a[1]).slice(0, 4);
      this.reading.textContent = `at ${seconds(t * 1e-9)}: ${memory(total)} — ${parts.map(([k, v]) => `${k} ${memory(v)}`).join(", ")}`;
    } else this.reading.textContent = "";
  }

  draw() {
    const c = this.canvas, width = c.clientWidth;
    if (!width || !this.data || !c.isConnected) return;
    const ratio = window.devicePixelRatio || 1, root = c.getRootNode();
    [c.width, c.height] = [Math.round(width * ratio), Math.round(HEIGHT * ratio)];
    const g = c.getContext("2d"), X = (t) => width * (t - this.from) / (this.to - this.from);
    const paint = Object.fromEntries(["ink", "soft", "line", "fill", "compute", "communication", "exposed", "alarm", "card"].map((name) => [name, colour(root, `var(--${name})`)]));
    g.scale(ratio, ratio);
    g.clearRect(0, 0, width, HEIGHT);
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    this.drawBands(g, X, width, paint);
    for (const [lane, name] of [[0, "compute"], [1, "network"]]) this.drawLane(g, X, width, paint, lane, ...LANES[name]);
    this.drawMemory(g, X, width, paint, root);
    this.drawAxis(g, X, width, paint);
  }

  drawBands(g, X, width, paint) {
    const [top, height] = LANES.bands;
    this.data.bands.forEach(([phase, from, to], n) => {
      const a = Math.max(0, X(from)), b = Math.min(width, X(to));
      if (b - a < 1) return;
      g.fillStyle = paint.fill;
      g.fillRect(a + 0.5, top, b - a - 1, height);
      g.fillStyle = paint.soft;
      if (b - a > g.measureText(phase).width + 10) g.fillText(phase, a + 6, top + height / 2 + 0.5);
      if (n) { g.fillStyle = paint.line; g.fillRect(a, top, 1, LANES.memory[0] + LANES.memory[1] - top); }
    });
  }

  drawLane(g, X, width, paint, lane, top, height) {
    g.fillStyle = paint.fill;
    g.fillRect(0, top, width, height);
    let last = -1, start = 0;
    const flush = () => { if (last > start) { g.fillStyle = paint.compute; g.fillRect(start, top, last - start, height); } };
    for (const s of this.lanes[lane]) {
      const a = X(s[1]), b = X(s[1] + s[2]);
      if (b < 0 || a > width) continue;
      if (!lane && b - a < 3) { // narrow kernels are one area
        if (a > last + 0.4) { flush(); start = a; }
        last = Math.max(last, b);
        continue;
      }
      g.fillStyle = lane ? paint.communication : paint.compute;
      g.fillRect(a, top, Math.max(0.6, b - a - (b - a > 6 ? 1 : 0)), height);
      if (lane && s[6] > 0) { g.fillStyle = paint.exposed; g.fillRect(a, top, Math.max(0.6, (b - a) * s[6] / s[2]), height); }
      if (lane && this.selected >= 0 && s[8] === this.selected) { g.strokeStyle = paint.ink; g.lineWidth = 2; g.strokeRect(a, top - 1, Math.max(2, b - a), height + 2); }
      const label = this.texts[s[3]], from = Math.max(a, 0) + 5;
      if (Math.min(b, width) - from > 34) {
        g.save();
        g.beginPath();
        g.rect(from - 3, top, Math.min(b, width) - from, height);
        g.clip();
        g.fillStyle = lane ? "#1d1606" : "#ffffff";
        g.fillText(label, from, top + height / 2);
        g.restore();
      }
    }
    flush();
    if (!this.lanes[lane].length) { g.fillStyle = paint.soft; g.fillText(lane ? "nothing is sent" : "", 6, top + height / 2); }
  }

  drawMemory(g, X, width, paint, root) {
    const [top, height] = LANES.memory, { times, values, kinds } = this.memory;
    if (!times) return;
    const totals = times.map((_, n) => values.reduce((sum, v) => sum + v[n], 0)), peak = Math.max(...totals);
    const limit = this.limit && this.limit < 1.6 * peak ? this.limit : null, most = 1.08 * Math.max(peak, limit ?? 0) || 1;
    const Y = (v) => top + height - height * v / most, ground = times.map(() => 0);
    kinds.forEach((kind, k) => {
      g.fillStyle = colour(root, `var(--m-${/^[a-z]+$/.test(kind) ? kind : "other"}, var(--m-other))`);
      g.beginPath();
      times.forEach((t, n) => { const x = X(t); if (n) g.lineTo(x, Y(ground[n - 1] + values[k][n - 1])); g.lineTo(x, Y(ground[n] + values[k][n])); });
      g.lineTo(X(this.end), Y(ground[times.length - 1] + values[k][times.length - 1]));
      g.lineTo(X(this.end), Y(ground[times.length - 1]));
      for (let n = times.length - 1; n >= 0; n--) { g.lineTo(X(times[n]), Y(ground[n])); if (n) g.lineTo(X(times[n]), Y(ground[n - 1])); }
      g.fill();
      values[k].forEach((v, n) => { ground[n] += v; });
    });
    g.setLineDash([2, 3]);
    g.strokeStyle = paint.ink;
    g.lineWidth = 1;
    const x = X(times[this.memory.peak]);
    g.beginPath(); g.moveTo(x, top); g.lineTo(x, top + height); g.stroke();
    if (limit) { g.strokeStyle = paint.alarm; g.beginPath(); g.moveTo(0, Y(limit)); g.lineTo(width, Y(limit)); g.stroke(); }
    g.setLineDash([]);
    const label = `peak ${memory(peak)}`, wide = g.measureText(label).width;
    g.fillStyle = paint.card;
    g.globalAlpha = 0.8;
    const left = x + wide + 12 > width ? x - wide - 8 : x + 4;
    g.fillRect(left - 3, top, wide + 6, 15);
    g.globalAlpha = 1;
    g.fillStyle = paint.ink;
    if (x >= 0 && x <= width) g.fillText(label, left, top + 8);
  }

  drawAxis(g, X, width, paint) {
    const [top] = LANES.axis, length = this.to - this.from, rough = length / Math.max(2, Math.min(8, width / 90));
    const base = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((k) => k * base).find((s) => s >= rough);
    g.fillStyle = paint.soft;
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = X(t), label = t ? seconds(t * 1e-9) : "0";
      g.fillRect(x, top, 1, 4);
      if (x + g.measureText(label).width < width) g.fillText(label, x + 3, top + 9);
    }
  }
}
