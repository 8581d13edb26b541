"""A plan as text: what it costs, where inputs live, collectives by source line, and the user's lines with the choice as a comment.

Every line has at most 120 columns, no colours, and is the same for the same plan.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from shardplan.plan import Plan
from shardplan.plan.data import MemoryReport
from shardplan.units import clean, fit, fit_middle, format_bytes, format_count, format_memory, format_percent, format_seconds, table
from shardplan.view import rows

WIDTH = 120
MAX_ROWS = 48


def summary(plan: Plan) -> str:
    """Four lines: the mesh, how good the plan is, seconds per step, peak memory."""
    s, sent = plan.seconds, plan.comm_bytes
    devices = f"{plan.mesh.n_devices} device{'s' * (plan.mesh.n_devices != 1)}"
    return "\n".join(
        [
            fit(clean(f"mesh    {plan.mesh} ({devices}), priced as {plan.cluster}"), WIDTH),
            f"plan    {quality(plan)}",
            f"step    {format_seconds(s['total'])} predicted = {time_parts(plan, ' + ')}"
            + (f"; {format_bytes(sent)} through collectives per device" if sent else "; nothing is sent"),
            f"memory  {_peak(plan.memory_report)}",
        ]
    )


def time_parts(plan: Plan, joint: str = ", ") -> str:
    """The seconds of a step: compute, communication, and how much of that is hidden."""
    s = plan.seconds
    hidden = f" ({format_seconds(s['hidden'])} of it hidden)" if s["hidden"] else ""
    return f"{format_seconds(s['compute'])} compute{joint}{format_seconds(s['communication'])} communication{hidden}"


def quality(plan: Plan) -> str:
    """How the plan was found and what is proven of it."""
    by = {"ilp": "integer program", "propagation": "propagation", "recursive": "recursive search"}.get(plan.search, clean(plan.search))
    symmetric = ", symmetric layers" if plan.symmetric_layers else ""
    if plan.status == "optimal" or plan.gap <= 1e-6:
        return f"optimal ({by}{symmetric})"
    proof = f"at most {format_percent(plan.gap)} from the optimum" if plan.gap < 1 else "nothing proven"
    found = "what propagation found" if plan.status == "fallback" else "feasible"
    return f"{found}, {proof} ({by}{symmetric})"


def explain(plan: Plan, source: bool = True) -> str:
    """All there is to say; `source=False` leaves the annotated source lines out."""
    lines = rows.lines(plan, source=source)
    parts = [
        summary(plan),
        _leaf_table(plan),
        _collective_table(plan, lines),
        _annotated(plan, lines) if source else "",
        _conflicts(plan, rows.source_labels(lines)),
        _unknown(plan),
        memory_text(plan.memory_report),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


# ---- tables


def short_path(path: str) -> str:
    """Long choices abbreviated: "{key,out,query,value}" as "{key,…}"."""
    return re.sub(r"\{([^{},]+),[^{}]{12,}\}", r"{\1,…}", path)


def more(n: int, what: str) -> list[str]:
    """A line that counts what is left out; nothing where `n` is not positive."""
    return [f"  ... and {n} more {what}"] if n > 0 else []


def _leaf_table(plan: Plan) -> str:
    found = rows.leaf_rows(plan.inputs, plan.mesh)
    if not found:
        return "inputs: none"
    shown = found[:MAX_ROWS]
    types = [row.type for row in shown]
    specs = [row.layout for row in shown]
    room = WIDTH - 26 - min(max(map(len, types)), 40) - min(max(map(len, specs)), 30)
    cells, kind = [["inputs", "", "", "", "per device"]], None
    for n, title, path in _paths(shown, room):
        if shown[n].first.kind != kind:
            kind = shown[n].first.kind
            cells.append([f"{clean(kind)}:"])
        if title:
            cells.append([f"  {title}"])
        cells.append([f"  {path}", types[n], specs[n], format_count(shown[n].count), format_memory(shown[n].device_bytes)])
    return "\n".join(table(cells, right=(3, 4), widths={0: room, 1: 40, 2: 30}, indent="") + more(len(found) - MAX_ROWS, "rows"))


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
    """The folders that all paths share: "a/b/" of "a/b/c" and "a/b/d"."""
    shared = itertools.takewhile(lambda at: len(set(at)) == 1, zip(*(p.split("/")[:-1] for p in paths), strict=False))
    return "".join(f"{at[0]}/" for at in shared)


def _collective_table(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    moved = [line for line in lines if line.collectives]
    if not moved:
        return "collectives: none"
    total = plan.seconds["total"] or 1.0
    moved.sort(key=lambda line: (-line.communication_s, line.place))
    body: list[list[str] | str] = [["collectives", "per step", "bytes", "time", "of step"]]
    for line in moved[:MAX_ROWS]:
        body.append(fit(f"  {line.place}  {line.code.strip()}".rstrip(), WIDTH))
        body += [
            [
                f"    {c.phase:<8}  {c}",
                f"{c.runs:.10g}",
                format_bytes(c.bytes) if c.kind != "slice" else "",
                format_seconds(c.seconds),
                format_percent(c.seconds / total),
            ]
            for c in line.collectives
        ]
    return "\n".join(table(body, right=(1, 2, 3, 4), widths={0: 72}, indent="") + more(len(moved) - MAX_ROWS, "lines"))


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
        indent = " " * min(line.indent, 24)
        yield f"{line.number:5d}  {fit(line.code, WIDTH - 7)}"
        for note, phase, text in rows.line_notes(line):
            sent = format_bytes(note.bytes) if note and note.bytes else ""
            took = format_seconds(note.seconds) if note and note.seconds else ""
            yield _columns(f"{' ' * 7}{indent}# {phase:<8}  {text}", format_count(note.runs) if note else "", sent, took)


def _conflicts(plan: Plan, source_labels: Mapping[tuple[str, int], str]) -> str:
    if not plan.conflicts:
        return ""
    total = plan.seconds["total"] or 1.0
    body: list[list[str] | str] = [["pins that disagree", "bytes", "time", "of step"]]
    for n, c in enumerate(shown := plan.conflicts[:MAX_ROWS]):
        if n == 0 or c.pins != shown[n - 1].pins:
            body.append(fit_middle(f"  {clean(rows.disagreement(c))}", WIDTH))
        body.append(
            [
                f"    {source_labels[c.file, c.line]}",
                format_bytes(c.bytes),
                format_seconds(c.seconds),
                format_percent(c.seconds / total),
            ]
        )
    return "\n".join(table(body, right=(1, 2, 3), widths={0: 72}, indent="") + more(len(plan.conflicts) - MAX_ROWS, "places"))


def _unknown(plan: Plan) -> str:
    if not plan.unknown:
        return ""
    found = dict.fromkeys(plan.unknown)
    return "\n".join(
        ["replicated on every device, for want of a rule (shardplan.register_rule adds one)"]
        + [fit(f"  {clean(primitive)} at {clean(source)}", WIDTH) for primitive, source in list(found)[:MAX_ROWS]]
        + more(len(found) - MAX_ROWS, "ops")
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
        cells.append(["budget", format_memory(memory.limit), format_percent(memory.peak / memory.limit), "used"])
    head = fit(f"memory per device at the peak{f', {rows.where(memory.where)}' if memory.where else ''}", WIDTH)
    return "\n".join([head, *table(cells, right=(1, 2), widths={0: 40})])
