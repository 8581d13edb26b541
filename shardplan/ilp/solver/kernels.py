"""Loops that numpy cannot vectorize, compiled by numba: flat arrays in, flat arrays out, no Python objects.

The conditional cost of a state of node i is the part of (1) that depends on s_i, if i took that state and all others stayed.

Imported only where numba is installed, and only when a search is long enough to pay for loading it. Twins in numpy: relax/trws.py for
`trws_round`, search/repair.py for `conditional_costs`, `flip` and `repair`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem, UsageTable

PIECE = 1 << 20  # entries between two checks of the deadline
BLOCKS = 128  # parts of the time whose nodes are listed, so that `repair` visits few that hold nothing at its step
LISTED = 16  # flips that `repair` lists at once
REFUSED = 50  # flips tried at one step that only move an excess to another step, before `repair` gives up

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
    bytes: np.ndarray
    block: int  # steps of a block
    block_start: np.ndarray  # [blocks + 1], first node of each block of steps
    block_node: np.ndarray  # nodes that hold bytes within each block, rising
    steps: int
    limit: float


def flatten(problem: Problem, deadline: Deadline = UNLIMITED) -> KernelNetwork:
    """The arrays of a problem; forbidden costs become its big M."""

    def finite(values: np.ndarray) -> np.ndarray:
        for part in np.split(values, range(PIECE, len(values), PIECE)):
            deadline.check()
            part[np.isinf(part)] = problem.big_m
        return values

    block, block_start, block_node = nodes_by_block(problem.usage_table)
    flat, memory, costs = problem.flat, problem.usage_table, [e.cost for e in problem.edges]
    arcs = zip(flat.edge.tolist(), flat.side.tolist(), strict=True)
    pool, table = pool_tables([((id(costs[e]), side), costs[e].T if side else costs[e]) for e, side in arcs], deadline)
    return KernelNetwork(
        start=problem.start,
        node_of=np.repeat(np.arange(len(problem.costs)), np.diff(problem.start)),
        unary=finite(problem.cost_row.copy()),
        near_start=flat.first,
        near=flat.head,
        table=table,
        pool=finite(pool),
        use_start=memory.first,
        lo=memory.lo,
        hi=memory.hi,
        row=memory.row,
        bytes=memory.bytes,
        block=block,
        block_start=block_start,
        block_node=block_node,
        steps=memory.n_steps,
        limit=float(memory.limit),
    )


def nodes_by_block(memory: UsageTable) -> tuple[int, np.ndarray, np.ndarray]:
    """The nodes that hold bytes in each block of steps: `block`, `block_start` and `block_node` of a `KernelNetwork`."""
    block = -(-max(1, memory.n_steps) // BLOCKS)
    first = memory.lo // block
    count = (memory.hi - 1) // block - first + 1
    ends = np.cumsum(count)
    there = np.repeat(first - ends + count, count) + np.arange(ends[-1] if len(ends) else 0)
    pairs = np.unique(there * (len(memory.first) - 1) + np.repeat(memory.node, count))
    n = max(1, len(memory.first) - 1)
    return block, np.searchsorted(pairs // n, np.arange(BLOCKS + 1)), pairs % n


def pool_tables(keyed: Sequence[tuple[object, np.ndarray]], deadline: Deadline) -> tuple[np.ndarray, np.ndarray]:
    """The entries of all tables row by row, those of equal key once; and the first entry of each table.

    Large tables take time, so the deadline is checked between them.
    """
    tables = dict(keyed)
    ends = np.cumsum([0, *(table.size for table in tables.values())])
    place, entries = dict(zip(tables, ends.tolist(), strict=False)), np.empty(ends[-1])
    for key, table in tables.items():
        deadline.check()
        entries[place[key] : place[key] + table.size].reshape(table.shape)[...] = table
    return entries, np.array([place[key] for key, _ in keyed], dtype=np.int64)


# ---------------------------------------------------------------- segment tree: maximum of a range of steps, under range additions


@jit
def tree_new(steps):
    """A segment tree over the steps, [2, vertices]: the maximum below each vertex, and the sum added at it."""
    leaves = 1
    while leaves < steps + 2:
        leaves *= 2
    return np.zeros((2, 2 * leaves))


@jit
def tree_add(tree, lo, hi, value):
    """Adds a value to the steps lo .. hi - 1."""
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
    """The maximum of the steps lo .. hi - 1."""
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


# ---------------------------------------------------------------- conditional costs, profile, objective


@jit
def conditional_costs(net, states, extra):
    """Conditional costs, [states], with `extra` [states] added to the node costs."""
    conditional = net.unary + extra
    for i in range(len(states)):
        for e in range(net.near_start[i], net.near_start[i + 1]):
            j = net.near[e]
            first, k = net.start[j], net.start[j + 1] - net.start[j]
            row = net.table[e] + states[i] * k
            for x in range(k):
                conditional[first + x] += net.pool[row + x]
    return conditional


@jit
def profile_tree(net, states):
    """A segment tree of the bytes at every step."""
    tree = tree_new(net.steps)
    for i in range(len(states)):
        for u in range(net.use_start[i], net.use_start[i + 1]):
            tree_add(tree, net.lo[u], net.hi[u], net.bytes[net.row[u] + states[i]])
    return tree


@jit
def objective(net, states):
    """(1), with forbidden entries at big M."""
    total = 0.0
    for i in range(len(states)):
        total += net.unary[net.start[i] + states[i]]
        for e in range(net.near_start[i], net.near_start[i + 1]):
            j = net.near[e]
            if j > i:
                total += net.pool[net.table[e] + states[i] * (net.start[j + 1] - net.start[j]) + states[j]]
    return total


@jit
def least_states(start, costs):
    """The first state of least cost of every node, given the costs of all nodes' states in a row."""
    states = np.empty(len(start) - 1, dtype=np.int64)
    for i in range(len(states)):
        least = start[i]
        for x in range(start[i] + 1, start[i + 1]):
            if costs[x] < costs[least]:
                least = x
        states[i] = least - start[i]
    return states


