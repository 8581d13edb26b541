"""Looking through ops: which value an array is derived from, and who reads it in the end.

A walk follows ops that hand an array on (copies, casts, views); its caller says which ops these are, by op number.

    arg -> cast -> copy -> dot        origin(dot's operand) = arg        reached(arg) = cast, copy, dot
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardplan.ir.graph import Graph


def origin(graph: Graph, v: int, through: Callable[[int], bool]) -> int:
    """The value that v is derived from: operands are followed back as long as `through(op number)` holds.

    An op with one result hands on its first operand, one with several its k-th operand as its k-th result.
    """
    while True:
        at, k = graph.values[v].producer
        op = graph.ops[at]
        source = op.inputs[k if len(op.outputs) > 1 else 0] if op.inputs and through(at) else None
        if source is None:
            return v
        v = source


def reached(graph: Graph, v: int, through: Callable[[int], bool]) -> Iterator[int]:
    """Numbers of the ops that read v, breadth first: the readers themselves and, behind those for which `through` holds, theirs."""
    values = [v]
    for seen in values:
        for at, _ in graph.values[seen].consumers:
            yield at
            if through(at):
                values += graph.ops[at].outputs
