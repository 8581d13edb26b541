"""What a kernel of fused ops may hold of the ops around it: which readers compute an array again, and what they read instead.

Of the operands of an op, literals and scalars are no arrays (`array_operands`); one number that is broadcast has the shape of one, but
is computed where it is read (`is_scalar_broadcast`).

Facts: fusion-loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule

FUSIBLE = ("loop", "view", "reduce")


def absorbs(graph: Graph, rules: Sequence[Rule], producer: Op, at: int, prologue: bool) -> bool:
    """Whether op `at` computes what `producer` makes inside its own kernel."""
    reader, inside = graph.ops[at], graph.ops[at].traits.copy or not graph.ops[at].traits.border
    return inside and producer.runs_in == reader.loop and (rules[at].fusion in FUSIBLE or (prologue and reader.traits.matmul))


def array_operands(graph: Graph, op: Op) -> list[int]:
    """The operands of an op that are arrays: neither literals nor scalars."""
    return [v for v in op.inputs if v is not None and graph.values[v].shape]


def is_scalar_broadcast(graph: Graph, v: int) -> bool:
    """Whether a value is one number, broadcast, or a copy of that."""
    return graph.ops[graph.maker(v)].scalar_broadcast


def seen_through(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    """Whether a fusion that reads the result may as well read the operand: a copy or a view."""
    return graph.ops[at].traits.copy or (rules[at].fusion == "view" and not graph.ops[at].traits.border)


def read_array(graph: Graph, rules: Sequence[Rule], v: int) -> int:
    """The array whose bytes are read when v is: views are looked through, and copies, which are priced as reshards."""
    return graph.origin(v, lambda at: rules[at].fusion == "view")


def fuses(graph: Graph, rules: Sequence[Rule], reader: int) -> bool:
    """Whether an op may be part of a kernel that writes what it reads."""
    return rules[reader].fusion in FUSIBLE and not graph.ops[reader].traits.border


def read_by_fusion(graph: Graph, rules: Sequence[Rule], op: Op) -> bool:
    """Whether the kernel of an op that reads a result may write it."""
    return any(fuses(graph, rules, reader) for v in op.outputs for reader in graph.readers(v))
