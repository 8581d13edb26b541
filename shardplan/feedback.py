"""Plans that learn from XLA: compile, compare, charge what XLA adds to the choices that brought it about, and solve again.

    round   plan under (memory budget, charges) -> compile -> compare
        a line where XLA moves more than planned     the reshards planned there cost as much more from now on; where none is,
                                                 the strategies of that line's ops do
        a peak above the memory that there is        the budget shrinks by planned / emitted
        neither, or a plan seen before               done

Of all compiled plans the one is kept that fits and, by the one ruler of `seconds`, is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from shardplan.costs.charges import Charges
from shardplan.errors import ShardingError
from shardplan.ir.graph import BORDER, Source
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.collective import seconds as planned_s
from shardplan.plan import Plan
from shardplan.plan.describe import operand_reshards
from shardplan.plan.planned import Planned
from shardplan.units import format_memory
from shardplan.xla.report.compare import CollectiveFinding, EmittedTensor, ExpectedCollective
from shardplan.xla.report.plan_report import PlanReport, check_plan
from shardplan.xla.report.seconds import CompiledSeconds, collective_s, seconds

ROUNDS = 3
WORTH = 0.005
"""Share of a step's seconds that a difference must reach to be worth another round."""


@dataclass(frozen=True)
class Charge:
    """A line on which XLA does more than planned.

    Attributes:
        finding: what was planned there and what was emitted.
        seconds: of a step, beyond what was planned.
        paid: how it is charged from the next round on; nothing when no op of the plan stands there.
    """

    finding: CollectiveFinding
    seconds: float
    paid: Charges

    def __str__(self) -> str:
        _, emitted = _unmatched(self.finding)
        place = PurePath(self.finding.source).name or "no line known"
        most = max(emitted or self.finding.emitted, key=lambda m: m.wire_bytes)
        return f"{place}  {self.seconds * 1e6:.0f} µs more than planned: {most}" + ("" if _any(self.paid) else "; no op to charge")


@dataclass(frozen=True)
class Round:
    """One plan, compiled.

    Attributes:
        budget: bytes per device it was planned for, or None.
        seconds: of the compiled step; None when the compile failed.
        charges: lines dearer than planned.
        fits: whether XLA's peak is within the memory that there is.
    """

    report: PlanReport
    budget: float | None
    seconds: CompiledSeconds | None
    charges: tuple[Charge, ...]
    fits: bool

    @property
    def plan(self) -> Plan:
        return self.report.plan


@dataclass(frozen=True)
class Verified:
    """What the rounds were and which one was kept. `print` it.

    Attributes:
        kept: number of the round whose plan is used.
        stopped: why there was no further round.
    """

    rounds: tuple[Round, ...]
    kept: int
    stopped: str

    @property
    def plan(self) -> Plan:
        return self.rounds[self.kept].plan

    def __str__(self) -> str:
        lines = []
        for n, r in enumerate(self.rounds):
            planned = f"planned {r.plan.seconds['total'] * 1e3:.3g} ms"
            if r.seconds is None or r.report.compiled.memory is None:
                lines.append(f"round {n + 1}  {planned}; {r.report.compiled.error}")
                continue
            budget = f" for a budget of {format_memory(r.budget)}" if r.budget is not None and r.budget != self.rounds[0].budget else ""
            peak = format_memory(r.report.compiled.memory.peak_bytes)
            lines.append(
                f"round {n + 1}  {planned}{budget}; XLA's program {r.seconds.total_s * 1e3:.3g} ms, "
                f"{r.seconds.collective_s * 1e3:.3g} ms of it collectives, {peak}"
                + ("" if r.fits else ", DOES NOT FIT") + (", kept" if n == self.kept else "")
            )  # fmt: skip
            lines += [f"    {c}" for c in r.charges]
        return "\n".join([*lines, self.stopped])


def verified(
    solve: Callable[[float | None, Charges | None], Plan],
    target: str | None,
    budget: float | None,
    cluster: Cluster,
    rounds: int = ROUNDS,
) -> Verified:
    """Plans, compiles and plans again until XLA's program is what was planned.

    Args:
        solve: makes a plan that remembers its program, for a budget and charges.
        target: as in `check`; None for the devices at hand.
        budget: bytes per device, or None.
        cluster: prices the emitted program.
        rounds: at most so many plans are compiled.

    Raises:
        ShardingError: the first plan cannot be made.
    """
    done: list[Round] = []
    charges: Charges | None = None
    limit = budget
    for _ in range(rounds):
        try:
            plan = solve(limit, charges)
        except ShardingError as error:
            if not done:
                raise
            return _kept(done, f"no plan fits the tightened budget: {str(error).splitlines()[0]}")
        if any(_same(plan, r.plan) for r in done):
            return _kept(done, "what XLA adds is dearer elsewhere: the same plan is the best one still")
        done.append(_round(plan, target, limit, budget, cluster))
        this = done[-1]
        memory = this.report.compiled.memory
        if this.seconds is None or memory is None:
            return _kept(done, "the compile failed")
        found = [c.paid for c in this.charges if _any(c.paid)]
        if this.fits and not found:
            return _kept(done, "XLA's program is as planned" if not this.charges else "what XLA adds stands on no line of the plan")
        if not this.fits and limit is not None:
            limit *= min(0.98, this.plan.memory().peak / memory.peak_bytes)
        charges = _both([charges, *found] if charges else found)
    return _kept(done, f"{rounds} rounds are over")


