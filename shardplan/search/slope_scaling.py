"""The pricing loop: price, search, recount what the plan combines, until the plan costs what it was found at.

Prices only find candidates: every plan on the way is judged by the objective (`objective.py`), and the best need not be the last.

XLA combines collectives of one kind into one, which pays one latency, a fixed charge that depends on the whole plan. A cost network
prices each array by itself, at 1/n of the latency if n arrays are combined. At first n is the number of all arrays of a class, which is
too cheap where a plan moves some of them in another way. So:

    1 converge    price at what the last plan combines; search; recount; until the plan costs what it was found at
    2 restart     1 never leads to a plan that moves all arrays in another way: the first to change would pay the latency alone. If the
                  plan costs much more than the first was found at, 1 starts again from uniform plans: every gradient reduce-scattered
                  over the inner mesh axes and all-reduced over the others
    3 untie       repeated layers on their own, at the best plan's prices
    4 fit         what a plan combines says how long arrays wait in memory, too. If no plan fits at its own prices, the plan of least
                  memory sets the prices, and the search runs once more

Also known as dynamic slope scaling: Kim and Pardalos, "A solution approach to the fixed charge network flow problem using a dynamic
slope scaling procedure", Operations Research Letters 24(4), 1999.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import inf, prod

from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import CombinedGroups, Pricing
from shardplan.costs.space import StrategySpace
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.problem import Solution
from shardplan.mesh.collective import CollectiveKey
from shardplan.search.min_memory import min_peak_memory
from shardplan.search.objective import Candidates, Judged
from shardplan.search.overlap_price import cheapest_price

States = tuple[int, ...]
SearchStates = Callable[[CostNetwork, States, float, Deadline], Solution]
"""`Search.search`."""

ROUNDS = 3
"""Rounds of price, search and recount from one start."""

CONVERGED = 0.005
"""A plan that costs at most this much more than it was found at is not searched again."""

FAR_OF_STEP, FAR_OF_COMMUNICATION = 0.03, 0.15
"""Restart if the best plan costs more than the first was found at by this fraction of the step and of its communication."""

HOPELESS = 0.1
"""A restarted search drops plans that cost this much more than the best: their own prices would hardly make up for it."""


def slope_scaling(
    candidates: Candidates,
    search: SearchStates,
    untied: SearchStates | None,
    deadline: Deadline,
    combined: CombinedGroups | None = None,
    restart: bool = True,
) -> Candidate:
    """Every plan that the loop comes upon is added to `candidates`.

    Args:
        candidates: whose limit is that of the networks.
        search: states of one network.
        untied: searches for step 3, if anything does.
        deadline: ends the loop after the search in progress.
        combined: what the first network assumes to be combined; None: all arrays of a group.
        restart: whether steps 2 to 4 follow step 1.

    Returns:
        The first candidate, at the prices it was found at.
    """
    loop = _PricingLoop(candidates, search, untied, deadline)
    first = loop.converge(combined)
    if candidates.best is not None and restart:
        loop.restart_from_uniform_plans(first.solution.objective)
        loop.untie_layers()
        loop.fit_memory()
    return first


@dataclass
class _PricingLoop:
    """The loop's state: the network last searched, what the plan last judged combines, and the least picoseconds at own prices."""

    candidates: Candidates
    search: SearchStates
    untied: SearchStates | None
    deadline: Deadline
    network: CostNetwork | None = None
    combined: CombinedGroups | None = None
    priced: float = inf

    @property
    def task(self) -> PlanningTask:
        return self.candidates.task

    def price(self, pricing: Pricing) -> CostNetwork:
        return self.task.network(pricing, self.candidates.limit)

    def solve(self, search: SearchStates, combined: CombinedGroups | None, hint: States = (), cutoff: float = inf) -> Candidate:
        """The best plan at the prices of `combined`, over all overlap prices; `cutoff` holds at the lowest of these."""
        exposed_fraction = self.task.exposed_fraction

        def at(price: float) -> Candidate:
            network = self.price(Pricing(price, combined))
            return Candidate(network, search(network, hint, cutoff if price == exposed_fraction else inf, self.deadline))

        found = cheapest_price(at, exposed_fraction, self.deadline)
        self.network = found.network
        return found

    def attempt(self, search: SearchStates, combined: CombinedGroups | None, hint: States = (), cutoff: float = inf) -> None:
        """Solve, and judge what is found."""
        found = self.solve(search, combined, hint, cutoff)
        if found.solution.states:
            self.judge(found)

    def judge(self, found: Candidate) -> Judged:
        judged = self.candidates.add(found)
        self.combined = judged.network.pricing.combined
        if not judged.excess_bytes:
            self.priced = min(self.priced, judged.priced)
        return judged

    def converge(self, combined: CombinedGroups | None) -> Candidate:
        """Step 1; returns the first candidate."""
        first = found = self.solve(self.search, combined)
        for n in range(ROUNDS):
            if n:
                found = self.solve(self.search, self.combined, found.solution.states)
            if not found.solution.states:
                break
            judged = self.judge(found)
            agrees = not judged.excess_bytes and judged.priced <= (1 + CONVERGED) * found.solution.objective
            if agrees or self.deadline.over():
                break
        return first

    def restart_from_uniform_plans(self, first_cost: float) -> None:
        """Step 2, if the best plan costs much more than `first_cost`, the picoseconds at which the first was found."""
        best = self.candidates.best
        assert best is not None
        priced = min(self.priced, best.priced)
        communication = priced - best.network.step_seconds(best.states).compute
        if priced - first_cost <= min(FAR_OF_STEP * first_cost, FAR_OF_COMMUNICATION * communication):
            return
        for combined in uniform_groups(self.task.space):
            self.combined = combined
            if self.deadline.over():
                break
            for _ in range(ROUNDS):
                before, cutoff, at = self.priced, (1 + HOPELESS) * self.priced, self.candidates.best
                self.attempt(self.search, self.combined, at.states if at else (), cutoff)
                if not self.priced < before or self.deadline.over():
                    break

    def untie_layers(self) -> None:
        """Step 3."""
        best = self.candidates.best
        assert best is not None
        if self.untied and best.solution.tied and not self.deadline.over():
            self.attempt(self.untied, best.network.pricing.combined, best.states)

    def fit_memory(self) -> None:
        """Step 4, if no plan fits at its own prices."""
        if not self.candidates.excess_bytes:
            return
        for _ in range(ROUNDS):
            assert self.network is not None
            states = min_peak_memory(self.network.problem) if self.candidates.excess_bytes else ()
            if not states:
                break
            self.judge(Candidate(self.network, Solution("feasible", states, self.network.problem.objective(states), 0.0)))
            self.network = self.price(Pricing(self.network.pricing.background_price, self.combined))
        if self.candidates.excess_bytes or not self.deadline.over():
            self.attempt(self.search, self.combined)


def uniform_groups(space: StrategySpace) -> Iterator[CombinedGroups]:
    """What uniform plans combine: every gradient is reduce-scattered over no axes, the innermost, the two innermost, ..."""
    axes = tuple(axis for axis, n in space.mesh if n > 1)
    arrays: dict[tuple[int, str], dict[int, float]] = {}
    for value, site in zip(space.graph.values, space.collective_sites, strict=True):
        if site.group_size > 1 and site.collective_class in ("prefetch", "gradient"):
            arrays.setdefault((site.group, site.collective_class), {})[site.origin] = value.bytes
    gathers = [CollectiveKey("all-gather", some) for n in range(len(axes)) for some in combinations(axes, n + 1)]
    for n in range(len(axes) + 1):
        summed, scattered = axes[: len(axes) - n], axes[len(axes) - n :]
        reductions = [CollectiveKey(kind, over) for kind, over in (("all-reduce", summed), ("reduce-scatter", scattered)) if over]
        shards = prod(space.mesh.size(axis) for axis in scattered)
        yield tuple(
            ((group, key), tuple(sorted((origin, size / shards) for origin, size in of.items())))
            for (group, collective_class), of in sorted(arrays.items())
            for key in sorted(gathers if collective_class == "prefetch" else reductions)
        )
