"""The reductions of presolve, and the network that they change: each is one class whose records undo themselves on states.

    TieClasses          nodes of one symmetry class become one node: costs, usages and edges summed, diagonals of inner edges added
    ReduceDomain        removes states of a node: node consistency, capacity propagation, dead-end elimination
    AggregateFollower   each state of j allows one state of i only:           i := f(j), all terms of i move to j
    EliminateNode       i holds no memory and has at most two edges:          e_jk += min_s c_i[s] + e_ij[s, .] + e_ik[s, .]

Source of EliminateNode: bounded variable elimination of degree at most two, Larrosa, CP 2000. Dead-end elimination: `dominance.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Edge, Problem, Usage

CHECK_EVERY = 1_000  # edges or usages between two checks of the deadline

ELIMINATED_ENTRIES = 1 << 16  # entries of the joint table of a node and its two neighbors, up to which it is eliminated
Inbox = dict[int, dict[int, np.ndarray]]  # `inbox[i][j]`: message that node i receives by its edge to j, [k_i]
Made = TypeVar("Made")
Computed = dict[tuple | int, tuple]  # results of `PresolveNetwork.once`, each with the arrays that its key names
UsageBlock = tuple[np.ndarray, np.ndarray]  # usages of one node: intervals [m, 2] and bytes [m, k]


class Support(NamedTuple):
    """Which entries of a table are finite."""

    rows: np.ndarray | None  # mask of the rows with a finite entry; None: all
    f: np.ndarray | None  # column j is finite in row f[j] only, a functional dependency; None if there is none
    finite: bool  # whether all entries are

    @staticmethod
    def of(table: np.ndarray) -> Support:
        """The support of a table."""
        finite, any_of = np.isfinite(table), np.logical_or.reduce  # half the time of `any` on small arrays
        n = int(np.count_nonzero(finite))
        functional = n == table.shape[1] and any_of(finite, axis=0).all()
        rows = None if n == table.size or (rows := any_of(finite, axis=1)).all() else rows
        return Support(rows, finite.argmax(axis=0) if functional else None, n == table.size)


class PresolveNetwork:
    """A problem as adjacency lists that reductions change in place."""

    def __init__(self, problem: Problem, deadline: Deadline = UNLIMITED, kept: Collection[int] = (), made: Computed | None = None):
        self.kept = kept  # nodes that are not removed
        self.costs = list(problem.costs)  # c_i, [k_i] each
        # adj[i][j] is e_ij with i's states as rows; adj[j][i] is the same table transposed
        self.adj: list[dict[int, np.ndarray]] = [{} for _ in self.costs]
        self.usages: list[list[UsageBlock]] = [[] for _ in self.costs]  # blocks of usages per node
        self.alive = [True] * len(self.costs)  # False for nodes that were removed
        self.limit = problem.limit
        self.offset = 0.0  # constant part of the objective
        self.decided: int | None = None  # a node with one state and no edges, which takes over the usages of all others of that kind
        self.feasible = all(len(c) for c in self.costs)  # False once a node has no state
        self.worklist = OrderedDict.fromkeys(range(len(self.costs)))  # nodes whose costs, edges or usages changed, in order of arrival
        self._made: Computed = {} if made is None else made
        for number, e in enumerate(problem.edges):
            self.add_edge(e.i, e.j, e.cost, self.once(np.transpose, e.cost))
            if number % CHECK_EVERY == 0:
                deadline.check()
        for u in problem.usages if problem.limit is not None else ():
            if u.hi > u.lo:
                self.usages[u.node].append((np.array([(u.lo, u.hi)]), u.bytes[None, :]))

    def touch(self, i: int) -> None:
        """Appends a node to the worklist."""
        self.worklist[i] = None

    def add_edge(self, i: int, j: int, table: np.ndarray, transposed: np.ndarray) -> None:
        """Adds a table [k_i, k_j] and its transpose to e_ij and e_ji; parallel edges become one."""
        if j in self.adj[i]:
            table, transposed = self.once(_sum, self.adj[i][j], table)
        self.adj[i][j], self.adj[j][i] = table, transposed
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

    def once(self, compute: Callable[..., Made], *arguments) -> Made:
        """`compute(*arguments)`, once for the same objects: repeated layers share tables, and what becomes of them."""
        key = compute, *map(id, arguments)
        if (found := self._made.get(key)) is None:
            found = self._made[key] = compute(*arguments), arguments  # which are kept, so that no id is used again
        return found[0]

    def support(self, table: np.ndarray) -> Support:
        """Which entries of a table are finite."""
        if (found := self._made.get(id(table))) is None:  # as `once`, which is slower
            found = self._made[id(table)] = Support.of(table), table
        return found[0]

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


def _both_ways(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return table, table.T


def _sum(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _both_ways(one + other)


def _rows(table: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _both_ways(np.ascontiguousarray(table[rows]))


def _entries(costs: np.ndarray, states: np.ndarray) -> np.ndarray:
    return costs[states]


def _finite(costs: np.ndarray) -> np.ndarray | None:
    """Mask of the finite entries; None: all."""
    mask = np.isfinite(costs)
    return None if np.count_nonzero(mask) == len(mask) else mask


def _common(*masks: np.ndarray) -> np.ndarray | None:
    """Numbers of the states that all masks select; None: all states."""
    mask = np.logical_and.reduce(masks)
    return None if np.count_nonzero(mask) == len(mask) else np.flatnonzero(mask)


@dataclass(frozen=True)
class Record:
    """A record of one reduction: `nodes` are the reduced node, then those that determine its state.

    Of every reduction, `apply` changes a network and returns a record or None; `invert` gives the states before it from those after it;
    `carry_messages` turns messages of the network before it into messages of the network after it. The last two change their argument.
    """

    nodes: tuple[int, ...]

    def renumber(self, numbers: Sequence[int]) -> Self:
        """The record with node i called `numbers[i]`."""
        return replace(self, nodes=tuple(numbers[i] for i in self.nodes))


@dataclass(frozen=True)
class TieClasses(Record):
    """One node per class of `Problem.ties`; `member` is the class number of every node, 0 .. n_classes - 1."""

    member: np.ndarray

    @classmethod
    def apply(cls, problem: Problem) -> tuple[Problem, TieClasses]:
        """The problem of the classes, and the record."""
        classes, member = np.unique(np.asarray(problem.ties), return_inverse=True)
        costs = sum_by_key((member[i], None, c) for i, c in enumerate(problem.costs))
        tables = sum_by_key((member[e.i], int(member[e.j]), e.cost) for e in problem.edges)
        for (i, j), table in tables.items():
            if i == j:
                costs[i, None] = costs[i, None] + np.diagonal(table)
        usages = sum_by_key((member[u.node], (u.lo, u.hi), u.bytes) for u in problem.usages)
        tied = Problem(
            costs=tuple(costs[i, None] for i in range(len(classes))),
            edges=tuple(Edge(i, j, table) for (i, j), table in tables.items() if i != j),
            usages=tuple(Usage(i, lo, hi, b) for (i, (lo, hi)), b in usages.items()),
            limit=problem.limit,
        )
        return tied, cls((), member)

    def invert(self, states: np.ndarray) -> np.ndarray:
        """Every node takes the state of its class."""
        return states[self.member]

    def carry_messages(self, inbox: Inbox) -> None:  # an edge of classes has no counterpart before
        """Drops all messages."""
        inbox.clear()


def sum_by_key(terms) -> dict[tuple, np.ndarray]:
    """Sums of arrays by (node, key), given (node, key, array); a repeated array is multiplied by its count."""
    counted: dict[tuple, list] = {}
    for node, key, array in terms:
        counted.setdefault((int(node), key, id(array)), [array, 0])[1] += 1
    total: dict[tuple, np.ndarray] = {}
    for (node, key, _), (array, count) in counted.items():
        part = count * array if count > 1 else array
        total[node, key] = total[node, key] + part if (node, key) in total else part
    return total


@dataclass(frozen=True)
class ReduceDomain(Record):
    """A node keeps the states `keep` only."""

    keep: np.ndarray

    @classmethod
    def apply(cls, net: PresolveNetwork, i: int, mask: np.ndarray | None = None) -> ReduceDomain | None:
        """Removes the states of i that `mask` does not select, by default those without a finite cost or partner."""
        masks = [mask]
        if mask is None:  # node consistency
            masks = [net.once(_finite, net.costs[i]), *(net.support(table).rows for table in net.adj[i].values())]
        masks = [mask for mask in masks if mask is not None]
        keep = net.once(_common, *masks) if masks else None
        if keep is None:
            return None
        net.feasible &= len(keep) > 0
        net.costs[i] = net.once(_entries, net.costs[i], keep)
        net.usages[i] = [(intervals, amounts[:, keep]) for intervals, amounts in net.usages[i]]
        for j, table in net.adj[i].items():
            net.adj[i][j], net.adj[j][i] = net.once(_rows, table, keep)
            net.touch(j)
        net.touch(i)
        return cls((i,), keep)

    def invert(self, states: np.ndarray) -> np.ndarray:
        """The state's number before."""
        (i,) = self.nodes
        states[i] = self.keep[states[i]]
        return states

    def carry_messages(self, inbox: Inbox) -> None:
        """Messages to the node keep the entries of its states."""
        (i,) = self.nodes
        inbox[i] = {j: message[self.keep] for j, message in inbox.get(i, {}).items()}


