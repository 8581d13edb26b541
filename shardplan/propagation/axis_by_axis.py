"""The search "recursive": one mesh axis at a time, each given what the axes before it do.

With all other axes decided an op has only as many strategies as its rule has factors, so one axis is a small cost network, built and
solved like any other. A mesh costs the sum of its axes' choices and not their product, and time is linear in the ops. Axes are decided
from the outermost links inwards; then each axis is decided again, given all the others, as long as that makes the step cheaper. Every
plan on the way is a candidate, which the objective judges (`search/objective.py`); none comes with a proof.

While axes are left, an array may still be sharded over them: the memory limit of an axis is the device's times the size of the axes to
come, and less if that led to a mesh on which nothing fits.

Also known as recursive partitioning. MindSpore's double recursive search halves the devices like this; there, ops choose one after the
other, the heaviest first: H. Wang et al., "Efficient and Systematic Partitioning of Large and Deep Neural Networks for
Parallelization", Euro-Par 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardplan.costs.build import build_network
from shardplan.costs.network import CostNetwork
from shardplan.costs.pins import allowed_strategies
from shardplan.costs.pricing import Pricing, plan_windows
from shardplan.costs.space import make_strategy_space
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Solution
from shardplan.ir.graph import Path
from shardplan.propagation.search import propagate
from shardplan.search.objective import Candidates
from shardplan.search.protocol import Search
from shardplan.strategies.enumerate import OPEN
from shardplan.xla_model.overlap_windows import OverlapWindows

MEMORY_SHARES = (1.0, 0.8, 0.6)
"""Shares of the memory limit times the size of the axes to come, tried in this order."""

SWEEPS = 3
"""Rounds in which every axis is decided again."""

WORK = 2.0
"""Work limit of one axis, about seconds."""

AxisFactors = Mapping[Path, tuple[str | None, ...]]
"""By path of an op, the factor that each mesh axis shards; OPEN for an axis that is to be decided."""


class AxisByAxis(Search):
    """Search "recursive"."""

    def plan(self, memory: float | None) -> Candidates | None:
        """The plans on the way; None if none ends in a network that fits `memory` bytes per device."""
        found = Candidates.none(self.task, memory)
        for plan in axis_by_axis(self.task, memory, self.task.interference):
            found.add(plan)
        self.task.stopwatch.lap("solve")
        return found if found.best else None


def axis_by_axis(task: PlanningTask, limit: float | None, background_price: float) -> Iterator[Candidate]:
    """The plans, "feasible", when all axes are decided and whenever one is decided again; none exceeds `limit`."""
    if axes := tuple(a for a, n in task.resharder.mesh if n > 1):
        descent = _Descent(task, limit, Pricing(background_price), axes)
        for share in MEMORY_SHARES:
            level = None
            for level in descent.run(share):
                yield Candidate(level.network, replace(level.solution, status="feasible", bound=0.0))
            if level is not None:
                break


class _Level(NamedTuple):
    """One axis decided: the network it was decided in, what every op does on every axis, and the overlap windows of all networks."""

    network: CostNetwork
    solution: Solution
    factors: AxisFactors
    windows: OverlapWindows


@dataclass(frozen=True, eq=False)
class _Descent:
    """Axes of a mesh decided in one order."""

    task: PlanningTask
    limit: float | None
    pricing: Pricing
    order: tuple[str, ...]

    def run(self, memory_share: float) -> Iterator[_Level]:
        """All axes decided once, then again while that makes the step cheaper; nothing if nothing fits on the way."""
        level, within = None, {}
        for n, axis in enumerate(self.order):
            within = self.opened(axis, level.factors if level else {})
            to_come = self.task.resharder.mesh.size(*self.order[n + 1 :])
            limit = None if self.limit is None else self.limit * to_come * (memory_share if to_come > 1 else 1.0)
            level = self.decide(axis, within, self.order[: n + 1], limit, level and level.windows)
            if level is None:
                return
        assert level is not None
        yield level
        yield from self.sweep(level, {self.order[-1]: within})  # the last axis was decided given all others

    def sweep(self, level: _Level, given: dict[str, AxisFactors]) -> Iterator[_Level]:
        """Every axis decided again, given all others, while that makes the step cheaper; `given`: axis -> the others by then."""
        for _ in range(SWEEPS if len(self.order) > 1 else 0):
            before = level
            for axis in self.order:
                within = self.opened(axis, level.factors)
                if within != given.get(axis):
                    given[axis] = within
                    found = self.decide(axis, within, self.order, self.limit, level.windows)
                    if found and found.solution.objective < level.solution.objective:
                        level = found
                        yield level
            if level is before:
                break

    def decide(
        self, axis: str, within: AxisFactors, decided: Sequence[str], limit: float | None, windows: OverlapWindows | None
    ) -> _Level | None:
        """One axis, given what every op does on the others; pins count as far as they speak of the axes `decided` by then."""
        task, mesh = self.task, self.task.resharder.mesh
        others = tuple(OPEN if a == axis else None for a in mesh.axes)
        space = make_strategy_space(task.facts, mesh, task.resharder.cluster, within, others)
        allowed = allowed_strategies(space, decided, options=task.options)
        windows = windows or plan_windows(space, self.pricing.combined)
        network = build_network(space, task.resharder, limit, allowed, pricing=self.pricing, windows=windows)
        presolved = presolve(network.problem, tie=True)
        hint = propagate(network.problem, presolved)
        solution = solve(network.problem, hint=hint.states if hint.found else None, work_limit=WORK, presolved=presolved)
        if not solution.found:
            return None
        chosen = network.strategies(solution.states)
        factors = {op.path: space.strategies[i].factors[chosen[i]] for i, op in enumerate(space.graph.ops)}
        return _Level(network, solution, factors, windows)

    def opened(self, axis: str, factors: AxisFactors) -> AxisFactors:
        """What every op does, but for one axis, which is to be decided."""
        axes = self.task.resharder.mesh.axes
        return {path: tuple(OPEN if a == axis else x for a, x in zip(axes, found, strict=True)) for path, found in factors.items()}
