"""The states of least memory, whatever they cost in seconds, and the budget between these and the fastest."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from shardplan.costs.build import build_network
from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import Pricing
from shardplan.costs.task import PlanningTask
from shardplan.ilp.solver.min_peak import minimize_peak
from shardplan.ilp.solver.problem import Problem, indicator_costs
from shardplan.ilp.solver.solve import solve


def min_average_memory(problem: Problem) -> tuple[int, ...]:
    """The states of fewest bytes on average over the step; () if no states are allowed together."""
    indicators = problem.map_costs(indicator_costs)
    costs = list(indicators.costs)
    for u in problem.usages:
        costs[u.node] = costs[u.node] + np.rint(u.bytes * (u.hi - u.lo) / 1024)
    return solve(replace(indicators, costs=tuple(costs), limit=None)).states


def min_peak_memory(problem: Problem) -> tuple[int, ...]:
    """The states of the lowest peak found; () if no states are allowed together."""
    found = (min_average_memory(problem), minimize_peak(replace(problem, limit=None)).states)
    return min((states for states in found if states), key=problem.peak, default=())


def saved_memory(task: PlanningTask) -> float:
    """Bytes per device that `Options.memory_saving` leaves: so far from the fastest plan's peak to the least average plan's."""
    options, network = task.options, functools.partial(build_network, task.space, task.resharder, allowed=task.allowed)

    def peak(found: CostNetwork, states: tuple[int, ...]) -> float:
        return network(found.problem.limit, pricing=Pricing(combined=found.combined_groups(states))).peak(states)

    free = network(None)
    fastest = peak(free, solve(free.problem).states)
    limited = network(fastest)
    least = peak(limited, min_average_memory(limited.problem))
    budget = fastest - options.memory_saving * max(0.0, fastest - least)
    return budget if options.memory is None else min(budget, options.memory)
