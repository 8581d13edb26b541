"""How many bytes XLA's kernels read and write, and on behalf of which op; and what they compute one by one.

A kernel reads an array once, on behalf of the first op in it that needs it, and writes a result on behalf of the op that makes it:

    op               reads    writes
    y = tanh(x)      x                   one kernel, which writes z alone
    p = x * y                            x is read already
    z = p + b        b        z

Lookups and slices read as much as they return, updates in place write their part. A partial sum that is completed is written, reduced
by a collective and read again: prices count that for each strategy (`KernelTraffic.partial_moves`).

Facts: fusion-loop, fusion-reads-part, fusion-in-place-update, fusion-scatter-into-sum, product-parts-summed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from shardplan._jax import itemsize
from shardplan.ir.graph import Graph, Op
from shardplan.mesh.rates import elements_computed
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import absorbs, read_array, seen_through
from shardplan.xla_model.kernel_groups import Kernel, Kernels
from shardplan.xla_model.overlapping_parts import elements_read
from shardplan.xla_model.product_kernels import computed_on_the_way
from shardplan.xla_model.ragged import masked_by_op
from shardplan.xla_model.row_kernels import masks, reduced_apart, reduces_columns, rows_read
from shardplan.xla_model.stack_zeros import stack_zeros
from shardplan.xla_model.summed_scatters import copies, summed_scatters
from shardplan.xla_model.traffic import KernelTraffic
from shardplan.xla_model.wide_elementwise import WIDER, computes_numbers

Counts = tuple[tuple[float, ...], tuple[float, ...]]
"""How many times the bytes of each operand, and of each result, are moved."""


@dataclass
class _Work:
    """What a kernel does in one run."""

    moved: float = 0.0  # bytes
    reads: float = 0.0  # elements
    makes: float = 0.0  # elements of the largest result
    untiled: float = 0.0  # bytes that are transposed without tiles

    def write(self, bytes_: float, elements: float, untiled: bool = False) -> None:
        """Counts a result."""
        self.moved += bytes_
        self.makes = max(self.makes, elements)
        self.untiled = max(self.untiled, bytes_ * untiled)


def kernel_traffic(
    graph: Graph, rules: Sequence[Rule], kernels: Kernels, wide: Mapping[int, float] = MappingProxyType({})
) -> tuple[KernelTraffic, ...]:
    """What every op moves: each kernel reads an array once, on behalf of the first op that needs it; `wide` as of `kept_wide`."""
    own, inside, written, orders = kernels.own, kernels.inside, kernels.written, kernels.rows.orders
    by_product, ends = kernels.instead, frozenset(kernels.instead.values())
    seen: dict[tuple[Kernel, int], float] = {}  # bytes of an array that a kernel has read or made
    work, stands = defaultdict[Kernel, _Work](_Work), dict[Kernel, int]()
    before = defaultdict[int, float](float)  # product -> bytes read to compute its operand
    counts: list[Counts] = []
    scatters, wanted = summed_scatters(graph), _computed_whole(graph, kernels)
    behind = _read_behind(graph, rules, kernels)
    additions = {found.addition for found in scatters.values()}
    for at, op in enumerate(graph.ops):
        operands: list[float] = [0] * len(op.inputs)
        results: list[float] = [behind.get(at, 0.0)] * len(op.outputs)
        idle = op.traits.moves_nothing or at in graph.dead or at in additions or at in kernels.products
        for k, root, size, part in () if idle else _reads(graph, rules, written, at):
            times = WIDER if root in wide and computes_numbers(op, rules[at]) else 1.0
            whole = times * max(graph.values[root].bytes, 1.0)
            for kernel in inside[at]:
                new = min(times * size, whole - seen.get((kernel, root), 0.0))  # slices read parts, together no more than the whole
                if new > 0 and kernel in wanted[at]:
                    if kernel[0] < -1 - at and graph.ops[-1 - kernel[0]].traits.matmul:
                        before[-1 - kernel[0]] += new
                    else:
                        (results if part else operands)[k] += new / (graph.values[op.outputs[0]].bytes if part else size)
                    seen[kernel, root] = seen.get((kernel, root), 0.0) + new
                    work[kernel].moved += new
                    work[kernel].reads += new / graph.values[root].itemsize
        for k, v in enumerate(op.outputs):
            if v in by_product:
                results[k] += graph.values[by_product[v]].bytes / graph.values[v].bytes
            elif v in ends or (written[v] and not idle):
                seen[own[at], v] = max(graph.values[v].bytes, 1.0)
            if written[v] and not idle and v not in ends:
                stands.setdefault(own[at], at)
                if op.traits.writes_part:
                    part, times = op.traits.writes_part
                    operands[part] += times
                    work[own[at]].write(times * op.ins[part].size * itemsize(op.ins[part].dtype), op.ins[part].size)
                else:
                    results[k] += (times := wide.get(v, 1.0))
                    work[own[at]].write(times * graph.values[v].bytes, math.prod(graph.values[v].shape), orders.written.get(v, False))
        if at in scatters:
            results[0] += copies(graph, rules, scatters[at])
        for k, times in _moved_besides(graph, rules, written, op, before.get(at, 0.0)) if not idle else ():
            operands[k] += times
        counts.append((tuple(operands), tuple(results)))
    return tuple(_with_kernels(graph, rules, kernels, counts, {at: work[kernel] for kernel, at in stands.items()}))


def _with_kernels(
    graph: Graph, rules: Sequence[Rule], kernels: Kernels, counts: Sequence[Counts], work: Mapping[int, _Work]
) -> Iterator[KernelTraffic]:
    """What every op moves, given its `counts` of operands and results, and the work of the kernels that ops stand for."""
    orders, masked, again = kernels.rows.orders, masked_by_op(graph), _row_bytes(graph, rules, kernels)
    computed, summed, zeros = _elements(graph, kernels, work), _summed_by(graph, rules, kernels), stack_zeros(graph)
    for at, ((operands, results), sums) in enumerate(zip(counts, _partial_moves(graph, rules, kernels), strict=True)):
        yield KernelTraffic(
            operands,
            results,
            row_bytes=again.get(at, 0.0),
            kernel_bytes=work[at].moved if at in work else None,
            kernel_elements=computed.get(at, 0.0),
            masked=masked.get(at, ()),
            transposed=orders.transposed.get(at, ()),
            summed_by=summed.get(at, 0),
            partial_moves=sums,
            zeros=zeros.get(at),
            apart=reduced_apart(graph.ops[at], orders),
        )


def _reads(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], at: int) -> Iterator[tuple[int, int, float, bool]]:
    """(operand, array in memory, bytes of it, whether a lookup or a slice reads them) that a kernel reads to compute an op."""
    op = graph.ops[at]
    for k, v in enumerate(op.inputs if rules[at].fusion != "view" else ()):
        if v is None or (k == 0 and op.traits.in_place):
            continue
        part, root = k == 0 and op.traits.reads_part, read_array(graph, rules, v)
        if part:
            made = float(op.outs[0].size)
            for root, elements in elements_read(graph, partial(read_array, graph, rules), written.__getitem__, v, made).items():
                yield k, root, graph.values[root].itemsize * elements, True
        elif written[root]:
            yield k, root, graph.values[root].bytes, False


def _read_behind(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> dict[int, float]:
    """Product -> bytes over its result's that its kernel reads for what it computes behind it, arrays that it multiplies included."""
    out: dict[int, float] = {}
    for at, product in kernels.products.items():
        read = sum(size for _, _, size, _ in _reads(graph, rules, kernels.written, at))
        out[product] = out.get(product, 0.0) + read / max(1.0, graph.values[graph.ops[product].outputs[0]].bytes)
    return out


