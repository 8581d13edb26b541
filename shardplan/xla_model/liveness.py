"""When each value is in memory: half-open intervals of op numbers. Two arrays are in memory together iff their intervals overlap.

Rule 13, life. A value is live from its op to its last reader. An elementwise reader may reuse the buffer for a result of the same size;
any other reader needs it together with its own result. Views and values inside fusions hold nothing themselves; their sources live on.

    op       |-- a = dot --|-- b = dot(a) --|-- c = tanh(b) --|
    memory   |===== a =====================||                       dot needs a and b at once
                           |====== b =======|======= c =======|     tanh writes c over b

Rule 14, loops. What a loop reads is live until the loop ends; the rows it stacks from its start.

Rule 15, the schedule's order. Products of the backward pass read their operands where rule 8 runs them, so these live until then. A
prefetched array is live from the start of its prefetch (rule 11). What scatters into zeros has them from the moment the array exists
that says where to: nothing else keeps XLA from making them.

Rule 16, aliases. A copy takes over the buffer of a value that nobody else reads. Other copies, and operands of loops and branches, have
memory of their own only where their layout differs. Donated state that nobody reads any more is overwritten by elementwise work that
replaces it: the new value holds nothing of its own.

Facts: liveness-elementwise-reuse, liveness-loop-operands, liveness-combined-operands, liveness-scatter-zeros, liveness-donation. Also
known as live ranges, as in register allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.ir.graph import Graph
from shardplan.xla_model.overlap_windows import OverlapWindows
from shardplan.xla_model.schedule import runs_at

Interval = tuple[int, int]


def takes_over_buffer(graph: Graph, at: int) -> bool:
    """Whether op `at` is a copy, and the only reader of a value that dies with it."""
    if not graph.ops[at].traits.copy:
        return False
    (v,) = graph.ops[at].inputs
    assert v is not None
    return len(graph.values[v].consumers) == 1 and not graph.ops[graph.values[v].producer[0]].traits.persistent


def live_intervals(
    graph: Graph, materialised: Sequence[bool], in_place: Sequence[bool], windows: OverlapWindows | None = None
) -> list[Interval | None]:
    """Per value its (birth, death) in op numbers, or None for one that holds no memory of its own.

    For an alias the interval is that of the copy that it is when its layout differs.

    Args:
        graph: the step.
        materialised: per value, whether it is written to memory.
        in_place: per op, whether a result may take the place of an operand that dies there.
        windows: the schedule; by default ops run in the order of the program.
    """
    windows = windows or OverlapWindows()
    uses = _LastUses(graph, materialised, in_place, windows)
    state = {a for a, _ in graph.same_layout}
    out: list[Interval | None] = []
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        if op.traits.persistent:
            dies = op.traits.step_input and at in graph.donated and at not in state
            out.append((0, uses.death(v) if dies else len(graph.ops)))
        elif op.traits.step_output or not (materialised[v] or op.traits.alias) or uses.overwrites_state(v):
            out.append(None)
        else:
            birth = graph.loops[op.held_during].start if op.traits.loop_stack else at
            birth = graph.loops[op.loop].stop if op.traits.loop_next else windows.prefetch_start.get(birth, birth)
            if op.traits.zeros_after is not None:
                where = op.inputs[op.traits.zeros_after]
                birth = birth if where is None else graph.maker(where)
            out.append((birth, max(birth, uses.death(v))))
    return out


class _LastUses:
    """Until when every value is needed.

    Attributes:
        held: per value, until when it is needed whoever reads it last.
        read: the place of the last op that reads it, itself or in a fusion, or -1.
        replaced: output of the step -> the donated state that it replaces.
    """

    def __init__(self, graph: Graph, materialised: Sequence[bool], in_place: Sequence[bool], windows: OverlapWindows):
        self.graph, self.in_place = graph, in_place
        self.replaced = {o: graph.ops[a].outputs[0] for a, o in graph.same_layout if a in graph.donated}
        self.held, self.read = [0] * len(graph.values), [-1] * len(graph.values)
        runs = runs_at(graph, windows.deferred_until)
        held, read = self.held, self.read
        for v in reversed(range(len(graph.values))):
            value = graph.values[v]
            held[v] = value.producer[0] + 1
            for at, _ in value.consumers:
                op = graph.ops[at]
                if op.traits.step_output:
                    held[v] = max(held[v], at if at in self.replaced else len(graph.ops))
                elif op.held_during >= 0 and not op.traits.loop_stack:
                    held[v] = max(held[v], graph.loops[op.held_during].stop)
                elif takes_over_buffer(graph, at):
                    held[v] = max(held[v], at)
                else:
                    read[v] = max(read[v], runs[at])
                    for w in op.outputs:
                        if not materialised[w] or op.traits.alias:
                            held[v], read[v] = max(held[v], held[w]), max(read[v], read[w])

    def death(self, v: int) -> int:
        """The op before which the buffer is free: the last reader's, if that writes its result there, else the one behind it."""
        last = self.read[v]
        return max(self.held[v], last + (last >= 0 and not self._reused(last, v)))

    def overwrites_state(self, v: int) -> bool:
        """Whether a value is written over the donated state that it replaces, which nobody reads any more."""
        values, at = self.graph.values, self.graph.values[v].producer[0]
        olds = (self.replaced[c] for c, _ in values[v].consumers if c in self.replaced)
        return self.in_place[at] and any(values[w].bytes == values[v].bytes and self.read[w] <= at for w in olds)

    def _reused(self, at: int, v: int) -> bool:
        op, values = self.graph.ops[at], self.graph.values
        if self.in_place[at]:
            return any(values[w].bytes == values[v].bytes for w in op.outputs)
        return op.traits.in_place and op.inputs[0] == v
