"""Which reshards XLA makes one collective of.

Rule 1, the class of a reshard. Of a value v:
    prefetch   v is derived from an input of the step, a constant or a row that a loop reads: known before most of its readers run
    gradient   v is made in the backward pass, and only the optimizer or what leaves the loop reads it
    update     v is made by the optimizer
    blocking   all else: the reader waits for it

Rule 2, combining. Collectives of one class, loop and pass are combined, of sums also only those of one dtype, up to 30 MiB of results.
A blocking sum is combined only with sums at its depth: the k-th small sum of a chain waits for the one before it.

Rule 3, the window of a combined collective: from the last of its arrays that is made to the first that is needed.

    w1 made |----------------------------| needed
    w2            made |--------------------------| needed
    combined           |=================|             each has its part of that time, by bytes

Facts: combine-threshold, combine-same-dtype, combine-independent. Also known as collective coalescing or gradient bucketing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardplan.ir import walk
from shardplan.ir.graph import Graph, Op, Phase

COMBINABLE = ("all-gather", "all-reduce", "reduce-scatter")
"""Kinds of collectives that XLA combines where they do not depend on each other."""

COMBINE_THRESHOLD_BYTES = 30 << 20
"""Bytes of results up to which XLA combines collectives (`xla_gpu_all_gather_combine_threshold_bytes` and its like)."""

CollectiveClass = Literal["prefetch", "gradient", "update", "blocking"]


@dataclass(frozen=True)
class CollectiveSite:
    """Which collectives the reshards of a value may be combined with.

    Attributes:
        collective_class: of rule 1.
        group_size: number of arrays in its group, casts and copies of one counted once.
        group: number of the group; only reshards of one group are combined (rule 2).
        origin: number of the op that makes the array of which the value is a cast or a copy.
    """

    collective_class: CollectiveClass
    group_size: int
    group: int
    origin: int


def collective_sites(graph: Graph, sums: Sequence[bool]) -> tuple[CollectiveSite, ...]:
    """Per value, class and group of its reshards.

    Args:
        graph: the step.
        sums: per value, whether it is a small sum that is partial under some strategy.
    """
    leaves, depth = _leaves_the_pass(graph), [0] * len(graph.values)
    origins = [graph.values[origin(graph, v)].producer[0] for v in range(len(graph.values))]
    for op in graph.ops:
        inside = (v for v in op.inputs if v is not None and graph.ops[graph.values[v].producer[0]].phase == op.phase)
        above = max((depth[v] for v in inside), default=0)
        for v in op.outputs:
            depth[v] = above + sums[v]
    keys: list[tuple] = []
    for v, value in enumerate(graph.values):
        op = graph.ops[value.producer[0]]
        loop = graph.ops[value.consumers[0][0]].loop if value.consumers else op.loop
        if graph.ops[origins[v]].traits.known_early:
            keys.append(("prefetch", loop))
        elif leaves[v] and op.phase == "backward":
            keys.append(("gradient", loop, str(value.dtype)))
        elif op.phase == "update" and not sums[v]:
            keys.append(("update", loop))
        else:
            keys.append(("blocking", loop, str(value.dtype), op.phase, depth[v] if sums[v] else ~v))
    sizes = Counter(key for key, _ in set(zip(keys, origins, strict=True)))
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return tuple(CollectiveSite(key[0], sizes[key], number[key], at) for key, at in zip(keys, origins, strict=True))


def origin(graph: Graph, v: int) -> int:
    """The value of which v is a cast or a copy."""
    return walk.origin(graph, v, lambda at: graph.ops[at].traits.same_array or graph.ops[at].forwards_value)


def hands_on(op: Op) -> bool:
    """Whether a collective of its result may as well be one of its operands: a copy, a cast, or an addition."""
    return op.traits.same_array or op.traits.addition or op.forwards_value


def _leaves_the_pass(graph: Graph) -> list[bool]:
    """Per value, whether nothing in the pass that makes it computes with it."""
    out = [True] * len(graph.values)
    for op in reversed(graph.ops):
        if op.traits.leaves_region or op.phase == "update":
            continue
        for v in op.inputs:
            if v is not None and not (hands_on(op) and all(out[w] for w in op.outputs)):
                out[v] = False
    return out


Key = tuple[int, Phase, int]
"""An array in flight: the op that makes it; phase and loop of its readers, "update" for gradients."""


@dataclass(frozen=True)
class Window:
    """Overlap window of the collective of one array.

    Attributes:
        made, needed: seconds after the step's start.
        stream: class, phase of the readers, group, and transfer (kinds and axes; None if not known): only windows of one stream are
            combined.
        bytes: of the result on one device.
        runs: how often per step.
    """

    made: float
    needed: float
    stream: tuple[CollectiveClass, Phase, int, Hashable]
    bytes: float
    runs: float


@dataclass(frozen=True)
class CombinedWindow:
    """Overlap window of a combined collective (rule 3)."""

    windows: Mapping[Key, Window]

    @property
    def stream(self) -> tuple[CollectiveClass, Phase, int, Hashable]:
        """Class, phase, group and transfer that its arrays have in common."""
        return next(iter(self.windows.values())).stream

    @property
    def made(self) -> float:
        """When the last array is made, in seconds."""
        return max(w.made for w in self.windows.values())

    @property
    def needed(self) -> float:
        """When the first array is needed, in seconds."""
        return min(w.needed for w in self.windows.values())

    @property
    def bytes(self) -> float:
        """Bytes of all results on one device."""
        return sum(w.bytes for w in self.windows.values())

    def takes(self, seconds: Callable[[Any, float], float]) -> float:
        """Seconds per step that it is in flight; `seconds(transfer, bytes)` are those of one run."""
        return seconds(self.stream[3], self.bytes) * next(iter(self.windows.values())).runs


def combined(windows: Mapping[Key, Window]) -> list[CombinedWindow]:
    """Windows of one stream combined with their neighbours (rule 2): prefetches as they are needed, gradients as they are made."""

    def order(key: Key):
        w = windows[key]
        return number[w.stream], (w.needed, w.made) if w.stream[0] == "prefetch" else (w.made, w.needed), key

    number = {stream: n for n, stream in enumerate(dict.fromkeys(w.stream for w in windows.values()))}
    out: list[dict[Key, Window]] = []
    for key in sorted(windows, key=order):
        last = list(out[-1].values()) if out else []
        full = sum(w.bytes for w in last) + windows[key].bytes > COMBINE_THRESHOLD_BYTES
        if full or not last or last[0].stream != windows[key].stream:
            out.append({})
        out[-1][key] = windows[key]
    return [CombinedWindow(arrays) for arrays in out]
