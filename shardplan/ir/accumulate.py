"""What a loop only adds up: sums over devices that are paid once, after the loop, and not in every round.

    carry' = carry + f(x)          f(x) partial over `data`: XLA keeps adding partial sums and reduces the carry when the loop ends

So gradients of weights that a scan uses in every round (microbatches, steps of time) cost one all-reduce. It holds where nobody
else reads the carry inside the loop, and for all-reduces only: what is scattered is scattered in every round.
"""

from __future__ import annotations

from math import prod

from shardplan.ir.graph import Graph, Op

ADDS = ("add", "add_any")
PASSED_ON = ("share", "reshape", "transpose", "convert_element_type", "neg", "squeeze", "expand_dims")


def accumulated(graph: Graph) -> dict[tuple[int, int], int]:
    """(op, operand) -> the `loop_carry` to which its loop adds that operand and nothing else is done with it."""
    out: dict[tuple[int, int], int] = {}
    for start, end in graph.tied:
        if graph.ops[start].primitive != "loop_carry":
            continue
        (v,) = graph.ops[end].inputs
        at = None if v is None else graph.maker(v)
        if at is None or graph.ops[at].primitive not in ADDS or graph.ops[at].loop != graph.ops[end].loop:
            continue
        makers = [None if v is None else graph.maker(v) for v in graph.ops[at].inputs]
        if start not in makers or not _only(graph, graph.ops[start].outputs[0], at):
            continue
        k = 1 - makers.index(start)
        while True:
            out[at, k] = start
            v = graph.ops[at].inputs[k]
            if v is None or len(graph.values[v].consumers) > 1:
                break
            at, k = graph.values[v].producer[0], 0
            if not passes_on(graph.ops[at]) or graph.ops[at].loop != graph.ops[end].loop:
                break
    return out


def passes_on(op: Op) -> bool:
    """Whether an op only says an array otherwise."""
    return op.primitive in PASSED_ON or (op.primitive == "reduce_sum" and prod(op.ins[0].shape) == prod(op.outs[0].shape))


def _only(graph: Graph, v: int, reader: int) -> bool:
    """Whether `reader` alone reads a value, through copies or not."""
    return all(
        at == reader or (graph.ops[at].primitive == "share" and _only(graph, graph.ops[at].outputs[0], reader))
        for at, _ in graph.values[v].consumers
    )
