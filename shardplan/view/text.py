"""A plan as text: what it costs, where inputs live, what is sent and why, and the user's own lines with the choice beside them.

Every line has at most 120 columns, no colours, and is the same for the same plan.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from shardplan.plan import Plan, PlanComparison, PlanDiff
from shardplan.plan.data import MemoryReport, PlanDecision
from shardplan.units import clean, fit, fit_middle, format_bytes, format_count, format_memory, format_percent, format_seconds
from shardplan.view import rows

WIDTH = 120
MOST_ROWS = 48
MOST_CHANGES = 16  # ops of a diff, the dearest ones


def summary(plan: Plan) -> str:
    """Four lines: the mesh, how good the plan is, seconds per step, peak memory."""
    s, sent = plan.seconds, plan.comm_bytes
    devices = f"{plan.mesh.n_devices} device{'s' * (plan.mesh.n_devices != 1)}"
    return "\n".join(
        [
            fit(clean(f"mesh    {plan.mesh} ({devices}), priced as {plan.cluster}"), WIDTH),
            f"plan    {quality(plan)}",
            f"step    {format_seconds(s['total'])} predicted = {parts(plan, ' + ')}"
            + (f"; {format_bytes(sent)} through collectives per device" if sent else "; nothing is sent"),
            f"memory  {_peak(plan.memory_report)}",
        ]
    )


def parts(plan: Plan, joint: str = ", ") -> str:
    """What the seconds of a step are made of."""
    s = plan.seconds
    behind = f" ({format_seconds(s['hidden'])} of it behind compute)" if s["hidden"] else ""
    return f"{format_seconds(s['compute'])} compute{joint}{format_seconds(s['communication'])} communication{behind}"


def quality(plan: Plan) -> str:
    """How the plan was found and what is proven of it."""
    by = {"ilp": "integer program", "propagation": "propagation", "recursive": "recursive search"}.get(plan.search, clean(plan.search))
    alike = ", repeated layers alike" if plan.symmetric_layers else ""
    if plan.status == "optimal" or plan.gap <= 1e-6:
        return f"optimal ({by}{alike})"
    proof = f"at most {format_percent(plan.gap)} from the optimum" if plan.gap < 1 else "nothing proven"
    found = "what propagation found" if plan.status == "fallback" else "feasible"
    return f"{found}, {proof} ({by}{alike})"


def explain(plan: Plan, source: bool = True) -> str:
    """All there is to say; `source=False` leaves the annotated source lines out."""
    lines = rows.lines(plan, source=source)
    parts = [
        summary(plan),
        _leaf_table(plan),
        _traffic_table(plan, lines),
        _annotated(plan, lines) if source else "",
        _conflicts(plan, rows.source_labels(lines)),
        _unknown(plan),
        memory_text(plan.memory_report),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


# ---- tables


def _table(cells: Sequence[Sequence[str]], right: Iterable[int], widths: Mapping[int, int], indent: str = "  ") -> list[str]:
    """Aligned rows, two spaces apart; columns of `right` stand right, those of `widths` are cut in the middle to fit."""
    right = frozenset(right)
    shown = [[fit_middle(c, widths.get(k, WIDTH)) for k, c in enumerate(row)] for row in cells]
    size = [max(len(row[k]) for row in shown) for k in range(len(shown[0]))]
    return [
        indent + "  ".join(c.rjust(n) if k in right else c.ljust(n) for k, (c, n) in enumerate(zip(row, size, strict=True))).rstrip()
        for row in shown
    ]


def short_path(path: str) -> str:
    """Long choices abbreviated: "{key,out,query,value}" as "{key,…}"."""
    return re.sub(r"\{([^{},]+),[^{}]{12,}\}", r"{\1,…}", path)


def _more(n: int, what: str) -> list[str]:
    return [f"  ... and {n} more {what}"] if n > 0 else []


def _leaf_table(plan: Plan) -> str:
    found = rows.leaf_rows(plan.inputs, plan.mesh)
    if not found:
        return "inputs: none"
    shown = found[:MOST_ROWS]
    types = [row.type for row in shown]
    specs = [clean(str(row.first.layout)) if row.first.layout.split_axes else "whole" for row in shown]
    room = WIDTH - 26 - min(max(map(len, types)), 40) - min(max(map(len, specs)), 30)
    cells, kind = [["inputs", "", "", "", "per device"]], None
    for n, title, path in _paths(shown, room):
        if shown[n].first.kind != kind:
            kind = shown[n].first.kind
            cells.append([f"{clean(kind)}:", "", "", "", ""])
        if title:
            cells.append([f"  {title}", "", "", "", ""])
        cells.append([f"  {path}", types[n], specs[n], format_count(shown[n].count), format_memory(shown[n].device_bytes)])
    table = _table(cells, right=(3, 4), widths={0: room, 1: 40, 2: 30}, indent="")
    return "\n".join(table + _more(len(found) - MOST_ROWS, "rows"))


def _paths(shown: Sequence[rows.LeafRow], room: int):
    """(row number, title, path): paths that are too long stand under a title with the start that they share."""
    for kind in dict.fromkeys(row.first.kind for row in shown):
        here = [(n, short_path(row.path)) for n, row in enumerate(shown) if row.first.kind == kind]
        long = [(n, path) for n, path in here if len(path) > room - 2]
        start = _common_start([path for _, path in long])
        yield from ((n, "", path) for n, path in here if len(path) <= room - 2)
        for k, (n, path) in enumerate(long):
            yield n, start if k == 0 else "", "  " * bool(start) + path[len(start) :]


def _common_start(paths: Sequence[str]) -> str:
    """ "a/b/" of "a/b/c" and "a/b/d"."""
    shared = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*(p.split("/")[:-1] for p in paths), strict=False))
    return "".join(f"{at[0]}/" for at in shared)


def _traffic_table(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    moved = [line for line in lines if line.traffic]
    if not moved:
        return "collectives: none"
    total = plan.seconds["total"] or 1.0
    moved.sort(key=lambda line: (-line.communication_s, line.place))
    head = ["collectives", "per step", "bytes", "time", "of step"]
    body, titles = [head], {}
    for line in moved[:MOST_ROWS]:
        titles[len(body)] = fit(f"  {line.place}  {line.code.strip()}".rstrip(), WIDTH)
        body += [
            [
                f"    {t.phase:<8}  {t}",
                f"{t.runs:.10g}",
                format_bytes(t.bytes) if t.kind != "slice" else "",
                format_seconds(t.seconds),
                format_percent(t.seconds / total),
            ]
            for t in line.traffic
        ]
    table = _table(body, right=(1, 2, 3, 4), widths={0: 72}, indent="")
    return "\n".join(_titled(table, titles) + _more(len(moved) - MOST_ROWS, "lines"))


def _titled(table: Sequence[str], titles: Mapping[int, str]) -> list[str]:
    """Rows with a title before some of them, by number."""
    return [line for n, row in enumerate(table) for line in ([titles[n], row] if n in titles else [row])]


# ---- the user's lines


def _annotated(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    texts = ["\n".join(_file(name, here)) for name, here in rows.annotated(plan, lines)]
    head = _columns("source lines, each with its results and reshards", "per step", "bytes", "time")
    return "\n\n".join([head, *texts]) if texts else ""


def _columns(left: str, runs: str, sent: str, seconds: str) -> str:
    return f"{fit(left, WIDTH - 28).ljust(WIDTH - 27)}{runs:>8}{sent:>10}{seconds:>9}".rstrip()


def _file(name: str, here: Sequence[rows.LineRow]):
    yield fit_middle(name, WIDTH)
    before = None
    for line in here:
        if before is not None and line.number > before + 1:
            yield "    ⋮"
        before = line.number
        indent = " " * min(len(line.code) - len(line.code.lstrip()), 24)
        yield f"{line.number:5d}  {fit(line.code, WIDTH - 7)}"
        for note, phase, text in rows.line_notes(line):
            sent = format_bytes(note.bytes) if note and note.bytes else ""
            took = format_seconds(note.seconds) if note and note.seconds else ""
            yield _columns(f"{' ' * 7}{indent}# {phase:<8}  {text}", format_count(note.runs) if note else "", sent, took)


def _conflicts(plan: Plan, source_labels: Mapping[tuple[str, int], str]) -> str:
    if not plan.conflicts:
        return ""
    total = plan.seconds["total"] or 1.0
    body, titles = [["pins that disagree", "bytes", "time", "of step"]], {}
    for n, c in enumerate(shown := plan.conflicts[:MOST_ROWS]):
        if n == 0 or c.pins != shown[n - 1].pins:
            titles[len(body)] = fit_middle(f"  {clean(rows.disagreement(c))}", WIDTH)
        body.append(
            [
                f"    {source_labels[c.file, c.line]}",
                format_bytes(c.bytes),
                format_seconds(c.seconds),
                format_percent(c.seconds / total),
            ]
        )
    table = _table(body, right=(1, 2, 3), widths={0: 72}, indent="")
    return "\n".join(_titled(table, titles) + _more(len(plan.conflicts) - MOST_ROWS, "places"))


def _unknown(plan: Plan) -> str:
    if not plan.unknown:
        return ""
    found = dict.fromkeys(plan.unknown)
    return "\n".join(
        ["kept whole on every device, for want of a rule (shardplan.register_rule adds one)"]
        + [fit(f"  {clean(primitive)} at {clean(source)}", WIDTH) for primitive, source in list(found)[:MOST_ROWS]]
        + _more(len(found) - MOST_ROWS, "ops")
    )


# ---- memory


def _peak(memory: MemoryReport) -> str:
    of = f" of {format_memory(memory.limit)} per device at the peak" if memory.limit else " per device at the peak, without a limit"
    where = f", {rows.where(memory.where)}" if memory.where else ""
    return fit(f"{format_memory(memory.peak)}{of}{where}", WIDTH - 8)


def memory_text(memory: MemoryReport) -> str:
    """Bytes per device at the peak, by category."""
    cells = [
        [clean(k), format_memory(v), format_percent(v / memory.peak if memory.peak else 0.0)] for k, v in memory.at_peak.items() if v
    ]
    cells.append(["together", format_memory(memory.peak), "100 %" if memory.peak else ""])
    if memory.limit:
        cells.append(["budget", format_memory(memory.limit), f"{format_percent(memory.peak / memory.limit)}", "used"])
    cells = [[*row, ""][:4] for row in cells]
    head = fit(f"memory per device at the peak{f', {rows.where(memory.where)}' if memory.where else ''}", WIDTH)
    return "\n".join([head, *_table(cells, right=(1, 2), widths={0: 40})])


# ---- several plans


def comparison_text(comparison: PlanComparison) -> str:
    """A row per search: the step's seconds, what of them is communication, peak memory, how far from the bound, planning time."""
    cells = [["search", "step", "communication", "memory", "from the bound", "planned in"]]
    for name, plan in comparison.plans.items():
        gap = comparison.gap(name)
        cells.append(
            [
                name,
                format_seconds(plan.seconds["total"]),
                format_seconds(plan.seconds["communication"]),
                format_memory(plan.memory_report.peak),
                "nothing proven" if not comparison.bound else format_percent(gap) if gap > 1e-6 else "optimal",
                format_seconds(sum(plan.planning_seconds.values())),
            ]
        )
    return "\n".join(_table(cells, right=range(1, 6), widths={}, indent=""))


