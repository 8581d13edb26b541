"""The reductions of presolve: each is one class whose records change the network, undo themselves on states, and carry messages.

    TieClasses          nodes of one symmetry class become one node: costs, usages and edges summed, diagonals of inner edges added
    ReduceDomain        removes states of a node: node consistency, capacity propagation, dead-end elimination
    AggregateFollower   each state of j allows one state of i only:           i := f(j), all terms of i move to j
    EliminateNode       i holds no memory and has at most two edges:          e_jk += min_s c_i[s] + e_ij[s, .] + e_ik[s, .]

Sources: dead-end elimination, Desmet et al., Nature 356, 1992, or neighborhood substitutability, Freuder, AAAI 1991; EliminateNode,
bounded variable elimination of degree at most two, Larrosa, CP 2000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from shardplan.ilp.solver.presolve.network import PresolveNetwork
from shardplan.ilp.solver.problem import Edge, Problem, Usage

ELIMINATED_ENTRIES = 1 << 16
"""Entries of the joint table of a node and its two neighbors, up to which it is eliminated."""

Inbox = dict[int, dict[int, np.ndarray]]
"""`inbox[i][j]`: message that node i receives by its edge to j, [k_i]."""


@dataclass(frozen=True)
class Reduction:
    """A record of one reduction: `nodes` are the reduced node, then those that determine its state.

    Subclasses add a classmethod `apply` that changes a network and returns a record, or None.
    """

    nodes: tuple[int, ...]

    def invert(self, states: np.ndarray) -> np.ndarray:
        """States before the reduction, given states after it; may change `states`."""
        raise NotImplementedError

    def renumber(self, numbers: Sequence[int]) -> Self:
        """The record with node i called `numbers[i]`."""
        return replace(self, nodes=tuple(numbers[i] for i in self.nodes))

    def carry_messages(self, inbox: Inbox) -> None:
        """Turns messages of the network before the reduction into messages of the network after it."""
        raise NotImplementedError


@dataclass(frozen=True)
class TieClasses(Reduction):
    """One node per class of `Problem.ties`; `member` is the class number of every node, 0 .. n_classes - 1."""

    member: np.ndarray

    @classmethod
    def apply(cls, problem: Problem) -> tuple[Problem, TieClasses]:
        """The problem of the classes, and the record."""
        classes, first, member = np.unique(np.asarray(problem.ties), return_index=True, return_inverse=True)
        costs = sum_by_key((member[i], None, c) for i, c in enumerate(problem.costs))
        pairs: dict[tuple, list] = {}
        for e in problem.edges:
            pairs.setdefault((int(member[e.i]), int(member[e.j]), id(e.cost)), [e.cost, 0])[1] += 1
        for (i, j, _), (table, count) in pairs.items():
            if i == j:
                costs[i, None] = costs[i, None] + count * np.diagonal(table)
        usages = sum_by_key((member[u.node], (u.lo, u.hi), u.bytes) for u in problem.usages)
        tied = Problem(
            costs=tuple(costs[i, None] for i in range(len(classes))),
            edges=tuple(Edge(i, j, count * t if count > 1 else t) for (i, j, _), (t, count) in pairs.items() if i != j),
            usages=tuple(Usage(i, lo, hi, b) for (i, (lo, hi)), b in usages.items()),
            limit=problem.limit,
            names=tuple(problem.names[i] for i in first) if problem.names else (),
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
class ReduceDomain(Reduction):
    """A node keeps the states `keep` only."""

    keep: np.ndarray

    @classmethod
    def apply(cls, net: PresolveNetwork, i: int, mask: np.ndarray | None = None) -> ReduceDomain | None:
        """Removes the states of i that `mask` does not select, by default those without a finite cost or partner."""
        if mask is None:  # node consistency
            mask = np.isfinite(net.costs[i])
            for table in net.adj[i].values():
                mask = mask & net.support(table)[0]
        if np.count_nonzero(mask) == len(mask):
            return None
        keep = np.flatnonzero(mask)
        net.feasible &= len(keep) > 0
        net.costs[i] = net.costs[i][keep]
        net.usages[i] = [(intervals, amounts[:, keep]) for intervals, amounts in net.usages[i]]
        for j, table in net.adj[i].items():
            smaller = np.ascontiguousarray(table[keep])
            net.adj[i][j], net.adj[j][i] = smaller, smaller.T
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


def undominated_states(net: PresolveNetwork, i: int, max_entries: int) -> np.ndarray:
    """Mask of the states that dead-end elimination leaves.

    State b dominates a if  c[b] + sum_j max_x (e_ij[b, x] - e_ij[a, x]) <= c[a]  and u[b] <= u[a] in every interval; of two states
    that dominate each other the lower number stays. No state is removed if the test would visit more than `max_entries`.
    """
    cost, tables = net.costs[i], list(net.adj[i].values())
    k = len(cost)
    keep = np.ones(k, dtype=bool)
    if k == 1 or k * k > max_entries:
        return keep
    slack = cost[:, None] - cost[None, :]  # [a, b]: what b's edges may cost more than a's
    np.fill_diagonal(slack, -np.inf)
    for table in tables:  # a few columns rule out most pairs
        sample = table[:, sorted({0, table.shape[1] // 2, table.shape[1] - 1, int(table.min(axis=0).argmin())})]
        slack[(_difference(sample, sample[:, None]) > slack[:, :, None]).any(axis=2)] = -np.inf
        if slack.max() == -np.inf:
            return keep
    a, b = np.nonzero(slack >= -_FINITE)
    if len(a) * sum(t.shape[1] for t in tables) > max_entries:
        return keep
    usage = net.usage(i)
    if usage is not None and len(a):
        amounts = np.unique(usage[1], axis=0)
        for first in range(0, len(a), 256):  # in pieces: an aggregated node may hold thousands of intervals
            part = slice(first, first + 256)
            fits = (amounts[:, b[part]] <= amounts[:, a[part]]).all(axis=0)
            slack[a[part], b[part]] = np.where(fits, slack[a[part], b[part]], -np.inf)
        a, b = np.nonzero(slack >= -_FINITE)
    rest = slack[a, b]
    for table in tables:
        rest = rest - _difference(table[b], table[a]).max(axis=1)
    dominated = {(int(p), int(q)) for p, q, r in zip(a, b, rest, strict=True) if r >= 0}
    for p, q in sorted(dominated):
        if keep[p] and keep[q] and ((q, p) not in dominated or q < p):
            keep[p] = False
    return keep


_FINITE = 1e300


def _difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """`after - before`; -inf where `before` is forbidden, for any replacement is as good there."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(before), -np.inf, after - before)


