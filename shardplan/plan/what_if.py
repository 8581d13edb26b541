"""What a plan would cost with another layout of some arrays: the ops around them adapt, all others stay, and the objective judges.

The states near the plan are found on its own cost network (`search/neighbourhood.py`). What is found is a plan, and its seconds and
bytes are those of its scheduled program: the best plan with that layout takes at most these seconds. Planning anew with a pin
(`Plan.fix`) searches all of it, and often finds less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardplan.costs.halo_exchange import exchanges
from shardplan.costs.network import CostNetwork
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.emit.decide import affected, decide
from shardplan.errors import ShardingError
from shardplan.ilp.solver.collector import paused_collector
from shardplan.ilp.solver.problem import Solution
from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder
from shardplan.plan.asked import Asked, asked
from shardplan.plan.data import PlannedReshard
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.search.neighbourhood import Neighbourhood
from shardplan.search.objective import Judged, judge
from shardplan.units import format_memory


@paused_collector()
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
    bound = planned.solution.bound  # of all plans, so of those with this layout too
    network, solution = judged.proven(min(bound, judged.solution.objective))
    network = replace(network, limit=planned.network.limit)
    after = replace(
        planned,
        network=network,
        solution=replace(solution, tied=False),
        strategies=network.strategies(solution.states),
        timeline=judged.timeline,
        held={**planned.held, **masks},
        tasks=judged.tasks,
        kept={},
    )
    changed = plan.context.decided(_decided_near(plan, after), plan.context.replan)
    peak, limit = changed.memory_report.peak, changed.memory_report.limit
    if limit is not None and peak > limit:
        raise ShardingError(
            f"what_if({what!r}, {text!r}) needs {format_memory(peak)} per device of {format_memory(limit)}."
            "\n  ways out: plan.fix, which plans all anew, or more memory="
        )
    return changed.with_job_of(plan)


def _decided_near(plan: Plan, after: Planned) -> Planned:
    """A plan with its constraints: only those near an op that it plans otherwise than `plan` are decided anew."""
    before = plan.context.planned
    otherwise = affected(after.graph, before.changed(after))
    records = {before.user_ops[d.op]: d for d in plan.decisions} if after.conflicts == before.conflicts else None
    kept = {} if records is None else {i: records.get(i) for i in before.user_ops if i not in otherwise}
    decisions = decide(after.network, after.strategies, after.retained, before.decisions, otherwise)
    return replace(after, decisions=decisions, kept=kept)


def near(plan: Plan, pins: Mapping[str, Any]) -> Planned | None:
    """What is known of a plan with these pins without planning anew: the plan with each of them taken; None where one cannot be."""
    if plan.context.planned is None:
        return None
    for path, spec in pins.items():
        try:
            found = asked(plan, path)
            choice = _named(found, spec)
            plan = plan if choice == str(found.layout) and _all_lie_so(plan, found) else what_if(plan, path, choice)
        except (ShardingError, TypeError):  # several shapes, dims left free, no spec at all: planning says what is wrong
            return None
    return plan.context.planned


def _all_lie_so(plan: Plan, found: Asked) -> bool:
    return all(plan.context.planned.result_layout(i) == found.layout for i in found.ops)


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
    def neighbourhood(self) -> Neighbourhood:
        """Of the plan, at its own prices."""
        return Neighbourhood(self.planned.network, self.planned.solution.states)

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
        held = {i: mask & wanted.get(i, mask) for i, mask in self.planned.held.items()}
        return self.neighbourhood.states_with(wanted, held)


def sent_bytes(network: CostNetwork, states: Sequence[int]) -> float:
    """Bytes that a device sends in one step, as `Plan.comm_bytes` counts them."""
    space, mesh = network.space, network.space.mesh
    chosen, total = network.strategies(states), 0.0
    for j, _, _, steps in network.moves(chosen, network.retained(states)):
        total += space.graph.ops[j].reads * sum(wire_bytes(s.kind, s.bytes, mesh.size(*s.axes)) for s in steps)
    for i, op in enumerate(space.graph.ops):
        if space.rules[i].exchanged:
            of, s = space.strategies[i], chosen[i]
            layouts = [each[s] for each in of.operands]
            found = exchanges(space.rules[i], of.factors[s], op.ins, op.outs, layouts, mesh, space.cluster)
            total += op.runs * sum(wire_bytes(x.kind, x.bytes, mesh.size(*x.axes)) for x in found)
    return total
