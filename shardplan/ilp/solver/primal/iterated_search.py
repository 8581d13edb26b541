"""Where cheap choices that fit are found: costs shifted under prices that follow the memory, then sweeps and kicks.

    agree   costs are shifted along the edges (shift.py) while the price of a step follows how full the step was, so the prices
            find the few steps where memory binds by themselves:

                p_t  <-  p_t exp(a clip(g (memory_t / limit - 1), -0.3, 1)),    a falling, g rising                         (7)

            every node's cheapest state is a choice, settled now and then by sweeps (plans.py), which move all but a few held
            nodes to their joint optimum
    kick    one node with many neighbours takes another state, held there while sweeps adapt the rest; kept when the priced cost
            falls

Whenever a choice is made to fit the limit (repair and one-node moves, compiled in kernels.py), it is a candidate. Between runs, (7)
without noise leads on to the prices of the next bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.incumbent import LARGE, Incumbent
from shardplan.ilp.solver.kernels import anneal, conditional_costs, flatten, objective, penalty, profile, profile_tree, repair
from shardplan.ilp.solver.primal.tree_moves import EliminationSchedule, elimination_schedule, tree_move
from shardplan.ilp.solver.problem import Edge, Problem, Usage
from shardplan.ilp.solver.relax.trws import TRWS, Messages
from shardplan.ilp.solver.search.branch import Subproblem

SWEEP_JOINT = (20_000, 4_000)  # entries of a joint table for sweeps, on small and on large problems
FIRST_RUN, LONGEST_RUN = 400, 3000  # turns
RUN_SHARE = 0.5  # of the time that is left, for a run that is not the last
MOST_PLANS = 32  # that take turns in a run

HEAT = (0.0, 0.003, 0.01, 0.03)  # noise at the start of a run, as a share of what is at stake; runs take turns
COLD = 1e-5
RATE = (1.0, 0.05)  # a in (7), first and last while agreeing
GAIN = (3.0, 30.0)  # g in (7), likewise
KICK_RATE = 0.05
AGREEING = 0.5  # share of a run
LAST_ROUNDS = 30  # of shifting at the prices of a bound
SETTLE, SETTLERS = 25, 4  # turns after which a choice is settled, and by how many sweeps
FIRST_SETTLE, FIRST_TURNS = 5, 50  # turns after which a choice is settled, and the last of them, where there is none yet
RELIEF = 40, 50  # times, moves each: to make a choice fit
COOLING, PROPOSALS = (1e-4, 1e-7, 21), 1  # noise as a share of what is at stake, in twenty steps; moves proposed in each, per state


class IteratedLocalSearch:
    """A problem prepared for runs.

    Attributes:
        prices: cost per byte at every step, after the last run; None before.
    """

    def __init__(self, problem: Problem, cap: int, messages: Messages | None = None, deadline: Deadline | None = None):
        self.problem, self.deadline = problem, deadline or UNLIMITED
        self.net = flatten(problem, self.deadline)
        self.cap = cap
        self.plans: list[EliminationSchedule] = []
        self.rng = np.random.default_rng(0)
        self.prices: np.ndarray | None = None
        self.deadline.check()
        self.trws = TRWS(problem, compiled=True, messages=messages, deadline=self.deadline)

    def plan(self, number: int) -> EliminationSchedule:
        """Plans made as they are asked for, each holding other nodes."""
        while len(self.plans) <= number:
            degree = np.diff(self.net.near_start) * np.log(np.diff(self.net.start) + 1.0) + 1e-9
            chance = self.rng.random(len(degree)) ** self.rng.choice([1, 3, 6])
            weight = chance / degree ** self.rng.choice([0.0, 0.5, 1.0, 1.3])
            self.plans.append(elimination_schedule(self.net, self.cap, weight, self.deadline))
        return self.plans[number]

    def agree(self, costs: np.ndarray) -> np.ndarray:
        """One more round of shifting with these node costs (of all states in a row), and every node's cheapest state then."""
        bounds = list(pairwise(self.net.start))
        self.trws.iterate([costs[a:b] for a, b in bounds], 1)
        gained = self.trws.reparametrized_costs(costs)
        return np.array([gained[a:b].argmin() for a, b in bounds], dtype=np.int64)

    def settle(self, states: np.ndarray, prices: np.ndarray, sweeps: int = SETTLERS) -> np.ndarray:
        """What a few sweeps make of the states."""
        states, extra = states.copy(), penalty(self.net, prices)
        for number in range(sweeps):
            self.deadline.check()
            tree_move(self.net, self.plan(number), extra, states)
        return states

    def priced(self, states: np.ndarray, prices: np.ndarray) -> float:
        """(1) plus what the prices add."""
        return objective(self.net, states) + float(prices @ profile(self.net, states))

    def first(self) -> Iterator[tuple[int, ...]]:
        """Agrees in haste; yields choices that fit, good or bad."""
        _, prices, stake = self._start(1)
        for turn in range(FIRST_SETTLE, FIRST_TURNS + 1, FIRST_SETTLE):
            for _ in range(FIRST_SETTLE):
                states = self.agree(self.net.unary + penalty(self.net, prices))
                prices = self._follow(prices, states, RATE[0], GAIN[0])
            yield from self._fitting(self.settle(states, prices, 1), stake, turn)

    def _start(self, sweeps: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Cheap states, prices to begin with, and what is at stake: how far these states are above the least of all costs."""
        cheapest = np.array([cost.argmin() for cost in self.problem.costs], dtype=np.int64)
        states = self.settle(cheapest, np.zeros(self.net.steps), sweeps)
        stake = max(objective(self.net, states) - self.problem.lower_bound(), 1e-9)
        return states, np.full(self.net.steps, stake / self.net.limit / max(1, self.net.steps)), stake

    def run(
        self, number: int, n_plans: int, pace: Callable[[int], float], known: tuple[int, ...] | None = None
    ) -> Iterator[tuple[int, ...]]:
        """Agrees and kicks; yields choices that fit.

        Args:
            number: which run; decides its chance and its heat.
            n_plans: how many plans take turns.
            pace: share of the run that is over, given the number of turns done; the run ends at 1.
            known: a choice that fits, which the kicks may start from.
        """
        net, rng = self.net, np.random.default_rng(number)
        states, prices, stake = self._start(SETTLERS)
        best, turn = states, 0
        while (share := pace(turn) / AGREEING) < 1:
            costs = net.unary + penalty(net, prices)
            if heat := HEAT[number % len(HEAT)]:
                costs += stake * heat * COLD**share * rng.gumbel(size=len(costs))
            states = self.agree(costs)
            prices = self._follow(prices, states, RATE[0] * (RATE[1] / RATE[0]) ** share, GAIN[0] * (GAIN[1] / GAIN[0]) ** share)
            turn += 1
            if turn % SETTLE == 0:
                best = self.settle(states, prices)
                yield from self._fitting(best, stake, turn)
        states = min((best, self.settle(states, prices)), key=lambda s: self.priced(s, prices))
        yield from self._fitting(states, stake, number)
        if known is not None:
            states = min(states, np.array(known), key=lambda s: self.priced(s, prices))
        yield from self._kick(states, prices, stake, rng, n_plans, pace, turn)

    def _kick(self, states, prices, stake, rng, n_plans, pace, turn) -> Iterator[tuple[int, ...]]:
        net = self.net
        k, degree = np.diff(net.start), np.diff(net.near_start)
        held = np.array([self.plan(number).held for number in range(n_plans)])
        chance = held.mean(axis=0) * np.log(k) * degree**0.7
        extra, now, kicks = penalty(net, prices), self.priced(states, prices), 0
        while pace(turn) < 1:
            if chance.any():
                other = states.copy()
                node = int(rng.choice(len(k), p=chance / chance.sum()))
                other[node] = (states[node] + rng.integers(1, k[node])) % k[node]
                holding = np.flatnonzero(held[:, node])
                for number in (*rng.choice(holding, 2), *rng.integers(0, n_plans, 2)):
                    tree_move(net, self.plan(int(number)), extra, other)
                turn += 4
            else:
                other = states.copy()
                tree_move(net, self.plan(0), extra, other)
                turn += 1
            kicks += 1
            if self.priced(other, prices) < now:
                states = other
                prices = self._follow(prices, states, 2 * KICK_RATE, GAIN[1])
            elif kicks % 10 == 0:
                prices = self._follow(prices, states, KICK_RATE, GAIN[1])
            else:
                continue
            extra = penalty(net, prices)
            tree_move(net, self.plan(int(rng.integers(n_plans))), extra, states)
            now = self.priced(states, prices)
            yield from self._fitting(states, stake, turn)
        self.prices = prices

    def ascend(self, prices: np.ndarray, rounds: int, deadline: Deadline = UNLIMITED) -> np.ndarray:
        """Prices near these at which costs, shifted on, bound more: (7) without noise, for so many rounds or until it is over."""
        for n in range(rounds):
            if deadline.over():
                break
            states = self.agree(self.net.unary + penalty(self.net, prices))
            prices = self._follow(prices, states, RATE[0] * (RATE[1] / RATE[0]) ** (n / rounds), GAIN[0])
        costs = self.net.unary + penalty(self.net, prices)
        self.trws.iterate(np.split(costs, self.net.start[1:-1]), LAST_ROUNDS)
        return prices

    def _follow(self, prices: np.ndarray, states: np.ndarray, rate: float, gain: float) -> np.ndarray:
        """(7); prices never become 0, or they could not rise again."""
        if not len(prices):
            return prices
        full = profile(self.net, states) / self.net.limit - 1.0
        return np.maximum(prices * np.exp(rate * np.clip(gain * full, -0.3, 1.0)), 1e-9 * prices.max())

    def _fitting(self, states: np.ndarray, stake: float, number: int) -> Iterator[tuple[int, ...]]:
        found = self.fit(states, stake, number)
        if found is not None:
            yield tuple(found.tolist())

    def fit(self, states: np.ndarray, stake: float, number: int = 0) -> np.ndarray | None:
        """States near the given ones that fit: repaired, then improved by one-node moves, from a little noise to none.

        At the time limit what fits is returned as it is.
        """
        net, over = self.net, self.deadline.over
        states = np.array(states, dtype=np.int64)
        field, tree = conditional_costs(net, states, np.zeros(len(net.unary))), profile_tree(net, states)
        for _ in range(RELIEF[0]):
            fits = repair(net, states, field, tree, RELIEF[1])
            if fits or over():
                break
        if fits != 1:
            return None
        best, gained = states.copy(), np.zeros(2)
        seed = np.array([88172645463325252 + number], dtype=np.uint64)
        for hot, cold in pairwise(stake * np.geomspace(*COOLING)):
            if over():
                break
            anneal(net, states, field, tree, True, hot, cold, PROPOSALS * len(net.unary), seed, best, gained)
        return best


def compile_kernels() -> None:
    """Compiles what runs call (about ten seconds, once per installation, then kept on disk), so that no time limit pays for it."""
    costs = tuple(np.arange(3.0) for _ in range(3))
    edges = tuple(Edge(i, j, np.outer(costs[i], costs[j])) for i, j in ((0, 1), (0, 2), (1, 2)))
    usages = tuple(Usage(i, i, i + 2, np.arange(3.0)[::-1]) for i in range(3))
    iterated = IteratedLocalSearch(Problem(costs, edges, usages, limit=3.0), SWEEP_JOINT[0])
    for _ in iterated.run(1, 1, lambda turn: turn / (3 * SETTLE)):
        pass
    assert iterated.prices is not None
    iterated.ascend(iterated.prices, 1)


class PrimalSearch:
    """Runs one after the other under a time limit, each longer than the one before.

    Attributes:
        last: the last run was the last one that the limit allows.
    """

    def __init__(self, incumbent: Incumbent, deadline: Deadline):
        self.incumbent, self.deadline = incumbent, deadline
        self.iterated: IteratedLocalSearch | None = None  # kept as long as the problem stays the same
        self.number, self.seconds, self.last = 0, 0.0, False

    def first(self, subproblem: Subproblem) -> None:
        """Offers what is found in haste, until that is an answer."""
        any(self._offer(subproblem, found) for found in self._explorer(subproblem).first())

    def run(self, subproblem: Subproblem) -> None:
        """Offers what one more run finds; the last one before the time limit takes what time is left."""
        incumbent, deadline, number = self.incumbent, self.deadline, self.number
        iterated, large = self._explorer(subproblem), subproblem.problem.n_states > LARGE
        sweeps = FIRST_RUN << number if large else min(int(FIRST_RUN * 1.4**number), LONGEST_RUN)
        n_plans = min(MOST_PLANS, 4 << number)
        iterated.plan(n_plans - 1)
        start, left = time.monotonic(), deadline.seconds_left
        self.last = left < (6.0 if large else 2.5) * self.seconds  # the one after would not come to its end

        def pace(turn: int) -> float:
            """Share of the run that is over: by sweeps, or by time where the limit ends it; the first run looks for an answer first."""
            spent = (time.monotonic() - start) / max(1e-3, left if self.last else RUN_SHARE * left)
            if number == 0 and not incumbent.found:
                spent = float(deadline.over())
            return spent if self.last else max(turn / sweeps, spent)

        states, back = incumbent.answer
        known = states if back is subproblem.back and (self.last or number % 4 == 3) else None  # most runs look elsewhere
        for found in iterated.run(number, n_plans, pace, known):
            self._offer(subproblem, found)
        self.seconds = time.monotonic() - start
        self.number += 1

    def _explorer(self, subproblem: Subproblem) -> IteratedLocalSearch:
        if self.iterated is None or self.iterated.problem is not subproblem.problem:
            self.iterated = IteratedLocalSearch(
                subproblem.problem, SWEEP_JOINT[subproblem.problem.n_states > LARGE], subproblem.messages, self.deadline
            )
        return self.iterated

    def _offer(self, subproblem: Subproblem, found: tuple[int, ...]) -> bool:
        return self.incumbent.offer(found, subproblem.problem.objective(found) + subproblem.offset, subproblem.back)

    def priced(self, subproblem: Subproblem, share: float) -> Subproblem:
        """The same answers, to be bounded at prices near those of the last bound, or of the last run.

        Args:
            share: of the time that is left, at most.
        """
        iterated, rounds = self.iterated, int(AGREEING * FIRST_RUN) << self.number
        assert iterated is not None and iterated.prices is not None
        prices = iterated.ascend(
            iterated.prices if subproblem.prices is None else subproblem.prices, rounds, self.deadline.share(share)
        )
        return replace(subproblem, prices=prices, messages=iterated.trws.sent_messages())
