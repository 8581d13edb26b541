"""Tree moves: all nodes but a few take their joint optimum, exactly, by dynamic programming.

Fixing a node cuts its edges. A schedule fixes just enough nodes that the rest can be eliminated with small bucket tables. Schedules fix
different nodes, so the next one changes what one cannot.

Also known as: very-large-neighbourhood search; (w-)cutset conditioning; subgraph moves of bounded treewidth.
"""

from __future__ import annotations

import heapq
import math
from itertools import accumulate, chain, pairwise
from operator import mul
from typing import NamedTuple

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.kernels import KernelNetwork, jit


class EliminationSchedule(NamedTuple):
    """Bucket elimination as a flat program for `tree_move`: bucket b minimizes node[b] out for all states of its outer nodes.

    A part is a table of the bucket's sum, in the pool of edge tables or among the messages, with a stride per outer node and one for
    the bucket's own node.
    """

    fixed: np.ndarray  # [n], which nodes keep their states
    node: np.ndarray
    outer_start: np.ndarray
    outer: np.ndarray
    size: np.ndarray  # states of each outer node
    message: np.ndarray  # where the bucket's message starts
    part_start: np.ndarray
    part_sent: np.ndarray  # 1: a message, 0: an edge table
    part_at: np.ndarray
    stride_start: np.ndarray
    stride: np.ndarray
    message_entries: int


def elimination_schedule(net: KernelNetwork, cap: int, weight: np.ndarray, deadline: Deadline = UNLIMITED) -> EliminationSchedule:
    """A schedule by min-weight elimination; of a bucket table of more than `cap` entries, the node of greatest weight [n] is fixed."""
    n, k, order = len(net.start) - 1, np.diff(net.start).tolist(), []
    graph = [set(net.near[a:b].tolist()) for a, b in pairwise(net.near_start)]

    def entries(i: int) -> int:
        return math.prod([k[j] for j in graph[i]]) * k[i]

    heap = [(entries(i), i) for i in range(n)]
    heapq.heapify(heap)
    fixed, gone = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    while heap:
        deadline.check()
        size, i = heapq.heappop(heap)
        if gone[i]:
            continue
        if (now := entries(i)) != size:
            heapq.heappush(heap, (now, i))
            continue
        around = graph[i]
        if size > cap:  # fix the heaviest node of the bucket
            heaviest = max((*around, i), key=lambda j: (weight[j] * len(graph[j]) * math.log(k[j] + 1), j))
            fixed[heaviest] = gone[heaviest] = True
            touched = graph[heaviest]
            for j in touched:
                graph[j].discard(heaviest)
            if heaviest != i:
                heapq.heappush(heap, (entries(i), i))
        else:
            gone[i] = True
            order.append(i)
            touched = around
            for j in around:
                graph[j] |= around
                graph[j] -= {i, j}
        for j in touched:
            if not gone[j]:
                heapq.heappush(heap, (entries(j), j))
    return _compile(net, k, fixed, order, deadline)


def _compile(net: KernelNetwork, k: list[int], fixed: np.ndarray, order: list[int], deadline: Deadline) -> EliminationSchedule:
    when = {i: b for b, i in enumerate(order)}
    inbox: list[list] = [[] for _ in order]  # parts of each bucket: (sent, where, [(node, stride)])
    for i in order:
        for e in range(net.near_start[i], net.near_start[i + 1]):
            j = int(net.near[e])
            if i < j and not fixed[j]:
                inbox[min(when[i], when[j])].append((0, int(net.table[e]), ((i, k[j]), (j, 1))))
    scopes, strides, parts, n_parts, message = [], [], [], [], [0]
    for b, i in enumerate(order):
        deadline.check()
        scope = sorted({j for _, _, axes in inbox[b] for j, _ in axes} - {i}, key=when.__getitem__, reverse=True)
        scopes.append(scope)
        n_parts.append(len(inbox[b]))
        for sent, at, axes in inbox[b]:
            parts.append((sent, at))
            strides.append([dict(axes).get(j, 0) for j in (*scope, i)])
        sizes = list(accumulate([k[j] for j in reversed(scope)], mul, initial=1))
        if scope:
            inbox[when[scope[-1]]].append((1, message[-1], tuple(zip(reversed(scope), sizes, strict=False))))
        message.append(message[-1] + sizes[-1])
        inbox[b] = []

    def ints(values) -> np.ndarray:
        return np.array(list(values), dtype=np.int64)

    outer, part_sent, part_at = ints(chain.from_iterable(scopes)), ints(sent for sent, _ in parts), ints(at for _, at in parts)
    starts = (ints(accumulate(lengths, initial=0)) for lengths in (map(len, scopes), n_parts, map(len, strides)))
    outer_start, part_start, stride_start = starts
    return EliminationSchedule(
        fixed, ints(order), outer_start, outer, ints(k)[outer], ints(message[:-1]), part_start, part_sent, part_at, stride_start,
        ints(chain.from_iterable(strides)), message[-1],
    )  # fmt: skip


@jit
def tree_move(net, schedule, extra, states):
    """Moves all nodes that are not fixed to the joint optimum of (1) plus `extra` [states of all nodes]; `states` change in place."""
    messages = np.empty(schedule.message_entries)
    best = np.empty(schedule.message_entries, dtype=np.int16)
    total, at = np.empty(len(net.unary)), np.empty(len(schedule.part_at), dtype=np.int64)  # longer than any bucket needs
    digit = np.empty(64, dtype=np.int64)
    for b in range(len(schedule.node)):
        i = schedule.node[b]
        first, k = net.start[i], net.start[i + 1] - net.start[i]
        own = net.unary[first : first + k] + extra[first : first + k]
        for e in range(net.near_start[i], net.near_start[i + 1]):
            j = net.near[e]
            if schedule.fixed[j]:
                width = net.start[j + 1] - net.start[j]
                for s in range(k):
                    own[s] += net.pool[net.table[e] + s * width + states[j]]
        d0, p0, p1 = schedule.outer_start[b], schedule.part_start[b], schedule.part_start[b + 1]
        dims = schedule.outer_start[b + 1] - d0
        at[: p1 - p0] = schedule.part_at[p0:p1]
        entries = 1
        for d in range(dims):
            digit[d] = 0
            entries *= schedule.size[d0 + d]
        out = schedule.message[b]
        for x in range(entries):
            for s in range(k):
                total[s] = own[s]
            for p in range(p0, p1):
                where, step = at[p - p0], schedule.stride[schedule.stride_start[p] + dims]
                if schedule.part_sent[p]:
                    for s in range(k):
                        total[s] += messages[where + s * step]
                else:
                    for s in range(k):
                        total[s] += net.pool[where + s * step]
            least, arg = total[0], 0
            for s in range(1, k):
                if total[s] < least:
                    least, arg = total[s], s
            messages[out + x] = least
            best[out + x] = arg
            d = dims - 1
            while d >= 0:
                digit[d] += 1
                wrapped = digit[d] == schedule.size[d0 + d]
                for p in range(p0, p1):
                    step = schedule.stride[schedule.stride_start[p] + d]
                    at[p - p0] += step - (step * schedule.size[d0 + d] if wrapped else 0)
                if not wrapped:
                    break
                digit[d] = 0
                d -= 1
    for b in range(len(schedule.node) - 1, -1, -1):
        x = 0
        for d in range(schedule.outer_start[b], schedule.outer_start[b + 1]):
            x = x * schedule.size[d] + states[schedule.outer[d]]
        states[schedule.node[b]] = best[schedule.message[b] + x]
