"""How the search ends with a proof: goals between bound and answer, and branch and bound below each goal.

A goal g is a cost that a better answer might have. (5) with g instead of the best answer leaves a part of the problem that is
smaller the nearer g is to the bound; searching that part either finds an answer of at most g or proves that there is none:

    regions = [what (5) leaves for g]
    while regions:  take the one with the least bound; bound it; drop what costs more than g and shrink
                    little is left: CP-SAT;   much went: bound it again;   else: split the states of one node     (branch)

The node to split is the one over whose bytes the priced choices disagree most; one half holds more than the other. Before that,
whatever else keeps the bound down is tried: larger joints where no byte has a price, and more of CP-SAT where no joint is split.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.deadline import ENTRIES_PER_WORK, UNLIMITED, Deadline, OutOfTime
from shardplan.ilp.solver.incumbent import Back, Incumbent
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Messages, Problem
from shardplan.ilp.solver.relax.fixing import Bound, bound
from shardplan.ilp.solver.search import cpsat
from shardplan.ilp.solver.search.repair import LocalSearch, fit
from shardplan.ilp.solver.settings import DEFAULT

JOINT = 1 << 16  # entries of a joint table at first
WIDER = 16  # how often as many, where that helps little
CHANGES = 6  # of prices in a bound
KEPT = 0.8  # share of states up to which a region is bounded again before it is split
TRIES = 3  # priced choices of a bound that are made to fit
CORE = 4_000  # variables up to which CP-SAT takes over
CORE_WORK = 0.3
HARD, HARD_WORK = 8_000, 1.0  # the same, where elimination is exact: only the limit makes it hard, and splitting proves little
CORE_AGAIN = 0.6  # as many variables, after a failure, up to which CP-SAT tries again
CALLS = 2e5  # table entries that shrinking and preparing a node are worth


@dataclass(frozen=True)
class Subproblem:
    """A part of the problem: all answers that are left when some states are dropped.

    Attributes:
        problem: shrunk.
        back: its states as states of the whole problem.
        offset: what the whole problem's cost is above its cost.
        bound: no answer in it costs less.
        prices, messages: to begin with, or None; prices are [T].
        core, hard: variables up to which CP-SAT has a chance in little time, and in more.
        joint: entries of a joint table, where no edge has more.
    """

    problem: Problem
    back: Back
    offset: float
    bound: float = -np.inf
    prices: np.ndarray | None = None
    core: int = CORE
    messages: Messages | None = None
    joint: int = JOINT
    hard: int = HARD

    def after(self, result: Bound) -> Subproblem:
        """The same answers; the next bound begins where this one has got to."""
        value = max(self.bound, result.value + self.offset)
        return replace(self, bound=value, prices=result.best.prices, messages=result.messages)

    def part(
        self, result: Bound, cutoff: float, kept: list[np.ndarray] | None = None, deadline: Deadline = UNLIMITED
    ) -> Subproblem | None:
        """What its bound leaves of the region for answers of at most so much, by the region's problem; None when nothing is left.

        Args:
            kept: masks of states, of those that (5) leaves, by default all of these.
        """
        prices, value = result.best.prices, result.value
        small = presolve(result.reduced_cost_fixing(self.problem, cutoff, kept), dominance=0, deadline=deadline)
        if not small.feasible:
            return None
        outer, horizon = self.back, max((u.hi for u in small.problem.usages), default=0)
        return Subproblem(
            small.problem,
            lambda states: outer(small.invert(states)),
            self.offset + small.offset,
            max(self.bound, value + self.offset),
            prices[small.steps][:horizon],
            self.core,
            small.carry_messages(result.messages),
            self.joint,
            self.hard,
        )


class BranchAndBound:
    """Branch and bound for answers better than the record's.

    Attributes:
        bounds: how many were made.
        tries: how many priced choices of a bound are made to fit.
    """

    def __init__(self, incumbent: Incumbent, deadline: Deadline):
        self.incumbent, self.deadline = incumbent, deadline
        self.bounds, self.tries = 0, TRIES

    def close(self, subproblems: list[Subproblem], goal: float, share: float) -> list[Subproblem]:
        """Searches regions for answers of at most `goal`, the least bound first; returns those that are left to be searched.

        Args:
            share: of what may still be spent.
        """
        deadline, number = self.deadline.share(share), 0
        open_ = [(subproblem.bound, number := number - 1, subproblem) for subproblem in subproblems]
        heapq.heapify(open_)
        while open_ and not deadline.over():
            value, _, subproblem = heapq.heappop(open_)
            if value > min(goal, self.incumbent.cutoff):
                return []
            try:
                parts = self._expand(subproblem, goal)
            except OutOfTime:
                return [subproblem, *(subproblem for _, _, subproblem in sorted(open_, key=lambda item: item[:2]))]
            for part in parts:
                heapq.heappush(open_, (part.bound, number := number - 1, part))
        return [subproblem for _, _, subproblem in sorted(open_, key=lambda item: item[:2])]

    def _expand(self, subproblem: Subproblem, goal: float) -> list[Subproblem]:
        """Parts that hold all answers of the region that are still wanted."""

        def cutoff() -> float:
            return min(goal, self.incumbent.cutoff) - subproblem.offset

        left = self.core(subproblem, goal)
        if left is None:
            return []
        subproblem = left
        result = self.bound(subproblem, cutoff(), subproblem.joint, CHANGES)
        if result.value > cutoff():
            return []
        subproblem, kept = subproblem.after(result), result.surviving_states(cutoff())
        share, joints = sum(int(mask.sum()) for mask in kept) / max(1, sum(map(len, kept))), result.best.elimination_pass.elimination
        if share <= KEPT:
            halves = [kept]
        elif not joints.exact and not result.best.prices.any() and WIDER * joints.size <= DEFAULT.total_entries:
            return [replace(subproblem, joint=WIDER * subproblem.joint)]
        else:
            if joints.exact:
                left = self.core(replace(subproblem, core=subproblem.hard), goal, HARD_WORK)
                if left is None:
                    return []
                subproblem = replace(subproblem, hard=left.core)
            halves = split(result, kept)
        parts = (subproblem.part(result, cutoff(), half, self.deadline) for half in halves)
        return [part for part in parts if part is not None]

    def bound(self, subproblem: Subproblem, cutoff: float, joint: int, changes: int, share: float = 1.0) -> Bound:
        """A bound of a region, for at most a share of what may still be spent; answers are tried on the way."""
        result = bound(subproblem.problem, cutoff, joint, changes, subproblem.prices, subproblem.messages, self.deadline.share(share))
        self.bounds += 1
        self.deadline.spend(result.work + CALLS * len(subproblem.problem.costs))
        if self.tries and result.value <= cutoff and np.isfinite(result.value):
            self.attempt(subproblem, result)
        return result

    def attempt(self, subproblem: Subproblem, result: Bound) -> None:
        """Makes priced choices fit, the best priced first."""
        moves = LocalSearch(subproblem.problem, result.memory, self.deadline)
        points = sorted(result.points, key=lambda point: -point.value)
        for states in list(dict.fromkeys(point.elimination_pass.states() for point in points))[: self.tries]:
            found = fit(moves, states)
            if found is not None:
                self.incumbent.offer(found, subproblem.problem.objective(found) + subproblem.offset, subproblem.back)

    def core(self, subproblem: Subproblem, goal: float, work: float = CORE_WORK) -> Subproblem | None:
        """CP-SAT on a region, if that is small enough; None when that ends with a proof that nothing wanted is left of it.

        Args:
            work: of CP-SAT at most, about seconds.
        """
        variables = cpsat.entries(subproblem.problem)
        if variables > subproblem.core:
            return subproblem
        wanted = min(goal, self.incumbent.cutoff) - subproblem.offset
        seconds = None if self.deadline.time_limit is None else self.deadline.seconds_left / 2
        answer = cpsat.solve_core(subproblem.problem, work=min(work, self.deadline.work), seconds=seconds, most=wanted)
        self.deadline.spend(ENTRIES_PER_WORK * answer.work)
        limit = np.inf if subproblem.problem.limit is None else subproblem.problem.limit
        if answer.status in ("optimal", "feasible") and subproblem.problem.peak(answer.states) <= limit:
            self.incumbent.offer(answer.states, subproblem.problem.objective(answer.states) + subproblem.offset, subproblem.back)
        done = answer.bound + subproblem.offset > min(goal, self.incumbent.cutoff)
        return None if done else replace(subproblem, core=int(CORE_AGAIN * variables))


def split(result: Bound, kept: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Two halves of the states of one node, the others as they are."""
    node, heavy = _disagreement(result, kept)
    if node is None:  # priced choices agree: the node with most states, the dear half of them
        node = max(range(len(kept)), key=lambda i: (int(kept[i].sum()), -i))
        min_marginals = result.min_marginals[node]
        heavy = min_marginals > np.sort(min_marginals[kept[node]])[(int(kept[node].sum()) - 1) // 2]
        if not (heavy & kept[node]).any():
            heavy = np.arange(len(heavy)) > np.flatnonzero(kept[node])[0]
    halves = []
    for half in (~heavy, heavy):
        masks = list(kept)
        masks[node] = kept[node] & half
        halves.append(masks)
    return halves


def _disagreement(result: Bound, kept: list[np.ndarray]) -> tuple[int | None, np.ndarray]:
    """The node over whose bytes the best priced choices disagree most, and which of its states hold more than half way."""
    best = result.best
    penalties = result.memory.penalty(best.prices)
    chosen = [best.relaxed_states, np.array(best.elimination_pass.states())]
    near = sorted(result.points, key=lambda point: point.cutting_plane(best.prices))[:4]
    chosen += [point.relaxed_states for point in near]
    most, node, middle = 0.0, None, 0.0
    for i, penalty in enumerate(penalties):
        if kept[i].sum() < 2:
            continue
        paid = [float(penalty[states[i]]) for states in chosen]
        apart = max(paid) - min(paid)
        light = penalty <= (max(paid) + min(paid)) / 2
        if apart > most and (kept[i] & light).any() and (kept[i] & ~light).any():
            most, node, middle = apart, i, (max(paid) + min(paid)) / 2
    return node, (penalties[node] > middle if node is not None else np.zeros(0, dtype=bool))
