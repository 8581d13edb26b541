"""Collectives that run beside other work cost only what that work cannot hide.

    seconds = compute + inline + background - hidden,   hidden = (1 - beside) * min(background, room)          (6)

`background` are the collectives that nobody waits for (`schedule.py`), `room` the work that is there under every plan. The min makes
(6) the larger of two lines in `background`, with slopes `exposed_fraction` and 1. A network knows one price, so we solve it at the first slope;
where that plan has more in the background than there is room, at the second; and where that one has less, in between, at the price
at which both plans cost the same. The optimum at any price w, less (w - beside) * room, is a lower bound of (6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.costs.step_seconds import StepSeconds
from shardplan.ilp.solver.problem import Solution

if TYPE_CHECKING:
    from shardplan.costs.network import CostNetwork


def cheapest(
    make: Callable[[float], CostNetwork],
    search: Callable[[CostNetwork], Solution],
    exposed_fraction: float,
    over: Callable[[], bool] = lambda: False,
) -> tuple[CostNetwork, Solution]:
    """The best plan under (6) with its network; objective and bound are those of (6).

    Args:
        make: the network in which background collectives cost a given part of their seconds.
        search: answers it.
        beside: what a collective costs beside other work, as a part of its seconds: 1 where nothing is hidden, 0 where all is.
        over: whether to be content with what is found.
    """

    def at(price: float) -> tuple[CostNetwork, Solution, StepSeconds]:
        network = make(price)
        return network, *judged(network, search(network), price, exposed_fraction)

    first = at(exposed_fraction)
    tried = [first]
    if first[1].states and first[2].background > first[2].overlap_capacity and exposed_fraction < 1 and not over():
        last = at(1.0)
        tried.append(last)
        less = first[2].background - last[2].background
        if last[1].states and less > 0 and last[2].background < last[2].overlap_capacity and not over():
            price = (last[2].compute + last[2].blocking - first[2].compute - first[2].blocking) / less
            tried.append(at(min(1.0, max(exposed_fraction, price))))
    network, solution, _ = min(tried, key=lambda t: t[1].objective)
    bound = max(t[1].bound for t in tried)
    proven = bound > solution.objective - 1.0  # costs are whole; what is hidden of them may not be
    status = "optimal" if solution.states and proven else solution.status
    status = "feasible" if status == "optimal" and not proven else status
    return network, replace(solution, bound=min(bound, solution.objective), status=status)


def judged(network: CostNetwork, solution: Solution, price: float, exposed_fraction: float) -> tuple[Solution, StepSeconds]:
    """An answer found at a price, with the objective and bound of (6), and what its step consists of."""
    if not solution.states:
        return solution, StepSeconds(0.0, 0.0, 0.0, 0.0)
    parts = network.step_seconds(solution.states)
    return replace(
        solution,
        objective=parts.total(exposed_fraction),
        bound=max(0.0, solution.bound - (price - exposed_fraction) * parts.overlap_capacity),
    ), parts