def _join_messages(inbox: Inbox, i: int, j: int, to_i: np.ndarray, to_j: np.ndarray) -> None:
    """Adds messages to those of edge (i, j)."""
    for a, b, message in ((i, j, to_i), (j, i, to_j)):
        row = inbox.setdefault(a, {})
        row[b] = row[b] + message if b in row else message


def _pop_messages(inbox: Inbox, i: int) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Removes the messages of i's edges: those to i, and those to its neighbors."""
    to_i = inbox.pop(i, {})
    return to_i, {j: inbox[j].pop(i) for j in to_i}


@dataclass(frozen=True)
class AggregateFollower(Reduction):
    """Node i takes state f[s_j] of its leader j: given s_j, only one state of i is possible."""

    f: np.ndarray

    @classmethod
    def apply(cls, net: PresolveNetwork, i: int) -> AggregateFollower | None:
        """Merges i into a neighbor that determines it, or a neighbor into i if each determines the other and i has more edges."""
        if not net.adj[i] and len(net.costs[i]) == 1:  # without a choice and without edges: all such nodes are merged into one
            if net.decided is None or net.decided == i or not net.alive[net.decided]:
                net.decided = i
                return None
            return cls._merge(net, i, net.decided, np.zeros(1, dtype=np.int64))
        found = ((j, f) for j, table in net.adj[i].items() if (f := net.support(table)[1]) is not None)
        j, f = next(found, (i, None))
        if f is None:
            return None
        bijective = len(f) == len(net.costs[i]) and len(net.adj[i]) > len(net.adj[j])
        inverse = net.support(net.adj[i][j].T)[1] if bijective else None
        return cls._merge(net, i, j, f) if inverse is None else cls._merge(net, j, i, inverse)

    @classmethod
    def _merge(cls, net: PresolveNetwork, i: int, j: int, f: np.ndarray) -> AggregateFollower:
        net.costs[j] = net.costs[j] + net.costs[i][f]
        if j in net.adj[i]:
            net.costs[j] = net.costs[j] + net.adj[i][j][f, np.arange(len(f))]
        net.usages[j] += [(intervals, amounts[:, f]) for intervals, amounts in net.usages[i]]
        for k, table in list(net.adj[i].items()):
            if k == j:
                continue
            if len(net.costs[i]) == 1:  # a constant: its edges become node costs of the neighbors
                net.costs[k] = net.costs[k] + table[0]
                net.touch(k)
            else:
                net.add_edge(j, k, table[f])
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


@dataclass(frozen=True)
class EliminateNode(Reduction):
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
            joint = cost
            net.offset += float(cost.min(initial=np.inf))
        elif len(near) == 1:
            (j,) = near
            joint = net.adj[j][i] + cost
            net.costs[j] = net.costs[j] + joint.min(axis=-1)
            net.touch(j)
        else:
            j, k = near
            joint = (net.adj[j][i] + cost)[:, None, :] + net.adj[k][i][None, :, :]
            net.add_edge(j, k, joint.min(axis=-1))
        net.remove_node(i)
        return cls((i, *near), joint.argmin(axis=-1))

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
