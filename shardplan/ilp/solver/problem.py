"""What every planning question becomes: a pairwise cost network with interval memory.

    minimise    sum_i c_i[s_i]  +  sum_(i,j) e_ij[s_i, s_j]                      (1)
    subject to  sum_(i alive at t) u_i[s_i]  <=  limit       for every time t     (2)
                s_i in {0 .. k_i - 1}                        for every node i     (3)

Costs are float64 arrays of **integral** values (the planner counts picoseconds), so sums below 2**53 are exact and the
same on every machine; `inf` forbids a state or a pair. A node may have several usages (a buffer kept over two intervals).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

Status = Literal["optimal", "feasible", "infeasible", "fallback"]


@dataclass(frozen=True)
class Edge:
    """Cost of a pair of states: `cost[s_i, s_j]`, shape [k_i, k_j]. Parallel edges each count; i != j."""

    i: int
    j: int
    cost: np.ndarray


@dataclass(frozen=True)
class Usage:
    """Bytes a node's state holds at every time t with lo <= t < hi: `bytes[s_node]`, shape [k_node]."""

    node: int
    lo: int
    hi: int
    bytes: np.ndarray

    @functools.cached_property
    def min_bytes(self) -> float:
        return float(self.bytes.min(initial=np.inf))

    @functools.cached_property
    def max_bytes(self) -> float:
        return float(self.bytes.max(initial=-np.inf))


def sum_over_intervals(held: Iterable[tuple[int, int, float]]) -> np.ndarray:
    """Bytes in memory at every time, shape [T], of (lo, hi, bytes) held while lo <= t < hi."""
    held = list(held)
    change = np.zeros(max((hi for _, hi, _ in held), default=0) + 1)
    for lo, hi, n in held:
        if hi > lo:
            change[lo] += n
            change[hi] -= n
    return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class Problem:
    """The network of (1)-(3).

    Attributes:
        costs: c_i, one float64 array [k_i] per node.
        edges: e_ij; arrays may be shared between edges (repeated layers), which the reductions exploit by identity.
        usages: u_i with their intervals.
        limit: bytes; None leaves out (2).
        names: one label per node for messages, or ().
        ties: one class number per node, or (): nodes of one class (repeated layers) have equally many states and are meant
            to take the same one. Tying is a restriction, not a reduction: the answer says so.
    """

    costs: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Usage, ...] = ()
    limit: float | None = None
    names: tuple[str, ...] = ()
    ties: tuple[int, ...] = ()

    @functools.cached_property
    def n_states(self) -> int:
        """Of all nodes together."""
        return sum(map(len, self.costs))

    @functools.cached_property
    def finite_ranges(self) -> list[tuple[float, float]]:
        """The least and the largest finite cost of every node and of every edge."""
        tables = [*self.costs, *(e.cost for e in self.edges)]
        ranges = {key: finite_range(entries) for key, entries in {id(entries): entries for entries in tables}.items()}
        return [ranges[id(entries)] for entries in tables]

    @functools.cached_property
    def big_m(self) -> float:
        """A power of two above the difference of any two finite objectives: what stands for inf where sums must stay finite."""
        return 2.0 ** float(np.ceil(np.log2(4 * max(sum(high - low for low, high in self.finite_ranges), 1.0))))

    def map_costs(self, change: Callable[[np.ndarray], np.ndarray]) -> Problem:
        """The problem with other costs, of the same shapes; edges that shared a table share what it became."""
        tables = {id(table): change(table) for table in {id(e.cost): e.cost for e in self.edges}.values()}
        edges = tuple(replace(e, cost=tables[id(e.cost)]) for e in self.edges)
        return replace(self, costs=tuple(map(change, self.costs)), edges=edges)

    def objective(self, states) -> float:
        """(1) of a full choice of states; inf when it takes a forbidden entry."""
        total = sum(float(c[s]) for c, s in zip(self.costs, states, strict=True))
        return total + sum(float(e.cost[states[e.i], states[e.j]]) for e in self.edges)

    def lower_bound(self) -> float:
        """What no choice of states costs less than."""
        return sum(low for low, _ in self.finite_ranges)

    def upper_bound(self) -> float:
        """What no choice of states costs more than, unless it takes a forbidden entry."""
        return sum(max(high, 0.0) for _, high in self.finite_ranges)

    def memory(self, states) -> np.ndarray:
        """Left side of (2) for every time step, shape [T]."""
        return sum_over_intervals((u.lo, u.hi, float(u.bytes[states[u.node]])) for u in self.usages)

    def peak(self, states) -> float:
        return float(self.memory(states).max(initial=0.0))


def indicator_costs(table: np.ndarray) -> np.ndarray:
    """Costs of 0 for all that is not forbidden."""
    return np.where(np.isfinite(table), 0.0, np.inf)


@dataclass(frozen=True)
class Solution:
    """An answer with its proof.

    Attributes:
        status: "optimal" (bound reached), "feasible" (an incumbent and a gap), "infeasible" (proven: nothing fits),
            "fallback" (the hint or propagation's answer, nothing better in time).
        states: s_i, one per node; () when infeasible.
        objective: (1) of `states`.
        bound: a valid lower bound of (1) over all choices that satisfy (2)-(3) (and the ties, when `tied`).
        tied: whether states were restricted by `Problem.ties`.
        stats: what each link of the chain did (counts, seconds), for people.
    """

    status: Status
    states: tuple[int, ...]
    objective: float
    bound: float
    tied: bool = False
    stats: dict = field(default_factory=dict, compare=False)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective, 0 when both are 0, inf where there is a bound and no answer."""
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1e-30) if np.isfinite(self.objective) else np.inf


def finite_range(entries: np.ndarray) -> tuple[float, float]:
    """The least and the largest finite entry; (0, 0) where there is none."""
    low, high = float(entries.min(initial=np.inf)), float(entries.max(initial=-np.inf))
    if high == np.inf:
        high = float(np.where(entries < np.inf, entries, -np.inf).max(initial=-np.inf))
    return (low, high) if high > -np.inf else (0.0, 0.0)
