"""The arrays of a step on their way from op to op: what a reshard of each depends on besides its layouts.

Thousands of arrays of repeated layers share a few edge templates, each read off the graph once and priced once per cost network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from shardplan.ir.graph import Graph
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import OpStrategies
from shardplan.strategies.rule import Rule
from shardplan.xla_model.cast_first import widened_fraction, widening
from shardplan.xla_model.copies import SMALL_BYTES
from shardplan.xla_model.physical_layout import ArrayOrder, CoupledState, array_order, coupled_state
from shardplan.xla_model.product_kernels import written_instead


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
        in_mesh_order: bool [layout], whether the axes of every dim are in mesh order.
    """

    layouts: tuple[Layout, ...]
    index: np.ndarray
    ids: np.ndarray
    shards: np.ndarray
    partial_axes: np.ndarray
    dim_axes: np.ndarray
    dim_shards: np.ndarray
    in_mesh_order: np.ndarray

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
            place = self.mesh.axes.index
            ordered = np.array([all([*axes] == sorted(axes, key=place) for axes in x.dims) for x in number])
            found = LayoutList(tuple(number), index, ids, shards, partial, dims, per_dim, ordered)
            self.lists[id(layouts)] = found
        return found

    def _sets(self, axes: Iterable[Iterable[str]]) -> np.ndarray:
        return np.array([sum(map(self.bit.__getitem__, some)) for some in axes], np.int64)


@dataclass(frozen=True)
class EdgeFacts:
    """What holds of an array on its way whatever its layouts; arrays of equal facts share one object.

    Attributes:
        shape: of the whole array.
        itemsize: bytes per element.
        reads: reads per step.
        is_follower: the consumer takes the layout that the array has; partial sums may be completed on the way.
        gathered_before: it is gathered where it is made, or where it was narrower, and not behind: of a large copy for big ops the
            bytes count there, and of an array cast to a wider dtype XLA sends the narrower one (fact: sent-before-widened).
        coupled_state: what the optimizer computes with together with the array, if this may be a partial sum.
        order: what fixes the order of its dims in memory; None where nothing does.
        in_fusion: it is read inside a fusion.
        loop_bytes: bytes of an operand that a loop takes whole or by rows; else 0.
        accumulated_ratio: of a sum that a loop accumulates, bytes of the partial sums over bytes of the sum; else 0.
        accumulates: a loop adds the array to a carry, and does nothing else with it.
        behind_bytes: of a product's result behind which its kernel goes on unless a reshard comes first: what a kernel of its own moves
            then; else 0.
        from_retainable, to_retainable: whether producer or consumer may retain an earlier phase's array.
    """

    shape: tuple[int, ...]
    itemsize: float
    reads: float
    is_follower: bool
    gathered_before: bool
    coupled_state: CoupledState | None
    order: ArrayOrder | None
    in_fusion: bool
    loop_bytes: float
    accumulated_ratio: float
    accumulates: bool
    behind_bytes: float
    from_retainable: bool
    to_retainable: bool


@dataclass(frozen=True)
class EdgeTemplate(EdgeFacts):
    """One object for all arrays between which the planner sees no difference: equal facts, and equal layouts at both ends.

    `is_follower` and `coupled_state` hold only where the layouts allow them.

    Attributes:
        result_layouts: [s], layouts that the producer makes the array in.
        operand_layouts: [t], layouts that the consumer reads it in.
        addend_dims: of a partial sum that is only added to another partial sum: dims along which one of them scatters rows. If none of
            these is sharded, XLA adds both before it reduce-scatters them (fact: reassociate-reduced-addends). None for other arrays.
        sum_dims: of what two partial sums add up to, the same dims.
    """

    result_layouts: tuple[Layout, ...]
    operand_layouts: tuple[Layout, ...]
    addend_dims: tuple[int, ...] | None
    sum_dims: tuple[int, ...]


class ArrayFacts(NamedTuple):
    """Op `producer` makes a value as its result `result`, op `consumer` reads it as its operand `operand`; equal facts are shared."""

    producer: int
    result: int
    consumer: int
    operand: int
    value: int
    facts: EdgeFacts


