"""The working network of presolve: a mutable adjacency form of a problem, with a worklist of the nodes whose surroundings changed."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Edge, Problem, Usage

CHECK_EVERY = 1_000
"""Edges or usages between two checks of the deadline."""

UsageBlock = tuple[np.ndarray, np.ndarray]
"""Usages of one node: intervals [m, 2] and bytes [m, k]."""


class PresolveNetwork:
    """A problem as adjacency lists that reductions change in place.

    Attributes:
        costs: c_i, [k_i] each.
        adj: `adj[i][j]` is e_ij with i's states as rows; `adj[j][i]` is the same table transposed.
        usages: blocks of usages per node.
        alive: False for nodes that were removed.
        offset: constant part of the objective.
        decided: a node with one state and no edges, which takes over the usages of all others of that kind.
        feasible: False once a node has no state.
        worklist: nodes whose costs, edges or usages changed, in order of arrival.
    """

    def __init__(self, problem: Problem, deadline: Deadline = UNLIMITED):
        self.costs: list[np.ndarray] = list(problem.costs)
        self.adj: list[dict[int, np.ndarray]] = [{} for _ in self.costs]
        self.usages: list[list[UsageBlock]] = [[] for _ in self.costs]
        self.alive = [True] * len(self.costs)
        self.limit = problem.limit
        self.offset = 0.0
        self.decided: int | None = None
        self.feasible = all(len(c) for c in self.costs)
        self.worklist: OrderedDict[int, None] = OrderedDict()
        self._support: dict[int, tuple] = {}
        transposed = {id(e.cost): e.cost.T for e in problem.edges}
        for number, e in enumerate(problem.edges):
            self.add_edge(e.i, e.j, e.cost, transposed[id(e.cost)])
            if number % CHECK_EVERY == 0:
                deadline.check()
        if problem.limit is not None:
            for u in problem.usages:
                if u.hi > u.lo:
                    self.usages[u.node].append((np.array([(u.lo, u.hi)]), u.bytes[None, :]))
        self.worklist = OrderedDict.fromkeys(range(len(self.costs)))

    def touch(self, i: int) -> None:
        """Appends a node to the worklist."""
        self.worklist[i] = None

    def add_edge(self, i: int, j: int, table: np.ndarray, transposed: np.ndarray | None = None) -> None:
        """Adds a table [k_i, k_j] to e_ij; parallel edges become one."""
        if j in self.adj[i]:
            table, transposed = self.adj[i][j] + table, None
        self.adj[i][j], self.adj[j][i] = table, table.T if transposed is None else transposed
        self.touch(i)
        self.touch(j)

    def remove_node(self, i: int) -> None:
        """Removes a node, its edges and its usages."""
        for j in list(self.adj[i]):
            del self.adj[i][j], self.adj[j][i]
            self.touch(j)
        self.alive[i], self.usages[i] = False, []
        self.worklist.pop(i, None)

    def usage(self, i: int) -> UsageBlock | None:
        """All usages of a node as one block."""
        if len(self.usages[i]) > 1:
            intervals, amounts = zip(*self.usages[i], strict=True)
            self.usages[i] = [(np.concatenate(intervals), np.concatenate(amounts))]
        return self.usages[i][0] if self.usages[i] else None

    def support(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Mask of the rows with a finite entry, and f if column j is finite in row f[j] only (a functional dependency), else None."""
        if id(table) not in self._support:
            finite, any_of = np.isfinite(table), np.logical_or.reduce  # half the time of `any` on small arrays
            functional = np.count_nonzero(finite) == table.shape[1] and any_of(finite, axis=0).all()
            f = finite.argmax(axis=0) if functional else None
            self._support[id(table)] = (any_of(finite, axis=1), f, table)  # holds the table, so that its id is not reused
        return self._support[id(table)][:2]

    def to_problem(self) -> tuple[Problem, tuple[int, ...]]:
        """The problem of the nodes alive, and their numbers in this network."""
        nodes = tuple(i for i, alive in enumerate(self.alive) if alive)
        number = {i: n for n, i in enumerate(nodes)}
        edges = tuple(Edge(number[i], number[j], t) for i in nodes for j, t in self.adj[i].items() if i < j)
        usages = tuple(
            Usage(number[i], int(lo), int(hi), amount)
            for i in nodes
            if (block := self.usage(i)) is not None
            for (lo, hi), amount in zip(*block, strict=True)
        )
        return Problem(tuple(self.costs[i] for i in nodes), edges, usages, self.limit if usages else None), nodes
