"""Which reshards two contradicting pins cause.

A region is a set of ops between which arrays are read in the layouts they are made in. An array that is resharded between two regions,
each with a pin, is a conflict of the pins nearest to it on either side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from shardplan.ir.graph import Graph, components

AGAINST = ("all-gather", "all-to-all", "collective-permute")
"""Collectives between shardings that contradict each other; the other kinds complete partial sums."""


def conflicts(graph: Graph, changed: Collection[tuple[int, int]], pinned: Mapping[int, str]) -> dict[tuple[int, int], tuple[str, str]]:
    """The (op, operand) resharded between regions that are pinned -> their nearest pins, in program order.

    Args:
        graph: the step.
        changed: (op, operand) of operands that are read in another layout than they are made in.
        pinned: op -> its pin in words.
    """
    reads = [(i, k, graph.values[v].producer[0]) for i, op in enumerate(graph.ops) for k, v in enumerate(op.inputs) if v is not None]
    near: list[list[int]] = [[] for _ in graph.ops]
    for i, k, j in reads:
        if (i, k) not in changed:
            near[i].append(j)
            near[j].append(i)
    region = components(len(near), ((i, j) for i, found in enumerate(near) for j in found))
    nearest = {i: i for i in sorted(pinned)}  # op -> the pin of its region that is the fewest arrays away, the first of the program
    queue = deque(nearest)
    while queue:
        for j in near[i := queue.popleft()]:
            if j not in nearest:
                nearest[j] = nearest[i]
                queue.append(j)
    out = {}
    for i, k, j in reads:
        if (i, k) in changed and region[i] != region[j] and i in nearest and j in nearest:
            first, second = sorted((nearest[i], nearest[j]))
            out[i, k] = pinned[first], pinned[second]
    return out
