"""Solves a cost network: presolve, bound, reduced-cost fixing, search.

    presolve         exact reductions                                                       presolve/
    bound            Lagrangian dual, TRW-S, bucket elimination; repaired relaxed answers   relax/
    fix              drop states and pairs above the cutoff (5), presolve, bound again      relax/fixing.py
    core search      the same on the states of least min-marginals: an answer early         `Chain.core_search`
    target search    branch and bound below rising targets, CP-SAT on small cores           search/
    primal search    iterated local search; under a time limit only                         primal/

Without a time limit no clock is read: every stage counts its work, so the answer is the same on every machine.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import numpy as np

from shardplan.ilp.solver.collector import paused_collector
from shardplan.ilp.solver.deadline import UNLIMITED, Deadline, OutOfTimeError
from shardplan.ilp.solver.min_peak import minimize_peak
from shardplan.ilp.solver.presolve.presolve import Presolved, presolve
from shardplan.ilp.solver.problem import Problem, Solution, Status
from shardplan.ilp.solver.relax.fixing import Bound
from shardplan.ilp.solver.search.branch import BranchAndBound, Incumbent, Progress, Subproblem, surviving_share
from shardplan.ilp.solver.search.repair import LocalSearch, repair_and_descend
from shardplan.ilp.solver.settings import DEFAULT, Settings

LOADING_S = 1.0  # seconds that numba and the compiled code take to load at most; with less time left there is no primal search
REBOUND_BELOW = 0.8  # bound again if fixing leaves at most this share of the states; core search ends where it would take more
TARGET_SHARE = 0.35  # share of what is left of the deadline for each target but the last


@paused_collector()
def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    hint: tuple[int, ...] | None = None,
    cutoff: float = np.inf,
    tolerance: float = 0.0,
    patience: float = 1.0,
    progress: Progress | None = None,
    presolved: Presolved | None = None,
    settings: Settings = DEFAULT,
) -> Solution:
    """The cheapest states (1) under (2)-(3), with a lower bound that proves how good they are.

    Args:
        problem: the network; nodes of one class in `problem.ties` take the same state.
        time_limit: seconds; None: no clock is read.
        work_limit: counted work, about seconds; by default 20 without a time limit, unlimited with one.
        hint: states to start from, and to return if nothing better is found (status "fallback").
        cutoff: greatest cost of a useful answer; "infeasible" if there is none.
        tolerance: an answer is returned once it is proven that none is better by more than this fraction; status "feasible".
        patience: share of the time limit after which the search ends if there is no answer.
        progress: called with (states, bound, gap) whenever one of them improves.
        presolved: `presolve(problem, tie=True)`, if it is there already.
        settings: tuned numbers.

    Raises:
        ValueError: a cost is not an integer, so no bound would be exact.
    """
    deadline = Deadline(time_limit, work_limit, lambda: 1.0 if incumbent.found else patience)
    _check_integers(problem)
    incumbent = Incumbent(problem, progress, cutoff, tolerance)
    if hint is not None and problem.fits(hint):
        incumbent.offer(tuple(hint), problem.objective(hint))
    hinted = incumbent.answer if incumbent.found else None
    incumbent.prove(problem.lower_bound())
    stats, complete = {"nodes": len(problem.costs)}, False
    try:
        presolved = presolved or presolve(problem, tie=True, deadline=deadline.share(0.15))  # for dominance tests
        chain = Chain(Subproblem(presolved.problem, presolved.invert, presolved.offset), incumbent, deadline, settings)
        complete = not presolved.feasible or chain.run()
        stats |= {"nodes after presolve": len(presolved.problem.costs), "bounds": chain.tree.n_bounds}
    except OutOfTimeError:
        pass
    if complete and incumbent.found:
        incumbent.prove(np.inf)
    if not complete and not incumbent.found:
        # small problems are answered after the deadline, too
        complete = _offer_min_peak(problem, incumbent, deadline if problem.n_states > settings.exact_states else UNLIMITED)
    if not incumbent.found:
        status: Status = "infeasible" if complete else "fallback"
        return Solution(status, (), np.inf, np.inf if complete else incumbent.bound, bool(problem.ties), stats)
    status = "optimal" if incumbent.objective <= incumbent.bound else "fallback" if incumbent.answer is hinted else "feasible"
    return Solution(status, incumbent.states, incumbent.objective, incumbent.bound, bool(problem.ties), stats)


def _offer_min_peak(problem: Problem, incumbent: Incumbent, deadline: Deadline) -> bool:
    """Offers the states of least peak if they fit; True if no states fit."""
    limit = np.inf if problem.limit is None else problem.limit
    try:
        least = minimize_peak(problem, limit, deadline)
    except OutOfTimeError:
        return False
    if least.states and least.bytes <= limit:
        incumbent.offer(least.states, problem.objective(least.states))
    return least.bound_bytes > limit


class Chain:
    """The stages after presolve, on a subproblem that gets smaller as incumbent and bound improve.

    Stages return True once the incumbent is proven optimal within its tolerance, or the problem infeasible.
    """

    def __init__(self, subproblem: Subproblem, incumbent: Incumbent, deadline: Deadline, settings: Settings = DEFAULT):
        self.subproblem, self.incumbent, self.deadline, self.settings = subproblem, incumbent, deadline, settings
        self.tree = BranchAndBound(incumbent, deadline, settings)
        self.result: Bound | None = None  # the last bound of the subproblem
        self.ceiling = subproblem.problem.upper_bound() + subproblem.offset

    def run(self) -> bool:
        """Bounds, fixes and searches."""
        try:
            if self.deadline.used > 0.4:  # a first answer comes before a bound
                self.first_feasible()
            if self.subproblem.problem.n_states > self.settings.large_states and self.primal is not None:
                return self.search_large()
            return self.relax_capacity() or self.fix_and_rebound() or self.target_search()
        except OutOfTimeError:
            return False

    def bound(self) -> Bound:
        """The bound of the current subproblem, computed once."""
        if self.result is None:
            self.result = self.tree.bound(self.subproblem, self.cutoff(), self.settings.bucket_entries)
        return self.result

    def value(self) -> float:
        """The bound in costs of the given problem."""
        return self.bound().value + self.subproblem.offset

    def cutoff(self) -> float:
        """Greatest cost of a better answer, in costs of the subproblem."""
        return self.incumbent.cutoff - self.subproblem.offset

    def relax_capacity(self) -> bool:
        """Solves the subproblem without the memory limit: its optimum is a lower bound, and often fits after repair.

        Left out where the dual has positive prices: the limit then costs something, and that optimum is far from the answer.
        """
        subproblem, result = self.subproblem, self.bound()
        if subproblem.problem.limit is None or result.best.prices.any():
            return False
        free = replace(subproblem.problem, usages=(), limit=None)
        relaxed = replace(subproblem, problem=free, invert=tuple, offset=0.0, bound=-np.inf)
        relaxed = relaxed.restrict(result, self.cutoff(), deadline=self.deadline)
        seconds = None if self.deadline.time_limit is None else 0.5 * self.deadline.seconds_left
        deadline = Deadline(seconds, 0.5 * self.deadline.work)
        incumbent = Incumbent(free, None, self.cutoff(), self.incumbent.tolerance)
        if relaxed is None or Chain(relaxed, incumbent, deadline, self.settings).run():
            incumbent.prove(np.inf)
        self.deadline.spend(deadline.spent)
        self.incumbent.prove(incumbent.bound + subproblem.offset)
        if incumbent.found:
            states = repair_and_descend(LocalSearch(subproblem.problem, self.deadline), incumbent.states)
            if states is not None:
                self.tree.offer(subproblem, states)
        return self.incumbent.done

    def fix_and_rebound(self) -> bool:
        """Bounds the subproblem and fixes what costs more than the cutoff, while fixing removes enough states."""
        while not self.deadline.over():
            self.incumbent.prove(self.value())
            self.first_feasible()
            if self.incumbent.done or self.value() > self.ceiling:
                return True
            self.subproblem = self.subproblem.warm_started(self.bound())
            self.core_search(self.subproblem, self.bound())
            if self.surviving() > REBOUND_BELOW or self.deadline.over():
                return False
            part = self.restrict(self.incumbent.cutoff)
            part = part and self.tree.solve_core(part, np.inf)
            if part is None:
                return True
            self.subproblem, self.result = part, None
        return False

    def surviving(self) -> float:
        """Share of the subproblem's states that better answers may take."""
        return surviving_share(self.bound().surviving_states(self.cutoff()))

    def restrict(self, target: float) -> Subproblem | None:
        """What (5) leaves of the subproblem for answers of at most `target`."""
        return self.subproblem.restrict(self.bound(), target - self.subproblem.offset, deadline=self.deadline)

    def core_search(self, subproblem: Subproblem, result: Bound) -> None:
        """Searches the states of least min-marginals, then again the best of these, until CP-SAT can; then (5) removes much more.

        If a bound proves that so few states hold no answer, more are taken. Also known as RINS-like or kernel search.
        """
        share, before = self.settings.core_share, self.incumbent.cutoff
        while share <= REBOUND_BELOW and not self.deadline.over():
            cutoff = self.incumbent.cutoff - subproblem.offset
            if result.value > cutoff or not result.min_marginals:
                return
            min_marginals = np.concatenate(result.min_marginals)
            if (min_marginals <= cutoff).mean() <= self.settings.core_share:
                return
            most = max(np.quantile(min_marginals, share), *(m.min() for m in result.min_marginals))
            part = subproblem.restrict(result, most, deadline=self.deadline)
            part = part and self.tree.solve_core(part, np.inf)
            if part is not None:
                cutoff = self.incumbent.cutoff - part.offset
                subproblem, result = part, self.tree.bound(part, cutoff, self.settings.bucket_entries)
            elif self.incumbent.cutoff < before:
                return
            else:
                share = (share + 1) / 2

    def target_search(self) -> bool:
        """Branch and bound below targets, each twice as far above the bound, up to the cutoff or the trivial upper bound."""
        value, cutoff = self.value(), self.incumbent.cutoff
        distance = 0.25 * (cutoff - value if np.isfinite(cutoff) else 0.3 * abs(value) + 1.0)  # without an answer, a guess
        while not self.deadline.over():
            last = min(self.incumbent.cutoff, self.ceiling)
            target = min(self.value() + distance, last)
            remaining = self.tree.search([self.restrict(target)], target, TARGET_SHARE if target < last else 1.0)
            while remaining and not self.deadline.over():  # too hard so far: look for better answers, then go on
                if self.primal is None:
                    self.tree.search([self.restrict(self.incumbent.cutoff)], self.incumbent.cutoff, TARGET_SHARE)
                else:
                    self.primal.run(self.subproblem)
                remaining = self.tree.search(remaining, target, 1.0 if self.primal is None else TARGET_SHARE)
            self.incumbent.prove(min([target, *(subproblem.bound for subproblem in remaining)]))
            if self.incumbent.done or (target >= min(self.incumbent.cutoff, self.ceiling) and not remaining):
                return True
            distance *= 2
            if self.surviving() < 0.6 and self.fix_and_rebound():
                return True
        return False

    @functools.cached_property
    def primal(self):
        """Primal search, loaded when first used; None without numba or a time limit: no other answer may depend on numba."""
        loaded = "shardplan.ilp.solver.primal.iterated_search" in sys.modules
        if self.deadline.time_limit is None or (not loaded and self.deadline.seconds_left < LOADING_S):
            return None
        try:
            from shardplan.ilp.solver.primal.iterated_search import PrimalSearch
        except (ImportError, RuntimeError):  # no numba, or no writable cache directory
            return None
        return PrimalSearch(self.incumbent, self.deadline, self.settings.large_states)

    def first_feasible(self) -> None:
        """Looks for a first answer of any cost; under a time limit only."""
        if not self.incumbent.found and self.primal is not None:
            self.primal.first_feasible(self.subproblem)

    def search_large(self) -> bool:
        """Primal search in turns with a bound at its prices and fixing, until the subproblem is no longer large."""
        primal, settings, share = self.primal, self.settings, 0.15  # of what is left, for one bound
        assert primal is not None
        self.tree.repaired_points = 0  # primal search repairs better
        self.first_feasible()
        while not self.deadline.over() and self.subproblem.problem.n_states > settings.large_states:
            primal.run(self.subproblem)
            if primal.ending:
                continue
            priced = primal.priced(self.subproblem, share)
            result = self.tree.bound(priced, self.cutoff(), settings.bucket_entries, 0, share)
            self.incumbent.prove(result.value + self.subproblem.offset)
            if result.value + self.subproblem.offset > self.subproblem.bound:
                self.subproblem = self.subproblem.warm_started(result)
            if surviving_share(result.surviving_states(self.cutoff())) < REBOUND_BELOW:
                part = self.subproblem.restrict(result, self.cutoff(), deadline=self.deadline)  # elimination schedules start anew
                if part is None:
                    return True
                self.subproblem = part
        return not self.deadline.over() and (self.fix_and_rebound() or self.target_search())


def _check_integers(problem: Problem) -> None:
    """Raises ValueError for a cost that is neither an integer nor inf."""
    costs, edges = {id(c): (c, i) for i, c in enumerate(problem.costs)}, {id(e.cost): (e.cost, (e.i, e.j)) for e in problem.edges}
    for kind, tables in (("node", costs), ("edge", edges)):
        for table, where in tables.values():
            fractions = table[table != np.rint(table)]
            if fractions.size:
                where = f"{kind} {where} has cost {float(fractions.flat[0])}"
                raise ValueError(f"{where}, which is no whole number.\n  way out: count in a smaller unit and round")
