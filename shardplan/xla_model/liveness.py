"""When each value is in memory: half-open intervals of op numbers, so that two arrays are together in memory iff they overlap.

A value is born when its op runs and dies when its last reader runs; an elementwise reader may reuse its buffer for a result of the
same size, any other needs it beside its own result. Views and values inside fusions hold nothing themselves but keep their sources
alive. What a loop reads stays until the loop ends; the rows it stacks are there from its start.

A product of the backward pass runs when its result is first needed there: XLA's schedule is made from the end. What only the optimizer
or a loop's end needs is made when its collective starts: in its place, or where that is merged with others', when the last of them is.

What scatters into zeros has them from the moment the array exists that says where to: nothing else keeps XLA from making them.

Donated state that nobody reads any more is written over by elementwise work that replaces it: the new values hold nothing of their own.

A `share` takes over the buffer of a value that nobody else reads; beside other readers it is an *alias*: memory of its own only
where its layout differs from the original's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.ir.graph import Graph
from shardplan.xla_model.accumulation import ADDS

KEPT = frozenset({"arg", "const"})
ALIASES = frozenset({"share", "loop_const", "barrier", "branch_in"})
PASSED_ON = frozenset({"share", "reshape", "transpose", "convert_element_type"})
PUT_OFF = frozenset({"dot_general", *ADDS})
"""Makers of gradients that run when these are needed; others are part of kernels that make what is needed before."""
INTO_ZEROS = {"select_and_scatter_add": 1, "select_and_scatter": 0}
"""Ops that write into zeros -> the operand that says where to."""

Interval = tuple[int, int]


def takes_over_buffer(graph: Graph, at: int) -> bool:
    """Whether a share is the only reader of a value that dies with it."""
    if graph.ops[at].primitive != "share":
        return False
    (v,) = graph.ops[at].inputs
    assert v is not None
    return len(graph.values[v].consumers) == 1 and graph.ops[graph.values[v].producer[0]].primitive not in KEPT


def live_intervals(
    graph: Graph,
    materialised: Sequence[bool],
    in_place: Sequence[bool],
    starts: Mapping[int, int] | None = None,
    fetched: Mapping[int, int] | None = None,
) -> list[Interval | None]:
    """Per value its (birth, death) in op numbers, or None for one that holds no memory of its own.

    For an alias the interval is that of the copy it makes when its layout differs.

    Args:
        graph: the step.
        materialised: per value, whether it is written to memory.
        in_place: per op, whether a result may take the place of an operand that dies there.
        starts: op that makes a gradient -> the op when its collective starts (`queues.OverlapWindows`); by default at once.
        fetched: op that takes an array from elsewhere -> the op beside which it is fetched; by default itself.
    """
    end = len(graph.ops)
    replaced = {o: graph.ops[a].outputs[0] for a, o in graph.same_layout if a in graph.donated}  # out -> the state that it replaces
    state = {a for a, _ in graph.same_layout}
    kept = [0] * len(graph.values)  # until when it is needed, and the last op that reads it, itself or in a fusion
    read = [-1] * len(graph.values)
    late = _late(graph, starts or {})

    def reuses(at: int, v: int) -> bool:
        if in_place[at]:
            return any(graph.values[w].bytes == graph.values[v].bytes for w in graph.ops[at].outputs)
        return graph.ops[at].traits.in_place and graph.ops[at].inputs[0] == v

    def death(v: int) -> int:
        return max(kept[v], read[v] + (read[v] >= 0 and not reuses(read[v], v)))

    for v in reversed(range(len(graph.values))):
        value = graph.values[v]
        kept[v] = value.producer[0] + 1
        for at, _ in value.consumers:
            op = graph.ops[at]
            if op.primitive == "out":
                kept[v] = max(kept[v], at if at in replaced else end)
            elif op.held_during >= 0 and op.primitive != "loop_stack":
                kept[v] = max(kept[v], graph.loops[op.held_during].stop)
            elif takes_over_buffer(graph, at):
                kept[v] = max(kept[v], at)
            else:
                read[v] = max(read[v], late[at])
                for w in op.outputs:
                    if not materialised[w] or op.primitive in ALIASES:
                        kept[v], read[v] = max(kept[v], kept[w]), max(read[v], read[w])

    def in_its_place(v: int) -> bool:
        """Whether a value is written over the donated state that it replaces, which nobody reads any more."""
        at = graph.values[v].producer[0]
        olds = (replaced[c] for c, _ in graph.values[v].consumers if c in replaced)
        return in_place[at] and any(graph.values[w].bytes == graph.values[v].bytes and read[w] <= at for w in olds)

    out: list[Interval | None] = []
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        if op.primitive in KEPT:
            free = op.primitive == "arg" and at in graph.donated and at not in state
            out.append((0, death(v) if free else end))
        elif op.primitive == "out" or not (materialised[v] or op.primitive in ALIASES) or in_its_place(v):
            out.append(None)
        else:
            birth = graph.loops[op.held_during].start if op.primitive == "loop_stack" else at
            birth = graph.loops[op.loop].stop if op.primitive == "loop_next" else (fetched or {}).get(birth, birth)
            if op.primitive in INTO_ZEROS:
                where = op.inputs[INTO_ZEROS[op.primitive]]
                birth = birth if where is None else graph.maker(where)
            out.append((birth, max(birth, death(v))))
    return out


def _late(graph: Graph, starts: Mapping[int, int]) -> list[int]:
    """When every op runs, by the numbers of ops."""
    late, needed = list(range(len(graph.ops))), [len(graph.ops)] * len(graph.values)
    for at, op in reversed(list(enumerate(graph.ops))):
        if op.phase != "backward" or op.primitive in ("out", "loop_stack", "loop_next"):
            continue
        first = min((needed[v] for v in op.outputs), default=at)
        if op.primitive == "dot_general" and first < len(graph.ops):
            late[at] = first
        elif op.primitive in PUT_OFF and first == len(graph.ops):
            late[at] = starts.get(at, at)
        for v in op.inputs:
            if v is not None and op.loop == graph.ops[graph.values[v].producer[0]].loop:
                needed[v] = min(needed[v], first if op.primitive in PASSED_ON else late[at])
    return late
