"""The least peak memory that is possible at any cost: for the error when nothing fits, and as a last resort for an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Problem, indicator_costs
from shardplan.ilp.solver.relax.dual import min_peak_dual
from shardplan.ilp.solver.relax.relaxation import Relaxation
from shardplan.ilp.solver.search.repair import LocalSearch
from shardplan.ilp.solver.usage import UsageTable

DOMINANCE_ENTRIES, BUCKET_ENTRIES = 1 << 22, 1 << 14
"""Entries that the dominance test visits at one node (all costs are equal, so it finds most here), and those of a bucket table."""

FLIPS = 200
"""Flips of one repair towards a lower peak."""


@dataclass(frozen=True)
class MinPeak:
    """The least peak memory that is possible.

    Attributes:
        bound_bytes: lower bound of the peak of any states.
        bytes: peak of `states`; inf if none were found.
        step: the time step at which `states` peak.
        states: the states found, one per node; () if none.
    """

    bound_bytes: float
    bytes: float
    step: int
    states: tuple[int, ...]


def minimize_peak(problem: Problem, enough: float = -np.inf, deadline: Deadline = UNLIMITED) -> MinPeak:
    """The least possible peak: a lower bound, and states that often attain it.

    Args:
        problem: the problem; of its costs only inf counts, and its limit is ignored.
        enough: bytes; the search ends at states that hold no more.
        deadline: checked on the way.

    Returns:
        The bound and the states; inf and no states if all are forbidden.
    """
    deadline.check()
    feasibility = replace(problem.map_costs(indicator_costs), limit=-np.inf)
    small = presolve(feasibility, tie=True, dominance=DOMINANCE_ENTRIES, deadline=deadline)
    if not small.feasible:
        return MinPeak(np.inf, np.inf, 0, ())
    memory, relaxation = UsageTable(small.problem), Relaxation(small.problem, BUCKET_ENTRIES, deadline=deadline)
    local = LocalSearch(small.problem, memory, deadline)
    best, bound = None, 0.0
    for value, result in min_peak_dual(relaxation, memory):
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
        return MinPeak(bound, np.inf, 0, ())
    states = small.invert(best.tolist())
    profile = problem.memory(states)
    return MinPeak(bound, float(profile.max(initial=0.0)), int(profile.argmax()) if len(profile) else 0, states)
