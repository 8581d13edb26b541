"""TRW-S: shifts costs along the edges, by messages (6), until the sum of all least entries is a good lower bound.

Nodes take turns, forwards and backwards. A node takes from its edges what they can give, and sends its share of the sum along every
edge to a later (or, backwards, an earlier) node. `commit` sends the last shares too, to earlier nodes; then all columns of a table have
the same least entry, and the least entries add up to the bound. Mini-buckets (buckets.py) can only raise it, however they partition.

Also known as sequential tree-reweighted message passing (Kolmogorov, IEEE TPAMI 28(10), 2006); (6) as reparametrization, as
equivalence-preserving transformation, or as soft arc consistency.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Messages, Problem

EDGE_OVERHEAD = 1e4  # table entries that the visit of an edge costs in numpy
LOADING = 4e8  # table entries that numpy visits in the time in which the compiled kernels load


class TRWS:
    """The messages of a problem's edges, improved in place. Every state needs a finite partner in every edge.

    Numpy and the compiled kernel (kernels.trws_round) compute the same sums, to the last bit. Numpy is used until all solves of the
    process together have visited as many table entries as loading the kernels would have cost, or if they cannot be loaded.

    Attributes:
        visited: table entries that numpy has visited in this process.
    """

    visited: ClassVar[float] = 0.0

    def __init__(
        self, problem: Problem, compiled: bool | None = None, messages: Messages | None = None, deadline: Deadline = UNLIMITED
    ):
        """`compiled` chooses the kernel (True), numpy (False), or numpy first (None, see above); `messages` are to start from."""
        self.problem, self.flat, self.deadline = problem, problem.flat, deadline
        sizes = np.array([e.cost.shape for e in problem.edges], dtype=np.int64).reshape(-1, 2)
        self.ends = np.cumsum(np.concatenate([[0], sizes.ravel()]))  # [2 m + 1], first entry of each message
        self.messages = np.zeros(self.ends[-1])  # all messages in a row: of each edge the one to i, then the one to j
        if messages:
            for e, (to_i, to_j) in zip(problem.edges, self._by_edge(self.messages), strict=True):
                to_i[:], to_j[:] = messages.get((e.i, e.j), 0.0), messages.get((e.j, e.i), 0.0)
        self.entries = 2.0 * float(sizes.prod(axis=1).sum())  # table entries that one round visits
        first, self._to_later = self.flat.first, self.flat.head > self.flat.tail
        later = np.diff(np.concatenate([[0], np.cumsum(self._to_later)])[first])
        self.share = 1.0 / np.maximum(np.maximum(later, np.diff(first) - later), 1)
        pairs = np.array([(e.i, e.j) for e in problem.edges], dtype=np.int64).reshape(-1, 2)
        lengths = np.diff(self.ends)
        # of every entry: the state, in the row of all nodes' states, that gains it
        self.receiver = np.repeat(self.problem.start[pairs.ravel()] - self.ends[:-1], lengths) + np.arange(self.ends[-1])
        self.from_earlier = np.repeat((pairs > pairs[:, ::-1]).ravel(), lengths)  # whether each entry is sent by an earlier node
        # one round of the compiled kernel; None while numpy is used
        self.compiled, self._automatic = self._compile() if compiled else None, compiled is None

    def _by_edge(self, row: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of a row of messages: (to i, to j) of every edge."""
        parts = [row[a:b] for a, b in pairwise(self.ends.tolist())]
        return list(zip(parts[0::2], parts[1::2], strict=True))

    @functools.cached_property
    def _near(self) -> list[list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]]]:
        """Of every node's arcs: (message to the node, message to the head, table with the node's states as rows, head comes later)."""
        messages = self._by_edge(self.messages)
        arcs = zip(self.flat.edge.tolist(), self.flat.side.tolist(), self._to_later.tolist(), strict=True)
        ends = [(messages[e][side], messages[e][1 - side], ahead) for e, side, ahead in arcs]
        return [
            [(mine, other, table, ahead) for (mine, other, ahead), (_, table) in zip(ends[a:b], near, strict=True)]
            for near, (a, b) in zip(self.flat.near, pairwise(self.flat.first.tolist()), strict=True)
        ]

    def iterate(self, costs: np.ndarray, rounds: int) -> None:
        """So many rounds, each forwards and backwards, with these node costs, [states of all nodes]."""
        if self.compiled is None and self._automatic and (kernels_loaded() or TRWS.visited > LOADING):
            self.compiled = self._compile()
        if self.compiled is not None:
            for _ in range(rounds):
                self.deadline.check()
                self.compiled(costs)
            return
        by_node = self.problem.by_node(costs)
        TRWS.visited += rounds * (self.entries + EDGE_OVERHEAD * len(self.problem.edges))
        for _ in range(rounds):
            self._sweep(by_node, forward=True)
            self._sweep(by_node, forward=False)

    def _sweep(self, costs: list[np.ndarray], forward: bool) -> None:
        """One pass over all nodes, in numpy; the compiled twin is kernels.trws_round."""
        self.deadline.check()
        least, order = np.minimum.reduce, range(len(self._near))  # half the time of `min` on small arrays
        for i in order if forward else reversed(order):
            cost = costs[i]
            for mine, *_ in self._near[i]:
                cost = cost + mine
            sent = (cost - least(cost)) * self.share[i]
            for mine, other, table, ahead in self._near[i]:
                if ahead == forward:
                    message = least((sent - mine)[:, None] + table)
                    np.subtract(message, least(message), out=other)

    def _compile(self) -> Callable[[np.ndarray], None] | None:
        """One round of the compiled kernel; None if numba is missing, or cannot cache what it compiles."""
        self._automatic = False
        if not kernels_loadable():
            return None
        from shardplan.ilp.solver.kernels import pool_tables, trws_round

        flat, edges = self.flat, self.problem.edges
        by_rows = np.array([e.cost.flags.c_contiguous or not e.cost.flags.f_contiguous for e in edges], dtype=bool)
        keyed = [(id(e.cost), e.cost if rows else e.cost.T) for e, rows in zip(edges, by_rows, strict=True)]
        tables, at = pool_tables(keyed, self.deadline)
        mine, other = 2 * flat.edge + flat.side, 2 * flat.edge + 1 - flat.side
        by_rows = by_rows[flat.edge] == (flat.side == 0)
        columns = (self.ends[mine], self.ends[other], at[flat.edge], np.diff(self.ends)[other], by_rows, self._to_later)
        links = np.stack(columns, axis=1).astype(np.int64)
        start, share, messages = self.problem.start, self.share, self.messages  # not self: a cycle would keep large tables
        return lambda costs: trws_round(costs, start, flat.first, links, tables, share, messages)

    def reparametrized_costs(self, costs: np.ndarray) -> np.ndarray:
        """C' of (6), given c, [states of all nodes]."""
        return costs + np.bincount(self.receiver, self.messages, len(costs))

    def commit(self, costs: np.ndarray, unit: float) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
        """The reparametrization (6) of the node costs after the last backward pass, with messages rounded to multiples of `unit`.

        Returns c' of every node, and of every edge the messages (to i, to j) that its table loses.
        """
        start, reduced = self.problem.start, self.reparametrized_costs(costs)
        excess = reduced - np.repeat(np.minimum.reduceat(reduced, start[:-1]), np.diff(start))
        sent = (excess * np.repeat(self.share, np.diff(start)))[self.receiver]
        messages = np.rint(np.where(self.from_earlier, self.messages - sent, self.messages) / unit) * unit
        return self.problem.by_node(costs + np.bincount(self.receiver, messages, len(costs))), self._by_edge(messages)

    def sent_messages(self) -> Messages:
        """A copy of the messages, by receiving node and sending node."""
        sent: Messages = {}
        for e, (to_i, to_j) in zip(self.problem.edges, self._by_edge(self.messages), strict=True):
            sent[e.i, e.j], sent[e.j, e.i] = to_i.copy(), to_j.copy()
        return sent


@functools.cache
def kernels_loadable() -> bool:
    """Whether the compiled kernels can be imported; loads them. Tried once: a failed import is not remembered by Python."""
    try:
        import shardplan.ilp.solver.kernels  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def kernels_loaded() -> bool:
    """Whether this process has imported the compiled kernels already."""
    return "shardplan.ilp.solver.kernels" in sys.modules
