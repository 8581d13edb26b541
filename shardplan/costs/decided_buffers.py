"""What each kernel and collective of a decided program reads from memory and writes there: what XLA's memory scheduler sees.

    value in memory     one buffer, written by the kernel of its op
    reshard             a buffer per collective, of its result
    stack of rows       one buffer, written by the loop
    input of the step   one buffer, which is there before anything runs

What is not written to memory is read through: its readers read what it is computed of. So are views, copies and what enters or leaves
a loop or a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardplan.costs.kernel_tasks import OUTSIDE, Tasks
from shardplan.costs.network import CostNetwork
from shardplan.costs.pipelining import Member
from shardplan.ir.graph import Graph
from shardplan.xla_model.memory_order import Computation


@dataclass
class Buffers:
    """Buffers by number.

    Attributes:
        sizes: bytes on one device.
        writers: the task or loop that writes each; None of inputs of the step.
        reads: per task, bits of what it reads.
        kept: by computation, bits of what it hands out.
    """

    sizes: list[float] = field(default_factory=list)
    writers: list[Member | None] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)

    def add(self, writer: Member | None, size: float) -> int:
        """The bit of a new buffer."""
        self.sizes.append(size)
        self.writers.append(writer)
        return 1 << len(self.sizes) - 1


def decided_buffers(network: CostNetwork, states: Sequence[int], tasks: Tasks) -> Buffers:
    """The buffers of the tasks that these states decide."""
    graph, strategies = network.space.graph, network.strategies(states)
    out, bits, moved = Buffers(reads=[0] * len(tasks.home)), [0] * len(graph.values), dict[int, int]()
    kept_from = {j: graph.retainable_from[j] for j in network.retained(states)}
    kept_bits = dict.fromkeys(kept_from.values(), 0)  # (op, operand) -> bits of what it reads, which a copy of a later phase retains

    def arrived(n: int, source: int) -> int:
        """The bit of what collective n makes of `source`."""
        if n not in moved:
            out.reads[n] |= source if (m := tasks.step_before(n)) is None else arrived(m, source)
            moved[n] = out.add(("task", n), tasks.transfers[n].result_bytes)
        return moved[n]

    for j, op in enumerate(graph.ops):
        read, made = 0, tasks.made.get(j, -1)
        for k, v in enumerate(op.inputs):
            if v is not None:
                mine = arrived(n, bits[v]) if (n := tasks.arrived.get((j, k), -1)) >= 0 else bits[v]
                if (j, k) in kept_bits:
                    kept_bits[j, k] = mine
                read |= kept_bits[kept_from[j]] if j in kept_from else mine
        if op.traits.step_output or op.traits.leaves_region:
            home = OUTSIDE if op.traits.step_output else op.loop
            out.kept[home] = out.kept.get(home, 0) | read
        if op.traits.constant:
            continue
        shards = network.space.strategies[j].shards
        sizes = [graph.values[v].bytes / shards[len(op.inputs) + r][strategies[j]] for r, v in enumerate(op.outputs)]
        if op.traits.step_input:
            bits[op.outputs[0]] = out.add(None, sizes[0])
            continue
        written = [made >= 0 and _is_written(network, j, v, tasks) for v in op.outputs]
        if made >= 0 and (any(written) or op.traits.loop_stack):
            out.reads[made] |= read
        for v, size, here in zip(op.outputs, sizes, written, strict=True):
            if op.traits.loop_stack:
                bits[v] = out.add(("loop", op.held_during), size)
            else:
                bits[v] = out.add(("task", made), size) if here else read
    return out


def _is_written(network: CostNetwork, j: int, v: int, tasks: Tasks) -> bool:
    """Whether a kernel writes value v for op j: also a product whose reader only moves it, and then not that reader."""
    op, space = network.space.graph.ops[j], network.space
    return (
        j in tasks.computed and not op.traits.copy and (space.materialised[v] or (op.traits.matmul and space.rules[j].fusion == "none"))
    )


def computations(
    graph: Graph,
    buffers: Buffers,
    one: Sequence[int],
    home_of: Sequence[int],
    waits: Mapping[int, Mapping[Member, Sequence[Member]]],
    roots: Mapping[int, Sequence[Member]],
    parts: Mapping[int, float],
    collectives: Mapping[int, str],
) -> dict[int, tuple[Computation, list[Member | None]]]:
    """By name, the computations of a program, and what their instructions stand for, in the order in which `waits` lists it.

    None stands for a kernel of parts of a product, behind them.

    Args:
        one: per task, the task that it is one with.
        home_of: per task, its computation.
        waits: computation -> its tasks and loops -> those of them that each waits for.
        roots: computation -> the tasks and loops whose results it hands out.
        parts: task of a product that is split -> bytes of its parts, which another instruction adds up.
        collectives: task of a collective -> its kind.
    """
    reads: dict[int, dict[Member, int]] = {home: dict.fromkeys(some, 0) for home, some in waits.items()}
    writes: dict[int, dict[Member, int]] = {home: dict.fromkeys(some, 0) for home, some in waits.items()}
    for n, home in enumerate(home_of):
        for member, around in _members(graph, ("task", one[n]), home):
            reads[around][member] |= buffers.reads[n]
    for b, made_by in enumerate(buffers.writers):
        if made_by is None:
            continue
        kind, n = made_by
        writer: Member = (kind, one[n] if kind == "task" else n)
        home = home_of[n] if kind == "task" else graph.loop_holders[n][1]
        for member, around in _members(graph, writer, home):
            if member in writes[around]:
                writes[around][member] |= 1 << b
    return {
        home: _computation(buffers, home, some, reads[home], writes[home], roots.get(home, ()), parts, collectives)
        for home, some in waits.items()
    }  # fmt: skip


def _members(graph: Graph, member: Member, home: int) -> Iterator[tuple[Member, int]]:
    """What stands for a member of a computation in that one and in those around it."""
    for inside, around in zip((None, *graph.loop_holders[home]), graph.loop_holders[home], strict=False):
        yield member if inside is None else ("loop", inside), around


def _computation(
    buffers: Buffers, home: int, waits: Mapping[Member, Sequence[Member]], reads: Mapping[Member, int], writes: Mapping[Member, int],
    roots: Sequence[Member], parts: Mapping[int, float], collectives: Mapping[int, str],
) -> tuple[Computation, list[Member | None]]:  # fmt: skip
    number = {member: n for n, member in enumerate(waits)}
    kept = buffers.kept.get(home, 0)
    read_by_others = dict[Member, int]()
    for member in waits:
        if member[0] == "loop":
            read_by_others[member] = kept
            for other, bits in reads.items():
                if other != member:
                    read_by_others[member] |= bits
    mine = {member: bits & read_by_others.get(member, -1) for member, bits in writes.items()}  # a loop's own stay inside
    used = [_numbers(reads[member] & ~writes[member] if member[0] == "loop" else reads[member]) for member in waits]
    made = [_numbers(mine[member]) for member in waits]
    before = [[number[m] for m in some] for some in waits.values()]
    sizes = {b: buffers.sizes[b] for some in (*used, *made) for b in some}
    names: list[Member | None] = [*waits]
    viewing: list[int] = []
    for member, n in number.items():
        if member[0] == "task" and member[1] in parts:
            b = len(buffers.sizes) + n
            sizes[b] = parts[member[1]]
            before.append(before[n])
            used.append(used[n])
            made.append([b])
            names.append(None)
            viewing.append(len(names) - 1)
            before[n], used[n] = [len(names) - 1], [b]
    called = {number[member]: member[1] for member in waits if member[0] == "loop"}
    handed_out, in_order = frozenset(_numbers(kept)), [number[m] for m in roots]
    inputs = frozenset(b for b in sizes if home == OUTSIDE and b < len(buffers.writers) and buffers.writers[b] is None)
    sent = {n: collectives[member[1]] for member, n in number.items() if member[0] == "task" and member[1] in collectives}
    return Computation(before, used, made, sizes, handed_out, in_order, called, frozenset(viewing), inputs, sent), names


def _numbers(bits: int) -> list[int]:
    out = []
    while bits:
        least = bits & -bits
        out.append(least.bit_length() - 1)
        bits ^= least
    return out
