"""The tasks of a decided program: a kernel per group of fused ops, a chain of collectives per reshard, before XLA combines any.

    fused ops   one kernel, which waits for all that any of them reads (`xla_model/fusion.py`), of the sum of their c_i[s] seconds
    other ops   a kernel each
    reshard     its collectives one after the other, then what XLA computes around them (`tables.py`)
    exchange    collectives between a kernel and the shards that it reads, or behind the kernel (`halo_exchange.py`)

An op whose result is not written is computed by the kernel that reads it: its seconds are that kernel's. Where several do, it is a
kernel of its own, so that it hides no collective that stands behind any of them (the lower bound counts on that). What takes no time
and waits for one task is that task: views, casts inside fusions, border ops. Which tasks are one kernel: `kernel_tasks.py`. Equal steps
and exchanges of one array are one collective for all readers, unless it is regathered behind a barrier (`shared_collectives.py`). What
a checkpointed layer computes again waits for the gradient of its result, and what is gathered again behind a barrier for the other
operands of its first reader.

Facts: cse-merges-equal-reshards, cse-stops-at-barriers, schedule-recompute-barrier.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardplan.costs.halo_exchange import Exchange
from shardplan.costs.kernel_tasks import Tasks, Transfer, fused
from shardplan.costs.network import CostNetwork
from shardplan.costs.shared_collectives import exchange_key, regathered, shared_key
from shardplan.costs.states import PS
from shardplan.ir.graph import Op
from shardplan.mesh.reshard import ReshardStep


class Unwritten(NamedTuple):
    """What a kernel has yet to compute for an op whose result is not written."""

    kernel: int
    seconds: float
    ops: tuple[int, ...]  # those that take seconds


def decided_tasks(network: CostNetwork, states: Sequence[int]) -> Tasks:
    """The tasks of a cost network's ops and reshards under these states."""
    return fused(_Builder(network, states).tasks, network.space.graph.loop_holders)


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
                    at = self.resharded(j, k, v, moves[j, k], regathered(self.graph, j, v, self.regathers))
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
            step = ReshardStep(x.kind, x.axes, x.bytes, x.seconds, layout, layout)
            site = replace(space.collective_sites[v], collective_class="blocking", joint_size=1)
            self.done[key] = self.tasks.add(op.runs_in, waits, transfer=Transfer(step, site, v, x.bytes))
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

    def resharded(self, j: int, k: int, v: int, steps: Iterable[ReshardStep], copy: int) -> int:
        """The task after which value v has gone these steps towards operand k of op j."""
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
            if at in self.tasks.transfers:
                self.tasks.arrived[j, k] = at
        return at


def _moved(tasks: Tasks, network: CostNetwork, j: int, v: int, at: int, step: ReshardStep) -> int:
    """The task after which value v, made by task `at`, has gone one step towards op j."""
    graph, space = network.space.graph, network.space
    if step.kind == "slice":
        return tasks.add(graph.ops[j].loop, (at,), step.seconds)
    site, size = space.collective_sites[v], graph.values[v].bytes / step.after.shards(space.mesh)
    size *= dict(space.facts.moved[v].byte_factors).get(step.kind, 1.0)
    return tasks.add(graph.ops[j].loop, (at,), transfer=Transfer(step, site, v, size))
