"""The strategy space of a step: graph x rules x mesh, with copies for readers of several layouts put in between.

Thousands of arrays of repeated layers share a few edge templates, each read off the graph once and priced once per cost network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.costs.roofline import compute_seconds
from shardplan.ir.graph import Graph, Path
from shardplan.ir.repeated_layers import repeated_layers
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import AxisFactors, OpStrategies
from shardplan.strategies.rule import Rule
from shardplan.strategies.signature import Signatures
from shardplan.xla_model.accumulation import accumulated_operands, accumulated_sums, mark_accumulation
from shardplan.xla_model.combining import CollectiveSite, collective_sites
from shardplan.xla_model.copies import SMALL_BYTES, with_copies
from shardplan.xla_model.fusion import KernelTraffic, kernel_traffic, materialised, written_by_products
from shardplan.xla_model.physical_layout import ArrayOrder, CoupledState, array_order, coupled_state

SMALL_SUM_BYTES = 1 << 16
"""Blocking sums smaller than this are combined with those at their depth."""


@dataclass(frozen=True, eq=False)
class LayoutList:
    """Layouts [s] of one operand or result; arrays are over the distinct ones, [layout]; bit n of a set stands for mesh axis n.

    Attributes:
        layouts: the distinct ones.
        index: [s] -> which of them.
        ids: equal for equal layouts, also of other lists.
        shards: number of shards.
        partial_axes: set of the mesh axes over which it is partial.
        dim_axes: [layout, dim], set of the mesh axes that shard the dim.
        dim_shards: [layout, dim], number of its shards.
    """

    layouts: tuple[Layout, ...]
    index: np.ndarray
    ids: np.ndarray
    shards: np.ndarray
    partial_axes: np.ndarray
    dim_axes: np.ndarray
    dim_shards: np.ndarray

    def equal(self, others: LayoutList) -> np.ndarray:
        """Bool [layout, other]."""
        return self.ids[:, None] == others.ids

    def sharding_axes(self, dims: Iterable[int] | None = None) -> np.ndarray:
        """Set of the mesh axes that shard these dims, by default all."""
        return np.bitwise_or.reduce(self.dim_axes if dims is None else self.dim_axes[:, list(dims)], axis=1)


class LayoutLists:
    """The list of every tuple of layouts, made once per tuple object: ops of one signature share one, and the space keeps it alive."""

    def __init__(self, mesh: MeshShape):
        self.mesh, self.bit = mesh, {axis: 1 << n for n, axis in enumerate(mesh.axes)}
        self.lists: dict[int, LayoutList] = {}
        self.ids: dict[Layout, int] = {}

    def __call__(self, layouts: tuple[Layout, ...]) -> LayoutList:
        """The list of layouts [s]."""
        if (found := self.lists.get(id(layouts))) is None:
            number: dict[Layout, int] = {}
            index = np.array([number.setdefault(x, len(number)) for x in layouts], dtype=np.int64)
            ids = np.array([self.ids.setdefault(x, len(self.ids)) for x in number])
            shards = np.array([x.shards(self.mesh) for x in number])
            partial, dims = self._sets(x.partial_axes for x in number), self._sets(axes for x in number for axes in x.dims)
            per_dim = np.array([self.mesh.size(*axes) for x in number for axes in x.dims], np.int64)
            dims, per_dim = dims.reshape(len(number), -1), per_dim.reshape(len(number), -1)
            found = LayoutList(tuple(number), index, ids, shards, partial, dims, per_dim)
            self.lists[id(layouts)] = found
        return found

    def _sets(self, axes: Iterable[Iterable[str]]) -> np.ndarray:
        return np.array([sum(map(self.bit.__getitem__, some)) for some in axes], np.int64)


@dataclass(frozen=True, eq=False)
class EdgeTemplate:
    """One object for all arrays between which the planner sees no difference.

    Attributes:
        result_layouts: [s], layouts that the producer makes the array in.
        operand_layouts: [t], layouts that the consumer reads it in.
        shape: of the whole array.
        itemsize: bytes per element.
        reads: reads per step.
        is_follower: the consumer takes the layout that the array has; partial sums may be completed on the way.
        gathered_copy: the producer is a large copy for big ops: it is gathered where it is made, where its bytes count, and not behind.
        coupled_state: what the optimizer computes with together with the array, if this may be a partial sum.
        order: what fixes the order of its dims in memory; None where nothing does.
        in_fusion: it is read inside a fusion.
        sliced_bytes: bytes from which a loop slices rows, or 0.
        accumulated_ratio: of a sum that a loop accumulates, bytes of the partial sums over bytes of the sum; else 0.
        cast_bytes: of a product's result that its kernel casts unless a reshard comes first: bytes that a kernel of its own moves then;
            else 0.
        addend_dims: of a partial sum that is only added to another partial sum: dims along which one of them scatters rows. If none of
            these is sharded, XLA adds the two before it reduce-scatters them. None for other arrays.
        sum_dims: of what two partial sums add up to, the same dims.
        from_retainable, to_retainable: whether producer or consumer may retain an earlier phase's array.
    """

    result_layouts: tuple[Layout, ...]
    operand_layouts: tuple[Layout, ...]
    shape: tuple[int, ...]
    itemsize: float
    reads: float
    is_follower: bool
    gathered_copy: bool
    coupled_state: CoupledState | None
    order: ArrayOrder | None
    in_fusion: bool
    sliced_bytes: float
    accumulated_ratio: float
    cast_bytes: float
    addend_dims: tuple[int, ...] | None
    sum_dims: tuple[int, ...]
    from_retainable: bool
    to_retainable: bool


class ArrayEdge(NamedTuple):
    """Op `producer` makes `value`, op `consumer` reads it as its operand `operand`."""

    producer: int
    consumer: int
    operand: int
    value: int
    template: EdgeTemplate


@dataclass(frozen=True, eq=False)
class StepFacts:
    """What holds of a step whatever is sharded: shared by the strategy spaces of all searches.

    Attributes:
        graph: the step, copies included.
        signatures: of ops, made once each.
        rules, sums: per op, its rule and whether its result may be partial.
        numbers: per op, equal ones for ops between which the planner sees no difference.
        materialised: per value, whether it is ever written to memory.
        traffic: per op, what its kernels move.
    """

    graph: Graph
    signatures: Signatures
    rules: tuple[Rule, ...]
    sums: tuple[bool, ...]
    numbers: tuple[int, ...]
    materialised: tuple[bool, ...]
    traffic: tuple[KernelTraffic, ...]

    @classmethod
    def of(cls, graph: Graph, mesh: MeshShape) -> StepFacts:
        """The facts of a step, before copies are put in, on a mesh."""
        table, whole = Signatures(mesh), (None,) * len(mesh.axes)
        first = table.read(graph := mark_accumulation(graph), {}, whole)
        lookups = frozenset(at for at, found in enumerate(first) if found.rule.is_lookup)
        follows, sums = [found.rule.is_follower for found in first], [found.sums for found in first]
        graph = mark_accumulation(with_copies(graph, follows, sums, lookups))
        found = table.read(graph, {}, whole)
        rules, sums = tuple(x.rule for x in found), tuple(x.sums for x in found)
        written = materialised(graph, rules, sums)
        return cls(graph, table, rules, sums, tuple(x.number for x in found), written, kernel_traffic(graph, rules, written, sums))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Per op, its class among repeated layers."""
        return repeated_layers(self.graph, self.numbers)

    @cached_property
    def collective_sites(self) -> tuple[CollectiveSite, ...]:
        """Per value, which collectives its reshards may be combined with."""
        pairs = ((v, self.rules[v.producer[0]]) for v in self.graph.values)
        small_sums = [v.bytes < SMALL_SUM_BYTES and (bool(rule.reduce) or (rule.linear and not v.shape)) for v, rule in pairs]
        return collective_sites(self.graph, small_sums)

    @cached_property
    def accumulated_operands(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(op, operand) that may be partial sums that a loop accumulates -> that carry's (loop_carry, loop_next)."""
        return accumulated_operands(self.graph)

    @cached_property
    def accumulated_sums(self) -> dict[int, int]:
        """Sum that a loop accumulates, which may be partial -> the value in the loop that is summed."""
        return accumulated_sums(self.graph, self.accumulated_operands)


@dataclass(frozen=True, eq=False)
class StrategySpace:
    """The strategies of every op on a mesh of a cluster, and what the XLA model says of the graph.

    Attributes:
        facts: what holds whatever is sharded.
        strategies: per op.
        signature: per op, equal numbers for ops between which the planner sees no difference.
        seconds: per op, seconds [s] of one run on one device.
        unknown: (primitive, source) of ops without a rule, which are replicated.
        edge_layouts, tables, priced: caches of `costs/tables.py` and `costs/build.py`: by template; of the last network's tables; and
            of what the last network's combined collectives say.
    """

    facts: StepFacts
    mesh: MeshShape
    cluster: Cluster
    strategies: tuple[OpStrategies, ...]
    signature: tuple[int, ...]
    seconds: tuple[np.ndarray, ...]
    unknown: tuple[tuple[str, str], ...]
    edge_layouts: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)
    priced: dict = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Per op, its class among repeated layers with the same strategies."""
        first: dict[tuple[int, int], int] = {}
        return tuple(first.setdefault(both, i) for i, both in enumerate(zip(self.facts.layers, self.signature, strict=True)))

    @property
    def graph(self) -> Graph:
        """The step, copies included."""
        return self.facts.graph

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Per op."""
        return self.facts.rules

    @property
    def materialised(self) -> tuple[bool, ...]:
        """Per value, whether it is ever written to memory."""
        return self.facts.materialised

    @property
    def collective_sites(self) -> tuple[CollectiveSite, ...]:
        """Per value, which collectives its reshards may be combined with."""
        return self.facts.collective_sites

    @property
    def accumulated_sums(self) -> dict[int, int]:
        """Sum that a loop accumulates, which may be partial -> the value in the loop that is summed."""
        return self.facts.accumulated_sums

    @property
    def accumulated_operands(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(op, operand) that may be partial sums that a loop accumulates -> that carry's (loop_carry, loop_next)."""
        return self.facts.accumulated_operands

    def partial_bytes_ratio(self, v: int) -> float:
        """Bytes of a value's partial sums over its own: a loop accumulates in the dtype in which they are made."""
        values = self.graph.values
        return values[self.accumulated_sums.get(v, v)].itemsize / (values[v].itemsize or 1)

    @cached_property
    def layout_lists(self) -> LayoutLists:
        """The lists of all layouts of operands and results."""
        return LayoutLists(self.mesh)

    @cached_property
    def array_edges(self) -> tuple[ArrayEdge, ...]:
        """Every operand of every op, in program order."""
        return tuple(_array_edges(self))


def make_strategy_space(
    facts: StepFacts,
    mesh: MeshShape,
    cluster: Cluster,
    within: Mapping[Path, AxisFactors] | None = None,
    others: AxisFactors | None = None,
) -> StrategySpace:
    """Strategies and compute seconds of every op of a step.

    Args:
        facts: of the step on this mesh.
        mesh, cluster: the machine.
        within: by path of an op, what is decided on each axis (`enumerate_strategies`).
        others: the same for all ops that are not in `within`.
    """
    signatures = facts.signatures.read(facts.graph, within or {}, others)
    pairs = zip(facts.graph.ops, signatures, strict=True)
    unknown = dict.fromkeys((op.primitive, str(op.source)) for op, found in pairs if not found.known)
    seconds = compute_seconds(facts.graph, mesh, cluster, signatures, facts.traffic)
    strategies, numbers = tuple(found.strategies for found in signatures), tuple(found.number for found in signatures)
    return StrategySpace(facts, mesh, cluster, strategies, numbers, seconds, tuple(unknown))


def with_merged_axes(space: StrategySpace, groups: Sequence[Sequence[str]]) -> StrategySpace:
    """The strategies that put the mesh axes of a group on the same factor: those of a mesh on which each group is one axis."""
    of = [[n for n, axis in enumerate(space.mesh.axes) if axis in group] for group in groups]
    kept: dict[int, tuple[OpStrategies, list[int]]] = {}
    timed: dict[int, np.ndarray] = {}
    strategies, seconds = [], []
    for some, times in zip(space.strategies, space.seconds, strict=True):
        if id(some) not in kept:
            numbers = [s for s, factors in enumerate(some.factors) if all(len({factors[n] for n in group}) == 1 for group in of)]
            kept[id(some)] = some.only(numbers), numbers
        found, numbers = kept[id(some)]
        if id(times) not in timed:
            timed[id(times)] = times[numbers]
        strategies.append(found)
        seconds.append(timed[id(times)])
    return StrategySpace(space.facts, space.mesh, space.cluster, tuple(strategies), space.signature, tuple(seconds), space.unknown)


def _array_edges(space: StrategySpace) -> Iterator[ArrayEdge]:
    graph, rules, strategies, lists = space.graph, space.rules, space.strategies, space.layout_lists
    state = coupled_state(graph, [rule.fusion == "loop" for rule in rules])
    narrower = ((v, w) for v, (w, always) in written_by_products(graph, rules).items() if always)
    cast = {v: graph.values[v].bytes + graph.values[w].bytes for v, w in narrower}
    readable: dict[tuple[LayoutList, LayoutList], bool] = {}  # whether every complete layout that is made can be read as it is
    known: dict[tuple, EdgeTemplate] = {}
    addend_dims: list[tuple[int, ...] | None] = []
    for j, op in enumerate(graph.ops):
        readers = tuple(graph.readers(op.outputs[0])) if op.traits.copy else (j,)
        in_fusion = any(rules[at].fusion in ("loop", "reduce") for at in readers)
        sliced = any(graph.ops[at].traits.loop_slice for at in readers)
        addend_dims.append(_addend_dims(space, j))
        for k, v in enumerate(op.inputs):
            if v is None:
                continue
            value = graph.values[v]
            i, r = value.producer
            maker, made, read = graph.ops[i], strategies[i].results[r], strategies[j].operands[k]
            if (pair := (lists(made), lists(read))) not in readable:
                readable[pair] = bool(np.isin(pair[0].ids[pair[0].partial_axes == 0], pair[1].ids).all())
            order = array_order(graph, rules, v, j, k) if len(value.shape) > 1 else ArrayOrder()
            facts = (
                value.shape,
                value.itemsize,
                op.reads,
                readable[pair] and _is_follower(graph, rules, i, j),
                maker.traits.copy and not maker.is_follower and value.bytes > SMALL_BYTES,
                state[v] if pair[0].partial_axes.any() else None,
                order if order != ArrayOrder() else None,
                in_fusion,
                value.bytes if sliced else 0.0,
                space.partial_bytes_ratio(v) if v in space.accumulated_sums else 0.0,
                cast.get(v, 0.0),
                addend_dims[j],
                addend_dims[i] or (),
                i in graph.retainable_from,
                j in graph.retainable_from,
            )
            if (key := (id(made), id(read), *facts)) not in known:
                known[key] = EdgeTemplate(made, read, *facts)
            yield ArrayEdge(i, j, k, v, known[key])


def _addend_dims(space: StrategySpace, j: int) -> tuple[int, ...] | None:
    """`EdgeTemplate.addend_dims` of both operands of op j."""
    graph, op = space.graph, space.graph.ops[j]
    if not op.traits.addition or len(values := [graph.values[v] for v in op.inputs if v is not None]) != 2:
        return None
    makers = [value.producer for value in values]
    sums = all(space.layout_lists(space.strategies[i].results[r]).partial_axes.any() for i, r in makers)
    if not sums or any(len(value.consumers) > 1 for value in values):
        return None
    scatters = [maker for i, _ in makers if (maker := graph.ops[i]).traits.scatter == "add"]
    return tuple(d for scatter in scatters for d in scatter.params["dimension_numbers"].scatter_dims_to_operand_dims)


def _is_follower(graph: Graph, rules: tuple[Rule, ...], i: int, j: int) -> bool:
    """Whether op j propagates the layout of op i's result wherever it can.

    An elementwise op, view or reduction does so behind elementwise ops and views: a reshard there would break a fusion, and one before
    or after it serves as well.
    """
    maker, reader = graph.ops[i], graph.ops[j]
    fused = rules[i].fusion in ("loop", "view") and not maker.traits.border
    if reader.traits.copy:
        return reader.is_follower and fused
    if not rules[j].is_follower or reader.traits.border:
        return False
    only_reader = maker.traits.step_input and len(graph.values[maker.outputs[0]].consumers) == 1
    return fused or only_reader or maker.traits.copy
