"""Plans corrected by what XLA made of them: compile, compare, add what XLA does beyond the plan to the costs, and solve again.

    round   plan under (memory budget, corrections) -> compile -> compare
        a line where XLA moves more than planned     the reshards planned there cost as much more from the next round on; where none
                                                     is planned, the strategies of that line's ops do
        a peak above the memory that there is        the budget is scaled by planned / emitted
        neither, or a plan seen before               done

Of all compiled plans the one is chosen that fits and whose program takes the fewest seconds by `xla.hlo.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardplan.costs.options import CostCorrections, merge_corrections
from shardplan.errors import ShardingError
from shardplan.files import short_place
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.collective import seconds as planned_s
from shardplan.plan import Plan
from shardplan.units import format_memory
from shardplan.xla.hlo.schedule import CompiledSeconds, collective_s, seconds
from shardplan.xla.report.check import PlanReport, check_plan
from shardplan.xla.report.compare import CollectiveFinding, EmittedTensor, ExpectedCollective

MAX_ROUNDS = 3
MIN_OVERRUN = 0.005
"""Share of a step's seconds that a difference must reach to be corrected."""
SAME_BYTES = 0.1
"""Relative difference up to which a planned and an emitted collective have the same size."""


@dataclass(frozen=True)
class Overrun:
    """A line on which XLA takes `seconds` of a step beyond the plan's; the correction is empty if no op of the plan is there."""

    finding: CollectiveFinding
    seconds: float
    correction: CostCorrections

    def __str__(self) -> str:
        place = short_place(self.finding.source) or "no line known"
        most = max(_unmatched(self.finding)[1] or self.finding.emitted, key=lambda m: m.wire_bytes)
        return f"{place}  {self.seconds * 1e6:.0f} µs more than planned: {most}" + ("" if self.correction else "; no op to correct")


@dataclass(frozen=True)
class Round:
    """One plan against XLA's program.

    Attributes:
        budget: bytes per device it was planned for, or None.
        seconds: of the compiled step; None when the compile failed.
        fits: whether XLA's peak is within the user's budget.
    """

    report: PlanReport
    budget: float | None
    seconds: CompiledSeconds | None = None
    overruns: tuple[Overrun, ...] = ()
    fits: bool = False

    @property
    def plan(self) -> Plan:
        """The plan that was compiled."""
        return self.report.plan

    def text(self, first: Round) -> str:
        """One line: seconds and bytes, planned and compiled."""
        planned = f"planned {self.plan.seconds['total'] * 1e3:.3g} ms"
        if self.seconds is None or self.report.compiled.memory is None:
            return f"{planned}; {self.report.compiled.error}"
        budget = f" for a budget of {format_memory(self.budget)}" if self.budget and self.budget != first.budget else ""
        return (
            f"{planned}{budget}; XLA's program {self.seconds.step_s * 1e3:.3g} ms, {self.seconds.exposed_s * 1e3:.3g} ms of it "
            f"exposed collectives, {format_memory(self.report.compiled.memory.peak_bytes)}{'' if self.fits else ', DOES NOT FIT'}"
            f"{', compiled without Triton products' if self.report.compiled.retried else ''}"
        )


@dataclass(frozen=True)
class Verified:
    """The rounds, the number of the one whose plan is used, and why there was no further round. `print` it."""

    rounds: tuple[Round, ...]
    chosen: int
    stopped: str

    def __str__(self) -> str:
        lines = []
        for n, r in enumerate(self.rounds):
            lines.append(f"round {n + 1}  {r.text(self.rounds[0])}" + (", chosen" if n == self.chosen and r.seconds else ""))
            lines += [f"    {overrun}" for overrun in r.overruns]
        return "\n".join([*lines, self.stopped])


