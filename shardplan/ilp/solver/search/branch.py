"""Branch and bound below a target cost: finds an answer of at most the target, or proves that there is none.

Best-first search of the subproblem that reduced-cost fixing (5) leaves for the target:

    open = [what (5) leaves for the target]
    while open:  take the subproblem with the least bound; bound it; fix states above the target; presolve
                 small: CP-SAT;   much fixed: bound it again;   else: branch on the states of one node

The branching node is the one over whose penalty on bytes the relaxed answers disagree most; one child holds its heavy states, the other
its light ones. Before branching: larger buckets where no byte has a price, more work for CP-SAT where elimination is exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.deadline import ENTRIES_PER_WORK, UNLIMITED, Deadline, OutOfTimeError
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Messages, Problem, Solution
from shardplan.ilp.solver.relax.fixing import Bound, bound
from shardplan.ilp.solver.search import cpsat
from shardplan.ilp.solver.search.repair import LocalSearch, repair_and_descend
from shardplan.ilp.solver.settings import DEFAULT, Settings

BRANCH_ABOVE = 0.8  # branch if fixing leaves more than this share of the states, else bound again
GROWTH = 16  # factor of the entries of a bucket table where no byte has a price
HARD_WORK = 1.0  # work of CP-SAT, about seconds, where elimination is exact
CORE_WORK = 0.3  # work of CP-SAT, about seconds, else
CORE_RETRY = 0.6  # CP-SAT is tried again at this share of the size at which it failed
NODE_ENTRIES = 2e5  # table entries that presolving and preparing one node count as work
Progress = Callable[[tuple[int, ...], float, float], None]  # called with (states, bound, gap)
Invert = Callable[[tuple[int, ...]], tuple[int, ...]]  # states of a presolved problem -> states of the given problem
ROUNDING = 1e-9  # relative rounding error of a bound where bytes are not integers, so that penalties are not exact


class Incumbent:
    """The best answer and the best lower bound so far."""

    def __init__(self, problem: Problem, progress: Progress | None, upper_bound: float = np.inf, tolerance: float = 0.0):
        self.progress, self.upper_bound = progress, upper_bound  # answers that cost more are of no use
        self.tolerance = tolerance  # answers that are better by less than this fraction are not sought
        self.objective, self.bound = np.inf, -np.inf
        self.answer: tuple[tuple[int, ...], Invert] = (), tuple  # states of its subproblem, and the way back: most never take it
        self.exact = all((u.bytes == np.floor(u.bytes)).all() for u in problem.usages)

    def offer(self, states: tuple[int, ...], objective: float, invert: Invert = tuple) -> bool:
        """Takes feasible states if they are better than the incumbent and within `upper_bound`; returns whether."""
        if not objective < self.objective or objective > self.upper_bound:
            return False
        self.answer, self.objective = (states, invert), objective
        self._report()
        return True

    def prove(self, value: float) -> None:
        """Takes a lower bound if it is better. Objectives are integers, so an exact bound is rounded up."""
        if np.isfinite(value):
            value = float(np.ceil(value)) if self.exact else value - ROUNDING * abs(value)
        if (value := min(value, self.sought)) > self.bound:
            self.bound = value
            self._report()

    def _report(self) -> None:
        if self.progress and self.found:
            self.progress(self.states, self.bound, Solution("feasible", (), self.objective, self.bound).gap)

    @property
    def states(self) -> tuple[int, ...]:
        """The best answer in states of the given problem."""
        states, invert = self.answer
        return invert(states)

    @property
    def found(self) -> bool:
        """Whether there is an answer."""
        return bool(np.isfinite(self.objective))

    @property
    def sought(self) -> float:
        """Answers that cost less are sought: no bound above it is proven. Without a tolerance the cost of the best answer."""
        if not self.tolerance or not self.found:
            return self.objective
        sought = self.objective - self.tolerance * abs(self.objective)
        return float(np.ceil(sought)) if self.exact else sought

    @property
    def done(self) -> bool:
        """Whether the bound proves that no answer is sought any more; without a tolerance, that this one is optimal."""
        return self.sought <= self.bound

    @property
    def cutoff(self) -> float:
        """The greatest cost that an answer may have which is sought."""
        sought = self.sought
        return min(self.upper_bound, sought - (1.0 if self.exact else ROUNDING * abs(sought)))


@dataclass(frozen=True)
class Subproblem:
    """All answers that remain when some states are removed."""

    problem: Problem  # presolved
    invert: Invert  # its states -> states of the given problem
    offset: float  # cost of the given problem minus cost of `problem`
    bound: float = -np.inf  # no answer in it costs less, in costs of the given problem
    prices: np.ndarray | None = None  # dual prices [T] to start from, or None
    messages: Messages | None = None  # TRW-S messages to start from, or None
    core: int | None = None  # program size up to which CP-SAT is tried with little work; None: the setting
    hard: int = 8_000  # the same with more work
    bucket_entries: int = 1 << 16  # entries of a bucket table

    def warm_started(self, result: Bound) -> Subproblem:
        """The same answers; the next bound starts from this one's prices and messages."""
        value = max(self.bound, result.value + self.offset)
        return replace(self, bound=value, prices=result.best.prices, messages=result.messages)

    def restrict(
        self, result: Bound, cutoff: float, surviving: list[np.ndarray] | None = None, deadline: Deadline = UNLIMITED
    ) -> Subproblem | None:
        """What (5) leaves for answers of at most `cutoff` (in costs of `problem`), or the `surviving` states of it; None if nothing."""
        small = presolve(result.reduced_cost_fixing(self.problem, cutoff, surviving), dominance=0, deadline=deadline)
        if not small.feasible:
            return None
        outer, horizon = self.invert, max((u.hi for u in small.problem.usages), default=0)
        return replace(
            self,
            problem=small.problem,
            invert=lambda states: outer(small.invert(states)),
            offset=self.offset + small.offset,
            bound=max(self.bound, result.value + self.offset),
            prices=result.best.prices[small.steps][:horizon],
            messages=small.carry_messages(result.messages),
        )


