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
    make: Callable[[float, Crowds | None], Network], search: Callable[[Network, tuple[int, ...]], Solution], beside: float
) -> tuple[Network, Solution]:
    """The best plan found, with the network of its own prices; the bound is as far below as at the prices it was found at.

    Args:
        make: the network at a price of what is hidden (`overlap.cheapest`), with arrays moved together as told, or all of a queue.
        search: answers it; the states are those of the plan before, or ().
        beside: as in `overlap.cheapest`.
    """

    def planned(crowds: Crowds | None, before: tuple[int, ...]) -> tuple[Network, Solution]:
        return cheapest(lambda price: make(price, crowds), lambda network: search(network, before), beside)

    crowds: Crowds | None = None
    best: tuple[Network, Solution] | None = None
    states: tuple[int, ...] = ()
    for _ in range(ROUNDS):
        found, solution = planned(crowds, states)
        states = solution.states
        if not states:
            return best or (found, solution)
        own = found
        for _ in range(2):  # at other prices the ways are others, too
            crowds = own.moved(states)
            own = make(found.waiting, crowds)
        paid = own.parts(states).total(beside)
        if best is None or paid < best[1].objective:
            bound = paid if solution.status == "optimal" else paid * (1 - solution.gap)
            best = own, replace(solution, objective=paid, bound=bound)
        if paid <= (1 + NEAR) * solution.objective:
            break
    assert best is not None
    return best
