"""What a decided program has in memory, and when: the arrays of its plan, at the places that its schedule gives the ops.

    place of an op     that of its kernel in the schedule; of an op that no kernel is for, behind what it reads
    loop               its ops run at a stretch, in the order of one round
    collective         its result is there from where it starts
    retained copy      stands before its first reader

Kernels around collectives make copies of arrays, which are in memory as well.

Facts: options-pipelined-gather-memory, options-last-iteration, memory-combined-all-reduces,
memory-split-products, memory-transposed, memory-sent.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from shardplan.costs.decided_program import DecidedProgram
from shardplan.costs.kernel_tasks import OUTSIDE
from shardplan.costs.network import CostNetwork
from shardplan.ilp.solver.problem import sum_over_intervals
from shardplan.ir.graph import Graph
from shardplan.xla_model.fusible import read_array
from shardplan.xla_model.liveness import RunOrder, conditionals

Allocation = tuple[int, int, int, float]
"""Op that makes an array, the places at which it is in memory (lo <= t < hi), its bytes per device."""


class DecidedMemory:
    """What a decided program has in memory."""

    def __init__(self, program: DecidedProgram):
        self.program = program.acyclic
        self.graph: Graph = program.graph

    @cached_property
    def order(self) -> RunOrder:
        """In which order its ops run."""
        places, read_at = [0] * len(self.graph.ops), [-1] * len(self.graph.ops)
        for place, (_, _, j, done) in enumerate(self._events):
            (places if done else read_at)[j] = place
        read_at = [place if at < 0 else at for at, place in zip(read_at, places, strict=True)]
        sent_from = {j: min(places[j], self._place(turn)) for j, turn in self._turns.starts_of_copies()}
        return RunOrder(self.graph, places, read_at, sent_from, True)

    @cached_property
    def _turns(self) -> _Turns:
        return _Turns(self.program)

    @cached_property
    def _events(self) -> list[tuple[int, int, int, bool]]:
        """By place, (turn, first op of its conditional, op, whether its result is there, or else it only reads)."""
        first, out = conditionals(self.graph), []
        for j, turn in enumerate(self._turns.of_ops()):
            out.append((turn, first[j], j, True))
            if (early := self._turns.read_at(j, turn)) < turn:
                out.append((early, first[j], j, False))
        return sorted(out)

    def _place(self, turn: int) -> int:
        """The first place at or behind a turn."""
        return min(bisect_left(self._events, (turn,)), len(self._events) - 1)

    @cached_property
    def network(self) -> CostNetwork:
        """The network of the program, whose arrays are in memory when this order says."""
        return self.program.network.in_order(self.order)

    def allocations(self) -> list[Allocation]:
        """(op, lo, hi, bytes) of arrays, what pipelining carries, stacks of the last round, and copies around collectives."""
        return [*self._allocations]

    @cached_property
    def _allocations(self) -> list[Allocation]:
        found = self.network.allocations(self.program.states)
        return [*found, *self._sent(), *self._carried(), *self._last_rounds(found), *self._filled_and_emptied(), *self._transposed()]

    def peak_bytes(self) -> float:
        """The most bytes that a device has in memory at any time."""
        return float(self._profile.max(initial=0.0))

    @property
    def place_of_peak(self) -> int:
        """The first place at which it has as many."""
        return int(self._profile.argmax()) if len(self._profile) else 0

    @property
    def op_at_peak(self) -> int:
        """The op that runs there."""
        return self.order.ops[min(self.place_of_peak, self.order.end - 1)]

    @cached_property
    def _profile(self) -> np.ndarray:
        """Bytes that a device has in memory at every place, [place]."""
        return sum_over_intervals((lo, hi, n) for _, lo, hi, n in self._allocations)

    def _sent(self) -> Iterator[Allocation]:
        """What collectives read and no kernel would write otherwise, until they are done; an all-reduce writes over it."""
        tasks, turns, rules, graph = self.program.tasks, self._turns, self.program.network.space.rules, self.graph
        until: dict[int, int] = {}
        for (j, k), n in tasks.arrived.items():
            while (before := tasks.step_before(n)) is not None:
                n = before
            ends = turns.starts if tasks.transfers[n].step.kind == "all-reduce" else turns.ends
            v, turn = graph.ops[j].inputs[k], ends.get(self.program.standing_for(n))
            if v is not None and turn is not None and not self._holds(read_array(graph, rules, v)) and not self._holds(v):
                until[v] = max(until.get(v, 0), self._place(turn))
        for v, hi in until.items():
            i, r = graph.values[v].producer
            if (lo := self.order.places[i]) < hi:
                yield i, lo, hi, self._bytes(v, i, len(graph.ops[i].inputs) + r)

    def _holds(self, v: int) -> bool:
        """Whether the value is in memory wherever the arrays of the plan lie."""
        interval = self.network.prices.live[v]
        return interval is not None and interval[0] < interval[1]

    def _bytes(self, v: int, i: int, array: int) -> float:
        """Bytes on one device of value v as op i has it: its operands, then its results."""
        of = self.program.network.space.strategies[i]
        return float(np.ceil(self.graph.values[v].bytes / of.shards[array][self.program.states[i] % len(of)]))

    def _carried(self) -> Iterator[Allocation]:
        """Of pipelined loops: gathered rows of one more round, and sums of gradients that are not reduced yet, during the loop."""
        program, (_, combined) = self.program, self.program.joined
        for home, (ahead, _, _, later, _) in program.pipelined.items():
            (lo, hi), seen = self.order.loops[home], set()
            for n in itertools.chain.from_iterable(combined[first] for first in (*ahead, *later)):
                transfer = program.tasks.transfers[n]
                if (transfer.site.origin, transfer.step.kind) not in seen:
                    seen.add((transfer.site.origin, transfer.step.kind))
                    yield self.graph.values[transfer.value].producer[0], lo, hi, transfer.step.bytes

    def _filled_and_emptied(self) -> Iterator[Allocation]:
        """Buffers of combined all-reduces, while kernels copy arrays in and out; in between they stand for the arrays."""
        program, turns = self.program, self._turns
        for first, some in program.joined[1].items():
            if len(some) > 1 and first in turns.starts and program.task_seconds.staging_s(first):
                transfers = [program.tasks.transfers[n] for n in some]
                j, size = self.graph.values[transfers[0].value].producer[0], sum(transfer.step.bytes for transfer in transfers)
                for at in (turns.starts[first], turns.ends[first]):
                    yield j, (place := self._place(at)), place + 1, size

    def _transposed(self) -> Iterator[Allocation]:
        """Gathered operands of loops and results of the step, while a kernel transposes them; what replaces state, from its start."""
        program, turns = self.program, self._turns
        for edge, _ in program.network.edge_kernels(program.states):
            j, leaves = edge.consumer, self.graph.ops[edge.consumer].traits.step_output
            n = program.standing_for(program.tasks.arrived.get((j, edge.operand), -1))
            if (leaves or edge.template.loop_bytes) and n in turns.ends:
                begin = turns.starts[n] if leaves and not self._holds(edge.value) else turns.ends[n]
                yield j, self._place(begin), self._place(turns.ends[n]) + 1, self._bytes(edge.value, j, edge.operand)

    def _last_rounds(self, allocated: Sequence[Allocation]) -> Iterator[Allocation]:
        """Stacks of the last round of pipelined loops, which stands behind the others: their zeros are written before these."""
        graph = self.graph
        homes = {home for home, found in self.program.pipelined.items() if found.peeled}
        for at, _, _, size in allocated if homes else ():
            op = graph.ops[at]
            if op.traits.loop_stack and (home := graph.loop_holders[op.held_during][1]) in homes:
                yield at, *self.order.loops[home], size


class _Turns:
    """The turns at which kernels, collectives and loops run, counted from 0 through the schedule, loops unrolled once.

    Attributes:
        begins, ends: per task that stands for others, when its first kernel runs and when it is done.
        starts: per collective, when it starts.
        loops: per loop, (first, last) turn.
    """

    def __init__(self, program: DecidedProgram):
        self.program, self.graph, self.count = program, program.graph, 0
        self.begins: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.loops: dict[int, tuple[int, int]] = {}
        self._run(OUTSIDE)

    def _run(self, home: int) -> None:
        timed = self.program.timed(home)
        for n, starts in timed.order:
            kind, number = timed.members.get(n, ("task", -1))
            if kind == "loop" and not starts:
                first, self.count = self.count, self.count + 1
                self._run(number)
                self.loops[number] = first, self.count
            elif number >= 0:
                (self.starts if starts else self.ends)[number] = self.count
                self.begins.setdefault(number, self.count)
            self.count += 1

    def of_ops(self) -> list[int]:
        """Per op, its turn; none stands before what it reads, nor outside of its loop."""
        graph, tasks, one = self.graph, self.program.tasks, self.program.joined[0]
        around, first, second = self._loops_around(), conditionals(graph), self.program.task_seconds.in_second_kernels
        blocks = {at for j, at in enumerate(first) if at != j}
        last: dict[int, int] = {}  # by the first op of a conditional, its turn
        out: list[int] = []
        for j, op in enumerate(graph.ops):
            made = tasks.made.get(j, -1)
            turn = (self.ends if j in second or made in tasks.transfers else self.begins).get(one[made], -1) if made >= 0 else -1
            for v in op.inputs:
                i = -1 if v is None else graph.values[v].producer[0]
                left = (self.loops[n][1] for n in around[i] if n not in around[j]) if i >= 0 else ()
                turn = max(turn, out[i] if i >= 0 else -1, *left)
            for n in around[j]:  # outermost first
                begin, end = self.loops[n]
                turn = min(max(turn, begin), end)
            if (block := first[j]) in blocks:
                turn = last[block] = max(turn, last.get(block, -1))
            out.append(max(turn, self.count) if op.traits.step_output else turn)
        for j in self.program.network.retained(self.program.states):  # until here it is counted as the array of the earlier phase
            out[j] = max(out[j], min((out[i] for i in graph.readers(graph.ops[j].outputs[0])), default=out[j]))
        return [last.get(first[j], turn) for j, turn in enumerate(out)]

    def read_at(self, j: int, turn: int) -> int:
        """When op j reads, of which the result is there at a turn."""
        n = self.program.standing_for(self.program.tasks.computed.get(j, -1))
        return min(turn, self.begins[n]) if n in self.begins and self.ends[n] == turn else turn

    def starts_of_copies(self) -> Iterator[tuple[int, int]]:
        """(copy, turn at which the collective starts that brings it its array)."""
        for j, op in enumerate(self.graph.ops):
            n = self.program.standing_for(self.program.tasks.arrived.get((j, 0), -1)) if op.traits.copy else -1
            if (turn := self.starts.get(n)) is not None:
                yield j, turn

    def _loops_around(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.graph.ops]
        for n in sorted(self.loops, key=lambda n: self.graph.loops[n].start - self.graph.loops[n].stop):
            for j in range(self.graph.loops[n].start, self.graph.loops[n].stop):
                out[j].append(n)
        return out
