// How elements are made and amounts are written: text goes in as text only, so that no name of a program can become markup.

const SVG = "http://www.w3.org/2000/svg";
const svgTags = new Set(["svg", "g", "rect", "path", "line", "circle", "text", "title", "polyline"]);

/** An element with properties (`on...` are listeners, `class`, `data-*` and `aria-*` attributes) and children, text among them. */
function h(tag, props = {}, ...children) {
  const el = svgTags.has(tag) && tag !== "title" ? document.createElementNS(SVG, tag)
    : tag === "title" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") el[name] = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat(3).filter((x) => x !== undefined && x !== null && x !== false).map((x) => x.nodeType ? x : String(x)));
  return el;
}

function amount(n, units) {
  let [unit, size] = units[units.length - 1];
  for (const [u, s] of units) if (Math.abs(n) < 999.5 * s) { [unit, size] = [u, s]; break; }
  const x = n / size, digits = Math.abs(x) >= 99.95 ? 0 : Math.abs(x) >= 9.995 ? 1 : 2;
  const text = x.toFixed(digits);
  return `${text.includes(".") ? text.replace(/\.?0+$/, "") : text} ${unit}`;
}
const SECONDS = [["ns", 1e-9], ["µs", 1e-6], ["ms", 1e-3], ["s", 1]];
const BYTES = [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]];
const MEMORY = [["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]];
const seconds = (x) => amount(x, SECONDS), bytes = (x) => amount(x, BYTES), memory = (x) => amount(x, MEMORY);
const percent = (x) => { const p = 100 * x; return p === 0 ? "0 %" : Math.abs(p) < 0.01 ? "<0.01 %" : `${p.toPrecision(Math.abs(p) < 9.95 ? 2 : 3).replace(/\.0+$/, "")} %`; };
const count = (n) => n === 1 ? "" : `×${Number.isInteger(n) ? n : n.toPrecision(3)}`;

/** A change as a cell: signed, and coloured where less is better. */
function delta(now, before, text) {
  const d = now - before;
  if (Math.abs(d) <= 5e-6 * Math.abs(before)) return h("span", { class: "same" }, "same");
  return h("span", { class: d < 0 ? "better" : "worse" }, `${d < 0 ? "−" : "+"}${text(Math.abs(d))}`);
}

/** Text in which the names of mesh axes after an "@", a quote or a bracket have the axis's colour. */
function coloured(text, axes) {
  if (!axes.length) return [text];
  const names = axes.map(([a]) => a.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).sort((a, b) => b.length - a.length).join("|");
  return text.split(new RegExp(`(?<=[@(,' ])(${names})(?=[,)\\]'} ]|$)`)).map((part, n) =>
    n % 2 ? h("em", { class: `a${axes.findIndex(([a]) => a === part) % 6}` }, part) : part);
}

/** A path that may break after slashes. */
const breakable = (path) => path.split("/").flatMap((x, n) => n ? ["/", h("wbr"), x] : [x]);

/** The colour that a CSS colour expression has here and now. */
function colour(root, expression) {
  const probe = root.querySelector(".probe");
  probe.style.color = "";
  probe.style.color = expression;
  return getComputedStyle(probe).color;
}