def _partial_moves(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> Iterator[int]:
    """Per op, how many times kernels move its result where only partial sums are written; 0 where it is written anyway.

    What products write instead of their results (`written_instead`) costs nothing then, nor does what they compute on the way. The
    optimizer reads shards.
    """
    by_product = {u for v, w in kernels.instead.items() for u in computed_on_the_way(graph, v, w)}
    for at, op in enumerate(graph.ops):
        unwritten = rules[at].fusion == "loop" and not any(kernels.written[v] or v in by_product for v in op.outputs)
        yield 1 + sum(not updates for _, _, updates, *_ in kernels.inside[at]) if unwritten else 0


def _computed_whole(graph: Graph, kernels: Kernels) -> list[set[Kernel]]:
    """Per op, those of the kernels that compute it in which not only lookups and slices read of its result."""
    out: list[set[Kernel]] = [set() for _ in graph.ops]
    for at in reversed(range(len(graph.ops))):
        for v in () if at in graph.dead else graph.ops[at].outputs:
            if kernels.written[v]:
                out[at] |= kernels.inside[at]
            else:
                readers = graph.values[v].consumers
                out[at].update(*(out[j] for j, k in readers if k > 0 or not graph.ops[j].traits.reads_part))
    return out


def _moved_besides(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], op: Op, before: float) -> Iterator[tuple[int, float]]:
    """Operands, and how often more their bytes are moved; of a product that reads `before` bytes to compute its operand, that one's.

    Of one that computes no operand, and so reads them for what is behind it, such as a bias that several products add: the first one's.
    """
    if before:
        some = [(k, v) for k, v in enumerate(op.inputs) if v is not None]
        k, v = next(((k, v) for k, v in some if not written[read_array(graph, rules, v)]), some[0])
        yield k, before / graph.values[v].bytes
    if op.traits.scatter:  # the rows that it writes, and reads if it adds to them
        yield len(op.inputs) - 1, 1.0 + (op.traits.scatter != "set")


