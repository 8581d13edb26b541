"""The problem of the solver: a pairwise cost network with interval memory.

    minimize    sum_i c_i[s_i]  +  sum_(i,j) e_ij[s_i, s_j]                       (1) objective
    subject to  s_i in {0 .. k_i - 1}                        for every node i     (2) one state per node
                sum_(i alive at t) u_i[s_i]  <=  limit       for every time t     (3) memory limit

Equation numbers in the solver are those of docs/math.md, which also gives the derivations and what else the methods are called.

Costs are float64 arrays of **integral** values (the planner counts picoseconds), so sums below 2**53 are exact and the same on
every machine; `inf` forbids a state or a pair of states. A node may have several usages (a buffer that lives in two intervals).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

Status = Literal["optimal", "feasible", "infeasible", "fallback"]

Messages = dict[tuple[int, int], np.ndarray]  # messages of TRW-S: (i, j) -> what node i receives by its edge to j, [k_i]


class Edge(NamedTuple):
    """Cost of a pair of states: `cost[s_i, s_j]`, shape [k_i, k_j]. Parallel edges each count; i != j."""

    i: int
    j: int
    cost: np.ndarray


@dataclass(frozen=True)
class Usage:
    """Bytes that a node's state holds at every time t with lo <= t < hi: `bytes[s_node]`, shape [k_node]."""

    node: int
    lo: int
    hi: int
    bytes: np.ndarray

    @functools.cached_property
    def min_bytes(self) -> float:
        """Bytes of the state that holds fewest."""
        return float(self.bytes.min(initial=np.inf))

    @functools.cached_property
    def max_bytes(self) -> float:
        """Bytes of the state that holds most."""
        return float(self.bytes.max(initial=-np.inf))