class BranchAndBound:
    """Bounds, CP-SAT and branching on subproblems; answers go to the incumbent."""

    def __init__(self, incumbent: Incumbent, deadline: Deadline, settings: Settings = DEFAULT):
        self.incumbent, self.deadline, self.settings = incumbent, deadline, settings
        self.n_bounds, self.repaired_points = 0, 3  # relaxed answers of each bound that are repaired

    def search(self, subproblems: Sequence[Subproblem | None], target: float, share: float) -> list[Subproblem]:
        """Searches subproblems for answers of at most `target`, best first, for a share of what is left of the deadline.

        Returns the subproblems that remain to be searched.
        """
        deadline, number = self.deadline.share(share), 0
        heap = [(subproblem.bound, number := number - 1, subproblem) for subproblem in subproblems if subproblem]
        heapq.heapify(heap)
        while heap and not deadline.over():
            value, _, subproblem = heap[0]
            if value > min(target, self.incumbent.cutoff):
                return []
            try:
                children = self._expand(subproblem, target)
            except OutOfTimeError:
                break
            heapq.heappop(heap)
            for child in children:
                heapq.heappush(heap, (child.bound, number := number - 1, child))
        return [subproblem for _, _, subproblem in sorted(heap, key=lambda item: item[:2])]

    def _expand(self, subproblem: Subproblem, target: float) -> list[Subproblem]:
        """Children that together contain all useful answers of the subproblem."""

        def cutoff() -> float:
            return min(target, self.incumbent.cutoff) - subproblem.offset

        remaining = self.solve_core(subproblem, target)
        if remaining is None:
            return []
        result = self.bound(remaining, cutoff(), remaining.bucket_entries)
        if result.value > cutoff():
            return []
        subproblem, surviving = remaining.warm_started(result), result.surviving_states(cutoff())
        elimination = result.best.elimination_pass.elimination
        if surviving_share(surviving) <= BRANCH_ABOVE:
            children = [surviving]
        elif not elimination.exact and not result.best.prices.any() and GROWTH * elimination.size <= self.settings.total_entries:
            return [replace(subproblem, bucket_entries=GROWTH * subproblem.bucket_entries)]
        else:
            if elimination.exact:
                remaining = self.solve_core(replace(subproblem, core=subproblem.hard), target, HARD_WORK)
                if remaining is None:
                    return []
                subproblem = replace(subproblem, hard=remaining.core)
            children = split(result, surviving)
        parts = (subproblem.restrict(result, cutoff(), child, self.deadline) for child in children)
        return [part for part in parts if part is not None]

    def bound(self, subproblem: Subproblem, cutoff: float, bucket_entries: int, changes: int = 6, share: float = 1.0) -> Bound:
        """A bound of a subproblem, within a share of what is left of the deadline; repairs relaxed answers."""
        deadline = self.deadline.share(share)
        problem, prices, messages = subproblem.problem, subproblem.prices, subproblem.messages
        result = bound(problem, cutoff, bucket_entries, changes, prices, messages, deadline, self.settings)
        self.n_bounds += 1
        self.deadline.spend(result.work + NODE_ENTRIES * len(problem.costs))
        if self.repaired_points and result.value <= cutoff and np.isfinite(result.value):
            local = LocalSearch(problem, self.deadline)
            points = sorted(result.points, key=lambda point: -point.value)
            for states in list(dict.fromkeys(point.elimination_pass.states() for point in points))[: self.repaired_points]:
                found = repair_and_descend(local, states)
                if found is not None:
                    self.offer(subproblem, found)
        return result

    def offer(self, subproblem: Subproblem, states: tuple[int, ...]) -> bool:
        """Offers states of a subproblem to the incumbent."""
        return self.incumbent.offer(states, subproblem.problem.objective(states) + subproblem.offset, subproblem.invert)

    def solve_core(self, subproblem: Subproblem, target: float, work: float | None = None) -> Subproblem | None:
        """CP-SAT on a subproblem that is small enough, by default for `CORE_WORK`; None if no useful answer remains."""
        deadline, size = self.deadline, cpsat.size(subproblem.problem)
        if size > (self.settings.core_size if subproblem.core is None else subproblem.core):
            return subproblem
        cutoff = min(target, self.incumbent.cutoff) - subproblem.offset
        seconds = None if deadline.time_limit is None else deadline.seconds_left / 2
        budget = min(CORE_WORK if work is None else work, deadline.work)
        answer = cpsat.solve_core(subproblem.problem, work=budget, seconds=seconds, cutoff=cutoff)
        deadline.spend(ENTRIES_PER_WORK * answer.stats["work"])
        if answer.status in ("optimal", "feasible") and subproblem.problem.fits(answer.states):
            self.offer(subproblem, answer.states)
        proven = answer.bound + subproblem.offset > min(target, self.incumbent.cutoff)
        return None if proven else replace(subproblem, core=int(CORE_RETRY * size))


