"""States near those of a plan: some ops take other strategies, the ops around them adapt, all others stay.

    forced      ops take one of the strategies that were asked for
    adapting    ops up to so many arrays away take the states of least cost, found exactly on a cost network
    staying     all other ops keep their states, so the part of the network is small and nothing is planned again

Also known as the best response of a neighbourhood.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.costs.network import CostNetwork
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.presolve.presolve import Presolved, presolve
from shardplan.ilp.solver.presolve.reductions import Computed
from shardplan.ilp.solver.problem import Edge, Problem
from shardplan.ilp.solver.relax.buckets import BucketElimination
from shardplan.search.followers import LeaderNetwork, shared

HOPS = (8, 24)
"""How many arrays away ops adapt; further ones where nothing nearer can."""
MAX_ADAPTING = 600
"""Ops that adapt, the nearest first."""
WORK = 0.2
"""Work of the solver, about seconds, on the part that adapts."""
WHOLE_WORK = 1.0
"""Its work on all of the network."""
MAX_ENTRIES = 1 << 18
"""Of a table of the bucket elimination that answers all choices at once; where it would be larger, each choice is solved alone."""


@dataclass(frozen=True, eq=False)
class Nearby:
    """States near those of a plan; they are found out when they are first asked for.

    Attributes:
        near: the neighbourhood of the plan.
        leaders: of the ops that adapt.
        small: the network of these leaders, reduced.
        cost: picoseconds by which these states cost more than the plan's, at the network's prices.
        found: gives the states of the reduced network.
    """

    near: Neighbourhood
    leaders: tuple[int, ...]
    small: Presolved
    cost: float
    found: Callable[[], Sequence[int]]

    @cached_property
    def changed(self) -> dict[int, int]:
        """Op -> its state, where it is not the plan's."""
        found = self.near.leading.states(self.leaders, self.small.invert(self.found()))
        return {i: s for i, s in found if s != self.near.states[i]}

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Of all nodes."""
        states = list(self.near.states)
        for i, s in self.changed.items():
            states[i] = s
        return tuple(states)


_Least = tuple[float, Callable[[], Sequence[int]]]
"""Least cost of a network, and what gives its states."""


class _Region(NamedTuple):
    """Leaders that adapt, and the states that they may take, bool [state]; all where none are given."""

    leaders: tuple[int, ...]
    masks: dict[int, np.ndarray]

    def same(self, other: _Region) -> bool:
        """Whether the same adapts."""
        if self.leaders != other.leaders or self.masks.keys() != other.masks.keys():
            return False
        return all(np.array_equal(mask, other.masks[n]) for n, mask in self.masks.items())


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """Changes of one plan, priced by one network.

    Attributes:
        network: of the plan's strategy space.
        states: of the network, allowed together.
        tied: repeated layers change together, as they are equal in the plan.
    """

    network: CostNetwork
    states: tuple[int, ...]
    tied: bool = False

    @cached_property
    def objective(self) -> float:
        """Of the states, at the network's prices."""
        return self.network.problem.objective(self.states)

    def states_with(self, wanted: Mapping[int, np.ndarray], held: Mapping[int, np.ndarray] | None = None) -> tuple[int, ...] | None:
        """States in which ops take one of the wanted strategies.

        Args:
            wanted: op -> bool [strategy].
            held: the same, of ops that adapt within it.

        Returns:
            None if the ops around them cannot adapt.
        """
        masks = self._tiled({**(held or {}), **wanted})
        for hops in HOPS:
            if (states := self._adapted(masks, self._near(wanted, hops))) is not None:
                return states
        return None

    def choices(
        self, wanted: Sequence[Mapping[int, np.ndarray]], held: Mapping[int, np.ndarray]
    ) -> Iterator[tuple[int, Nearby | None]]:
        """What `states_with` answers for each of several choices of the same ops; what adapts to all of them is found once.

        Repeated layers change one by one.

        Args:
            wanted: per choice, op -> bool [strategy]; every choice names the same ops.
            held: bool [strategy] of other ops that adapt within it.

        Yields:
            (number of a choice, its states, None if the ops around cannot adapt); what is said last of a choice holds.
        """
        assert not self.tied
        left, before, made = [*range(len(wanted))], None, {}
        for hops in HOPS:
            region = self._region(wanted[0], held, hops)
            if before is not None and region.same(before):  # nothing more adapts, so that what was impossible is
                break
            some, left, before = left, [], region
            for n, change in zip(some, self._changes([wanted[n] for n in some], region, made), strict=True):
                yield n, change
                if change is None:
                    left.append(n)
            if not left:
                break

    def _region(self, asked: Collection[int], held: Mapping[int, np.ndarray], hops: int) -> _Region:
        """What adapts to a change of some ops: ops up to `hops` arrays away, each within what is held of it."""
        leading, own = self.leading, {self.leading.leader[i] for i in asked}
        masks = leading.masks({i: mask for i, mask in self._tiled(held).items() if i not in asked})
        leaders = []
        for n, kept in leading.region(dict.fromkeys(self._near(asked, hops))).items():
            if kept is None or n in own or np.count_nonzero(kept) > 1:  # else it stays, with all its followers
                leaders.append(n)
                if kept is not None:
                    masks[n] = kept & masks[n] if n in masks else kept
        return _Region(tuple(leaders), masks)

    def _changes(self, wanted: Sequence[Mapping[int, np.ndarray]], region: _Region, made: Computed) -> Iterator[Nearby | None]:
        """What `choices` finds where this adapts; `made` is what presolve computed before."""
        leading, (leaders, masks) = self.leading, region
        part = shared(_part(leading.problem, leading.present, masks, leaders))
        number = {i: n for n, i in enumerate(leaders)}
        asked = {number[leading.leader[i]] for i in wanted[0]}
        possible = all(np.isfinite(c).any() for c in part.costs)
        small = presolve(part, kept=asked, dominance=0, made=made) if possible else None
        if small is None or not small.feasible:
            yield from [None] * len(wanted)
            return
        before = part.objective([leading.present[n] for n in leaders])
        parts, at = _components(small, made), {i: n for n, i in enumerate(small.nodes)}
        for choice in wanted:
            best = _together(parts, {at[number[n]]: mask for n, mask in leading.masks(self._tiled(choice)).items()})
            yield best and Nearby(self, leaders, small, best[0] + small.offset - before, best[1])

    @cached_property
    def leading(self) -> LeaderNetwork:
        """The network without the ops that follow others."""
        return LeaderNetwork.of(self.network.problem, self.states)

    def solved_with(self, wanted: Mapping[int, np.ndarray]) -> tuple[int, ...] | None:
        """As `states_with`, but every op may leave its state."""
        problem, blocks = self.network.problem, self.network.blocks
        costs = list(problem.costs)
        for i, mask in wanted.items():
            costs[i] = np.where(np.tile(mask, blocks.count(i)), costs[i], np.inf)
            if not np.isfinite(costs[i]).any():
                return None
        found = solve(replace(problem, costs=tuple(costs), ties=problem.ties if self.tied else ()), work_limit=WHOLE_WORK)
        return found.states if found.found else None

    @cached_property
    def _members(self) -> dict[int, list[int]]:
        """Op -> the ops that change with it, where more than it alone do."""
        ties = self.network.problem.ties if self.tied else ()
        of: dict[int, list[int]] = {}
        for i, c in enumerate(ties):
            of.setdefault(c, []).append(i)
        return {i: some for some in of.values() if len(some) > 1 for i in some}

    def _near(self, masks: Collection[int], hops: int) -> list[int]:
        """The ops that adapt: up to `hops` arrays from the forced ones."""
        near, most, members = self.network.problem.flat.near, max(MAX_ADAPTING, len(masks)), self._members
        found = dict.fromkeys(masks)
        last = list(found)
        for _ in range(hops):
            last = [j for j in dict.fromkeys(j for i in last for j, _ in near[i]) if j not in found]
            found |= dict.fromkeys(last)
            if len(found) >= most:
                break
        region = dict.fromkeys(list(found)[:most])
        for i in list(region):
            region |= dict.fromkeys(members.get(i, ()))
        return list(region)

    def _tiled(self, masks: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Masks of states from those of strategies."""
        count = self.network.blocks.count
        return {i: mask if count(i) == 1 else np.tile(mask, count(i)) for i, mask in masks.items()}

    def _adapted(self, masks: Mapping[int, np.ndarray], region: Sequence[int]) -> tuple[int, ...] | None:
        """The states of least cost of the whole network in which only the region's ops leave theirs."""
        part = _part(self.network.problem, self.states, masks, region, tied=bool(self._members))
        if not all(np.isfinite(c).any() for c in part.costs):
            return None
        found = solve(part, work_limit=WORK)
        return self._with(region, found.states) if found.found else None

    def _with(self, region: Sequence[int], found: Sequence[int]) -> tuple[int, ...]:
        """All states, those of the region's ops as found."""
        states = list(self.states)
        for i, s in zip(region, found, strict=True):
            states[i] = s
        return tuple(states)


def _part(
    problem: Problem, states: Sequence[int], masks: Mapping[int, np.ndarray], region: Sequence[int], tied: bool = False
) -> Problem:
    """What the states of the region's nodes cost, those of all others given: node n is node `region[n]`."""
    flat, number = problem.flat, {i: n for n, i in enumerate(region)}
    costs, edges = [], []
    for i in region:
        cost = np.where(masks[i], problem.costs[i], np.inf) if i in masks else problem.costs[i]
        for at in range(flat.first[i], flat.first[i + 1]):
            j, edge, side = int(flat.head[at]), flat.edges[flat.edge[at]], flat.side[at]
            if j not in number:
                cost = cost + (edge.cost[states[j]] if side else edge.cost[:, states[j]])
            elif not side:
                edges.append(Edge(number[i], number[j], edge.cost))
        costs.append(cost)
    return Problem(tuple(costs), tuple(edges), ties=tuple(problem.ties[i] for i in region) if tied else ())


@dataclass(frozen=True, eq=False)
class _Component:
    """A connected component of a reduced network; those that are equal, as of repeated layers, share one.

    Attributes:
        problem: of its nodes.
        made: what presolve computed before.
    """

    problem: Problem
    made: Computed

    def least(self, masks: Sequence[np.ndarray | None]) -> _Least | None:
        """The least cost where nodes stay within their masks."""
        key = tuple(mask if mask is None else mask.tobytes() for mask in masks)
        if key not in self._found:
            self._found[key] = self._least(masks)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple, _Least | None]:
        return {}

    def _least(self, masks: Sequence[np.ndarray | None]) -> _Least | None:
        masked = [n for n, mask in enumerate(masks) if mask is not None]
        elimination = self._elimination if masked else None
        costs = [c if mask is None else np.where(mask, c, np.inf) for c, mask in zip(self.problem.costs, masks, strict=True)]
        if elimination is None:
            return _minimum(replace(self.problem, costs=tuple(costs)), self.made)
        if len(masked) == 1:
            cost = float(self._min_marginals[masked[0]][masks[masked[0]]].min(initial=np.inf))
        else:
            cost = elimination.run(costs).value
        return (cost, lambda: elimination.run(costs).states()) if np.isfinite(cost) else None

    @cached_property
    def _elimination(self) -> BucketElimination | None:
        """Of all nodes, where it is exact."""
        found = BucketElimination(self.problem, MAX_ENTRIES) if self.problem.edges else None
        return found if found is not None and found.exact else None

    @cached_property
    def _min_marginals(self) -> Sequence[np.ndarray]:
        """Least cost of all by the state of each node."""
        assert self._elimination is not None
        return self._elimination.run().min_marginals()


