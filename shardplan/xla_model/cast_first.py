"""Which arrays XLA sends narrower than the program has them there: it swaps collectives with the casts behind and before them.

    w (f32) -> all-to-all -+-> cast to bf16                      w is cast on its shards, and sent as bf16
                           +-> transpose -> cast to bf16
    w (f32) -> all-gather ---> transpose -> cast to bf16         the same, if nothing else reads w, and one op what is cast
    w (bf16) -> cast to f32 -> all-to-all                        w is sent as bf16, and cast behind

Behind an all-to-all, all readers in one part of the step, the passes or the update, share it, and all of them must cast to one narrower
dtype; a lookup in the array, or any other reader, needs it as it is. What an all-gather or a permute brings must have a single reader,
and so must its cast. An all-to-all that another collective follows sends the wider array.

Facts: all-to-all-cast-first, gather-alone-cast-first, sent-before-widened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule

MOVES = ("all-gather", "all-to-all", "collective-permute")
"""Kinds of collectives that XLA swaps with a cast."""

Factors = tuple[tuple[str, float], ...]
"""(kind of collective, bytes that it sends over those of the array); of kinds that are not listed, 1."""


class Cast(NamedTuple):
    """A cast to a narrower dtype."""

    dtype: str
    itemsize: float  # bytes per element
    readers: int


def widened_fraction(graph: Graph, v: int) -> float:
    """Bytes of the array that a value is a cast of to a wider dtype, or that times or over one number, over its own; else 1."""
    op = graph.ops[graph.maker(v)]
    if op.traits.scaling:
        makers = [graph.ops[graph.maker(u)] for u in op.inputs if u is not None]
        arrays = [maker for maker in makers if not (maker.traits.broadcast and maker.ins[0].size == 1)]
        if len(arrays) != 1:
            return 1.0
        op = arrays[0]
    wide = graph.values[v].itemsize
    return 1.0 - added / wide if (added := widening(graph, op)) > 0 else 1.0


def widening(graph: Graph, op: Op) -> float:
    """Bytes per element that a cast adds, below 0 for one to fewer bits; 0 for another op."""
    if not (op.traits.forwards_value and len(op.inputs) == len(op.outputs) == 1) or op.inputs[0] is None:
        return 0.0
    return graph.values[op.outputs[0]].itemsize - graph.values[op.inputs[0]].itemsize


def cast_first_operands(graph: Graph, rules: Sequence[Rule]) -> dict[tuple[int, int], Factors]:
    """(op, operand) that a collective may bring narrower than its array -> what it then sends."""
    out: dict[tuple[int, int], Factors] = {}
    for v, value in enumerate(graph.values):
        if graph.ops[value.producer[0]].traits.copy or not value.itemsize:
            continue
        parts: dict[bool, list[int]] = {}
        for at in graph.readers(v):
            if at not in graph.dead:
                parts.setdefault(graph.ops[at].phase == "update", []).append(at)
        factors = {part: _factors(graph, rules, v, readers) for part, readers in parts.items()}
        if not any(factors.values()):
            continue
        for at in graph.reached(v, lambda at: graph.ops[at].traits.copy):
            op = graph.ops[at]
            readers = graph.readers(op.outputs[0]) if op.traits.copy else (at,)
            found = {factors[graph.ops[i].phase == "update"] for i in readers if i not in graph.dead}
            if len(found) == 1 and (narrower := found.pop()):
                out.update(((at, k), narrower) for k, u in enumerate(op.inputs) if u is not None and graph.original(u) == v)
    return out


def _factors(graph: Graph, rules: Sequence[Rule], v: int, readers: Collection[int]) -> Factors:
    """What collectives send of a value that these ops read, by its bytes."""
    casts = [cast for at in readers for cast in _casts(graph, rules, at)]
    narrower = {cast and cast.dtype: cast for cast in casts}
    if len(narrower) != 1 or None in narrower:
        return ()
    (cast,) = narrower.values()
    assert cast is not None
    kinds = MOVES if len(casts) == cast.readers == 1 else ("all-to-all",)
    return tuple((kind, cast.itemsize / graph.values[v].itemsize) for kind in kinds)


def _casts(graph: Graph, rules: Sequence[Rule], at: int) -> Iterator[Cast | None]:
    """Every narrower cast that an op is, or that stands behind views; None for any other reader."""
    op = graph.ops[at]
    live = [i for i in graph.readers(op.outputs[0]) if i not in graph.dead] if op.outputs else []
    if widening(graph, op) < 0:
        made = graph.values[op.outputs[0]]
        yield Cast(str(made.dtype), made.itemsize, len(live))
    elif _is_view(graph, rules, at):
        for i in live:
            yield from _casts(graph, rules, i)
    else:
        yield None


def _is_view(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    op = graph.ops[at]
    if op.traits.border or len(op.inputs) != 1 or len(op.outputs) != 1 or op.inputs[0] is None or not op.traits.forwards_value:
        return False
    same_dtype = graph.values[op.inputs[0]].dtype == graph.values[op.outputs[0]].dtype
    return same_dtype and (op.traits.transpose or rules[at].fusion == "view")
