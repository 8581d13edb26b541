"""Arrays that XLA moves together pay one latency between them, a fixed charge that depends on the whole plan.

    latency of a kind of collective over some axes = a, if any array of the queue is moved so, however many are

A network knows one price for each array, a part a/n of the latency. With n all arrays of the queue the prices are too low where a plan
moves some so and others otherwise. So we count what the plan moves together, give each its part of that, and plan again, until what the
plan costs is what it was found at: dynamic slope scaling, Kim and Pardalos, "A solution approach to the fixed charge network flow
problem using a dynamic slope scaling procedure", Operations Research Letters 24(4), 1999.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardplan.ilp.overlap import cheapest
from shardplan.ilp.problem import Solution

if TYPE_CHECKING:
    from shardplan.ilp.build import Network
    from shardplan.ilp.tables import Crowds

ROUNDS = 3
"""How often the prices are settled at most."""

NEAR = 0.005
"""A plan that costs this much more than it was found at is not looked for again."""


def settled(
    make: Callable[[float, Crowds | None], Network],
    search: Callable[[Network, tuple[int, ...]], Solution],
    lean: Callable[[Network], tuple[int, ...]],
    beside: float,
) -> tuple[Network, Solution]:
    """The best plan found, with the network of its own prices; the bound is as far below as at the prices it was found at.

    What a plan moves together also says how long arrays wait for each other in memory, so a plan may need more than it was found with.
    Where none of those found fits, we plan once more with the waits of the leanest plan, which fits if any does.

    Args:
        make: the network at a price of what is hidden (`overlap.cheapest`), with arrays moved together as told, or all of a queue.
        search: answers it; the states are those of the plan before, or ().
        lean: the states of a network that hold the fewest bytes, or ().
        beside: as in `overlap.cheapest`.
    """
    found, solution = best = _planned(make, search, None, (), beside)
    least = np.inf, np.inf  # bytes over the limit, and what is paid
    crowds: Crowds = ()

    def offer(found: Network, solution: Solution) -> float:
        """Takes a plan if it is better, at its own prices, which it says."""
        nonlocal best, least, crowds
        own, states = found, solution.states
        for _ in range(2):  # at other prices the ways are others, too
            crowds = own.moved(states)
            own = make(found.waiting, crowds)
        paid = own.parts(states).total(beside)
        over = 0.0 if own.problem.limit is None else max(0.0, own.problem.peak(states) - own.problem.limit)
        if (over, paid) < least:
            least, bound = (over, paid), paid if solution.status == "optimal" else paid * (1 - solution.gap)
            best = own, replace(solution, objective=paid, bound=bound)
        return paid if not over else np.inf

    for n in range(ROUNDS):
        if n:
            found, solution = _planned(make, search, crowds, solution.states, beside)
        if not solution.states or offer(found, solution) <= (1 + NEAR) * solution.objective:
            break
    if best[1].states and least[0] and (states := lean(found)):
        offer(found, Solution("feasible", states, found.problem.objective(states), 0.0))
        found, solution = _planned(make, search, crowds, (), beside)
        if solution.states:
            offer(found, solution)
    return best if not best[1].states or not least[0] else (best[0], Solution("infeasible", (), np.inf, 0.0))


def _planned(make, search, crowds: Crowds | None, before: tuple[int, ...], beside: float) -> tuple[Network, Solution]:
    return cheapest(lambda price: make(price, crowds), lambda network: search(network, before), beside)
