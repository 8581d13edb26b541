"""Which arrays may be resharded at leisure, and which of them at once.

    gather      inputs of the step, and rows that a loop reads: known before most of their readers run
    gradient    what the backward pass makes and only the optimizer, or a loop that stacks or adds it up, reads
    update      what the optimizer makes
    line        all else: the next op waits

Collectives of one of the first three do not depend on each other, and XLA merges many into one. What stands in line is merged only with
what is as far down the same line: the k-th small sum of a layer waits for the one before it. Collectives of the first two run
while other work goes on, as far as there is any between the op that makes the array and the one that computes with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardplan.ir.accumulate import ADDS, passes_on
from shardplan.ir.graph import Graph, Op
from shardplan.ir.share import SMALL_BYTES
from shardplan.mesh.collective import COMBINED_BYTES

Queue = Literal["gather", "gradient", "update", "line"]

KNOWN = frozenset({"arg", "const", "loop_slice"})
PUT_BY = frozenset({"loop_stack", "loop_next", "out"})


@dataclass(frozen=True)
class Place:
    """Where the reshards of a value stand.

    Attributes:
        queue: see the module's head.
        members: arrays in this queue of the same loop, casts and copies of one counted once, of sums those of one type; in line,
            the small sums as far down the line as this one.
        crowd: the same number for all members.
        origin: the op that makes the array of which this is a cast or a copy.
    """

    queue: Queue
    members: int
    crowd: int
    origin: int


def places(graph: Graph, sums: Sequence[bool]) -> tuple[Place, ...]:
    """Per value, where its reshards stand.

    Args:
        sums: per value, whether it is a small sum that a split leaves partial.
    """
    later, depth = _later(graph), [0] * len(graph.values)
    origins = [_origin(graph, v) for v in range(len(graph.values))]
    for op in graph.ops:
        inside = (v for v in op.inputs if v is not None and graph.ops[graph.values[v].producer[0]].phase == op.phase)
        above = max((depth[v] for v in inside), default=0)
        for v in op.outputs:
            depth[v] = above + sums[v]
    keys: list[tuple] = []
    for v, value in enumerate(graph.values):
        op = graph.ops[value.producer[0]]
        loop = graph.ops[value.consumers[0][0]].loop if value.consumers else op.loop
        if graph.ops[origins[v]].primitive in KNOWN:
            keys.append(("gather", loop))
        elif later[v] and op.phase == "backward":
            keys.append(("gradient", loop, str(value.dtype)))  # sums of different types are not merged
        elif op.phase == "update" and not sums[v]:
            keys.append(("update", loop))
        else:
            keys.append(("line", loop, str(value.dtype), op.phase, depth[v] if sums[v] else ~v))
    members = Counter(key for key, _ in set(zip(keys, origins, strict=True)))
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return tuple(Place(key[0], members[key], number[key], at) for key, at in zip(keys, origins, strict=True))


@dataclass(frozen=True)
class Waits:
    """How long reshards may take, and what they wait for.

    Attributes:
        slack: (op, operand) -> seconds of work, in one run, that a reshard of the operand may run beside.
        starts: op that makes a gradient -> the op that makes the last of those that are merged with it.
    """

    slack: Mapping[tuple[int, int], float]
    starts: Mapping[int, int]


@dataclass(frozen=True)
class _Window:
    """When an array is made and when it is needed, the queue of a loop that its reshards stand in and by what way, and its bytes."""

    made: float
    needed: float
    queue: tuple[Queue, int, Hashable]
    bytes: float
    combined: float


def waits(
    graph: Graph, places: Sequence[Place], work_s: Sequence[float], moved: Mapping[int, tuple[Hashable, float]] | None = None
) -> Waits:
    """A reshard may last from when the array is made until somebody computes with it.

    Of arrays that are merged the one made last is waited for, and the one that is needed first waits for all.

    Args:
        places: of all values.
        work_s: seconds of every op in one run.
        moved: by the op that makes an array, the way that it is moved, which only arrays of the same way can be merged with, and the
            bytes of the result on a device. By default all arrays of a queue are moved alike, and whole.
    """
    done = [0.0]
    for op, seconds in zip(graph.ops, work_s, strict=True):
        done.append(done[-1] + seconds * op.runs)
    needed = list(range(len(graph.ops)))
    windows: dict[int, _Window] = {}  # by the op that makes the array
    edges: dict[tuple[int, int], int] = {}
    for j in reversed(range(len(graph.ops))):
        op = graph.ops[j]
        if op.primitive in PUT_BY:
            needed[j] = graph.loops[op.loop].stop if op.loop >= 0 else len(graph.ops)
        elif _hands_on(op):
            needed[j] = min((needed[at] for v in op.outputs for at, _ in graph.values[v].consumers), default=j)
        for k, v in enumerate(op.inputs):
            if v is not None and (queue := places[v].queue) in ("gather", "gradient"):
                at = edges[j, k] = places[v].origin
                size = graph.values[v].bytes
                way, combined = (moved or {}).get(at, (None, size))
                found = _Window(done[at + 1], done[needed[j]], (queue, op.loop, way), size, combined)
                if (seen := windows.get(at)) is not None:
                    least = min(seen.bytes, found.bytes), min(seen.combined, found.combined)
                    found = replace(found, needed=min(seen.needed, found.needed), bytes=least[0], combined=least[1])
                windows[at] = found
    beside, starts = {at: max(0.0, window.needed - window.made) for at, window in windows.items()}, {}
    for chunk in _merged(windows):
        room = min(windows[at].needed for at in chunk) - max(windows[at].made for at in chunk)
        beside.update(dict.fromkeys(chunk, max(0.0, room)))
        if windows[chunk[0]].queue[0] == "gradient":
            starts.update(dict.fromkeys(chunk, max(chunk)))
    return Waits({(j, k): beside[at] / graph.ops[j].reads for (j, k), at in edges.items()}, starts)


def _merged(windows: Mapping[int, _Window]) -> list[list[int]]:
    """Large arrays, neighbours in a queue that are made into one together: gathers as they are needed, gradients as they are made."""

    def order(at: int):
        w = windows[at]
        return number[w.queue], (w.needed, w.made) if w.queue[0] == "gather" else (w.made, w.needed), at

    number = {queue: n for n, queue in enumerate(dict.fromkeys(w.queue for w in windows.values()))}
    out: list[list[int]] = []
    for at in sorted((at for at, window in windows.items() if window.bytes > SMALL_BYTES), key=order):
        last = [windows[x] for x in out[-1]] if out else []
        full = sum(w.combined for w in last) + windows[at].combined > COMBINED_BYTES
        if full or not last or last[0].queue != windows[at].queue:
            out.append([])
        out[-1].append(at)
    return out


def _origin(graph: Graph, v: int) -> int:
    """The op that makes an array, whatever casts and copies it goes through."""
    at = graph.values[v].producer[0]
    while (graph.ops[at].primitive == "share" or passes_on(graph.ops[at])) and (w := graph.ops[at].inputs[0]) is not None:
        at = graph.values[w].producer[0]
    return at


def _later(graph: Graph) -> list[bool]:
    """Per value, whether nothing in the pass that makes it computes with it."""
    out = [True] * len(graph.values)
    for op in reversed(graph.ops):
        if op.primitive in PUT_BY or op.phase == "update":
            continue
        for v in op.inputs:
            if v is not None and not (_hands_on(op) and all(out[w] for w in op.outputs)):
                out[v] = False
    return out


def _hands_on(op: Op) -> bool:
    return op.primitive in ("share", *ADDS) or passes_on(op)
