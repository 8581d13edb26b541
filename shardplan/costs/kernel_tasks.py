"""The tasks of a decided program, and which of them are one kernel.

    fused ops     one kernel, as far as none then waits for itself
    y -> z        y is written for others, too: by the kernel of z, which reads it, whatever else that waits for

Ops of one group of fused ops with as many collectives and loops before them are one kernel, if they read each other or an array in
common. So are an op and what it reads of its group, although the op waits for a collective: XLA merges a producer into its first
consumer wherever that leaves no cycle. Example: in a loop's backward pass a kernel that waits for a gather reads a row of a stack, and
writes the row for others, too. A product of weights that reads the row then waits for the gather, and hides none of it.

Two ops of a group that read one array are one kernel, too, whatever collectives each waits for, unless one waits for the other.

Facts: schedule-fused-kernels, schedule-merged-producers, schedule-merged-siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from shardplan.mesh.reshard import ReshardStep
from shardplan.xla_model.combining import CollectiveSite

T = TypeVar("T")

OUTSIDE = -1
"""The computation that no loop holds."""


class Transfer(NamedTuple):
    """One collective of one array."""

    step: ReshardStep
    site: CollectiveSite
    value: int
    result_bytes: float  # on one device


@dataclass
class Tasks:
    """Tasks of all computations, in program order: each waits for earlier ones only.

    Attributes:
        seconds: of a kernel in one run; 0 of collectives.
        home: the loop that runs it, or OUTSIDE.
        before: what it waits for, in the order of its operands.
        transfers: those that are collectives.
        roots: by computation, the tasks whose results it hands out, in their order.
        made: by op, the task after which its result is there, -1 if it is from the start.
        computed: by op, the task that computes it first; those that take no time are missing.
        arrived: by op and operand, the last collective that brings it there, where any does.
        group: of a kernel of fused ops, its number in `FusedKernels`; -1 of other tasks.
        results: how many arrays it writes.
        inside: by task, the ops whose results it computes for itself, for no kernel writes them: a bit for each.
    """

    seconds: list[float] = field(default_factory=list)
    home: list[int] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    roots: dict[int, list[int]] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    arrived: dict[tuple[int, int], int] = field(default_factory=dict)
    group: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    inside: dict[int, int] = field(default_factory=dict)

    def step_before(self, n: int) -> int | None:
        """The collective right before collective n on the way of its array."""
        of_array = (m for m in self.before[n] if m in self.transfers and self.transfers[m].value == self.transfers[n].value)
        return next(of_array, None)

    def add(self, home: int, before: Iterable[int], seconds: float = 0.0, transfer: Transfer | None = None, group: int = -1) -> int:
        """Adds a task and returns its number.

        One that takes no time and is no collective is not added if it waits for one task or none: the number of that one is returned,
        or -1.
        """
        waits = tuple(dict.fromkeys(n for n in before if n >= 0))
        if not seconds and transfer is None and len(waits) < 2:
            return waits[0] if waits else -1
        self.seconds.append(seconds)
        self.home.append(home)
        self.before.append(waits)
        self.group.append(group)
        self.results.append(1)
        if transfer is not None:
            self.transfers[len(self.home) - 1] = transfer
        return len(self.home) - 1

    def kind(self, n: int) -> str | None:
        """The kind of collective that a task is; None for a kernel."""
        return self.transfers[n].step.kind if n in self.transfers else None

    def apart(self, some: Iterable[int]) -> list[int]:
        """Of some tasks, in ascending order, the first, and each further one that waits for none of those taken."""
        out, waiting, reached = dict[int, None](), set[int](), 0
        for n in some:
            for at in range(reached + 1, n + 1) if out else ():
                if any(m in out or m in waiting for m in self.before[at]):
                    waiting.add(at)
            if n not in waiting:
                out[n] = None
            reached = n
        return [*out]


def fused(tasks: Tasks, holders: Sequence[tuple[int, ...]] = ((OUTSIDE,),)) -> Tasks:
    """The tasks with one task per kernel, numbered anew; each waits for earlier ones only.

    1. A task that only joins others is replaced by what it waits for (`_past_joins`).
    2. Fused ops of one group with as many collectives before them are one kernel (`_leaders`).
    3. A kernel that would then wait for itself is split into its ops (`_without_cycles`).
    4. A kernel takes in the ops of its group that make what it reads, or that read what it reads, if no kernel then waits for itself
       (`_with_producers_and_siblings`).
    5. A kernel waits for its operands in the order in which XLA lists them (`_fused_operands`).

    `Tasks.inside` is not kept; `made` of an op that several tasks make is the last of them. `holders` is `Graph.loop_holders`.
    """
    past = _past_joins(tasks)
    waits = [tuple(dict.fromkeys(m for at in before for m in past[at])) for before in tasks.before]
    leader = _with_producers_and_siblings(tasks, waits, _without_cycles(tasks, waits, _leaders(tasks), holders), holders)
    kept = [n for n, some in enumerate(past) if some == (n,)]
    order = order_of(kept, waits, leader)
    assert order is not None
    number = {first: n for n, first in enumerate(order)}
    out = Tasks(
        [0.0] * len(order),
        [tasks.home[n] for n in order],
        [()] * len(order),
        group=[tasks.group[n] for n in order],
        results=[0] * len(order),
    )
    members: dict[int, list[int]] = {}
    for n in kept:
        members.setdefault(leader[n], []).append(n)
        out.seconds[number[leader[n]]] += tasks.seconds[n]
        out.results[number[leader[n]]] += tasks.results[n]
    for at, first in enumerate(order):
        operands = _fused_operands(tasks, past, members[first], leader) if tasks.group[first] >= 0 else waits[first]
        out.before[at] = tuple(dict.fromkeys(number[leader[m]] for m in operands))
    to = [tuple(number[leader[m]] for m in some) for some in past]
    out.transfers = {number[n]: tasks.transfers[n] for n in order if n in tasks.transfers}
    out.roots = {home: [m for n in some if n >= 0 for m in to[n]] for home, some in tasks.roots.items()}
    out.made = {j: max(to[n]) if n >= 0 else n for j, n in tasks.made.items()}
    out.computed = {j: to[n][0] for j, n in tasks.computed.items()}
    out.arrived = {at: number[n] for at, n in tasks.arrived.items()}
    return out


def _past_joins(tasks: Tasks) -> list[tuple[int, ...]]:
    """Per task, itself; of one without seconds that is no collective, the tasks that it waits for, past others of that kind."""
    out: list[tuple[int, ...]] = []
    for n, (seconds, before) in enumerate(zip(tasks.seconds, tasks.before, strict=True)):
        joins = not seconds and n not in tasks.transfers
        out.append(tuple(dict.fromkeys(m for at in before for m in out[at])) if joins else (n,))
    return out


def _fused_operands(tasks: Tasks, past: Sequence[tuple[int, ...]], members: Sequence[int], leader: Sequence[int]) -> list[int]:
    """What a kernel of fused ops waits for, in the order of its operands; `members` are its tasks.

    XLA fuses from the last op back: what it takes in leaves the list of operands, and its own operands go to the end. So the kernel of
    a + b + c + d reads d, c, a, b. Fact: fusion-operands-last-first.
    """
    operands: dict[int, None] = {}
    seen: set[int] = set()
    for root in reversed(members):
        inside = [-root] if root not in seen else []
        seen.add(root)
        while inside:
            n = -heappop(inside)
            operands.pop(n, None)
            new = [m for m in dict.fromkeys(tasks.before[n]) if m not in seen]
            seen.update(new)
            operands.update(dict.fromkeys(new))
            for m in new:
                if past[m] != (m,) or leader[m] == leader[root]:
                    heappush(inside, -m)
    return [*operands]


def _leaders(tasks: Tasks) -> list[int]:
    """Per task, the first task of its kernel.

    Tasks are one kernel if they are of one group and loop, as many collectives and loops stand before them, and they are connected: one
    waits for the other, both wait for one task, or both compute one op that is not written. A task that waits for none reads inputs of
    the step; which ones is not known here, so it is connected with all.
    """
    levels: list[int] = []
    kernels: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # (first task, bits of the kernel's tasks and of what they read)
    joined: dict[int, int] = {}  # first task of a kernel -> that of the one that it is part of
    out: list[int] = []
    computed = len(tasks.home)  # where the bits begin of what kernels compute for themselves
    for n, (home, before, group) in enumerate(zip(tasks.home, tasks.before, tasks.group, strict=True)):
        levels.append(max((levels[m] + (m in tasks.transfers or tasks.home[m] != home) for m in before), default=0))
        out.append(n)
        if group >= 0:
            some, reads = kernels.setdefault((group, home, levels[n]), []), tasks.inside.get(n, 0) << computed
            for m in before:
                reads |= 1 << m
            met = [k for k in some if not reads or k[1].bit_count() == 1 or k[1] & reads]
            first = met[0][0] if met else n
            joined.update((k[0], first) for k in met[1:])
            for k in met:
                reads |= k[1]
            kernels[group, home, levels[n]] = [k for k in some if k not in met] + [(first, reads | 1 << n)]
            out[n] = first
    for n in range(len(out)):
        while out[n] in joined:
            out[n] = joined[out[n]]
    return out


class _Merging:
    """Kernels that are merged in pairs, as long as none then waits for itself by way of others; a loop counts as one, loop n as ~n.

    Also known as edge contraction in a directed acyclic graph, with an order that is kept topological (Pearce and Kelly, 2006).

    Attributes:
        tasks, waits: the tasks, and what each waits for, past those that only join others.
        leader: per task, the first of its kernel.
        members: first task of a kernel -> all of its tasks.
        holders: per loop, itself and those around it, innermost first, then OUTSIDE.
        orders: by computation, its kernels and loops, each behind those that it waits for; None where one has left.
        positions: by computation, where each is in the order.
    """

    def __init__(self, tasks: Tasks, waits: Sequence[tuple[int, ...]], leader: Sequence[int], holders: Sequence[tuple[int, ...]]):
        self.tasks, self.waits, self.leader, self.holders = tasks, waits, [*leader], holders
        self.members: dict[int, list[int]] = {}
        for n, first in enumerate(leader):
            self.members.setdefault(first, []).append(n)
        self.orders: dict[int, list[int | None]] = {}
        self.positions: dict[int, dict[int, int]] = {}

    def merge(self, n: int, m: int) -> None:
        """Merges the kernels of two tasks of a computation; not if a third kernel stands between the two."""
        one, other, home = self.leader[n], self.leader[m], self.tasks.home[n]
        if one == other:
            return
        if home not in self.orders:
            self.sort_topologically(home)
        if self.positions[home][one] < self.positions[home][other]:
            one, other = other, one
        if (between := self.kernels_between(home, one, other)) is None:
            return
        some = sorted(self.members.pop(one) + self.members.pop(other))
        self.members[some[0]] = some
        for at in some:
            self.leader[at] = some[0]
        order, place = self.orders[home], self.positions[home]
        start, end = place.pop(other), place.pop(one) + 1
        rest = [k for k in order[start:end] if k is not None and k not in between and k not in (one, other)]
        first = [k for k in order[start:end] if k in between]
        order[start:end] = [*first, some[0], *rest, *[None] * (end - start - 1 - len(first) - len(rest))]
        place.update((k, at) for at, k in enumerate(order[start:end], start) if k is not None)

    def kernels_between(self, home: int, one: int, other: int) -> set[int] | None:
        """What kernel `one` waits for that is behind kernel `other` in the order; None if some of it waits for `other`."""
        place, part = self.positions[home], self.member_of(home)
        start, stack, seen = place[other], [one], {one}
        while stack:
            at = stack.pop()
            for k in self.before(at, part):
                if k == other and at != one:
                    return None
                if k not in seen and place[k] > start:
                    seen.add(k)
                    stack.append(k)
        return seen - {one}

    def sort_topologically(self, home: int) -> None:
        """Makes the first order of a computation."""
        part = self.member_of(home)
        parts = dict.fromkeys(k for k in map(part, range(len(self.waits))) if k is not None)
        order = topological_order({k: self.before(k, part) for k in parts})
        assert order is not None
        self.orders[home] = [*order]
        self.positions[home] = {k: at for at, k in enumerate(order)}

    def before(self, at: int, part: Callable[[int], int | None]) -> dict[int, None]:
        """The kernels and loops that a kernel, or ~loop, waits for."""
        before = self.entering[~at] if at < 0 else (m for n in self.members[at] for m in self.waits[n])
        return {k: None for m in before if (k := part(m)) is not None and k != at}

    def member_of(self, home: int) -> Callable[[int], int | None]:
        """Task -> the kernel of a computation that it is of, or ~loop; None outside of the computation."""

        def found(n: int) -> int | None:
            around = self.holders[self.tasks.home[n]]
            if around[0] == home:
                return self.leader[n]
            return ~around[around.index(home) - 1] if home in around else None

        return found

    @cached_property
    def entering(self) -> dict[int, list[int]]:
        """By loop, the tasks outside of it that its own wait for."""
        out: dict[int, dict[int, None]] = {}
        for n, before in enumerate(self.waits):
            for loop in self.holders[self.tasks.home[n]][:-1]:
                out.setdefault(loop, {}).update((m, None) for m in before if loop not in self.holders[self.tasks.home[m]])
        return {loop: [*some] for loop, some in out.items()}


def _with_producers_and_siblings(
    tasks: Tasks, waits: Sequence[tuple[int, ...]], leader: Sequence[int], holders: Sequence[tuple[int, ...]]
) -> list[int]:
    """Per task, the first of its kernel, after kernels of one group are merged that make what others read, or read the same."""
    merging, group, home = _Merging(tasks, waits, leader, holders), tasks.group, tasks.home
    for n, before in enumerate(waits):
        for m in before:
            if group[n] == group[m] >= 0 and home[n] == home[m]:
                merging.merge(n, m)
    readers: dict[tuple[int, int, int], int] = {}  # (task, group, computation) -> the last task of that group that reads it
    for n, before in enumerate(waits):
        for m in before if group[n] >= 0 else ():
            if (other := readers.get((m, group[n], home[n]))) is not None:
                merging.merge(n, other)
            readers[m, group[n], home[n]] = n
    return merging.leader


def order_of(kept: Iterable[int], waits: Sequence[tuple[int, ...]], leader: Sequence[int]) -> list[int] | None:
    """The first tasks of kernels, each behind those that its kernel waits for; None if there is a cycle."""
    before: dict[int, dict[int, None]] = {}
    for n in kept:
        before.setdefault(leader[n], {}).update((leader[m], None) for m in waits[n] if leader[m] != leader[n])
    return topological_order(before)


def topological_order(before: Mapping[T, Iterable[T]]) -> list[T] | None:
    """The keys and what they wait for, each behind what it waits for; None if there is a cycle."""
    out: list[T] = []
    done: dict[T, bool] = {}  # False while what it waits for is visited
    for root in before:
        stack = [] if root in done else [(root, iter(before[root]))]
        done.setdefault(root, False)
        while stack:
            at, left = stack[-1]
            for m in left:
                if m not in done:
                    done[m] = False
                    stack.append((m, iter(before[m])))
                    break
                if not done[m]:
                    return None
            else:
                done[at] = True
                out.append(at)
                stack.pop()
    return out


def _without_cycles(
    tasks: Tasks, waits: Sequence[tuple[int, ...]], leader: Sequence[int], holders: Sequence[tuple[int, ...]]
) -> list[int]:
    """Per task, the first of its kernel, after kernels that wait for themselves by way of others are split into their ops."""
    size, first, home = len(leader), np.array(leader, np.int64), np.array(tasks.home, np.int64)
    after = np.repeat(np.arange(size), [len(before) for before in waits])
    before = np.fromiter((m for some in waits for m in some), np.int64, len(after))
    several = np.bincount(first, minlength=size) > 1
    for at in np.unique(home[several[first]]).tolist() if size else ():
        part = np.where(home == at, first, -1)
        for loop, around in enumerate(holders[:-1]):
            if at in around[1:]:
                part[home == loop] = size + around[around.index(at) - 1]
        edges = np.stack([part[after], part[before]], axis=1)
        edges = edges[(edges >= 0).all(axis=1) & (edges[:, 0] != edges[:, 1])]
        shape = (size + len(holders),) * 2
        _, component = connected_components(csr_array((np.ones(len(edges)), edges.T), shape=shape), connection="strong")
        cyclic = (np.bincount(component)[component] > 1)[:size]
        apart = (home == at) & cyclic[first]
        first[apart] = np.flatnonzero(apart)
    return first.tolist()


def waiting_for_each_other(waits: Mapping[T, Iterable[T]]) -> list[T]:
    """Those that wait for themselves by way of others. What each waits for is one of `waits`, too."""
    number = {name: n for n, name in enumerate(waits)}
    edges = np.array([(n, number[m]) for n, before in enumerate(waits.values()) for m in before], dtype=np.int64).reshape(-1, 2)
    graph = csr_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(len(number), len(number)))
    _, component = connected_components(graph, connection="strong")
    cyclic = np.bincount(component)[component] > 1
    return [name for name, n in number.items() if cyclic[n]]
