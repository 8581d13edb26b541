"""Finds cheap feasible states of large problems: dual prices that follow the memory, tree moves, perturbation, 1-opt repair.

    ascend     rounds of TRW-S (trws.py) while the price of a byte follows how full each step was (7), so that the prices find the
               few steps where memory binds. The states of least reparametrized cost are an answer, improved now and then by tree
               moves (tree_moves.py).
    perturb    one node with many neighbours takes another state and stays fixed while tree moves adapt the rest; accepted if the
               priced cost falls

Every answer is repaired and improved by flips at falling temperatures (kernels.py) before it is offered. Between runs, (7) without
noise leads to the prices of the next bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.kernels import anneal, conditional_costs, flatten, least_states, objective, profile_tree, repair
from shardplan.ilp.solver.primal.tree_moves import EliminationSchedule, elimination_schedule, tree_move
from shardplan.ilp.solver.problem import Edge, Messages, Problem, Usage
from shardplan.ilp.solver.relax.trws import TRWS
from shardplan.ilp.solver.search.branch import Incumbent, Subproblem

BOUND_ABOVE = 1.2  # seconds left over those of the last run, from which another bound is computed: not where time cut that run short
ASCENT_SHARE = 0.5  # share of a run that ascends; the rest perturbs
RATE, GAIN = (1.0, 0.05), (3.0, 30.0)  # a and g in (7), at the start and at the end of the ascent
NEARLY_FITS = 1.2  # peak over the limit of states at the first prices
PRICE_RISE, PRICE_RISES = 4.0, 60  # factor between two first prices, and how many are tried at most
SKIPPED = 5  # answers in a row that are not annealed, at most
GAIN_MEMORY = 0.9  # what the greatest gain of annealing counts at the next one
TREE_MOVES, EVERY = 4, 25  # tree moves that improve an answer, and rounds of the ascent between two such answers


class IteratedLocalSearch:
    """A problem prepared for runs; `prices` are the costs per byte [T] after the last run, None before."""

    def __init__(self, problem: Problem, cap: int, messages: Messages | None = None, deadline: Deadline = UNLIMITED):
        """Prepares a presolved problem; `cap` limits the bucket tables of tree moves, TRW-S starts from `messages`."""
        self.problem, self.memory, self.deadline, self.cap = problem, problem.usage_table, deadline, cap
        self.net = flatten(problem, deadline)
        self.schedules: list[EliminationSchedule] = []
        self.rng = np.random.default_rng(0)
        self.prices: np.ndarray | None = None
        self._begun: tuple[np.ndarray, np.ndarray, float] | None = None  # states, prices and scale from which the next run goes on
        # the least cost of an answer so far, what annealing gained lately at most, and how often it was left out since it last ran
        self._least, self._gain, self._skipped = np.inf, np.inf, 0
        deadline.check()
        self.trws = TRWS(problem, compiled=True, messages=messages, deadline=deadline)

    def schedule(self, number: int) -> EliminationSchedule:
        """Elimination schedules, made on demand; each fixes other nodes, at random and by degree."""
        while len(self.schedules) <= number:
            degree = np.diff(self.net.near_start) * np.log(np.diff(self.net.start) + 1.0) + 1e-9
            chance = self.rng.random(len(degree)) ** self.rng.choice([1, 3, 6])
            weight = chance / degree ** self.rng.choice([0.0, 0.5, 1.0, 1.3])
            self.schedules.append(elimination_schedule(self.net, self.cap, weight, self.deadline))
        return self.schedules[number]

    def trws_states(self, costs: np.ndarray) -> np.ndarray:
        """The states of least reparametrized cost after one more round of TRW-S with these node costs, [states of all nodes]."""
        self.trws.iterate(costs, 1)
        return least_states(self.net.start, self.trws.reparametrized_costs(costs))

    def tree_descent(self, states: np.ndarray, prices: np.ndarray, moves: int = TREE_MOVES) -> np.ndarray:
        """The states after a few tree moves at these prices."""
        states, extra = states.copy(), self.memory.penalty(prices)
        for number in range(moves):
            self.deadline.check()
            tree_move(self.net, self.schedule(number), extra, states)
        return states

    def priced_cost(self, states: np.ndarray, prices: np.ndarray) -> float:
        """(1) plus prices times bytes."""
        return objective(self.net, states) + float(prices @ self.memory.profile(states))

    def first_feasible(self) -> Iterator[tuple[int, ...]]:
        """A short ascent to first feasible states of any cost: yields them as repaired, then annealed."""
        _, prices, scale = self._start(1)
        for turn in range(5, 51, 5):
            for _ in range(5):
                states = self.trws_states(self.net.unary + self.memory.penalty(prices))
                prices = self._follow_memory(prices, states, RATE[0], GAIN[0])
            found = False
            for answer in self.feasible(self.tree_descent(states, prices, 1), scale, turn, both=True):
                found = True
                yield answer
            self._begun = states, prices, scale
            if found:
                return

    def _start(self, moves: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Cheap states, initial prices, and the scale of costs: how far these states are above the trivial lower bound.

        The price of a byte is the same at every step, of a geometric sequence the first at which the states of TRW-S nearly fit. Where
        only the limit costs anything, cheap states are free, and the scale is what the limit costs at that price.
        """
        net = self.net
        states = self.tree_descent(least_states(net.start, net.unary), np.zeros(net.steps), moves)
        scale = max(objective(net, states) - self.problem.lower_bound(), 1.0)
        prices = np.full(net.steps, scale / net.limit / max(1, net.steps))
        for _ in range(PRICE_RISES if net.steps else 0):
            priced = self.trws_states(net.unary + self.memory.penalty(prices))
            if self.memory.profile(priced).max() <= NEARLY_FITS * net.limit:
                break
            prices = PRICE_RISE * prices
        return states, prices, max(scale, float(prices.sum()) * net.limit if net.steps else 0.0)

    def run(
        self, number: int, n_schedules: int, pace: Callable[[int], float], known: tuple[int, ...] | None = None
    ) -> Iterator[tuple[int, ...]]:
        """Ascends, then perturbs (from `known` feasible states if they are better); yields feasible states.

        The number seeds the run's noise and sets its temperature; `n_schedules` schedules take turns; `pace` gives the share of the run
        that is over after so many turns.
        """
        net, rng = self.net, np.random.default_rng(number)
        states, prices, scale = self._begun or self._start(TREE_MOVES)
        self._begun = None
        temperature = (0.0, 0.003, 0.01, 0.03)[number % 4]  # of the run's start, in units of `scale`
        best, turn = states, 0
        while (share := pace(turn) / ASCENT_SHARE) < 1:
            costs = net.unary + self.memory.penalty(prices)
            if temperature:
                costs += scale * temperature * 1e-5**share * rng.gumbel(size=len(costs))
            states = self.trws_states(costs)
            rate, gain = (first * (last / first) ** share for first, last in (RATE, GAIN))
            prices = self._follow_memory(prices, states, rate, gain)
            turn += 1
            if turn % EVERY == 0:
                best = self.tree_descent(states, prices)
                yield from self.feasible(best, scale, turn)
        states = min((best, self.tree_descent(states, prices)), key=lambda s: self.priced_cost(s, prices))
        yield from self.feasible(states, scale, number)
        if known is not None:
            states = min(states, np.array(known), key=lambda s: self.priced_cost(s, prices))
        yield from self._perturb(states, prices, scale, rng, n_schedules, pace, turn)

    def _perturb(self, states, prices, scale, rng, n_schedules, pace, turn) -> Iterator[tuple[int, ...]]:
        """Perturbations until the run is over; yields feasible states."""
        net = self.net
        k, degree = np.diff(net.start), np.diff(net.near_start)
        fixed = np.array([self.schedule(number).fixed for number in range(n_schedules)])
        chance = fixed.mean(axis=0) * np.log(k) * degree**0.7
        extra, now, tried = self.memory.penalty(prices), self.priced_cost(states, prices), 0
        while pace(turn) < 1:
            other = states.copy()
            numbers: tuple[int, ...] = (0,)
            if chance.any():
                node = int(rng.choice(len(k), p=chance / chance.sum()))
                other[node] = (states[node] + rng.integers(1, k[node])) % k[node]
                numbers = (*rng.choice(np.flatnonzero(fixed[:, node]), 2), *rng.integers(0, n_schedules, 2))
            for number in numbers:
                tree_move(net, self.schedule(int(number)), extra, other)
            turn += len(numbers)
            tried += 1
            if self.priced_cost(other, prices) < now:
                states = other
                prices = self._follow_memory(prices, states, 0.1, GAIN[1])
            elif tried % 10 == 0:
                prices = self._follow_memory(prices, states, 0.05, GAIN[1])
            else:
                continue
            extra = self.memory.penalty(prices)
            tree_move(net, self.schedule(int(rng.integers(n_schedules))), extra, states)
            now = self.priced_cost(states, prices)
            yield from self.feasible(states, scale, turn, selective=True)
        self.prices = prices

    def ascend_dual(self, prices: np.ndarray, rounds: int, deadline: Deadline = UNLIMITED) -> np.ndarray:
        """Prices near these at which TRW-S bounds more: (7) without noise, for some rounds or until the deadline is over."""
        for n in range(rounds):
            if deadline.over():
                break
            states = self.trws_states(self.net.unary + self.memory.penalty(prices))
            prices = self._follow_memory(prices, states, RATE[0] * (RATE[1] / RATE[0]) ** (n / rounds), GAIN[0])
        self.trws.iterate(self.net.unary + self.memory.penalty(prices), 30)
        return prices

    def _follow_memory(self, prices: np.ndarray, states: np.ndarray, rate: float, gain: float) -> np.ndarray:
        """(7); prices stay positive, or they could not rise again."""
        if not len(prices):
            return prices
        full = self.memory.profile(states) / self.net.limit - 1.0
        return np.maximum(prices * np.exp(rate * np.clip(gain * full, -0.3, 1.0)), 1e-9 * prices.max())

    def feasible(
        self, states: np.ndarray, scale: float, number: int = 0, both: bool = False, selective: bool = False
    ) -> Iterator[tuple[int, ...]]:
        """Feasible states near the given ones, unless repair fails: repaired, then annealed while there is time; or `both`.

        `selective` leaves out, but for one in `SKIPPED`, those that annealing would have to improve by more than it lately did to make
        a new best answer: it takes longer than all else.
        """
        net, over = self.net, self.deadline.over
        states = np.array(states, dtype=np.int64)
        conditional, tree = conditional_costs(net, states, np.zeros(len(net.unary))), profile_tree(net, states)
        for _ in range(40):
            repaired = repair(net, states, conditional, tree, 50)
            if repaired or over():
                break
        if repaired != 1:
            return
        start = objective(net, states)
        if both:
            yield tuple(states.tolist())
        if selective and start - self._gain > self._least and self._skipped < SKIPPED:
            self._skipped += 1
            return
        self._skipped = 0
        best, gained = states.copy(), np.zeros(2)
        seed = np.array([88172645463325252 + number], dtype=np.uint64)
        for hot, cold in pairwise(scale * np.geomspace(1e-4, 1e-7, 21)):
            if over():
                break
            anneal(net, states, conditional, tree, hot, cold, len(net.unary), seed, best, gained)
        self._gain = max(-gained[1], GAIN_MEMORY * self._gain if np.isfinite(self._gain) else 0.0)
        self._least = min(self._least, start + gained[1])
        yield tuple(best.tolist())


