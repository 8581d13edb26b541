"""The tasks of a decided program: a kernel per group of fused ops, a chain of collectives per reshard, before XLA combines any.

    fused ops   one kernel, which waits for all that any of them reads (`xla_model/fusion.py`), of the sum of their c_i[s] seconds
    other ops   a kernel each
    reshard     its collectives one after the other, then what XLA computes around them (`tables.py`)
    exchange    collectives between a kernel and the shards that it reads, or behind the kernel (`halo_exchange.py`)

An op whose result is not written is computed by the kernel that reads it: its seconds are that kernel's. Where several do, it is a
kernel of its own, so that it hides no collective that stands behind any of them (the lower bound counts on that). What takes no time
and waits for one task is that task: views, casts inside fusions, border ops. Ops of one kernel with more or fewer collectives and loops
before them are kernels of their own. Equal steps and exchanges of one array are one collective for all readers, unless it is regathered
behind a barrier (`shared_collectives.py`). What a checkpointed layer computes again waits for the gradient of its result, and what
is gathered again behind a barrier for the other operands of its first reader.

Facts: cse-merges-equal-reshards, cse-stops-at-barriers, schedule-fused-kernels, schedule-recompute-barrier.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from shardplan.costs.halo_exchange import Exchange
from shardplan.costs.network import CostNetwork
from shardplan.costs.shared_collectives import exchange_key, regathered, shared_key
from shardplan.costs.states import PS
from shardplan.ir.graph import Op
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
    order: tuple[int, int]  # of arrays that are combined: as they are needed, or as they are made


class Unwritten(NamedTuple):
    """What a kernel has yet to compute for an op whose result is not written."""

    kernel: int
    seconds: float
    ops: tuple[int, ...]  # those that take seconds


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
    group: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    inside: dict[int, int] = field(default_factory=dict)

    def add(self, home: int, before: Iterable[int], seconds: float = 0.0, transfer: Transfer | None = None, group: int = -1) -> int:
        """A new task, its number; -1 for one that takes no time and waits for none."""
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
        """Of a collective."""
        return self.transfers[n].step.kind if n in self.transfers else None

    def apart(self, some: Iterable[int]) -> list[int]:
        """Of some tasks in order, the first, and those that wait for none that is taken before."""
        out, waiting, reached = dict[int, None](), set[int](), 0
        for n in some:
            for at in range(reached + 1, n + 1) if out else ():
                if any(m in out or m in waiting for m in self.before[at]):
                    waiting.add(at)
            if n not in waiting:
                out[n] = None
            reached = n
        return [*out]


def decided_tasks(network: CostNetwork, states: Sequence[int]) -> Tasks:
    """The tasks of a cost network's ops and reshards under these states."""
    return fused(_Builder(network, states).tasks)


