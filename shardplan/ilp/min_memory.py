"""The states of least memory, whatever they cost in seconds: on average over the step, and at its peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardplan.ilp.solver.min_peak import minimize_peak
from shardplan.ilp.solver.problem import Problem, indicator_costs
from shardplan.ilp.solver.solve import solve


def min_average_memory(problem: Problem) -> tuple[int, ...]:
    """The states that hold the fewest bytes on average over the step, whatever they cost; () when none go together."""
    bare = problem.map_costs(indicator_costs)
    costs = list(bare.costs)
    for u in problem.usages:
        costs[u.node] = costs[u.node] + np.rint(u.bytes * (u.hi - u.lo) / 1024)
    return solve(replace(bare, costs=tuple(costs), limit=None)).states


def min_peak_memory(problem: Problem) -> tuple[int, ...]:
    """The states of the lowest peak found, whatever they cost; () when none go together."""
    found = (min_average_memory(problem), minimize_peak(replace(problem, limit=None)).states)
    return min((states for states in found if states), key=problem.peak, default=())
