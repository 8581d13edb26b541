"""Presolve: applies exact reductions of nodes, states and time steps until none finds anything, and maps answers back.

>>> small = presolve(problem)
>>> solution = solve(small.problem)
>>> states = small.invert(solution.states)      # costs solution.objective + small.offset
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.presolve.dominance import undominated_states
from shardplan.ilp.solver.presolve.reductions import (
    AggregateFollower,
    Computed,
    EliminateNode,
    Inbox,
    PresolveNetwork,
    ReduceDomain,
    Reduction,
    TieClasses,
)
from shardplan.ilp.solver.presolve.timeline import capacity_masks, remove_redundant_steps
from shardplan.ilp.solver.problem import Messages, Problem

OfNode = type[ReduceDomain] | type[AggregateFollower] | type[EliminateNode]
REDUCTIONS: Sequence[OfNode] = (ReduceDomain, AggregateFollower, EliminateNode)
"""Tried in this order at every node whose surroundings changed."""

DOMINANCE_ENTRIES = 1 << 14  # table entries that the dominance test visits at one node
REPEAT_BELOW = 0.98  # presolve repeats while it leaves less than this share of the states


@dataclass(frozen=True)
class Presolved:
    """A smaller problem and the way back."""

    problem: Problem  # the remaining problem; its node i is node `nodes[i]` of the `n_nodes` to which the trail refers
    offset: float  # constant part of the objective, left out of `problem`
    feasible: bool  # False if a reduction proved that there is no answer
    nodes: tuple[int, ...]
    trail: tuple[Reduction, ...]  # the reductions in the order in which they were applied
    n_nodes: int
    tied: bool  # whether nodes of one symmetry class were merged
    steps: np.ndarray  # the remaining time steps, in numbers of the given problem

    def invert(self, states: Sequence[int]) -> tuple[int, ...]:
        """States of the given problem from states of the remaining one."""
        full = np.zeros(self.n_nodes, dtype=np.int64)
        full[list(self.nodes)] = states
        for reduction in reversed(self.trail):
            full = reduction.invert(full)
        return tuple(full.tolist())

    def carry_messages(self, messages: Messages) -> Messages:
        """Messages of TRW-S on the given problem as messages on the remaining one."""
        inbox: Inbox = {}
        for (i, j), message in messages.items():
            inbox.setdefault(i, {})[j] = message
        for reduction in self.trail:
            reduction.carry_messages(inbox)
        number = {i: n for n, i in enumerate(self.nodes)}
        return {(number[i], number[j]): message for i, row in inbox.items() for j, message in row.items()}


def presolve(
    problem: Problem,
    *,
    tie: bool = False,
    dominance: int = DOMINANCE_ENTRIES,
    deadline: Deadline = UNLIMITED,
    kept: Collection[int] = (),
    reductions: Sequence[OfNode] = REDUCTIONS,
    made: Computed | None = None,
) -> Presolved:
    """Applies every reduction until none finds anything.

    Args:
        problem: any problem.
        tie: merge the nodes of every class in `problem.ties` first (a restriction, not a reduction).
        dominance: table entries that the dominance test may visit at one node; 0 for none: it takes longest, and finds next to nothing
            in a part of a presolved problem.
        deadline: checked between reductions; once it is over, dominance tests end.
        reductions: those that are tried at every node.
        kept: nodes that stay with all their states, so that costs can be added to these later; not with `tie`.
        made: what was computed of the same arrays before; grows.
    """
    trail: list[Reduction] = []
    n_nodes, tied = len(problem.costs), bool(tie and problem.ties)
    if tied:
        problem, classes = TieClasses.apply(problem)
        trail.append(classes)
    offset, feasible = 0.0, True
    numbers: tuple[int, ...] | None = None  # of the nodes that are left; None: all are
    steps = np.arange(max((u.hi for u in problem.usages), default=0))
    held = set(kept)
    while feasible:
        deadline.check()
        problem, remaining = remove_redundant_steps(problem, deadline)
        steps = steps[remaining]
        net, before = PresolveNetwork(problem, deadline, held, made), problem.n_states
        found = _reduce(net, capacity_masks(problem), dominance, reductions, deadline)
        trail += found if numbers is None else [reduction.renumber(numbers) for reduction in found]
        offset, feasible = offset + net.offset, net.feasible
        problem, alive = net.to_problem()
        deadline.check()
        numbers = alive if numbers is None else tuple(numbers[i] for i in alive)
        held = {n for n, i in enumerate(alive) if i in held}
        exhausted = not dominance and not problem.usages  # a second round finds nothing
        if exhausted or problem.n_states >= REPEAT_BELOW * before or (dominance and deadline.over()):
            break
    return Presolved(problem, offset, feasible, numbers or (), tuple(trail), n_nodes, tied, steps)


def _reduce(
    net: PresolveNetwork, masks: dict[int, np.ndarray], dominance: int, reductions: Sequence[OfNode], deadline: Deadline
) -> list[Reduction]:
    """One round: domains by capacity, then all cheap reductions, then dead-end elimination and all cheap ones in turn."""
    found: list[Reduction | None] = [ReduceDomain.apply(net, i, mask) for i, mask in masks.items() if i not in net.kept]
    found += _exhaust(net, reductions, deadline)
    candidates = [i for i, alive in enumerate(net.alive) if alive and i not in net.kept]
    while dominance and candidates and net.feasible and not deadline.over():
        for i in candidates:
            if net.alive[i] and not deadline.over():
                found.append(ReduceDomain.apply(net, i, undominated_states(net, i, dominance)))
        candidates = [i for i in net.worklist if i not in net.kept]
        found += _exhaust(net, reductions, deadline)
    return [reduction for reduction in found if reduction is not None]


def _exhaust(net: PresolveNetwork, reductions: Sequence[OfNode], deadline: Deadline) -> Iterator[Reduction]:
    """Applies the first reduction that finds something at every node of the worklist, until it is empty."""
    while net.worklist and net.feasible:
        deadline.check()
        i, _ = net.worklist.popitem(last=False)
        if net.alive[i] and i not in net.kept:
            for reduction in reductions:
                if found := reduction.apply(net, i):
                    yield found
                    break
