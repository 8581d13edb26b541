"""What a search is given, and what it returns: a planning task, and a candidate plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from shardplan.costs.build import build_network
from shardplan.costs.network import CostNetwork
from shardplan.costs.options import Options
from shardplan.costs.pins import allowed_strategies
from shardplan.costs.pricing import Pricing
from shardplan.costs.space import StepFacts, StrategySpace, make_strategy_space, with_merged_axes
from shardplan.ilp.solver.problem import Solution
from shardplan.ir.graph import Graph
from shardplan.mesh.reshard import Resharder


class Candidate(NamedTuple):
    """A cost network and a search's answer to it."""

    network: CostNetwork
    solution: Solution


class Stopwatch:
    """Wall-clock seconds by stage."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())

    def lap(self, stage: str) -> None:
        """Count the time since the last lap as `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.start
        self.start = now


@dataclass(frozen=True, eq=False, repr=False)
class PlanningTask:
    """A step, before copies are put in, on a mesh, with options: what every search starts from.

    With `merged`, mesh axes of a group are on the same factor, and `finer` is the task without. `known_space` is the one that an
    earlier task of the step made.
    `constraint_states` is a cache of `propagation.search`: (limit, background price) -> states; `optima` one of `ilp`: of the networks
    that were solved to optimality, (pricing, limit) -> solution; `bounds` one of `search.bound`: its last answer.
    """

    graph: Graph
    resharder: Resharder
    options: Options
    stopwatch: Stopwatch
    constraint_states: dict[tuple[float | None, float], tuple[int, ...]] = field(default_factory=dict)
    optima: dict[tuple[Pricing, float | None], Solution] = field(default_factory=dict)
    bounds: list[tuple[float, list[Candidate]]] = field(default_factory=list)
    merged: tuple[tuple[str, ...], ...] = ()
    finer: PlanningTask | None = None
    known_space: StrategySpace | None = None

    def coarser(self) -> Iterator[PlanningTask]:
        """The same step on every coarser mesh: neighbouring axes merged into one."""
        axes = tuple(axis for axis, n in self.resharder.mesh if n > 1)
        for n in range(len(axes) - 1) if not self.merged else ():  # the number of cuts between groups
            for cuts in combinations(range(1, len(axes)), n):
                groups = tuple(axes[a:b] for a, b in pairwise((0, *cuts, len(axes))))
                options = replace(self.options, corrections=None)
                yield PlanningTask(self.graph, self.resharder, options, self.stopwatch, bounds=self.bounds, merged=groups, finer=self)

    @property
    def interference(self) -> float:
        """Fraction of the seconds in which kernels and collectives run at once that is lost; 1 where nothing overlaps."""
        return self.options.interference(self.resharder.cluster)

    @property
    def overlaps(self) -> bool:
        """Whether collectives run at the same time as kernels."""
        return self.interference < 1

    @cached_property
    def facts(self) -> StepFacts:
        """What holds of the step whatever is sharded."""
        if self.known_space:
            return self.known_space.facts
        return self.finer.facts if self.finer else StepFacts.of(self.graph, self.resharder.mesh, self.resharder.cluster.device)

    @cached_property
    def space(self) -> StrategySpace:
        """The strategies of every op on all mesh axes."""
        if self.known_space:
            return self.known_space
        if self.finer:
            return with_merged_axes(self.finer.space, self.merged)
        space = make_strategy_space(self.facts, self.resharder.mesh, self.resharder.cluster)
        self.stopwatch.lap("strategies")
        return space

    @cached_property
    def allowed(self) -> dict[int, np.ndarray]:
        """Pinned op -> bool [s], which of its strategies the pins leave."""
        return allowed_strategies(self.space, options=self.options)

    @cached_property
    def network(self) -> Callable[[Pricing, float | None], CostNetwork]:
        """The cost network at these prices and this limit; the last four are cached."""

        def build(pricing: Pricing, limit: float | None) -> CostNetwork:
            return build_network(self.space, self.resharder, limit, self.allowed, self.options.corrections, pricing)

        return lru_cache(maxsize=4)(build)
