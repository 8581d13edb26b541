"""What a byte is worth at every time step: the prices that make the Lagrangian bound (4) greatest.

L(p) is concave and piecewise linear. The relaxed states s behind a value of it are one of its planes:

    L(q) <= L(p) + sum_t (q_t - p_t) (memory_t(s) - limit)          for all q

The next prices maximise the least of the planes within a box around the best prices so far (the box grows while it pays, and
shrinks when it does not). Only steps that some choice has broken are priced: the others have price 0.

Sums of whole costs and of bytes times prices are multiples of a unit, a power of two so large that float64 adds them exactly: the
bound is not off by a rounding error. Prices that are small beside the unit are rounded to parts of it, and bytes down to grains of as
many bytes, which only lowers the bound. What is rounded are sums of prices, so that many small ones count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog  # scipy is a requirement of jax itself

from shardplan.ilp.solver.relax.buckets import EliminationPass
from shardplan.ilp.solver.relax.relaxation import Relaxation
from shardplan.ilp.solver.usage import UsageTable, local_peaks

ROUNDS = 2  # of shifting, after a change of prices
FIRST_ROUNDS, VISITS = (4, 16), 6e7  # rounds at the first prices: as many as visit so many table entries, but within these numbers
GROWTH = 2  # as many rounds as before, each time that only shifting may raise the bound
ENOUGH = 0.01  # of the way from bound to answer: what each round must raise the bound by, for more of them to pay
PRECISION = 50  # bits of a sum of all entries: 3 less than float64 has, for costs are shifted
FINE = 12  # bits of the highest price at most; fewer where bytes would have fewer bits than it


@dataclass(frozen=True)
class DualPoint:
    """One evaluation of L, or of a lower bound of it where joints are split.

    Attributes:
        prices: cost per byte, [T].
        value: L(prices).
        elimination_pass: the elimination behind it.
        relaxed_states: the states behind `value`; where joints are split they need not go together.
        subgradient: bytes that `relaxed` holds above the limit, [T]: the slope of the plane.
        limit_cost: sum_t p_t limit, which the sweep's costs are above `value`.
    """

    prices: np.ndarray
    value: float
    elimination_pass: EliminationPass
    relaxed_states: np.ndarray
    subgradient: np.ndarray
    limit_cost: float

    def cutting_plane(self, prices: np.ndarray) -> float:
        """The plane's value at other prices. (No `@`: its rounding depends on the machine.)"""
        return self.value + float(((prices - self.prices) * self.subgradient).sum())

    def min_marginals(self) -> list[np.ndarray]:
        """For every state of every node a lower bound of the priced cost of a choice through it, [k_i] each."""
        return [marginal - self.limit_cost for marginal in self.elimination_pass.min_marginals()]


