"""The loops that numpy cannot vectorise, compiled by numba: flat arrays in, flat arrays out, no Python objects.

A network is one tuple of arrays (`KernelNetwork`), made by `flatten`. `field[x]`, for x a state of node i, is what (1) would pay at i if
i took that state while all others stay: the change of cost of any one-node move is a difference of two fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem

PIECE = 1 << 20  # entries

jit = numba.njit(cache=True, nogil=True, fastmath=False)


class KernelNetwork(NamedTuple):
    """States of all nodes in a row, node i's at start[i] .. start[i + 1]; arcs, tables and usages likewise."""

    start: np.ndarray
    node_of: np.ndarray  # [states]
    unary: np.ndarray  # [states], node costs
    near_start: np.ndarray  # [n + 1], first arc of each node
    near: np.ndarray  # [2 m], head of each arc
    table: np.ndarray  # [2 m], first entry of the arc's table; the row of state s begins s * k_head later
    pool: np.ndarray  # entries of all tables
    use_start: np.ndarray  # [n + 1], first usage of each node
    lo: np.ndarray
    hi: np.ndarray
    row: np.ndarray  # first entry of each usage in `bytes`
    bytes: np.ndarray  # above the least of the usage's states
    base: np.ndarray  # [steps], the sum of all least bytes
    steps: int
    limit: float


def flatten(problem: Problem, deadline: Deadline = UNLIMITED) -> KernelNetwork:
    """The arrays of a problem; forbidden costs become its big M."""

    def finite(values: np.ndarray) -> np.ndarray:
        for part in np.split(values, range(PIECE, len(values), PIECE)):
            deadline.check()
            part[np.isinf(part)] = problem.big_m
        return values

    flat, pool, place, total = problem.flat, [], {}, 0
    arcs = zip(flat.edge.tolist(), flat.side.tolist(), strict=True)
    tables = [((id(flat.edges[e].cost), side), flat.edges[e].cost.T if side else flat.edges[e].cost) for e, side in arcs]
    for key, table in tables:
        if key not in place:
            place[key] = total
            pool.append(table)
            total += table.size
    deadline.check()
    steps = max((u.hi for u in problem.usages), default=0)
    base = np.zeros(steps + 1)
    for u in problem.usages:
        base[u.lo] += u.min_bytes
        base[u.hi] -= u.min_bytes
    deadline.check()
    usages = sorted((u for u in problem.usages if u.max_bytes > u.min_bytes), key=lambda u: u.node)
    deadline.check()
    widths = np.array([len(u.bytes) for u in usages], dtype=np.int64)
    n = len(problem.costs)
    return KernelNetwork(
        start=flat.start,
        node_of=np.repeat(np.arange(n), np.diff(flat.start)),
        unary=finite(concatenate_tables(problem.costs)),
        near_start=flat.first,
        near=flat.head,
        table=np.array([place[key] for key, _ in tables], dtype=np.int64),
        pool=finite(concatenate_tables(pool, deadline)),
        use_start=np.searchsorted([u.node for u in usages], np.arange(n + 1)).astype(np.int64),
        lo=np.array([u.lo for u in usages], dtype=np.int64),
        hi=np.array([u.hi for u in usages], dtype=np.int64),
        row=np.cumsum(widths) - widths,
        bytes=np.concatenate([u.bytes - u.min_bytes for u in usages]) if usages else np.zeros(0),
        base=np.cumsum(base)[:steps],
        steps=steps,
        limit=np.inf if problem.limit is None else float(problem.limit),
    )


def concatenate_tables(tables: Sequence[np.ndarray], deadline: Deadline = UNLIMITED) -> np.ndarray:
    """All tables' entries, row by row each. Large ones take time, so the deadline is checked between them."""
    entries, at = np.empty(sum(table.size for table in tables)), 0
    for table in tables:
        deadline.check()
        entries[at : at + table.size].reshape(table.shape)[...] = table
        at += table.size
    return entries


# ---------------------------------------------------------------- highest step of a range, under range additions


@jit
def tree_new(steps):
    """A segment tree over the steps: [0] highest value below a vertex, [1] what was added at the vertex."""
    leaves = 1
    while leaves < steps + 2:
        leaves *= 2
    return np.zeros((2, 2 * leaves))


@jit
def tree_add(tree, lo, hi, value):
    top, added = tree[0], tree[1]
    leaves = len(top) // 2
    left, right = lo + leaves, hi + 1 + leaves  # open ends
    while left ^ right ^ 1:
        if not left & 1:
            top[left ^ 1] += value
            added[left ^ 1] += value
        if right & 1:
            top[right ^ 1] += value
            added[right ^ 1] += value
        left >>= 1
        right >>= 1
        top[left] = max(top[2 * left], top[2 * left + 1]) + added[left]
        top[right] = max(top[2 * right], top[2 * right + 1]) + added[right]
    left >>= 1
    while left:
        top[left] = max(top[2 * left], top[2 * left + 1]) + added[left]
        left >>= 1


