"""The price of a hidden collective in a cost network: that at which the network's answer takes the fewest seconds by (8).

By (8) the seconds are not linear in the background collectives (`StepSeconds`); f is the exposed fraction, C the capacity:

    seconds = compute + blocking + background - (1 - f) * min(background, C)

That is the larger of two linear functions of `background`, with slopes f and 1. A cost network has one price w for a background second,
so the network is solved at w = f; if that plan has more than C in the background, at w = 1; if this one has less than C, at the price
between at which both plans cost the same. The optimum at any w, less (w - f) * C, is a lower bound of (8): this is (9) of docs/math.md.
It is none of the objective; what is found here is a candidate, which `objective.py` judges.

Also known as parametric search, or one step of Dinkelbach's and Lawler's method on a piecewise linear objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardplan.costs.network import StepSeconds
from shardplan.costs.task import Candidate
from shardplan.ilp.solver.deadline import UNLIMITED, Deadline


def cheapest_price(search: Callable[[float], Candidate], interference: float, deadline: Deadline = UNLIMITED) -> Candidate:
    """The best of up to three candidates by (8); objective and bound are those of (8), in the network's unit.

    `search` solves a network at a price in [interference, 1]; `deadline` is when to be content with what is found.
    """
    found, seconds = step_objective(search(interference), interference, interference)
    tried = [found]
    if found.solution.found and seconds.background > seconds.overlap_capacity and interference < 1 and not deadline.over():
        other, exposed = step_objective(search(1.0), 1.0, interference)
        tried.append(other)
        less = seconds.background - exposed.background
        below = other.solution.found and less > 0 and exposed.background < exposed.overlap_capacity
        if below and not deadline.over():
            price = (exposed.compute + exposed.blocking - seconds.compute - seconds.blocking) / less
            price = min(1.0, max(interference, price))
            tried.append(step_objective(search(price), price, interference)[0])
    network, solution = min(tried, key=lambda candidate: candidate.solution.objective)
    bound = max(candidate.solution.bound for candidate in tried)
    proven = bound > solution.objective - 1.0  # costs are whole; the hidden part of them may not be
    status = "optimal" if solution.found and proven else solution.status
    status = "feasible" if status == "optimal" and not proven else status
    return Candidate(network, replace(solution, bound=min(bound, solution.objective), status=status))


def step_objective(found: Candidate, price: float, interference: float) -> tuple[Candidate, StepSeconds]:
    """A candidate that was searched at a price, with objective and bound of (8), and the seconds of (8) by part."""
    network, solution = found
    if not solution.found:
        return found, StepSeconds(0.0, 0.0, 0.0, 0.0)
    seconds = network.step_seconds(solution.states)
    bound = max(0.0, solution.bound - (price - interference) * seconds.overlap_capacity)
    return Candidate(network, replace(solution, objective=seconds.total(interference), bound=bound)), seconds
