"""States near those of a plan: some ops take other strategies, the ops around them adapt, all others stay.

    forced      ops take one of the strategies that were asked for
    adapting    ops up to so many arrays away take the states of least cost, found exactly on a cost network
    staying     all other ops keep their states, so the part of the network is small and nothing is planned again

Also known as the best response of a neighbourhood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardplan.costs.network import CostNetwork
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.problem import Edge, Problem

HOPS = (8, 24)
"""How many arrays away ops adapt; further ones where nothing nearer can."""
MAX_ADAPTING = 600
"""Ops that adapt, the nearest first."""
WORK = 0.2
"""Work of the solver, about seconds, on the part that adapts."""
WHOLE_WORK = 1.0
"""Its work on all of the network."""


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
        blocks = self.network.blocks
        masks = {i: np.tile(mask, blocks.count(i)) for i, mask in {**(held or {}), **wanted}.items()}
        for hops in HOPS:
            if (states := self._adapted(masks, self._near(wanted, hops))) is not None:
                return states
        return None

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

    def _near(self, masks: Mapping[int, np.ndarray], hops: int) -> list[int]:
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

    def _adapted(self, masks: Mapping[int, np.ndarray], region: Sequence[int]) -> tuple[int, ...] | None:
        """The states of least cost of the whole network in which only the region's ops leave theirs."""
        problem, states = self.network.problem, list(self.states)
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
        if not all(np.isfinite(c).any() for c in costs):
            return None
        ties = tuple(problem.ties[i] for i in region) if self._members else ()
        found = solve(Problem(tuple(costs), tuple(edges), ties=ties), work_limit=WORK)
        for i, s in zip(region, found.states, strict=False):
            states[i] = s
        return tuple(states) if found.found else None
