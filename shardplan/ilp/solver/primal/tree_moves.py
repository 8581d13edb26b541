"""Tree moves: all nodes but a few take their joint optimum, exactly, by dynamic programming.

Fixing a node cuts its edges. A schedule fixes just enough nodes that the rest can be eliminated with bucket tables of at most `cap`
entries, so one move finds the best of exponentially many neighbours of the current states. Schedules fix different nodes (`weight`
says which rather), so what one cannot change the next one can.

Also known as: very-large-neighbourhood search; (w-)cutset conditioning; subgraph moves of bounded treewidth.
"""

from __future__ import annotations

import heapq
import math
from itertools import pairwise
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
    """A schedule by min-weight elimination; where a bucket table is too large, its node of greatest weight is fixed.

    Args:
        net: the network.
        cap: entries of a bucket table.
        weight: [n]; nodes of large weight are fixed rather than others.
        deadline: checked between nodes.
    """
    n = len(net.start) - 1
    k = np.diff(net.start).tolist()
    graph = [set(net.near[a:b].tolist()) for a, b in pairwise(net.near_start)]
    order = []
    heap = [(math.prod([k[j] for j in graph[i]]) * k[i], i) for i in range(n)]
    heapq.heapify(heap)
    fixed, gone = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    while heap:
        deadline.check()
        size, i = heapq.heappop(heap)
        if gone[i]:
            continue
        now = math.prod([k[j] for j in graph[i]]) * k[i]
        if now != size:
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
                heapq.heappush(heap, (math.prod([k[j] for j in graph[i]]) * k[i], i))
        else:
            gone[i] = True
            order.append(i)
            touched = around
            for j in around:
                graph[j] |= around
                graph[j] -= {i, j}
        for j in touched:
            if not gone[j]:
                heapq.heappush(heap, (math.prod([k[x] for x in graph[j]]) * k[j], j))
    return _compile(net, k, fixed, order, deadline)


def _compile(net: KernelNetwork, k: list[int], fixed: np.ndarray, order: list[int], deadline: Deadline) -> EliminationSchedule:
    when = {i: b for b, i in enumerate(order)}
    inbox: list[list] = [[] for _ in order]  # parts of each bucket: (sent, where, [(node, stride)])
    for i in order:
        for e in range(net.near_start[i], net.near_start[i + 1]):
            j = int(net.near[e])
            if i < j and not fixed[j]:
                inbox[min(when[i], when[j])].append((0, int(net.table[e]), ((i, k[j]), (j, 1))))
    outer_start, outer, message, part_start, part_sent, part_at, stride_start, stride = [0], [], [], [0], [], [], [0], []
    n_entries = 0
    for b, i in enumerate(order):
        deadline.check()
        scope = sorted({j for _, _, axes in inbox[b] for j, _ in axes} - {i}, key=when.__getitem__, reverse=True)
        for sent, at, axes in inbox[b]:
            by_node = dict(axes)
            stride += [by_node.get(j, 0) for j in scope] + [by_node.get(i, 0)]
            stride_start.append(len(stride))
            part_sent.append(sent)
            part_at.append(at)
        part_start.append(len(part_at))
        outer += scope
        outer_start.append(len(outer))
        message.append(n_entries)
        entries = 1
        axes = []
        for j in reversed(scope):
            axes.append((j, entries))
            entries *= k[j]
        if scope:
            inbox[when[scope[-1]]].append((1, n_entries, tuple(axes)))
        n_entries += entries
        inbox[b] = []

    def ints(values):
        return np.array(values, dtype=np.int64)

    outer = ints(outer)
    return EliminationSchedule(
        fixed, ints(order), ints(outer_start), outer, ints(k)[outer], ints(message), ints(part_start), ints(part_sent),
        ints(part_at), ints(stride_start), ints(stride), n_entries,
    )  # fmt: skip


@jit
def tree_move(net, schedule, extra, states):
    """Moves all nodes that are not fixed to the joint optimum of (1) plus `extra` [states of all nodes]; `states` change in place."""
    messages = np.empty(schedule.message_entries)
    best = np.empty(schedule.message_entries, dtype=np.int16)
    total = np.empty(1 + max_states(net))
    at = np.empty(1 + max_parts(schedule), dtype=np.int64)
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
        d0, d1 = schedule.outer_start[b], schedule.outer_start[b + 1]
        p0, p1 = schedule.part_start[b], schedule.part_start[b + 1]
        dims = d1 - d0
        for p in range(p0, p1):
            at[p - p0] = schedule.part_at[p]
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


@jit
def max_states(net):
    """The most states of a node."""
    most = 1
    for i in range(len(net.start) - 1):
        most = max(most, net.start[i + 1] - net.start[i])
    return most


@jit
def max_parts(schedule):
    """The most parts of a bucket."""
    most = 0
    for b in range(len(schedule.node)):
        most = max(most, schedule.part_start[b + 1] - schedule.part_start[b])
    return most
