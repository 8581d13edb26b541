"""Bucket elimination: the minimum of (1) alone, exact on networks of small treewidth, and a lower bound of it on others.

Nodes are eliminated one by one, smallest bucket table first. The bucket table of i is the sum, over the states of i and its neighbors
N, of all tables that mention i; its minimum over i is a message, a table over N:

    m_i[x_N] = min_s ( c_i[s] + sum_j e_ij[s, x_j] + messages that mention i )

The messages over no node sum up to the minimum. Where a bucket table would exceed a given number of entries, its tables are partitioned
into mini-buckets, each minimized separately: the sum is then a lower bound, and the states decoded backwards are a heuristic answer.
Also known as nonserial dynamic programming (Bertelè and Brioschi 1972).

Node costs and tables may differ from pass to pass (prices on memory, reparametrizations), so the order is prepared once.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem


class Incoming(NamedTuple):
    """A message of another bucket, and how its axes lie in this bucket's table."""

    bucket: int  # the sending bucket
    at: tuple[int, ...]  # axis of the table, for each axis of the message
    to_table: tuple[int, ...]  # transposition of the message's axes into the order of the table's
    to_message: tuple[int, ...]  # the inverse transposition
    shape: tuple[int, ...]  # of the transposed message, to broadcast over the table


@dataclass
class Bucket:
    """One bucket table: a sum over `scope` (which begins with the node), to be minimized over `node`.

    Minima over the first axis of an array are those that numpy takes fastest.
    """

    node: int
    scope: tuple[int, ...]
    shape: tuple[int, ...]
    owns_cost: bool  # the node's cost belongs to this one of its mini-buckets
    edges: list[tuple[int, int, int]] = field(default_factory=list)  # (edge, its end (0: i, 1: j) at the node, axis of the other end)
    rows: list[np.ndarray] = field(default_factory=list)  # tables of `edges`, [k of the other node, k]
    tables: list[np.ndarray] = field(default_factory=list)  # the same in a shape that broadcasts over the bucket table
    incoming: list[Incoming] = field(default_factory=list)  # messages of other buckets
    receiver: int = -1  # bucket that takes this one's message; -1 if the message is a number


class _Item(NamedTuple):
    """A table that waits to be put into a bucket: an edge's (sender -1), or a message (edge -1)."""

    scope: tuple[int, ...]
    edge: int
    sender: int


