"""The cost network of a step: one node per op, one state per strategy, one edge per array that one op makes and another one reads.

Letters as in docs/math.md; `build.py` makes the network, and this file reads its answers: states as strategies, seconds and bytes.

    c_i[s]      picoseconds per step of op i under strategy s                                                  (`roofline.py`)
    e_ij[s, t]  picoseconds per step of bringing an array from where strategy s of i makes it to where strategy t of j reads it
                (`tables.py`); 0 if equal, else inf, between ops of one layout
    u_i[s]      bytes per device of the arrays that op i makes under strategy s, while they live

The states of an op are blocks of its strategies (`states.py`). The reshard paths, kernels and live arrays of a plan are read from its
strategies, without tables: a network prices its `problem` when a search asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from shardplan.costs.array_edges import ArrayEdge
from shardplan.costs.options import CostCorrections
from shardplan.costs.pricing import CombinedGroups, CombinedPrices, Pricing
from shardplan.costs.sliced_sums import SlicedSums
from shardplan.costs.space import StrategySpace
from shardplan.costs.split_products import local_groups
from shardplan.costs.states import PS, StateBlocks
from shardplan.costs.tables import edge_layouts
from shardplan.ilp.solver.problem import Problem, sum_over_intervals
from shardplan.mesh.collective import CollectiveKey
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import ReshardStep
from shardplan.xla_model.combining import COMBINABLE
from shardplan.xla_model.live_in_any_order import LiveInAnyOrder
from shardplan.xla_model.liveness import RunOrder, bytes_until_read, takes_over_buffer
from shardplan.xla_model.ragged import masked_copies
from shardplan.xla_model.wide_elementwise import WIDER


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step at the prices of a cost network, (8) of docs/math.md, in any unit of time.

    They find candidates; the seconds of a plan are those of its scheduled program (`decided_program.py`).

    Attributes:
        compute: kernels.
        blocking: collectives on the critical path.
        background: collectives that may run at the same time as independent compute.
        overlap_capacity: compute that every plan has: the least seconds of every op.
    """

    compute: float
    blocking: float
    background: float
    overlap_capacity: float

    def hidden(self, interference: float) -> float:
        """Seconds of background collectives that (8) counts as hidden; a hidden one still costs `interference` of its seconds."""
        return (1 - interference) * min(self.background, self.overlap_capacity)

    def total(self, interference: float) -> float:
        """(8): compute, blocking collectives, and background collectives as far as they stay exposed."""
        return self.compute + self.blocking + self.background - self.hidden(interference)


class PricedProblem(NamedTuple):
    """A network as the solver sees it, and per edge the picoseconds [state, state] that compute can hide, where it can."""

    problem: Problem
    background: tuple[tuple[int, np.ndarray], ...]


class Allocation(NamedTuple):
    """What a device has in memory of value `value`, array `array` of op `op` (operands, then results), at places lo <= t < hi.

    An "own" buffer is one of every block of states but the first, a "retained" one of the last block; an "implicit" one is of a copy
    without states of its own, and is there if the copy's layout differs from that of its operand. `times` counts equal buffers, in all
    strategies or [strategy].
    """

    op: int
    array: int
    value: int
    lo: int
    hi: int
    buffer: str
    times: float | np.ndarray = 1


