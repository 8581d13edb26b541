"""Which ops of a step one kernel of XLA for GPU runs, once it is known which values are in memory.

A kernel is a group of fused ops between materialised values. What stands behind a reduction, a product or a collective waits for it in
a later kernel, and reads again what an earlier one read:

    y -> cast -+-> sum ------+            kernel 1 reads y, writes the sum
               +-> minus <---+-> cast     kernel 2 reads y and the sum, writes the normalised y

A reduction of rows may stay on chip, inside the kernels that read its result (`row_kernels.py`).

Facts: fusion-loop, fusion-multi-output, fusion-across-passes, fusion-later, fusion-concatenate, fusion-overlapping-parts,
fusion-rows-exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from shardplan._jax import itemsize
from shardplan.ir.graph import Graph, Op, components
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import absorbs, fuses, read_by_fusion
from shardplan.xla_model.overlapping_parts import moves_elements, overlapping
from shardplan.xla_model.product_kernels import by_products, written_instead
from shardplan.xla_model.row_kernels import RowKernels, row_kernels

EXPONENTIALS = ("exp", "exp2")
"""What costs more to compute again than a number per row to write (fact: fusion-rows-exponentials)."""
EXPENSIVE = ("tanh", "atan", "sin", "cos", "pow", "erfc")
"""What costs more to compute again than to write and read (fact: fusion-expensive)."""
SHORTEST = ("tanh", "atan")
"""Those that take the least time, `fusion_estimate.TANH_S`."""
Kernel = tuple
"""Group of ops, how many kernels it waits for, whether it updates the state, loop, and the shapes and dims of its reductions."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of a step.

    Attributes:
        own: per op, the kernel in which it writes.
        inside: per op, those that compute it: its own where it writes, all its readers' where it does not.
        written: per value, whether a kernel writes it; what stays on chip with its row is not.
        rows: the reductions that stay there.
        instead: result of a product that its kernel does not write -> what it writes (`written_instead`).
        products: op -> the product behind which its kernel computes it (`by_products`).
    """

    own: list[Kernel]
    inside: list[set[Kernel]]
    written: list[bool]
    rows: RowKernels
    instead: dict[int, int]
    products: dict[int, int]


def is_expensive(op: Op, recomputed_bytes: float) -> bool:
    """Whether kernels do not compute an op again; a tanh they do from so many bytes an element (`FusionEstimate.tanh_bytes`)."""
    return op.primitive in EXPENSIVE and not (op.primitive in SHORTEST and itemsize(op.outs[0].dtype) >= recomputed_bytes)


def kernels_of(
    graph: Graph,
    rules: Sequence[Rule],
    written: Sequence[bool],
    sums: Sequence[bool],
    rows: RowKernels,
    recomputed_bytes: float = inf,
    merged: bool = True,
) -> Kernels:
    """The kernels where `written` values are in memory. A reduction of exponentials that several would compute is written.

    Unless `merged`, kernels with something expensive are apart from later ones that could hold it (fact: fusion-later): how long each
    waits for what.
    """
    expensive = frozenset(at for at, op in enumerate(graph.ops) if merged and is_expensive(op, recomputed_bytes))
    first = _grouped_kernels(graph, rules, written, sums, rows, expensive)
    alone, exponentials = set[int](), [False] * len(graph.ops)
    for at, op in enumerate(graph.ops):
        made = [graph.values[v].producer[0] for v in op.inputs if v is not None and not first.written[v]]
        exponentials[at] = op.primitive in EXPONENTIALS or any(exponentials[i] for i in made)
        if at in first.rows.fused and exponentials[at] and len(first.inside[at]) > 1:
            alone.add(at)
            exponentials[at] = False
    rows = row_kernels(graph, rules, rows.orders, frozenset(alone)) if alone else rows
    return _grouped_kernels(graph, rules, written, sums, rows, expensive) if alone else first


def _grouped_kernels(
    graph: Graph,
    rules: Sequence[Rule],
    written: Sequence[bool],
    sums: Sequence[bool],
    rows: RowKernels,
    expensive: Collection[int],
) -> Kernels:
    """The kernels with these reductions of rows inside.

    One kernel reduces arrays of one shape over the same dims; what is written on the way is written by any of its reductions.
    """
    written = list(written)
    for v in rows.statistics:
        maker = graph.ops[graph.values[v].producer[0]]
        written[v] &= not all(
            absorbs(graph, rules, maker, reader, prologue=False) for reader in graph.readers(v) if reader not in graph.dead
        )
    products = by_products(graph, rules, instead := written_instead(graph, rules, written))
    groups, homes = _groups(graph, rules, written, products), []
    levels: list[int] = []  # per op, the reductions, products and partial sums that it waits for, one behind the other
    over = [
        _reduction(op) if rule.fusion == "reduce" and at not in rows.fused else None
        for at, (op, rule) in enumerate(zip(graph.ops, rules, strict=True))
    ]
    first: dict[Kernel, tuple] = {}
    parts = overlapping(graph, rules)
    for at, op in enumerate(graph.ops):
        made, elsewhere = ((v, graph.values[v].producer[0]) for v in op.inputs if v is not None), moves_elements(op)
        apart = ((elsewhere and graph.original(v) in parts, v, i) for v, i in made)
        waits = (levels[i] + (written[v] and (behind or i in products or _ends(rules, sums, i))) for behind, v, i in apart)
        levels.append(levels[products[at]] if at in products else max(waits, default=0))
        alone = op.traits.reads_part and not read_by_fusion(graph, rules, op)
        alone |= op.traits.loop_stack or (op.traits.matmul and rules[at].fusion == "none")
        home = (-1 - at if alone else groups[at], levels[at], op.phase == "update", op.runs_in)
        homes.append(homes[products[at]] if at in products else home)
        if (reduced := over[at]) and not rows.behind[at]:
            first.setdefault(homes[at], reduced)
    joined = _joined(graph, rules, written)
    zeros = (op.scalar_broadcast and written[op.outputs[0]] for op in graph.ops)
    pairs = zip(homes, rows.behind, joined, zeros, strict=True)
    stays = {home for home, *some in pairs if home in first or any(some)}  # reduces, keeps rows, concatenates or writes zeros
    homes = _merged_into_later(graph, rules, written, sums, homes, {homes[at] for at in expensive} - stays)
    own = [
        (*key, -1 - at if rows.behind[at] or joined[at] else reduced or first.get(key))
        for at, (key, reduced) in enumerate(zip(homes, over, strict=True))
    ]
    return Kernels(own, computed_in(graph, written, own), written, rows, instead, products)


def computed_in(
    graph: Graph, written: Sequence[bool], own: Sequence[Kernel], counts: Callable[[int], bool] = lambda reader: True
) -> list[set[Kernel]]:
    """Per op, the kernels that compute it: its own where it writes, else those of all readers that count."""
    out: list[set[Kernel]] = [set() for _ in graph.ops]
    for at in reversed(range(len(graph.ops))):
        for v in () if at in graph.dead else graph.ops[at].outputs:
            if not written[v]:
                out[at].update(*(out[reader] for reader, _ in graph.values[v].consumers if counts(reader)))
            elif not graph.ops[at].traits.moves_nothing:
                out[at].add(own[at])
    return out


Home = tuple[int, int, bool, int]
"""Group of ops, how many kernels they wait for, whether they update the state, loop."""


def _merged_into_later(
    graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool], homes: Sequence[Home], movable: Set[Home]
) -> list[Home]:
    """Per op, where it is computed once each `movable` kernel is part of the next one of its group, unless that one waits for it.

    The next one waits for a kernel, and for those that are part of it by then, if it needs what other groups make of their results, or
    a reduction or partial sum that they write.
    """
    later: dict[tuple, list[Home]] = {}
    for home in sorted({home for home in homes if home[0] >= 0}, key=lambda home: home[:2]):
        later.setdefault((home[0], *home[2:]), []).append(home)
    chains = [chain for chain in later.values() if len(chain) > 1 and not movable.isdisjoint(chain)]
    bits = {home: 1 << n for n, home in enumerate(home for chain in chains for home in chain)}
    if not bits:
        return [*homes]
    behind, before = [0] * len(homes), dict.fromkeys(bits, 0)  # kernels that an op, and all ops of a kernel, wait for by way of others
    for at, op in enumerate(graph.ops):
        for v in op.inputs:
            if v is not None:
                i = graph.values[v].producer[0]
                leaves = homes[i][0] != homes[at][0] or (written[v] and _ends(rules, sums, i))
                behind[at] |= behind[i] | (bits.get(homes[i], 0) if leaves else 0)
        if homes[at] in before:
            before[homes[at]] |= behind[at]
    moved: dict[Home, Home] = {}
    for chain in chains:
        joined = 0
        for home, following in pairwise(chain):
            joined |= bits[home]
            if home in movable and not joined & before[following]:
                moved[home] = following
            else:
                joined = 0
    for home in reversed(moved):
        moved[home] = moved.get(moved[home], moved[home])
    return [moved.get(home, home) for home in homes]


def _joined(graph: Graph, rules: Sequence[Rule], written: Sequence[bool]) -> list[bool]:
    """Per op, whether its kernel concatenates arrays; such a kernel writes one result (fact: fusion-concatenate)."""
    out: list[bool] = []
    for at, op in enumerate(graph.ops):
        made = (graph.values[v].producer[0] for v in op.inputs if v is not None and not written[v])
        out.append(op.traits.concatenates or ((op.traits.copy or fuses(graph, rules, at)) and any(out[i] for i in made)))
    return out


def _reduction(op: Op) -> tuple:
    """What reductions of one kernel have in common: shapes and dims."""
    over = next((op.params[name] for name in ("axes", "dimensions", "dimension_numbers", "window_dimensions") if name in op.params), ())
    return tuple(x.shape for x in op.ins), str(over)


def _ends(rules: Sequence[Rule], sums: Sequence[bool], at: int) -> bool:
    """Whether what reads the result of an op, where that is written, waits for its kernel to end."""
    return rules[at].fusion in ("reduce", "none") or sums[at]


def _groups(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], products: Collection[int]) -> list[int]:
    """Per op, its group: the producer and the readers of a value inside fusions; none of what `products` compute is in one."""
    pairs = (
        (maker, reader)
        for v, value in enumerate(graph.values) if value.shape and (maker := value.producer[0]) not in products
        for reader, _ in value.consumers
        if reader not in products and (not written[v] or (rules[maker].fusion == "loop" and fuses(graph, rules, reader)))
    )  # fmt: skip
    return components(len(graph.ops), pairs)