class ArrayEdge(NamedTuple):
    """Op `producer` makes `value`, op `consumer` reads it as its operand `operand`."""

    producer: int
    consumer: int
    operand: int
    value: int
    template: EdgeTemplate

    def follows(self, pinned: Collection[int]) -> bool:
        """Whether the consumer has to take the layout that the array has: not where the user chose a layout at either end."""
        return self.template.is_follower and self.producer not in pinned and self.consumer not in pinned


@dataclass(frozen=True, eq=False)
class EdgeEnds:
    """The layouts at both ends of every array edge, as numbers: tells those that a plan reshards from all others at once.

    Attributes:
        edges: in program order.
        producers, consumers: per edge, its ops.
        made, read: per edge, where the layouts [strategy] of its ends begin in `ids`.
        ids: equal for equal layouts.
    """

    edges: tuple[ArrayEdge, ...]
    producers: np.ndarray
    consumers: np.ndarray
    made: np.ndarray
    read: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, edges: tuple[ArrayEdge, ...], lists: LayoutLists) -> EdgeEnds:
        """The ends of these edges."""
        every = (x for edge in edges for x in (edge.template.result_layouts, edge.template.operand_layouts))
        distinct, begins = in_a_row(every)
        ids = [np.zeros(0, np.int64), *(found.ids[found.index] for found in map(lists, distinct))]
        made = np.array([begins[id(edge.template.result_layouts)] for edge in edges], np.int64)
        read = np.array([begins[id(edge.template.operand_layouts)] for edge in edges], np.int64)
        producers, consumers = (np.array([edge[n] for edge in edges], np.int64) for n in (0, 1))
        return cls(edges, producers, consumers, made, read, np.concatenate(ids))

    def resharded(self, strategies: Sequence[int] | np.ndarray, ops: Collection[int] | None = None) -> Iterator[ArrayEdge]:
        """The edges whose array is read in another layout than it is made in; with `ops`, those that end at one of these."""
        chosen = np.array(strategies, np.int64)
        differs = self.ids[self.made + chosen[self.producers]] != self.ids[self.read + chosen[self.consumers]]
        if ops is not None:
            meant = np.zeros(len(chosen), bool)
            meant[list(ops)] = True
            differs &= meant[self.producers] | meant[self.consumers]
        return (self.edges[n] for n in np.flatnonzero(differs).tolist())


def in_a_row(some: Iterable[Sized]) -> tuple[list, dict[int, int]]:
    """Sequences, each once, and by the `id` of each where it begins if they are put one behind the other."""
    distinct = {id(x): x for x in some}
    return [*distinct.values()], dict(zip(distinct, accumulate(map(len, distinct.values()), initial=0), strict=False))


def array_facts(
    graph: Graph,
    rules: Sequence[Rule],
    written: Sequence[bool],
    accumulated_ratios: Mapping[int, float],
    accumulated: Collection[tuple[int, int]],
) -> Iterator[ArrayFacts]:
    """Every operand of every op, in program order.

    `written`: `materialised`, per value; `accumulated_ratios`: value that a loop accumulates -> `EdgeTemplate.accumulated_ratio`;
    `accumulated`: its `accumulated_operands`.
    """
    state = coupled_state(graph, [rule.fusion == "loop" for rule in rules])
    instead = written_instead(graph, rules, written).items()
    behind = {v: graph.values[v].bytes + graph.values[w].bytes for v, w in instead if not graph.ops[graph.maker(w)].traits.transpose}
    known: dict[EdgeFacts, EdgeFacts] = {}
    for j, op in enumerate(graph.ops):
        readers = tuple(graph.readers(op.outputs[0])) if op.traits.copy else (j,)
        in_fusion = any(rules[at].fusion in ("loop", "reduce") for at in readers)
        in_loop = any(graph.ops[at].traits.loop_operand for at in readers)
        for k, v in enumerate(op.inputs):
            if v is None:
                continue
            value = graph.values[v]
            i, _ = value.producer
            maker = graph.ops[i]
            order = array_order(graph, rules, v, j, k) if len(value.shape) > 1 else ArrayOrder()
            found = EdgeFacts(
                value.shape,
                value.itemsize,
                op.reads,
                _is_follower(graph, rules, i, j),
                (maker.traits.copy and not maker.is_follower and value.bytes > SMALL_BYTES) or widened_fraction(graph, v) < 1,
                state[v],
                order if order != ArrayOrder() else None,
                in_fusion,
                value.bytes if in_loop else 0.0,
                accumulated_ratios.get(v, 0.0),
                (j, k) in accumulated,
                behind.get(v, 0.0),
                i in graph.retainable_from,
                j in graph.retainable_from,
            )
            yield ArrayFacts(*value.producer, j, k, v, known.setdefault(found, found))


