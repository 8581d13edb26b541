"""What the cheapest states are when nothing but (1) counts: bucket elimination, min-plus dynamic programming over numpy tables.

Nodes leave one by one, cheapest joint table first. When i leaves, every table that mentions i is summed over the joint states
of i and its neighbours, and i is minimised out:

    m_i[x_N] = min_s ( c_i[s] + sum_j e_ij[s, x_j] + messages that mention i )

What is left over in the end is the least cost, exact on a network of small treewidth. Where a joint table would have more
than `cap` entries the tables of i are dealt out to several smaller joints, each minimised on its own (mini-buckets): the end
value is then a lower bound, and the states found going backwards are a good guess.

Node costs and tables may differ from run to run (prices on memory, costs shifted along edges), so the order is prepared once.
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


class Sent(NamedTuple):
    """How another bucket's message lies in a joint table."""

    bucket: int
    at: tuple[int, ...]  # the joint's axis of each of its axes
    turned: tuple[int, ...]  # its axes in the order of the joint's
    back: tuple[int, ...]  # and the other way round
    shape: tuple[int, ...]  # spread over the joint


@dataclass
class Bucket:
    """One joint table: node `node` minimised out of a sum over `scope` (which ends with the node)."""

    node: int
    scope: tuple[int, ...]
    shape: tuple[int, ...]
    owns_cost: bool  # the node's cost is in this one of its buckets
    edges: list[tuple[int, int, int]] = field(default_factory=list)  # (edge, 0 if the node is its i, 1 its j, the other's axis)
    rows: list[np.ndarray] = field(default_factory=list)  # tables of `edges`, [k of the other, k]
    tables: list[np.ndarray] = field(default_factory=list)  # the same, spread over the scope
    senders: list[Sent] = field(default_factory=list)
    receiver: int = -1  # bucket that takes the message; -1 when the message is a number


class BucketElimination:
    """The order, prepared for any node costs.

    Attributes:
        exact: no joint was split, so `run` gives the optimum.
        size: entries of all joint tables: the work of one run.
    """

    def __init__(self, problem: Problem, cap: int = 1 << 20, deadline: Deadline = UNLIMITED):
        self.problem, self.deadline = problem, deadline
        self.buckets: list[Bucket] = []
        self.of_node: list[list[int]] = [[] for _ in problem.costs]
        self.exact = True
        k = [len(c) for c in problem.costs]
        # an item is a table still in play: (scope, edge or -1, sending bucket or -1)
        items: list[tuple[tuple[int, ...], int, int]] = [((e.i, e.j), number, -1) for number, e in enumerate(problem.edges)]
        at: list[dict[int, None]] = [{} for _ in k]
        for number, (scope, _, _) in enumerate(items):
            for i in scope:
                at[i][number] = None

        def neighbours(i: int) -> set[int]:
            return {j for number in at[i] for j in items[number][0]}

        def size(i: int) -> float:
            return math.prod(k[j] for j in neighbours(i) | {i})

        heap = [(size(i), i) for i in range(len(k))]
        heapq.heapify(heap)
        done = [False] * len(k)
        self.order: list[int] = []
        while heap:
            weight, i = heapq.heappop(heap)
            if done[i]:
                continue
            if weight != (now := size(i)):
                heapq.heappush(heap, (now, i))
                continue
            deadline.check()
            done[i] = True
            self.order.append(i)
            touched = neighbours(i) - {i}
            for group in self._deal(i, [items[number] for number in at[i]], k, cap):
                number = self._add(i, group, k)
                scope = self.buckets[number].scope[:-1]
                if scope:
                    items.append((scope, -1, number))
                    for j in scope:
                        at[j][len(items) - 1] = None
            for number in list(at[i]):
                for j in items[number][0]:
                    at[j].pop(number, None)
            for j in sorted(touched):
                heapq.heappush(heap, (size(j), j))
        self.size = sum(math.prod(b.shape) for b in self.buckets)

    def _deal(self, i: int, items: list, k: list[int], cap: int) -> list[list]:
        """The items of i in groups whose joint tables have at most `cap` entries, large items first."""
        groups: list[tuple[set[int], list]] = []
        for item in sorted(items, key=lambda item: (-len(item[0]), item[0])):
            for scope, group in groups:
                if scope.issuperset(item[0]) or math.prod(k[j] for j in scope | set(item[0])) <= cap:
                    scope.update(item[0])
                    group.append(item)
                    break
            else:
                groups.append(({i, *item[0]}, [item]))
        self.exact &= len(groups) <= 1
        return [group for _, group in groups] or [[]]

    def _add(self, i: int, group: list, k: list[int]) -> int:
        number = len(self.buckets)
        scope = (*sorted({j for item in group for j in item[0]} - {i}), i)
        shape = tuple(k[j] for j in scope)
        bucket = Bucket(i, scope, shape, owns_cost=not self.of_node[i])
        axis = {j: n for n, j in enumerate(scope)}
        for item_scope, edge, sender in group:
            if edge < 0:
                at = [axis[j] for j in item_scope]
                turned = sorted(range(len(at)), key=at.__getitem__)
                back = sorted(range(len(at)), key=turned.__getitem__)
                spread = tuple(shape[n] if n in at else 1 for n in range(len(scope)))
                bucket.senders.append(Sent(sender, tuple(at), tuple(turned), tuple(back), spread))
                self.buckets[sender].receiver = number
            else:
                (a, b), table = item_scope, self.problem.edges[edge].cost
                side, other = (1, a) if b == i else (0, b)
                spread = [1] * len(scope)
                spread[axis[other]], spread[-1] = k[other], k[i]
                bucket.edges.append((edge, side, axis[other]))
                bucket.rows.append(table if side else table.T)
                bucket.tables.append(bucket.rows[-1].reshape(spread))
        self.buckets.append(bucket)
        self.of_node[i].append(number)
        return number

    def run(self, costs=None, shifts=()) -> EliminationPass:
        """One sweep with these node costs, the problem's own by default.

        Args:
            shifts: m_ei and m_ej of every edge: what its table loses in (6).
        """
        return EliminationPass(self, self.problem.costs if costs is None else costs, shifts)