@jit
def tree_max(tree, lo, hi):
    top, added = tree[0], tree[1]
    leaves = len(top) // 2
    left, right = lo + leaves, hi + 1 + leaves
    best_left = best_right = -np.inf
    while left ^ right ^ 1:
        if not left & 1:
            best_left = max(best_left, top[left ^ 1])
        if right & 1:
            best_right = max(best_right, top[right ^ 1])
        left >>= 1
        right >>= 1
        best_left += added[left]
        best_right += added[right]
    best = max(best_left, best_right)
    left >>= 1
    while left:
        best += added[left]
        left >>= 1
    return best


# ---------------------------------------------------------------- fields, profiles, tolls


@jit
def conditional_costs(net, states, extra):
    """`field` of every state; `extra` is added to the node costs."""
    field = net.unary + extra
    for i in range(len(states)):
        for e in range(net.near_start[i], net.near_start[i + 1]):
            j = net.near[e]
            first, k = net.start[j], net.start[j + 1] - net.start[j]
            row = net.table[e] + states[i] * k
            for x in range(k):
                field[first + x] += net.pool[row + x]
    return field


@jit
def profile_tree(net, states):
    tree = tree_new(net.steps)
    leaves = tree.shape[1] // 2
    for t in range(net.steps):
        tree[0, leaves + 1 + t] = net.base[t]
    for v in range(leaves - 1, 0, -1):
        tree[0, v] = max(tree[0, 2 * v], tree[0, 2 * v + 1])
    for i in range(len(states)):
        for u in range(net.use_start[i], net.use_start[i + 1]):
            tree_add(tree, net.lo[u], net.hi[u], net.bytes[net.row[u] + states[i]])
    return tree


@jit
def profile(net, states):
    change = np.zeros(net.steps + 1)
    for i in range(len(states)):
        for u in range(net.use_start[i], net.use_start[i + 1]):
            b = net.bytes[net.row[u] + states[i]]
            change[net.lo[u]] += b
            change[net.hi[u]] -= b
    return np.cumsum(change)[: net.steps] + net.base


@jit
def penalty(net, prices):
    """What prices on bytes add to every state."""
    paid = np.zeros(net.steps + 1)
    for t in range(net.steps):
        paid[t + 1] = paid[t] + prices[t]
    extra = np.zeros(len(net.unary))
    for i in range(len(net.start) - 1):
        for u in range(net.use_start[i], net.use_start[i + 1]):
            per_byte = paid[net.hi[u]] - paid[net.lo[u]]
            if per_byte != 0.0:
                for x in range(net.start[i + 1] - net.start[i]):
                    extra[net.start[i] + x] += per_byte * net.bytes[net.row[u] + x]
    return extra


@jit
def objective(net, states):
    """(1), forbidden entries at their number."""
    total = 0.0
    for i in range(len(states)):
        total += net.unary[net.start[i] + states[i]]
        for e in range(net.near_start[i], net.near_start[i + 1]):
            j = net.near[e]
            if j > i:
                total += net.pool[net.table[e] + states[i] * (net.start[j + 1] - net.start[j]) + states[j]]
    return total


# ---------------------------------------------------------------- moves


@jit
def flip(net, states, field, i, s):
    """Node i takes state s: its neighbours' fields follow."""
    old = states[i]
    states[i] = s
    for e in range(net.near_start[i], net.near_start[i + 1]):
        j = net.near[e]
        first, k = net.start[j], net.start[j + 1] - net.start[j]
        new_row, old_row = net.table[e] + s * k, net.table[e] + old * k
        for x in range(k):
            field[first + x] += net.pool[new_row + x] - net.pool[old_row + x]


@jit
def try_bytes(net, tree, i, old, new):
    """Tries to hold the bytes of state `new` instead of `old`: the tree changes and True, or it stays and False.

    Steps that are above the limit already may not rise.
    """
    first, last = net.use_start[i], net.use_start[i + 1]
    if last - first == 1:
        delta = net.bytes[net.row[first] + new] - net.bytes[net.row[first] + old]
        if delta > 0 and tree_max(tree, net.lo[first], net.hi[first]) + delta > net.limit:
            return False
        if delta != 0:
            tree_add(tree, net.lo[first], net.hi[first], delta)
        return True
    for u in range(first, last):
        delta = net.bytes[net.row[u] + new] - net.bytes[net.row[u] + old]
        if delta != 0:
            tree_add(tree, net.lo[u], net.hi[u], delta)
    for u in range(first, last):
        delta = net.bytes[net.row[u] + new] - net.bytes[net.row[u] + old]
        if delta > 0 and tree_max(tree, net.lo[u], net.hi[u]) > net.limit:
            for v in range(first, last):
                back = net.bytes[net.row[v] + old] - net.bytes[net.row[v] + new]
                if back != 0:
                    tree_add(tree, net.lo[v], net.hi[v], back)
            return False
    return True


@jit
def random_unit(seed):
    """xorshift64*: the next number in (0, 1]; `seed` is an array of one uint64."""
    x = seed[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    seed[0] = x
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0) + 1e-300