# ---------------------------------------------------------------- flips


@jit
def flip(net, states, conditional, i, s):
    """Node i takes state s; updates the conditional costs of its neighbors."""
    old = states[i]
    states[i] = s
    for e in range(net.near_start[i], net.near_start[i + 1]):
        j = net.near[e]
        first, k = net.start[j], net.start[j + 1] - net.start[j]
        new_row, old_row = net.table[e] + s * k, net.table[e] + old * k
        for x in range(k):
            conditional[first + x] += net.pool[new_row + x] - net.pool[old_row + x]


@jit
def try_bytes(net, tree, i, old, new):
    """Replaces node i's bytes of state `old` by those of `new` and returns True; or False, if a rising step would exceed the limit."""
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
    """The next number in (0, 1] of xorshift64* (Vigna, ACM TOMS 42(4), 2016); `seed` is an array of one uint64."""
    x = seed[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    seed[0] = x
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0) + 1e-300


@jit
def anneal(net, states, conditional, tree, hot, cold, proposals, seed, best, change):
    """Simulated annealing within the limit: Metropolis flips at temperatures that fall from `hot` to `cold`.

    `best` receives the best states met; `change[0]` the current cost relative to the start, `change[1]` that of `best`.
    """
    n_states = len(net.unary)
    ratio = (cold / hot) ** (1.0 / max(1, proposals // 1024))
    temperature = hot
    for p in range(proposals):
        if p & 1023 == 1023:
            temperature *= ratio
            if change[0] < change[1]:
                change[1] = change[0]
                best[:] = states
        x = min(int(random_unit(seed) * n_states), n_states - 1)
        i = net.node_of[x]
        s = x - net.start[i]
        if s == states[i]:
            continue
        delta = conditional[x] - conditional[net.start[i] + states[i]]
        if delta > 0 and delta > -temperature * np.log(random_unit(seed)):
            continue
        if not try_bytes(net, tree, i, states[i], s):
            continue
        flip(net, states, conditional, i, s)
        change[0] += delta
    if change[0] < change[1]:
        change[1] = change[0]
        best[:] = states


@jit
def cheapest_flips(net, states, conditional, refused, step, excess, price, flips):
    """Fills `price` and `flips` [., 2] (node, state) with the flips of least cost per byte saved at a step; returns their number."""
    found, most = 0, len(price)
    part = step // net.block
    for i in net.block_node[net.block_start[part] : net.block_start[part + 1]]:
        own = conditional[net.start[i] + states[i]]
        for s in range(net.start[i + 1] - net.start[i]):
            if s == states[i] or refused[net.start[i] + s]:
                continue
            saved = 0.0
            for u in range(net.use_start[i], net.use_start[i + 1]):
                if net.lo[u] <= step < net.hi[u]:
                    saved += net.bytes[net.row[u] + states[i]] - net.bytes[net.row[u] + s]
            if saved <= 0:
                continue
            cost = (conditional[net.start[i] + s] - own) / min(saved, excess)
            if found == most and cost >= price[most - 1]:
                continue
            found = min(found + 1, most)
            at = found - 1
            while at > 0 and price[at - 1] > cost:
                price[at] = price[at - 1]
                flips[at] = flips[at - 1]
                at -= 1
            price[at] = cost
            flips[at, 0], flips[at, 1] = i, s
    return found


@jit
def repair(net, states, conditional, tree, rounds):
    """Lowers the steps above the limit by flips, highest step first, least cost per byte saved first.

    A round lists the cheapest flips of a step and takes them while they stay cheaper than those that are not listed. Returns 1 if the
    states fit, 0 if they do not after so many rounds, -1 if no flip is left.
    """
    leaves = tree.shape[1] // 2
    refused = np.zeros(len(net.unary), dtype=np.bool_)
    price, listed = np.empty(LISTED), np.empty((LISTED, 2), dtype=np.int64)
    tried = 0
    for _ in range(rounds):
        if net.steps == 0 or tree[0, 1] <= net.limit:
            return 1
        vertex = 1  # down to the highest step
        while vertex < leaves:
            vertex = 2 * vertex if tree[0, 2 * vertex] >= tree[0, 2 * vertex + 1] else 2 * vertex + 1
        step, moved = vertex - leaves - 1, False
        found = cheapest_flips(net, states, conditional, refused, step, tree[0, 1] - net.limit, price, listed)
        for n in range(found):
            i, s = listed[n]
            old = states[i]
            if moved:  # prices may have changed
                excess = tree_max(tree, step, step + 1) - net.limit
                saved = 0.0
                for u in range(net.use_start[i], net.use_start[i + 1]):
                    if net.lo[u] <= step < net.hi[u]:
                        saved += net.bytes[net.row[u] + old] - net.bytes[net.row[u] + s]
                if excess <= 0:
                    break
                cost = conditional[net.start[i] + s] - conditional[net.start[i] + old]
                if saved <= 0 or cost > price[found - 1] * min(saved, excess):
                    continue
            if try_bytes(net, tree, i, old, s):
                flip(net, states, conditional, i, s)
                moved = True
            else:
                refused[net.start[i] + s] = True
                tried += 1
        if moved:
            refused[:] = False
            tried = 0
        elif found == 0 or tried >= REFUSED:
            return -1
    return 0


# ---------------------------------------------------------------- TRW-S


@numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})  # without these flags a minimum is not vectorized
def min_sum(a, b):
    """The minimum of a + b."""
    low = a[0] + b[0]
    for s in range(1, len(b)):
        both = a[s] + b[s]
        low = both if both < low else low
    return low


@jit
def trws_round(costs, start, first, links, tables, share, messages):
    """One round of `TRWS.iterate` over flat arrays: the same sums, so the same messages to the last bit.

    Arc d of node i, first[i] <= d < first[i + 1], is links[d]: first entry of the message to i, of the message to the head, and of the
    table; states of the head; whether i's states are the table's rows; whether the head comes later.
    """
    n = len(start) - 1
    cost, sent, least = np.empty(len(costs)), np.empty(len(costs)), np.empty(len(costs))  # longer than any node needs
    for forward in (1, 0):
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
                message = least[:width]
                for s in range(k):
                    sent[s] = cost[s] - messages[mine + s]
                if links[d, 4]:
                    message[:] = np.inf
                    for s in range(k):
                        row, own = tables[at + s * width : at + (s + 1) * width], sent[s]
                        for t in range(width):
                            both = own + row[t]
                            message[t] = both if both < message[t] else message[t]
                else:
                    for t in range(width):
                        message[t] = min_sum(sent[:k], tables[at + t * k : at + (t + 1) * k])
                low = message[0]
                for t in range(1, width):
                    low = min(low, message[t])
                for t in range(width):
                    messages[other + t] = message[t] - low