def _round(plan: Plan, target: str | None, limit: float | None, budget: float | None, cluster: Cluster) -> Round:
    report = check_plan(plan, target)
    if not report.compiled.ok or report.compiled.memory is None:
        return Round(report, limit, None, (), False)
    found = seconds(report.compiled, cluster)
    fits = budget is None or report.compiled.memory.peak_bytes <= budget
    return Round(report, limit, found, _charges(report, found.total_s, cluster), fits)


def _kept(done: list[Round], why: str) -> Verified:
    def order(n: int):
        r = done[n]
        return r.seconds is None, not r.fits, r.seconds.total_s if r.seconds else 0.0, n

    return Verified(tuple(done), min(range(len(done)), key=order), why)


def _charges(report: PlanReport, step_s: float, cluster: Cluster) -> tuple[Charge, ...]:
    out = []
    for f in report.comparison.findings:
        if f.verdict not in ("dearer", "unplanned"):
            continue
        emitted = sum(collective_s(m.collective, cluster) * m.collective.runs / len(m.collective.parts) for m in f.emitted)
        planned = sum(e.runs * planned_s(e.kind, e.bytes, e.axes, report.plan.mesh, cluster) for e in f.planned)
        if emitted - planned > WORTH * step_s:
            out.append(Charge(f, emitted - planned, _paid(_planned(report.plan), f, emitted - planned)))
    return tuple(out)


def _paid(planned: Planned, finding: CollectiveFinding, extra_s: float) -> Charges:
    """The extra seconds of a line, shared out among what the plan decided there.

    Reshards over the finding's axes of which XLA made something else pay in proportion to what they cost; where none is planned,
    the ops that are no part of a fusion pay alike, else all that write an array.
    """
    graph, space = planned.graph, planned.space
    missed = {(e.kind, e.bytes) for e in _unmatched(finding)[0] or finding.planned}
    moves: dict[tuple, float] = {}
    for i, op in enumerate(graph.ops):
        for _, reader, operand, steps in operand_reshards(planned, i) if op.primitive != "share" else ():
            v = graph.ops[reader].inputs[operand]
            assert v is not None
            reduces = any(s.kind in ("all-reduce", "reduce-scatter") for s in steps)
            at = graph.ops[graph.maker(v)].source if reduces else op.source
            axes = {a for s in steps if s.kind != "slice" for a in s.axes}
            other = any((s.kind, s.bytes) in missed for s in steps)
            if other and axes >= set(finding.axes) and _is_at(at, finding.source):
                key = reader, operand, planned.result_layout(*graph.values[v].producer), planned.operand_layout(reader, operand)
                moves[key] = moves.get(key, 0.0) + graph.ops[reader].reads * sum(s.seconds for s in steps)
    if finding.planned and moves:
        return Charges({}, {key: extra_s * s / sum(moves.values()) for key, s in moves.items()})
    here = [i for i, op in enumerate(graph.ops) if _is_at(op.source, finding.source) and op.primitive != "share"]
    big = [i for i in here if space.rules[i].fusion == "none" and graph.ops[i].primitive not in BORDER]
    ops = big or [i for i in here if any(space.materialised[v] for v in graph.ops[i].outputs)]
    return Charges({(i, planned.strategies[i]): extra_s / len(ops) for i in ops}, {})


def _unmatched(finding: CollectiveFinding) -> tuple[list[ExpectedCollective], list[EmittedTensor]]:
    """What of a line was planned and not emitted, and emitted and not planned, by kind and size."""
    planned, emitted = list(finding.planned), []
    for m in sorted(finding.emitted, key=lambda m: -m.wire_bytes):
        same = [e for e in planned if e.kind == m.collective.kind and abs(e.wire_bytes - m.wire_bytes) <= 0.1 * m.wire_bytes]
        if same:
            planned.remove(same[0])
        else:
            emitted.append(m)
    return planned, emitted


def _is_at(source: Source, place: str) -> bool:
    """Whether an op's source is 'file:line', whatever the folder."""
    name, _, line = PurePath(place).name.rpartition(":")
    return PurePath(source.file).name == name and str(source.line) == line


def _both(charges: list[Charges]) -> Charges:
    """All charges together; what is charged twice is charged the most it was."""
    strategies: dict[tuple, float] = {}
    reshards: dict[tuple, float] = {}
    for c in charges:
        for some, more in ((strategies, c.strategies), (reshards, c.reshards)):
            some.update({key: max(extra, some.get(key, 0.0)) for key, extra in more.items()})
    return Charges(strategies, reshards)


def _any(charges: Charges) -> bool:
    return bool(charges.strategies or charges.reshards)


def _planned(plan: Plan) -> Planned:
    assert plan.context is not None and plan.context.planned is not None
    return plan.context.planned


def _same(a: Plan, b: Plan) -> bool:
    return _planned(a).strategies == _planned(b).strategies and _planned(a).retained == _planned(b).retained
