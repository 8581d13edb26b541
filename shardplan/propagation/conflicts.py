"""Which reshards two pins cause that disagree.

A region is a set of ops between which arrays are read in the layouts they are made in. An array that is resharded between two regions,
each with a pin, is a conflict of the pins nearest to it on either side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np
from scipy.sparse import coo_array  # scipy is a requirement of jax itself
from scipy.sparse.csgraph import connected_components

from shardplan.ir.graph import Graph

Edge = tuple[int, int]
"""(op, operand)."""

AGAINST = ("all-gather", "all-to-all", "collective-permute")
"""Collectives between shardings that contradict each other; the other kinds complete partial sums."""


def conflicts(graph: Graph, changed: Collection[Edge], pinned: Mapping[int, str]) -> dict[Edge, tuple[str, str]]:
    """The resharded edges between regions that are pinned -> their nearest pins, in program order.

    Args:
        graph: the step.
        changed: edges whose op reads the array in another layout than it is made in.
        pinned: op -> its pin in words.
    """
    near: list[list[int]] = [[] for _ in graph.ops]
    for i, op in enumerate(graph.ops):
        for k, v in enumerate(op.inputs):
            if v is not None and (i, k) not in changed:
                j = graph.values[v].producer[0]
                near[i].append(j)
                near[j].append(i)
    ends = [i for i, found in enumerate(near) for _ in found], [j for found in near for j in found]
    _, region = connected_components(coo_array((np.ones(len(ends[0])), ends), shape=(len(near), len(near))), directed=False)
    nearest = _nearest_pin(near, pinned)
    out = {}
    for i, k in changed:
        v = graph.ops[i].inputs[k]
        assert v is not None
        j = graph.values[v].producer[0]
        if region[i] != region[j] and nearest[i] >= 0 and nearest[j] >= 0:
            first, second = sorted((nearest[i], nearest[j]))
            out[i, k] = pinned[first], pinned[second]
    return out


def _nearest_pin(near: list[list[int]], pinned: Collection[int]) -> list[int]:
    """[op] -> the pinned op of its region that is the fewest arrays away, of several the first of the program; -1 if there is none."""
    nearest = [i if i in pinned else -1 for i in range(len(near))]
    queue = deque(sorted(pinned))
    while queue:
        i = queue.popleft()
        for j in near[i]:
            if nearest[j] < 0:
                nearest[j] = nearest[i]
                queue.append(j)
    return nearest
