"""Which fused kernels schedule and liveness know, by number: where an op writes, which compute it, and what they may not write over.

    op               own   inside
    y = x * 2         -1     1, 2      not written: the kernels of both readers compute it
    s = y.sum(0)       1               writes s, and is the first kernel that reads x
    z = y / s          2               waits for s, and reads x again

Which ops are one kernel: `kernel_groups.py`.

Facts: liveness-rows-kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.ir.graph import Graph
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import fuses, read_array, read_by_fusion
from shardplan.xla_model.kernel_groups import Kernel, Kernels


@dataclass(frozen=True)
class FusedKernels:
    """Which kernels run which ops.

    Attributes:
        own: per op, the number of the fused kernel in which it writes; -1 if it writes in none.
        inside: per op that writes nothing, the numbers of the fused kernels that compute it.
        rows: numbers of the kernels that keep rows on chip.
        reduced: (kernel number, array) for arrays of which such a kernel reduces rows.
        inputs: kernel number -> how many inputs and constants of the step only it reads; iotas count, too, as all that has no operands.
        products: op -> the product behind which its kernel computes it.
    """

    own: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    rows: frozenset[int]
    reduced: frozenset[tuple[int, int]]
    inputs: Mapping[int, int]
    products: Mapping[int, int]

    def overwrites(self, at: int, v: int) -> bool:
        """Whether the kernel in which op `at` writes may write over an array: not where it reduces rows of it."""
        return (self.own[at], v) not in self.reduced


def fused_kernels(graph: Graph, rules: Sequence[Rule], kernels: Kernels) -> FusedKernels:
    """The kernels of a step by number. Products have a number, too, for what is computed inside them; what they write is their own."""
    instead, ends = kernels.instead, frozenset(kernels.instead.values())
    numbers: dict[Kernel, int] = {key: n for n, key in enumerate(dict.fromkeys(kernels.own))}
    own, inside, rows, readers = [], [], set[int](), dict[int, set[Kernel]]()
    for at, op in enumerate(graph.ops):
        writes = any(kernels.written[v] or v in instead for v in op.outputs)
        row = op.traits.loop_slice and read_by_fusion(graph, rules, op)
        fused = writes and ends.isdisjoint(op.outputs) and (fuses(graph, rules, at) or op.traits.matmul or row)
        own.append(numbers[kernels.own[at]] if fused else -1)
        computed = () if writes or (op.traits.moves_nothing and not op.traits.copy) else kernels.inside[at]
        inside.append(tuple(sorted(numbers[key] for key in computed)))
        if kernels.rows.behind[at]:
            rows.update((own[at],) if fused else inside[at])
        for v in op.inputs if not op.traits.border and rules[at].fusion != "view" else ():
            if v is not None and not graph.ops[graph.values[root := read_array(graph, rules, v)].producer[0]].inputs:
                readers.setdefault(root, set()).update(kernels.inside[at])
    inputs = Counter(numbers[key] for some in readers.values() if len(some) == 1 for key in some)
    reduced = {
        (number, v) for at in kernels.rows.fused - graph.dead for v in _sources(graph, kernels.written, at) for number in inside[at]
    }
    return FusedKernels(tuple(own), tuple(inside), frozenset(rows), frozenset(reduced), inputs, kernels.products)


def _sources(graph: Graph, written: Sequence[bool], at: int) -> set[int]:
    """Arrays in memory, and copies of them, that the kernel of an op reads to compute its operands."""
    queue = [v for v in graph.ops[at].inputs if v is not None]
    known = set(queue)
    for v in queue:
        maker = graph.ops[graph.values[v].producer[0]]
        new = {u for u in maker.inputs if u is not None} - known if not written[v] else set[int]()
        queue += sorted(new)
        known |= new
    return known