class _Builder:
    """Makes a task per op and collective; `tasks` are all of them."""

    def __init__(self, network: CostNetwork, states: Sequence[int]):
        self.network, self.graph, self.tasks = network, network.space.graph, Tasks()
        self.done: dict[Hashable, int] = {}  # step or exchange of an array -> the task after which the array has gone it
        self.unwritten: list[Unwritten | None] = []  # per op
        self.inside: list[int] = []  # per op that is not written, bits of it and of such that it is computed from
        self.barriers: dict[tuple, list[int]] = {}  # path of a barrier -> its ops so far
        self.regathered: dict[tuple[int, int], int] = {}  # (value, copy) -> the task that its collectives wait for
        self.strategies = strategies = network.strategies(states)
        retained = network.retained(states)
        beyond, self.regathers = network.beyond_collectives(states), network.regathers(strategies, retained)
        kernel_ps, rounds = network.kernel_ps(states), [*(loop.rounds for loop in self.graph.loops), 1.0]
        self.exchanges = {j: some for j in network.space.exchanging if (some := network.space.exchanges(j, strategies[j]))}
        moves = {(j, k): steps for j, k, _, steps in network.moves(strategies, retained)}
        self.computed_in = self.reading_kernels(moves)
        for j, op in enumerate(self.graph.ops):
            waits = []
            for k, v in enumerate(op.inputs):
                made = -1 if v is None else self.graph.values[v].producer[0]
                if made >= 0 and (left := self.unwritten[made]) is not None and left.kernel not in self.kernels_of(j):
                    self.flush(made)
                at = -1 if made < 0 else self.tasks.made[made]
                if v is not None and (j, k) in moves:
                    at = self.resharded(j, v, moves[j, k], regathered(self.graph, j, v, self.regathers))
                waits.append(self.tasks.add(op.loop, (at,), beyond[j, k] / op.reads / PS) if (j, k) in beyond else at)
            waits += self.exchanged(j, waits)
            self.op(j, op, waits, kernel_ps[j] / rounds[op.runs_in] / PS)
            for x in self.exchanges.get(j, ()):
                if x.of_results:
                    self.tasks.made[j] = self.exchange(j, x, [self.tasks.made[j]])
        for j in range(len(self.unwritten)):
            self.flush(j)

    def reading_kernels(self, moves: Mapping[tuple[int, int], Sequence[ReshardStep]]) -> list[int]:
        """Per op, the kernel that computes it where it is read; -1 if it writes its result, or several kernels read it.

        Nor is an op computed where it is read if a reader reshards its result, or if readers run behind more collectives than others:
        it would be computed behind something that waits for it.
        """
        graph, inside = self.graph, self.network.space.facts.kernels.inside
        collectives = {at: sum(step.kind != "slice" for step in steps) for at, steps in moves.items()}
        stages = {(j, x.operand): x.stage + 1 for j, some in self.exchanges.items() for x in some if not x.of_results}
        collectives |= {at: collectives.get(at, 0) + n for at, n in stages.items()}  # of one operand the last stage comes last
        behind = {j: sum(x.of_results for x in some) for j, some in self.exchanges.items()}
        homes = [op.runs_in for op in graph.ops]
        levels: list[int] = []  # collectives and loops in a row before each op
        for j, op in enumerate(graph.ops):
            most = 0
            for k, v in enumerate(op.inputs):
                if v is not None:
                    i = graph.values[v].producer[0]
                    most = max(most, levels[i] + behind.get(i, 0) + collectives.get((j, k), 0) + (homes[i] != homes[j]))
            levels.append(most)
        sent = {graph.values[v].producer[0] for j, k in (*moves, *stages) if (v := graph.ops[j].inputs[k]) is not None}
        sent |= {j for j, n in behind.items() if n}
        out = [-1] * len(levels)
        for j in reversed(range(len(levels))):
            if len(inside[j]) == 1 and j not in sent:
                of_readers = {levels[i] for v in graph.ops[j].outputs for i, _ in graph.values[v].consumers}
                if len(of_readers) == 1:
                    (out[j],), (levels[j],) = inside[j], of_readers
        return out

    def exchanged(self, j: int, waits: Sequence[int]) -> list[int]:
        """The tasks after which op j's shards have what they need of each other; `waits` are those after which operands are there."""
        out: list[int] = []
        last: dict[int, tuple[int, list[int], list[int]]] = {}  # operand -> (stage, what it waits for, its collectives)
        for x in self.exchanges.get(j, ()):
            if x.of_results:
                continue
            stage, before, tasks = last.get(x.operand, (x.stage, [waits[x.operand]], []))
            if stage != x.stage:
                before, tasks = tasks, []
            tasks.append(self.exchange(j, x, before))
            last[x.operand] = x.stage, before, tasks
            out.append(tasks[-1])
        return out

    def exchange(self, j: int, x: Exchange, waits: Iterable[int]) -> int:
        """The task of an exchange of op j."""
        space, op = self.network.space, self.graph.ops[j]
        v, layout = op.inputs[x.operand], space.strategies[j].operands[x.operand][self.strategies[j]]
        assert v is not None
        key = exchange_key(self.graph, j, v, layout, self.regathers, x)
        if key not in self.done or x.of_results:
            step, made = ReshardStep(x.kind, x.axes, x.bytes, x.seconds, layout, layout), self.graph.values[v].producer[0]
            site = replace(space.collective_sites[v], collective_class="blocking", joint_size=1)
            self.done[key] = self.tasks.add(op.runs_in, waits, transfer=Transfer(step, site, v, x.bytes, (made, j)))
        return self.done[key]

    def op(self, j: int, op: Op, waits: list[int], seconds: float) -> None:
        """Adds the task of an op, or leaves its seconds to the kernel that computes it."""
        tasks, (own, reader) = self.tasks, self.kernels_of(j)
        home, ops, inside = op.runs_in, [j] if seconds else [], 0
        for v in op.inputs:
            made = -1 if v is None else self.graph.values[v].producer[0]
            inside |= self.inside[made] if made >= 0 else 0
            if made >= 0 and (left := self.unwritten[made]) is not None:  # else it has been flushed
                self.unwritten[made] = None
                seconds += left.seconds
                ops += left.ops
        written = reader < 0
        self.inside.append(0 if written else inside | 1 << j)
        self.unwritten.append(None if written or not ops else Unwritten(reader, seconds, tuple(ops)))
        made = tasks.made[j] = tasks.add(home, waits, seconds if written else 0.0, group=own)
        if seconds and written:
            tasks.inside[made] = inside
            tasks.results[made] = max(1, sum(self.network.space.materialised[v] for v in op.outputs))
            self.compute(ops, made)
        if op.traits.recompute_barrier:
            some = self.barriers.setdefault(op.path[:-1], [])
            some.append(j)
            tasks.made.update(dict.fromkeys(some, tasks.add(home, [tasks.made[i] for i in some])))
        if op.traits.leaves_region or op.traits.loop_stack:
            tasks.roots.setdefault(home, []).append(made)

    def kernels_of(self, j: int) -> tuple[int, int]:
        """The kernel in which op j writes, and the one that computes it where it is read; -1 for none."""
        return self.network.space.facts.kernels.own[j], self.computed_in[j]

    def compute(self, ops: Iterable[int], task: int) -> None:
        """Notes which task computes these ops, if none does so far."""
        for i in ops:
            self.tasks.computed.setdefault(i, task)

    def flush(self, j: int) -> None:
        """Gives what is left of an op's seconds a kernel of its own."""
        left, self.unwritten[j] = self.unwritten[j], None
        if left is not None:
            self.tasks.made[j] = self.tasks.add(self.graph.ops[j].runs_in, (self.tasks.made[j],), left.seconds)
            self.compute(left.ops, self.tasks.made[j])

    def other_operands(self, j: int) -> Iterator[int]:
        """The tasks after which the other operands of the first reader of copy j are there: it is gathered again behind them."""
        graph = self.graph
        reader, k = min(graph.values[graph.ops[j].outputs[0]].consumers, default=(j, 0))
        for i, u in enumerate(graph.ops[reader].inputs if reader != j else ()):
            if i != k and u is not None and (at := graph.values[graph.original(u)].producer[0]) < j:
                yield self.tasks.made[at]

    def resharded(self, j: int, v: int, steps: Iterable[ReshardStep], copy: int) -> int:
        """The task after which value v has gone these steps towards op j."""
        at = self.tasks.made[self.graph.values[v].producer[0]]
        if copy and self.graph.ops[j].traits.copy:
            if (v, copy) not in self.regathered:
                self.regathered[v, copy] = self.tasks.add(self.graph.ops[j].loop, (at, *self.other_operands(j)))
            at = self.regathered[v, copy]
        for step in steps:
            key = (at, step.before, step.after, *shared_key(self.graph, j, v), copy)
            if key not in self.done:
                self.done[key] = _moved(self.tasks, self.network, j, v, at, step)
            at = self.done[key]
        return at