@jit
def anneal(net, states, field, tree, hard, hot, cold, proposals, seed, best, gained):
    """Metropolis moves at temperatures falling from `hot` to `cold`.

    `hard`: the limit holds for every move. `best` gets the best states met; `gained[0]` the cost relative to the start
    (now), `gained[1]` at `best`.
    """
    n_states = len(net.unary)
    ratio = (cold / hot) ** (1.0 / max(1, proposals // 1024))
    temperature = hot
    accepted = 0
    for p in range(proposals):
        if p & 1023 == 1023:
            temperature *= ratio
            if gained[0] < gained[1]:
                gained[1] = gained[0]
                best[:] = states
        x = int(random_unit(seed) * n_states)
        if x >= n_states:
            x = n_states - 1
        i = net.node_of[x]
        s = x - net.start[i]
        if s == states[i]:
            continue
        delta = field[x] - field[net.start[i] + states[i]]
        if delta > 0 and delta > -temperature * np.log(random_unit(seed)):
            continue
        if hard and not try_bytes(net, tree, i, states[i], s):
            continue
        flip(net, states, field, i, s)
        gained[0] += delta
        accepted += 1
    if gained[0] < gained[1]:
        gained[1] = gained[0]
        best[:] = states
    return accepted


@jit
def repair(net, states, field, tree, moves):
    """Brings the steps above the limit down by one-node moves, least cost per byte first, highest step first.

    1: it fits, 0: not yet, after so many moves, -1: no move is left.
    """
    leaves = tree.shape[1] // 2
    for _ in range(moves):
        if net.steps == 0 or tree[0, 1] <= net.limit:
            return 1
        vertex = 1  # down to the highest step
        while vertex < leaves:
            vertex = 2 * vertex if tree[0, 2 * vertex] >= tree[0, 2 * vertex + 1] else 2 * vertex + 1
        step = vertex - leaves - 1
        excess = tree[0, 1] - net.limit
        tried = 0
        refused = np.zeros(len(net.unary), dtype=np.bool_)
        moved = False
        while not moved and tried < 50:
            best, best_i, best_s = np.inf, -1, -1
            for i in range(len(states)):
                k = net.start[i + 1] - net.start[i]
                for s in range(k):
                    if s == states[i] or refused[net.start[i] + s]:
                        continue
                    saved = 0.0
                    for u in range(net.use_start[i], net.use_start[i + 1]):
                        if net.lo[u] <= step < net.hi[u]:
                            saved += net.bytes[net.row[u] + states[i]] - net.bytes[net.row[u] + s]
                    if saved > 0:
                        price = (field[net.start[i] + s] - field[net.start[i] + states[i]]) / min(saved, excess)
                        if price < best:
                            best, best_i, best_s = price, i, s
            if best_i < 0:
                return -1
            if try_bytes(net, tree, best_i, states[best_i], best_s):
                flip(net, states, field, best_i, best_s)
                moved = True
            else:
                refused[net.start[best_i] + best_s] = True
                tried += 1
        if not moved:
            return -1
    return 0


# ---------------------------------------------------------------- costs shifted along edges


@numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})  # or a loop that looks for the least is not vectorised
def least_sum(a, b):
    low = a[0] + b[0]
    for s in range(1, len(b)):
        both = a[s] + b[s]
        low = both if both < low else low
    return low


@jit
def trws_rounds(costs, start, first, links, tables, share, messages, rounds):
    """`Shift.rounds` over flat arrays: the same sums, so the same messages to the last bit.

    Link d of node i, first[i] <= d < first[i + 1], is (its message, the other node's message, its table, the other node's states,
    whether i's states are the table's rows, whether the other node comes later).
    """
    n = len(start) - 1
    widest = 1
    for i in range(n):
        widest = max(widest, start[i + 1] - start[i])
    cost, kept, least = np.empty(widest), np.empty(widest), np.empty(widest)
    for turn in range(2 * rounds):
        forward = 1 - turn % 2
        for x in range(n):
            i = x if forward else n - 1 - x
            k = start[i + 1] - start[i]
            for s in range(k):
                cost[s] = costs[start[i] + s]
            for d in range(first[i], first[i + 1]):
                for s in range(k):
                    cost[s] += messages[links[d, 0] + s]
            low = cost[0]
            for s in range(1, k):
                low = min(low, cost[s])
            for s in range(k):
                cost[s] = (cost[s] - low) * share[i]
            for d in range(first[i], first[i + 1]):
                if links[d, 5] != forward:
                    continue
                mine, other, at, width = links[d, 0], links[d, 1], links[d, 2], links[d, 3]
                given = least[:width]
                for s in range(k):
                    kept[s] = cost[s] - messages[mine + s]
                if links[d, 4]:
                    given[:] = np.inf
                    for s in range(k):
                        row, own = tables[at + s * width : at + (s + 1) * width], kept[s]
                        for t in range(width):
                            both = own + row[t]
                            given[t] = both if both < given[t] else given[t]
                else:
                    for t in range(width):
                        given[t] = least_sum(kept[:k], tables[at + t * k : at + (t + 1) * k])
                low = given[0]
                for t in range(1, width):
                    low = min(low, given[t])
                for t in range(width):
                    messages[other + t] = given[t] - low
