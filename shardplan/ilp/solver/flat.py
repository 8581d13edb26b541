"""The adjacency of a network as flat arrays (compressed sparse rows), which TRW-S, local search, kernels and propagation share."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardplan.ilp.solver.problem import Edge


@dataclass(frozen=True)
class FlatNetwork:
    """Every edge as two arcs, sorted by tail; the arcs of node i are first[i] .. first[i + 1], in the order of the edges.

    Attributes:
        start: [n + 1], first state of each node in the row of all nodes' states.
        first: [n + 1], first arc of each node.
        head: [2 m], node at the arc's other end.
        edge: [2 m], number of the arc's edge.
        side: [2 m], 0 if the tail is the edge's i, 1 if it is its j.
        edges: the edges.
    """

    start: np.ndarray
    first: np.ndarray
    head: np.ndarray
    edge: np.ndarray
    side: np.ndarray
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, costs: tuple[np.ndarray, ...], edges: tuple[Edge, ...]) -> FlatNetwork:
        """The adjacency of nodes with these costs, [k_i] each, and edges."""
        ends = np.array([(e.i, e.j) for e in edges], dtype=np.int64).reshape(-1, 2)
        order = np.argsort(ends.ravel(), kind="stable")
        degrees = np.bincount(ends.ravel(), minlength=len(costs))
        return cls(
            start=np.cumsum([0, *map(len, costs)]),
            first=np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64),
            head=ends[:, ::-1].ravel()[order],
            edge=order // 2,
            side=order % 2,
            edges=edges,
        )

    @property
    def tail(self) -> np.ndarray:
        """[2 m], the node that an arc belongs to."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @functools.cached_property
    def near(self) -> list[list[tuple[int, np.ndarray]]]:
        """Of every node's arcs: (head, table with the tail's states as rows)."""
        edges = self.edges
        arcs = zip(self.head.tolist(), self.edge.tolist(), self.side.tolist(), strict=True)
        flat = [(j, edges[e].cost.T if side else edges[e].cost) for j, e, side in arcs]
        return [flat[a:b] for a, b in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True)]
