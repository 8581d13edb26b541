"""Which values XLA for GPU writes because parts of them overlap: to compute each part anew would read more.

    x -> op -> y -+-> y[0::2] --+
                  +-> y[1::2] --+-> ..     y is computed m = 1.5 times from S bytes, or written once and read:
                  +-> y[2::2] -----> ..    m S  >=  S + y + m y

So the levels of an associative scan, each half of the one before and read by three slices, are written every few levels. A kernel
that reads parts of what is written stands behind the one that writes it.

Facts: fusion-overlapping-parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule

MANY_OPS = 1 << 10
"""Ops on all ways from an array in memory to a part, beyond which the ways are not followed."""

ENDS = 1.05
"""How much more parts are taken to read: slices leave out an element at an end, which decides where both ways move as many bytes."""
LAUNCH_BYTES = 5e5
"""Bytes of all devices that a kernel more is worth."""

Written = Callable[[int], bool]
ReadArray = Callable[[int], int]
"""Whether a value is in memory; and the array that is read for it (`fusible.read_array`)."""


def overlapping(graph: Graph, rules: Sequence[Rule]) -> dict[int, float]:
    """Value of which slices or paddings are read -> how many times kernels read it, its parts by size, where that is more than once."""
    parts: dict[int, dict[tuple, float]] = {}
    for at, op in enumerate(graph.ops):
        v = op.inputs[0] if moves_elements(op) and at not in graph.dead else None
        if v is not None:
            size = min(1.0, op.outs[0].size / max(1, op.ins[0].size)) if op.traits.reads_part else 1.0
            parts.setdefault(graph.original(v), {})[op.traits.pads, op.outs[0].shape, str(op.params)] = size
    out: dict[int, float] = {}
    for v, sizes in parts.items():
        others = (graph.ops[i] for i in graph.readers(v) if i not in graph.dead and rules[i].fusion in ("loop", "reduce"))
        times = sum(sizes.values()) + any(not moves_elements(op) for op in others)
        if times > 1:
            out[v] = times
    return out


def moves_elements(op: Op) -> bool:
    """Whether an op reads its first operand at other indices than those of its result: a slice, a lookup or a padding."""
    return (op.traits.reads_part and not op.traits.border) or op.traits.pads


def written_for_parts(graph: Graph, read: ReadArray, written: Written, v: int, times: float) -> Iterator[int]:
    """A value that is read so many times, or else what it is padded from, if either moves fewer bytes written than computed again."""
    if _is_cheaper_written(graph, read, written, v, times):
        yield v
        return
    todo, known = [v], {v}
    for u in todo:
        op = graph.ops[graph.values[u].producer[0]]
        for k, w in enumerate(op.inputs):
            if w is not None and (root := read(w)) not in known and not written(root) and not (k and moves_elements(op)):
                known.add(root)
                if not op.traits.pads:
                    todo += [root] if graph.values[root].shape == graph.values[v].shape else []
                elif _is_cheaper_written(graph, read, written, root, times):
                    yield root


def _is_cheaper_written(graph: Graph, read: ReadArray, written: Written, v: int, times: float) -> bool:
    maker = graph.ops[graph.values[v].producer[0]]
    if maker.scalar_broadcast or not maker.inputs:
        return False
    elements = elements_read(graph, read, written, v, float(maker.outs[0].size))
    sources = sum(n * graph.values[u].itemsize for u, n in elements.items())
    return ENDS * (times - 1) * sources >= (times + 1) * graph.values[v].bytes + LAUNCH_BYTES


def elements_read(graph: Graph, read: ReadArray, written: Written, v: int, wanted: float) -> dict[int, float]:
    """Array in memory that a value is computed from, itself if it is one -> how many of its elements are read for `wanted` of its own.

    What elementwise ops read several times is read once, but what slices and paddings read is at other places on every way.
    """
    found: dict[tuple[int, tuple[int, ...]], float] = {}
    todo: list[tuple[int, tuple[int, ...], float]] = [(v, (), wanted)]
    known = {todo[0][:2]}
    for u, way, n in todo:
        root = read(u)
        if written(root):
            found[root, way] = min(n, float(graph.ops[graph.values[root].producer[0]].outs[0].size))
        elif len(todo) < MANY_OPS:
            at = graph.values[root].producer[0]
            op = graph.ops[at]
            moves, made = moves_elements(op), max(1.0, float(op.outs[0].size))
            for k, (w, x) in enumerate(zip(op.inputs, op.ins, strict=True)):
                there = (*way, at) if moves and not k else way
                if w is not None and (w, there) not in known:
                    known.add((w, there))
                    todo.append((w, there, n if k == 0 and op.traits.reads_part else n * x.size / made))
    out: dict[int, float] = {}
    for (root, _), n in found.items():
        out[root] = out.get(root, 0.0) + n
    return out