def _moved(tasks: Tasks, network: CostNetwork, j: int, v: int, at: int, step: ReshardStep) -> int:
    """The task after which value v, made by task `at`, has gone one step towards op j."""
    graph, space = network.space.graph, network.space
    if step.kind == "slice":
        return tasks.add(graph.ops[j].loop, (at,), step.seconds)
    made = graph.values[v].producer[0]
    site, size = space.collective_sites[v], graph.values[v].bytes / step.after.shards(space.mesh)
    size *= dict(space.facts.moved[v].byte_factors).get(step.kind, 1.0)
    order = (j, made) if site.collective_class == "prefetch" else (made, j)
    return tasks.add(graph.ops[j].loop, (at,), transfer=Transfer(step, site, v, size, order))


def fused(tasks: Tasks) -> Tasks:
    """The same tasks with one for the ops of each kernel, as far as none then waits for itself, and none that only joins others."""
    past = _past_joins(tasks)
    waits = [tuple(dict.fromkeys(m for at in before for m in past[at])) for before in tasks.before]
    leader = _leaders(tasks)
    kept = [n for n, some in enumerate(past) if some == (n,)]
    if (order := order_of(kept, waits, leader)) is None:
        leader = _without_cycles(waits, leader)
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
    before: list[dict[int, None]] = [{} for _ in order]
    for n in kept:
        at = number[leader[n]]
        out.seconds[at] += tasks.seconds[n]
        out.results[at] += tasks.results[n]
        before[at].update((number[leader[m]], None) for m in waits[n] if leader[m] != leader[n])
    out.before = [tuple(some) for some in before]
    to = [tuple(number[leader[m]] for m in some) for some in past]
    out.transfers = {number[n]: tasks.transfers[n] for n in order if n in tasks.transfers}
    out.roots = {home: [m for n in some if n >= 0 for m in to[n]] for home, some in tasks.roots.items()}
    out.made = {j: max(to[n]) if n >= 0 else n for j, n in tasks.made.items()}
    out.computed = {j: to[n][0] for j, n in tasks.computed.items()}
    return out


