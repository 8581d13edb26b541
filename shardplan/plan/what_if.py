"""What a plan would cost with another layout of some arrays: the ops around them adapt, all others stay, and the objective judges.

    forced      the op that makes the array takes one of the strategies that were asked for
    adapting    ops up to so many arrays away take the states of least cost, found exactly on the plan's own cost network
    staying     all other ops keep their states, so the part of the network is small and nothing is planned again

What is found is a plan, and its seconds and bytes are those of its scheduled program: the best plan with that layout takes at most
these seconds. Planning anew with a pin (`Plan.fix`) searches all of it, and often finds less.

Also known as the best response of a neighbourhood.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardplan.costs.halo_exchange import exchanges
from shardplan.costs.network import CostNetwork
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.emit.decide import decide
from shardplan.errors import ShardingError
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.problem import Edge, Problem, Solution
from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder
from shardplan.plan.asked import Asked, asked
from shardplan.plan.data import PlannedReshard
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.search.objective import Judged, judge
from shardplan.units import format_memory

HOPS = (8, 24)
"""How many arrays away ops adapt; further ones where nothing nearer can."""
MAX_ADAPTING = 600
"""Ops that adapt, the nearest first."""
WORK = 0.2
"""Work of the solver, about seconds, on the part that adapts."""


def what_if(plan: Plan, what: str | Sequence[str] | PlannedReshard, choice: str | Sequence) -> Plan:
    """The plan of `Plan.what_if`."""
    planned, found = plan.context.planned, asked(plan, what)
    text = choice if isinstance(choice, str) else _named(found, choice)
    if text not in found.wanted:
        present = " is how it lies already" if text == str(found.layout) else " is none of its layouts"
        raise ShardingError(
            f"what_if({what!r}, ...): {text}{present}.\n  choices: {', '.join(found.wanted) or 'none: it has one layout only'}"
        )
    _, masks = found.wanted[text]
    prices = WhatIf(planned)
    states = prices.states_with(masks)
    if states is None:
        raise ShardingError(f"what_if({what!r}, {text!r}): no plan near this one makes it.\n  way out: plan.fix, which plans all anew")
    judged = prices.judged(states)
    if judged.excess_bytes:
        raise ShardingError(
            f"what_if({what!r}, {text!r}) needs {format_memory(judged.peak_bytes)} per device of {format_memory(judged.limit or 0.0)}."
            "\n  ways out: plan.fix, which plans all anew, or more memory="
        )
    bound = planned.solution.bound  # of all plans, so of those with this layout too
    network, solution = judged.proven(min(bound, judged.solution.objective))
    network = replace(network, limit=planned.network.limit)
    strategies = network.strategies(solution.states)
    return plan.context.decided(
        replace(
            planned,
            network=network,
            solution=replace(solution, tied=False),
            strategies=strategies,
            decisions=decide(network, strategies, network.retained(solution.states)),
            timeline=judged.timeline,
            held={**planned.held, **masks},
        )
    )


def _named(found: Asked, spec: Sequence) -> str:
    """The choice that a PartitionSpec means."""
    dims = tuple(() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec)
    dims += ((),) * (found.layout.rank - len(dims))
    layouts = {x.dims: text for text, (x, _) in found.wanted.items()}
    return layouts.get(dims, str(Layout(dims)))


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Prices changes of one plan, one after the other."""

    planned: Planned

    @cached_property
    def task(self) -> PlanningTask:
        """The planning task of the plan, its strategies known, with the compiler options that it chose."""
        planned = self.planned
        space = planned.space
        options = replace(planned.options, xla=(planned.xla,), chooses_xla=False, progress=None)
        return PlanningTask(space.graph, Resharder(space.mesh, space.cluster), options, Stopwatch(), known_space=space)

    @cached_property
    def present(self) -> Judged:
        """The plan itself."""
        planned = self.planned
        return Judged(planned.network, planned.solution, planned.timeline, planned.network.limit, planned.xla)

    def judged(self, states: Sequence[int]) -> Judged:
        """The plan of these states of the plan's network, by the objective."""
        network = self.planned.network
        found = Solution("feasible", tuple(states), 0.0, 0.0)
        limit = network.limit if network.blocks.aliasing else None  # the states are those of a network that was found under it
        return replace(judge(self.task, Candidate(network, found), limit), limit=network.limit)

    def states_with(self, wanted: Mapping[int, np.ndarray]) -> tuple[int, ...] | None:
        """States of the plan's network in which ops take one of the wanted strategies, and of those that are held already.

        Args:
            wanted: op -> bool [strategy].

        Returns:
            None if the ops around them cannot adapt.
        """
        blocks = self.planned.network.blocks
        held = {i: mask & wanted.get(i, mask) for i, mask in self.planned.held.items()}
        masks = {i: np.tile(mask, blocks.count(i)) for i, mask in {**held, **wanted}.items()}
        for hops in HOPS:
            if (states := self._adapted(masks, self._near(wanted, hops))) is not None:
                return states
        return None

    def _near(self, forced: Iterable[int], hops: int) -> list[int]:
        """The ops that adapt: up to `hops` arrays from the forced ones."""
        found = dict.fromkeys(forced)
        near, most = self.planned.network.problem.flat.near, max(MAX_ADAPTING, len(found))
        last = list(found)
        for _ in range(hops):
            last = [j for j in dict.fromkeys(j for i in last for j, _ in near[i]) if j not in found]
            found |= dict.fromkeys(last)
            if len(found) >= most:
                break
        return list(found)[:most]

    def _adapted(self, masks: Mapping[int, np.ndarray], region: Sequence[int]) -> tuple[int, ...] | None:
        """The states of least cost of the whole network in which only the region's ops leave theirs."""
        problem, states = self.planned.network.problem, list(self.planned.solution.states)
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
        found = solve(Problem(tuple(costs), tuple(edges)), work_limit=WORK)
        for i, s in zip(region, found.states, strict=False):
            states[i] = s
        return tuple(states) if found.states else None


def sent_bytes(network: CostNetwork, states: Sequence[int]) -> float:
    """Bytes that a device sends in one step, as `Plan.comm_bytes` counts them."""
    space, mesh = network.space, network.space.mesh
    chosen, retained, total = network.strategies(states), network.retained(states), 0.0
    for i, op in enumerate(space.graph.ops):
        for _, steps in network.reshards(i, chosen, retained):
            total += op.reads * sum(wire_bytes(s.kind, s.bytes, mesh.size(*s.axes)) for s in steps)
        if space.rules[i].exchanged:
            of, s = space.strategies[i], chosen[i]
            layouts = [each[s] for each in of.operands]
            found = exchanges(space.rules[i], of.factors[s], op.ins, op.outs, layouts, mesh, space.cluster)
            total += op.runs * sum(wire_bytes(x.kind, x.bytes, mesh.size(*x.axes)) for x in found)
    return total