class EliminationPass:
    """One sweep of elimination.

    Attributes:
        value: the least cost; a lower bound of it when the elimination is not exact; inf when no states are allowed.
    """

    def __init__(self, elimination: BucketElimination, costs, shifts):
        self.elimination, self.costs, self.shifts = elimination, costs, shifts
        self.own = [self._own(bucket) for bucket in elimination.buckets]
        self.messages: list[np.ndarray] = []
        self.value = 0.0
        for number, bucket in enumerate(elimination.buckets):
            elimination.deadline.check()
            message = self._less(bucket, self._joint(number).min(axis=-1))
            self.messages.append(message)
            if bucket.receiver < 0:
                self.value += float(message)

    def _own(self, bucket: Bucket) -> np.ndarray:
        """What a bucket's node costs by itself, [k]."""
        own = np.asarray(self.costs[bucket.node]) if bucket.owns_cost else np.zeros(bucket.shape[-1])
        for edge, side, _ in bucket.edges if self.shifts else ():
            own = own - self.shifts[edge][side]
        return own

    def _less(self, bucket: Bucket, rest: np.ndarray) -> np.ndarray:
        """An array over the others of a bucket's scope, less the messages that the bucket's tables lose to them."""
        for edge, side, axis in bucket.edges if self.shifts else ():
            message = self.shifts[edge][1 - side]
            rest = rest - message.reshape([-1 if n == axis else 1 for n in range(len(bucket.scope) - 1)])
        return rest

    def _parts(self, number: int) -> list[np.ndarray]:
        """What a bucket's joint table is the sum of, but for what `_less` takes away."""
        bucket = self.elimination.buckets[number]
        senders = [self.messages[sent.bucket].transpose(sent.turned).reshape(sent.shape) for sent in bucket.senders]
        return [self.own[number].reshape([1] * (len(bucket.scope) - 1) + [-1]), *bucket.tables, *senders]

    def _joint(self, number: int, *more: np.ndarray) -> np.ndarray:
        """A bucket's joint table, but for what `_less` takes away, and what else is to be added to it."""
        shape, made = self.elimination.buckets[number].shape, None
        total, *parts = sorted((*self._parts(number), *more), key=_size)
        for part in parts:
            total = made = np.add(total, part, out=made if made is not None and made.shape == shape else None)
        return total if total.shape == shape else np.broadcast_to(total, shape)

    def _given(self, number: int, where) -> np.ndarray:
        """What every state of a bucket's node costs, but for a constant, when the others of the scope take `where`; [k]."""
        bucket, total = self.elimination.buckets[number], self.own[number]
        for (_, _, axis), rows in zip(bucket.edges, bucket.rows, strict=True):
            total = total + rows[where[axis]]
        where = (*where, slice(None))
        for sent in bucket.senders:
            total = total + self.messages[sent.bucket][tuple([where[n] for n in sent.at])]
        return total

    def states(self) -> tuple[int, ...]:
        """Cheapest states, read backwards; ties go to the lowest number."""
        chosen = [0] * len(self.elimination.problem.costs)
        for i in reversed(self.elimination.order):
            total = np.zeros(len(self.costs[i]))
            for number in self.elimination.of_node[i]:
                total = total + self._given(number, [chosen[j] for j in self.elimination.buckets[number].scope[:-1]])
            chosen[i] = int(total.argmin())
        return tuple(chosen)

    def relaxed_states(self) -> np.ndarray:
        """The states behind `value`: where a node has several joints, the state it takes in the one that holds its own cost."""
        elimination = self.elimination
        chosen = np.zeros(len(self.costs), dtype=np.int64)
        given: list[dict[int, int]] = [{} for _ in elimination.buckets]  # states of each bucket's scope
        for number in range(len(elimination.buckets) - 1, -1, -1):
            bucket = elimination.buckets[number]
            above = given[bucket.receiver] if bucket.receiver >= 0 else {}
            where = [above[j] for j in bucket.scope[:-1]]
            state = int(self._given(number, where).argmin())
            given[number] = dict(zip(bucket.scope, (*where, state), strict=True))
            if bucket.owns_cost:
                chosen[bucket.node] = state
        return chosen

    def min_marginals(self) -> list[np.ndarray]:
        """For every node and state the least cost (or a lower bound of it) of a choice that takes this state, [k_i] each."""
        return self._backwards[0]

    def pairs(self) -> Iterator[tuple[int, np.ndarray]]:
        """For every edge and pair of states a lower bound of the cost of a choice that takes both: (edge, [k_i, k_j])."""
        for number, (bucket, outside) in enumerate(zip(self.elimination.buckets, self._backwards[1], strict=True)):
            if bucket.edges:
                self.elimination.deadline.check()
                joint = self._joint(number, outside)
                for edge, side, axis in bucket.edges:
                    least = joint.min(axis=tuple(n for n in range(joint.ndim - 1) if n != axis))
                    yield edge, least if side else least.T

    @functools.cached_property
    def _backwards(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The marginals, and what the rest of the network adds to every bucket's joint table."""
        min_marginals = [np.full(len(c), -np.inf) for c in self.costs]
        buckets = self.elimination.buckets
        outside = [np.zeros(())] * len(buckets)
        for number in range(len(buckets) - 1, -1, -1):
            self.elimination.deadline.check()
            bucket = buckets[number]
            if bucket.receiver < 0:
                outside[number] = np.asarray(self.value - self.messages[number] if np.isfinite(self.value) else np.inf)
            else:
                outside[number] = self._less(bucket, outside[number])[..., None]
            joint = self._joint(number, outside[number])
            least = joint.min(axis=tuple(range(joint.ndim - 1)))
            np.maximum(min_marginals[bucket.node], least, out=min_marginals[bucket.node])
            for sent in bucket.senders:
                message = self.messages[sent.bucket]
                gone = tuple(n for n in range(joint.ndim) if n not in sent.at)
                with np.errstate(invalid="ignore"):
                    rest = joint.min(axis=gone).transpose(sent.back) - message
                outside[sent.bucket] = np.where(np.isinf(message), np.inf, rest)
        return min_marginals, outside


def _size(table: np.ndarray) -> int:
    return table.size
