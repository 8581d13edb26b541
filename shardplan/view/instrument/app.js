// The instrument: one view of a plan's data, in a widget (state in traits, a kernel that prices and plans) or on a page (state in it).

let instances = 0;

class App {
  constructor(root, source) {
    Object.assign(this, { root, source, number: ++instances, live: false, picked: {}, other: null, shown: null, limit: null, wish: null });
    this.read();
    this.timeline = new Timeline((n) => this.reveal(n));
    const column = (name, key, text, more = {}) => ({ name, key, text: text ?? ((row) => row[key]), ...more });
    const right = { right: true };
    this.arrays = new Table({
      label: "arrays", detail: (row) => detailPanel(this, row), words: (row) => `${row.name} ${row.type} ${row.spec} ${row.kind} ${row.line ?? ""}`,
      filters: [{ name: "kind", key: "kind" }],
      columns: [
        column("", null, (row) => arrayPicture(row, this.data.mesh), { style: "picture" }),
        column("array", "name", (row) => [h("span", { class: "path" }, breakable(row.name)), row.line ? h("small", {}, row.line) : ""], { style: "name" }),
        column("kind", "kind", null, { style: "phase wide" }), column("type", "type", (row) => h("code", {}, coloured(row.type, this.data.mesh)), { style: "wider" }),
        column("layout", "spec", (row) => h("code", {}, coloured(row.spec, this.data.mesh))),
        column("", "n", (row) => count(row.n), right), column("per device", "bytes", (row) => memory(row.bytes), right)],
    });
    this.collectives = new Table({
      label: "collectives", detail: (row) => detailPanel(this, row), words: (row) => Object.values(row).join(" "), sort: { key: "seconds", down: true },
      filters: [{ name: "pass", key: "phase" }, { name: "kind", key: "what" }, { name: "line", key: "line" }],
      columns: [
        column("line", "line", (row) => [row.line || "–", h("small", {}, row.phase)]),
        column("collective", "what", (row) => [h("span", {}, coloured(row.what, this.data.mesh)), h("small", { class: "path" }, row.name)], { style: "name" }),
        column("", "n", (row) => count(row.n), right), column("sent", "sent", (row) => bytes(row.sent), right), column("time", "seconds", (row) => seconds(row.seconds), right),
        column("exposed", "exposed", (row) => row.exposed === null ? "" : row.exposed > 0 ? h("span", { class: "worse" }, seconds(row.exposed)) : "hidden", right)],
    });
    this.buffers = new Table({
      label: "buffers at the peak", words: (row) => `${row.name} ${row.kind} ${row.line}`, filters: [{ name: "kind", key: "kind" }],
      columns: [
        column("buffer", "name", (row) => [h("span", { class: "path" }, breakable(row.name)), h("small", {}, row.line)]), column("kind", "kind", (row) => row.kind ? [h("i", { class: `dot m-${row.kind}` }), row.kind] : ""),
        column("", "n", (row) => count(row.n), right), column("per device", "bytes", (row) => memory(row.bytes), right), column("in memory", "start", (row) => this.lifetime(row), { style: "wide" })],
    });
    this.roles = new Table({
      label: "ops by line", words: (row) => Object.values(row).join(" "), filters: [{ name: "pass", key: "phase" }],
      columns: [
        column("line", "line", (row) => [row.line || "–", h("small", {}, row.function)]), column("pass", "phase", null, { style: "phase" }), column("op", "primitive"), column("", "n", (row) => count(row.n), right),
        column("compute", "seconds", (row) => seconds(row.seconds), right), column("sharded", "strategy", (row) => h("code", {}, row.strategy || "replicated"), { style: "wide" })],
    });
    for (const table of [this.arrays, this.collectives]) table.onopen = (id) => { if (id) this.ask(id); if (table === this.collectives) this.timeline.select(this.data.collectives.findIndex((c) => c.id === id)); };
    this.tabs = [["Arrays", this.arrays], ["Collectives", this.collectives], ["Peak memory", this.buffers], ["Ops", this.roles]];
    this.tab = 0;
    this.frame = { head: h("div"), bar: h("div"), targets: h("div"), tabs: h("div", { class: "tabs", role: "tablist" }), panes: h("div", { role: "tabpanel" }) };
    root.append(h("div", { class: "instrument" }, h("span", { class: "probe" }), this.frame.head, this.frame.bar, this.frame.targets, h("section", {}, h("h2", {}, "Time line of one device"), this.timeline.element), h("section", {}, this.frame.tabs, this.frame.panes)));
    this.drawTabs();
    this.all();
    this.stops = ["data", "answers", "history", "current", "work", "pareto", "pickers", "message"].map((name) => source.on(name, () => this.changed(name)));
    this.stops.push(source.onreply((reply) => this.reply(reply)));
    const redraw = () => { root.host.style.colorScheme = scheme(root.host.parentNode); this.timeline.draw(); };
    const dark = window.matchMedia("(prefers-color-scheme: dark)"), theme = new MutationObserver(redraw), place = new ResizeObserver(redraw);
    dark.addEventListener("change", redraw);
    place.observe(root.host);  // once it is in the page
    for (const el of [document.documentElement, document.body]) theme.observe(el, { attributes: true });
    theme.observe(document.head, { childList: true });
    this.stops.push(() => dark.removeEventListener("change", redraw), () => theme.disconnect(), () => place.disconnect());
    this.send({ do: "hello" });
  }

