"""The pricing loop: price, search, recount what the plan combines, until the plan costs what it was found at.

Prices only find candidates: every plan on the way is judged by the objective (`objective.py`), and the best need not be the last.

XLA combines collectives of one kind into one, which pays one latency, a fixed charge that depends on the whole plan. A cost network
prices each array by itself, at 1/n of the latency if n arrays are combined. At first n is the number of all arrays of a class, which is
too cheap where a plan moves some of them in another way. So:

    1 converge    price at what the last plan combines; search; recount; until its collectives cost what they were found at
    2 untie       repeated layers on their own, at the best plan's prices
    3 fit         what a plan combines says how long arrays wait in memory, too. If no plan fits at its own prices, the plan of least
                  memory sets the prices, and the search runs once more

Step 1 never leads to a plan that moves all arrays in another way: the first to change would pay the latency alone. Such plans come from
the other searches and from coarser meshes (`ilp/integer_program.py`), and the loop runs once more from the best of them.

Also known as dynamic slope scaling: Kim and Pardalos, "A solution approach to the fixed charge network flow problem using a dynamic
slope scaling procedure", Operations Research Letters 24(4), 1999.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import CombinedGroups, Pricing
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.problem import Solution
from shardplan.search.min_memory import min_peak_memory
from shardplan.search.objective import Candidates, Judged
from shardplan.search.overlap_price import cheapest_price
from shardplan.xla_model.liveness import RunOrder

States = tuple[int, ...]
SearchStates = Callable[[CostNetwork, States, Deadline], Solution]
"""`Search.search`."""

ROUNDS = 3
"""Rounds of price, search and recount from one start."""

CONVERGED = 0.005
"""A plan whose collectives cost at most this part of the step more than they were found at is not searched again."""


class Coarse(NamedTuple):
    """A task on a coarser mesh, and the translation of its plans into the space of all strategies."""

    task: PlanningTask
    on_all_axes: Callable[[Candidate], Candidate]


def slope_scaling(
    candidates: Candidates,
    search: SearchStates,
    untied: SearchStates | None,
    deadline: Deadline,
    combined: CombinedGroups | None = None,
    complete: bool = True,
    coarse: Coarse | None = None,
) -> None:
    """Every plan that the loop comes upon is added to `candidates`.

    Args:
        candidates: whose limit is that of the networks.
        search: states of one network.
        untied: searches for step 2, if anything does.
        deadline: ends the loop after the search in progress.
        combined: what the first network assumes to be combined; None: all arrays of a group.
        complete: whether steps 2 and 3 follow step 1.
        coarse: the networks are those of a coarser mesh.
    """
    loop = _PricingLoop(candidates, search, untied, deadline, coarse or Coarse(candidates.task, lambda plan: plan))
    loop.converge(combined)
    if candidates.best is not None and complete:
        loop.untie_layers()
        loop.fit_memory()


@dataclass
class _PricingLoop:
    """The loop's state: the network last searched, what the plan last judged combines, and under a limit the order of its schedule."""

    candidates: Candidates
    search: SearchStates
    untied: SearchStates | None
    deadline: Deadline
    coarse: Coarse
    network: CostNetwork | None = None
    combined: CombinedGroups | None = None
    order: RunOrder | None = None

    @property
    def task(self) -> PlanningTask:
        return self.coarse.task

    def price(self, pricing: Pricing) -> CostNetwork:
        return self.task.network(pricing, self.candidates.limit)

    def solve(self, search: SearchStates, combined: CombinedGroups | None, hint: States = ()) -> Candidate:
        """The best plan at the prices of `combined`, over all overlap prices."""

        def at(price: float) -> Candidate:
            network = self.price(Pricing(price, combined, order=self.order))
            return Candidate(network, search(network, hint, self.deadline))

        found = cheapest_price(at, self.task.interference, self.deadline)
        self.network = found.network
        return found

    def attempt(self, search: SearchStates, combined: CombinedGroups | None, hint: States = ()) -> None:
        """Solve, and judge what is found."""
        found = self.solve(search, combined, hint)
        if found.solution.found:
            self.judge(found)

    def judge(self, found: Candidate) -> Judged:
        judged = self.candidates.add(self.coarse.on_all_axes(found))
        self.combined = judged.network.pricing.combined
        if self.candidates.limit is not None and judged.network.space is self.task.space:
            self.order = judged.memory.order
        return judged

    def converge(self, combined: CombinedGroups | None) -> None:
        """Step 1."""
        found = self.solve(self.search, combined)
        for n in range(ROUNDS):
            if n:
                found = self.solve(self.search, self.combined, found.solution.states)
            if not found.solution.found:
                break
            judged = self.judge(found)
            if self.deadline.over() or (not judged.excess_bytes and self.agrees(judged, found)):
                break

    def agrees(self, judged: Judged, found: Candidate) -> bool:
        """Whether the collectives of a plan take, at the prices of what it combines, what they were found at."""
        own, before = judged.network.sent_ps(judged.states), found.network.sent_ps(found.solution.states)
        return own - before <= CONVERGED * judged.solution.objective

    def untie_layers(self) -> None:
        """Step 2."""
        best = self.candidates.best
        assert best is not None
        if self.untied and best.solution.tied and not self.deadline.over():
            self.attempt(self.untied, best.network.pricing.combined, best.states)

    def fit_memory(self) -> None:
        """Step 3, if no plan fits at its own prices."""
        if not self.candidates.excess_bytes:
            return
        for _ in range(ROUNDS):
            assert self.network is not None
            states = min_peak_memory(self.network.problem) if self.candidates.excess_bytes else ()
            if not states:
                break
            self.judge(Candidate(self.network, Solution("feasible", states, self.network.problem.objective(states), 0.0)))
            self.network = self.price(Pricing(self.network.pricing.background_price, self.combined, order=self.order))
        if self.candidates.excess_bytes or not self.deadline.over():
            self.attempt(self.search, self.combined)
