"""Which values XLA for GPU writes once for several kernels, since they cost more to compute again than to write and read.

Facts: fusion-recompute-cheaper, fusion-expensive, fusion-expensive-argument, fusion-random.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence, Set
from functools import partial

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import read_array, seen_through
from shardplan.xla_model.fusion_estimate import FusedResults, FusionEstimate, broadcast_numbers, read_only_for, repeats
from shardplan.xla_model.kernel_groups import (
    EXPENSIVE,
    Kernel,
    Kernels,
    computed_in,
    is_expensive,
    kernels_of,
)
from shardplan.xla_model.overlapping_parts import overlapping, written_for_parts
from shardplan.xla_model.physical_order import is_product
from shardplan.xla_model.row_kernels import RowKernels

LONGEST = ("erfc",)
"""Those of which XLA makes a hundred ops; their argument may be written, too (fact: fusion-expensive-argument)."""


def cheaper_to_read(
    graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool], rows: RowKernels, estimate: FusionEstimate
) -> set[int]:
    """Values that are written once, since computing them again in every kernel that reads them would read more.

    So are expensive functions that several kernels read, but for a tanh that takes less time than writing and reading it where these
    read its sources anyway; the argument of some; and what several kernels read of random numbers. Where all of them need it for one
    result alone that is no wider, that is written.
    """
    kernels = kernels_of(graph, rules, written, sums, rows, estimate.tanh_bytes)
    written, inside, rows = kernels.written, kernels.inside, kernels.rows
    out: set[int] = set()

    def in_memory(u: int) -> bool:
        return written[u] or u in out

    parts, array = overlapping(graph, rules), partial(read_array, graph, rules)
    # XLA makes products first, which compute whatever they can for themselves
    fused = computed_in(graph, written, kernels.own, lambda reader: not is_product(graph.ops[reader], rules[reader]))
    results = FusedResults.of(graph, rules, kernels, estimate)
    sources: list[dict[int, float]] = []
    numbers: list[dict[Hashable, float]] = []  # per value, what the ops that compute it broadcast
    drawn: list[bool] = []  # per value, whether a kernel that computes it draws random numbers
    costly: list[bool] = []  # or computes an expensive function that is worth writing
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        drawn.append(op.traits.draws or any(u is not None and drawn[u] and not in_memory(u) for u in op.inputs))
        costly.append(any(u is not None and costly[u] and not in_memory(u) for u in op.inputs))
        found: dict[int, float] = {}
        for k, u in enumerate(op.inputs):
            if u is not None:
                root = array(u)
                whole = graph.values[root].bytes
                part = value.bytes if k == 0 and op.traits.reads_part else whole
                if in_memory(root) or repeats(op, k):
                    found[root] = min(whole, found.get(root, 0.0) + part)
                else:
                    found |= {w: size * min(1.0, part / max(whole, 1.0)) for w, size in sources[root].items()}
        sources.append(found)
        fused_with = [{} if u is None or (root := array(u)) in found else numbers[root] for u in op.inputs]
        numbers.append(broadcast_numbers(op, fused_with) if rules[at].fusion in ("loop", "view") else {})
        if written[v] or rules[at].fusion != "loop" or op.scalar_broadcast:
            continue
        if rows.behind[at] and value.bytes < min(found.values(), default=0.0):  # numbers per row, of rows read anyway
            continue
        once = op.primitive in EXPENSIVE and len(fused[at]) > 1
        costly[v] |= once and (is_expensive(op, estimate.tanh_bytes) or not _sources_are_read(graph, kernels, v, found, fused[at]))
        handed_on = _handed_on(graph, rules, kernels, v) if costly[v] or drawn[v] else False
        expensive = costly[v] and len(fused[at]) > 1 and not (handed_on and len({*graph.readers(v)} - graph.dead) == 1)
        expensive |= drawn[v] and len(inside[at]) > 1 and not handed_on
        if expensive or results.reads_less(v, found, numbers[v]):
            out.add(v)
        elif v in parts:
            out.update(written_for_parts(graph, array, in_memory, v, parts[v]))
        if v in out and op.primitive in LONGEST:
            out.update(_flattened_argument(graph, kernels, v, found))
    return out


def _flattened_argument(graph: Graph, kernels: Kernels, v: int, sources: Collection[int]) -> list[int]:
    """What an erfc of less than 32 bits reads, if a product made it of rows that XLA flattens, and another kernel needs it, too."""
    operand = graph.ops[graph.values[v].producer[0]].inputs[0]
    makers = (graph.ops[graph.values[graph.original(u)].producer[0]] for u in sources)
    if operand is None or graph.values[v].itemsize >= 4 or not any(_flattened(maker) for maker in makers):
        return []
    u = graph.original(operand)
    readers = {*graph.readers(u)} - graph.dead
    return [u] if len(readers) > 1 and len(kernels.inside[graph.values[u].producer[0]]) > 1 and not kernels.written[u] else []


def _flattened(op: Op) -> bool:
    """Whether XLA computes a product as one of matrices, whose result it reshapes."""
    return op.traits.matmul and len(op.outs[0].shape) > 2 and not op.params["dimension_numbers"][1][0]


def _handed_on(graph: Graph, rules: Sequence[Rule], kernels: Kernels, v: int) -> bool:
    """Whether all kernels that compute a value need it for one result, no wider than it: dropout's mask, not the bits behind it."""
    value, inside = graph.values[v], kernels.inside
    readers = graph.reached(v, lambda at: seen_through(graph, rules, at))
    elementwise = [at for at in readers if rules[at].fusion == "loop" and not graph.ops[at].traits.border]
    same = (w for at in elementwise if inside[at] == inside[value.producer[0]] for w in graph.ops[at].outputs)
    return any(not kernels.written[w] and graph.values[w].bytes <= value.bytes for w in same)


def _sources_are_read(graph: Graph, kernels: Kernels, v: int, sources: Collection[int], where: Set[Kernel]) -> bool:
    """Whether each of these kernels, which compute a value, would read all its sources anyway; those of gelu's tanh do."""
    return not any(some & where for some in read_only_for(graph, kernels.inside, v, sources).values())
