"""Which values XLA for GPU writes to memory, which ops one kernel runs, and how many bytes it reads and writes.

Elementwise ops, views and the reductions behind them fuse. A value that only fusions read never materialises; each of them computes it
again. Materialised are:

    inputs, loop carries and branch results; products, gathers, scatters and the like
    partial sums that are copied: written, reduced by a collective, read again
    elementwise results that some reader cannot compute again, or that are cheaper to read than to compute again
    products that are transposed in memory (`physical_layout.py`)
    what a product's kernel writes: its result after elementwise work on it alone that ends in a narrower dtype

A kernel is a group of fused ops between materialised values. What stands behind a reduction, a product or a collective waits for it in
a later kernel, and reads again what an earlier one read:

    y -> cast -+-> sum ------+            kernel 1 reads y, writes the sum
               +-> minus <---+-> cast     kernel 2 reads y and the sum, writes the normalised y

A reduction of rows may stay on chip, inside the kernels that read its result (`row_kernels.py`).

Facts: fusion-loop, fusion-recompute-cheaper, fusion-matmul-prologue, fusion-matmul-epilogue, fusion-broadcast-scalar,
fusion-zeros-shared, fusion-random, fusion-multi-output, fusion-concatenate, fusion-reads-part, fusion-in-place-update,
product-ragged-masked.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from shardplan.ir.graph import Graph, Op, components
from shardplan.mesh.rates import COLUMN_READ, MASKED_BYTE, ROW_READ, UNTILED_BYTE
from shardplan.strategies.rule import Rule
from shardplan.xla_model.expensive import EXPENSIVE, EXPONENTIALS
from shardplan.xla_model.physical_layout import is_untiled, transposed_in_memory, transposed_product
from shardplan.xla_model.row_kernels import RowKernels, masks, reduces_columns, reduces_rows, row_kernels, rows_read
from shardplan.xla_model.traffic import KernelTraffic

FUSIBLE = ("loop", "view", "reduce")
Kernel = tuple
"""Group of ops, how many kernels it waits for, phase, loop, and the shapes and dims of its reductions."""


def materialised(
    graph: Graph, rules: Sequence[Rule], sums: Sequence[bool], rows: RowKernels, recomputed_bytes: float = inf
) -> tuple[bool, ...]:
    """Per value, whether it is written to memory; views are not.

    Args:
        graph: the step.
        rules: per op.
        sums: per op, whether its result may be partial.
        rows: `row_kernels` of the graph.
        recomputed_bytes: of the device (`recomputed_from`).
    """
    out = [True] * len(graph.values)
    prologue = _prologues(graph, rules)
    for v in reversed(range(len(graph.values))):
        at, _ = graph.values[v].producer
        op, fusion = graph.ops[at], rules[at].fusion
        if op.traits.materialised or fusion == "view":
            out[v] = op.traits.materialised
            continue
        reached = [c for c in graph.reached(v, lambda at: _seen_through(graph, rules, at)) if c not in graph.dead]
        if op.scalar_broadcast and not any(graph.ops[c].traits.stores_operand for c in reached):
            out[v] = False
        elif sums[at] and not rows.behind[at] and any(graph.ops[c].traits.copy for c in reached):
            continue  # partial sums are written, reduced and read again
        elif fusion == "loop" and not op.scalar_broadcast:
            readers = [c for c in reached if not _seen_through(graph, rules, c)]
            stacked = len(readers) == 1 and graph.ops[readers[0]].traits.loop_stack  # computed as the row is written
            out[v] = not stacked and not all(_absorbs(graph, rules, op, reader, v in prologue) for reader in readers)
            out[v] |= rows.behind[at] and any(rules[c].fusion == "reduce" and not reduces_rows(graph.ops[c]) for c in readers)
    for v, (w, always) in written_by_products(graph, rules).items():
        if always or out[w]:
            out[v], out[w] = False, True
    for v in (*transposed_in_memory(graph, rules), *_shared_zeros(graph)):
        out[v] = True
    cheaper_to_read = _cheaper_to_read(graph, rules, out, sums, rows, recomputed_bytes)
    return tuple(written or v in cheaper_to_read for v, written in enumerate(out))


def _seen_through(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    """Whether a fusion that reads the result may as well read the operand: a copy or a view."""
    return graph.ops[at].traits.copy or (rules[at].fusion == "view" and not graph.ops[at].traits.border)


def _absorbs(graph: Graph, rules: Sequence[Rule], producer: Op, at: int, prologue: bool) -> bool:
    """Whether op `at` computes what `producer` makes inside its own kernel."""
    reader, inside = graph.ops[at], graph.ops[at].traits.copy or not graph.ops[at].traits.border
    return inside and producer.runs_in == reader.loop and (rules[at].fusion in FUSIBLE or (prologue and reader.traits.matmul))


def _prologues(graph: Graph, rules: Sequence[Rule]) -> set[int]:
    """Values that XLA computes inside the products that read them: one array after elementwise work that reads it once.

    A change of dtype on the way, a selection or a second use of the array (gelu's) is written before the product.
    """
    out: set[int] = set()
    for op in graph.ops:
        if op.traits.matmul_prologue and op.outs[0].shape:
            arrays = [graph.original(v) for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.size == op.outs[0].size]
            made = [(v, graph.values[v].producer[0]) for v in arrays]
            made = [(v, at) for v, at in made if not graph.ops[at].traits.broadcast]
            if len(made) == 1 and all(v in out or rules[at].fusion != "loop" for v, at in made):
                out.add(op.outputs[0])
    return out


def written_by_products(graph: Graph, rules: Sequence[Rule]) -> dict[int, tuple[int, bool]]:
    """Result of a product -> what its kernel writes instead, and whether always, or only if that is in memory at all.

    A transpose of it; or a chain of elementwise work on it alone, of which each reads the one before, if that ends in a narrower dtype.
    A reshard between the two prevents either; prices add what the second then moves (`costs/tables.py`).
    """
    found = ((transposed_product(graph, op), op.outputs[0]) for op in graph.ops if op.outputs)
    out = {v: (w, False) for v, w in found if v is not None}
    for op, rule in zip(graph.ops, rules, strict=True):
        if op.traits.matmul and rule.fusion == "none":
            v = w = end = op.outputs[0]
            while len(graph.values[end].consumers) == 1 and _is_unary(graph, rules, at := graph.values[end].consumers[0][0]):
                end = graph.ops[at].outputs[0]
                w = w if graph.ops[at].traits.copy else end
            if graph.values[w].itemsize < graph.values[v].itemsize:
                out[v] = w, True
    return out


def _is_unary(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    """Whether an op is elementwise work on one array and scalars, or a copy."""
    op = graph.ops[at]
    if op.traits.copy:
        return op.is_follower
    made = [graph.ops[graph.values[v].producer[0]] for v in op.inputs if v is not None and graph.values[v].shape]
    arrays = [maker for maker in made if not maker.scalar_broadcast]
    return rules[at].fusion == "loop" and not op.traits.border and len(arrays) == len(op.outputs) == 1


def _shared_zeros(graph: Graph) -> list[int]:
    """Scalars broadcast like those that a scatter writes into, all taken to be zeros: XLA makes one array of both, and a copy."""
    updated: dict[tuple[Hashable, Hashable, bool], list[int]] = {}  # (shape, dtype, whether a scatter writes into it) -> values
    for op in graph.ops:
        if op.scalar_broadcast and op.loop < 0:
            into = any(graph.ops[reader].traits.in_place for reader in graph.readers(op.outputs[0]))
            updated.setdefault((op.outs[0].shape, op.outs[0].dtype, into), []).append(op.outputs[0])
    return [v for (shape, dtype, into), some in updated.items() if not into and (shape, dtype, True) in updated for v in some]


def _cheaper_to_read(
    graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool], rows: RowKernels, recomputed_bytes: float
) -> set[int]:
    """Values that are written once, since computing them again in every kernel that reads them would read more.

    Of k kernels, each reads the sources, or one reads them and writes the value, which the others read:
    k * sources  >  sources + value + (k - 1) * value.

    So are expensive functions that several kernels read, but for those from `recomputed_bytes` an element on whose sources these
    read anyway; and what several kernels read of random numbers, in its narrowest form.
    """
    kernels = kernels_of(graph, rules, written, sums, rows)
    written, inside, rows = kernels.written, kernels.inside, kernels.rows
    out: set[int] = set()
    sources: list[dict[int, float]] = []
    drawn: list[bool] = []  # per value, whether a kernel that computes it draws random numbers
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        drawn.append(op.traits.draws or any(u is not None and drawn[u] and not (written[u] or u in out) for u in op.inputs))
        found: dict[int, float] = {}
        for u in op.inputs:
            if u is not None:
                root = _read_array(graph, rules, u)
                found |= {root: graph.values[root].bytes} if written[root] or root in out else sources[root]
        sources.append(found)
        if written[v] or rules[at].fusion != "loop" or op.scalar_broadcast:
            continue
        if rows.behind[at] and value.bytes < min(found.values(), default=0.0):  # numbers per row, of rows read anyway
            continue
        k = len(inside[at])
        expensive = k > 1 and op.primitive in EXPENSIVE
        expensive = expensive and (value.itemsize < recomputed_bytes or not _sources_are_read(graph, kernels, v, found))
        expensive |= k > 1 and drawn[v] and not _handed_on(graph, rules, kernels, v)
        if expensive or (k - 1) * (sum(found.values()) - value.bytes) > value.bytes:
            out.add(v)
    return out


def _handed_on(graph: Graph, rules: Sequence[Rule], kernels: Kernels, v: int) -> bool:
    """Whether all kernels that compute a value need it for one result, no wider than it: dropout's mask, not the bits behind it."""
    value, inside = graph.values[v], kernels.inside
    readers = graph.reached(v, lambda at: _seen_through(graph, rules, at))
    elementwise = [at for at in readers if rules[at].fusion == "loop" and not graph.ops[at].traits.border]
    same = (w for at in elementwise if inside[at] == inside[value.producer[0]] for w in graph.ops[at].outputs)
    return any(not kernels.written[w] and graph.values[w].bytes <= value.bytes for w in same)


def _sources_are_read(graph: Graph, kernels: Kernels, v: int, sources: Collection[int]) -> bool:
    """Whether every kernel that computes a value would read all its sources even if it was in memory; those of gelu's tanh do.

    A product's kernel does not count: it would compute the value in every tile.
    """
    maker = graph.values[v].producer[0]
    if any(group < 0 and graph.ops[-1 - group].traits.matmul for group, *_ in kernels.inside[maker]):
        return False
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
    return all(kernels.inside[maker] <= reading(u) for u in sources)


@dataclass(frozen=True)
class FusedKernels:
    """Which kernels run which ops.

    Attributes:
        own: per op, the number of the fused kernel in which it writes; -1 if it writes in none.
        inside: per op that writes nothing, the numbers of the fused kernels that compute it.
        rows: numbers of the kernels that keep rows on chip.
        inputs: kernel number -> how many inputs of the step only it reads.
    """

    own: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    rows: frozenset[int]
    inputs: Mapping[int, int]


def fused_kernels(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> FusedKernels:
    """The kernels of a step by number. Products have a number, too, for what is computed inside them; what they write is their own."""
    instead = written_instead(graph, rules, kernels)
    ends = frozenset(instead.values())
    numbers: dict[Kernel, int] = {key: n for n, key in enumerate(dict.fromkeys(kernels.own))}
    own, inside, rows, readers = [], [], set[int](), dict[int, set[Kernel]]()
    for at, op in enumerate(graph.ops):
        writes = any(kernels.written[v] or v in instead for v in op.outputs)
        fused = writes and ends.isdisjoint(op.outputs) and (_fuses(graph, rules, at) or op.traits.matmul)
        own.append(numbers[kernels.own[at]] if fused else -1)
        computed = () if writes or (op.traits.moves_nothing and not op.traits.copy) else kernels.inside[at]
        inside.append(tuple(sorted(numbers[key] for key in computed)))
        if kernels.rows.behind[at]:
            rows.update((own[at],) if fused else inside[at])
        for v in op.inputs if not op.traits.border and rules[at].fusion != "view" else ():
            if v is not None and not graph.ops[graph.values[root := _read_array(graph, rules, v)].producer[0]].inputs:
                readers.setdefault(root, set()).update(kernels.inside[at])
    inputs = Counter(numbers[key] for some in readers.values() if len(some) == 1 for key in some)
    return FusedKernels(tuple(own), tuple(inside), frozenset(rows), inputs)


def written_instead(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> dict[int, int]:
    """Result of a product that its kernel does not write -> what it writes."""
    written = kernels.written
    return {v: w for v, (w, _) in written_by_products(graph, rules).items() if written[w] and not written[v]}


def kernel_traffic(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> tuple[KernelTraffic, ...]:
    """What every op moves: each kernel reads an array once, on behalf of the first op that needs it."""
    own, inside, written = kernels.own, kernels.inside, kernels.written
    by_product = written_instead(graph, rules, kernels)
    ends = frozenset(by_product.values())
    seen: dict[tuple[Kernel, int], float] = {}  # bytes of an array that a kernel has read or made
    moved, reads, makes = (defaultdict[Kernel, float](float) for _ in range(3))  # bytes, elements read, those of the largest result
    columns = {kernel for at, op in enumerate(graph.ops) if reduces_columns(op) for kernel in inside[at]}
    stands: dict[Kernel, int] = {}
    counts: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for at, op in enumerate(graph.ops):
        operands: list[float] = [0] * len(op.inputs)
        results: list[float] = [0] * len(op.outputs)
        idle = op.traits.moves_nothing or at in graph.dead
        for k, v in enumerate(op.inputs):
            if v is None or idle or rules[at].fusion == "view" or (k == 0 and op.traits.in_place):
                continue
            root = _read_array(graph, rules, v)
            part = k == 0 and op.traits.reads_part
            size = graph.values[op.outputs[0] if part else root].bytes
            whole = max(graph.values[root].bytes, 1.0)
            for kernel in inside[at] if written[root] else ():
                new = min(size, whole - seen.get((kernel, root), 0.0))  # a slice reads its part, all together no more than the whole
                if new > 0:
                    (results if part else operands)[k] += new / size
                    seen[kernel, root] = seen.get((kernel, root), 0.0) + new
                    moved[kernel] += new
                    reads[kernel] += new / graph.values[root].itemsize
        for k, v in enumerate(op.outputs):
            if v in by_product:
                results[k] += graph.values[by_product[v]].bytes / graph.values[v].bytes
            elif v in ends:
                seen[own[at], v] = max(graph.values[v].bytes, 1.0)
            elif written[v] and not idle:
                stands.setdefault(own[at], at)
                seen[own[at], v] = max(graph.values[v].bytes, 1.0)
                if op.traits.writes_part:
                    part, times = op.traits.writes_part
                    operands[part] += times
                else:
                    results[k] += 1
                    moved[own[at]] += graph.values[v].bytes
                    untiled = UNTILED_BYTE * graph.values[v].bytes * is_untiled(op)
                    makes[own[at]] = max(makes[own[at]], untiled, float(math.prod(graph.values[v].shape)))
        if op.traits.grouped_matmul and not idle:
            operands[0] += 2 * op.ins[2].shape[-1]  # its masked copies, written and read (fact: product-ragged-masked)
        if op.traits.scatter and not idle:
            operands[-1] += 1 + (op.traits.scatter != "set")  # the rows that are written, and read if added to
        counts.append((tuple(operands), tuple(results)))
    kernel = {at: moved[key] for key, at in stands.items()}
    rows = rows_read(graph, kernels.rows, inside)
    masked = {kernel for at, op in enumerate(graph.ops) if masks(graph, op) for kernel in inside[at]} & rows.keys()
    columns_of, masked_of = ({key: moves[key] for key in keys} for moves, keys in ((reads, columns), (moved, masked)))
    slow = ((COLUMN_READ, columns_of), (ROW_READ, rows), (MASKED_BYTE, masked_of))
    computed = {at: max(makes[key], *(cost * of.get(key, 0.0) for cost, of in slow)) for key, at in stands.items()}
    again = _row_bytes(graph, rules, kernels)
    return tuple(KernelTraffic(*moves, again.get(at, 0.0), kernel.get(at), computed.get(at, 0.0)) for at, moves in enumerate(counts))


def _row_bytes(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> dict[int, float]:
    """Reduction inside a kernel that keeps rows on chip -> bytes of the arrays that it reduces something of."""
    out: dict[int, float] = {}
    for at in kernels.rows.fused - graph.dead:
        found, todo = set[int](), [graph.ops[at].inputs[0]]
        for v in todo:
            if v is None or (root := _read_array(graph, rules, v)) in found:
                continue
            found.add(root)
            if not kernels.written[root]:
                todo += graph.ops[graph.values[root].producer[0]].inputs
        out[at] = sum(graph.values[v].bytes for v in found if kernels.written[v])
    return out


@dataclass(frozen=True)
class Kernels:
    """Kernels of a step.

    Attributes:
        own: per op, the kernel in which it writes.
        inside: per op, those that compute it: its own where it writes, all its readers' where it does not.
        written: per value, whether a kernel writes it; what stays on chip with its row is not.
        rows: the reductions that stay there.
    """

    own: list[Kernel]
    inside: list[set[Kernel]]
    written: list[bool]
    rows: RowKernels


def kernels_of(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool], rows: RowKernels) -> Kernels:
    """The kernels where `written` values are in memory. A reduction of exponentials that several would compute is written."""
    first = _grouped_kernels(graph, rules, written, sums, rows)
    alone, exponentials = set[int](), [False] * len(graph.ops)
    for at, op in enumerate(graph.ops):
        made = [graph.values[v].producer[0] for v in op.inputs if v is not None and not first.written[v]]
        exponentials[at] = op.primitive in EXPONENTIALS or any(exponentials[i] for i in made)
        if at in first.rows.fused and exponentials[at] and len(first.inside[at]) > 1:
            alone.add(at)
            exponentials[at] = False
    return _grouped_kernels(graph, rules, written, sums, row_kernels(graph, rules, frozenset(alone))) if alone else first


def _grouped_kernels(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool], rows: RowKernels) -> Kernels:
    """The kernels with these reductions of rows inside.

    One kernel reduces arrays of one shape over the same dims; what is written on the way is written by any of its reductions.
    """
    written = list(written)
    for v in rows.statistics:
        maker = graph.ops[graph.values[v].producer[0]]
        written[v] &= not all(
            _absorbs(graph, rules, maker, reader, prologue=False) for reader in graph.readers(v) if reader not in graph.dead
        )
    groups, homes = _groups(graph, rules, written), []
    levels: list[int] = []  # per op, the reductions, products and partial sums that it waits for, one behind the other
    over = [
        _reduction(op) if rule.fusion == "reduce" and at not in rows.fused else None
        for at, (op, rule) in enumerate(zip(graph.ops, rules, strict=True))
    ]
    first: dict[Kernel, tuple] = {}
    for at, op in enumerate(graph.ops):
        made = ((v, graph.values[v].producer[0]) for v in op.inputs if v is not None)
        waits = (levels[i] + (written[v] and (rules[i].fusion in ("reduce", "none") or sums[i])) for v, i in made)
        levels.append(max(waits, default=0))
        alone = op.traits.reads_part and not any(_fuses(graph, rules, reader) for v in op.outputs for reader in graph.readers(v))
        alone |= op.traits.matmul and rules[at].fusion == "none"
        homes.append((-1 - at if alone else groups[at], levels[at], op.phase, op.runs_in))
        if (reduced := over[at]) and not rows.behind[at]:
            first.setdefault(homes[at], reduced)
    joined = _joined(graph, rules, written)
    own = [
        (*key, -1 - at if rows.behind[at] or joined[at] else reduced or first.get(key))
        for at, (key, reduced) in enumerate(zip(homes, over, strict=True))
    ]
    inside: list[set[Kernel]] = [set() for _ in graph.ops]
    for at in reversed(range(len(graph.ops))):
        for v in () if at in graph.dead else graph.ops[at].outputs:
            if not written[v]:
                inside[at].update(*(inside[reader] for reader, _ in graph.values[v].consumers))
            elif not graph.ops[at].traits.moves_nothing:
                inside[at].add(own[at])
    return Kernels(own, inside, written, rows)


def _joined(graph: Graph, rules: Sequence[Rule], written: Sequence[bool]) -> list[bool]:
    """Per op, whether its kernel concatenates arrays; such a kernel writes one result (fact: fusion-concatenate)."""
    out: list[bool] = []
    for at, op in enumerate(graph.ops):
        made = (graph.values[v].producer[0] for v in op.inputs if v is not None and not written[v])
        out.append(op.traits.concatenates or ((op.traits.copy or _fuses(graph, rules, at)) and any(out[i] for i in made)))
    return out


def _read_array(graph: Graph, rules: Sequence[Rule], v: int) -> int:
    """The array whose bytes are read when v is: views are looked through, and copies, which are priced as reshards."""
    return graph.origin(v, lambda at: rules[at].fusion == "view")


def _reduction(op: Op) -> tuple:
    """What reductions of one kernel have in common: shapes and dims."""
    over = next((op.params[name] for name in ("axes", "dimensions", "dimension_numbers", "window_dimensions") if name in op.params), ())
    return tuple(x.shape for x in op.ins), str(over)


def _fuses(graph: Graph, rules: Sequence[Rule], reader: int) -> bool:
    """Whether an op may be part of a kernel that writes what it reads."""
    return rules[reader].fusion in FUSIBLE and not graph.ops[reader].traits.border


def _groups(graph: Graph, rules: Sequence[Rule], written: Sequence[bool]) -> list[int]:
    """Per op, its group: the producer and the readers of a value inside fusions."""
    pairs = (
        (value.producer[0], reader)
        for v, value in enumerate(graph.values) if value.shape
        for reader, _ in value.consumers
        if not written[v] or (rules[value.producer[0]].fusion == "loop" and _fuses(graph, rules, reader))
    )  # fmt: skip
    return components(len(graph.ops), pairs)
