"""The Lagrangian dual: prices per byte and time step that maximize the bound L(p) of (4), by a boxed cutting-plane method.

The relaxed states s that attain L(p) give a subgradient, the bytes above the limit, and a cutting plane that no value of L exceeds:

    L(q) <= L(p) + sum_t (q_t - p_t) (memory_t(s) - limit)          for all q

The next prices maximize the minimum of the planes within a trust box around the best prices so far; the box grows after a step to
its border that raised L, and halves after one that did not. Only steps at which some relaxed states exceeded the limit have a price.

All sums are exact in float64: costs and prices times bytes are multiples of a unit, a power of two. Where prices are small against the
unit, cumulative prices are rounded to fractions of it, and bytes down to multiples of a quantum, which only lowers the bound.

Also known as Kelley's cutting-plane method with a box step (Marsten, Hogan and Blankenship, Operations Research 23(3), 1975); a
bundle method. Lagrangian relaxation: Geoffrion, Mathematical Programming Study 2, 1974.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Messages, Problem
from shardplan.ilp.solver.relax.buckets import BucketElimination, EliminationPass
from shardplan.ilp.solver.relax.trws import TRWS
from shardplan.ilp.solver.settings import DEFAULT, Settings

PRECISION = 50  # bits of a sum of all entries: 3 fewer than float64 has, for reparametrized costs are larger
PRICE_BITS = 12  # bits of the highest price at most; fewer where bytes would have fewer bits than it
MAX_CHANGES = 60  # changes of prices in the search for the least peak
FIRST_VISITS = 6e7  # entries that the first rounds of TRW-S visit, within the bounds of their number
RELATIVE = 1e-9  # a rise of the bound by less than this share of it does not count
CALL_ENTRIES = 2_500.0  # table entries that the overhead of one array operation costs
NEAR_PEAK = 0.95  # steps that hold at least this share of the peak get a price in the search for the least peak


class Relaxation:
    """A problem without (3), prepared for any node costs."""

    def __init__(
        self,
        problem: Problem,
        max_entries: int,
        messages: Messages | None = None,
        deadline: Deadline = UNLIMITED,
        settings: Settings = DEFAULT,
    ):
        """`max_entries` of a bucket table that is not of an exact elimination; TRW-S starts from `messages` of an earlier bound."""
        self.problem, self.settings = problem, settings
        self.elimination = _elimination(problem, max_entries, deadline, settings)
        # TRW-S reparametrizes the costs first, unless the elimination is exact
        self.trws = None if self.elimination.exact else TRWS(problem, messages=messages, deadline=deadline)
        self.first_rounds = settings.trws_rounds  # rounds of TRW-S at the first prices
        if self.trws is not None and not messages:
            self.first_rounds = int(np.clip(FIRST_VISITS / max(self.trws.entries, 1.0), *settings.first_rounds))
        # upper bound of the absolute sum of one entry of each table
        self.total = sum(max(-low, high) for low, high in problem.finite_ranges) + 1.0
        self.work = 0.0  # table entries visited so far

    def run(self, costs: np.ndarray, rounds: int, unit: float) -> EliminationPass:
        """One elimination pass with node costs [states of all nodes], after TRW-S if the elimination is not exact.

        Costs are, and messages are rounded to, multiples of `unit`, a power of two, which keeps sums exact.
        """
        self.work += self.elimination.size + 4 * CALL_ENTRIES * len(self.elimination.buckets)
        if self.trws is None:
            return self.elimination.run(self.problem.by_node(costs))
        self.trws.iterate(costs, rounds)
        self.work += rounds * (self.trws.entries + 4 * CALL_ENTRIES * len(self.problem.edges))
        return self.elimination.run(*self.trws.commit(costs, unit))


def _elimination(problem: Problem, max_entries: int, deadline: Deadline, settings: Settings) -> BucketElimination:
    """Exact elimination of a small problem, if cheap; else mini-buckets, smaller ones where all tables would exceed their total."""
    if problem.n_states <= settings.exact_states:
        exact = BucketElimination(problem, int(settings.exact_entries), deadline)
        if exact.exact and exact.size <= settings.exact_entries:
            return exact
    while (elimination := BucketElimination(problem, max_entries, deadline)).size > settings.total_entries and max_entries > 1:
        max_entries //= 4
    return elimination


@dataclass(frozen=True)
class DualPoint:
    """One evaluation of L, or of a lower bound of it if the elimination is not exact."""

    prices: np.ndarray  # cost per byte, [T]
    value: float  # L(prices), given by `elimination_pass`
    elimination_pass: EliminationPass
    relaxed_states: np.ndarray  # the states that attain `value`, [n]; inconsistent ones with mini-buckets
    subgradient: np.ndarray  # bytes of `relaxed_states` above the limit, [T]
    limit_cost: float  # sum_t p_t limit, the constant of (4) that `elimination_pass` leaves out

    def cutting_plane(self, prices: np.ndarray) -> float:
        """The cutting plane at other prices, [T]; without `@`, whose rounding depends on the machine."""
        return self.value + float(((prices - self.prices) * self.subgradient).sum())

    def min_marginals(self) -> list[np.ndarray]:
        """For every node and state a lower bound of the Lagrangian of choices that take it, [k_i] each."""
        return [marginal - self.limit_cost for marginal in self.elimination_pass.min_marginals()]


def evaluate_dual(relaxation: Relaxation, prices: np.ndarray, rounds: int, limit: float | None = None) -> DualPoint:
    """L at the given prices, which are rounded so that sums are exact; `limit` in bytes is the problem's own by default."""
    problem, memory = relaxation.problem, relaxation.problem.usage_table
    limit = memory.limit if limit is None else limit
    unit = 2.0 ** min(0.0, np.ceil(np.log2(relaxation.total + prices.sum() * memory.max_bytes)) - PRECISION)
    highest = float(prices.max(initial=0.0))
    coarse = np.log2(unit / highest) if highest else -np.inf
    quantum = 2.0 ** max(0.0, np.floor(min(coarse + PRICE_BITS, (coarse + np.log2(max(1.0, memory.max_bytes))) / 2)))
    prices = np.diff(np.rint(np.cumsum(prices) * (quantum / unit)), prepend=0.0) * (unit / quantum)
    limit_cost = float(prices.sum() * (limit // quantum * quantum)) if prices.any() else 0.0
    result = relaxation.run(problem.cost_row + memory.penalty(prices, quantum), rounds, unit)
    relaxed = result.relaxed_states() if memory.n_steps and np.isfinite(result.value) else np.zeros(len(problem.costs), dtype=np.int64)
    return DualPoint(prices, result.value - limit_cost, result, relaxed, memory.profile(relaxed) - limit, limit_cost)


def maximize_dual(
    relaxation: Relaxation, reach: float, *, changes: int, start: np.ndarray | None, cutoff: float
) -> Iterator[DualPoint]:
    """Points of the dual at better and better prices, first at `start` (or 0); ends when no prices can raise L any more.

    Args:
        relaxation: the problem without its limit.
        reach: a first guess of the cost that the limit causes; sizes the trust box.
        changes: of prices, at most.
        start: first prices, [T].
        cutoff: greatest cost of a better answer; a rise of L by a small share of the way to it does not justify another evaluation.
    """
    settings, memory = relaxation.settings, relaxation.problem.usage_table
    zero = np.zeros(memory.n_steps)
    point = best = evaluate_dual(relaxation, zero if start is None else start, relaxation.first_rounds)
    yield best
    steps: list[int] = []
    planes: list[list] = []  # (value at price 0, subgradient)
    box, rounds = reach / memory.limit, settings.trws_rounds
    for _ in range(changes):
        if not np.isfinite(point.value):
            return
        planes.append([point.cutting_plane(zero), point.subgradient])
        for plane in planes:  # further TRW-S rounds may have raised L above an older plane
            plane[0] = max(plane[0], point.value - float((point.prices * plane[1]).sum()))
        candidates = [*local_peaks(point.subgradient, 0.0), *np.flatnonzero(point.prices).tolist()]
        steps = list(dict.fromkeys([*steps, *candidates]))
        gain, least = settings.least_gain * min(cutoff - best.value, abs(best.value)), RELATIVE * max(1.0, abs(best.value))
        promise, prices = _maximize_planes(planes, steps, best.prices, box) if steps else (best.value, best.prices)
        if promise - best.value <= max(settings.trws_rounds * gain, least):  # no prices raise L: more TRW-S rounds may
            if relaxation.elimination.exact:
                return
            rounds *= settings.rounds_growth
            point = evaluate_dual(relaxation, best.prices, rounds)
            yield point
            if point.value - best.value <= max(rounds * gain, least):
                return
            best = point
            continue
        point = evaluate_dual(relaxation, prices, settings.trws_rounds)
        if point.value <= best.value:
            box /= 2
        else:
            if (np.abs(prices - best.prices) >= box * (1 - RELATIVE)).any():
                box *= 3
            best = point
        yield point


def min_peak_dual(relaxation: Relaxation) -> Iterator[tuple[float, EliminationPass]]:
    """Lower bounds of the least peak, bytes, each with its elimination, whose states have a low one; costs must be 0 or inf.

    Prices that sum to 1 make an average over steps, which never exceeds the peak: max over p of min over s of sum_t p_t memory_t(s).
    """
    n_steps = relaxation.problem.usage_table.n_steps
    if not n_steps:
        yield 0.0, relaxation.elimination.run()
        return
    prices, rounds, best = np.full(n_steps, 1.0 / n_steps), relaxation.first_rounds, -np.inf
    planes: list = []
    steps: list[int] = []
    for _ in range(MAX_CHANGES + 1):
        point = evaluate_dual(relaxation, prices, rounds, 0.0)
        best, rounds = max(best, point.value), relaxation.settings.trws_rounds
        if total := point.prices.sum():
            yield point.value / total, point.elimination_pass
        planes.append([0.0, point.subgradient])
        peaks = local_peaks(point.subgradient, point.subgradient.max() * NEAR_PEAK)
        steps = list(dict.fromkeys([*steps, *peaks]))
        promise, prices = _maximize_planes(planes, steps, np.zeros(n_steps), np.inf, total=1.0)
        if promise - best <= RELATIVE * max(1.0, abs(best)):
            return


def local_peaks(profile: np.ndarray, level: float) -> list[int]:
    """The highest step of every maximal run of steps above a level."""
    above = np.concatenate([[False], profile > level, [False]])
    first, last = np.flatnonzero(above[1:] & ~above[:-1]), np.flatnonzero(above[:-1] & ~above[1:])
    return [int(a + profile[a:b].argmax()) for a, b in zip(first, last, strict=True)]


def _maximize_planes(
    planes: list, steps: list[int], center: np.ndarray, box: float, total: float | None = None
) -> tuple[float, np.ndarray]:
    """Maximizes the minimum of the cutting planes (value at price 0, subgradient [T]), as a linear program in scaled units.

    Only `steps` have a price, within `box` (cost per byte) of the prices `center` [T]; if `total` is given, prices sum to it. Returns
    the maximum, and the prices [T].
    """
    from scipy.optimize import linprog  # takes half a second to load

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
