// What an open row says: its shards, what other layouts would cost, who makes and reads it; and the bar of what-ifs above.

/** The panel below an open row; `app` knows answers and takes choices. */
function detailPanel(app, row) {
  const data = app.data, answer = app.answers[row.id], left = h("div", { class: "pictures" });
  if (row.dims) left.append(meshPicture(row, data.mesh));
  else left.append(h("dl", { class: "links" }, ...[["array", row.name], ["made at", row.maker], ["read at", `${row.line} by ${row.reader}`], ["from", row.from], ["to", row.to]]
    .flatMap(([k, v]) => v ? [h("dt", {}, k), h("dd", {}, coloured(v, data.mesh), k === "read at" && data.lines[row.line] ? h("code", { class: "source" }, data.lines[row.line]) : "")] : [])));
  if (row.dims && row.line && data.lines[row.line]) left.append(h("code", { class: "source" }, data.lines[row.line]));
  const right = h("div", { class: answer?.estimated ? "choices estimated" : "choices", "data-for": row.id });
  if (!answer) right.append(h("p", { class: "note" }, app.live ? "pricing its other layouts …" : app.data.timeline ? "Its other layouts were not priced: ask plan.why, or open this plan with plan.explore()." : "A plan file has no prices of other layouts: plan the step again."));
  else if (answer.error) right.append(h("p", { class: "error" }, answer.error));
  else right.append(choiceTable(app, row, answer), whoUses(answer));
  return h("div", { class: "panel" }, left, right);
}

const PRICED = 6;  // choices that are given figures

function choiceTable(app, row, answer) {
  const chosen = answer.chosen, picked = app.picked[row.id], name = `choice-${app.number}-${row.id}`;
  const line = (c, own) => h("tr", { class: [own ? "own" : "", c.fits ? "" : "unfit", picked === c.text && !own ? "picked" : ""].join(" ").trim() },
    h("td", {}, h("label", {}, h("input", { type: "radio", name, value: c.text, checked: own ? !picked : picked === c.text, disabled: !own && !c.fits, onchange: () => { app.picked[row.id] = own ? null : c.text; app.redrawDetail(row); } }), h("code", {}, coloured(c.text, app.data.mesh)), c.fits ? "" : h("small", {}, " does not fit"))),
    h("td", { class: "n" }, own ? seconds(c.seconds) : delta(c.seconds, chosen.seconds, (x) => `${seconds(x)} (${percent(x / chosen.seconds)})`)),
    h("td", { class: "n" }, own ? memory(c.peak) : delta(c.peak, chosen.peak, memory)),
    h("td", { class: "n" }, own ? bytes(c.sent) : delta(c.sent, chosen.sent, bytes)));
  const pending = answer.pending?.length ?? 0, space = Array.from({ length: Math.min(PRICED, pending) }, () => h("tr", {}, h("td", { colspan: 4 }, "…")));  // so that nothing moves when they come
  const rest = [answer.unpriced && `${answer.unpriced} cost more on the plan's network and were not scheduled`, answer.impossible.length && `${answer.impossible.length} cannot be made near this plan`].filter(Boolean);
  const take = h("button", { class: "primary take", disabled: !picked || !app.live || !!app.work, onclick: () => app.take(row, picked) }, picked ? `Replan with ${picked}` : "Replan with another layout");
  return h("div", {},
    h("table", { class: "layouts", "aria-label": `layouts of ${row.name}` },
      h("thead", {}, h("tr", {}, h("th", {}, row.n > 1 ? `layout of all ${row.n}` : "layout"), h("th", { class: "n" }, "step"), h("th", { class: "n" }, "peak"), h("th", { class: "n" }, "sent"))),
      h("tbody", {}, line(chosen, true), answer.choices.map((c) => line(c, false)), space)),
    answer.choices.length || pending ? "" : h("p", { class: "note" }, "It has no other layout here."),
    app.live && answer.choices.length ? h("div", { class: "act" }, take) : "",
    pending ? h("p", { class: "note" }, app.live ? `pricing ${pending} other layouts …` : `${pending} other layouts were not priced.`) : h("p", { class: "note" }, ["Of the whole step, the ops nearby adapted, all others as they are", ...rest].join("; "), ".", answer.estimated ? app.live ? " Estimated at the plan's prices; the steps are being scheduled …" : " Estimated at the plan's prices: the steps were not scheduled." : ""));
}

function whoUses(answer) {
  const list = (title, items) => items.length ? [h("dt", {}, title), ...items.map((x) => h("dd", {}, x))] : [];
  const reads = answer.readers.map((r) => h("span", {}, h("span", { class: "phase" }, r.phase), ` ${r.what} ${count(r.n)} ${r.how}`, r.collectives ? h("span", { class: "moved" }, `, ${r.collectives}: ${bytes(r.sent)}, ${seconds(r.seconds)}`) : ""));
  return h("details", { class: "uses", open: true }, h("summary", {}, "why"), h("dl", {}, list("made by", [answer.maker]), list("read by", reads), list("what binds", answer.constraints), list("call stack", answer.stack)));
}