def compile_kernels() -> None:
    """Compiles all kernels that runs call (about ten seconds, once per installation, kept on disk), outside any time limit."""
    costs = tuple(np.arange(3.0) for _ in range(3))
    edges = tuple(Edge(i, j, np.outer(costs[i], costs[j])) for i, j in ((0, 1), (0, 2), (1, 2)))
    usages = tuple(Usage(i, i, i + 2, np.arange(3.0)[::-1]) for i in range(3))
    iterated = IteratedLocalSearch(Problem(costs, edges, usages, limit=3.0), 1000)
    for _ in iterated.run(1, 1, lambda turn: turn / (3 * EVERY)):
        pass
    assert iterated.prices is not None
    iterated.ascend_dual(iterated.prices, 1)


class PrimalSearch:
    """Runs of iterated local search under a time limit, each longer than the one before; `last` if no time is left for another."""

    def __init__(self, incumbent: Incumbent, deadline: Deadline, large_states: int):
        self.incumbent, self.deadline, self.large_states = incumbent, deadline, large_states
        self.iterated: IteratedLocalSearch | None = None  # of the last problem
        self.number, self.seconds, self.last = 0, 0.0, False

    def first_feasible(self, subproblem: Subproblem) -> None:
        """Offers the first answers of a short ascent."""
        for found in self._prepared(subproblem).first_feasible():
            self._offer(subproblem, found)

    def run(self, subproblem: Subproblem) -> None:
        """Offers the answers of one more run; the last one before the time limit takes all time that is left."""
        incumbent, deadline, number = self.incumbent, self.deadline, self.number
        iterated, large = self._prepared(subproblem), subproblem.problem.n_states > self.large_states
        turns = 400 << number if large else min(int(400 * 1.4**number), 3000)
        n_schedules = min(32, 4 << number)
        iterated.schedule(n_schedules - 1)
        start, left = time.monotonic(), deadline.seconds_left
        self.last = left < (6.0 if large else 2.5) * self.seconds  # another run would not end in time

        def pace(turn: int) -> float:
            """Share of the run that is over: by turns, or by time in the last run; the first run goes on until there is an answer."""
            spent = (time.monotonic() - start) / max(1e-3, left if self.last else 0.5 * left)
            if number == 0 and not incumbent.found:
                spent = float(deadline.over())
            return spent if self.last else max(turn / turns, spent)

        states, invert = incumbent.answer
        known = states if invert is subproblem.invert and (self.last or number % 4 == 3) else None  # most runs look elsewhere
        for found in iterated.run(number, n_schedules, pace, known):
            self._offer(subproblem, found)
        self.seconds = time.monotonic() - start
        self.number += 1

    @property
    def ending(self) -> bool:
        """Whether what is left of the time limit is spent best in one more run."""
        return self.last or self.deadline.seconds_left < BOUND_ABOVE * self.seconds

    def _prepared(self, subproblem: Subproblem) -> IteratedLocalSearch:
        if self.iterated is None or self.iterated.problem is not subproblem.problem:
            cap = 4_000 if subproblem.problem.n_states > self.large_states else 20_000
            self.iterated = IteratedLocalSearch(subproblem.problem, cap, subproblem.messages, self.deadline)
        return self.iterated

    def _offer(self, subproblem: Subproblem, found: tuple[int, ...]) -> bool:
        assert self.iterated is not None
        if objective(self.iterated.net, np.array(found)) + subproblem.offset >= self.incumbent.objective:  # quicker than in numpy
            return False
        return self.incumbent.offer(found, subproblem.problem.objective(found) + subproblem.offset, subproblem.invert)

    def priced(self, subproblem: Subproblem, share: float) -> Subproblem:
        """The same answers, to be bounded at prices near the last bound's, or the last run's, found in a share of the time left."""
        iterated = self.iterated
        assert iterated is not None and iterated.prices is not None
        prices = iterated.prices if subproblem.prices is None else subproblem.prices
        prices = iterated.ascend_dual(prices, 200 << self.number, self.deadline.share(share))
        return replace(subproblem, prices=prices, messages=iterated.trws.sent_messages())
