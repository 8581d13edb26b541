"""Where cheap choices that fit are found: annealed sweeps under prices that follow the memory.

A sweep (plans.py) moves all but a few held nodes to their joint optimum. Noise on the node costs that cools down lets it leave
what only looks like an optimum, and after every sweep the price of a step follows how full the step was:

    p_t  <-  p_t exp(a (memory_t / limit - 1)),    a falling                                                   (6)

So the prices find the few steps where memory binds by themselves. When the noise is gone, prices of broken steps only rise
until the choice fits; then one-node moves under the hard limit take what is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .kernels import Net, anneal, cost_of, fields, flatten, profile, profile_tree, toll
from .plans import Plan, make_plan, sweep
from .problem import Problem

N_PLANS = 40
HEAT = (0.1, 0.3, 0.03, 1.0)  # noise at the start of a run, as a share of what is at stake; runs take turns
COLD = 1e-5
import os
E=os.environ.get
FIRST_STEP, LAST_STEP = float(E('S0','1')), float(E('S1','.05'))  # a in (6)
FIRST_GAIN, LAST_GAIN = float(E('G0','3')), float(E('G1','3'))  # how steeply (6) answers to a full step


class Explorer:
    """A problem prepared for runs; a run depends on nothing but its arguments."""

    def __init__(self, problem: Problem, cap: int):
        self.net = flatten(problem)
        self.cap = cap
        self.plans: list[Plan] = []
        self.rng = np.random.default_rng(0)
        self.prices: np.ndarray | None = None  # at the end of the last run
        self.least = sum(float(c.min()) for c in problem.costs) + sum(float(e.cost.min()) for e in problem.edges)

    def plan(self, number: int) -> Plan:
        """Plans made as they are asked for, each holding other nodes."""
        number %= N_PLANS
        while len(self.plans) <= number:
            degree = np.diff(self.net.near_start) * np.log(np.diff(self.net.start) + 1.0) + 1e-9
            chance = self.rng.random(len(degree)) ** self.rng.choice([1, 3, 6])
            self.plans.append(make_plan(self.net, self.cap, chance / degree ** self.rng.choice([0.0, 0.5, 1.0, 1.3])))
        return self.plans[number]

    @property
    def work(self) -> float:
        """Table entries of a sweep; noise, prices and the call count as some."""
        return self.plan(0).work + 10.0 * len(self.net.unary) + 20_000.0

    def settle(self, states: np.ndarray, sweeps: int, extra: np.ndarray) -> None:
        """Sweeps without noise, in place, until nothing changes."""
        for number in range(sweeps):
            before = states.copy()
            sweep(self.net, self.plan(number), extra, states)
            if number >= 8 and (before == states).all():
                return

    def run(self, number: int, n_plans: int, pace: Callable[[int], float]) -> Iterator[tuple[int, ...]]:
        """One cooling down from scratch; yields choices that fit.

        Args:
            number: which run; decides its chance and its heat.
            n_plans: how many plans take turns.
            pace: share of the run that is over, given the number of sweeps done; the noise ends at 0.9, the run at 1.
        """
        net, rng = self.net, np.random.default_rng(number)
        states = np.zeros(len(net.start) - 1, dtype=np.int64)
        for i in range(len(states)):
            states[i] = net.unary[net.start[i] : net.start[i + 1]].argmin()
        self.settle(states, n_plans, np.zeros(len(net.unary)))
        stake = max(cost_of(net, states) - self.least, 1e-9)
        prices = np.full(net.steps, stake / net.limit / max(1, net.steps))
        floor = prices * 1e-7
        least, turn = np.inf, 0
        while (share := pace(turn)) < 1:
            extra = toll(net, prices)
            if share < 0.95:
                heat = stake * HEAT[number % len(HEAT)] * COLD ** min(1.0, share / 0.9)
                extra += heat * rng.gumbel(size=len(extra))
            sweep(net, self.plan(int(rng.integers(n_plans))), extra, states)
            turn += 1
            if not net.steps:
                continue
            full = profile(net, states) / net.limit - 1.0
            if full.max() <= 0 and share > 0.3 and (cost := cost_of(net, states)) < least:
                least = cost
                yield tuple(states.tolist())
            rate = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** share
            gain = FIRST_GAIN * (LAST_GAIN / FIRST_GAIN) ** share
            prices = np.maximum(prices * np.exp(rate * np.clip(gain * full, -0.3, 1.0)), floor)
        self.prices = np.where(prices > floor, prices, 0.0)
        yield from self._finish(states, prices, stake, n_plans, number)

    def _finish(self, states, prices, stake, n_plans, number) -> Iterator[tuple[int, ...]]:
        """Makes the choice fit and takes what one-node moves still give."""
        net = self.net
        for turn in range(200):
            full = profile(net, states) / net.limit - 1.0
            if full.max(initial=0.0) <= 0:
                break
            prices = prices * np.exp(np.clip(20 * full, 0.0, 0.2 + turn / 100)) + (full > 0) * prices.mean() * 0.1
            sweep(net, self.plan(turn % n_plans), toll(net, prices), states)
        else:
            return
        yield self.descend(states, stake, number)

    def descend(self, states, stake: float, number: int = 0) -> tuple[int, ...]:
        """One-node moves under the hard limit, from a little noise to none."""
        net = self.net
        states = np.array(states, dtype=np.int64)
        field, tree = fields(net, states, np.zeros(len(net.unary))), profile_tree(net, states)
        best, gained = states.copy(), np.zeros(2)
        seed = np.array([88172645463325252 + number], dtype=np.uint64)
        anneal(net, states, field, tree, True, 1e-4 * stake, 1e-7 * stake, 40 * len(net.unary), seed, best, gained)
        return tuple(best.tolist())


__all__ = ["Explorer", "Net"]
