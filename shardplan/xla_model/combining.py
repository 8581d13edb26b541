"""Which reshards XLA makes one collective of (rules of docs/xla_model.md), and how many bytes a collective sends.

Rule 1, class: a reshard is a prefetch, a gradient, an update or blocking.
Rule 2, combining: collectives of one class, loop and pass are combined, up to 30 MiB of results.
Rule 3, combined window: from the last of its arrays that is made to the first that is needed.

Facts: combine-threshold, combine-same-dtype, combine-independent, combine-any-pass, promote-small-integers, accumulate-before-cast,
sum-before-cast.
Also known as collective coalescing or gradient bucketing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.ir.graph import Graph, Op, Phase
from shardplan.xla_model.accumulation import accumulated_operands, accumulated_sums
from shardplan.xla_model.cast_first import MOVES, Factors

COMBINABLE = ("all-gather", "all-reduce", "reduce-scatter")
"""Kinds of collectives that XLA combines where they do not depend on each other, in the order in which it combines them."""
SUMS = ("all-reduce", "reduce-scatter")
"""Collectives that add numbers; some run in a wider dtype than the array's."""
COMBINE_THRESHOLD_BYTES = 30 << 20
"""Bytes of results up to which XLA combines collectives (`xla_gpu_all_gather_combine_threshold_bytes` and its like)."""

CollectiveClass = Literal["prefetch", "gradient", "update", "blocking"]


@dataclass(frozen=True)
class CollectiveSite:
    """Which collectives the reshards of a value may be combined with."""

    collective_class: CollectiveClass  # of rule 1
    group_size: int  # number of arrays in its group, casts and copies of one counted once
    group: int  # number of the group; prices take only reshards of one group as combined (rule 2)
    origin: int  # op that makes the array of which the value is a cast or a copy
    small_sum: bool  # whether it is a small sum on the critical path
    joint: int  # number of the group of all arrays of a loop, whatever their class: the plan says what waits for what
    joint_size: int  # number of arrays in that
    sum_dtype: str  # in which XLA adds its partial sums


def collective_sites(graph: Graph, sums: Sequence[bool]) -> tuple[CollectiveSite, ...]:
    """Per value, class and group of its reshards; `sums` are, per value, whether it is a small sum that may be partial."""
    leaves, depth = _leaves_the_pass(graph), [0] * len(graph.values)
    same = [op.traits.same_array or op.forwards_value for op in graph.ops]
    origins = [graph.values[graph.origin(v, same.__getitem__)].producer[0] for v in range(len(graph.values))]
    dtypes = [str(graph.values[v].dtype) for v in summed_values(graph)]
    for op in graph.ops:
        inside = (v for v in op.inputs if v is not None and graph.ops[graph.values[v].producer[0]].phase == op.phase)
        above = max((depth[v] for v in inside), default=0)
        for v in op.outputs:
            depth[v] = above + sums[v]
    keys: list[tuple] = []
    for v, (value, dtype) in enumerate(zip(graph.values, dtypes, strict=True)):
        op = graph.ops[value.producer[0]]
        loop = graph.ops[value.consumers[0][0]].loop if value.consumers else op.loop
        if graph.ops[origins[v]].traits.known_early:
            keys.append(("prefetch", loop))
        elif leaves[v] and op.phase == "backward":
            keys.append(("gradient", loop, dtype))
        elif op.phase == "update" and not sums[v]:
            keys.append(("update", loop))
        else:
            keys.append(("blocking", loop, dtype, op.phase, depth[v] if sums[v] else ~v))
    small = [key[0] == "blocking" and sums[v] for v, key in enumerate(keys)]
    joint = [("anywhere", key[1]) for key in keys]
    (sizes, number), (joint_sizes, joint_number) = (_groups(some, origins) for some in (keys, joint))
    sites = zip(keys, origins, small, joint, dtypes, strict=True)
    return tuple(CollectiveSite(k[0], sizes[k], number[k], at, sum_, joint_number[j], joint_sizes[j], t) for k, at, sum_, j, t in sites)


def summed_values(graph: Graph) -> list[int]:
    """Per value, the one whose partial sums XLA adds if it is partial: casts and copies come after, and what a loop accumulates before.

    Facts: sum-before-cast, accumulate-before-cast.
    """
    same = [op.traits.same_array or op.forwards_value for op in graph.ops]
    accumulated, out = accumulated_sums(graph, accumulated_operands(graph)), []
    for v in range(len(graph.values)):
        at = graph.origin(v, same.__getitem__)
        out.append(graph.origin(accumulated[at], same.__getitem__) if at in accumulated else at)
    return out


def _groups(keys: Sequence[tuple], origins: Sequence[int]) -> tuple[Counter[tuple], dict[tuple, int]]:
    """Per key, how many arrays have it, casts and copies of one counted once; and its number."""
    return Counter(key for key, _ in set(zip(keys, origins, strict=True))), {key: n for n, key in enumerate(dict.fromkeys(keys))}


def hands_on(op: Op) -> bool:
    """Whether a collective of its result may as well be one of its operands: a copy, a cast, or an addition."""
    return op.traits.same_array or op.traits.addition or op.forwards_value


def _leaves_the_pass(graph: Graph) -> list[bool]:
    """Per value, whether nothing in the pass that makes it computes with it."""
    out = [True] * len(graph.values)
    for op in reversed(graph.ops):
        if not (op.traits.leaves_region or op.phase == "update" or (hands_on(op) and all(out[w] for w in op.outputs))):
            for v in op.inputs:
                if v is not None:
                    out[v] = False
    return out


Key = tuple[int, Phase, int]
"""An array in flight: the op that makes it; phase and loop of its readers, "update" for gradients."""


@dataclass(frozen=True)
class Window:
    """Overlap window of the collective of one array."""

    made: float  # seconds after the step's start
    needed: float  # the same
    stream: tuple[CollectiveClass, Phase, int, Hashable]
    """Class, phase of the readers, group and transfer (kinds and axes; None if not known): only windows of one stream are combined."""
    bytes: float  # of the result on one device
    runs: float  # per step


def merged(windows: Collection[Window]) -> Window:
    """The window of a combined collective (rule 3)."""
    first = next(iter(windows))
    made, needed = max(w.made for w in windows), min(w.needed for w in windows)
    return Window(made, needed, first.stream, sum(w.bytes for w in windows), first.runs)


def combined(windows: Mapping[Key, Window]) -> list[dict[Key, Window]]:
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
    return out


def byte_factors(dtype, summed_fraction: float = 1.0, widened_fraction: float = 1.0) -> Factors:
    """(kind, factor) of the collectives that send `factor` times the bytes of an array; kinds that are not listed send its bytes.

    Args:
        dtype: of the array. No device adds 16- or 4-bit integers: they are sent as integers twice as wide.
        summed_fraction: bytes of a partial sum over those of the array: not 1 where XLA reduces before a cast.
        widened_fraction: bytes of what is moved over those of the array: not 1 where XLA casts behind (fact: sent-before-widened).
    """
    factors = dict.fromkeys(SUMS, summed_fraction) if summed_fraction != 1 else {}
    factors |= dict.fromkeys(MOVES, widened_fraction) if widened_fraction != 1 else {}
    small_integers = {"int16": SUMS, "uint16": SUMS, "int4": (*SUMS, "all-to-all"), "uint4": (*SUMS, "all-to-all")}
    for kind in small_integers.get(str(dtype), ()):
        factors[kind] = 2.0 * factors.get(kind, 1.0)
    return tuple(factors.items())