# ---- two plans


def diff_text(diff: PlanDiff) -> str:
    """What the second plan does differently, and what that costs or saves."""
    a, b = diff.a, diff.b
    out = []
    if a.mesh != b.mesh:
        out.append(fit(clean(f"mesh      {a.mesh} -> {b.mesh}"), WIDTH))
    if a.cluster != b.cluster:
        out.append(fit(clean(f"cluster   {a.cluster} -> {b.cluster}"), WIDTH))
    if a.fingerprint != b.fingerprint:
        out.append("program   the plans are for different programs")
    for name, x, y, text in (
        ("step", a.seconds["total"], b.seconds["total"], format_seconds),
        ("compute", a.seconds["compute"], b.seconds["compute"], format_seconds),
        ("sent", a.comm_bytes, b.comm_bytes, format_bytes),
        ("memory", a.memory_report.peak, b.memory_report.peak, format_memory),
    ):
        change = "same" if x == y else f"{'+' if y > x else '-'}{format_percent(abs(y - x) / x)}" if x else "new"
        out.append(f"{name:<8}  {text(x):>9} -> {text(y):>9}   {change}")
    out += _diff_leaves(diff) + _diff_decisions(diff)
    if not diff:
        out.append("the plans split everything alike")
    return "\n".join(out) + "\n"


