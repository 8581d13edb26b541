// Tables that sort by a click on a column's head, filter by words, and open a row below itself; long ones show their first rows.

const SHOWN = 120;

class Table {
  /** `columns`: {name, key, text(row), value(row), right}; `detail(row)` is what a row opens to, `words(row)` what the filter reads. */
  constructor({ label, columns, detail, words, filters = [], sort = null, note = "" }) {
    Object.assign(this, { label, columns, detail, words, filters, note, sort: sort ?? { key: null, down: true }, open: null, chosen: {}, query: "" });
    this.body = h("tbody");
    this.head = h("tr");
    this.more = h("p", { class: "note" });
    this.search = h("input", { type: "search", placeholder: "filter", "aria-label": `filter ${label}`, oninput: (e) => { this.query = e.target.value.toLowerCase(); this.draw(); } });
    this.selects = filters.map(({ name, key }) => h("select", { "aria-label": name, "data-key": key, onchange: (e) => { this.chosen[key] = e.target.value; this.draw(); } }));
    this.element = h("div", { class: "table" }, h("div", { class: "filters" }, this.search, this.selects), h("div", { class: "scroll" }, h("table", { "aria-label": label }, h("thead", {}, this.head), this.body)), this.more);
  }

  set(rows) {
    this.rows = rows;
    this.filters.forEach(({ name, key }, n) => {
      const found = [...new Set(rows.map((row) => row[key]).filter(Boolean))];
      if (!found.includes(this.chosen[key])) this.chosen[key] = "";
      this.selects[n].replaceChildren(h("option", { value: "" }, `every ${name}`), ...found.map((x) => h("option", { value: x }, x)));
      this.selects[n].value = this.chosen[key];
      this.selects[n].hidden = found.length < 2;
    });
    if (!rows.some((row) => row.id === this.open)) this.open = null;
    this.draw();
  }

  reveal(id) {
    this.open = id;
    this.query = this.search.value = "";
    this.chosen = {};
    this.selects.forEach((s) => { s.value = ""; });
    this.draw();
    this.body.querySelector("tr.detail")?.previousSibling.scrollIntoView({ block: "nearest" });
  }

  found() {
    const words = this.query.split(/\s+/).filter(Boolean);
    const rows = this.rows.filter((row) => {
      const text = words.length ? this.words(row).toLowerCase() : "";
      return words.every((w) => text.includes(w)) && this.filters.every(({ key }) => !this.chosen[key] || row[key] === this.chosen[key]);
    });
    const column = this.columns.find((c) => c.key === this.sort.key);
    if (column) {
      const value = column.value ?? ((row) => row[column.key]);
      rows.sort((a, b) => { const x = value(a), y = value(b); return (x < y ? -1 : x > y ? 1 : 0) * (this.sort.down ? -1 : 1); });
    }
    return rows;
  }

  draw() {
    const found = this.found();
    this.head.replaceChildren(...this.columns.map((c) => {
      const here = c.key && this.sort.key === c.key;
      const sort = () => { this.sort = here ? { key: c.key, down: !this.sort.down } : { key: c.key, down: !!c.right }; this.draw(); };
      return h("th", { class: [c.right ? "n" : "", c.style ?? ""].join(" ").trim(), scope: "col", "aria-sort": here ? (this.sort.down ? "descending" : "ascending") : null },
        c.key && c.name ? h("button", { class: "head", onclick: sort }, c.name, here ? (this.sort.down ? " ↓" : " ↑") : "") : c.name);
    }));
    const out = [];
    let at = found.findIndex((row) => row.id !== undefined && row.id === this.open);
    const shown = found.slice(0, Math.max(SHOWN, at + 1));
    for (const row of shown) {
      const open = this.detail && row.id === this.open;
      const toggle = () => { this.open = open ? null : row.id; this.draw(); this.onopen?.(this.open, row); this.body.querySelector(`tr[data-id="${CSS.escape(row.id)}"]`)?.focus(); };
      out.push(h("tr", this.detail ? { class: open ? "row open" : "row", tabindex: 0, "data-id": row.id, "aria-expanded": String(!!open), onclick: toggle, onkeydown: (e) => {
        if (e.target === e.currentTarget && (e.key === "Enter" || e.key === " ")) { e.preventDefault(); toggle(); }
        const next = { ArrowDown: "nextSibling", ArrowUp: "previousSibling" }[e.key];
        if (next && e.target === e.currentTarget) { let el = e.currentTarget[next]; while (el && !el.dataset.id) el = el[next]; if (el) { e.preventDefault(); el.focus(); } }
      } } : {}, this.columns.map((c) => h("td", { class: [c.right ? "n" : "", c.style ?? ""].join(" ").trim() }, c.text(row)))));
      if (open) out.push(h("tr", { class: "detail" }, h("td", { colspan: this.columns.length }, this.detail(row))));
    }
    this.body.replaceChildren(...out);
    const hidden = found.length - shown.length;
    this.more.textContent = [hidden > 0 ? `and ${hidden} more rows: filter to see them` : "", !found.length ? "nothing found" : "", this.note].filter(Boolean).join("; ");
    this.more.hidden = !this.more.textContent;
  }
}