def evaluate_dual(relaxation: Relaxation, memory: UsageTable, prices: np.ndarray, rounds: int, costs=None) -> DualPoint:
    """L at the given prices, rounded so that sums are exact.

    Args:
        costs: node costs, the problem's own by default.
    """
    unit = 2.0 ** min(0.0, np.ceil(np.log2(relaxation.total + prices.sum() * memory.max_bytes)) - PRECISION)
    highest = float(prices.max(initial=0.0))
    coarse = np.log2(unit / highest) if highest else -np.inf
    grain = 2.0 ** max(0.0, np.floor(min(coarse + FINE, (coarse + np.log2(max(1.0, memory.max_bytes))) / 2)))
    prices = np.diff(np.rint(np.cumsum(prices) * (grain / unit)), prepend=0.0) * (unit / grain)
    paid = float(prices.sum() * (memory.limit // grain * grain)) if prices.any() else 0.0
    costs = relaxation.problem.costs if costs is None else costs
    sweep = relaxation.run([c + penalty for c, penalty in zip(costs, memory.penalty(prices, grain), strict=True)], rounds, unit)
    relaxed = sweep.relaxed_states() if memory.n_steps and np.isfinite(sweep.value) else np.zeros(len(costs), dtype=np.int64)
    return DualPoint(prices, sweep.value - paid, sweep, relaxed, memory.profile(relaxed) - memory.limit, paid)


def _first(relaxation: Relaxation) -> int:
    """Rounds of shifting before the first quote."""
    if relaxation.trws is None or relaxation.warm:
        return ROUNDS
    return int(np.clip(VISITS / max(relaxation.trws.entries, 1.0), *FIRST_ROUNDS))


def maximize_dual(
    relaxation: Relaxation,
    memory: UsageTable,
    reach: float,
    *,
    rounds: int = 60,
    start: np.ndarray | None = None,
    cutoff: float = np.inf,
    costs=None,
) -> Iterator[DualPoint]:
    """Quotes at better and better prices, first at `start`; ends when no price can raise L any more.

    Args:
        reach: a first guess of how much cost the limit is worth, which sizes the box.
        rounds: how often prices may change.
        start: prices to begin with, none by default.
        worth: what a better answer costs at most; a rise of L by a small part of the way there is not worth another round.
        costs: node costs, the problem's own by default.
    """
    prices = np.zeros(memory.n_steps) if start is None else start
    point = best = evaluate_dual(relaxation, memory, prices, _first(relaxation), costs)
    yield best
    steps: list[int] = []
    planes: list[list] = []
    box, shifts = reach / memory.limit, ROUNDS
    for _ in range(rounds):
        if not np.isfinite(point.value):
            return
        planes.append([point.cutting_plane(np.zeros(memory.n_steps)), point.subgradient])
        for plane in planes:  # shifting on may have raised L above an older plane
            plane[0] = max(plane[0], point.value - float((point.prices * plane[1]).sum()))
        steps += [t for t in local_peaks(point.subgradient, 0.0).tolist() if t not in steps]
        steps += [t for t in np.flatnonzero(point.prices).tolist() if t not in steps]
        way, least = ENOUGH * min(cutoff - best.value, abs(best.value)), 1e-9 * max(1.0, abs(best.value))
        promise, prices = _highest(planes, steps, best.prices, box) if steps else (best.value, best.prices)
        if promise - best.value <= max(ROUNDS * way, least):  # no price raises L: more shifting may
            if relaxation.exact:
                return
            shifts *= GROWTH
            point = evaluate_dual(relaxation, memory, best.prices, shifts, costs)
            yield point
            if point.value - best.value <= max(shifts * way, least):
                return
            best = point
            continue
        point = evaluate_dual(relaxation, memory, prices, ROUNDS, costs)
        improved = point.value > best.value
        hit = (np.abs(prices - best.prices) >= box * (1 - 1e-9)).any()
        if improved and hit:
            box *= 3
        elif not improved:
            box /= 2
        if improved:
            best = point
        yield point


def min_peak_dual(relaxation: Relaxation, memory: UsageTable, *, rounds: int = 60) -> Iterator[DualPoint]:
    """Quotes whose value is a lower bound of the least possible peak, and whose sweeps guess states that come near it.

    Costs must be 0 or inf. Prices that sum to 1 make an average over steps, and no average exceeds the peak:
    max over p of min over s of  sum_t p_t memory_t(s).
    """
    free = UsageTable.__new__(UsageTable)
    free.__dict__ = {**memory.__dict__, "limit": 0.0}
    best = evaluate_dual(relaxation, free, np.full(memory.n_steps, 1.0 / memory.n_steps), _first(relaxation))
    yield best
    planes: list = []
    steps: list[int] = []
    point = best
    for _ in range(rounds):
        planes.append([0.0, point.subgradient])
        steps += [t for t in local_peaks(point.subgradient, point.subgradient.max() * 0.95).tolist() if t not in steps]
        promise, prices = _highest(planes, steps, np.zeros(memory.n_steps), np.inf, total=1.0)
        if promise - best.value <= 1e-9 * max(1.0, abs(best.value)):
            return
        point = evaluate_dual(relaxation, free, prices, ROUNDS)
        if point.value > best.value:
            best = point
        yield point


def _highest(planes: list, steps: list[int], center: np.ndarray, box: float, total: float | None = None) -> tuple[float, np.ndarray]:
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