@dataclass(frozen=True)
class FlatNetwork:
    """Every edge as two arcs in compressed sparse rows: the arcs of node i are first[i] .. first[i + 1], in the order of the edges."""

    first: np.ndarray  # [n + 1], first arc of each node
    head: np.ndarray  # [2 m], node at the arc's other end
    edge: np.ndarray  # [2 m], number of the arc's edge
    side: np.ndarray  # [2 m], 0 if the tail is the edge's i, 1 if it is its j
    edges: tuple[Edge, ...]

    @property
    def tail(self) -> np.ndarray:
        """[2 m], the node that an arc belongs to."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @functools.cached_property
    def near(self) -> list[list[tuple[int, np.ndarray]]]:
        """Of every node's arcs: (head, table with the tail's states as rows)."""
        arcs = zip(self.head.tolist(), self.edge.tolist(), self.side.tolist(), strict=True)
        flat = [(j, self.edges[e].cost.T if side else self.edges[e].cost) for j, e, side in arcs]
        return [flat[a:b] for a, b in pairwise(self.first.tolist())]


@dataclass(frozen=True)
class Problem:
    """The network of (1)-(3).

    Attributes:
        costs: c_i, one float64 array [k_i] per node.
        edges: e_ij; repeated layers share their arrays, which presolve exploits by identity.
        usages: u_i.
        limit: bytes; None leaves out (3).
        ties: symmetry class of every node, or (): the nodes of a class (repeated layers) have equally many states and take the same
            one. Ties restrict the problem; `Solution.tied` records that they were applied.
    """

    costs: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Usage, ...] = ()
    limit: float | None = None
    ties: tuple[int, ...] = ()

    @functools.cached_property
    def n_states(self) -> int:
        """Number of states of all nodes together."""
        return sum(map(len, self.costs))

    @functools.cached_property
    def start(self) -> np.ndarray:
        """First state of each node in the row of all nodes' states, [n + 1]."""
        return np.cumsum([0, *map(len, self.costs)])

    @functools.cached_property
    def cost_row(self) -> np.ndarray:
        """The costs of all nodes' states in a row."""
        return np.concatenate([*self.costs, np.zeros(0)])

    def by_node(self, row: np.ndarray) -> list[np.ndarray]:
        """Views of the parts of a row of all nodes' states, [k_i] each."""
        return [row[a:b] for a, b in pairwise(self.start.tolist())]

    @functools.cached_property
    def usage_table(self) -> UsageTable:
        """The usages as flat arrays."""
        return UsageTable(self)

    @functools.cached_property
    def flat(self) -> FlatNetwork:
        """The adjacency of the network."""
        ends = np.array([(e.i, e.j) for e in self.edges], dtype=np.int64).reshape(-1, 2)
        order = np.argsort(ends.ravel(), kind="stable")
        degrees = np.bincount(ends.ravel(), minlength=len(self.costs))
        return FlatNetwork(
            first=np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64),
            head=ends[:, ::-1].ravel()[order],
            edge=order // 2,
            side=order % 2,
            edges=self.edges,
        )

    @functools.cached_property
    def finite_ranges(self) -> list[tuple[float, float]]:
        """The least and the greatest finite cost of every node, then of every edge."""
        tables = [*self.costs, *(e.cost for e in self.edges)]
        ranges = {key: finite_range(entries) for key, entries in {id(entries): entries for entries in tables}.items()}
        return [ranges[id(entries)] for entries in tables]

    @functools.cached_property
    def big_m(self) -> float:
        """A power of two above the difference of any two finite objectives; replaces inf where sums have to stay finite."""
        return 2.0 ** float(np.ceil(np.log2(4 * max(sum(high - low for low, high in self.finite_ranges), 1.0))))

    def map_costs(self, change: Callable[[np.ndarray], np.ndarray]) -> Problem:
        """The problem with every cost array replaced by `change(array)` of the same shape; shared arrays stay shared."""
        tables = {id(table): change(table) for table in {id(e.cost): e.cost for e in self.edges}.values()}
        edges = tuple(e._replace(cost=tables[id(e.cost)]) for e in self.edges)
        return replace(self, costs=tuple(map(change, self.costs)), edges=edges)

    def objective(self, states) -> float:
        """(1) of one state per node; inf if a forbidden entry is taken."""
        total = sum(c.item(s) for c, s in zip(self.costs, states, strict=True))
        return total + sum(cost.item(states[i], states[j]) for i, j, cost in self.edges)

    def lower_bound(self) -> float:
        """The trivial lower bound of (1): the sum of all least entries."""
        return sum(low for low, _ in self.finite_ranges)

    def upper_bound(self) -> float:
        """The trivial upper bound of (1) over states that take no forbidden entry."""
        return sum(max(high, 0.0) for _, high in self.finite_ranges)

    def memory(self, states) -> np.ndarray:
        """Left side of (3) at every time, shape [T], bytes."""
        return sum_over_intervals((u.lo, u.hi, float(u.bytes[states[u.node]])) for u in self.usages)

    def fits(self, states) -> bool:
        """Whether one state per node meets (3)."""
        return self.limit is None or self.peak(states) <= self.limit

    def peak(self, states) -> float:
        """The greatest left side of (3), bytes."""
        return float(self.memory(states).max(initial=0.0))


