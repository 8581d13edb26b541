"""What no answer can beat, and which states no better answer takes.

With prices p on bytes (prices.py), elimination gives L(p) <= optimum, and for every state the least priced cost of a choice
through it. A state whose priced cost is above the best answer's cost cannot be part of a better one:

    min over s with s_i = a of  (1)(s) + sum_t p_t (memory_t(s) - limit)  >  best answer        =>  drop a of node i     (5)

On real networks, where silly states cost orders of magnitude more, (5) with a good answer deletes nearly everything, also
when the elimination has to split joints. What is left is shrunk again, and so on with larger joints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .eliminate import Elimination
from .memory import Memory
from .prices import Quote, bargain
from .problem import Problem
from .shrink import Shrunk, shrink


@dataclass(frozen=True)
class Bound:
    """Outcome of one round.

    Attributes:
        value: lower bound of (1) under (2)-(3).
        quotes: the priced choices met.
        reduced: the problem without the states that (5) drops, shrunk; its offset counts.
        kept: share of the states that are left before shrinking.
        work: table entries visited.
    """

    value: float
    quotes: tuple[Quote, ...]
    reduced: Shrunk
    kept: float
    work: float


def bound(
    problem: Problem,
    worth: float,
    cap: int,
    rounds: int,
    start: np.ndarray | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Bound:
    """A lower bound, and what is left of the problem for answers that cost at most `worth`.

    Args:
        worth: a better answer costs at most this much.
        cap: entries of a joint table.
        rounds: how often prices may be changed.
        start: prices to begin with (then only these and none are tried, unless `rounds` allows more).
        over: asked between rounds whether to stop.
    """
    memory, elimination = Memory(problem), Elimination(problem, cap)
    reach = max((float(c[np.isfinite(c)].max(initial=0.0)) for c in problem.costs), default=1.0) + 1.0
    quotes: list[Quote] = []
    for quote in bargain(elimination, memory, problem.objective, reach, rounds=rounds, start=start):
        quotes.append(quote)
        if quote.value > worth or over():
            break
    best = max(quotes, key=lambda quote: quote.value)
    constant = float(best.prices.sum() * memory.limit) if best.prices.any() else 0.0
    masks = [marginal - constant <= worth for marginal in best.sweep.marginals()]
    costs = tuple(np.where(mask, cost, np.inf) for mask, cost in zip(masks, problem.costs, strict=True))
    kept = sum(int(mask.sum()) for mask in masks) / max(1, sum(map(len, masks)))
    reduced = shrink(replace(problem, costs=costs)) if kept < 1 else shrink_nothing(problem)
    return Bound(best.value, tuple(quotes), reduced, kept, elimination.size * (len(quotes) + 3.0))


def shrink_nothing(problem: Problem) -> Shrunk:
    """The problem as it is, in the form that `shrink` gives."""
    n = len(problem.costs)
    return Shrunk(problem, 0.0, True, tuple(range(n)), (), n)