/** The bar of what-ifs: progress, undo, history, compare and copy. */
function bar(app) {
  const names = app.history.map((x, n) => h("option", { value: n }, `${n}  ${x.name}`));
  const select = (label, value, act) => { const el = h("select", { "aria-label": label, onchange: (e) => act(Number(e.target.value)) }, names.map((o) => o.cloneNode(true))); el.value = value; return el; };
  const now = app.history[app.current] ?? {}, first = app.history[0] ?? now;
  const busy = app.work && h("div", { class: "work", role: "status" }, h("span", { class: "spinner" }), h("span", {}, app.work.what), h("span", { class: "soft" }, app.work.state ?? ""), h("button", { class: "small cancel", onclick: () => { app.wish = null; app.send({ do: "cancel" }); } }, "Cancel"));
  const steps = app.history.length > 1 ? h("div", { class: "scroll" }, h("table", { class: "history", "aria-label": "what-ifs" }, h("tbody", {}, app.history.map((x, n) =>
    h("tr", { class: n === app.current ? "own" : "" },
      h("td", {}, h("button", { class: "head", "aria-current": n === app.current ? "true" : null, onclick: () => app.send({ do: "show", n }) }, `${n}`)),
      h("td", {}, h("input", { class: "name", "aria-label": `name of what-if ${n}`, value: x.name, onchange: (e) => app.send({ do: "name", n, name: e.target.value }) })),
      h("td", { class: "n" }, seconds(x.seconds)), h("td", { class: "n" }, n ? delta(x.seconds, first.seconds, (d) => percent(d / first.seconds)) : ""),
      h("td", { class: "n" }, memory(x.peak)), h("td", { class: "n" }, bytes(x.sent)), h("td", { class: "soft" }, x.mesh)))))) : "";
  const other = app.history.length > 1 ? [h("span", { class: "soft" }, "compare with"), select("compare with", app.other ?? now.parent ?? 0, (n) => { app.other = n; app.compare(n); })] : "";
  return h("section", { class: "bar" },
    h("div", { class: "buttons" },
      !app.source.static && h("button", { class: "undo", disabled: !app.live || now.parent === null || now.parent === undefined, onclick: () => app.send({ do: "undo" }) }, "Undo"),
      !app.source.static && h("button", { class: "anew", disabled: !app.live || !!app.work || !now.pins, title: "plan the whole step again with the pins so far; what was chosen for results and collectives is left to the planner", onclick: () => app.send({ do: "anew" }) }, "Plan anew with these pins"),
      other, h("span", { class: "gap" }),
      app.source.static && h("span", { class: "soft" }, "what-ifs: those priced already; plan.explore() prices and plans others"),
      ["pins", "code", "JSON"].map((what) => h("button", { class: `copy ${what.toLowerCase()}`, onclick: () => app.copy(what.toLowerCase()) }, `Copy ${what}`))),
    steps, busy, app.message ? h("p", { class: "error", role: "alert" }, app.message) : "", app.shown ?? "");
}

/** The memory slider with the curve of seconds against peak, and the pickers of mesh and cluster. */
function targets(app) {
  const now = app.data.figures, pick = app.pickers;
  const options = app.data.options.length ? h("p", { class: "note" }, "compiled with ", ...app.data.options.flatMap((x) => [h("code", {}, x), " "])) : "";
  if (!app.live || !pick.most) return options;
  const limit = app.limit ?? now.limit ?? now.peak, low = pick.least, value = (x) => low * (pick.most / low) ** x;
  const place = Math.min(1, Math.max(0, Math.log(limit / low) / Math.log(pick.most / low)));
  const shown = h("output", {}, memory(limit));
  const slider = h("input", { type: "range", class: "memory", min: 0, max: 1, step: 0.005, value: place, "aria-label": "memory per device", oninput: (e) => { shown.textContent = memory(value(Number(e.target.value))); }, onchange: (e) => app.planFor(value(Number(e.target.value))) });
  slider.value = place;
  const here = { mesh: app.data.mesh.map(([a, n]) => `${a}=${n}`).join(", "), cluster: app.data.cluster };
  const picker = (name, all) => {
    const el = h("select", { class: name, "aria-label": name, onchange: () => app.idle() }, [...new Set([here[name], ...all])].map((x) => h("option", { value: x }, x)));
    el.value = here[name];
    return el;
  };
  const mesh = picker("mesh", pick.meshes), cluster = picker("cluster", pick.clusters);
  const go = h("button", { class: "retarget", onclick: () => app.send({ do: "target", mesh: mesh.value, cluster: cluster.value }) }, "Plan for it");
  app.otherTarget = () => mesh.value !== here.mesh || cluster.value !== here.cluster;
  return h("section", { class: "targets" },
    h("div", {}, h("h2", {}, "Memory per device"), h("div", { class: "slide" }, slider, shown), h("div", { class: "seen" })),
    h("div", {}, h("h2", {}, "Mesh and cluster"), h("div", { class: "picks" }, h("label", {}, "mesh ", mesh), h("label", {}, "cluster ", cluster), go),
      options || h("p", { class: "note" }, "XLA's compiler options are left as they are.")));
}

/** The curve below the slider, and the button that finds it. */
function curve(app) {
  const now = app.data.figures, more = app.pickers.more !== false;
  const say = app.pareto.length ? "Each point is a plan under another limit: peak to the right, seconds upwards." : "";
  const limit = app.limit ?? (now.limit < 1.6 * now.peak ? now.limit : null);
  return [paretoPicture(app.pareto, limit, { peak: now.peak, seconds: now.total }, (n) => app.send({ do: "point", n })),
    h("p", { class: "note" }, say, " ", more && h("button", { class: "small curve", onclick: () => app.send({ do: "pareto" }) }, app.pareto.length ? "Find more points" : "Find seconds against memory"))];
}
