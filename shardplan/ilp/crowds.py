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

MORE = 3
"""How much more often where no plan fits the memory that it really needs, with what it moves together."""

NEAR = 0.005
"""A plan that costs this much more than it was found at is not looked for again."""


def settled(
    make: Callable[[float, Crowds | None, float], Network], search: Callable[[Network, tuple[int, ...]], Solution], beside: float
) -> tuple[Network, Solution]:
    """The best plan found, with the network of its own prices; the bound is as far below as at the prices it was found at.

    What a plan moves together also says how long arrays wait for each other in memory. So a plan may need more than it was found with;
    then we plan again, and where nothing fits at these prices, at the first ones with so much less memory.

    Args:
        make: the network at a price of what is hidden (`overlap.cheapest`), with arrays moved together as told, or all of a queue, and
            with so many bytes of the limit left over.
        search: answers it; the states are those of the plan before, or ().
        beside: as in `overlap.cheapest`.
    """

    def planned(crowds: Crowds | None, spare: float, before: tuple[int, ...]) -> tuple[Network, Solution]:
        return cheapest(lambda price: make(price, crowds, spare), lambda network: search(network, before), beside)

    crowds: Crowds | None = None
    spare, states = 0.0, ()
    best: tuple[Network, Solution] | None = None
    least = np.inf, np.inf  # bytes over the limit, and what is paid
    for n in range(ROUNDS + MORE):
        found, solution = planned(crowds, spare, states)
        if not solution.states:
            if best is None:
                return found, solution
            if not least[0] or crowds is None:
                break
            crowds, spare, states = None, spare + least[0], ()
            continue
        states = solution.states
        own = found
        for _ in range(2):  # at other prices the ways are others, too
            crowds = own.moved(states)
            own = make(found.waiting, crowds, 0.0)
        paid = own.parts(states).total(beside)
        over = 0.0 if own.problem.limit is None else max(0.0, own.problem.peak(states) - own.problem.limit)
        if (over, paid) < least:
            least, bound = (over, paid), paid if solution.status == "optimal" else paid * (1 - solution.gap)
            best = own, replace(solution, objective=paid, bound=bound)
        if least[0]:
            continue
        if n + 1 >= ROUNDS or (not over and paid <= (1 + NEAR) * solution.objective):
            break
    assert best is not None
    return (best[0], Solution("infeasible", (), np.inf, 0.0)) if least[0] else best