class BucketElimination:
    """An elimination order and its buckets, prepared for any node costs."""

    def __init__(self, problem: Problem, max_entries: int = 1 << 20, deadline: Deadline = UNLIMITED):
        """Chooses the order, smallest bucket table first; only the table of a single edge or message may exceed `max_entries`."""
        self.problem, self.deadline = problem, deadline
        self.buckets: list[Bucket] = []  # in the order of their elimination
        self.of_node: list[list[int]] = [[] for _ in problem.costs]  # the buckets of every node; several if they are mini-buckets
        self.exact = True  # every node has one bucket, so `run` gives the minimum
        k = [len(c) for c in problem.costs]
        items = [_Item((e.i, e.j), number, -1) for number, e in enumerate(problem.edges)]
        at: list[dict[int, None]] = [{} for _ in k]  # the waiting items of every node
        for number, item in enumerate(items):
            for i in item.scope:
                at[i][number] = None

        def neighbors(i: int) -> set[int]:
            return {j for number in at[i] for j in items[number].scope}

        def size(i: int) -> float:
            return math.prod(k[j] for j in neighbors(i) | {i})

        heap = [(size(i), i) for i in range(len(k))]
        heapq.heapify(heap)
        self.order: list[int] = []  # nodes in the order of their elimination
        while heap:
            before, i = heapq.heappop(heap)
            if self.of_node[i]:
                continue
            if before != (now := size(i)):
                heapq.heappush(heap, (now, i))
                continue
            deadline.check()
            self.order.append(i)
            touched = neighbors(i) - {i}
            for group in self._mini_buckets(i, [items[number] for number in at[i]], k, max_entries):
                self._add(i, group, k)
                scope = self.buckets[-1].scope[1:]
                for j in scope:
                    at[j][len(items)] = None
                if scope:
                    items.append(_Item(scope, -1, len(self.buckets) - 1))
            for number in list(at[i]):
                for j in items[number].scope:
                    at[j].pop(number, None)
            for j in sorted(touched):
                heapq.heappush(heap, (size(j), j))
        self.size = sum(math.prod(b.shape) for b in self.buckets)  # entries of all bucket tables: the work of one run

    def _mini_buckets(self, i: int, items: list[_Item], k: list[int], max_entries: int) -> list[list[_Item]]:
        """Partitions the items of i into groups whose bucket tables have at most `max_entries`; large items first, first fit."""
        groups: list[tuple[set[int], list[_Item]]] = []
        for item in sorted(items, key=lambda item: (-len(item.scope), item.scope)):
            for scope, group in groups:
                if scope.issuperset(item.scope) or math.prod(k[j] for j in scope | set(item.scope)) <= max_entries:
                    scope.update(item.scope)
                    group.append(item)
                    break
            else:
                groups.append(({i, *item.scope}, [item]))
        self.exact &= len(groups) <= 1
        return [group for _, group in groups] or [[]]

    def _add(self, i: int, group: list[_Item], k: list[int]) -> None:
        """Makes a bucket of a group of items."""
        number = len(self.buckets)
        scope = (i, *sorted({j for item in group for j in item.scope} - {i}))
        shape = tuple(k[j] for j in scope)
        bucket = Bucket(i, scope, shape, owns_cost=not self.of_node[i])
        axis = {j: n for n, j in enumerate(scope)}
        for item in group:
            if item.edge < 0:
                at = [axis[j] for j in item.scope]
                to_table = sorted(range(len(at)), key=at.__getitem__)
                to_message = sorted(range(len(at)), key=to_table.__getitem__)
                spread = tuple(shape[n] if n in at else 1 for n in range(len(scope)))
                bucket.incoming.append(Incoming(item.sender, tuple(at), tuple(to_table), tuple(to_message), spread))
                self.buckets[item.sender].receiver = number
            else:
                (a, b), table = item.scope, self.problem.edges[item.edge].cost
                side, other = (1, a) if b == i else (0, b)
                broadcast = [1] * len(scope)
                broadcast[axis[other]], broadcast[0] = k[other], k[i]
                bucket.edges.append((item.edge, side, axis[other]))
                bucket.rows.append(table if side else table.T)
                bucket.tables.append(bucket.rows[-1].T.reshape(broadcast))
        self.buckets.append(bucket)
        self.of_node[i].append(number)

    def run(self, costs=None, committed=()) -> EliminationPass:
        """One pass at node costs [k_i], by default the problem's; `committed` are the messages (to i, to j) that edges lose by (6)."""
        return EliminationPass(self, self.problem.costs if costs is None else costs, committed)