  read() {
    const get = (name, other) => this.source.get(name) ?? other;
    Object.assign(this, { data: get("data", {}), answers: get("answers", {}), history: get("history", []), current: get("current", 0), work: get("work", null), pareto: get("pareto", []), pickers: get("pickers", {}), message: get("message", "") });
    if (this.work && !this.work.what) this.work = null;
  }

  stop() { this.stops.forEach((f) => f?.()); }
  send(message) { this.source.send(message); }
  ask(id) { if (this.live && (!this.answers[id] || this.answers[id].pending?.length)) this.send({ do: "ask", id }); }
  take(row, choice) { this.shown = null; this.send({ do: "take", id: row.id, choice }); }
  /** Plans for so much memory: of several wishes soon after each other, as by arrow keys, and of those while something is planned, the last. */
  planFor(bytes) {
    this.limit = bytes;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { if (this.work) this.wish = bytes; else this.send({ do: "memory", bytes }); }, 400);
  }
  compare(n) { this.source.static ? null : this.send({ do: "compare", a: n, b: this.current }); }
  copy(what) { if (this.source.static) this.reply({ copied: what, text: this.source.get("copies")?.[what] ?? "" }); else { this.shown = h("p", { class: "note" }, `writing ${what} …`); this.drawBar(); this.send({ do: "copy", what }); } }

  reply(reply) {
    if (reply.hello) { this.live = true; this.all(); }
    if (reply.text !== undefined) {
      const area = h("textarea", { class: "copied", readonly: true, rows: Math.min(14, reply.text.split("\n").length + 1), "aria-label": reply.copied ? `${reply.copied} to copy` : "comparison", spellcheck: "false" });
      area.value = reply.text;
      const note = h("span", { class: "soft" }, reply.copied ? "" : reply.title ?? "");
      const close = h("button", { class: "small", onclick: () => { this.shown = null; this.drawBar(); } }, "Close");
      this.shown = h("div", { class: "shown" }, h("div", { class: "buttons" }, note, h("span", { class: "gap" }), close), area);
      this.drawBar();
      if (reply.copied) navigator.clipboard?.writeText(reply.text).then(() => { note.textContent = "copied"; }, () => { note.textContent = "select and copy"; area.select(); });
    }
  }

  changed(name) {
    const before = this.data;
    this.read();
    if (this.data !== before) { this.picked = {}; this.limit = this.wish; this.all(); }  // other traits may come first: old rows do not fit a new mesh
    else if (name === "data") return;
    else if (name === "answers") this.redrawOpen();
    else if (name === "pareto") this.drawCurve();
    else if (name === "pickers") this.drawTargets();
    else if (name === "work" && this.work && this.frame.bar.querySelector(".work")) this.frame.bar.querySelector(".work .soft").textContent = this.work.state ?? "";
    else {
      if (name === "current" || name === "history") this.drawHead();  // a front end may set one trait after the other
      this.drawBar();
      if (name === "work" && !this.work && this.wish) { this.send({ do: "memory", bytes: this.wish }); this.wish = null; }
    }
  }

  all() {
    this.drawHead();
    this.drawBar();
    this.drawTargets();
    this.timeline.set(this.data);
    this.arrays.set(this.data.arrays);
    this.collectives.set(this.data.collectives);
    this.buffers.note = this.data.memory.where ? `the peak is at ${this.data.memory.where}` : "";
    this.buffers.set(this.data.memory.buffers.map((row, n) => ({ id: `b${n}`, ...row })));
    this.roles.set(this.data.roles);
    for (const table of [this.arrays, this.collectives]) if (table.open) this.ask(table.open);
  }

  redrawOpen() { for (const table of [this.arrays, this.collectives]) if (table.open) this.redraw(table); }
  redrawDetail(row) { this.redraw(row.dims ? this.arrays : this.collectives); }
  /** Draws a table again; the choice that has the focus keeps it. */
  redraw(table) {
    const choices = () => [...table.body.querySelectorAll("input[type=radio]")], focused = choices().find((x) => x.matches(":focus"))?.value;
    table.draw();
    choices().find((x) => x.value === focused)?.focus();
  }

  drawHead() {
    const d = this.data, f = d.figures, first = this.history[0];
    const base = first && this.current ? first : null;
    const tile = (label, value, change, meter, more) => h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value, change ? h("small", {}, " ", change) : ""), meter, h("div", { class: "more" }, more));
    const share = (style, x, title) => h("span", { class: style, style: `width:${(100 * x).toFixed(2)}%`, title });
    const waits = f.total - f.compute, most = Math.max(f.limit ?? 0, f.peak) || 1;
    const stepMeter = h("div", { class: "meter" }, share("compute", f.compute / (f.total || 1), `compute ${seconds(f.compute)}`), share("exposed", waits / (f.total || 1), `exposed communication, and what hidden communication slows kernels by, ${seconds(waits)}`));
    const memoryMeter = h("div", { class: "meter" }, d.memory.kinds.map((kind, n) => share(`m-${/^[a-z]+$/.test(kind) ? kind : "other"}`, d.memory.at_peak[n] / most, `${kind} ${memory(d.memory.at_peak[n])}`)));
    this.frame.head.replaceChildren(h("header", {},
      h("h1", {}, d.title, h("span", { class: "axes" }, d.mesh.map(([a, n], k) => h("span", { class: `chip a${k % 6}` }, h("i"), a, h("b", {}, n))))),
      h("p", { class: "sub" }, `priced as ${d.cluster}; ${d.quality}`, d.saves ? `; saves ${d.saves}` : "")),
    h("div", { class: "tiles" },
      tile("Predicted step", seconds(f.total), base && delta(f.total, base.seconds, (x) => percent(x / base.seconds)), stepMeter, d.parts),
      tile("Peak memory per device", memory(f.peak), base && delta(f.peak, base.peak, memory), memoryMeter, f.limit ? `${percent(f.peak / f.limit)} of the budget, ${memory(f.limit)}` : "no limit"),
      tile("Sent per device and step", f.sent ? bytes(f.sent) : "nothing", base && delta(f.sent, base.sent, bytes), "", `${d.collectives.reduce((n, c) => n + c.runs, 0)} reshards, ${d.collectives.length} kinds`)));
  }

  drawBar() {
    const active = this.root.activeElement, label = active?.getAttribute("aria-label"), text = active?.matches("input.name") ? active.value : null;
    const same = label ? `[aria-label="${CSS.escape(label)}"]` : active?.className ? `.${active.className.split(" ").join(".")}` : null;
    this.frame.bar.replaceChildren(this.live || this.history.length > 1 || this.source.static ? bar(this) : "");
    const again = same && !active.isConnected && this.frame.bar.querySelector(same);
    if (again) { again.focus(); if (text !== null) again.value = text; }
    for (const button of this.frame.panes.querySelectorAll("button.take")) button.disabled = !!this.work || !button.closest(".choices") || !this.picked[button.closest(".choices").dataset.for];
    this.idle();
  }

  drawTargets() { this.frame.targets.replaceChildren(targets(this)); this.drawCurve(); }
  drawCurve() { this.frame.targets.querySelector(".seen")?.replaceChildren(...curve(this)); this.idle(); }

  /** What cannot be begun while something is planned. */
  idle() {
    for (const button of this.frame.targets.querySelectorAll("button")) button.disabled = !!this.work || (button.matches(".retarget") && !this.otherTarget());
  }

  drawTabs() {
    const choose = (n) => { this.tab = n; this.drawTabs(); this.frame.tabs.children[n].focus(); };
    this.frame.tabs.replaceChildren(...this.tabs.map(([name], n) => h("button", { role: "tab", "aria-selected": String(n === this.tab), tabindex: n === this.tab ? 0 : -1, onclick: () => choose(n), onkeydown: (e) => { const move = { ArrowRight: 1, ArrowLeft: -1 }[e.key]; if (move) choose((n + move + this.tabs.length) % this.tabs.length); } }, name)));
    this.frame.panes.replaceChildren(this.tabs[this.tab][1].element);
  }

  reveal(n) { this.tab = 1; this.drawTabs(); this.collectives.reveal(this.data.collectives[n].id); this.timeline.select(n); this.ask(this.data.collectives[n].id); }

  lifetime(row) {
    if (row.start === undefined) return "";
    const end = this.timeline.end, a = 100 * row.start / end, b = 100 * Math.max(row.end - row.start, 0.005 * end) / end;
    return h("span", { class: "life", title: `${seconds(row.start * 1e-9)} to ${seconds(row.end * 1e-9)}` }, h("span", { class: `m-${row.kind || "other"}`, style: `left:${a.toFixed(2)}%;width:${Math.min(b, 100 - a).toFixed(2)}%` }));
  }
}