def _join_messages(inbox: Inbox, i: int, j: int, to_i: np.ndarray, to_j: np.ndarray) -> None:
    """Adds messages to those of edge (i, j)."""
    for a, b, message in ((i, j, to_i), (j, i, to_j)):
        row = inbox.setdefault(a, {})
        row[b] = row[b] + message if b in row else message


def _pop_messages(inbox: Inbox, i: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Removes the messages of i's edges: those to i, and those to its neighbors."""
    to_i = inbox.pop(i, {})
    return to_i, {j: inbox[j].pop(i) for j in to_i}


_ONLY_STATE = np.zeros(1, dtype=np.int64)


def _aggregated(leader: np.ndarray, follower: np.ndarray, f: np.ndarray, table: np.ndarray | None) -> np.ndarray:
    """Costs of a leader and of a follower that takes state f of the leader's, with those of the edge from the follower to it."""
    cost = leader + follower[f]
    return cost if table is None else cost + table[f, np.arange(len(f))]


def _with_first_row(costs: np.ndarray, table: np.ndarray) -> np.ndarray:
    return costs + table[0]


@dataclass(frozen=True)
class AggregateFollower(Record):
    """Node i takes state f[s_j] of its leader j: given s_j, only one state of i is possible."""

    f: np.ndarray

    @classmethod
    def apply(cls, net: PresolveNetwork, i: int) -> AggregateFollower | None:
        """Merges i into a neighbor that determines it, or that one into i if each determines the other and i has more edges."""
        if not net.adj[i] and len(net.costs[i]) == 1:  # without a choice and without edges: all such nodes are merged into one
            if net.decided is None or net.decided == i or not net.alive[net.decided]:
                net.decided = i
                return None
            return cls._merge(net, i, net.decided, _ONLY_STATE)
        found = ((j, f) for j, table in net.adj[i].items() if (f := net.support(table).f) is not None)
        j, f = next(found, (i, None))
        if f is None:
            return None
        bijective = j not in net.kept and len(f) == len(net.costs[i]) and len(net.adj[i]) > len(net.adj[j])
        inverse = net.support(net.adj[j][i]).f if bijective else None
        return cls._merge(net, i, j, f) if inverse is None else cls._merge(net, j, i, inverse)

    @classmethod
    def _merge(cls, net: PresolveNetwork, i: int, j: int, f: np.ndarray) -> AggregateFollower:
        net.costs[j] = net.once(_aggregated, net.costs[j], net.costs[i], f, net.adj[i].get(j))
        net.usages[j] += [(intervals, amounts[:, f]) for intervals, amounts in net.usages[i]]
        for k, table in list(net.adj[i].items()):
            if k == j:
                continue
            if len(net.costs[i]) == 1:  # a constant: its edges become node costs of the neighbors
                net.costs[k] = net.once(_with_first_row, net.costs[k], table)
                net.touch(k)
            else:
                net.add_edge(j, k, *net.once(_rows, table, f))
        net.remove_node(i)
        net.touch(j)
        return cls((i, j), f)

    def invert(self, states: np.ndarray) -> np.ndarray:
        """The follower's state is f of the leader's."""
        i, j = self.nodes
        states[i] = self.f[states[j]]
        return states

    def carry_messages(self, inbox: Inbox) -> None:
        """Edges of the follower become edges of the leader."""
        i, leader = self.nodes
        to_i, to_neighbors = _pop_messages(inbox, i)
        for k, message in to_i.items():
            if k != leader and len(message) > 1:
                _join_messages(inbox, leader, k, message[self.f], to_neighbors[k])


def _eliminated(costs: np.ndarray, table: np.ndarray, eliminated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Costs of a node with those of its eliminated neighbor, and that one's best states; columns of `table` are its states."""
    joint = table + eliminated
    return costs + joint.min(axis=-1), joint.argmin(axis=-1)


def _eliminated_between(to_j: np.ndarray, to_k: np.ndarray, eliminated: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table between two neighbors of an eliminated node, its transpose, and the node's best states."""
    joint = (to_j + eliminated)[:, None, :] + to_k[None, :, :]
    return *_both_ways(joint.min(axis=-1)), joint.argmin(axis=-1)


@dataclass(frozen=True)
class EliminateNode(Record):
    """Node i takes the cheapest state given its (at most two) neighbors: `best[s_j, s_k]`."""

    best: np.ndarray

    @classmethod
    def apply(cls, net: PresolveNetwork, i: int) -> EliminateNode | None:
        """Minimizes i out, if it has no usages, at most two neighbors, and their joint table is small."""
        near = tuple(net.adj[i])
        sizes = [len(net.costs[j]) for j in (i, *near)]
        if net.usages[i] or len(near) > 2 or (len(near) == 2 and int(np.prod(sizes)) > ELIMINATED_ENTRIES):
            return None
        cost = net.costs[i]
        if not near:
            best = np.asarray(cost.argmin())
            net.offset += float(cost.min(initial=np.inf))
        elif len(near) == 1:
            (j,) = near
            net.costs[j], best = net.once(_eliminated, net.costs[j], net.adj[j][i], cost)
            net.touch(j)
        else:
            j, k = near
            table, transposed, best = net.once(_eliminated_between, net.adj[j][i], net.adj[k][i], cost)
            net.add_edge(j, k, table, transposed)
        net.remove_node(i)
        return cls((i, *near), best)

    def invert(self, states: np.ndarray) -> np.ndarray:
        """The cheapest state given the neighbors'."""
        i, *near = self.nodes
        states[i] = self.best[tuple(states[j] for j in near)]
        return states

    def carry_messages(self, inbox: Inbox) -> None:
        """The messages to two neighbors become those of the edge between them."""
        i, *near = self.nodes
        to_i, to_neighbors = _pop_messages(inbox, i)
        if to_i and len(near) == 2:
            j, k = near
            _join_messages(inbox, j, k, to_neighbors[j], to_neighbors[k])


Reduction = TieClasses | ReduceDomain | AggregateFollower | EliminateNode
