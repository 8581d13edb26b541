"""Improvement of the best plan under the objective: a change at a time, the ops around it adapted, judged, and kept if faster.

    whole       all inputs as another good plan has them; all else is solved again
    reshards    an array is read as it is made, or made as it is read: first those that cost most in the plan's own schedule
    arrays      inputs of one role in another layout: first those that other good plans give it, larger arrays first
    results     an array that ops of one role make in another layout, larger arrays first: small steps come so far

Prices are those of the plan's own schedule (`costs/schedule_windows.py`); tied repeated layers change together. A faster plan starts
the changes anew. Their number is limited by their ops together, so small steps are searched thoroughly, and by those since the last
gain. Then the best plan of other inputs is changed, which may end below.

Also known as local search, and path relinking.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import Pricing
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.problem import Solution
from shardplan.mesh.layout import Layout
from shardplan.search.neighbourhood import Neighbourhood
from shardplan.search.objective import GAIN, Candidates, Judged

OPS = 40_000
"""Ops of all changes together ..."""

IN_VAIN = 20_000
"""... and since the last one that made the step faster by `GAIN`; of both, a part where little can be gained."""

WIDE_GAP = 0.03
"""Fraction that the best plan may take more than the bound; where it is less, so much less is searched."""

WHOLE, SMALL, JUDGED = 4.0, 0.4, 0.6
"""Parts of the ops that a change counts: for states of the whole network, for those of a part of it, and for judging them."""

MOST_LOSS, MOST_LOSS_OF_RESULTS = 0.02, 0.2
"""A change is not judged if the network prices it as slower by more than this fraction of the step, or as equally fast.