def _diff_leaves(diff: PlanDiff) -> list[str]:
    if not diff.leaves:
        return []
    known = {x.path: x for p in (diff.b, diff.a) for x in p.inputs}
    alike: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for n, (path, before, after) in enumerate(diff.leaves):
        leaf = known[path]
        texts = tuple("not there" if x is None else rows.type_text(leaf.dtype, leaf.shape, x) for x in (before, after))
        alike.setdefault((texts[0], texts[1]), []).append((path, n))
    cells = []
    for (x, y), paths in alike.items():
        cells += [(n[0], [short_path(path), x, "->", y, format_count(len(n))]) for path, n in rows.fold(paths, list(known))]
    cells.sort(key=lambda row: row[0])
    table = _table([c for _, c in cells[:MOST_ROWS]], right=(4,), widths={0: 48, 1: 27, 3: 27})
    return ["", "inputs", *table, *_more(len(cells) - MOST_ROWS, "rows")]


def _diff_decisions(diff: PlanDiff) -> list[str]:
    alike: dict[tuple, list[float]] = {}
    for (file, line, primitive, phase, _), x, y in diff.decisions:
        if primitive in ("arg", "out"):
            continue
        place = f"{clean(file)}:{line}" if file else "no line known"
        total = alike.setdefault((place, phase, clean(primitive), _strategy(x), _strategy(y)), [0, 0.0])
        total[0] += 1
        total[1] += max(d.runs * d.seconds + d.comm_seconds for d in (x, y) if d is not None)
    if not alike:
        return []
    dearest = set(sorted(alike, key=lambda key: -alike[key][1])[:MOST_CHANGES])
    cells = [
        [place, phase, primitive, x, "->", y if x != y else "other layouts", format_count(n)]
        for (place, phase, primitive, x, y), (n, _) in alike.items()
        if (place, phase, primitive, x, y) in dearest
    ]
    table = _table(cells, right=(6,), widths={0: 30, 2: 16, 3: 22, 5: 22})
    title = "inside the step: what each mesh axis splits, in the letters of the op's rule"
    return ["", title, *table, *_more(len(alike) - len(cells), "rows, of cheaper ops")]


def _strategy(decision: PlanDecision | None) -> str:
    if decision is None:
        return "left open"
    return clean(", ".join(f"{axis}: {letter}" for axis, letter in decision.strategy.items())) or "whole"