@dataclass(frozen=True, eq=False, repr=False)
class CostNetwork:
    """A problem and how to read its answer.

    Attributes:
        space: the ops and their strategies.
        blocks: which states an op has per strategy.
        limit: bytes per device, or None.
        allowed: pinned op -> bool [s], which strategies remain.
        pinned: ops whose layout is the user's: they follow nobody.
        corrections: seconds of strategies and reshards beyond the model.
        pricing: what `problem` assumes of the whole plan.
        prices: what follows from what it combines.
        build: prices every state and pair of states.
    """

    space: StrategySpace
    blocks: StateBlocks
    limit: float | None
    allowed: Mapping[int, np.ndarray]
    pinned: frozenset[int]
    corrections: CostCorrections
    pricing: Pricing
    prices: CombinedPrices
    build: Callable[[CostNetwork], PricedProblem]

    @cached_property
    def priced(self) -> PricedProblem:
        """The problem, and what compute can hide of it."""
        return self.build(self)

    @property
    def problem(self) -> Problem:
        """Nodes are the graph's ops, in order."""
        return self.priced.problem

    def step_seconds(self, states: Sequence[int]) -> StepSeconds:
        """The step under these states at the network's own prices, in picoseconds."""
        problem, background = self.priced
        edges, costs = problem.edges, problem.costs
        around = sum(ps for _, ps in self.edge_kernels(states))
        compute = sum(float(c[s]) for c, s in zip(costs, states, strict=True)) + around
        paid = [float(e.cost[states[e.i], states[e.j]]) for e in edges]
        hidden = sum(float(table[states[edges[n].i], states[edges[n].j]]) for n, table in background)
        blocking = sum(paid) - around - self.pricing.background_price * hidden
        return StepSeconds(compute, blocking, hidden, sum(float(c.min()) for c in costs))

    # ---- kernels

    def kernel_ps(self, states: Sequence[int]) -> list[float]:
        """Of the kernels of each op, c_i[s] without what its exchanges take."""
        chosen = self.strategies(states)
        out = np.rint(self.space.chosen_seconds(chosen) * PS).tolist()
        for (i, s), seconds in self.corrections.strategies.items():
            out[i] += float(np.rint(seconds * PS)) if chosen[i] == s else 0.0
        return out

    def least_kernel_ps(self, states: Sequence[int]) -> float:
        """Picoseconds of all kernels at least, whatever products are merged."""
        pairs = zip(self.space.least_seconds, self.space.kernel_seconds, self.strategies(states), self.space.graph.ops, strict=True)
        saved = sum(float(seconds[s] - least[s]) * op.runs for least, seconds, s, op in pairs if least is not seconds)
        return sum(self.kernel_ps(states)) - PS * saved

    def edge_kernels(self, states: Sequence[int]) -> Iterator[tuple[ArrayEdge, float]]:
        """(array edge, picoseconds per step) of the kernels that XLA puts around the collectives of an operand.

        An array that is read in the layout it is made in has none (`tables.py`).
        """
        known: dict[tuple[int, int, int, bool], float] = {}
        chosen, of = self.strategies(states), self.space.strategies
        for edge in self.space.edge_ends.resharded(chosen):
            i, j, *_, template = edge
            follows = edge.follows(self.pinned)
            if (key := (id(template), chosen[i], chosen[j], follows)) not in known:
                layouts = edge_layouts(self.space, template, follows)
                known[key] = 0.0 if layouts.kernels is None else float(layouts.kernels[layouts.at(chosen[i], chosen[j])])
            if (ps := known[key]) and self._has_array(j, states[j] // len(of[j])):
                yield edge, ps

    def _has_array(self, j: int, block: int) -> bool:
        """Whether an op's operands are brought to it in this block of its states: no alias, nor what an earlier phase read."""
        return not (j in self.blocks.aliasing and not block) and not (j in self.blocks.retainable and block == self.blocks.count(j) - 1)

    def beyond_collectives(self, states: Sequence[int]) -> dict[tuple[int, int], float]:
        """(op, operand) -> picoseconds per step that its edge costs beyond the collectives of its reshard, where it does."""
        found = {(edge.consumer, edge.operand): ps for edge, ps in self.edge_kernels(states)}
        chosen, of, graph = self.strategies(states), self.space.strategies, self.space.graph
        for (j, k, before, after), seconds in self.corrections.reshards.items():
            v = graph.ops[j].inputs[k]
            if v is None or before == after or not self._has_array(j, states[j] // len(of[j])):
                continue
            i, r = graph.values[v].producer
            if (of[i].results[r][chosen[i]], of[j].operands[k][chosen[j]]) == (before, after):
                found[j, k] = found.get((j, k), 0.0) + float(np.rint(seconds * PS))
        return found

    def sent_ps(self, states: Sequence[int]) -> float:
        """Picoseconds per step of all collectives and slices, one after the other."""
        strategies, retained = self.strategies(states), self.retained(states)
        moved = ((self.space.graph.ops[j].reads, steps) for j, _, _, steps in self.moves(strategies, retained))
        return PS * sum(reads * step.seconds for reads, steps in moved for step in steps)

    # ---- states and strategies

    def strategies(self, states: Sequence[int]) -> tuple[int, ...]:
        """Per op, the number of its strategy."""
        return self._strategies(tuple(states))

    @cached_property
    def _strategies(self) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """As `strategies`, whose last answer is asked for again and again."""
        counts = [len(of) for of in self.space.strategies]
        return lru_cache(maxsize=1)(lambda states: tuple(s % n for s, n in zip(states, counts, strict=True)))

    def states_of(self, strategies: Sequence[int], retained: Collection[int]) -> tuple[int, ...]:
        """The states of these strategies, in which an alias has a buffer of its own where its layout differs from its operand's."""
        graph, of, out = self.space.graph, self.space.strategies, []
        for j, s in enumerate(strategies):
            block = self.blocks.count(j) - 1 if j in retained else 0
            v = graph.ops[j].inputs[0] if j in self.blocks.aliasing and not block else None
            if v is not None:
                i, r = graph.values[v].producer
                block = int(of[i].results[r][strategies[i]] != of[j].operands[0][s])
            out.append(block * len(of[j]) + s)
        return tuple(out)

    def retained(self, states: Sequence[int]) -> frozenset[int]:
        """Copies that retain the array of an earlier phase."""
        of = self.space.strategies
        return frozenset(j for j in self.blocks.retainable if states[j] >= len(of[j]) * (self.blocks.count(j) - 1))

    def path(self, j: int, k: int, before: Layout, after: Layout) -> tuple[ReshardStep, ...]:
        """The reshard path of operand k of op j from one layout to another."""
        if before is after or before == after:
            return ()
        v = self.space.graph.ops[j].inputs[k]
        assert v is not None
        value = self.space.graph.values[v]
        return self.space.facts.resharder(self.prices.resharders, j, k, v).path(value.shape, value.itemsize, before, after)

    def moves(
        self, strategies: Sequence[int] | np.ndarray, retained: Collection[int], ops: Collection[int] | None = None
    ) -> Iterator[tuple[int, int, int, tuple[ReshardStep, ...]]]:
        """(op, operand, value, reshard path) of what is moved in one run, in program order; copies in `retained` move nothing.

        With `ops`, only of arrays that one of these makes or reads.
        """
        sums = SlicedSums(self.space, lambda edge: self._edge_path(edge, strategies))
        for edge in self.space.edge_ends.resharded(strategies, ops):
            steps = () if edge.consumer in retained else self._edge_path(edge, strategies)
            if steps and (emitted := sums.emitted(edge, steps)):
                yield edge.consumer, edge.operand, edge.value, emitted

    def _edge_path(self, edge: ArrayEdge, strategies: Sequence[int] | np.ndarray) -> tuple[ReshardStep, ...]:
        """The reshard path of an array edge."""
        i, j, k, _, template = edge
        return self.path(j, k, template.result_layouts[strategies[i]], template.operand_layouts[strategies[j]])

    def regathers(self, strategies: Sequence[int] | np.ndarray, retained: Collection[int]) -> dict[int, int]:
        """Copy -> how many times its array was gathered and freed before.

        Emission numbers regathered copies and puts barriers before them: XLA's common subexpression elimination would merge them and
        keep the first one alive (facts: cse-merges-equal-reshards, cse-stops-at-barriers).
        """
        graph, of = self.space.graph, self.space.strategies
        found: dict[int, int] = {}
        for j, (i, k) in graph.retainable_from.items():
            v, wanted = graph.ops[j].inputs[0], of[j].results[0][strategies[j]]
            assert v is not None
            maker, r = graph.values[v].producer
            again = j not in retained and of[i].operands[k][strategies[i]] == wanted
            path = self.path(j, 0, of[maker].results[r][strategies[maker]], wanted) if again else ()
            found[j] = found.get(i, 0) + any(step.kind != "slice" for step in path)
        return found

    def operand_layout(self, j: int, k: int, states: Sequence[int]) -> Layout:
        """Layout in which op j reads its operand k."""
        of = self.space.strategies[j]
        return of.operands[k][states[j] % len(of)]

    def combined_groups(self, states: Sequence[int]) -> CombinedGroups:
        """What a plan of these states combines."""
        graph, strategies, retained = self.space.graph, self.strategies(states), self.retained(states)
        groups: dict[tuple[int, CollectiveKey], dict[int, float]] = {}
        for j, _, v, steps in self.moves(strategies, retained):
            op, site = graph.ops[j], self.space.collective_sites[v]
            blocks = site.collective_class == "blocking" and op.phase != "update" and op.loop < 0
            for step in steps if site.group_size > 1 or blocks else ():
                if step.kind in COMBINABLE or blocks:
                    size = graph.values[v].bytes / step.after.shards(self.space.mesh)
                    groups.setdefault((site.group, CollectiveKey(step.kind, step.axes)), {})[site.origin] = size
        return tuple((key, tuple(sorted(sizes.items()))) for key, sizes in sorted(groups.items()))

    def translate(self, other: CostNetwork, states: Sequence[int]) -> tuple[int, ...]:
        """The states in which every op does what it does under `states` of another network of the same graph."""
        out = []
        for narrow, wide, s in zip(other.space.strategies, self.space.strategies, states, strict=True):
            block, s = divmod(s, len(narrow))
            out.append(block * len(wide) + wide.numbers[narrow.keys[s]])
        return tuple(out)

    def allows(self, states: Sequence[int]) -> bool:
        """Whether the problem has these states: its objective is finite. Nothing is priced."""
        chosen, of, graph = self.strategies(states), self.space.strategies, self.space.graph
        if not all(allowed[chosen[i]] for i, allowed in self.allowed.items()):
            return False
        retained = self.retained(states)
        for edge in self.space.array_edges:
            i, j, _, v, template = edge
            made, read = template.result_layouts[chosen[i]], template.operand_layouts[chosen[j]]
            block = states[j] // len(of[j])
            same = j in self.blocks.aliasing and not block  # the same array, and not one of a buffer of its own
            if (same and made != read) or ((j in retained or (block and j in self.blocks.aliasing)) and made == read):
                return False
            if not self._has_array(j, block):
                continue
            layouts = edge_layouts(self.space, template, edge.follows(self.pinned))
            if layouts.forbidden is not None and layouts.forbidden[layouts.at(chosen[i], chosen[j])]:
                return False
            if made != read and not self.prices.resharders[v].leads(template.shape, template.itemsize, made, read):
                return False
        same = (of[a].results[0][chosen[a]] == of[b].results[0][chosen[b]] for a, b in graph.same_layout)
        kept = (
            of[i].operands[k][chosen[i]] == of[j].results[0][chosen[j]] for j, (i, k) in graph.retainable_from.items() if j in retained
        )
        return all(same) and all(kept)

    # ---- memory

    @cached_property
    def lifetimes(self) -> tuple[Allocation, ...]:
        """All that may be in memory."""
        return tuple(self._lifetimes())

    @cached_property
    def lifetimes_of(self) -> Mapping[int, tuple[Allocation, ...]]:
        """Op -> what it may have in memory."""
        found: dict[int, list[Allocation]] = {}
        for x in self.lifetimes:
            found.setdefault(x.op, []).append(x)
        return {i: tuple(some) for i, some in found.items()}

    def under(self, limit: float | None) -> CostNetwork:
        """The same network under another limit of bytes per device: what may be in memory is the same."""
        other = replace(self, limit=limit)
        other.__dict__.update({name: self.__dict__[name] for name in ("lifetimes", "lifetimes_of") if name in self.__dict__})
        return other

    def in_order(self, order: RunOrder) -> CostNetwork:
        """The same network with what is in memory when ops run in this order."""
        other = replace(self, prices=self.prices.in_order(order))
        if self.limit is None and "priced" in vars(self):
            other.__dict__["priced"] = self.priced  # without a limit the problem knows no memory
        return other

    def in_any_order(self, live: LiveInAnyOrder) -> CostNetwork:
        """The same network, for a bound, with nothing in memory but what is in any order in which ops may run, at places of a chain."""
        return replace(self, prices=replace(self.prices, at_least=live))

    def _lifetimes(self) -> Iterator[Allocation]:
        graph, live, blocks, order = self.space.graph, self.prices.live, self.blocks, self.prices.order
        for v, interval in enumerate(live):
            if interval is None or interval[0] >= interval[1]:
                continue
            i, r = graph.values[v].producer
            taken = graph.ops[i].traits.alias and takes_over_buffer(graph, self.space.materialised, i)
            explicit = taken or not graph.ops[i].traits.alias or i in blocks.aliasing
            r += len(graph.ops[i].inputs)
            times = bytes_until_read(graph, self.space.materialised, i) if taken else 1.0
            if graph.original(v) in self.space.facts.wide:
                times = max(times, WIDER)
            yield Allocation(i, r, v, *interval, ("own" if blocks.count(i) > 1 else "") if explicit else "implicit", times)
            if i in graph.retainable_from and self.prices.at_least is None:
                at, _ = graph.retainable_from[i]
                earlier = live[graph.ops[at].outputs[0]] if graph.ops[at].traits.copy else None
                since = earlier[1] if earlier else order.behind(at + 1)
                if since < interval[0]:
                    yield Allocation(i, r, v, since, interval[0], "retained")
        if self.prices.at_least is not None:
            yield from self._copied(self.prices.at_least)
            return
        for masked in masked_copies(graph):
            if (v := graph.ops[masked.op].inputs[masked.operand]) is not None:
                groups = local_groups(graph.ops[masked.op], self.space.strategies[masked.op], self.space.mesh)
                yield Allocation(masked.op, masked.operand, v, *order.span(masked.lo, masked.hi - 1), "", groups)
        for i, parts in self.space.held_parts:
            op, end = graph.ops[i], order.places[i] + 1
            at = min(order.read_at[i], order.places[i])
            yield Allocation(i, len(op.inputs), op.outputs[0], at, end, "", parts.result)
            for k, v in enumerate(op.inputs):
                if v is not None and parts.operands.any():
                    instead = self.space.rules[maker := graph.maker(v)].fusion == "loop" and not graph.ops[maker].traits.border
                    instead = instead and {*graph.readers(graph.original(v))} == {i} and self._is_held(v)
                    yield Allocation(i, k, v, at, at + 1, "", np.maximum(0.0, parts.operands - instead))
        for i, last, times in self.space.halo_copies:
            if (v := graph.ops[i].inputs[0]) is not None:
                yield Allocation(i, 0, v, *order.span(i, last), "", times)
        for copy in self.space.facts.copies:
            if (v := graph.ops[copy.op].inputs[copy.operand]) is not None:
                yield Allocation(copy.op, copy.operand, v, *order.span(copy.op, copy.last), "", copy.times)

    def _copied(self, live: LiveInAnyOrder) -> Iterator[Allocation]:
        """Of arrays that are in memory themselves or as a copy, the least that a device may hold of either."""
        graph, of = self.space.graph, self.space.strategies
        for v, (interval, least_bytes) in live.copied.items():
            i, r = graph.values[v].producer
            r += len(graph.ops[i].inputs)
            part = least_bytes / max(graph.values[v].bytes, 1.0) / self.space.mesh.n_devices
            yield Allocation(i, r, v, *interval, "", part * np.asarray(of[i].shards[r]))

    def _is_held(self, v: int) -> bool:
        """Whether a value that an op reads has a buffer, that of its copy included, where nothing is resharded."""
        graph, materialised = self.space.graph, self.space.materialised
        at = graph.values[v].producer[0]
        return materialised[graph.original(v)] or (graph.ops[at].traits.copy and takes_over_buffer(graph, materialised, at))

    def allocations(self, states: Sequence[int], ops: Collection[int] | None = None) -> list[tuple[int, int, int, float]]:
        """(op, lo, hi, bytes) of all that a device has in memory at times lo <= t < hi, implicit copies included; or of some `ops`."""
        graph, of, out = self.space.graph, self.space.strategies, []
        some = self.lifetimes if ops is None else (x for i in ops for x in self.lifetimes_of.get(i, ()))
        for i, array, v, lo, hi, buffer, times in some:
            block, s = divmod(states[i], len(of[i]))
            if (buffer == "own" and not block) or (buffer == "retained" and block != self.blocks.count(i) - 1):
                continue
            if buffer == "implicit" and (read := graph.ops[i].inputs[0]) is not None:  # a literal is stored by its reader
                maker, made = graph.values[read].producer
                if of[i].results[0][s] == of[maker].results[made][states[maker] % len(of[maker])]:
                    continue
            shards = of[i].shards[array][s]
            equal = float(times[s]) if isinstance(times, np.ndarray) else times
            out.append((i, lo, hi, equal * float(np.ceil(graph.values[v].bytes / shards))))
        return out

    def profile(self, states: Sequence[int]) -> np.ndarray:
        """Bytes that a device has in memory at every time, implicit copies included, [time]."""
        return sum_over_intervals((lo, hi, n) for _, lo, hi, n in self.allocations(states))

    def peak(self, states: Sequence[int]) -> float:
        """The most of `profile`."""
        return float(self.profile(states).max(initial=0.0))
