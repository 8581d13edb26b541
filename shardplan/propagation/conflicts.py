"""Where regions that grew from different pins meet.

Ops are of one region when arrays get from one to the other in the layouts in which they are made. Where an array has to be sent from
one region to another and each of them holds a pin, the pins disagree, and whoever has pinned both pays for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np
from scipy.sparse import coo_array  # scipy is a requirement of jax itself
from scipy.sparse.csgraph import connected_components

from shardplan.ir.graph import Graph

Edge = tuple[int, int]
"""An op and the number of its operand."""

AGAINST = ("all-gather", "all-to-all", "collective-permute")
"""What is sent because two layouts split an array in ways that do not go together; the others finish sums."""


def conflicts(graph: Graph, changed: Collection[Edge], pinned: Mapping[int, str]) -> dict[Edge, tuple[str, str]]:
    """Of the changed edges, those between pinned regions: the pins nearest to either side, in the program's order.

    Args:
        changed: edges whose op takes the array in another layout than it is made in.
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
    nearest = _nearest(near, pinned)
    out = {}
    for i, k in changed:
        v = graph.ops[i].inputs[k]
        assert v is not None
        j = graph.values[v].producer[0]
        if region[i] != region[j] and nearest[i] >= 0 and nearest[j] >= 0:
            first, second = sorted((nearest[i], nearest[j]))
            out[i, k] = pinned[first], pinned[second]
    return out


def _nearest(near: list[list[int]], pinned: Collection[int]) -> list[int]:
    """[op] -> the pinned op of its region that is the fewest arrays away, of several the first of the program; -1 where none is."""
    nearest = [i if i in pinned else -1 for i in range(len(near))]
    queue = deque(sorted(pinned))
    while queue:
        i = queue.popleft()
        for j in near[i]:
            if nearest[j] < 0:
                nearest[j] = nearest[i]
                queue.append(j)
    return nearest