Of 612 changes of 23 steps, nearly all of inputs and of how arrays are read, none of the 194 that are slower by 1 % or more made a step
faster, and none of the 50 that are equally fast. A result in another layout gains where others follow it, which no price says.
"""

RESULTS = 6_000
"""Ops of all changes of results together: they seldom lead to a faster plan, and if so early."""

STARTS = 3
"""Plans that are changed, one after the other."""

OTHERS = 2
"""Other plans whose inputs are tried as a whole."""

Masks = Mapping[int, np.ndarray]
"""Op -> bool [strategy], which of them it may take."""


class Change(NamedTuple):
    """A change of a plan; `whole`: all ops may adapt."""

    name: tuple
    masks: Masks
    whole: bool = False


def improve(found: Candidates, deadline: Deadline) -> None:
    """Adds plans near the best ones to `found`, as long as that finds better ones and the ops last."""
    assert found.best is not None
    gap = 1 - found.bound / (PS * found.best.timeline.total_s)
    effort = min(1.0, gap / WIDE_GAP)
    search = _Improvement(found, effort, effort * OPS)
    for _ in range(STARTS):
        plan = search.start()
        while plan is not None:
            plan = search.faster(plan, deadline)


@dataclass
class _Improvement:
    found: Candidates
    effort: float
    ops: float
    in_vain: float = 0.0
    results_left: float = RESULTS
    tried: set[tuple] = field(default_factory=set)
    changed: list[dict[int, Layout]] = field(default_factory=list)  # inputs of the plans so far

    @property
    def task(self) -> PlanningTask:
        return self.found.task

    def start(self) -> Judged | None:
        """The best plan that fits, of all strategies, with other inputs than those that were changed."""
        self.in_vain = 0.0
        if self.ops < len(self.task.space.graph.ops):
            return None
        for plan in sorted(self.found.judged.values(), key=lambda x: x.rank):
            fits = not plan.excess_bytes and plan.network.space is self.task.space
            if fits and input_layouts(plan) not in self.changed:
                return plan
        return None

    def faster(self, best: Judged, deadline: Deadline) -> Judged | None:
        """The first faster plan that a change of this one leads to."""
        self.changed.append(input_layouts(best))
        network = own_network(self.task, best, self.found.limit)
        near = Neighbourhood(network, best.states, best.solution.tied)
        n = len(self.task.space.graph.ops)
        for change in self.changes(best, network):
            if (name := (change.name, *(best.states[i] for i in change.masks))) in self.tried:
                continue
            if deadline.over() or not self.spend(n * (WHOLE if change.whole else SMALL)):
                return None
            self.tried.add(name)
            of_results = change.name[0] == "result"
            self.results_left -= n * of_results
            if self.results_left < 0:  # which come last
                return None
            most = near.objective + (MOST_LOSS_OF_RESULTS if of_results else MOST_LOSS) * best.solution.objective
            states = near.solved_with(change.masks) if change.whole else near.states_with(change.masks)
            if states is not None and near.objective != network.problem.objective(states) <= most:
                if not self.spend(n * JUDGED):
                    return None
                judged = self.found.add(Candidate(network, Solution("feasible", states, 0.0, 0.0, tied=best.solution.tied)))
                if judged.rank < best.rank:
                    if judged.timeline.total_s < (1 - GAIN) * best.timeline.total_s:
                        self.in_vain = 0.0
                    return judged
        return None

    def spend(self, ops: float) -> bool:
        """Counts ops, if so many are left."""
        if min(self.ops, self.effort * IN_VAIN - self.in_vain) < ops:
            return False
        self.ops -= ops
        self.in_vain += ops
        return True

    # ---- changes

    def changes(self, best: Judged, network: CostNetwork) -> Iterator[Change]:
        """In the order in which they are tried."""
        others = sorted((x for x in self.found.judged.values() if x is not best and not x.excess_bytes), key=lambda x: x.rank)
        others = [input_layouts(x) for x in others]
        yield from self.whole(input_layouts(best), others)
        small = zip_longest(self.reshards(best, network), self.relinks(best, others))
        yield from (change for change in chain.from_iterable(small) if change)
        yield from self.arrays(best)
        yield from self.results(best, network)

    def whole(self, own: dict[int, Layout], others: list[dict[int, Layout]]) -> Iterator[Change]:
        distinct = {tuple(x.items()): x for x in others if x != own}
        for layouts in list(distinct.values())[:OTHERS]:
            if masks := self.masks(layouts):
                yield Change(("inputs", *sorted(layouts.items(), key=lambda x: x[0])), masks, whole=True)

    def masks(self, layouts: Mapping[int, Layout]) -> Masks | None:
        """Inputs in these layouts; None if one of them cannot be."""
        of = self.task.space.strategies
        masks = {i: np.array([x == layout for x in of[i].results[0]]) for i, layout in layouts.items()}
        return masks if all(mask.any() for mask in masks.values()) else None

    def reshards(self, best: Judged, network: CostNetwork) -> Iterator[Change]:
        """Arrays that are read in another layout than they are made in, those that cost most in the plan's own schedule first."""
        space = self.task.space
        chosen, of, values = network.strategies(best.states), space.strategies, space.graph.values
        cost: dict[tuple[int, int], float] = {}
        readers: dict[tuple[int, int], list[int]] = {}
        for edge, priced in zip(space.array_edges, network.problem.edges, strict=False):  # then those of equal layouts
            if ps := float(priced.cost[best.states[priced.i], best.states[priced.j]]):
                role = space.layers[edge.consumer], edge.operand
                cost[role] = cost.get(role, 0.0) + ps
                readers.setdefault(role, []).append(edge.consumer)
        for role in sorted(cost, key=lambda role: -cost[role]):
            as_made, as_read = {}, {}
            for j in readers[role]:
                v = space.graph.ops[j].inputs[role[1]]
                assert v is not None
                i, r = values[v].producer
                before, after = of[i].results[r][chosen[i]], of[j].operands[role[1]][chosen[j]]
                as_made[j] = np.array([x == before for x in of[j].operands[role[1]]])
                as_read[i] = np.array([x == after for x in of[i].results[r]])
            for name, masks in (("made", as_made), ("read", as_read)):
                if all(mask.any() for mask in masks.values()):
                    yield Change((name, *role), masks)

    @property
    def roles(self) -> list[list[int]]:
        """Inputs of one role in repeated layers, and of one path but for numbers, the largest together first."""
        graph, found = self.task.space.graph, dict[object, list[int]]()
        for a in graph.args:
            found.setdefault(self.task.space.layers[a], []).append(a)
            found.setdefault((re.sub(r"\d+", "#", graph.ops[a].label), graph.ops[a].outs[0].shape), []).append(a)
        distinct = {tuple(some): some for some in found.values()}
        return sorted(distinct.values(), key=lambda some: -sum(graph.values[graph.ops[a].outputs[0]].bytes for a in some))

    def relinks(self, best: Judged, others: list[dict[int, Layout]]) -> Iterator[Change]:
        """One role after the other as in other plans, the best of these first."""
        own = input_layouts(best)
        for layouts in others:
            for some in self.roles:
                if any(layouts[a] != own[a] for a in some) and (masks := self.masks({a: layouts[a] for a in some})):
                    yield Change(("role", *(layouts[a] for a in some)), masks)

    def arrays(self, best: Judged) -> Iterator[Change]:
        """Every role in every layout."""
        own, of = input_layouts(best), self.task.space.strategies
        for some in self.roles:
            for layout in dict.fromkeys(x for x in of[some[0]].results[0] if not x.partial and x != own[some[0]]):
                if masks := self.masks(dict.fromkeys(some, layout)):
                    yield Change(("role", *(layout for _ in some)), masks)

    def results(self, best: Judged, network: CostNetwork) -> Iterator[Change]:
        """Every array that ops of one role make in every layout."""
        graph, of, chosen = self.task.space.graph, self.task.space.strategies, network.strategies(best.states)
        inputs = set(graph.args)
        roles: dict[tuple[int, int], list[int]] = {}
        for v in graph.values:
            j, r = v.producer
            if j not in inputs:
                roles.setdefault((self.task.space.layers[j], r), []).append(j)
        bytes_of = {role: sum(graph.values[graph.ops[j].outputs[role[1]]].bytes for j in some) for role, some in roles.items()}
        for (role, r), some in sorted(roles.items(), key=lambda x: -bytes_of[x[0]]):
            now = {of[j].results[r][chosen[j]] for j in some}
            for layout in dict.fromkeys(x for x in of[some[0]].results[r] if {x} != now):
                masks = {j: np.array([x == layout for x in of[j].results[r]]) for j in some}
                if all(mask.any() for mask in masks.values()):
                    yield Change(("result", role, r, layout), masks)


def input_layouts(judged: Judged) -> dict[int, Layout]:
    """Input -> its layout in a plan."""
    network, space = judged.network, judged.network.space
    chosen = network.strategies(judged.states)
    return {a: space.strategies[a].results[0][chosen[a]] for a in space.graph.args}


def own_network(task: PlanningTask, judged: Judged, limit: float | None) -> CostNetwork:
    """The network at what a plan combines and at the windows of its schedule."""
    combined = judged.network.pricing.combined
    windows = judged.windows if task.overlaps else None
    order = None if limit is None else judged.memory.order
    return task.network(Pricing(task.interference, combined, windows, order), limit)
