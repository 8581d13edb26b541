"""Which arrays XLA casts before it sends them, although the program casts them behind.

    w (f32) -> all-to-all -+-> cast to bf16                      w is cast on its shards, and sent as bf16
                           +-> transpose -> cast to bf16

All readers in one part of the step, the passes or the update, share an all-to-all, and all of them must cast to one narrower dtype; a
lookup in the array, or any other reader, needs it as it is. An all-gather is left as it is planned: with a second cast behind a
transpose it sends the wider array. So does an all-to-all that another collective follows.

Facts: all-to-all-cast-first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shardplan.ir.graph import Graph
from shardplan.strategies.rule import Rule

CAST_FIRST = "all-to-all"
"""The kind of collective that sends the narrower array."""


def cast_first_operands(graph: Graph, rules: Sequence[Rule]) -> dict[tuple[int, int], float]:
    """(op, operand) that an all-to-all may bring narrower -> bytes that it sends over those of the array."""
    out: dict[tuple[int, int], float] = {}
    for v, value in enumerate(graph.values):
        if graph.ops[value.producer[0]].traits.copy or not value.itemsize:
            continue
        parts: dict[bool, list[int]] = {}
        for at in graph.readers(v):
            if at not in graph.dead:
                parts.setdefault(graph.ops[at].phase == "update", []).append(at)
        fractions = {part: _fraction(graph, rules, v, readers) for part, readers in parts.items()}
        if not any(x < 1 for x in fractions.values()):
            continue
        for at in graph.reached(v, lambda at: graph.ops[at].traits.copy):
            op = graph.ops[at]
            readers = graph.readers(op.outputs[0]) if op.traits.copy else (at,)
            found = {fractions[graph.ops[i].phase == "update"] for i in readers if i not in graph.dead}
            if len(found) == 1 and (fraction := found.pop()) < 1:
                out.update(((at, k), fraction) for k, u in enumerate(op.inputs) if u is not None and graph.original(u) == v)
    return out


def _fraction(graph: Graph, rules: Sequence[Rule], v: int, readers: Collection[int]) -> float:
    """Bytes of what all these readers of a value cast it to, over its own; 1 if they do not."""
    casts = {dtype for at in readers for dtype in _casts(graph, rules, at)}
    narrower = casts.pop() if len(casts) == 1 else None
    return 1.0 if narrower is None else narrower[1] / graph.values[v].itemsize


def _casts(graph: Graph, rules: Sequence[Rule], at: int) -> Iterator[tuple[str, float] | None]:
    """(dtype, bytes per element) of every narrower cast that an op is, or that stands behind views; None for any other reader."""
    op = graph.ops[at]
    if not (op.traits.forwards_value and len(op.inputs) == len(op.outputs) == 1) or op.inputs[0] is None:
        yield None
        return
    read, made = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
    if made.itemsize < read.itemsize:
        yield str(made.dtype), made.itemsize
    elif not op.traits.border and made.dtype == read.dtype and (op.traits.transpose or rules[at].fusion == "view"):
        for i in graph.readers(op.outputs[0]):
            if i not in graph.dead:
                yield from _casts(graph, rules, i)
    else:
        yield None
