"""Which ops are the same op of another layer: colour refinement on the graph.

An unrolled model runs the same ops with the same shapes layer after layer, forward, backward and in the optimizer. Ops begin
with one colour per (signature, phase, source line); inputs with their path, numbers left out, so that `blocks/3/w` and
`blocks/7/w` are alike; the ops that update one leaf of the state with the paths of that leaf, its moments and its result. Then
a few rounds mix in the colours of neighbours. Ops of one final colour form a class. Planning ties a class to one strategy,
which shrinks a model of any depth to the size of one of its layers.

    blocks/0/w, blocks/1/w, ...   -> dot_general ... -> add ... -> one class each for w, dot_general, add, ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from shardplan.ir.graph import Graph, components

ROUNDS = 3
COPIES = 3


def repeated_layers(graph: Graph, signature: Sequence[int]) -> tuple[int, ...]:
    """Per op a class: the number of the first op that is like it (its own, if it stands alone).

    Args:
        graph: the step.
        signature: per op, equal numbers for equal ops.
    """
    numbers: dict = {}
    colour: list[int] = []
    pattern = _patterns(graph)
    leaf = _leaves(graph, pattern)
    for i, op in enumerate(graph.ops):
        made_from = [graph.values[v].producer[0] for v in op.inputs if v is not None]
        if op.traits.endpoint:
            key = (op.primitive, signature[i], pattern[i])
        elif op.phase == "update":
            key = (signature[i], leaf.get(i), *(colour[p] for p in made_from))
        else:
            read = tuple(colour[p] for p in made_from if graph.ops[p].traits.step_input)
            key = (signature[i], op.phase, op.source, op.runs, read)
        colour.append(numbers.setdefault(key, len(numbers)))
    neighbours = _neighbours(graph)
    for _ in range(ROUNDS):
        numbers = {}
        colour = [
            numbers.setdefault((c, *(tuple(colour[j] for j in side) for side in near)), len(numbers))
            for c, near in zip(colour, neighbours, strict=True)
        ]
    first: dict[int, int] = {}
    return tuple(first.setdefault(c, i) for i, c in enumerate(colour))


def _patterns(graph: Graph) -> dict[int, str]:
    """Paths of inputs and outputs with the numbers of layers left out: a number that takes at least `COPIES` values in its place."""
    labels = {i: op.label for i, op in enumerate(graph.ops) if op.traits.endpoint}
    values: dict[str, set[str]] = {}

    for label in labels.values():
        before = ""
        for part in re.split(r"(\d+)", label):
            if part.isdigit():
                values.setdefault(before, set()).add(part)
            before += "#" if part.isdigit() else part
    places = {place for place, seen in values.items() if len(seen) >= COPIES}

    def blank(label: str) -> str:
        before = out = ""
        for part in re.split(r"(\d+)", label):
            out += "#" if part.isdigit() and before in places else part
            before += "#" if part.isdigit() else part
        return out

    return {i: blank(label) for i, label in labels.items()}


def _leaves(graph: Graph, pattern: dict[int, str]) -> dict[int, tuple[str, ...]]:
    """Per op of the optimizer, the paths of the inputs and outputs it is joined to by arrays (not by single numbers)."""

    def joins(i: int) -> bool:
        return graph.ops[i].phase == "update" or graph.ops[i].traits.endpoint

    def pairs():
        for value in graph.values:
            if value.shape:
                yield from pairwise(at for at in (value.producer[0], *(at for at, _ in value.consumers)) if joins(at))

    component = components(len(graph.ops), pairs())
    labels: dict[int, set[str]] = {}
    for i, op in enumerate(graph.ops):
        if op.traits.endpoint:
            labels.setdefault(component[i], set()).add(pattern[i])
    return {
        i: tuple(sorted(labels.get(component[i], ())))
        for i, op in enumerate(graph.ops)
        if op.phase == "update" and not op.traits.endpoint
    }


def _neighbours(graph: Graph) -> list[tuple[list[int], ...]]:
    """(producers, readers) per op over arrays; inputs and outputs have their paths, and numbers tell nothing of a layer."""
    out: list[tuple[list[int], ...]] = []
    for op in graph.ops:
        if op.traits.endpoint:
            out.append(())
            continue
        producers = [graph.values[v].producer[0] for v in op.inputs if v is not None and graph.values[v].shape]
        readers = [at for w in op.outputs if graph.values[w].shape for at, _ in graph.values[w].consumers]
        out.append((producers, readers))
    return out