def verified(
    solve: Callable[[float | None, CostCorrections | None], Plan], target: str | None, budget: float | None, cluster: Cluster
) -> Verified:
    """Plans, compiles and plans again until XLA's program is what was planned, at most `MAX_ROUNDS` times.

    Args:
        solve: makes a plan that remembers its program, for a budget and corrections.
        target: as in `check`; None for the devices at hand.
        budget: bytes per device, or None.
        cluster: prices the emitted program.

    Raises:
        ShardingError: the first plan cannot be made.
    """
    done: list[Round] = []
    corrections, limit = None, budget
    for _ in range(MAX_ROUNDS):
        try:
            plan = solve(limit, corrections)
        except ShardingError as error:
            if not done:
                raise
            return _choose(done, f"no plan fits the tightened budget: {str(error).splitlines()[0]}")
        if _choices(plan) in [_choices(r.plan) for r in done]:
            return _choose(done, "with the corrections the same plan is still the best one")
        report = check_plan(plan, target)
        memory = report.compiled.memory
        if not report.compiled.ok or memory is None:
            return _choose([*done, Round(report, limit)], "the compile failed")
        took, fits = seconds(report.compiled, cluster), budget is None or memory.peak_bytes <= budget
        overruns = _overruns(report, took.step_s, cluster)
        done.append(Round(report, limit, took, overruns, fits))
        found = [x.correction for x in overruns if x.correction]
        if fits and not found:
            return _choose(done, "no op of the plan is on the lines of what XLA adds" if overruns else "XLA's program is as planned")
        if not fits and limit is not None:
            limit *= min(0.98, plan.memory().peak / memory.peak_bytes)
        corrections = merge_corrections([corrections, *found] if corrections else found)
    return _choose(done, f"{MAX_ROUNDS} rounds are over")


def _choose(done: list[Round], stopped: str) -> Verified:
    def order(n: int):
        r = done[n]
        return r.seconds is None, not r.fits, r.seconds.step_s if r.seconds else 0.0, n

    return Verified(tuple(done), min(range(len(done)), key=order), stopped)


def _overruns(report: PlanReport, step_s: float, cluster: Cluster) -> tuple[Overrun, ...]:
    out = []
    for f in (f for f in report.comparison.findings if f.verdict in ("dearer", "unplanned")):
        emitted = sum(collective_s(m.collective, cluster) * m.collective.runs / len(m.collective.parts) for m in f.emitted)
        planned = sum(e.runs * planned_s(e.kind, e.bytes, e.axes, report.plan.mesh, cluster) for e in f.planned)
        if emitted - planned > MIN_OVERRUN * step_s:
            out.append(Overrun(f, emitted - planned, _correction(report.plan, f, emitted - planned)))
    return tuple(out)


def _correction(plan: Plan, finding: CollectiveFinding, extra_s: float) -> CostCorrections:
    """The extra seconds of a line: its reshards that became something else pay in proportion to theirs, or its ops equal parts."""
    missed = {(e.kind, e.bytes) for e in _unmatched(finding)[0] or finding.planned}
    found: dict[tuple, float] = {}
    for key, steps, reshard_s in plan.context.planned.reshards_on_line(finding.source):
        axes = {a for s in steps if s.kind != "slice" for a in s.axes}
        if axes >= set(finding.axes) and any((s.kind, s.bytes) in missed for s in steps):
            found[key] = found.get(key, 0.0) + reshard_s
    if finding.planned and found:
        return CostCorrections({}, {key: extra_s * s / sum(found.values()) for key, s in found.items()})
    ops = plan.context.planned.strategies_on_line(finding.source)
    return CostCorrections({op: extra_s / len(ops) for op in ops}, {})


def _unmatched(finding: CollectiveFinding) -> tuple[list[ExpectedCollective], list[EmittedTensor]]:
    """(planned and not emitted, emitted and not planned) of a line, by kind and size."""
    planned, emitted = list(finding.planned), []
    for m in sorted(finding.emitted, key=lambda m: -m.wire_bytes):
        same = [e for e in planned if e.kind == m.collective.kind and abs(e.wire_bytes - m.wire_bytes) <= SAME_BYTES * m.wire_bytes]
        if same:
            planned.remove(same[0])
        else:
            emitted.append(m)
    return planned, emitted


def _choices(plan: Plan) -> tuple:
    return plan.context.planned.strategies, plan.context.planned.retained