def surviving_share(surviving: list[np.ndarray]) -> float:
    """Share of the states that masks keep."""
    return sum(int(mask.sum()) for mask in surviving) / max(1, sum(map(len, surviving)))


def split(result: Bound, surviving: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Masks of two children: the states of one node in two parts, all other nodes as they are."""
    node, heavy = _disagreement(result, surviving)
    if node is None:  # relaxed answers agree: the node with most states, the costly half of them
        node = max(range(len(surviving)), key=lambda i: (int(surviving[i].sum()), -i))
        min_marginals = result.min_marginals[node]
        heavy = min_marginals > np.sort(min_marginals[surviving[node]])[(int(surviving[node].sum()) - 1) // 2]
        if not (heavy & surviving[node]).any():
            heavy = np.arange(len(heavy)) > np.flatnonzero(surviving[node])[0]
    return [[*surviving[:node], surviving[node] & part, *surviving[node + 1 :]] for part in (~heavy, heavy)]


def _disagreement(result: Bound, surviving: list[np.ndarray]) -> tuple[int | None, np.ndarray]:
    """The node over whose penalty the best relaxed answers disagree most, and its states above the middle of that range."""
    best = result.best
    penalties = result.problem.by_node(result.problem.usage_table.penalty(best.prices))
    near = sorted(result.points, key=lambda point: point.cutting_plane(best.prices))[:4]
    answers = [best.relaxed_states, best.elimination_pass.states(), *(point.relaxed_states for point in near)]
    widest, node, middle = 0.0, None, 0.0
    for i, penalty in enumerate(penalties):
        if surviving[i].sum() < 2:
            continue
        paid = [float(penalty[states[i]]) for states in answers]
        light = penalty <= (max(paid) + min(paid)) / 2
        if max(paid) - min(paid) > widest and (surviving[i] & light).any() and (surviving[i] & ~light).any():
            widest, node, middle = max(paid) - min(paid), i, (max(paid) + min(paid)) / 2
    return node, (penalties[node] > middle if node is not None else np.zeros(0, dtype=bool))
