// Pictures: an array cut into its shards, which device of the mesh holds which of them, and seconds against memory.

const MAX_BLOCKS = 16, MAX_CELLS = 256;

/** An array of at most two shown dims as a rectangle of its shards, in the colours of the mesh axes that cut it. */
function arrayPicture(row, mesh, wide = 72) {
  const order = row.shape.map((_, d) => d).sort((a, b) => (row.dims[a].length ? 0 : 1) - (row.dims[b].length ? 0 : 1) || (row.shape[a] === 1) - (row.shape[b] === 1) || b - a);
  const shown = order.slice(0, 2).sort((a, b) => a - b);
  const [down, across] = shown.length === 2 ? shown.map((d) => row.dims[d]) : [[], shown.length ? row.dims[shown[0]] : []];
  const size = (axes) => Math.min(MAX_BLOCKS, axes.reduce((n, a) => n * mesh[a][1], 1));
  const ratio = shown.length === 2 ? Math.min(3.6, Math.max(0.5, Math.sqrt((row.shape[shown[1]] || 1) / (row.shape[shown[0]] || 1)))) : 7;
  const width = ratio >= 1.9 ? wide : Math.round(0.44 * wide * ratio), height = Math.max(8, Math.round(ratio >= 1.9 ? wide / ratio / 1.2 : 0.44 * wide));
  const svg = h("svg", { class: "array", width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}`, role: "img", "aria-label": pictureTitle(row, mesh) });
  const axes = [...down, ...across];
  if (!axes.length) {
    svg.append(h("rect", { class: "replicated", width, height, rx: 1.5 }));
    return svg;
  }
  const rows = size(down), columns = size(across), gap = Math.max(rows, columns) > 8 ? 0.8 : 1.5;
  const w = (width - gap * (columns - 1)) / columns, t = (height - gap * (rows - 1)) / rows;
  for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++) {
    const at = { x: x * (w + gap), y: y * (t + gap), width: w, height: t, rx: Math.min(1.5, w / 4, t / 4) };
    svg.append(h("rect", { class: `a${axes[axes.length - 1] % 6}`, ...at }));
    if (axes.length > 1) svg.append(h("path", { class: `a${axes[0] % 6}`, d: `M${at.x} ${at.y} h${w} l${-w} ${t} z` }));
  }
  return svg;
}

function pictureTitle(row, mesh) {
  const local = row.shape.map((n, d) => n / row.dims[d].reduce((k, a) => k * mesh[a][1], 1));
  const shards = row.dims.flat().reduce((k, a) => k * mesh[a][1], 1);
  return `each device holds ${local.join("×") || "a number"}${shards > 1 ? `, 1/${shards} of ${row.shape.join("×")}` : ", all of it"}`;
}

/** The mesh as a grid of devices, each with the shard that it holds: equal numbers and shades are equal shards. */
function meshPicture(row, mesh) {
  const total = mesh.reduce((n, [, k]) => n * k, 1), used = [...new Set(row.dims.flat())];
  const shards = used.reduce((n, a) => n * mesh[a][1], 1);
  const figure = h("figure", { class: "shards" });
  if (!mesh.length || total > MAX_CELLS) {
    figure.append(h("figcaption", {}, `${shards} shard${shards > 1 ? "s" : ""} on ${total} devices: ${pictureTitle(row, mesh)}`));
    return figure;
  }
  const columns = mesh[mesh.length - 1][1], coordinates = (n) => { const at = []; for (let a = mesh.length - 1; a >= 0; a--) { at[a] = n % mesh[a][1]; n = Math.floor(n / mesh[a][1]); } return at; };
  const grid = h("div", { class: "devices", style: `grid-template-columns:repeat(${columns},minmax(0,1fr))` });
  for (let n = 0; n < total; n++) {
    const at = coordinates(n), shard = used.reduce((k, a) => k * mesh[a][1] + at[a], 0);
    const where = mesh.map(([name], a) => `${name}=${at[a]}`).join(", ");
    grid.append(h("span", { class: "device", style: `--part:${shards > 1 ? Math.round(14 + 62 * shard / (shards - 1)) : 0}%`, title: `device ${n} (${where}) holds shard ${shard + 1} of ${shards}` }, shards > 1 ? shard + 1 : "all"));
  }
  const [across, down] = [mesh[mesh.length - 1], mesh[mesh.length - 2]];
  figure.append(
    h("figcaption", {}, h("b", { class: `a${(mesh.length - 1) % 6}` }, `${across[0]} →`), " ", down && h("b", { class: `a${(mesh.length - 2) % 6}` }, `${down[0]} ↓`), " which shard a device holds"),
    grid, h("figcaption", {}, pictureTitle(row, mesh)));
  return figure;
}

/** Seconds against peak memory of the plans that were found under other limits; the slider's value is a line. */
function paretoPicture(points, limit, current, choose) {
  const W = 300, H = 84, pad = 8;
  const svg = h("svg", { class: "pareto", viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": points.length ? `seconds against peak memory of ${points.length} plans` : "no other plans yet" });
  const all = [...points, current], xs = all.map((p) => p.peak), ys = all.map((p) => p.seconds);
  const [x0, x1, y0, y1] = [Math.min(...xs, limit ?? Infinity), Math.max(...xs, limit ?? 0), Math.min(...ys), Math.max(...ys)];
  const X = (x) => pad + (W - 2 * pad) * (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5), Y = (y) => H - pad - (H - 2 * pad) * (y1 > y0 ? (y - y0) / (y1 - y0) : 0.5);
  if (limit) svg.append(h("line", { class: "limit", x1: X(limit), x2: X(limit), y1: 0, y2: H }));
  const sorted = points.map((p, n) => ({ ...p, n })).sort((a, b) => a.peak - b.peak || a.seconds - b.seconds);
  let best = Infinity, path = "";
  for (const p of sorted) if (p.seconds < best) { path += path ? ` H${X(p.peak)} V${Y(p.seconds)}` : `M${X(p.peak)} ${Y(p.seconds)}`; best = p.seconds; }
  if (path) svg.append(h("path", { class: "front", d: path + ` H${W - pad}` }));
  for (const p of sorted) {
    const name = `${seconds(p.seconds)} with ${memory(p.peak)}`, act = { onclick: () => choose(p.n), onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(p.n); } } };
    svg.append(h("circle", { class: "point", r: 4, cx: X(p.peak), cy: Y(p.seconds), tabindex: 0, role: "button", "aria-label": `show the plan of ${name}`, ...act }, h("title", {}, name)));
  }
  svg.append(h("circle", { class: "point current", "pointer-events": "none", r: 5, cx: X(current.peak), cy: Y(current.seconds) }, h("title", {}, `this plan: ${seconds(current.seconds)} with ${memory(current.peak)}`)));
  return svg;
}
