"""Arrays that XLA moves together pay one latency between them, a fixed charge that depends on the whole plan.

    latency of a kind of collective over some axes = a, if any array of the queue is moved so, however many are

A network knows one price for each array, a part a/n of the latency. With n all arrays of the queue the prices are too low where a plan
moves some so and others otherwise. So we count what the plan moves together, give each its part of that, and plan again, until what the
plan costs is what it was found at: dynamic slope scaling, Kim and Pardalos, "A solution approach to the fixed charge network flow
problem using a dynamic slope scaling procedure", Operations Research Letters 24(4), 1999.

That leads to no plan that moves all arrays in another way, for whatever goes first would pay the whole latency alone. So where the plan
costs much more than the first was found at, we start again from plans that treat all gradients alike: scattered over the inner axes and
summed over the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, takewhile
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from shardplan.ilp.overlap_price import cheapest
from shardplan.ilp.solver.problem import Solution

if TYPE_CHECKING:
    from shardplan.costs.network import CostNetwork
    from shardplan.costs.space import StrategySpace
    from shardplan.costs.tables import CombinedGroups
    from shardplan.xla_model.combining import CollectiveClass

ROUNDS = 3
"""How often the prices are settled at most."""

NEAR = 0.005
"""A plan that costs this much more than it was found at is not looked for again."""

FAR, AWAY = 0.03, 0.15
"""And where the best costs more than the first was found at, by this part of it or of its communication, we start from others."""

WORSE = 0.1
"""What costs more than the best by this part of it where we start is not looked for: at its own prices it would hardly be less."""


def settled(
    make: Callable[[float, CombinedGroups | None], CostNetwork],
    search: Callable[..., Solution],
    apart: Callable[..., Solution] | None,
    lean: Callable[[CostNetwork], tuple[int, ...]],
    exposed_fraction: float,
    over: Callable[[], bool] = lambda: False,
) -> tuple[CostNetwork, Solution]:
    """The best plan found, with the network of its own prices; the bound is as far below as at the prices it was found at.

    What a plan moves together also says how long arrays wait for each other in memory, so a plan may need more than it was found with.
    Where none of those found fits, we look for a lean plan that fits with its own waits, and plan once more with these.

    Args:
        make: the network at a price of what is hidden (`overlap.cheapest`), with arrays moved together as told, or all of a queue.
        search: answers it, given the states of the plan `before`, or (), and what answers may cost at `most` to be of use.
        apart: answers it with repeated layers that need not be alike, if that can be better, given states in which they are `alike`;
            or None.
        lean: the states of a network that hold the fewest bytes, or ().
        beside, over: as in `overlap.cheapest`.
    """

    def planned(combined: CombinedGroups | None, ask: Callable[[CostNetwork], Solution]) -> tuple[CostNetwork, Solution]:
        return cheapest(lambda price: make(price, combined), ask, exposed_fraction, over)

    found, solution = best = planned(None, partial(search, before=()))
    optimistic = solution.objective
    least = np.inf, np.inf, True  # bytes over the limit, what is paid, whether layers had to be alike
    combined: CombinedGroups | None = ()

    def offer(found: CostNetwork, solution: Solution) -> float:
        """Takes a plan if it is better, at its own prices, which it says."""
        nonlocal best, least, combined
        states = solution.states
        own = repriced(make, found, states)
        combined = own.combined
        paid = own.step_seconds(states).total(exposed_fraction)
        over = 0.0 if own.problem.limit is None else max(0.0, own.problem.peak(states) - own.problem.limit)
        if (over, paid, solution.tied) < least:
            least, bound = (over, paid, solution.tied), paid if solution.status == "optimal" else paid * (1 - solution.gap)
            best = own, replace(solution, objective=paid, bound=bound)
        return paid if not over else np.inf

    def better(at: CostNetwork) -> Solution:
        """What costs too much at the first price, the least, does so at all."""
        cut = at.background_price == exposed_fraction and not least[0]
        return search(at, before=best[1].states, most=(1 + WORSE) * least[1] if cut else np.inf)

    for n in range(ROUNDS):
        if n:
            found, solution = planned(combined, partial(search, before=solution.states))
        if not solution.states or offer(found, solution) <= (1 + NEAR) * solution.objective or over():
            break
    sent = least[1] - best[0].step_seconds(best[1].states).compute if best[1].states else 0.0
    if best[1].states and least[1] - optimistic > min(FAR * optimistic, AWAY * sent):
        for combined in takewhile(lambda _: not over(), alike(found.space)):
            for _ in range(ROUNDS):
                before = least
                found, solution = planned(combined, better)
                if solution.states:
                    offer(found, solution)
                if not least < before or over():
                    break
    if apart and not over() and best[1].states and best[1].tied:
        found, solution = planned(best[0].combined, partial(apart, alike=best[1].states))
        if solution.states:
            offer(found, solution)
    if best[1].states and least[0]:
        for _ in range(ROUNDS):
            if not least[0] or not (states := lean(found)):
                break
            offer(found, Solution("feasible", states, found.problem.objective(states), 0.0))
            found = make(found.background_price, combined)
        if least[0] or not over():
            found, solution = planned(combined, partial(search, before=()))
            if solution.states:
                offer(found, solution)
    return best if not best[1].states or not least[0] else (best[0], Solution("infeasible", (), np.inf, 0.0))


def repriced(make: Callable[[float, CombinedGroups | None], CostNetwork], found: CostNetwork, states: tuple[int, ...]) -> CostNetwork:
    """The network at the prices of what these states of `found` move together."""
    own = found
    for _ in range(2):  # at other prices the ways are others, too
        own = make(found.background_price, own.combined_collectives(states))
    return own


def alike(space: StrategySpace) -> Iterator[CombinedGroups]:
    """What plans move together that treat all gradients alike: scatter them over no axes, the innermost, the two innermost, ..."""
    axes = tuple(axis for axis, n in space.mesh if n > 1)
    arrays: dict[tuple[int, CollectiveClass], dict[int, float]] = {}
    for value, place in zip(space.graph.values, space.collective_sites, strict=True):
        if place.group_size > 1 and place.collective_class in ("prefetch", "gradient"):
            arrays.setdefault((place.group, place.collective_class), {})[place.origin] = value.bytes
    gathers = [("all-gather", some) for n in range(len(axes)) for some in combinations(axes, n + 1)]
    for n in range(len(axes) + 1):
        summed, scattered = axes[: len(axes) - n], axes[len(axes) - n :]
        gradients = [(kind, over) for kind, over in (("all-reduce", summed), ("reduce-scatter", scattered)) if over]
        shards = prod(space.mesh.size(axis) for axis in scattered)
        yield tuple(
            ((crowd, way), tuple(sorted((at, size / shards) for at, size in of.items())))
            for (crowd, queue), of in sorted(arrays.items())
            for way in sorted(gathers if queue == "prefetch" else gradients)
        )