def _components(small: Presolved, made: Computed) -> list[tuple[_Component, tuple[int, ...]]]:
    """(component, its nodes) of a reduced network."""
    problem, known = small.problem, dict[tuple, _Component]()
    one = [*range(len(problem.costs))]
    for e in problem.edges:
        if one[e.i] != one[e.j]:
            into, gone = one[e.i], one[e.j]
            one = [into if n == gone else n for n in one]
    nodes: dict[int, list[int]] = {}
    for n, part in enumerate(one):
        nodes.setdefault(part, []).append(n)
    edges: dict[int, list[Edge]] = {part: [] for part in nodes}
    number = {n: at for some in nodes.values() for at, n in enumerate(some)}
    for e in problem.edges:
        edges[one[e.i]].append(Edge(number[e.i], number[e.j], e.cost))
    parts = []
    for part, some in nodes.items():
        costs = tuple(problem.costs[n] for n in some)
        key = *(c.tobytes() for c in costs), *((e.i, e.j, e.cost.tobytes()) for e in edges[part])
        like = known.get(key) or known.setdefault(key, _Component(Problem(costs, tuple(edges[part])), made))
        parts.append((like, tuple(some)))
    return parts


def _minimum(problem: Problem, made: Computed) -> _Least | None:
    """(least cost of a network without memory, what gives its states); None if there is none."""
    least = [float(c.min()) for c in problem.costs]
    if np.inf in least:
        return None
    if not problem.edges:
        return sum(least), lambda: [int(c.argmin()) for c in problem.costs]
    rest = presolve(problem, dominance=0, made=made)
    if not rest.feasible or not rest.nodes:
        return (rest.offset, lambda: rest.invert(())) if rest.feasible else None
    found = solve(problem, presolved=rest, work_limit=WORK)
    return (found.objective, lambda: found.states) if found.found else None


def _together(parts: Sequence[tuple[_Component, tuple[int, ...]]], masks: Mapping[int, np.ndarray]) -> _Least | None:
    """(least cost of all components of a reduced network, what gives the states of its nodes); None if there is none."""
    found = []
    for part, nodes in parts:
        if (least := part.least([masks.get(n) for n in nodes])) is None:
            return None
        found.append(least)

    def states() -> list[int]:
        by_node = {n: s for (_, nodes), (_, of) in zip(parts, found, strict=True) for n, s in zip(nodes, of(), strict=True)}
        return [by_node[n] for n in range(len(by_node))]

    return sum(cost for cost, _ in found), states
