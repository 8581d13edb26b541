"""Recursive search: the mesh is cut one axis at a time, each axis given what the ones before it do.

With all other axes settled an op has only as many strategies as its rule has letters, so one level is a small network, built and
solved like any other. A mesh costs the sum of its axes' choices and not their product, and time is linear in the ops. Levels go from
the innermost links outwards and the other way round; then each axis is chosen once more, given all the others, as long as that
makes the step cheaper. The cheaper of the two directions is the answer. Nothing is proven of it.

While axes are left, an array may still be split by them: the budget of a level is the device's times the size of the axes to come,
and less of it when that led to a mesh on which nothing fits.

MindSpore's double recursive search halves the devices like this; there, ops choose one after the other, the heaviest first.
Source: H. Wang et al., "Efficient and Systematic Partitioning of Large and Deep Neural Networks for Parallelization", Euro-Par 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.costs.network import CostNetwork, build_network
from shardplan.costs.space import StrategySpace, make_strategy_space
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Solution
from shardplan.ir.graph import Graph, Path
from shardplan.mesh.reshard import Resharder
from shardplan.propagation.propagate import propagate
from shardplan.strategies.enumerate import OPEN

SHARES = (1.0, 0.8, 0.6)
"""Of the budget that axes to come would make enough."""

SWEEPS = 3

WORK = 2.0
"""Work limit of one level."""


AxisFactors = Mapping[Path, tuple[str | None, ...]]
Allowed = Callable[[StrategySpace, Sequence[str]], Mapping[int, np.ndarray]]


@dataclass(frozen=True, eq=False)
class _Level:
    """One axis settled: the network it was settled in, and what every op does on every axis."""

    network: CostNetwork
    solution: Solution
    factors: AxisFactors


def recursive(
    graph: Graph, resharder: Resharder, limit: float | None, allowed: Allowed, background_price: float = 1.0
) -> tuple[CostNetwork, Solution] | None:
    """The last axis's network and its answer; None when no direction ends in a plan that fits.

    Args:
        graph: the step, before copies are put in.
        resharder: prices redistribution on the mesh.
        limit: bytes per device, or None.
        allowed: which strategies of pinned ops remain, when only the given axes are settled.
        waiting: as in `build_network`.
    """
    mesh = resharder.mesh
    axes = [a for a, n in mesh if n > 1]
    if not axes:
        return None

    def opened(axis: str, found: Sequence[str | None]) -> tuple[str | None, ...]:
        return tuple(OPEN if a == axis else x for a, x in zip(mesh.axes, found, strict=True))

    def others(axis: str, factors: AxisFactors) -> AxisFactors:
        return {path: opened(axis, found) for path, found in factors.items()}

    def settle(axis: str, within: AxisFactors, settled: Sequence[str], budget: float | None) -> _Level | None:
        space = make_strategy_space(graph, mesh, resharder.cluster, within, opened(axis, [None] * len(mesh.axes)))
        network = build_network(space, resharder, budget, allowed(space, settled), background_price=background_price)
        presolved = presolve(network.problem, tie=True)
        hint = propagate(network.problem, presolved)
        solution = solve(network.problem, hint=hint.states or None, work_limit=WORK, presolved=presolved)
        if not solution.states or not np.isfinite(solution.objective):
            return None
        chosen = network.strategies(solution.states)
        return _Level(network, solution, {op.path: space.strategies[i].factors[chosen[i]] for i, op in enumerate(space.graph.ops)})

    def descend(order: Sequence[str], share: float) -> _Level | None:
        level, factors = None, {}
        asked: dict[str, AxisFactors] = {}
        for n, axis in enumerate(order):
            rest = mesh.size(*order[n + 1 :])
            budget = None if limit is None else limit * rest * (share if rest > 1 else 1.0)
            asked = {axis: others(axis, factors)}  # the last axis knows all others already
            level = settle(axis, asked[axis], order[: n + 1], budget)
            if level is None:
                return None
            factors = level.factors
        assert level is not None
        for _ in range(SWEEPS if len(order) > 1 else 0):
            before = level
            for axis in order:
                within = others(axis, level.factors)
                if within == asked.get(axis):
                    continue
                asked[axis] = within
                found = settle(axis, within, order, limit)
                level = found if found and found.solution.objective < level.solution.objective else level
            if level is before:
                break
        return level

    best: _Level | None = None
    for order in dict.fromkeys((tuple(reversed(axes)), tuple(axes))):
        found = next((level for share in SHARES if (level := descend(order, share)) is not None), None)
        if found and (best is None or found.solution.objective < best.solution.objective):
            best = found
    if best is None:
        return None
    return best.network, replace(best.solution, status="feasible", bound=0.0)
