"""A lower bound of the seconds of every plan of a strategy space.

Weighted means of the bounds (11) of `costs/bound_network.py` are cost networks, solved without a memory limit and without ties, so that
each optimum holds for all plans. The best weights are those at which the least plan takes most:

    maximize over weights  min over plans  weights x seconds

Plans known so far are cutting planes: none is below its own seconds. Weights that are best for their mean (`bound_weights.py`) become
a column of a matrix game, whose solution is a mean of weights; a step from the best weights so far towards it is solved for another
plan.

Also known as Kelley's cutting-plane method with in-out separation (Ben-Ameur and Neto, Networks 49(1), 2007).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.costs.bound_network import BoundTables, Figures, Weights, slope
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.problem import Solution
from shardplan.ilp.solver.solve import solve
from shardplan.search.bound_weights import BestWeights
from shardplan.search.objective import Judged
from shardplan.xla_model.compiler_options import THRESHOLDS, thresholds

WORK = 2.0
"""Work limit of a network, about seconds: most are solved to optimality, in the time that a fortieth of it takes."""

TOLERANCE = 1e-3
"""A network is solved until its bound is as near to its least plan as this fraction; to the end, if the best plan may be optimal."""

ROUNDS, ROUND_STATES = (4, 8), 60_000
"""Least and most plans that are sought for cutting planes; between these, as many as have this many states of networks together."""

STEP = 0.5
"""How far a step goes from the best weights to those of the matrix game."""

CONVERGED = 1e-3
"""Weights are taken as best once no others are better than by this."""


def compute_floor(task: PlanningTask) -> float:
    """Picoseconds of all kernels under the fastest strategy of each: a quick bound."""
    return float(sum(int(least.min() * op.runs * PS) for op, least in zip(task.space.graph.ops, task.space.least_seconds, strict=True)))


def lower_bound(task: PlanningTask, best: Judged, deadline: Deadline) -> tuple[float, list[Candidate]]:
    """Picoseconds that no plan of the task undercuts, whatever its memory; the pins hold.

    Args:
        best: the plan that the bound is wanted for.
        deadline: ends it early.

    Returns:
        The bound, and the plans of least bounds: they compute and send little, and may be fast.
    """
    found = _Ascent(task, best)
    found.bound = compute_floor(task)
    states = sum(map(len, task.space.strategies))
    for _ in range(int(np.clip(ROUND_STATES // states, *ROUNDS))):
        if deadline.over() or not found.step():
            break
    if found.bound < best.solution.objective <= (1 + 2 * TOLERANCE) * found.bound and found.tried and not deadline.over():
        found.solved(max(found.tried, key=lambda x: x.least).weights, tolerance=0.0)
    return found.bound, found.plans


class Tried(NamedTuple):
    """Weights that were solved, and the seconds of the least plan known under them, in picoseconds."""

    weights: Weights
    least: float


@dataclass
class _Ascent:
    """The state of the cutting-plane method: known plans as planes, and weights that were best for some mean of them."""

    task: PlanningTask
    best: Judged
    planes: list[Weights] = field(default_factory=list)
    columns: list[Weights] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    plans: list[Candidate] = field(default_factory=list)
    bound: float = 0.0
    step_length: float = STEP
    tables: BoundTables = field(init=False)

    def __post_init__(self):
        self.tables = self.bounding(released=False)
        states = self.states(self.best)
        if not self.tables.hold(states):  # a search of fewer strategies found it, in which fewer ops have to follow
            self.tables = self.bounding(released=True)
        figures = self.tables.figures(states)
        self.add_plane(figures, self.even)
        self.columns += [self.weights.compute(self.planes[0]), *self.best_weights(self.planes[0])]

    @cached_property
    def weights(self) -> BestWeights:
        return BestWeights(self.task, self.tables.costly)

    def bounding(self, released: bool) -> BoundTables:
        """The tables of the space; `released`: no op has to follow."""
        options = [y for x in self.task.options.xla for y in (x, *thresholds(x))]
        most = max(x.threshold_bytes(kind) for x in options for kind in THRESHOLDS)
        full = frozenset(self.filled(most))
        return BoundTables.of(self.task.space, self.task.resharder, self.task.allowed, full, most, released)

    def best_weights(self, plane: Weights) -> list[Weights]:
        return [self.weights.best(plane, spread) for spread in (False, True)]

    @property
    def even(self) -> Weights:
        """Half of all seconds: where the planes of plans begin that no weights led to."""
        space = self.task.space
        return Weights(np.full(len(space.graph.ops), 0.5), np.full((len(space.array_edges), 4), 0.5))

    def filled(self, most_bytes: float) -> Iterator[int]:
        """Groups of arrays (`CollectiveSite.joint`) of which the best plan fills several collectives."""
        network = self.best.network
        joint = {site.group: site.joint for site in network.space.collective_sites if site.collective_class in ("prefetch", "gradient")}
        for (group, _), sizes in network.combined_groups(self.best.states):
            if group in joint and sum(size for _, size in sizes) > most_bytes:
                yield joint[group]

    def states(self, judged: Judged) -> tuple[int, ...]:
        """A plan as states of a network of the whole space without memory limit.

        Raises:
            KeyError: the space lacks one of its strategies.
        """
        network, states = judged.network, judged.states
        retained, chosen = network.retained(states), network.strategies(states)
        of, blocks = self.task.space.strategies, self.tables.blocks
        if network.space is not self.task.space:
            own = network.space.strategies
            chosen = [wide.numbers[narrow.keys[s]] for wide, narrow, s in zip(of, own, chosen, strict=True)]
        return tuple(s + (blocks.count(j) - 1) * len(of[j]) * (j in retained) for j, s in enumerate(chosen))

    def candidate(self, solution: Solution) -> Candidate:
        """States of a network without memory limit as those of a network under the limit."""
        of, blocks = self.task.space.strategies, self.tables.blocks
        network = self.best.network
        if network.space is not self.task.space:
            network = self.task.network(network.pricing, self.best.limit)
        chosen = [s % len(x) for s, x in zip(solution.states, of, strict=True)]
        retained = {j for j in blocks.retainable if solution.states[j] >= len(of[j]) * (blocks.count(j) - 1)}
        return Candidate(network, Solution("feasible", network.states_of(chosen, retained), solution.objective, 0.0))

    # ---- the ascent

    def add_plane(self, figures: Figures, at: Weights) -> None:
        self.planes.append(slope(figures, at))

    def step(self) -> bool:
        """Another plan; False once no weights are better than the best so far."""
        target, most = self.game()
        best = max(self.tried, key=lambda x: x.least, default=None)
        if best is not None and most <= best.least * (1 + CONVERGED):
            return False
        center = self.columns[0] if best is None else best.weights
        weights = Weights.mean((center, target), (1 - self.step_length, self.step_length)).rounded()
        if not np.isfinite(self.solved(weights).objective):
            return False
        cuts = target.times(self.planes[-1]) < most * (1 - CONVERGED)
        self.step_length = STEP if cuts else min(1.0, 2 * self.step_length)
        return True

    def solved(self, weights: Weights, tolerance: float = TOLERANCE) -> Solution:
        """The network of these weights, and its plan as another plane."""
        solution = solve(self.tables.problem(weights), work_limit=WORK, tolerance=tolerance)
        if solution.found:
            candidate = self.candidate(solution)
            if not self.tables.released or candidate.network.allows(candidate.solution.states):
                self.plans.append(candidate)
            self.add_plane(self.tables.figures(solution.states), weights)
        self.bound = max(self.bound, solution.bound)
        least = min([solution.objective, *(weights.times(plane) for plane in self.planes)])
        self.tried.append(Tried(weights, least))
        return solution

    def game(self) -> tuple[Weights, float]:
        """The mean of weights that the planes bound least, and their bound."""
        _, plans, most = self.mixture()
        mean = Weights.mean(self.planes, plans.tolist())
        new = self.best_weights(mean)
        if max(w.times(mean) for w in new) > most * (1 + CONVERGED):
            self.columns += new
        shares, _, most = self.mixture()
        return Weights.mean(self.columns, shares.tolist()), most

    def mixture(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Shares of the columns and of the planes at the equilibrium of the matrix game, and its value."""
        return equilibrium(np.array([[column.times(plane) for plane in self.planes] for column in self.columns]))


def equilibrium(payoff: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Shares of rows that maximize the least column, shares of columns that minimize the largest row, and the value."""
    from scipy.optimize import linprog  # takes half a second to load

    rows, columns = payoff.shape
    scale = float(np.abs(payoff).max()) or 1.0
    answer = linprog(
        np.append(np.zeros(rows), -1.0),
        A_ub=np.hstack([-payoff.T / scale, np.ones((columns, 1))]),
        b_ub=np.zeros(columns),
        A_eq=np.append(np.ones(rows), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0.0, None)] * rows + [(None, None)],
        method="highs-ds",
    )
    some, others = np.maximum(answer.x[:rows], 0.0), np.maximum(-answer.ineqlin.marginals, 0.0)
    return some / some.sum(), others / others.sum(), float(answer.x[-1]) * scale
