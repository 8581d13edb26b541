"""What a loop only adds up: sums over devices that are finished once, after the loop, and not in every round.

    carry' = carry + f(x)          f(x) partial over `data`: XLA keeps adding partial sums and reduces the carry when the loop ends

So a carry that nobody else reads inside the loop may be partial, on top of what it starts from, and gradients of weights that a scan
uses in every round (microbatches, steps of time) cost one all-reduce, or one reduce-scatter where that is what they go on to. What is
scattered inside is scattered in every round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.ir.graph import Graph, Op

ADDS = ("add", "add_any")


def accumulated_operands(graph: Graph) -> dict[tuple[int, int], int]:
    """(op, operand) -> the `loop_carry` to which its loop adds that operand and nothing else is done with it."""
    out: dict[tuple[int, int], int] = {}
    for start, end in _carries(graph).items():
        (v,) = graph.ops[end].inputs
        at = None if v is None else graph.maker(v)
        if at is None or graph.ops[at].primitive not in ADDS or graph.ops[at].loop != graph.ops[end].loop:
            continue
        makers = [None if v is None else graph.maker(v) for v in graph.ops[at].inputs]
        if start not in makers or not _only(graph, graph.ops[start].outputs[0], at):
            continue
        k = 1 - makers.index(start)
        while (v := graph.ops[at].inputs[k]) is not None:
            out[at, k] = start
            if len(graph.values[v].consumers) > 1:
                break
            at, k = graph.values[v].producer[0], 0
            if not passes_on(graph.ops[at]) or graph.ops[at].loop != graph.ops[end].loop:
                break
    return out


def mark_accumulation(graph: Graph) -> Graph:
    """The graph in which what may hand partial sums to such a carry, or be one, says so: casts, too, which round every part."""
    found, ends = accumulated_operands(graph), _carries(graph)
    up = {at for start in found.values() for at in (start, ends[start])}
    up |= {at for at, _ in found if passes_on(graph.ops[at])}
    ops = (replace(op, accumulates=True) if at in up else op for at, op in enumerate(graph.ops))
    return replace(graph, ops=tuple(ops)) if up else graph


def accumulated_sums(graph: Graph, found: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Value that a `loop_next` makes of such a carry -> the value in the loop whose sums it adds up, before casts and the like.

    Args:
        found: `accumulated_operands` of the graph.
    """
    ends, out = _carries(graph), {}
    for (at, k), start in found.items():  # from the carry backwards
        v = graph.ops[at].inputs[k]
        assert v is not None
        out[graph.ops[ends[start]].outputs[0]] = v
    return out


def passes_on(op: Op) -> bool:
    """Whether an op only says an array otherwise."""
    return op.forwards_value


def _carries(graph: Graph) -> dict[int, int]:
    """`loop_carry` -> its `loop_next`."""
    return {start: end for start, end in graph.same_layout if graph.ops[start].primitive == "loop_carry"}


def _only(graph: Graph, v: int, reader: int) -> bool:
    """Whether `reader` alone reads a value, through copies or not."""
    return all(
        at == reader or (graph.ops[at].primitive == "share" and _only(graph, graph.ops[at].outputs[0], reader))
        for at, _ in graph.values[v].consumers
    )
