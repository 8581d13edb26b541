"""When each value is in memory: half-open intervals of places. Two arrays are in memory together iff their intervals overlap.

The place of an op is its turn in the order in which ops run: that of the program, but for rules 5 to 8, as long as no plan is known;
that of its kernel in the schedule of a plan, once it is.

Rule 13, life: from its op to its last reader; an elementwise reader may reuse the buffer.
Rule 14, loops and branches: what a loop reads lives until it ends, the rows it stacks from the start of the first loop around that
stacks such an array; branches exclude each other.
Rule 15, the schedule's order: values are read where the schedule runs their readers.
Rule 16, aliases: copies and operands of loops take over buffers; donated state is overwritten.

docs/xla_model.md states the rules in full. Also known as live ranges, as in register allocation.
Facts: liveness-elementwise-reuse, liveness-loop-operands, liveness-branches, liveness-combined-operands, liveness-scatter-zeros,
liveness-donation, liveness-stack-zeros, liveness-shared-buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from shardplan.ir.graph import Graph, components
from shardplan.xla_model.overlap_windows import OverlapWindows
from shardplan.xla_model.schedule import runs_at
from shardplan.xla_model.stack_zeros import stacks_of_one_shape
from shardplan.xla_model.summed_scatters import SummedScatter

Interval = tuple[int, int]
"""Places lo <= t < hi."""


@dataclass(frozen=True, eq=False)
class RunOrder:
    """In which order the ops of a step run.

    Attributes:
        graph: the step.
        places: per op, where it runs, and its results are there; each op has a place of its own, and loops run at a stretch.
        read_at: per op, where it reads: the same, unless rule 8 has it wait, or two kernels run it, of which the first one reads.
        sent_from: op -> the earlier place from which on the collective of its operand is in flight.
        scheduled: whether it is the schedule of a plan: a product whose sum is not written as such reads where it is computed.
    """

    graph: Graph
    places: Sequence[int]
    read_at: Sequence[int]
    sent_from: Mapping[int, int]
    scheduled: bool

    @cached_property
    def ops(self) -> list[int]:
        """By place, the op."""
        out = [0] * self.end
        for places in (self.read_at, self.places):
            for j, at in enumerate(places):
                out[at] = j
        return out

    @cached_property
    def end(self) -> int:
        """The place behind the step."""
        return max(self.places, default=-1) + 1

    @cached_property
    def loops(self) -> list[Interval]:
        """Per loop, where it runs."""
        runs = ([self.places[j] for j in range(loop.start, loop.stop)] for loop in self.graph.loops)
        return [(min(some), max(some) + 1) if some else (0, 0) for some in runs]

    def span(self, first: int, last: int) -> Interval:
        """From where op `first` runs until op `last` has run."""
        return self.places[first], max(self.places[first], self.places[last]) + 1

    def behind(self, at: int) -> int:
        """The place behind ops < `at` of the program, or behind the step."""
        return self.places[at - 1] + 1 if at else 0


def order_by_rules(graph: Graph, windows: OverlapWindows | None = None) -> RunOrder:
    """The order of the program, but for rules 5 to 8; without `windows`, nothing waits for a collective."""
    windows = windows or OverlapWindows()
    return RunOrder(graph, range(len(graph.ops)), runs_at(graph, windows.deferred_until), windows.prefetch_start, False)


def takes_over_buffer(graph: Graph, materialised: Sequence[bool], at: int) -> bool:
    """Whether op `at` is a copy, and the only reader of a value in memory, which dies with it.

    A slice that is not written has no buffer, nor has what it is cut from: whoever reads a copy of it computes both (fact:
    liveness-unwritten-slice). Nor have zeros and what a scatter makes of them if it writes into something else instead, nor what is not
    written and computed of fewer bytes (fact: liveness-unwritten-cast). Nor has an alias: what a loop, a branch or a recomputed layer
    reads is somebody else's buffer.
    """
    v = graph.ops[at].inputs[0] if graph.ops[at].traits.copy else None
    if v is None or len(graph.values[v].consumers) > 1:
        return False
    maker = graph.ops[graph.values[v].producer[0]]
    if maker.traits.persistent or maker.traits.alias:
        return False
    sliced = maker.traits.reads_part or all(graph.ops[j].traits.reads_part for j in graph.readers(graph.ops[at].outputs[0]))
    summed = maker.traits.scatter or maker.scalar_broadcast
    return materialised[v] or maker.traits.border or not (sliced or summed or bytes_until_read(graph, materialised, at) < 1)


def bytes_until_read(graph: Graph, materialised: Sequence[bool], at: int) -> float:
    """What is in memory from copy `at` on until it is read, over the bytes of the copy.

    Itself, if what it copies is in memory; else the arrays that its reader computes it of, and nothing else reads.
    """
    v = graph.ops[at].inputs[0]
    if v is None or materialised[v] or graph.ops[graph.values[v].producer[0]].traits.border:
        return 1.0
    queue, known, inside, sources = [v], {v}, {at}, list[int]()
    for w in queue:
        maker = graph.values[w].producer[0]
        if materialised[w] or graph.ops[maker].traits.border:
            sources.append(w)
        else:
            inside.add(maker)
            queue += (new := [u for u in dict.fromkeys(graph.ops[maker].inputs) if u is not None and u not in known])
            known.update(new)
    kept = 0.0
    for w in sources:
        traits = graph.ops[graph.values[w].producer[0]].traits
        if not (traits.persistent or traits.alias) and all(j in inside for j, _ in graph.values[w].consumers):
            kept += graph.values[w].bytes
    return kept / max(graph.values[v].bytes, 1.0)


def live_intervals(
    graph: Graph,
    materialised: Sequence[bool],
    in_place: Callable[[int, int], bool],
    order: RunOrder | None = None,
    summed: Collection[SummedScatter] = (),
    products: Mapping[int, int] = MappingProxyType({}),
) -> list[Interval | None]:
    """Per value its (birth, death), or None for one that holds no memory of its own.

    For an alias the interval is that of the copy that it is when its layout differs. `in_place` says of an op and an array whether a
    result of the op may take the place of the array if that dies there; without `order`, ops run in that of the program.
    `summed`: additions that scatters make in place; `products`: op -> the product whose kernel computes it.
    """
    order = order or order_by_rules(graph)
    places, runs = order.places, order.read_at
    replaced = {o: graph.ops[a].outputs[0] for a, o in graph.same_layout if a in graph.donated}  # output -> donated state
    held, read = _last_uses(graph, materialised, order, replaced, {*products.values()} if order.scheduled else set())
    overwritten, stacked_from = _overwritten(graph, summed), _stack_births(graph, order)
    buffer, shared = _buffers(graph, materialised, overwritten, runs, read)

    def reused(at: int, v: int) -> bool:
        if at in overwritten:
            return overwritten[at] == v
        if in_place(at, v):
            same = (w for w in graph.ops[at].outputs if graph.values[w].bytes == graph.values[v].bytes)
            return any(buffer[v] == buffer[w] or not {buffer[v], buffer[w]} & shared for w in same)
        return False

    def death(v: int) -> int:
        """The place before which the buffer is free: the last reader's, if that writes its result there, else the one behind it."""
        return max(held[v], read[v] + (read[v] >= 0 and not reused(order.ops[read[v]], v)))

    def overwrites_state(v: int, at: int) -> bool:
        olds = (replaced[c] for c, _ in graph.values[v].consumers if c in replaced)
        return any(in_place(at, w) and graph.values[w].bytes == graph.values[v].bytes and read[w] <= places[at] for w in olds)

    state, transposed = {a for a, _ in graph.same_layout}, _transposed_products(graph, materialised, products)
    out: list[Interval | None] = []
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        if op.traits.persistent:
            dies = op.traits.step_input and at in graph.donated and at not in state
            out.append((0, death(v) if dies else order.end))
        elif v in transposed:  # until a reshard, if there is one, then it is the transpose
            out.append((places[at], max(places[at], places[transposed[v]])))
        elif op.traits.step_output or not (materialised[v] or op.traits.alias) or overwrites_state(v, at):
            out.append(None)
        else:
            birth = stacked_from.get(at, places[at if op.inputs and op.inputs[0] in transposed else products.get(at, at)])
            if op.traits.loop_next:
                birth = order.loops[op.loop][1]
            elif op.traits.alias or op.forwards_value:  # other readers of an array in flight make their result when it is there
                birth = order.sent_from.get(at, birth)
            if op.traits.zeros_after is not None:
                where = op.inputs[op.traits.zeros_after]
                birth = birth if where is None else places[graph.maker(where)]
            out.append((birth, max(birth, death(v))))
    return out


