"""What a plan would cost with another layout of some arrays: the ops around them adapt, all others stay, and the objective judges.

The states near the plan are found on its own cost network (`search/neighbourhood.py`). What is found is a plan, and its seconds and
bytes are those of its scheduled program: the best plan with that layout takes at most these seconds. Planning anew with a pin
(`Plan.fix`) searches all of it, and often finds less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from shardplan.costs.network import CostNetwork
from shardplan.costs.shared_collectives import own_exchanges, own_moves
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.emit.decide import affected, decide
from shardplan.errors import ShardingError
from shardplan.ilp.solver.collector import paused_collector
from shardplan.ilp.solver.problem import Solution, sum_over_intervals
from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder
from shardplan.plan.asked import Asked, Masks, asked
from shardplan.plan.data import PlannedReshard
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.search.neighbourhood import Nearby, Neighbourhood
from shardplan.search.objective import Judged, judge
from shardplan.units import format_memory

MAX_JUDGED = 8
"""Plans that are kept as they were judged: those of the choices that are shown, which may be taken."""


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
    prices = plan.context.prices
    change = prices.changes(found.wanted)[text]
    if change is None:
        raise ShardingError(f"what_if({what!r}, {text!r}): no plan near this one makes it.\n  way out: plan.fix, which plans all anew")
    judged = prices.judged(change.states)
    bound = planned.solution.bound  # of all plans, so of those with this layout too
    network, solution = judged.proven(min(bound, judged.solution.objective))
    network = network.under(planned.network.limit)
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
    if plan.context.planned is None or not isinstance(pins, Mapping):
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
    """The choice that a PartitionSpec means; of anything else, how it is written."""
    spec = getattr(spec, "spec", spec)
    if not isinstance(spec, (PartitionSpec, tuple, list)):
        return repr(spec)
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

    def preparing(self) -> Iterator[object]:
        """Finds what all changes need, in pieces of work: half a second in a step of 10,000 ops."""
        yield self.neighbourhood.leading
        yield self._profile
        yield self.sent_bytes

    @cached_property
    def present(self) -> Judged:
        """The plan itself."""
        planned = self.planned
        return Judged(planned.network, planned.solution, planned.timeline, planned.network.limit, planned.xla)

    @cached_property
    def judged(self) -> Callable[[tuple[int, ...]], Judged]:
        """The plan of these states of the plan's network, by the objective; what was priced last is not judged again."""

        def judged(states: tuple[int, ...]) -> Judged:
            network = self.planned.network
            found = Solution("feasible", states, 0.0, 0.0)
            limit = network.limit if network.blocks.aliasing else None  # the states are those of a network that was found under it
            return replace(judge(self.task, Candidate(network, found), limit), limit=network.limit)

        return lru_cache(maxsize=MAX_JUDGED)(judged)

    def changes(self, wanted: Mapping[str, tuple[Layout, Masks]]) -> dict[str, Nearby | None]:
        """The plan's network changed for each choice of `Asked.wanted`; None if the ops around cannot adapt.

        Layouts that were chosen before stay.
        """
        return dict.fromkeys(wanted) | dict(self.changing(wanted))

    def changing(self, wanted: Mapping[str, tuple[Layout, Masks]]) -> Iterator[tuple[str, Nearby | None]]:
        """The same one by one, as they are found; what is said last of a choice holds."""
        choices = sorted(wanted, key=lambda text: (*wanted[text][1],))  # those of the same ops together
        for _, group in groupby(choices, key=lambda text: (*wanted[text][1],)):
            some = [*group]
            for n, change in self.neighbourhood.choices([wanted[text][1] for text in some], self.planned.held):
                yield some[n], change

    def estimated(self, change: Nearby) -> tuple[float, float, float]:
        """(seconds, bytes by which the peak grows, sent bytes) of the step after a change, not scheduled.

        What changes is counted as in the plan's network.
        """
        planned, network, graph = self.planned, self.planned.network, self.planned.graph
        changed, states = change.changed, change.states
        near = set(changed).union(j for i in changed for v in graph.ops[i].outputs for j, _ in graph.values[v].consumers)
        now = ((lo, hi, -n) for i in near for lo, hi, n in self._held.get(i, ()))
        more = sum_over_intervals([*((lo, hi, n) for _, lo, hi, n in network.allocations(states, near)), *now])
        profile = self._profile.copy()
        profile[: len(more)] += more
        strategies = self._strategies.copy()
        for i, s in changed.items():
            strategies[i] = s % len(planned.space.strategies[i])
        sent = _sent_bytes(network, strategies, network.retained(states), changed)
        sent -= _sent_bytes(network, self._strategies, planned.retained, changed)
        seconds = planned.timeline.total_s + change.cost / PS
        return seconds, float(profile.max() - self._profile.max()), self.sent_bytes + sent

    @cached_property
    def _strategies(self) -> np.ndarray:
        """Of the plan, [op]."""
        return np.array(self.planned.strategies, np.int64)

    @cached_property
    def _held(self) -> dict[int, list[tuple[int, int, float]]]:
        """Op -> (lo, hi, bytes) of what the plan has in memory of it, as of `CostNetwork.allocations`."""
        found: dict[int, list[tuple[int, int, float]]] = {}
        for i, lo, hi, n in self.planned.network.allocations(self.planned.solution.states):
            found.setdefault(i, []).append((lo, hi, n))
        return found

    @cached_property
    def _profile(self) -> np.ndarray:
        """Bytes that the plan has in memory at every time of any plan, [time]."""
        found = np.zeros(1 + max((x.hi for x in self.planned.network.lifetimes), default=0))
        own = sum_over_intervals(x for held in self._held.values() for x in held)
        found[: len(own)] = own
        return found

    @cached_property
    def sent_bytes(self) -> float:
        """Of the plan itself."""
        return sent_bytes(self.planned.network, self.planned.solution.states)


def sent_bytes(network: CostNetwork, states: Sequence[int]) -> float:
    """Bytes that a device sends in one step, as `Plan.comm_bytes` counts them."""
    return _sent_bytes(network, network.strategies(states), network.retained(states))


def _sent_bytes(
    network: CostNetwork, strategies: Sequence[int] | np.ndarray, retained: Collection[int], ops: Collection[int] | None = None
) -> float:
    """The same; with `ops`, for the arrays that these make or read, and some more."""
    space, mesh, total = network.space, network.space.mesh, 0.0
    graph, around = space.graph, ops
    if ops is not None:  # all readers of an array share its collectives
        around = {*ops, *(graph.values[v].producer[0] for i in ops for v in graph.ops[i].inputs if v is not None)}
    for j, _, _, steps in own_moves(network, strategies, retained, around):
        total += space.graph.ops[j].reads * sum(wire_bytes(s.kind, s.bytes, mesh.size(*s.axes)) for s in steps)
    for i, x in own_exchanges(network, strategies, retained, ops):
        total += graph.ops[i].runs * wire_bytes(x.kind, x.bytes, mesh.size(*x.axes))
    return total
