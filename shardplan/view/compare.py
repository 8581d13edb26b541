"""Plans side by side as text: the differences of two plans, and the plans of several searches."""

from __future__ import annotations

from shardplan.ir.traits import traits_of
from shardplan.plan import PlanComparison, PlanDiff
from shardplan.plan.data import PlanDecision
from shardplan.units import clean, fit, format_bytes, format_count, format_memory, format_percent, format_seconds, table
from shardplan.view.fold import fold
from shardplan.view.text import MAX_ROWS, WIDTH, more, short_path
from shardplan.view.types import type_text

MAX_CHANGES = 16
"""Ops of a diff: those that cost most."""


def comparison_text(comparison: PlanComparison) -> str:
    """A row per search: seconds of the step and of its communication, peak memory, distance from the bound, planning time."""
    cells = [["search", "step", "communication", "memory", "from the bound", "planned in"]]
    for name, plan in comparison.plans.items():
        gap = comparison.gap(name)
        proof = "nothing proven" if not comparison.bound else format_percent(gap) if gap > 1e-6 else "optimal"
        step, sending, planning = plan.seconds["total"], plan.seconds["communication"], sum(plan.planning_seconds.values())
        memory = format_memory(plan.memory_report.peak)
        cells.append([name, format_seconds(step), format_seconds(sending), memory, proof, format_seconds(planning)])
    return "\n".join(table(cells, right=range(1, 6), indent=""))


# ---- two plans


def diff_text(diff: PlanDiff) -> str:
    """The differences of the second plan from the first: costs, layouts of inputs, strategies of ops."""
    a, b = diff.a, diff.b
    names = (("mesh", str(a.mesh), str(b.mesh)), ("cluster", a.cluster, b.cluster))
    out = [fit(clean(f"{name:<8}  {x} -> {y}"), WIDTH) for name, x, y in names if x != y]
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
        out.append("the plans shard everything the same way")
    return "\n".join(out) + "\n"


def _diff_leaves(diff: PlanDiff) -> list[str]:
    if not diff.leaves:
        return []
    known = {x.path: x for p in (diff.b, diff.a) for x in p.inputs}
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for n, (path, before, after) in enumerate(diff.leaves):
        leaf = known[path]
        texts = tuple("not there" if x is None else type_text(leaf.dtype, leaf.shape, x) for x in (before, after))
        groups.setdefault((texts[0], texts[1]), []).append((path, n))
    cells = []
    for (x, y), paths in groups.items():
        cells += [(n[0], [short_path(path), x, "->", y, format_count(len(n))]) for path, n in fold(paths, list(known))]
    cells.sort()
    shown = table([c for _, c in cells[:MAX_ROWS]], right=(4,), widths={0: 48, 1: 27, 3: 27})
    return ["", "inputs", *shown, *more(len(cells) - MAX_ROWS, "rows")]


def _diff_decisions(diff: PlanDiff) -> list[str]:
    groups: dict[tuple, list[float]] = {}
    for (file, line, primitive, phase, _), x, y in diff.decisions:
        if traits_of(primitive).endpoint:
            continue
        place = f"{clean(file)}:{line}" if file else "no line known"
        total = groups.setdefault((place, phase, clean(primitive), _strategy(x), _strategy(y)), [0, 0.0])
        total[0] += 1
        total[1] += max(d.runs * d.seconds + d.comm_seconds for d in (x, y) if d is not None)
    if not groups:
        return []
    costliest = set(sorted(groups, key=lambda key: -groups[key][1])[:MAX_CHANGES])
    cells = [
        [*key[:4], "->", key[4] if key[3] != key[4] else "other layouts", format_count(groups[key][0])]
        for key in groups
        if key in costliest
    ]
    shown = table(cells, right=(6,), widths={0: 30, 2: 16, 3: 22, 5: 22})
    title = "inside the step: the factor of the op's rule that each mesh axis shards"
    return ["", title, *shown, *more(len(groups) - len(cells), "rows, of cheaper ops")]


def _strategy(decision: PlanDecision | None) -> str:
    if decision is None:
        return "left to XLA"
    return clean(", ".join(f"{axis}: {factor}" for axis, factor in decision.strategy.items())) or "replicated"