class EliminationPass:
    """One elimination of all nodes, at given costs."""

    def __init__(self, elimination: BucketElimination, costs, committed):
        self.elimination, self.costs, self.committed = elimination, costs, committed
        self.own = [self._own(bucket) for bucket in elimination.buckets]
        self.messages: list[np.ndarray] = []  # of every bucket, over its scope without its node
        self.value = 0.0  # the minimum, or a lower bound of it if the elimination is not exact; inf if no states are allowed
        for number, bucket in enumerate(elimination.buckets):
            elimination.deadline.check()
            message = self._minus_committed(bucket, np.minimum.reduce(self._table(number)))
            self.messages.append(message)
            if bucket.receiver < 0:
                self.value += float(message)

    def _own(self, bucket: Bucket) -> np.ndarray:
        """Terms of the bucket's node alone, [k]: its cost, and the committed messages that its edges' tables lose to it."""
        own = np.asarray(self.costs[bucket.node]) if bucket.owns_cost else np.zeros(bucket.shape[0])
        for edge, side, _ in bucket.edges if self.committed else ():
            own = own - self.committed[edge][side]
        return own

    def _minus_committed(self, bucket: Bucket, rest: np.ndarray) -> np.ndarray:
        """`rest`, over the other nodes of a bucket's scope, less the committed messages to these."""
        for edge, side, axis in bucket.edges if self.committed else ():
            message = self.committed[edge][1 - side]
            rest = rest - message.reshape([-1 if n == axis else 1 for n in range(1, len(bucket.scope))])
        return rest

    def _table(self, number: int, *more: np.ndarray) -> np.ndarray:
        """A bucket table plus further terms, without the part that `_minus_committed` subtracts later."""
        bucket, buffer = self.elimination.buckets[number], None
        own = self.own[number].reshape([-1] + [1] * (len(bucket.scope) - 1))
        incoming = [self.messages[m.bucket].transpose(m.to_table).reshape(m.shape) for m in bucket.incoming]
        total, *terms = sorted((own, *bucket.tables, *incoming, *more), key=lambda table: table.size)
        for term in terms:
            total = buffer = np.add(total, term, out=buffer if buffer is not None and buffer.shape == bucket.shape else None)
        return total if total.shape == bucket.shape else np.broadcast_to(total, bucket.shape)

    def _row(self, number: int, states) -> np.ndarray:
        """Row of a bucket table, up to a constant, at given states of the others of its scope; [k]."""
        bucket, total = self.elimination.buckets[number], self.own[number]
        for (_, _, axis), rows in zip(bucket.edges, bucket.rows, strict=True):
            total = total + rows[states[axis - 1]]
        index = (slice(None), *states)
        for incoming in bucket.incoming:
            total = total + self.messages[incoming.bucket][tuple([index[n] for n in incoming.at])]
        return total

    def states(self) -> tuple[int, ...]:
        """Decoded states: backwards, each node takes the cheapest given those before; ties go to the lowest number."""
        chosen = [0] * len(self.elimination.problem.costs)
        for i in reversed(self.elimination.order):
            total = np.zeros(len(self.costs[i]))
            for number in self.elimination.of_node[i]:
                total = total + self._row(number, [chosen[j] for j in self.elimination.buckets[number].scope[1:]])
            chosen[i] = int(total.argmin())
        return tuple(chosen)

    def relaxed_states(self) -> np.ndarray:
        """The states that attain `value`; of a node with several mini-buckets, the state in the one that owns its cost."""
        elimination = self.elimination
        chosen = np.zeros(len(self.costs), dtype=np.int64)
        given: list[dict[int, int]] = [{} for _ in elimination.buckets]  # states of each bucket's scope
        for number in range(len(elimination.buckets) - 1, -1, -1):
            bucket = elimination.buckets[number]
            above = given[bucket.receiver] if bucket.receiver >= 0 else {}
            others = [above[j] for j in bucket.scope[1:]]
            state = int(self._row(number, others).argmin())
            given[number] = dict(zip(bucket.scope, (state, *others), strict=True))
            if bucket.owns_cost:
                chosen[bucket.node] = state
        return chosen

    def min_marginals(self) -> list[np.ndarray]:
        """For every node and state the minimum (or a lower bound of it) over choices that take this state, [k_i] each."""
        return self._backwards[0]

    def pair_min_marginals(self) -> Iterator[tuple[int, np.ndarray]]:
        """For every edge and pair of states a lower bound over choices that take both: (edge, [k_i, k_j])."""
        for number, (bucket, outside) in enumerate(zip(self.elimination.buckets, self._backwards[1], strict=True)):
            if bucket.edges:
                self.elimination.deadline.check()
                table = self._table(number, outside)
                for edge, side, axis in bucket.edges:
                    least = np.minimum.reduce(table, axis=tuple(n for n in range(1, table.ndim) if n != axis))
                    yield edge, least.T if side else least

    @functools.cached_property
    def _backwards(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The min-marginals, and for every bucket table the minimum over the rest of the network, given its scope."""
        marginals = [np.full(len(c), -np.inf) for c in self.costs]
        buckets = self.elimination.buckets
        outside = [np.zeros(())] * len(buckets)
        for number in range(len(buckets) - 1, -1, -1):
            self.elimination.deadline.check()
            bucket = buckets[number]
            if bucket.receiver < 0:
                outside[number] = np.asarray(self.value - self.messages[number] if np.isfinite(self.value) else np.inf)
            else:
                outside[number] = self._minus_committed(bucket, outside[number])[None]
            table = self._table(number, outside[number])
            least = np.minimum.reduce(table, axis=tuple(range(1, table.ndim)))
            np.maximum(marginals[bucket.node], least, out=marginals[bucket.node])
            for incoming in bucket.incoming:
                message = self.messages[incoming.bucket]
                gone = tuple(n for n in range(table.ndim) if n not in incoming.at)
                with np.errstate(invalid="ignore"):
                    rest = np.minimum.reduce(table, axis=gone).transpose(incoming.to_message) - message
                outside[incoming.bucket] = np.where(np.isinf(message), np.inf, rest)
        return marginals, outside