def _summed_by(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> dict[int, int]:
    """Product -> number of fused kernels that read its result, and sum its parts if it is split (fact: product-parts-summed).

    Kernels of products do not, nor those that sum columns, or begin with a sum.
    """
    columns, out = _columns(graph, kernels), dict[int, int]()
    for at, op in enumerate(graph.ops):
        if op.traits.matmul and rules[at].fusion == "none" and at not in graph.dead:
            v = kernels.instead.get(op.outputs[0], op.outputs[0])
            maker, found = graph.ops[graph.values[v].producer[0]], set[Kernel]()
            for reader in graph.reached(v, lambda c: seen_through(graph, rules, c)):
                stacks = graph.ops[reader].traits.loop_stack and maker.runs_in == graph.ops[reader].loop
                computes = rules[reader].fusion == "loop" or kernels.rows.behind[reader]
                if stacks or (computes and not seen_through(graph, rules, reader) and absorbs(graph, rules, maker, reader, False)):
                    found |= kernels.inside[reader] - columns
            out[at] = len(found)
    return out


def _columns(graph: Graph, kernels: Kernels) -> set[Kernel]:
    """The kernels that reduce columns."""
    reductions = (at for at, op in enumerate(graph.ops) if reduces_columns(op, kernels.rows.orders))
    return set[Kernel]().union(*(kernels.inside[at] for at in reductions))


def _elements(graph: Graph, kernels: Kernels, work: Mapping[int, _Work]) -> dict[int, float]:
    """Op that stands for a kernel -> what that computes one by one."""
    inside, columns = kernels.inside, _columns(graph, kernels)
    rows = rows_read(graph, kernels.rows, inside)
    masked = {kernel for at, op in enumerate(graph.ops) if masks(graph, op) for kernel in inside[at]} & rows.keys()
    return {
        at: elements_computed(of.makes, of.reads * (key in columns), rows.get(key, 0.0), of.moved * (key in masked), of.untiled)
        for at, of in work.items()
        for key in [kernels.own[at]]
    }


def _row_bytes(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> dict[int, float]:
    """Reduction inside a kernel that keeps rows on chip -> bytes of the arrays that it reduces something of."""
    out: dict[int, float] = {}
    for at in kernels.rows.fused - graph.dead:
        found, todo = set[int](), [graph.ops[at].inputs[0]]
        for v in todo:
            if v is None or (root := read_array(graph, rules, v)) in found:
                continue
            found.add(root)
            if not kernels.written[root]:
                todo += graph.ops[graph.values[root].producer[0]].inputs
        out[at] = sum(graph.values[v].bytes for v in found if kernels.written[v])
    return out