def _transposed_products(graph: Graph, materialised: Sequence[bool], products: Mapping[int, int]) -> dict[int, int]:
    """Result of a product of which its kernel writes the transpose, unless a reshard is between -> the transpose."""
    found = {v: at for at in products if graph.ops[at].traits.transpose and (v := graph.ops[at].inputs[0]) is not None}
    return {v: at for v, at in found.items() if graph.values[v].producer[0] == products[at] and not materialised[v]}


def _overwritten(graph: Graph, summed: Collection[SummedScatter]) -> dict[int, int | None]:
    """In-place update -> the value into whose buffer it writes."""
    out = {at: op.inputs[0] for at, op in enumerate(graph.ops) if op.traits.in_place}
    return out | {found.addition: found.into for found in summed}


def _buffers(
    graph: Graph, materialised: Sequence[bool], overwritten: Mapping[int, int | None], runs: Sequence[int], read: Sequence[int]
) -> tuple[list[int], set[int]]:
    """Per value, the number of its buffer; and the buffers of several values.

    An in-place update shares one with the value that it is the last to read, a loop with its carry, a conditional with the results
    of its branches, a stack with its zeros. No elementwise op writes over such a value, or such a value over an operand, but within
    the buffer (fact: liveness-shared-buffers).
    """
    copied: list[tuple[int | None, ...]] = []
    shared: list[tuple[int | None, ...]] = []
    for at, op in enumerate(graph.ops):
        if at in overwritten:
            v = overwritten[at]
            shared.append((op.outputs[0], v if v is not None and read[v] == runs[at] else None))
        elif op.traits.loop_carry or op.traits.loop_next or op.traits.joins_branches:
            shared.append((op.outputs[0], *op.inputs))
        elif op.traits.loop_stack:
            shared.append((op.outputs[0],))
        elif takes_over_buffer(graph, materialised, at):
            copied.append((op.outputs[0], op.inputs[0]))
    carries = ((graph.ops[a], graph.ops[o]) for a, o in graph.same_layout)
    shared += [(a.outputs[0], o.outputs[0]) for a, o in carries if a.traits.loop_carry]
    joined = ((first, v) for first, *others in (*copied, *shared) for v in others if first is not None and v is not None)
    buffer = components(len(graph.values), joined)
    return buffer, {buffer[v] for v, *_ in shared if v is not None}


