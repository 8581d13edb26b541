"""Dead-end elimination: which states of a node another one replaces at no more cost, whatever its neighbors take.

State b dominates a if  c[b] + sum_j max_x (e_ij[b, x] - e_ij[a, x]) <= c[a]  and u[b] <= u[a] in every interval; of two states that
dominate each other the lower number stays.

Source: Desmet et al., Nature 356, 1992; neighborhood substitutability, Freuder, AAAI 1991.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardplan.ilp.solver.presolve.reductions import PresolveNetwork

TOGETHER_ENTRIES = 1 << 16
"""Entries of the pairs of a node's states up to which all its edges are looked at in one go."""

MANY_INTERVALS = 64
"""Intervals of memory of a node from which equal ones are compared once."""

_FINITE = 1e300


def undominated_states(net: PresolveNetwork, i: int, max_entries: int) -> np.ndarray:
    """Mask of the states that dead-end elimination leaves: all if the test would visit more than `max_entries`."""
    usage = net.usage(i)
    amounts = None if usage is None else usage[1]
    return net.once(_undominated, max_entries, amounts, net.costs[i], *net.adj[i].values())


def _undominated(max_entries: int, amounts: np.ndarray | None, cost: np.ndarray, *tables: np.ndarray) -> np.ndarray:
    k, columns = len(cost), sum(t.shape[1] for t in tables)
    keep = np.ones(k, dtype=bool)
    if k == 1 or k * k > max_entries:
        return keep
    slack = cost[:, None] - cost[None, :]  # [a, b]: what b's edges may cost more than a's
    slack.flat[:: k + 1] = -np.inf
    together = 4 * len(tables) * k * k <= TOGETHER_ENTRIES
    parts = [_SideBySide(some) for some in ([tables] if together and tables else [[table] for table in tables])]
    with np.errstate(invalid="ignore"):
        for part in parts:  # a few columns rule out most pairs
            sample = part.joint.T[part.few_columns()]  # where both are forbidden the difference is nan, which exceeds nothing
            costlier = np.logical_or.reduce(sample[:, None, :] - sample[:, :, None] > slack)
            slack[costlier] = -np.inf
            if np.count_nonzero(costlier) and np.maximum.reduce(slack, axis=None) == -np.inf:
                return keep
    a, b = np.nonzero(slack >= -_FINITE)
    if len(a) * columns > max_entries:
        return keep
    a, b = _fitting(amounts, a, b)
    rest = slack[a, b]
    for part in parts:
        for most in np.maximum.reduceat(_difference(part.joint[b], part.joint[a]), part.bounds[:-1], axis=1).T:
            rest = rest - most
    dominated = {*zip(a[rest >= 0].tolist(), b[rest >= 0].tolist(), strict=True)}
    for p, q in sorted(dominated):
        if keep[p] and keep[q] and ((q, p) not in dominated or q < p):
            keep[p] = False
    return keep


class _SideBySide:
    """Tables of a node's edges as one, [k, sum of their columns]; table n has the columns from bounds[n] on, before bounds[n + 1]."""

    def __init__(self, tables: Sequence[np.ndarray]):
        self.joint = np.concatenate(tables, axis=1) if len(tables) > 1 else tables[0]
        self.bounds = [0, *itertools.accumulate(t.shape[1] for t in tables)]

    def few_columns(self) -> list[int]:
        """The first, middle, last and cheapest column of each table."""
        least = np.minimum.reduce(self.joint)
        each = (sorted({i, (i + j) // 2, j - 1, i + int(least[i:j].argmin())}) for i, j in itertools.pairwise(self.bounds))
        return [*itertools.chain.from_iterable(each)]


def _fitting(amounts: np.ndarray | None, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those of the pairs (a, b) of which b holds no more than a in every interval."""
    if amounts is None or not len(a):
        return a, b
    if len(amounts) > MANY_INTERVALS:
        amounts = np.unique(amounts, axis=0)
    fits = [  # in pieces: an aggregated node may hold thousands of intervals
        (amounts[:, b[first : first + 256]] <= amounts[:, a[first : first + 256]]).all(axis=0) for first in range(0, len(a), 256)
    ]
    fits = np.concatenate(fits)
    return a[fits], b[fits]


def _difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """`after - before`; -inf where `before` is forbidden, for any replacement is as good there."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(before), -np.inf, after - before)