class UsageTable:
    """The usages of a problem as flat arrays, sorted by node; empty without a limit."""

    def __init__(self, problem: Problem):
        usages = [] if problem.limit is None else sorted(problem.usages, key=lambda u: u.node)
        self.limit = np.inf if problem.limit is None else problem.limit
        self._n_states = problem.n_states
        self.n_steps = max((u.hi for u in usages), default=0)  # T, one more than the last time step
        self.node, self.lo, self.hi = np.array([(u.node, u.lo, u.hi) for u in usages], dtype=np.int64).reshape(-1, 3).T.copy()
        self.bytes = np.concatenate([u.bytes for u in usages]) if usages else np.zeros(0)  # bytes per state of all usages in a row
        size = np.array([len(u.bytes) for u in usages], dtype=np.int64)
        self.row = np.cumsum(size) - size  # first entry of each usage in `bytes`
        self._usage_of = np.repeat(np.arange(len(usages)), size)
        self.first = np.searchsorted(self.node, np.arange(len(problem.costs) + 1))  # [n + 1], first usage of each node
        most = self._at_steps(slice(None), np.array([u.max_bytes for u in usages]))
        self.max_bytes = float(most.max(initial=0.0))  # upper bound of the bytes of any choice at any step
        self._state_of = np.arange(len(self.bytes)) - self.row[self._usage_of] + problem.start[self.node[self._usage_of]]

    def _at_steps(self, usages: slice, amounts: np.ndarray) -> np.ndarray:
        """Bytes at every step, [T], if each of these usages holds its amount."""
        n = self.n_steps + 1
        return np.cumsum(np.bincount(self.lo[usages], amounts, n) - np.bincount(self.hi[usages], amounts, n))[: self.n_steps]

    def bytes_at(self, step: int) -> np.ndarray:
        """Bytes that every state of every node holds at one step, [states of all nodes]."""
        there = ((self.lo <= step) & (step < self.hi))[self._usage_of]
        return np.bincount(self._state_of[there], self.bytes[there], self._n_states)

    def profile(self, states: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes at every step, [T]."""
        return self._at_steps(slice(None), self.bytes[self.row + np.asarray(states)[self.node]] if len(self.node) else self.bytes)

    def profile_change(self, i: int, old: int, new: int) -> np.ndarray:
        """What node i's move from state `old` to `new` adds to the bytes at every step, [T]."""
        usages = slice(self.first[i], self.first[i + 1])
        return self._at_steps(usages, self.bytes[self.row[usages] + new] - self.bytes[self.row[usages] + old])

    def peak(self, states: Sequence[int] | np.ndarray) -> float:
        """Bytes at the highest step."""
        return float(self.profile(states).max(initial=0.0))

    def penalty(self, prices: np.ndarray, quantum: float = 1.0) -> np.ndarray:
        """Sum over lo <= t < hi of p_t u_i[s], [states of all nodes]; bytes are rounded down to multiples of `quantum`."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        per_byte = paid[self.hi] - paid[self.lo]
        held = self.bytes if quantum == 1.0 else self.bytes // quantum * quantum
        return np.bincount(self._state_of, held * per_byte[self._usage_of], self._n_states)


@dataclass(frozen=True)
class Solution:
    """An answer with its proof.

    Attributes:
        status: "optimal" (the bound is reached), "feasible" (an incumbent and a gap), "infeasible" (proven), "fallback" (the hint,
            or nothing: no better answer within the limits).
        states: s_i, one per node; () if none were found, and of a network without nodes.
        objective: (1) of `states`.
        bound: a lower bound of (1) over all states that satisfy (2), (3) and, if `tied`, the ties.
        tied: whether states were restricted by `Problem.ties`.
        stats: counts and seconds of the steps of the search.
    """

    status: Status
    states: tuple[int, ...]
    objective: float
    bound: float
    tied: bool = False
    stats: dict = field(default_factory=dict, compare=False)

    @property
    def found(self) -> bool:
        """Whether there is an answer: without one the objective is inf."""
        return self.objective < np.inf

    @property
    def gap(self) -> float:
        """(objective - bound) / |objective|; 0 if both are equal, inf without states."""
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1e-30) if self.found else np.inf


def sum_over_intervals(held: Iterable[tuple[int, int, float]]) -> np.ndarray:
    """Bytes at every time, shape [T], given (lo, hi, bytes): `bytes` are held while lo <= t < hi."""
    held = list(held)
    change = np.zeros(max((hi for _, hi, _ in held), default=0) + 1)
    for lo, hi, n in held:
        if hi > lo:
            change[lo] += n
            change[hi] -= n
    return np.cumsum(change)[:-1]


def indicator_costs(table: np.ndarray) -> np.ndarray:
    """The indicator function of the allowed entries: 0 where finite, inf where forbidden."""
    return np.where(np.isfinite(table), 0.0, np.inf)


def finite_range(entries: np.ndarray) -> tuple[float, float]:
    """The least and the greatest finite entry; (0, 0) if there is none."""
    low, high = float(entries.min(initial=np.inf)), float(entries.max(initial=-np.inf))
    if high == np.inf:
        high = float(np.where(entries < np.inf, entries, -np.inf).max(initial=-np.inf))
    return (low, high) if high > -np.inf else (0.0, 0.0)
