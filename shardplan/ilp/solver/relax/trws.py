"""How much of an edge's cost its nodes may carry: costs shifted along the edges until neighbours agree on what is cheap.

Every edge sends each of its nodes a message m, which the node gains and the edge loses; (1) stays the same for every choice:

    c_i'[s] = c_i[s] + sum_e m_ei[s]         e_ij'[s, t] = e_ij[s, t] - m_ei[s] - m_ej[t]                        (6)

and the sum of all least entries of c' and e' is a lower bound of (1). Nodes take turns, forwards and backwards: each takes from
its edges what they can give, and tells every edge to a later (or, backwards, an earlier) node its share of that (sequential
tree-reweighted message passing: Kolmogorov, IEEE TPAMI 28(10), 2006). That climbs to, or near, the bound of the linear program over
nodes and edges. The shares are told, not yet given: in the end each node hands them to its edges to earlier nodes, where all columns
of a table then have the same least entry, and the least entries add up to the bound of the method. Elimination with split joints
(eliminate.py) can only raise that, however it splits them.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import ClassVar

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Messages, Problem

CALLS = 1e4  # table entries that visiting an edge is worth in numpy
LOADING = 4e8  # table entries that may be visited so before compiled code takes over, if it is there: it takes as long to load


class TRWS:
    """The messages of a problem's edges, improved in place. Every state must have a finite partner in every edge.

    Rounds are numpy's until a process has visited so many entries that loading compiled code would have taken no longer, or has loaded
    it. That does the same sums, so nobody can tell but by the time. `compiled` asks for it at once.

    Attributes:
        at_i, at_j: m_ei and m_ej, per edge.
        messages: all of them in a row.
        receiver: which of all nodes' states gains each of these numbers.
        earlier: whether the message's edge leads its receiver to an earlier node.
        entries: table entries that a round visits.
    """

    visited: ClassVar[float] = 0.0  # by numpy, in this process; inf once compiled code is loaded, -inf where it is not there

    def __init__(self, problem: Problem, compiled: bool = False, messages: Messages | None = None, deadline: Deadline = UNLIMITED):
        self.problem, self.deadline = problem, deadline
        sizes = np.array([e.cost.shape for e in problem.edges], dtype=np.int64).reshape(-1, 2)
        self.ends = np.cumsum(np.concatenate([[0], sizes.ravel()]))
        self.messages = np.zeros(self.ends[-1])
        parts = [self.messages[a:b] for a, b in pairwise(self.ends)]
        self.at_i, self.at_j = parts[0::2], parts[1::2]
        if messages:
            for edge, e in enumerate(problem.edges):
                for side, ends in ((self.at_i, (e.i, e.j)), (self.at_j, (e.j, e.i))):
                    side[edge][:] = messages.get(ends, 0.0)
        self.entries = 2.0 * float(sizes.prod(axis=1).sum())
        links: list[list[tuple[int, int, bool]]] = [[] for _ in problem.costs]  # (edge, 0 at its i and 1 at its j, comes first)
        for number, e in enumerate(problem.edges):
            links[e.i].append((number, 0, e.j > e.i))
            links[e.j].append((number, 1, e.i > e.j))
        self.links = links
        later = [sum(ahead for *_, ahead in row) for row in links]
        self.share = np.array([1.0 / max(n, len(row) - n, 1) for n, row in zip(later, links, strict=True)])
        self.start = np.cumsum([0, *map(len, problem.costs)])
        pairs = np.array([(e.i, e.j) for e in problem.edges], dtype=np.int64).reshape(-1, 2)
        lengths = np.diff(self.ends)
        self.receiver = np.repeat(self.start[pairs.ravel()] - self.ends[:-1], lengths) + np.arange(self.ends[-1])
        self.earlier = np.repeat((pairs > pairs[:, ::-1]).ravel(), lengths)
        self.compiled = self._compile() if compiled else None

    @functools.cached_property
    def near(self) -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]]]:
        """Of every node's edges: (its message, the other node's message, the table with i's states as rows, comes first)."""
        edges, ends = self.problem.edges, (self.at_i, self.at_j)
        return [
            [(ends[side][e], ends[1 - side][e], edges[e].cost.T if side else edges[e].cost, ahead) for e, side, ahead in row]
            for row in self.links
        ]

    def iterate(self, costs, n: int) -> None:
        """N times forwards and backwards, with these node costs."""
        if self.compiled is None and TRWS.visited > LOADING:
            self.compiled = self._compile()
        if self.compiled is not None:
            flat = np.concatenate([*costs, np.zeros(0)])
            for _ in range(n):
                self.deadline.check()
                self.compiled(flat)
            return
        TRWS.visited += n * (self.entries + CALLS * len(self.problem.edges))
        least = np.minimum.reduce  # half the time of `min` on small arrays
        order = range(len(self.near))
        for _ in range(n):
            for forward in (True, False):
                self.deadline.check()
                for i in order if forward else reversed(order):
                    cost = costs[i]
                    for mine, *_ in self.near[i]:
                        cost = cost + mine
                    kept = (cost - least(cost)) * self.share[i]
                    for mine, other, table, ahead in self.near[i]:
                        if ahead == forward:
                            given = least((kept - mine)[:, None] + table)
                            np.subtract(given, least(given), out=other)

    def _compile(self):
        """`rounds` as compiled code over flat arrays; None without numba, or where it may keep nothing."""
        try:
            from shardplan.ilp.solver.kernels import concatenate_tables, trws_rounds
        except (ImportError, RuntimeError):
            TRWS.visited = -np.inf
            return None
        TRWS.visited = np.inf
        problem = self.problem
        start = np.cumsum([0, *map(len, problem.costs)])
        pool, place, total = [], {}, 0
        for e in problem.edges:
            if id(e.cost) not in place:
                by_rows = e.cost.flags.c_contiguous or not e.cost.flags.f_contiguous
                place[id(e.cost)] = total, by_rows
                pool.append(e.cost if by_rows else e.cost.T)
                total += e.cost.size
        flat = []
        for row in self.links:
            for edge, side, ahead in row:
                at, by_rows = place[id(problem.edges[edge].cost)]
                mine, other = self.ends[2 * edge + side], self.ends[2 * edge + 1 - side]
                flat.append((mine, other, at, problem.edges[edge].cost.shape[1 - side], by_rows == (side == 0), ahead))
        links = np.array(flat, dtype=np.int64).reshape(-1, 6)
        first = np.cumsum([0, *map(len, self.links)])
        tables = concatenate_tables(pool, self.deadline)
        share, messages = self.share, self.messages  # without a cycle, for tables are large
        return lambda costs: trws_rounds(costs, start, first, links, tables, share, messages, 1)

    def reparametrized_costs(self, costs: np.ndarray) -> np.ndarray:
        """Costs of all nodes' states in a row, and what the messages add to them."""
        return costs + np.bincount(self.receiver, self.messages, len(costs))

    def commit(self, costs, unit: float) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
        """C' of (6) and the messages that the tables lose, after the last pass backwards; both rounded to multiples of `unit`."""
        flat = np.concatenate([*costs, np.zeros(0)])
        gained = self.reparametrized_costs(flat)
        over = gained - np.repeat(np.minimum.reduceat(gained, self.start[:-1]), np.diff(self.start))
        told = (over * np.repeat(self.share, np.diff(self.start)))[self.receiver]
        messages = np.rint(np.where(self.earlier, self.messages - told, self.messages) / unit) * unit
        flat = flat + np.bincount(self.receiver, messages, len(flat))
        parts = [messages[a:b] for a, b in pairwise(self.ends)]
        return [flat[a:b] for a, b in pairwise(self.start)], list(zip(parts[0::2], parts[1::2], strict=True))

    def sent_messages(self) -> Messages:
        """The messages as they are now."""
        told: Messages = {}
        for edge, e in enumerate(self.problem.edges):
            told[e.i, e.j], told[e.j, e.i] = self.at_i[edge].copy(), self.at_j[edge].copy()
        return told
