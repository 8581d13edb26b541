"""The cost network of a step: one node per op, one state per strategy, one edge per array that one op makes and another one reads.

Letters as in docs/math.md; `build.py` makes the network, and this file reads its answers: states as strategies, seconds and bytes.

    c_i[s]      picoseconds per step of op i under strategy s                                                  (`roofline.py`)
    e_ij[s, t]  picoseconds per step of bringing an array from where strategy s of i makes it to where strategy t of j reads it
                (`tables.py`); 0 if equal, else inf, between ops of one layout
    u_i[s]      bytes per device of the arrays that op i makes under strategy s, while they live

A big op reads a gathered array through a copy (`xla_model/copies.py`), whose node counts the bytes. The states of an op are blocks of
its strategies:

    block 0     strategy s
    block 1     of an op that may alias: strategy s with a buffer of its own; block 0 is the same array, free of memory, and allowed
                only if layouts agree
    last block  of a retainable copy: strategy s, with the array that an earlier phase read: no collective, and allowed only if the
                earlier reader took that layout; the array stays in memory from there on
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from shardplan.costs.pricing import CombinedGroups, Pricing
from shardplan.costs.space import StrategySpace
from shardplan.ilp.solver.problem import Problem, Usage, sum_over_intervals
from shardplan.ir.graph import Graph
from shardplan.mesh.collective import CollectiveKey
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder, ReshardStep
from shardplan.xla_model.combining import COMBINABLE
from shardplan.xla_model.liveness import takes_over_buffer

PS = 1e12
"""Picoseconds per second: costs of a cost network are whole picoseconds, so that sums are exact."""

SMALL_COPY = 1e-3
"""Share of the memory limit below which a copy has no states of its own: the problem takes it for its original."""


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

    def hidden(self, exposed_fraction: float) -> float:
        """Seconds of background collectives that (8) counts as hidden; a hidden one still costs `exposed_fraction` of its seconds."""
        return (1 - exposed_fraction) * min(self.background, self.overlap_capacity)

    def total(self, exposed_fraction: float) -> float:
        """(8): compute, blocking collectives, and background collectives as far as they stay exposed."""
        return self.compute + self.blocking + self.background - self.hidden(exposed_fraction)


@dataclass(frozen=True, eq=False)
class StateBlocks:
    """Ops with a block for the same array and one for a buffer of their own, and copies that may retain an earlier phase's array."""

    aliasing: frozenset[int]
    retainable: Collection[int]

    @classmethod
    def of(cls, graph: Graph, limit: float | None) -> StateBlocks:
        """The blocks of a graph's ops; without a memory limit (bytes per device) nothing aliases."""
        small = inf if limit is None else SMALL_COPY * limit
        copies = [i for i, op in enumerate(graph.ops) if op.traits.alias and graph.values[op.outputs[0]].bytes > small]
        aliasing = frozenset(i for i in copies if graph.ops[i].inputs[0] is not None and not takes_over_buffer(graph, i))
        return cls(aliasing, graph.retainable_from)

    def count(self, i: int) -> int:
        """Number of blocks of op i."""
        return 1 + (i in self.aliasing) + (i in self.retainable)


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """A problem and how to read its answer.

    Attributes:
        space: the ops and their strategies.
        problem: nodes are the graph's ops, in order.
        blocks: which states an op has per strategy.
        implicit_copies: copies without states of their own, small ones, and without a limit all: the problem leaves out their bytes.
        resharders: per value, what prices its reshards.
        background: (edge, picoseconds [state, state] that compute can hide).
        kernels: (edge, picoseconds [state, state] of its cost that are kernels).
        pricing: what `problem` assumes of the whole plan.
    """

    space: StrategySpace
    problem: Problem
    blocks: StateBlocks
    implicit_copies: tuple[Usage, ...]
    resharders: tuple[Resharder, ...]
    background: tuple[tuple[int, np.ndarray], ...]
    kernels: tuple[tuple[int, np.ndarray], ...]
    pricing: Pricing

    def step_seconds(self, states: Sequence[int]) -> StepSeconds:
        """The step under these states at the network's own prices, in picoseconds."""
        edges, costs = self.problem.edges, self.problem.costs
        around = sum(ps for _, ps in self.edge_kernels(states))
        compute = sum(float(c[s]) for c, s in zip(costs, states, strict=True)) + around
        paid = [float(e.cost[states[e.i], states[e.j]]) for e in edges]
        background = sum(float(hidden[states[edges[n].i], states[edges[n].j]]) for n, hidden in self.background)
        blocking = sum(paid) - around - self.pricing.background_price * background
        return StepSeconds(compute, blocking, background, sum(float(c.min()) for c in costs))

    def edge_kernels(self, states: Sequence[int]) -> Iterator[tuple[int, float]]:
        """(op, picoseconds) of the kernels that XLA puts around the collectives of the op's operands."""
        for n, kernels in self.kernels:
            edge = self.problem.edges[n]
            if ps := float(kernels[states[edge.i], states[edge.j]]):
                yield edge.j, ps

    def strategies(self, states: Sequence[int]) -> tuple[int, ...]:
        """Per op, the number of its strategy."""
        return tuple(s % len(of) for s, of in zip(states, self.space.strategies, strict=True))

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

    def path(self, v: int, before: Layout, after: Layout) -> tuple[ReshardStep, ...]:
        """The reshard path of value v from one layout to another."""
        value = self.space.graph.values[v]
        return self.resharders[v].path(value.shape, value.itemsize, before, after)

    def reshards(self, j: int, strategies: Sequence[int], retained: Collection[int]) -> Iterator[tuple[int, tuple[ReshardStep, ...]]]:
        """(operand, reshard path) of op j's operands, in one run; copies in `retained` move nothing."""
        values, of = self.space.graph.values, self.space.strategies
        for k, v in enumerate(self.space.graph.ops[j].inputs if j not in retained else ()):
            if v is not None:
                i, r = values[v].producer
                before, after = of[i].results[r][strategies[i]], of[j].operands[k][strategies[j]]
                if before != after and (steps := self.path(v, before, after)):
                    yield k, steps

    def regathers(self, strategies: Sequence[int], retained: Collection[int]) -> dict[int, int]:
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
            path = self.path(v, of[maker].results[r][strategies[maker]], wanted) if again else ()
            found[j] = found.get(i, 0) + any(step.kind != "slice" for step in path)
        return found

    def operand_layout(self, j: int, k: int, states: Sequence[int]) -> Layout:
        """Layout in which op j reads its operand k."""
        of = self.space.strategies[j]
        return of.operands[k][states[j] % len(of)]

    def beyond_collectives(self, states: Sequence[int]) -> dict[tuple[int, int], float]:
        """(op, operand) -> picoseconds per step that its edge costs beyond the collectives of its reshard, where it does."""
        found: dict[tuple[int, int], float] = {}
        strategies, retained = self.strategies(states), self.retained(states)
        hidden = {n: table for n, table in self.background}
        for n, ((i, j, k, v, template), edge) in enumerate(zip(self.space.array_edges, self.problem.edges, strict=False)):
            if not (paid := float(edge.cost[states[i], states[j]])):
                continue
            if n in hidden:
                paid += (1 - self.pricing.background_price) * float(hidden[n][states[i], states[j]])
            made, read = template.result_layouts[strategies[i]], template.operand_layouts[strategies[j]]
            steps = self.path(v, made, read) if made != read and j not in retained else ()
            beyond = paid - template.reads * PS * sum(step.seconds for step in steps)
            if beyond > 10.0:  # picoseconds are rounded
                found[j, k] = beyond
        return found

    def combined_groups(self, states: Sequence[int]) -> CombinedGroups:
        """What a plan of these states combines."""
        graph, strategies, retained = self.space.graph, self.strategies(states), self.retained(states)
        groups: dict[tuple[int, CollectiveKey], dict[int, float]] = {}
        for j, op in enumerate(graph.ops):
            for k, steps in self.reshards(j, strategies, retained):
                v = op.inputs[k]
                assert v is not None
                site = self.space.collective_sites[v]
                blocks = site.collective_class == "blocking" and op.phase != "update" and op.loop < 0
                for step in steps if site.group_size > 1 or blocks else ():
                    if step.kind in COMBINABLE or blocks:
                        size = graph.values[v].bytes / step.after.shards(self.space.mesh)
                        groups.setdefault((site.group, CollectiveKey(step.kind, step.axes)), {})[site.origin] = size
        return tuple((key, tuple(sorted(sizes.items()))) for key, sizes in sorted(groups.items()))

    def translate(self, other: CostNetwork, states: Sequence[int]) -> tuple[int, ...]:
        """The states in which every op does what it does under `states` of another network of the same graph."""
        numbers: dict[int, dict] = {}
        out = []
        for narrow, wide, s in zip(other.space.strategies, self.space.strategies, states, strict=True):
            number = numbers.setdefault(id(wide), {x: n for n, x in enumerate(wide.factors)})
            block, s = divmod(s, len(narrow))
            out.append(block * len(wide) + number[narrow.factors[s]])
        return tuple(out)

    def allocations(self, states: Sequence[int]) -> list[tuple[int, int, int, float]]:
        """(op, lo, hi, bytes) of all that a device has in memory at times lo <= t < hi, implicit copies included."""
        graph, of = self.space.graph, self.space.strategies
        out = [(u.node, u.lo, u.hi, float(u.bytes[states[u.node]])) for u in self.problem.usages]
        chosen = self.strategies(states)
        for u in self.implicit_copies:
            v, layout = graph.ops[u.node].inputs[0], of[u.node].results[0][chosen[u.node]]
            i, r = (u.node, 0) if v is None else graph.values[v].producer  # a literal is stored by its reader
            if v is None or layout != of[i].results[r][chosen[i]]:
                out.append((u.node, u.lo, u.hi, float(u.bytes[states[u.node]])))
        return out

    def profile(self, states: Sequence[int]) -> np.ndarray:
        """Bytes that a device has in memory at every time, implicit copies included, [time]."""
        return sum_over_intervals((lo, hi, n) for _, lo, hi, n in self.allocations(states))

    def peak(self, states: Sequence[int]) -> float:
        """The most of `profile`."""
        return float(self.profile(states).max(initial=0.0))
