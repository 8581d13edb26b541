"""A plan as text, two plans side by side, and the plans of several searches.

Every line has at most 120 columns, no colours, and is the same for the same plan.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from shardplan.ir.traits import traits_of
from shardplan.plan import Plan, PlanComparison, PlanDiff
from shardplan.plan.baselines import Baselines
from shardplan.plan.data import JobPart, MemoryReport, PlanDecision, seconds_per_call
from shardplan.plan.job import Job
from shardplan.plan.program import differences_of_plans
from shardplan.search.objective import OPTIMAL
from shardplan.units import (
    clean,
    fit,
    fit_middle,
    format_bytes,
    format_count,
    format_memory,
    format_percent,
    format_range,
    format_seconds,
    table,
)
from shardplan.view import rows

WIDTH = 120
MAX_ROWS = 48
MAX_CHANGES = 16
"""Ops of a diff: those that cost most."""


def summary(plan: Plan) -> str:
    """Four lines and more: mesh, how good the plan is, seconds per step, peak memory, what it saves, advice, compiler options."""
    devices = f"{plan.mesh.n_devices} device{'s' * (plan.mesh.n_devices != 1)}"
    sent = f"{format_bytes(plan.comm_bytes)} sent per device" if plan.comm_bytes else "nothing is sent"
    memory = plan.memory_report
    limit = f" of {format_memory(memory.limit)} per device at the peak" if memory.limit else " per device at the peak, without a limit"
    return "\n".join(
        (
            fit(clean(f"mesh    {plan.mesh} ({devices}), priced as {plan.cluster}"), WIDTH),
            f"plan    {quality(plan)}",
            fit(f"step    {step_seconds(plan)} = {time_parts(plan, ' + ', ' − ')}; {sent}", WIDTH),
            fit(f"memory  {format_memory(memory.peak)}{limit}{rows.peak_place(memory)}", WIDTH),
            *([fit(clean(f"saves   {saving}"), WIDTH)] if (saving := plan.saving) else []),
            *([fit(clean(f"job     {job_parts(plan.job)}"), WIDTH)] if plan.job else []),
            *(fit(clean(f"advice  {line}"), WIDTH) for one in plan.advice() for line in (one.finding, f"  way out: {one.use}")),
            *_compiler_options(plan),
        )
    )


def step_seconds(plan: Plan) -> str:
    """Predicted seconds of a step and their range, as in "1.17 ms (0.99–1.38)"."""
    s = plan.seconds
    span = format_range(s["low"], s["high"], s["total"]) if s.get("high") else ""
    return f"{format_seconds(s['total'])}{f' ({span})' if span else ''}"


def job_parts(parts: Sequence[JobPart]) -> str:
    """What the functions that share a state take on average of a call, by their weights."""
    weight = sum(part.weight for part in parts) or 1.0
    shares = (f"{format_percent(part.weight / weight)} {part.name} {format_seconds(part.seconds)}" for part in parts)
    return f"{format_seconds(seconds_per_call(parts))} a call on average, one layout of the state: {', '.join(shares)}"


def brief(plan: Plan) -> str:
    """A plan in one short line, for prompts and debuggers."""
    step, peak = format_seconds(plan.seconds["total"]), format_memory(plan.memory_report.peak)
    return fit(clean(f"<Plan for {plan.mesh}: {step} a step, {peak} per device, {plan.status}, priced as {plan.cluster}>"), WIDTH)


def _compiler_options(plan: Plan) -> list[str]:
    """What XLA's compiler is asked for, in as many lines as it takes."""
    lines: list[str] = []
    for name, value in plan.compiler_options.items():
        word = clean(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        if lines and len(lines[-1]) + 1 + len(word) <= WIDTH - 8:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [fit(f"{'options ' if n == 0 else ' ' * 8}{line}", WIDTH) for n, line in enumerate(lines)]


def time_parts(plan: Plan, plus: str = ", ", minus: str = ", −") -> str:
    """The seconds of a step: compute, communication, and what is saved because the two overlap."""
    s = plan.seconds
    saved = s["hidden"] - s.get("interference", 0.0)
    overlap = f"{minus}{format_seconds(saved)} by overlap" if saved else ""
    return f"{format_seconds(s['compute'])} compute{plus}{format_seconds(s['communication'])} communication{overlap}"


def quality(plan: Plan) -> str:
    """The search that found the plan and its proven distance from the optimum."""
    by = {"ilp": "integer program", "propagation": "propagation", "recursive": "recursive search"}.get(plan.search, clean(plan.search))
    symmetric = ", symmetric layers" if plan.symmetric_layers else ""
    if plan.status == "optimal" or plan.gap <= OPTIMAL:
        return f"optimal ({by}{symmetric})"
    proof = f"at most {format_percent(plan.gap)} from the optimum" if plan.gap < 1 else "nothing proven"
    found = "what propagation found" if plan.status == "fallback" else "feasible"
    return f"{found}, {proof} ({by}{symmetric})"


def explain(plan: Plan, source: bool = True) -> str:
    """The summary, then inputs, collectives, annotated source lines (with `source`), conflicts, ops without a rule, and memory."""
    lines = rows.lines(plan, source=source)
    parts = [
        summary(plan) + _unmeasured(plan),
        _leaf_table(plan),
        _collective_table(plan, lines),
        _annotated(plan, lines) if source else "",
        _conflicts(plan, lines),
        _unknown(plan),
        memory_text(plan.memory_report),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _unmeasured(plan: Plan) -> str:
    if not plan.unmeasured:
        return ""
    return "\n" + fit(clean(f"range   not measured for this device, so wide: {', '.join(plan.unmeasured)}"), WIDTH)


# ---- tables


def _short(path: str) -> str:
    """Long choices abbreviated: "{key,out,query,value}" as "{key,…}"."""
    return re.sub(r"\{([^{},]+),[^{}]{8,}\}", r"{\1,…}", path)


def _more(n: int, what: str) -> list[str]:
    return [f"  ... and {n} more {what}"] if n > 0 else []


def _leaf_table(plan: Plan) -> str:
    found = rows.leaf_rows(plan.inputs, plan.mesh)
    if not found:
        return "inputs: none"
    shown = found[:MAX_ROWS]
    room = WIDTH - 26 - min(max(len(row.type) for row in shown), 40) - min(max(len(row.layout) for row in shown), 30)
    cells = [["inputs", "", "", "", "per device"]]
    for kind, same_kind in itertools.groupby(shown, key=lambda row: row.leaves[0].kind):
        cells.append([f"{clean(kind)}:"])
        for row, path in _paths(list(same_kind), room):
            of_row = [row.type, row.layout, format_count(len(row.leaves)), format_memory(row.device_bytes)] if row else []
            cells.append([f"  {path}", *of_row])
    return "\n".join(table(cells, right=(3, 4), widths={0: room, 1: 40, 2: 30}, indent="") + _more(len(found) - MAX_ROWS, "rows"))


def _paths(shown: Sequence[rows.LeafRow], room: int) -> Iterator[tuple[rows.LeafRow | None, str]]:
    """(row, path): paths that are too long follow the folders that they all have in common, which are no row."""
    short, long = [], []
    for row in shown:
        path = _short(row.path)
        (short if len(path) <= room - 2 else long).append((row, path))
    yield from short
    folders = zip(*(path.split("/")[:-1] for _, path in long), strict=False)
    start = "".join(f"{at[0]}/" for at in itertools.takewhile(lambda at: len(set(at)) == 1, folders))
    if start:
        yield None, start
    yield from ((row, "  " * bool(start) + path[len(start) :]) for row, path in long)


def _collective_table(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    senders, step_s = rows.senders(lines), plan.seconds["total"] or 1.0
    if not senders:
        return "collectives: none"
    body: list[list[str] | str] = [["collectives", "per step", "sent", "time", "of step"]]
    for line in senders[:MAX_ROWS]:
        body.append(fit(f"  {line.place}  {line.code.strip()}".rstrip(), WIDTH))
        for c in line.collectives:
            figures = format_bytes(c.bytes) if c.bytes else "", format_seconds(c.seconds), format_percent(c.seconds / step_s)
            body.append([f"    {c.phase:<8}  {c.text}", f"{c.runs:.10g}", *figures])
    return "\n".join(table(body, right=(1, 2, 3, 4), widths={0: 72}, indent="") + _more(len(senders) - MAX_ROWS, "lines"))


# ---- the user's lines


def _annotated(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    texts = ["\n".join(_file(name, here)) for name, here in rows.annotated(plan, lines)]
    head = _columns("source lines, each with its results and reshards", "per step", "sent", "time")
    return "\n\n".join([head, *texts]) if texts else ""


def _columns(left: str, runs: str, sent: str, seconds: str) -> str:
    return f"{fit(left, WIDTH - 28).ljust(WIDTH - 27)}{runs:>8}{sent:>10}{seconds:>9}".rstrip()


def _file(name: str, here: Sequence[rows.LineRow]) -> Iterator[str]:
    yield fit_middle(name, WIDTH)
    for n, line in enumerate(here):
        if n and line.number > here[n - 1].number + 1:
            yield "    ⋮"
        yield f"{line.number:5d}  {fit(line.code, WIDTH - 7)}"
        for note, phase, text in rows.line_notes(line):
            sent = format_bytes(note.bytes) if note and note.bytes else ""
            took = format_seconds(note.seconds) if note and note.seconds else ""
            comment = f"{' ' * (7 + min(line.indent, 24))}# {phase:<8}  {text}"
            yield _columns(comment, format_count(note.runs) if note else "", sent, took)


def _conflicts(plan: Plan, lines: Sequence[rows.LineRow]) -> str:
    if not plan.conflicts:
        return ""
    places, step_s = {(line.file, line.number): line.place for line in lines}, plan.seconds["total"] or 1.0
    body: list[list[str] | str] = [["pins that disagree", "sent", "time", "of step"]]
    for pins, conflicts in itertools.groupby(plan.conflicts[:MAX_ROWS], key=rows.disagreement):
        body.append(fit_middle(f"  {clean(pins)}", WIDTH))
        for c in conflicts:
            share = format_percent(c.seconds / step_s)
            body.append([f"    {places[c.file, c.line]}", format_bytes(c.bytes), format_seconds(c.seconds), share])
    return "\n".join(table(body, right=(1, 2, 3), widths={0: 72}, indent="") + _more(len(plan.conflicts) - MAX_ROWS, "places"))


def _unknown(plan: Plan) -> str:
    if not plan.unknown:
        return ""
    found = list(dict.fromkeys(plan.unknown))
    head = "replicated on every device, for want of a rule (shardplan.register_rule adds one)"
    ops = (fit(f"  {clean(primitive)} at {clean(source)}", WIDTH) for primitive, source in found[:MAX_ROWS])
    return "\n".join([head, *ops, *_more(len(found) - MAX_ROWS, "ops")])


def memory_text(memory: MemoryReport) -> str:
    """Bytes per device at the peak, by category."""
    cells = [[clean(k), format_memory(v), format_percent(v / (memory.peak or 1.0))] for k, v in memory.at_peak.items() if v]
    cells.append(["together", format_memory(memory.peak), "100 %" if memory.peak else ""])
    if memory.limit:
        cells.append(["budget", format_memory(memory.limit), format_percent(memory.peak / memory.limit), "used"])
    head = fit(f"memory per device at the peak{rows.peak_place(memory)}", WIDTH)
    return "\n".join([head, *table(cells, right=(1, 2), widths={0: 40})])


# ---- several plans


def comparison_text(comparison: PlanComparison) -> str:
    """A row per search: seconds of the step and of its communication, peak memory, distance from the bound, planning time."""
    cells = [["search", "step", "communication", "memory", "from the bound", "planned in"]]
    for name, plan in comparison.plans.items():
        gap = comparison.gap(name)
        proof = "nothing proven" if not comparison.bound else format_percent(gap) if gap > OPTIMAL else "optimal"
        step, sending, planning = plan.seconds["total"], plan.seconds["communication"], sum(plan.planning_seconds.values())
        memory = format_memory(plan.memory_report.peak)
        cells.append([name, format_seconds(step), format_seconds(sending), memory, proof, format_seconds(planning)])
    return "\n".join(table(cells, right=range(1, 6), indent=""))


def job_text(job: Job) -> str:
    """What the functions of a job take with one layout of the state and alone, and what other layouts of it would take."""
    sure = "optimal" if job.gap <= OPTIMAL else f"at most {format_percent(job.gap)} from the optimum"
    leaves = f"{job.shared} array{'s' * (job.shared != 1)} in one layout, {job.layouts[0].name}"
    heads = [f"state  {leaves}", f"job    {format_seconds(job.seconds)} a call on average, {sure}"]
    cells = [["", "weight", "step", "planned alone", "peak"]]
    for part, plan, alone in zip(job.parts, job.plans, job.alone_seconds, strict=True):
        figures = format_seconds(part.seconds), format_seconds(alone), format_memory(plan.memory_report.peak)
        cells.append([clean(part.name), f"{part.weight:.6g}", *figures])
    others = [["other layouts of the state", "a call", ""]]
    for other in job.layouts[1:]:
        slower = "" if other.why_not else f"+{format_percent(max(0.0, other.seconds / job.seconds - 1))}" if job.seconds else ""
        others.append([clean(other.name), "no plan" if other.why_not else format_seconds(other.seconds), slower])
    tables = table(cells, right=(1, 2, 3, 4), widths={0: 56}, indent=""), table(others, right=(1, 2), widths={0: 56}, indent="")
    return "\n".join(fit(line, WIDTH) for line in (*heads, *tables[0], *(tables[1] if len(others) > 1 else ())))


def baselines_text(found: Baselines) -> str:
    """The plan, then a row per classical layout: seconds, how much slower, peak memory, bytes sent."""
    if not found.rows:
        return "no baselines: the step keeps no state"
    plan_s, memory = found.plan.seconds["total"], found.plan.memory_report
    cells = [["layout of the inputs", "step", "", "peak", "sent"]]
    cells.append(["this plan", format_seconds(plan_s), "", format_memory(memory.peak), format_bytes(found.plan.comm_bytes)])
    for row in found.rows:
        change = row.seconds / plan_s - 1 if plan_s else 0.0
        slower = "does not fit" if not row.fits else f"{'+' if change >= 0 else '−'}{format_percent(abs(change))}"
        cells.append(
            [clean(row.name), format_seconds(row.seconds), slower, format_memory(row.peak_bytes), format_bytes(row.sent_bytes)]
        )
    return "\n".join(table(cells, right=(1, 2, 3, 4), widths={0: 56}, indent=""))


def diff_text(diff: PlanDiff) -> str:
    """The differences of the second plan from the first: costs, layouts of inputs, strategies of ops."""
    a, b = diff.a, diff.b
    names = (("mesh", str(a.mesh), str(b.mesh)), ("cluster", a.cluster, b.cluster))
    out = [fit(clean(f"{name:<8}  {x} -> {y}"), WIDTH) for name, x, y in names if x != y]
    if a.fingerprint != b.fingerprint:
        out.append("program   the plans are for different programs")
        out += [fit(clean(f"          {text}"), WIDTH) for text in differences_of_plans(a, b)]
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
        out.append("the plans shard everything the same way")
    return "\n".join(out) + "\n"


def _diff_leaves(diff: PlanDiff) -> list[str]:
    known = {x.path: x for p in (diff.b, diff.a) for x in p.inputs}
    groups: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for n, (path, *layouts) in enumerate(diff.leaves):
        leaf = known[path]
        key = tuple("not there" if x is None else rows.type_text(leaf.dtype, leaf.shape, x) for x in layouts)
        groups.setdefault(key, []).append((path, n))
    found = []
    for (x, y), paths in groups.items():
        found += [(n[0], [_short(path), x, "->", y, format_count(len(n))]) for path, n in rows.fold(paths, known)]
    shown = table([cells for _, cells in sorted(found)[:MAX_ROWS]], right=(4,), widths={0: 48, 1: 27, 3: 27})
    return ["", "inputs", *shown, *_more(len(found) - MAX_ROWS, "rows")] if found else []


def _diff_decisions(diff: PlanDiff) -> list[str]:
    groups: dict[tuple[str, ...], list[tuple[PlanDecision | None, PlanDecision | None]]] = {}
    for (file, line, primitive, phase, _), *decisions in diff.decisions:
        if not traits_of(primitive).endpoint:
            place = f"{clean(file)}:{line}" if file else "no line known"
            groups.setdefault((place, phase, clean(primitive), *map(_strategy, decisions)), []).append((decisions[0], decisions[1]))
    seconds = {key: sum(max(d.runs * d.seconds + d.comm_seconds for d in pair if d) for pair in some) for key, some in groups.items()}
    costliest = set(sorted(groups, key=lambda key: -seconds[key])[:MAX_CHANGES])
    cells = [
        [*key[:4], "->", key[4] if key[3] != key[4] else _layouts_changed(some), format_count(len(some))]
        for key, some in groups.items()
        if key in costliest
    ]
    widths = {0: 30, 2: 16, 3: 22}
    taken = sum(max((min(len(row[k]), widths.get(k, WIDTH)) for row in cells), default=0) for k in (0, 1, 2, 3, 4, 6))
    shown = table(cells, right=(6,), widths=widths | {5: max(22, WIDTH - taken - 2 * 7)})
    title = "inside the step: the factor of the op's rule that each mesh axis shards"
    return ["", title, *shown, *_more(len(groups) - len(cells), "rows, of cheaper ops")] if groups else []


def _layouts_changed(some: Iterable[tuple[PlanDecision | None, PlanDecision | None]]) -> str:
    """The most frequent change of a layout in ops whose strategy is the same, and how many others there are."""
    counts = Counter(text for a, b in some if a and b for text in _layout_changes(a, b))
    (text, _), *others = counts.most_common() or [("other layouts", 0)]
    return f"{text}, and {len(others)} other{'s'[: len(others) > 1]}" if others else text


def _layout_changes(a: PlanDecision, b: PlanDecision) -> Iterator[str]:
    """The layouts in which the second reads and makes arrays otherwise than the first."""
    made_a, made_b = ([() if x is None else (x,) for x in d.result_layouts] for d in (a, b))
    for what, before, after in (("operand", a.operand_layouts, b.operand_layouts), ("result", made_a, made_b)):
        for k, (x, y) in enumerate(itertools.zip_longest(before, after, fillvalue=())):
            if x != y:
                yield f"{what} {k} {'as ' + clean(' -> '.join(map(str, y))) if y else 'left to XLA'}"


def _strategy(decision: PlanDecision | None) -> str:
    if decision is None:
        return "left to XLA"
    return clean(", ".join(f"{axis}: {factor}" for axis, factor in decision.strategy.items())) or "replicated"
