"""Which ops are the same op of another layer: tandem repeats in the sequence of op signatures.

An unrolled model runs the same ops with the same shapes layer after layer, forward, backward and in the optimizer. A stretch in
which signature i equals signature i - period is one such repeat; ops at equal places of its periods form one class. Planning
ties a class to one strategy, which shrinks a model of any depth to the size of one of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.ir.graph import Graph

WINDOW = 12
CANDIDATES = 64


def repeated_layers(graph: Graph, signature: Sequence[int], copies: int = 3) -> tuple[int, ...]:
    """Per op a class number; ops in no repeat are alone in their class.

    Args:
        graph: the step.
        signature: per op, equal numbers for equal ops.
        copies: least number of periods that make a repeat.
    """
    border = {"arg", "const", "out"}
    body = np.array([i for i, op in enumerate(graph.ops) if op.primitive not in border], dtype=np.int64)
    classes = np.arange(len(graph.ops))
    if len(body):
        marks = np.array([(signature[i] * 3 + ("forward", "backward", "update").index(graph.ops[i].phase)) for i in body])
        for start, stop, period in _runs(marks, copies):
            places = body[start:stop]
            classes[places] = places[np.arange(stop - start) % period]
    _tie_ends(graph, signature, classes)
    return tuple(int(c) for c in classes)


def _runs(marks: np.ndarray, copies: int) -> list[tuple[int, int, int]]:
    """Disjoint (start, stop, period), longest first come first served."""
    last: dict[bytes, int] = {}
    votes: dict[int, int] = {}
    for i in range(len(marks) - WINDOW + 1):
        key = marks[i : i + WINDOW].tobytes()
        if key in last:
            votes[i - last[key]] = votes.get(i - last[key], 0) + 1
        last[key] = i
    found = []
    for period in sorted(votes, key=lambda p: (-votes[p], p))[:CANDIDATES]:
        same = np.concatenate([[False], marks[period:] == marks[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        found += [
            (int(a), int(b) + period, period)
            for a, b in zip(edges[::2], edges[1::2], strict=True)
            if b - a >= (copies - 1) * period
        ]
    taken = np.zeros(len(marks), dtype=bool)
    out = []
    for start, stop, period in sorted(found, key=lambda r: (r[0] - r[1], r[2], r[0])):
        free = np.flatnonzero(taken[start:stop])
        stop = start + int(free[0]) if len(free) else stop
        if stop - start >= copies * period:
            taken[start:stop] = True
            out.append((start, stop, period))
    return out


def _tie_ends(graph: Graph, signature: Sequence[int], classes: np.ndarray) -> None:
    """Inputs are of one class when their readers are, outputs when their producers are."""
    for prims, neighbours in (
        (("arg", "const"), lambda op: tuple((int(classes[at]), k) for at, k in graph.values[op.outputs[0]].consumers)),
        (("out",), lambda op: tuple((int(classes[p]), k) for v in op.inputs if v is not None for p, k in [graph.values[v].producer])),
    ):
        first: dict = {}
        for i, op in enumerate(graph.ops):
            if op.primitive in prims and (near := neighbours(op)):
                classes[i] = first.setdefault((signature[i], near), i)
