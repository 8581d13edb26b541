"""What a byte is worth at every time step: the prices that make the Lagrangian bound (4) greatest.

L(p) is concave and piecewise linear; every choice s met on the way is one of its planes:

    L(p) <= cost(s) + sum_t p_t (memory_t(s) - limit)

The next prices maximise the least of the planes within a box around the best prices so far (the box grows while it pays, and
shrinks when it does not). Only steps that some choice has broken are priced: the others have price 0.

Prices are rounded to multiples of a power of two so small that nothing is lost, and so large that sums of whole costs and
bytes times prices stay exact in float64: the bound is not off by a rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from .eliminate import Elimination, Pass
from .memory import Memory


@dataclass(frozen=True)
class Quote:
    """One evaluation of L.

    Attributes:
        prices: cost per byte, [T].
        value: L(prices), or a lower bound of it.
        sweep: the elimination behind it.
        states: a choice that attains it (or a guess, when the elimination is not exact).
        improved: whether no earlier quote was higher.
    """

    prices: np.ndarray
    value: float
    sweep: Pass
    states: tuple[int, ...]
    improved: bool


def quote(elimination: Elimination, memory: Memory, prices: np.ndarray, scale: float = 0.0) -> Quote:
    """L at the given prices, rounded so that sums up to about `scale` plus what the limit is worth are exact."""
    if scale and prices.any():
        unit = 2.0 ** (np.ceil(np.log2(4 * (abs(scale) + prices.sum() * memory.limit))) - 52)
        prices = np.round(prices / unit) * unit
    costs = elimination.problem.costs
    sweep = elimination.run([c + toll for c, toll in zip(costs, memory.toll(prices), strict=True)])
    constant = float(prices.sum() * memory.limit) if prices.any() else 0.0
    return Quote(prices, sweep.value - constant, sweep, sweep.states(), True)


def bargain(
    elimination: Elimination,
    memory: Memory,
    cost: Callable[[tuple[int, ...]], float],
    reach: float,
    *,
    rounds: int = 60,
    start: np.ndarray | None = None,
    tolerance: float = 1e-9,
) -> Iterator[Quote]:
    """Quotes at better and better prices, first at `start`; ends when no price can raise L any more.

    Args:
        cost: (1).
        reach: a first guess of how much cost the limit is worth, which sizes the box.
        start: prices to begin with, none by default.
    """
    prices = np.zeros(memory.n_steps) if start is None else start
    best = quote(elimination, memory, prices, reach)
    yield best
    steps: list[int] = []
    planes: list[tuple[float, np.ndarray]] = []
    box = reach / memory.limit
    point, scale = best, cost(best.states)
    scale = scale if np.isfinite(scale) else abs(best.value)
    for _ in range(rounds):
        profile = memory.profile(point.states)
        slope, at = profile - memory.limit, cost(point.states)
        if not np.isfinite(at):  # a guess that takes a forbidden pair: its slope is still a direction
            at = point.value - float(point.prices @ slope)
        planes.append((at, slope))
        steps += [t for t in memory.peaks(profile, memory.limit).tolist() if t not in steps]
        if not np.isfinite(point.value) or not (steps or best.prices.any()):
            return
        steps += [t for t in np.flatnonzero(point.prices).tolist() if t not in steps]
        promise, prices = _highest(planes, steps, best.prices, box)
        if promise - best.value <= tolerance * max(1.0, abs(best.value)):
            return
        point = quote(elimination, memory, prices, scale)
        improved = point.value > best.value
        hit = (np.abs(prices - best.prices) >= box * (1 - 1e-9)).any()
        if improved and hit:
            box *= 3
        elif not improved:
            box /= 2
        point = Quote(point.prices, point.value, point.sweep, point.states, improved)
        if improved:
            best = point
        yield point


def least_peak(elimination: Elimination, memory: Memory, *, rounds: int = 60) -> Iterator[Quote]:
    """Quotes whose value is a lower bound of the least possible peak, and whose states come near it.

    Costs must be 0 or inf. Prices that sum to 1 make an average over steps, and no average exceeds the peak:
    max over p of min over s of  sum_t p_t memory_t(s).
    """
    free = Memory.__new__(Memory)
    free.__dict__ = {**memory.__dict__, "limit": 0.0}
    best = quote(elimination, free, np.full(memory.n_steps, 1.0 / memory.n_steps))
    yield best
    planes: list[tuple[float, np.ndarray]] = []
    steps: list[int] = []
    point = best
    for _ in range(rounds):
        profile = memory.profile(point.states)
        planes.append((0.0, profile))
        steps += [t for t in memory.peaks(profile, profile.max() * 0.95).tolist() if t not in steps]
        promise, prices = _highest(planes, steps, np.zeros(memory.n_steps), np.inf, total=1.0)
        if promise - best.value <= 1e-9 * max(1.0, abs(best.value)):
            return
        point = quote(elimination, free, prices)
        if point.value > best.value:
            best = point
        yield point


def _highest(
    planes: list, steps: list[int], center: np.ndarray, box: float, total: float | None = None
) -> tuple[float, np.ndarray]:
    """Maximum over the box (and prices that sum to `total`) of the least plane: (its value, the prices [T])."""
    costs = np.array([c for c, _ in planes])
    slopes = np.array([slope[steps] for _, slope in planes])
    unit_cost, unit_bytes = max(np.abs(costs).max(), 1.0), max(np.abs(slopes).max(), 1e-30)
    unit_price = unit_cost / unit_bytes if total is None else 1.0
    unit_cost = unit_price * unit_bytes
    middle = center[steps]
    answer = linprog(
        np.array([-1.0] + [0.0] * len(steps)),
        A_ub=np.hstack([np.ones((len(planes), 1)), -slopes / unit_bytes]),
        b_ub=costs / unit_cost,
        A_eq=None if total is None else np.array([[0.0] + [1.0] * len(steps)]),
        b_eq=None if total is None else np.array([total]),
        bounds=[(None, None)] + [(max(0.0, p - box) / unit_price, (p + box) / unit_price) for p in middle],
        method="highs-ds",
    )
    prices = np.zeros_like(center)
    prices[steps] = np.maximum(answer.x[1:] * unit_price, 0.0)
    return -answer.fun * unit_cost, prices
