"""Ops whose state another op's state decides: found once per plan, so that every part of its network is small.

    leader      an op that follows none
    followers   of a leader: given its state, each has one state only

Most ops follow: elementwise ops, copies and transposes take the layout of what they read. See `AggregateFollower` of the solver.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.presolve.reductions import AggregateFollower, ReduceDomain
from shardplan.ilp.solver.problem import Problem

ONLY_FOLLOWERS = (ReduceDomain, AggregateFollower)


@dataclass(frozen=True, eq=False)
class LeaderNetwork:
    """A network of leaders, and the states of a plan in it.

    Attributes:
        problem: node n is a leader; memory is left out.
        present: per leader, its state in the plan.
        leader: per op, the number of its leader.
        members: per leader, it and its followers.
        state_of: per op, its state by the leader's, [leader's states].
        kept: per op, its state in the plan.
    """

    problem: Problem
    present: tuple[int, ...]
    leader: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    state_of: tuple[np.ndarray, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, states: Sequence[int]) -> LeaderNetwork:
        """The leaders of a problem that allows these states."""
        small = presolve(shared(replace(problem, usages=(), limit=None, ties=())), dominance=0, reductions=ONLY_FOLLOWERS)
        state_of: dict[int, np.ndarray] = {i: np.arange(len(c)) for i, c in zip(small.nodes, small.problem.costs, strict=True)}
        leader = {i: n for n, i in enumerate(small.nodes)}
        for reduction in reversed(small.trail):
            if isinstance(reduction, ReduceDomain):
                (i,) = reduction.nodes
                state_of[i] = reduction.keep[state_of[i]]
            elif isinstance(reduction, AggregateFollower):
                i, j = reduction.nodes
                state_of[i], leader[i] = reduction.f[state_of[j]], leader[j]
        members: list[list[int]] = [[] for _ in small.nodes]
        for i in range(len(problem.costs)):
            members[leader[i]].append(i)
        present = tuple(int(np.flatnonzero(state_of[i] == states[i])[0]) for i in small.nodes)
        n = range(len(problem.costs))
        leaders, of = tuple(leader[i] for i in n), tuple(state_of[i] for i in n)
        return cls(small.problem, present, leaders, tuple(map(tuple, members)), of, tuple(states))

    def region(self, ops: Collection[int]) -> dict[int, np.ndarray | None]:
        """Leader -> the states in which every other op than these keeps its own, bool [state], None for all; of leaders of the ops."""
        found: dict[int, np.ndarray | None] = {}
        for n in dict.fromkeys(self.leader[i] for i in ops):
            kept = None
            for own, members in self._keeping(n):
                if not all(i in ops for i in members):
                    kept = own if kept is None else kept & own
                    if np.count_nonzero(kept) == 1:  # the plan's own
                        break
            found[n] = kept
        return found

    def _keeping(self, n: int) -> list[tuple[np.ndarray, list[int]]]:
        """(states of a leader in which some of its members keep their own, bool [state]; these members), the fewest states first."""
        if n not in self._keepers:
            by_mask: dict[bytes, tuple[np.ndarray, list[int]]] = {}
            for i in self.members[n]:
                own = self.state_of[i] == self.kept[i]
                by_mask.setdefault(own.tobytes(), (own, []))[1].append(i)
            self._keepers[n] = sorted(by_mask.values(), key=lambda x: np.count_nonzero(x[0]))
        return self._keepers[n]

    @cached_property
    def _keepers(self) -> dict[int, list[tuple[np.ndarray, list[int]]]]:
        """Of leaders that were asked for, what `_keeping` says."""
        return {}

    def masks(self, masks: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Masks of leaders' states from those of ops."""
        found: dict[int, np.ndarray] = {}
        for i, mask in masks.items():
            n, own = self.leader[i], mask[self.state_of[i]]
            found[n] = own & found[n] if n in found else own
        return found

    def states(self, leaders: Sequence[int], found: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(op, state) of the leaders that change and of their followers."""
        for n, s in zip(leaders, found, strict=True):
            if s != self.present[n]:
                yield from ((i, int(self.state_of[i][s])) for i in self.members[n])


def shared(problem: Problem) -> Problem:
    """A problem whose equal arrays are one: presolve computes what becomes of each once, as in repeated layers."""
    by_id: dict[int, np.ndarray] = {}
    by_content: dict[tuple, np.ndarray] = {}

    def one(array: np.ndarray) -> np.ndarray:
        if id(array) not in by_id:
            by_id[id(array)] = by_content.setdefault((array.shape, array.tobytes()), array)
        return by_id[id(array)]

    return replace(problem, costs=tuple(map(one, problem.costs)), edges=tuple(e._replace(cost=one(e.cost)) for e in problem.edges))
