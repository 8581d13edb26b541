"""Which ops are the same op of another layer: colour refinement (Weisfeiler-Leman) on the graph.

Ops start with one colour per (signature, phase, source line), inputs with their path without layer numbers, ops that update a leaf of
the state with the paths of that leaf, its moments and its result. A few rounds mix in the colours of neighbours. Ops of one final
colour form a class, to which planning gives one strategy: a model of any depth is planned as one of its layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from shardplan.ir.graph import Graph, Op, components

ROUNDS = 3
"""Rounds of refinement: a class differs from others within this distance."""

MIN_LAYERS = 3
"""Values that a number in a path takes at least to count as a layer number."""


def repeated_layers(graph: Graph, signature: Sequence[int]) -> tuple[int, ...]:
    """Class of every op: the number of the first op of its class; `signature` has, per op, equal numbers for equal ops."""
    numbers: dict = {}
    colour: list[int] = []
    pattern = _path_patterns(graph)
    leaf = _updated_leaves(graph, pattern)
    for i, op in enumerate(graph.ops):
        producers = [graph.values[v].producer[0] for v in op.inputs if v is not None]
        if op.traits.endpoint:
            key = (op.primitive, signature[i], pattern[i])
        elif op.phase == "update":
            key = (signature[i], leaf.get(i), *(colour[p] for p in producers))
        else:
            read = tuple(colour[p] for p in producers if graph.ops[p].traits.step_input)
            key = (signature[i], op.phase, op.source, op.runs, read)
        colour.append(numbers.setdefault(key, len(numbers)))
    neighbours = _neighbours(graph)
    for _ in range(ROUNDS):
        numbers = {}
        colour = [
            numbers.setdefault((c, *(tuple((colour[j], k) for j, k in side) for side in near)), len(numbers))
            for c, near in zip(colour, neighbours, strict=True)
        ]
    first: dict[int, int] = {}
    return tuple(first.setdefault(c, i) for i, c in enumerate(colour))


def _path_patterns(graph: Graph) -> dict[int, str]:
    """Paths of inputs and outputs without layer numbers."""
    labels = {i: op.label for i, op in enumerate(graph.ops) if op.traits.endpoint}
    numbers: dict[str, set[str]] = {}  # path before a number, its own numbers left out -> the numbers found there
    for label in labels.values():
        for match in re.finditer(r"\d+", label):
            numbers.setdefault(re.sub(r"\d+", "#", label[: match.start()]), set()).add(match[0])

    def pattern(match: re.Match) -> str:
        before = re.sub(r"\d+", "#", match.string[: match.start()])
        return "#" if len(numbers[before]) >= MIN_LAYERS else match[0]

    return {i: re.sub(r"\d+", pattern, label) for i, label in labels.items()}


def _updated_leaves(graph: Graph, pattern: dict[int, str]) -> dict[int, tuple[str, ...]]:
    """Per op of the optimizer, the paths of the inputs and outputs that arrays (not scalars) connect it to."""
    connects = [op.phase == "update" or op.traits.endpoint for op in graph.ops]
    ends = ((value.producer[0], *(at for at, _ in value.consumers)) for value in graph.values if value.shape)
    component = components(len(graph.ops), (pair for some in ends for pair in pairwise(at for at in some if connects[at])))
    labels: dict[int, set[str]] = {}
    for i, op in enumerate(graph.ops):
        if op.traits.endpoint:
            labels.setdefault(component[i], set()).add(pattern[i])
    updates = (i for i, op in enumerate(graph.ops) if op.phase == "update" and not op.traits.endpoint)
    return {i: tuple(sorted(labels.get(component[i], ()))) for i in updates}


def _neighbours(graph: Graph) -> list[tuple[list[tuple[int, int]], ...]]:
    """([(producer, result)], [(reader, operand)]) per op, over arrays; none for inputs and outputs, whose paths identify them.

    The two sides of a product are no layers: what makes one is not tied to what makes the other.
    """

    def near(op: Op) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        producers = [graph.values[v].producer for v in op.inputs if v is not None and graph.values[v].shape]
        return producers, [reader for w in op.outputs if graph.values[w].shape for reader in graph.values[w].consumers]

    return [() if op.traits.endpoint else near(op) for op in graph.ops]
