"""Which values XLA for GPU writes once for several kernels, since they cost more to compute again than to write and read.

Facts: fusion-recompute-cheaper, fusion-expensive, fusion-expensive-argument, fusion-random.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from functools import partial
from math import inf

from shardplan.ir.graph import Graph, Op
from shardplan.mesh.device import Device, gpu_of_device_kind
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import read_array, seen_through
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
EXPENSIVE_S = {(9, 0): 2e-12}
"""Compute capability -> seconds an element that XLA counts for a tanh: between 1.7 and 2.4 ps on Hopper. Elsewhere, where it was
written in every program seen, at least 5 ps (A100) and 1 ps (B200). For an erfc, of which XLA makes a hundred ops, it counts 8 ps."""
WRITING = 1.05
"""How much more XLA counts for a value that is written than for its bytes: a mask a byte wide is computed again from two bytes."""


def recomputed_from(device: Device) -> float:
    """Bytes an element from which a tanh is computed again by kernels that read its argument anyway.

    Writing and reading the result takes longer than the function then.
    """
    gpu = gpu_of_device_kind(device.name)
    return EXPENSIVE_S.get(gpu.compute_capability, inf) * device.bytes_per_s / 2 if gpu else inf


def cheaper_to_read(
    graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool], rows: RowKernels, recomputed_bytes: float
) -> set[int]:
    """Values that are written once, since computing them again in every kernel that reads them would read more.

    Of k kernels, each reads the sources, or one reads them and writes the value, which the others read:
    k * sources  >  sources + value + (k - 1) * value. Sources that a kernel reads for something else, too, do not count.

    So are expensive functions that several kernels read, but for a tanh from `recomputed_bytes` an element on whose sources these
    read anyway; the argument of some; and what several kernels read of random numbers. Where all of them need it for one result alone
    that is no wider, that is written.
    """
    kernels = kernels_of(graph, rules, written, sums, rows, recomputed_bytes)
    written, inside, rows = kernels.written, kernels.inside, kernels.rows
    out: set[int] = set()
    parts, array = overlapping(graph, rules), partial(read_array, graph, rules)
    # XLA makes products first, which compute whatever they can for themselves
    fused = computed_in(graph, written, kernels.own, lambda reader: not is_product(graph.ops[reader], rules[reader]))
    sources: list[dict[int, float]] = []
    drawn: list[bool] = []  # per value, whether a kernel that computes it draws random numbers
    costly: list[bool] = []  # or computes an expensive function that is worth writing
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        drawn.append(op.traits.draws or any(u is not None and drawn[u] and not (written[u] or u in out) for u in op.inputs))
        costly.append(any(u is not None and costly[u] and not (written[u] or u in out) for u in op.inputs))
        found: dict[int, float] = {}
        for k, u in enumerate(op.inputs):
            if u is not None:
                root = read_array(graph, rules, u)
                whole = graph.values[root].bytes
                part = value.bytes if k == 0 and op.traits.reads_part else whole
                if written[root] or root in out:
                    found[root] = min(whole, found.get(root, 0.0) + part)
                else:
                    found |= {w: size * min(1.0, part / max(whole, 1.0)) for w, size in sources[root].items()}
        sources.append(found)
        if written[v] or rules[at].fusion != "loop" or op.scalar_broadcast:
            continue
        if rows.behind[at] and value.bytes < min(found.values(), default=0.0):  # numbers per row, of rows read anyway
            continue
        once = op.primitive in EXPENSIVE and len(fused[at]) > 1
        costly[v] |= once and (is_expensive(op, recomputed_bytes) or not _sources_are_read(graph, kernels, v, found, fused[at]))
        handed_on = _handed_on(graph, rules, kernels, v) if costly[v] or drawn[v] else False
        expensive = costly[v] and len(fused[at]) > 1 and not (handed_on and len({*graph.readers(v)} - graph.dead) == 1)
        expensive |= drawn[v] and len(inside[at]) > 1 and not handed_on
        if expensive or _reads_less(graph, rules, kernels, v, found):
            out.add(v)
        elif v in parts:
            out.update(written_for_parts(graph, array, lambda u: written[u] or u in out, v, parts[v]))
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


def _reads_less(graph: Graph, rules: Sequence[Rule], kernels: Kernels, v: int, sources: Mapping[int, float]) -> bool:
    """Whether fewer bytes move if a value is written than if each kernel that computes it reads its sources.

    XLA decides op by op, before it knows which kernels the readers become: of one reader there is nothing to compute again.
    """
    size, inside = graph.values[v].bytes, kernels.inside[graph.values[v].producer[0]]
    if (len(inside) - 1) * (sum(sources.values()) - size) <= WRITING * size:
        return False
    readers = {*graph.reached(v, lambda at: seen_through(graph, rules, at))} - graph.dead
    k = min(len(inside), sum(not seen_through(graph, rules, at) for at in readers))
    again = dict.fromkeys(inside, 0.0)
    for u, where in _read_only_for(graph, kernels, v, sources).items():
        for kernel in where:
            again[kernel] += sources[u]
    return k > 1 and sum(sorted(again.values())[1 - k :]) > (k - 1 + WRITING) * size


def _handed_on(graph: Graph, rules: Sequence[Rule], kernels: Kernels, v: int) -> bool:
    """Whether all kernels that compute a value need it for one result, no wider than it: dropout's mask, not the bits behind it."""
    value, inside = graph.values[v], kernels.inside
    readers = graph.reached(v, lambda at: seen_through(graph, rules, at))
    elementwise = [at for at in readers if rules[at].fusion == "loop" and not graph.ops[at].traits.border]
    same = (w for at in elementwise if inside[at] == inside[value.producer[0]] for w in graph.ops[at].outputs)
    return any(not kernels.written[w] and graph.values[w].bytes <= value.bytes for w in same)


def _sources_are_read(graph: Graph, kernels: Kernels, v: int, sources: Collection[int], where: Set[Kernel]) -> bool:
    """Whether each of these kernels, which compute a value, would read all its sources anyway; those of gelu's tanh do."""
    return not any(some & where for some in _read_only_for(graph, kernels, v, sources).values())


def _read_only_for(graph: Graph, kernels: Kernels, v: int, sources: Collection[int]) -> dict[int, set[Kernel]]:
    """Source of a value -> the kernels that compute the value and read this source for nothing else.

    A product's kernel is one: it would compute the value in every tile.
    """
    maker = graph.values[v].producer[0]
    products = {key for key in kernels.inside[maker] if key[0] < 0 and graph.ops[-1 - key[0]].traits.matmul}
    chain, todo = {maker}, [maker]
    for at in todo:
        made = {graph.values[u].producer[0] for u in graph.ops[at].inputs if u is not None and u not in sources}
        todo += made - chain
        chain |= made
    others: dict[int, set[Kernel]] = {}  # op of the chain -> the kernels that compute it for something else

    def reading(u: int) -> set[Kernel]:
        return set().union(*(others.get(at, kernels.inside[at]) for at, _ in graph.values[u].consumers))

    for at in sorted(chain, reverse=True):
        others[at] = set() if at == maker else set().union(*map(reading, graph.ops[at].outputs))
    return {u: kernels.inside[maker] - (reading(u) - products) for u in sources}