def _past_joins(tasks: Tasks) -> list[tuple[int, ...]]:
    """Per task itself, or what it waits for if it only joins others."""
    out: list[tuple[int, ...]] = []
    for n, (seconds, before) in enumerate(zip(tasks.seconds, tasks.before, strict=True)):
        joins = not seconds and n not in tasks.transfers
        out.append(tuple(dict.fromkeys(m for at in before for m in out[at])) if joins else (n,))
    return out


def _leaders(tasks: Tasks) -> list[int]:
    """Per task, the first of its kernel: of a group of fused ops with as many collectives and loops before them.

    Those of them that neither read each other nor an array in common are kernels of their own.
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


def order_of(kept: Iterable[int], waits: Sequence[tuple[int, ...]], leader: Sequence[int]) -> list[int] | None:
    """The first tasks of kernels, each behind those that its kernel waits for; None if some wait for each other."""
    before: dict[int, dict[int, None]] = {}
    for n in kept:
        before.setdefault(leader[n], {}).update((leader[m], None) for m in waits[n] if leader[m] != leader[n])
    out: list[int] = []
    done: dict[int, bool] = {}  # False while what it waits for is visited
    for root in before:
        stack = [] if root in done else [(root, iter(before[root]))]
        done.setdefault(root, False)
        while stack:
            at, left = stack[-1]
            m = next((m for m in left if not done.get(m, False)), None)
            if m is None:
                done[at] = True
                out.append(at)
                stack.pop()
            elif m in done:
                return None
            else:
                done[m] = False
                stack.append((m, iter(before[m])))
    return out


def _without_cycles(waits: Sequence[tuple[int, ...]], leader: Sequence[int]) -> list[int]:
    """The kernels but for those that would wait for themselves: their ops are kernels of their own."""
    kernels: dict[int, list[int]] = {}
    for n, first in enumerate(leader):
        kernels.setdefault(first, []).extend(leader[m] for m in waits[n])
    cyclic = set(waiting_for_each_other(kernels))
    return [n if first in cyclic else first for n, first in enumerate(leader)]


def waiting_for_each_other(waits: Mapping[T, Iterable[T]]) -> list[T]:
    """Those that wait for themselves by way of others. What each waits for is one of `waits`, too."""
    number = {name: n for n, name in enumerate(waits)}
    edges = np.array([(n, number[m]) for n, before in enumerate(waits.values()) for m in before], dtype=np.int64).reshape(-1, 2)
    graph = csr_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(len(number), len(number)))
    _, component = connected_components(graph, connection="strong")
    cyclic = np.bincount(component)[component] > 1
    return [name for name, n in number.items() if cyclic[n]]
