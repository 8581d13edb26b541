"""What is known of every array that one op hands to another before it is priced.

Layers that are alike hand on thousands of arrays in a few ways; a way is read off the graph once, and priced once per network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardplan.ir.graph import Graph
from shardplan.mesh.layout import Layout
from shardplan.strategies.enumerate import OpStrategies
from shardplan.strategies.rule import Rule
from shardplan.xla_model.copies import SMALL_BYTES
from shardplan.xla_model.coupled_state import CoupledState


@dataclass(frozen=True, eq=False)
class EdgeTemplate:
    """How an array is handed on: one object for all arrays of which the planner sees no difference.

    Attributes:
        made, taken: its layout under each strategy of the op that makes it, and of the op that takes it.
        shape, itemsize: of the whole array.
        reads: how often it is taken in one step.
        follows: whether it is taken in the layout it has; partial sums may be completed on the way.
        copied: whether it is a copy put by, which is never split further than it came.
        beside: what the optimizer computes with beside a sum.
        ordered: whether it is read inside a fusion.
        sliced: bytes that a loop cuts rows from, or 0.
        summed: of a sum that a loop adds up, what of its bytes the partial sums have, or 0.
        added: of a sum that is added to another one, and nothing else is done with either: the dims that must not be split for XLA to
            add the two before it scatters them, those along which one picks rows of a table. None for others.
        both: of what two sums add up to, the same dims.
        kept, keeps: whether the op that makes it, or the one that takes it, may keep an earlier reader's copy.
    """

    made: tuple[Layout, ...]
    taken: tuple[Layout, ...]
    shape: tuple[int, ...]
    itemsize: float
    reads: float
    follows: bool
    copied: bool
    beside: CoupledState | None
    ordered: bool
    sliced: float
    summed: float
    added: tuple[int, ...] | None
    both: tuple[int, ...]
    kept: bool
    keeps: bool


def ways(
    graph: Graph,
    rules: Sequence[Rule],
    choices: Sequence[OpStrategies],
    besides: Sequence[CoupledState | None],
    accumulated_sums: Mapping[int, int],
) -> Iterator[tuple[int, int, int, int, EdgeTemplate]]:
    """(op that makes an array, op that takes it, as which operand, value, way) of every operand, in program order.

    Args:
        rules, choices: per op.
        besides: per value, `Way.beside`.
        added_up: value that a loop made by adding up -> the value in the loop that it is the sum of.
    """
    known: dict[tuple, EdgeTemplate] = {}
    fits: dict[tuple[int, int], bool] = {}
    partial: dict[int, bool] = {}

    def carries(made: tuple[Layout, ...], taken: tuple[Layout, ...]) -> bool:
        """Whether whatever is made can be taken as it is."""
        key = id(made), id(taken)
        if key not in fits:
            fits[key] = {x for x in made if not x.partial} <= set(taken)
        return fits[key]

    def sums(made: tuple[Layout, ...]) -> bool:
        if id(made) not in partial:
            partial[id(made)] = any(x.partial for x in made)
        return partial[id(made)]

    def makers(j: int) -> list[tuple[int, int]]:
        return [graph.values[v].producer for v in graph.ops[j].inputs if v is not None]

    added: list[tuple[int, ...] | None] = []
    for j, op in enumerate(graph.ops):
        readers = tuple(graph.readers(op.outputs[0])) if op.traits.copy else (j,)
        ordered = any(rules[at].fusion in ("loop", "reduce") for at in readers)
        rows = any(graph.ops[at].traits.loop_slice for at in readers)
        added.append(_added(graph, j) if all(sums(choices[i].results[r]) for i, r in makers(j)) else None)
        for k, v in enumerate(op.inputs):
            if v is None:
                continue
            value = graph.values[v]
            i, r = value.producer
            made, taken = choices[i].results[r], choices[j].operands[k]
            facts = {
                "shape": value.shape,
                "itemsize": value.itemsize,
                "reads": op.reads,
                "follows": _follows(graph, rules, i, j) and carries(made, taken),
                "copied": graph.ops[i].traits.copy and not graph.ops[i].is_follower and value.bytes > SMALL_BYTES,
                "beside": besides[v] if sums(made) else None,
                "ordered": ordered,
                "sliced": value.bytes if rows else 0.0,
                "summed": part_added(graph, accumulated_sums, v) if v in accumulated_sums else 0.0,
                "added": added[j],
                "both": added[i] or (),
                "kept": i in graph.retainable_from,
                "keeps": j in graph.retainable_from,
            }
            if (key := (id(made), id(taken), *facts.values())) not in known:
                known[key] = EdgeTemplate(made, taken, **facts)
            yield i, j, k, v, known[key]


def _added(graph: Graph, j: int) -> tuple[int, ...] | None:
    """`Way.added` of both operands of op j, if they are sums."""
    values = [graph.values[v] for v in graph.ops[j].inputs if v is not None]
    if not graph.ops[j].traits.addition or len(values) != 2 or any(len(value.consumers) > 1 for value in values):
        return None
    tables = [graph.ops[value.producer[0]] for value in values if graph.ops[value.producer[0]].traits.scatter == "add"]
    return tuple(d for op in tables for d in op.params["dimension_numbers"].scatter_dims_to_operand_dims)


def part_added(graph: Graph, accumulated_sums: Mapping[int, int], v: int) -> float:
    """What of a value's bytes its partial sums have: a loop adds them up in the type in which they are made."""
    return graph.values[accumulated_sums.get(v, v)].itemsize / (graph.values[v].itemsize or 1)


def _follows(graph: Graph, rules: Sequence[Rule], i: int, j: int) -> bool:
    """Whether op j, where it can, takes the result of op i in the layout it has."""
    ops = graph.ops
    settled = rules[i].fusion in ("loop", "view") and not ops[i].traits.border
    if ops[j].traits.copy:
        return ops[j].is_follower and settled
    if not rules[j].is_follower or ops[j].traits.border:
        return False
    alone = ops[i].traits.step_input and len(graph.values[ops[i].outputs[0]].consumers) == 1
    return settled or alone or ops[i].traits.copy