/** The colour scheme around an element, of whatever front end: light text stands on dark ground. */
function scheme(el) {
  const text = getComputedStyle(el?.isConnected ? el : document.body).color, [x, y, z] = text.replace(/^[\w-]+\([a-z][\w-]* |^[\w-]+\(/, "").match(/[\d.]+/g).map(Number);
  const luma = 0.2126 * x + 0.7152 * y + 0.0722 * z, light = /^rgb/.test(text) ? luma / 255 : /^color/.test(text) ? luma : /^ok/.test(text) ? x : x / 100;
  return light > 0.5 ? "dark" : "light";
}

/** Mounts an instrument in a shadow root of `el`, so that the style around it does not reach it. */
function mount(el, source, css) {
  const host = h("div", { class: "shardplan-instrument", style: `color-scheme:${scheme(el)}` }), root = host.attachShadow({ mode: "open" });
  root.append(Object.assign(document.createElement("style"), { textContent: css }));
  el.append(host);
  return new App(root, source);
}

/** anywidget's entry. */
function render({ model, el }) {
  const app = mount(el, {
    get: (name) => model.get(name),
    on: (name, act) => { model.on(`change:${name}`, act); return () => model.off(`change:${name}`, act); },
    send: (message) => { try { model.send(message); } catch { /* a saved notebook without its kernel */ } },
    onreply: (act) => { const take = (message) => act(message); model.on("msg:custom", take); return () => model.off("msg:custom", take); },
  }, model.get("css"));
  return () => app.stop();
}

if (typeof document !== "undefined") for (const el of document.querySelectorAll("[data-shardplan-page]:not([data-ready])")) {
  el.dataset.ready = "yes";
  const state = JSON.parse(document.getElementById("shardplan-data").textContent);
  mount(el, { static: true, get: (name) => state[name], on: () => () => {}, send: () => {}, onreply: () => () => {} }, document.getElementById("shardplan-style").textContent);
}

export default { render };
