"""What a MindSpore strategy means: the logical device matrix of an operator, and the layouts of its tensors.

An operator is written with a letter per dim; dims with one letter are sharded together. The letters, in order of appearance, are
the device matrix, and a dim's entry in the tensor map is the position of its letter there, counted from the right:

    MatMul, strategy ((2, 1), (1, 4)), 8 devices        device matrix (2, 1, 4)
    mk,kn->mn                                           tensor maps   X (2, 1)   W (1, 0)   Y (2, 0)

    >>> op = operator("mk,kn->mn", ((2, 1), (1, 4)), 8)
    >>> op.mesh.sizes, [x.tensor_map(op.mesh) for x in (*op.inputs, op.output)]
    ((2, 1, 4), [(2, 1), (1, 0), (2, 0)])

Source: MindSpore documentation, "Automatic Parallel Strategy Search", sections Sharding Strategy and Tensor Arrangement.
"""

from __future__ import annotations

from typing import NamedTuple

from shardplan.mesh.layout import Layout, MeshShape

REPEATED = "repeated"
"""Mesh axis along which devices repeat the computation, where the strategy makes fewer shards than there are devices."""


class MindSporeOperator(NamedTuple):
    """An operator's logical device matrix (one axis per letter, preceded by `REPEATED` if devices remain) and its tensors' layouts.

    The output is partial over the sharded letters that are summed.
    """

    mesh: MeshShape
    inputs: tuple[Layout, ...]
    output: Layout


def operator(equation: str, strategy: tuple[tuple[int, ...], ...], n_devices: int) -> MindSporeOperator:
    """Derives device matrix and layouts from a strategy.

    Args:
        equation: letters of the dims, as for einsum: "mk,kn->mn" is MatMul.
        strategy: for each input, the number of shards of each dim.
        n_devices: number of devices.

    Raises:
        ValueError: the strategy does not fit the equation, shards one letter in two ways, or does not fit the devices.
    """
    left, output = equation.replace(" ", "").split("->")
    inputs = left.split(",")
    if [len(x) for x in inputs] != [len(s) for s in strategy]:
        raise ValueError(f"strategy {strategy} does not fit {equation}: one number per dim of each input is needed")
    shards: dict[str, int] = {}
    for letters, numbers in zip(inputs, strategy, strict=True):
        for letter, n in zip(letters, numbers, strict=True):
            if shards.setdefault(letter, n) != n:
                raise ValueError(f"strategy {strategy} divides dim {letter} of {equation} into {shards[letter]} and into {n} shards")
    matrix = MeshShape(tuple(shards), tuple(shards.values()))
    repeated, rest = divmod(n_devices, matrix.n_devices)
    if rest or not repeated:
        raise ValueError(f"strategy {strategy} makes {matrix.n_devices} shards, which do not divide {n_devices} devices")
    mesh = matrix if repeated == 1 else MeshShape((REPEATED, *matrix.axes), (repeated, *matrix.sizes))
    partial = tuple(sorted((a, "sum") for a, n in matrix if a not in output and n > 1))
    return MindSporeOperator(mesh, tuple(_layout(x) for x in inputs), Layout(_layout(output).dims, partial))


def _layout(letters: str) -> Layout:
    return Layout(tuple((letter,) for letter in letters))
