"""Which states an op has in a cost network: blocks of its strategies, which differ in whose buffer the op reads.

A block has a state per strategy s:

    block 0     strategy s
    block 1     of an op that may alias: strategy s with a buffer of its own; block 0 is the same array, free of memory, and allowed
                only if layouts agree
    last block  of a retainable copy: strategy s, with the array that an earlier phase read: no collective, and allowed only if the
                earlier reader took that layout; the array stays in memory from there on
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from shardplan.ir.graph import Graph
from shardplan.xla_model.liveness import takes_over_buffer

PS = 1e12
"""Picoseconds per second: costs of a cost network are whole picoseconds, so that sums are exact."""

SMALL_COPY = 1e-3
"""Share of the memory limit below which a copy has no states of its own: the problem takes it for its original."""


@dataclass(frozen=True, eq=False)
class StateBlocks:
    """Ops with a block for the same array and one for a buffer of their own, and copies that may retain an earlier phase's array."""

    aliasing: frozenset[int]
    retainable: Collection[int]

    @classmethod
    def of(cls, graph: Graph, materialised: Sequence[bool], limit: float | None) -> StateBlocks:
        """The blocks of a graph's ops; without a memory limit (bytes per device) nothing aliases. `materialised` as in `xla_model`."""
        small = inf if limit is None else SMALL_COPY * limit
        copies = [i for i, op in enumerate(graph.ops) if op.traits.alias and graph.values[op.outputs[0]].bytes > small]
        aliasing = frozenset(i for i in copies if graph.ops[i].inputs[0] is not None and not takes_over_buffer(graph, materialised, i))
        return cls(aliasing, graph.retainable_from)

    def count(self, i: int) -> int:
        """Number of blocks of op i."""
        return 1 + (i in self.aliasing) + (i in self.retainable)
