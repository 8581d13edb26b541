"""Which products XLA for GPU may merge into one kernel: those of one loop and pass that read one array as the same operand.

    x @ q, x @ k, x @ v      one product x @ [q, k, v], of which readers take their columns

They are one kernel if they read it in one layout, none waits for another, and one of any two is small. It reads the others where they
are if their own dims have whole fragments; else another kernel writes them side by side before.

Facts: fusion-merges-products, fusion-merged-operands.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.ir.graph import Graph
from shardplan.strategies.rule import Rule

MERGED_PRODUCT_BYTES = 64 << 20
"""Of two products that XLA merges one takes at most this, operands and result (`xla_gpu_dot_merger_threshold_mb`)."""


FRAGMENT = 64
"""Elements of which the own dims of all merged operands are multiples if the product reads them where they are."""


def sharing_products(graph: Graph, rules: Sequence[Rule]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Groups of products that share an operand, each as (op, operand), in program order."""
    shared: dict[tuple, list[tuple[int, int]]] = {}
    for j, op in enumerate(graph.ops):
        if op.traits.matmul and rules[j].fusion == "none" and j not in graph.dead:
            numbers = str(op.params.get("dimension_numbers"))
            for k, v in enumerate(op.inputs):
                if v is not None:
                    key = graph.original(v), k, numbers, op.outs[0].dtype, op.loop, op.phase
                    shared.setdefault(key, []).append((j, k))
    return tuple(tuple(some) for some in shared.values() if len(some) > 1)
