"""How a problem gets its answer: the chain of links on one page.

    shrink      exact reductions                                                                            shrink.py
    bound       prices on bytes, costs shifted along edges, elimination: what no answer can beat, first answers, and the states
                and pairs of states that no better answer takes; shrink again          bound.py, prices.py, shift.py, eliminate.py
    focus       answers among the states that are best by the bound, and again among the best of these
    close       branch and bound for answers that are better than the best, CP-SAT on small cores           branch.py, cpsat.py
    explore     under a time limit only: shifting under prices that follow the memory, sweeps and kicks     explore.py, plans.py

Without a time limit no clock is read: every link counts its work, so the answer is the same everywhere.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline, OutOfTime
from shardplan.ilp.solver.incumbent import LARGE, Incumbent, Progress, uncollected
from shardplan.ilp.solver.min_peak import minimize_peak
from shardplan.ilp.solver.presolve.presolve import Presolved, presolve
from shardplan.ilp.solver.problem import Problem, Solution
from shardplan.ilp.solver.relax.fixing import Bound
from shardplan.ilp.solver.search.branch import CHANGES, BranchAndBound, Subproblem
from shardplan.ilp.solver.search.repair import LocalSearch, fit
from shardplan.ilp.solver.settings import DEFAULT

if TYPE_CHECKING:
    from shardplan.ilp.solver.primal.iterated_search import PrimalSearch

JOINT = 1 << 14  # entries of a joint table
FOCUS = 0.3  # share of the states among which an answer is looked for
ALIKE, AGAIN = 0.8, 0.6  # share of states that are left from which, up to which another bound of the whole does not pay, does
GOAL_SHARE = 0.35  # of what may still be spent, for each goal but the last
UNKNOWN_GAP = 0.3  # of the bound: how far away the first answer may be, as long as there is none
REACH = 0.25  # of the way from bound to answer, for the first goal
EASE_SHARE = 0.5  # of what may be spent, for the problem without its memory limit
LARGE_SHARE = 0.15  # of the time, for a bound of a large problem
DOMINANCE_SHARE = 0.15  # of the time, up to which dominated states are looked for
LOADING = 1.0  # seconds that loading numba and what it has compiled may take
HASTE = 0.4  # of the time: where shrinking takes longer, a first answer comes before a bound


@uncollected()
def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    hint: tuple[int, ...] | None = None,
    cutoff: float = np.inf,
    patience: float = 1.0,
    progress: Progress | None = None,
    presolved: Presolved | None = None,
) -> Solution:
    """The cheapest states of (1) under (2)-(3), with a proof of how good they are.

    Args:
        problem: the network; nodes of one class in `problem.ties` take the same state.
        time_limit: seconds; at the limit the best answer so far is returned, "fallback" without states if there is none. None: no
            clock is read.
        work_limit: counted work, about seconds; by default 20 without a time limit, none with one.
        hint: states to start from, and to return when nothing better is found (status "fallback").
        cutoff: only answers that cost at most this much are wanted; "infeasible" if there are none.
        patience: share of the time limit after which the search ends if there is no answer.
        progress: called with (states, bound, gap) whenever one of them gets better.
        presolved: `presolve(problem, tie=True)`, if that is there already.

    Returns:
        "optimal", "feasible" (with a gap), "infeasible" (proven) or "fallback".

    Raises:
        ValueError: a cost is no whole number; no bound would be exact.
    """
    deadline = Deadline(time_limit, work_limit, lambda: 1.0 if incumbent.found else patience)
    _check_whole(problem)
    incumbent = Incumbent(problem, progress, cutoff)
    if hint is not None and (problem.limit is None or problem.peak(hint) <= problem.limit):
        incumbent.offer(tuple(hint), problem.objective(hint))
    hinted = incumbent.answer if incumbent.found else None
    incumbent.prove(problem.lower_bound())
    stats, proven = {"nodes": len(problem.costs)}, False
    try:
        presolved = presolved or presolve(problem, tie=True, deadline=deadline.share(DOMINANCE_SHARE))
        chain = Chain(Subproblem(presolved.problem, presolved.invert, presolved.offset), incumbent, deadline)
        proven = not presolved.feasible or chain.run()
        stats |= {"nodes after shrinking": len(presolved.problem.costs), "bounds": chain.tree.bounds}
    except OutOfTime:
        pass
    if proven and incumbent.found:
        incumbent.prove(np.inf)
    if not proven and not incumbent.found:
        proven = _leanest(problem, incumbent, deadline)
    tied = bool(problem.ties)
    if not incumbent.found:
        status = "infeasible" if proven else "fallback"
        return Solution(status, (), np.inf, np.inf if proven else incumbent.bound, tied, stats)
    status = "optimal" if incumbent.done else "fallback" if incumbent.answer is hinted else "feasible"
    return Solution(status, incumbent.states, incumbent.objective, incumbent.bound, tied, stats)


def _leanest(problem: Problem, incumbent: Incumbent, deadline: Deadline) -> bool:
    """Offers the leanest states, if they fit; True when it is proven that nothing does. Of few states, however little time there is."""
    limit = np.inf if problem.limit is None else problem.limit
    try:
        least = minimize_peak(problem, limit, deadline if problem.n_states > DEFAULT.exact_states else UNLIMITED)
    except OutOfTime:
        return False
    if least.states and least.bytes <= limit:
        incumbent.offer(least.states, problem.objective(least.states))
    return least.bound_bytes > limit


class Chain:
    """The links after the first shrink, on a region that gets smaller as answers and bounds get better."""

    def __init__(self, subproblem: Subproblem, incumbent: Incumbent, deadline: Deadline):
        self.subproblem, self.incumbent, self.deadline = subproblem, incumbent, deadline
        self.tree = BranchAndBound(incumbent, deadline)
        self.result: Bound | None = None  # the last one of the region
        self.ceiling = subproblem.problem.upper_bound() + subproblem.offset  # nothing costs more

    @functools.cached_property
    def runs(self) -> PrimalSearch | None:
        return _runs(self.incumbent, self.deadline)

    def run(self) -> bool:
        """True when it is proven that nothing better than the record is left."""
        try:
            if self.deadline.used > HASTE:
                self.haste()
            if self.subproblem.problem.n_states > LARGE and self.runs is not None:
                return self.explore(self.runs)
            return self.ease() or self.narrow() or self.close()
        except OutOfTime:
            return False

    def ease(self) -> bool:
        """Without the memory limit the problem is small: its optimum is a bound, and often fits, or nearly, and is made to fit.

        Where prices on bytes raise the bound the limit costs something, and the optimum without it is no help.
        """
        subproblem, result = self.subproblem, self.bounded()
        if subproblem.problem.limit is None or result.best.prices.any():
            return False
        free = replace(subproblem.problem, usages=(), limit=None)
        part = replace(subproblem, problem=free, back=tuple, offset=0.0, bound=-np.inf).part(
            result, self.wanted(), deadline=self.deadline
        )
        deadline, incumbent = self.deadline.part(EASE_SHARE), Incumbent(free, None, self.wanted())
        if part is None or Chain(part, incumbent, deadline).run():
            incumbent.prove(np.inf)
        self.deadline.spend(deadline.spent)
        self.incumbent.prove(incumbent.bound + subproblem.offset)
        states = fit(LocalSearch(subproblem.problem, result.memory, self.deadline), incumbent.states) if incumbent.found else None
        if states is not None:
            self.incumbent.offer(states, subproblem.problem.objective(states) + subproblem.offset, subproblem.back)
        return self.incumbent.done

    def explore(self, runs: PrimalSearch) -> bool:
        """Runs on a large problem, and a bound after each, until it is no longer large; True when that ends in a proof."""
        self.tree.tries = 0  # the runs are better at that
        self.haste()
        while not self.deadline.over() and self.subproblem.problem.n_states > LARGE:
            runs.run(self.subproblem)
            if runs.last:
                continue
            result = self.tree.bound(runs.priced(self.subproblem, LARGE_SHARE), self.wanted(), JOINT, 0, LARGE_SHARE)
            self.incumbent.prove(result.value + self.subproblem.offset)
            if result.value + self.subproblem.offset > self.subproblem.bound:
                self.subproblem = self.subproblem.after(result)
            kept = result.surviving_states(self.wanted())
            if sum(int(mask.sum()) for mask in kept) < ALIKE * sum(map(len, kept)):  # a new problem costs the runs their plans
                part = self.subproblem.part(result, self.wanted(), deadline=self.deadline)
                if part is None:
                    return True
                self.subproblem = part
        return not self.deadline.over() and (self.narrow() or self.close())

    def narrow(self) -> bool:
        """Bounds the region and drops what costs more than the best answer, while that helps; True when that ends in a proof."""
        while not self.deadline.over():
            result = self.bounded()
            self.incumbent.prove(result.value + self.subproblem.offset)
            self.haste()
            if self.incumbent.done or result.value + self.subproblem.offset > self.ceiling:
                return True
            self.subproblem = self.subproblem.after(result)
            self.focus(self.subproblem, result)
            if self.share() > ALIKE or self.deadline.over():
                return False
            part = self.part(self.incumbent.cutoff)
            part = part and self.tree.core(part, np.inf)
            if part is None:
                return True
            self.subproblem, self.result = part, None
        return False

    def haste(self) -> None:
        """Under a time limit: looks for a first answer, however bad."""
        if not self.incumbent.found and self.runs is not None:
            self.runs.first(self.subproblem)

    def wanted(self) -> float:
        """What better answers cost at most, by the region's problem."""
        return self.incumbent.cutoff - self.subproblem.offset

    def share(self) -> float:
        """The part of the region's states that answers better than the record's may take."""
        kept = self.bounded().surviving_states(self.wanted())
        return sum(int(mask.sum()) for mask in kept) / max(1, sum(map(len, kept)))

    def focus(self, subproblem: Subproblem, result: Bound) -> None:
        """Looks for answers among the states that are best by the bound, and again among the best of these, until CP-SAT can.

        Where a bound proves that there are none among so few, among more.
        """
        share, before = FOCUS, self.incumbent.cutoff
        while share <= ALIKE and result.value <= (cutoff := self.incumbent.cutoff - subproblem.offset) and not self.deadline.over():
            min_marginals = np.concatenate(result.min_marginals)
            if not len(min_marginals) or (min_marginals <= cutoff).mean() <= FOCUS:
                return
            most = max(np.quantile(min_marginals, share), *(t.min() for t in result.min_marginals))
            part = subproblem.part(result, most, deadline=self.deadline)
            part = part and self.tree.core(part, np.inf)
            if part is not None:
                subproblem, result = part, self._bound(part)
            elif self.incumbent.cutoff < before:
                return
            else:
                share = (share + 1) / 2

    def part(self, goal: float) -> Subproblem | None:
        """What (5) leaves of the region for answers that cost at most `goal`."""
        result = self.bounded()
        return self.subproblem.part(result, goal - self.subproblem.offset, deadline=self.deadline)

    def bounded(self) -> Bound:
        if self.result is None:
            self.result = self._bound(self.subproblem)
        return self.result

    def _bound(self, subproblem: Subproblem) -> Bound:
        return self.tree.bound(subproblem, self.incumbent.cutoff - subproblem.offset, JOINT, CHANGES)

    def way(self) -> float:
        """How far the best answer is above the bound of the region."""
        value = self.bounded().value + self.subproblem.offset
        return self.incumbent.cutoff - value if np.isfinite(self.incumbent.cutoff) else UNKNOWN_GAP * abs(value) + 1.0

    def close(self) -> bool:
        """Branches below goals, each twice as far from the bound, up to the best answer, or the dearest; True when that is a proof."""
        reach = REACH * self.way()
        while not self.deadline.over():
            goal = min(self.bounded().value + self.subproblem.offset + reach, most := min(self.incumbent.cutoff, self.ceiling))
            left = self.tree.close(self.parts(goal), goal, GOAL_SHARE if goal < most else 1.0)
            while left and not self.deadline.over():  # too hard so far: look for better answers, then go on
                if self.runs is None:
                    self.tree.close(self.parts(self.incumbent.cutoff), self.incumbent.cutoff, GOAL_SHARE)
                else:
                    self.runs.run(self.subproblem)
                left = self.tree.close(left, goal, 1.0 if self.runs is None else GOAL_SHARE)
            self.incumbent.prove(min([goal, *(subproblem.bound for subproblem in left)]))
            if self.incumbent.done or (goal >= min(self.incumbent.cutoff, self.ceiling) and not left):
                return True
            reach *= 2
            if self.share() < AGAIN and self.narrow():
                return True
        return False

    def parts(self, goal: float) -> list[Subproblem]:
        part = self.part(goal)
        return [] if part is None else [part]


def _check_whole(problem: Problem) -> None:
    """Raises ValueError for the first cost that is neither whole nor inf."""
    tables = {id(e.cost): (e.cost, "edge", (e.i, e.j)) for e in reversed(problem.edges)}
    nodes = {id(c): (c, "node", i) for i, c in reversed(list(enumerate(problem.costs)))}
    for costs, what, which in (*reversed(nodes.values()), *tables.values()):
        if not np.array_equal(costs, np.rint(costs)):
            some = float(costs[costs != np.rint(costs)].flat[0])
            raise ValueError(f"{what} {which} has cost {some}, which is no whole number.\n  way out: count in a smaller unit and round")


def _runs(incumbent: Incumbent, deadline: Deadline) -> PrimalSearch | None:
    """Exploring, which is compiled by numba; only under a time limit, so that other answers do not depend on numba."""
    if deadline.time_limit is None or (f"{__package__}.primal.iterated_search" not in sys.modules and deadline.seconds_left < LOADING):
        return None
    try:
        from shardplan.ilp.solver.primal.iterated_search import PrimalSearch
    except (ImportError, RuntimeError):  # no numba, or one that may keep nothing
        return None
    return PrimalSearch(incumbent, deadline)
