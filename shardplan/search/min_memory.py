"""The states of least memory, whatever they cost in seconds, and the budget between these and the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import numpy as np

from shardplan.costs.build import build_network
from shardplan.costs.pricing import Pricing
from shardplan.costs.task import Candidate
from shardplan.ilp.solver.min_peak import minimize_peak
from shardplan.ilp.solver.problem import Problem, Solution, indicator_costs
from shardplan.ilp.solver.solve import solve
from shardplan.search.objective import Candidates, Judged
from shardplan.xla_model.live_in_any_order import chain_through, live_in_any_order
from shardplan.xla_model.overlap_windows import OverlapWindows

ROUNDS = 4
"""Plans of least memory at the prices and in the order of the one before."""

BELOW_LOWEST = 0.97
"""Limits of further pricing loops, as a fraction of the lowest peak found so far."""

ENOUGH = 1.001
"""Limits of the whole searches after these; also what the error advises. Of the plans that fit, some may take less still."""

LEAST_GAIN = 0.002
"""Either is repeated as long as it lowers the peak by more than this fraction."""

LOWEST_PEAKS = 3
"""Plans whose peaks are looked at for the lower bound of all."""


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


def least_memory(found: Candidates, lowest: Judged, limit: float) -> float:
    """A lower bound of the peak of every plan, whatever the order of its ops, bytes per device; inf if the pins contradict each other.

    It counts what is in memory while ops run that each wait for the one before, one of them at the peak of the plan `lowest` or of one
    of the `LOWEST_PEAKS` that were found.
    """
    task = found.task
    network, graph = build_network(task.space, task.resharder, limit, task.allowed, windows=OverlapWindows()), task.space.graph

    def least(op: int) -> float:
        live = live_in_any_order(graph, task.space.materialised, network.prices.live, chain_through(graph, op))
        return minimize_peak(replace(network.in_any_order(live).problem, limit=None, ties=())).bound_bytes

    lowest_peaks = sorted(found.judged.values(), key=lambda x: x.peak_bytes)[:LOWEST_PEAKS]
    return max(least(op) for op in {plan.memory.op_at_peak for plan in (lowest, *lowest_peaks)})


def lowest_peak_plan(
    plans: Callable[[float], Candidates], converged: Callable[[float], Candidates], found: Candidates, limit: float
) -> Judged | None:
    """The plan of the lowest peak that any search finds, when none was found within `limit`; it may fit. None: the pins contradict.

    Args:
        plans: all plans found within a number of bytes.
        converged: those that the pricing loop comes upon, which the other steps of the search do not follow.
        found: those found within `limit`.
    """
    pricing, judged = Pricing(), None
    for _ in range(ROUNDS):  # other prices make arrays wait for other collectives, and another order makes others live together
        network = found.task.network(pricing, limit)
        if not (states := min_peak_memory(network.problem)):
            return None
        before, judged = judged, found.add(Candidate(network, Solution("feasible", states, network.problem.objective(states), 0.0)))
        if judged is before:
            break
        pricing = replace(pricing, combined=judged.network.pricing.combined, order=judged.memory.order)
    lowest = found.lowest_peak()
    assert lowest is not None
    for search, fraction in ((converged, BELOW_LOWEST), (plans, ENOUGH)):
        gain = inf
        while gain > LEAST_GAIN and lowest.peak_bytes > limit:
            peak = lowest.peak_bytes
            lowest = min(lowest, search(max(limit, fraction * peak)).lowest_peak() or lowest, key=lambda x: x.peak_bytes)
            gain = 1 - lowest.peak_bytes / peak
    return lowest


def saved_memory(found: Candidates, fastest: Judged) -> float:
    """Bytes per device that `Options.memory_saving` leaves: so far from the fastest plan's peak to the lowest one found."""
    network = found.task.network(fastest.network.pricing, fastest.peak_bytes)
    if states := min_peak_memory(network.problem):
        found.add(Candidate(network, Solution("feasible", states, network.problem.objective(states), 0.0)))
    lowest = found.lowest_peak()
    assert lowest is not None
    return fastest.peak_bytes - found.task.options.memory_saving * (fastest.peak_bytes - lowest.peak_bytes)