def array_edges(
    graph: Graph, arrays: Sequence[ArrayFacts], strategies: Sequence[OpStrategies], lists: LayoutLists
) -> Iterator[ArrayEdge]:
    """The arrays with the layouts that these strategies, per op, make and read them in."""
    readable: dict[tuple[int, int], bool] = {}  # whether every complete layout that is made can be read as it is
    known: dict[tuple, EdgeTemplate] = {}
    addend_dims = [_addend_dims(graph, strategies, lists, j) for j in range(len(graph.ops))]
    for i, r, j, k, v, found in arrays:
        made, read = strategies[i].results[r], strategies[j].operands[k]
        key = (id(made), id(read), id(found), addend_dims[j], addend_dims[i])
        if (template := known.get(key)) is None:
            sources, targets = lists(made), lists(read)
            if (pair := (id(made), id(read))) not in readable:
                readable[pair] = bool(np.isin(sources.ids[sources.partial_axes == 0], targets.ids).all())
            template = known[key] = EdgeTemplate(
                **{
                    **vars(found),
                    "is_follower": readable[pair] and found.is_follower,
                    "coupled_state": found.coupled_state if sources.partial_axes.any() else None,
                },
                result_layouts=made,
                operand_layouts=read,
                addend_dims=addend_dims[j],
                sum_dims=addend_dims[i] or (),
            )
        yield ArrayEdge(i, j, k, v, template)


def _addend_dims(graph: Graph, strategies: Sequence[OpStrategies], lists: LayoutLists, j: int) -> tuple[int, ...] | None:
    """`EdgeTemplate.addend_dims` of both operands of op j."""
    op = graph.ops[j]
    if not op.traits.addition or len(values := [graph.values[v] for v in op.inputs if v is not None]) != 2:
        return None
    makers = [value.producer for value in values]
    sums = all(lists(strategies[i].results[r]).partial_axes.any() for i, r in makers)
    if not sums or any(len(value.consumers) > 1 for value in values):
        return None
    scatters = [maker for i, _ in makers if (maker := graph.ops[i]).traits.scatter == "add"]
    return tuple(d for scatter in scatters for d in scatter.params["dimension_numbers"].scatter_dims_to_operand_dims)


def _is_follower(graph: Graph, rules: Sequence[Rule], i: int, j: int) -> bool:
    """Whether op j propagates the layout of op i's result wherever it can.

    An elementwise op, view or reduction does so behind elementwise ops and views: a reshard there would break a fusion, and one before
    or after it serves as well. Not behind a lookup: its rows are wanted in another layout than its table, by all that read them. Nor
    where a cast to fewer bits meets one to more, as of a quantized weight: a reshard there sends the fewest bytes.
    """
    maker, reader = graph.ops[i], graph.ops[j]
    if widening(graph, maker) < 0 < widening(graph, reader):
        return False
    fused = rules[i].fusion in ("loop", "view") and not maker.traits.border and not maker.traits.gather
    if reader.traits.copy:
        return reader.is_follower and fused
    if not rules[j].is_follower or reader.traits.border:
        return False
    only_reader = maker.traits.step_input and len(graph.values[maker.outputs[0]].consumers) == 1
    return fused or only_reader or maker.traits.copy