def _stack_births(graph: Graph, order: RunOrder) -> dict[int, int]:
    """Op that makes a stack of rows -> where its zeros are written: one kernel writes all of one shape and computation.

    Fact: liveness-stack-zeros.
    """
    starts = ((some, min(order.loops[graph.ops[at].held_during][0] for at in some)) for some in stacks_of_one_shape(graph))
    return {at: first for some, first in starts for at in some}


def _last_uses(
    graph: Graph, materialised: Sequence[bool], order: RunOrder, replaced: Mapping[int, int], writers: Collection[int]
) -> tuple[list[int], list[int]]:
    """Per value, until when it is needed whoever reads it last; and where its last reader runs, itself or in a fusion, or -1.

    `writers` are ops that read where they run though nothing writes their own result.
    """
    places = order.places
    held, read = [places[value.producer[0]] + 1 for value in graph.values], [-1] * len(graph.values)
    ends = _branch_ends(graph)
    for v in reversed(range(len(graph.values))):
        for at, k in graph.values[v].consumers:
            op = graph.ops[at]
            if (at, k) in ends:
                held[v] = max(held[v], order.behind(ends[at, k]))
            elif op.traits.step_output:
                held[v] = max(held[v], places[at] if at in replaced else order.end)
            elif op.held_during >= 0 and not op.traits.loop_stack:
                held[v] = max(held[v], order.loops[op.held_during][1])
            elif takes_over_buffer(graph, materialised, at):
                held[v] = max(held[v], places[at])
            else:
                read[v] = max(read[v], order.read_at[at])
                for w in op.outputs if at not in writers else ():
                    if not materialised[w] or op.traits.alias:
                        held[v], read[v] = max(held[v], held[w]), max(read[v], read[w])
    return held, read


def conditionals(graph: Graph) -> list[int]:
    """Per op, the first op of the outermost conditional whose branches, or whose joined results, it is of; itself if there is none.

    A copy is of the conditional that all its readers are of.
    """
    joined = {op.path[:-2] for op in graph.ops if op.traits.joins_branches}
    out, first = list(range(len(graph.ops))), dict[tuple, int]()
    for at, op in enumerate(graph.ops) if joined else ():
        path = next((op.path[:n] for n in range(len(op.path)) if op.path[:n] in joined), None)
        if path is not None and not op.traits.copy:
            out[at] = first.setdefault(path, at)
    for at in reversed(range(len(graph.ops))) if first else ():
        if graph.ops[at].traits.copy:
            blocks = {out[j] for j in graph.readers(graph.ops[at].outputs[0])}
            if len(blocks) == 1 and not blocks.isdisjoint(first.values()):
                (out[at],) = blocks
    return out


def _branch_ends(graph: Graph) -> dict[tuple[int, int], int]:
    """(op, operand) that takes the result of a branch -> where that branch ends; the last branch ends at the op itself."""
    ends: dict[tuple, int] = {}  # path of a conditional and number of a branch -> the op behind its last one
    joined: dict[tuple, list[int]] = {}
    for at, op in enumerate(graph.ops):
        if op.traits.joins_branches:
            joined.setdefault(op.path[:-2], []).append(at)
    for at, op in enumerate(graph.ops) if joined else ():
        for n in range(len(op.path) if not op.traits.copy else 0):
            if op.path[:n] in joined and isinstance(op.path[n], int):
                ends[op.path[: n + 1]] = at + 1
    return {
        (at, k): ends[*path, k]
        for path, some in joined.items()
        for at in some
        for k in range(len(graph.ops[at].inputs) - 1)
        if (*path, k) in ends
    }
