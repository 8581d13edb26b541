"""A plan as text: costs, layouts of the inputs, collectives by source line, and the source lines with the choices as comments.

Every line has at most 120 columns, no colours, and is the same for the same plan.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from shardplan.plan import Plan
from shardplan.plan.data import MemoryReport
from shardplan.units import clean, fit, fit_middle, format_bytes, format_count, format_memory, format_percent, format_seconds, table
from shardplan.view import rows

WIDTH = 120
MAX_ROWS = 48


def summary(plan: Plan) -> str:
    """Four lines: the mesh, how good the plan is, seconds per step, peak memory."""
    devices = f"{plan.mesh.n_devices} device{'s' * (plan.mesh.n_devices != 1)}"
    sent = f"{format_bytes(plan.comm_bytes)} through collectives per device" if plan.comm_bytes else "nothing is sent"
    memory = plan.memory_report
    limit = f" of {format_memory(memory.limit)} per device at the peak" if memory.limit else " per device at the peak, without a limit"
    return "\n".join(
        (
            fit(clean(f"mesh    {plan.mesh} ({devices}), priced as {plan.cluster}"), WIDTH),
            f"plan    {quality(plan)}",
            f"step    {format_seconds(plan.seconds['total'])} predicted = {time_parts(plan, ' + ')}; {sent}",
            fit(f"memory  {format_memory(memory.peak)}{limit}{_where(memory)}", WIDTH),
        )
    )


def time_parts(plan: Plan, joint: str = ", ") -> str:
    """The seconds of a step: compute, communication, and how much of that is hidden."""
    s = plan.seconds
    hidden = f" ({format_seconds(s['hidden'])} of it hidden)" if s["hidden"] else ""
    return f"{format_seconds(s['compute'])} compute{joint}{format_seconds(s['communication'])} communication{hidden}"


def quality(plan: Plan) -> str:
    """The search that found the plan and its proven distance from the optimum."""
    by = {"ilp": "integer program", "propagation": "propagation", "recursive": "recursive search"}.get(plan.search, clean(plan.search))
    symmetric = ", symmetric layers" if plan.symmetric_layers else ""
    if plan.status == "optimal" or plan.gap <= 1e-6:
        return f"optimal ({by}{symmetric})"
    proof = f"at most {format_percent(plan.gap)} from the optimum" if plan.gap < 1 else "nothing proven"
    found = "what propagation found" if plan.status == "fallback" else "feasible"
    return f"{found}, {proof} ({by}{symmetric})"


def explain(plan: Plan, source: bool = True) -> str:
    """The summary, then inputs, collectives, annotated source lines (with `source`), conflicts, ops without a rule, and memory."""
    lines = rows.lines(plan, source=source)
    parts = [
        summary(plan),
        _leaf_table(plan),
        _collective_table(plan, lines),
        _annotated(plan, lines) if source else "",
        _conflicts(plan, lines),
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
    room = WIDTH - 26 - min(max(len(row.type) for row in shown), 40) - min(max(len(row.layout) for row in shown), 30)
    cells = [["inputs", "", "", "", "per device"]]
    for kind, same_kind in itertools.groupby(shown, key=lambda row: row.first.kind):
        cells.append([f"{clean(kind)}:"])
        for row, path in _paths(list(same_kind), room):
            of_row = [row.type, row.layout, format_count(row.count), format_memory(row.device_bytes)] if row else []
            cells.append([f"  {path}", *of_row])
    return "\n".join(table(cells, right=(3, 4), widths={0: room, 1: 40, 2: 30}, indent="") + more(len(found) - MAX_ROWS, "rows"))


def _paths(shown: Sequence[rows.LeafRow], room: int) -> Iterator[tuple[rows.LeafRow | None, str]]:
    """(row, path): paths that are too long follow the folders that they all have in common, which are no row."""
    short, long = [], []
    for row in shown:
        path = short_path(row.path)
        (short if len(path) <= room - 2 else long).append((row, path))
    yield from short
    folders = zip(*(path.split("/")[:-1] for _, path in long), strict=False)
    start = "".join(f"{at[0]}/" for at in itertools.takewhile(lambda at: len(set(at)) == 1, folders))
    if start:
        yield None, start
    yield from ((row, "  " * bool(start) + path[len(start) :]) for row, path in long)


def _collective_table(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    senders = rows.senders(lines)
    if not senders:
        return "collectives: none"
    total = plan.seconds["total"] or 1.0
    body: list[list[str] | str] = [["collectives", "per step", "bytes", "time", "of step"]]
    for line in senders[:MAX_ROWS]:
        body.append(fit(f"  {line.place}  {line.code.strip()}".rstrip(), WIDTH))
        for c in line.collectives:
            sent = format_bytes(c.bytes) if c.bytes else ""
            share = format_percent(c.seconds / total)
            body.append([f"    {c.phase:<8}  {c.text}", f"{c.runs:.10g}", sent, format_seconds(c.seconds), share])
    return "\n".join(table(body, right=(1, 2, 3, 4), widths={0: 72}, indent="") + more(len(senders) - MAX_ROWS, "lines"))


# ---- the user's lines


def _annotated(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    texts = ["\n".join(_file(name, here)) for name, here in rows.annotated(plan, lines)]
    head = _columns("source lines, each with its results and reshards", "per step", "bytes", "time")
    return "\n\n".join([head, *texts]) if texts else ""


def _columns(left: str, runs: str, sent: str, seconds: str) -> str:
    return f"{fit(left, WIDTH - 28).ljust(WIDTH - 27)}{runs:>8}{sent:>10}{seconds:>9}".rstrip()


def _file(name: str, here: Sequence[rows.LineRow]) -> Iterator[str]:
    yield fit_middle(name, WIDTH)
    for n, line in enumerate(here):
        if n and line.number > here[n - 1].number + 1:
            yield "    ⋮"
        indent = " " * min(line.indent, 24)
        yield f"{line.number:5d}  {fit(line.code, WIDTH - 7)}"
        for note, phase, text in rows.line_notes(line):
            sent = format_bytes(note.bytes) if note and note.bytes else ""
            took = format_seconds(note.seconds) if note and note.seconds else ""
            yield _columns(f"{' ' * 7}{indent}# {phase:<8}  {text}", format_count(note.runs) if note else "", sent, took)


def _conflicts(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    if not plan.conflicts:
        return ""
    places, total = {(line.file, line.number): line.place for line in lines}, plan.seconds["total"] or 1.0
    body: list[list[str] | str] = [["pins that disagree", "bytes", "time", "of step"]]
    for pins, conflicts in itertools.groupby(plan.conflicts[:MAX_ROWS], key=rows.disagreement):
        body.append(fit_middle(f"  {clean(pins)}", WIDTH))
        for c in conflicts:
            share = format_percent(c.seconds / total)
            body.append([f"    {places[c.file, c.line]}", format_bytes(c.bytes), format_seconds(c.seconds), share])
    return "\n".join(table(body, right=(1, 2, 3), widths={0: 72}, indent="") + more(len(plan.conflicts) - MAX_ROWS, "places"))


def _unknown(plan: Plan) -> str:
    if not plan.unknown:
        return ""
    found = list(dict.fromkeys(plan.unknown))
    head = "replicated on every device, for want of a rule (shardplan.register_rule adds one)"
    ops = (fit(f"  {clean(primitive)} at {clean(source)}", WIDTH) for primitive, source in found[:MAX_ROWS])
    return "\n".join([head, *ops, *more(len(found) - MAX_ROWS, "ops")])


# ---- memory


def _where(memory: MemoryReport) -> str:
    return f", {rows.where(memory.where)}" if memory.where else ""


def memory_text(memory: MemoryReport) -> str:
    """Bytes per device at the peak, by category."""
    cells = [[clean(k), format_memory(v), format_percent(v / (memory.peak or 1.0))] for k, v in memory.at_peak.items() if v]
    cells.append(["together", format_memory(memory.peak), "100 %" if memory.peak else ""])
    if memory.limit:
        cells.append(["budget", format_memory(memory.limit), format_percent(memory.peak / memory.limit), "used"])
    head = fit(f"memory per device at the peak{_where(memory)}", WIDTH)
    return "\n".join([head, *table(cells, right=(1, 2), widths={0: 40})])
