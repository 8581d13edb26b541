"""The least peak memory that is possible at any cost: for the error when nothing fits, and as a last resort for an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Problem, indicator_costs
from shardplan.ilp.solver.relax.dual import Relaxation, min_peak_dual
from shardplan.ilp.solver.search.repair import LocalSearch

DOMINANCE_ENTRIES, BUCKET_ENTRIES = 1 << 22, 1 << 14
"""Entries that the dominance test visits at one node (all costs are equal, so it finds most here), and those of a bucket table."""

FLIPS = 200  # flips of one repair towards a lower peak


@dataclass(frozen=True)
class MinPeak:
    """The states found, with their peak in bytes and its time step, and a lower bound of any peak; () and inf if none were found."""

    bound_bytes: float
    bytes: float = np.inf
    step: int = 0
    states: tuple[int, ...] = ()


def minimize_peak(problem: Problem, enough: float = -np.inf, deadline: Deadline = UNLIMITED) -> MinPeak:
    """The least possible peak: a lower bound, inf if all states are forbidden, and states that often attain it.

    Of the problem's costs only inf counts, and its limit is ignored. The search ends at states that hold no more than `enough` bytes.
    """
    deadline.check()
    feasibility = replace(problem.map_costs(indicator_costs), limit=-np.inf)
    small = presolve(feasibility, tie=True, dominance=DOMINANCE_ENTRIES, deadline=deadline)
    if not small.feasible:
        return MinPeak(np.inf)
    memory, local = small.problem.usage_table, LocalSearch(small.problem, deadline)
    best, bound = None, 0.0
    for value, result in min_peak_dual(Relaxation(small.problem, BUCKET_ENTRIES, deadline=deadline)):
        deadline.check()
        bound, guess = max(bound, value), result.states()
        if not np.isfinite(small.problem.objective(guess)):
            continue
        local.start_at(guess)
        while best is None or memory.peak(local.states) < memory.peak(best):
            best = local.states.copy()
            if not local.repair(memory.peak(best) * (1 - 1e-12) - 1e-9, FLIPS):  # strictly lower, by more than rounding
                break
        if best is not None and memory.peak(best) <= max(bound * (1 + 1e-12), enough):
            break
    if best is None:
        return MinPeak(bound)
    states = small.invert(best.tolist())
    profile = problem.memory(states)
    return MinPeak(bound, float(profile.max(initial=0.0)), int(profile.argmax()) if len(profile) else 0, states)
