"""MindSpore's two-dimensional-array strategy, read: how often each dim of each input is cut, and where the pieces lie.

An operator is written with a letter per dim; equal letters are cut alike. The letters, in order of appearance, are the
logical device matrix, and a dim's entry in the tensor map is its letter's place there, counted from the right:

    MatMul, strategy ((2, 1), (1, 4)), 8 devices        device matrix (2, 1, 4)
    mk,kn->mn                                           tensor maps   X (2, 1)   W (1, 0)   Y (2, 0)

    >>> op = operator("mk,kn->mn", ((2, 1), (1, 4)), 8)
    >>> op.mesh.sizes, [x.tensor_map(op.mesh) for x in (*op.inputs, op.output)]
    ((2, 1, 4), [(2, 1), (1, 0), (2, 0)])

Source: MindSpore documentation, "Automatic Parallel Strategy Search", sections Sharding Strategy and Tensor Arrangement.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.mesh.layout import Layout, MeshShape

REPEATED = "repeated"
"""Name of the mesh axis over which devices repeat one another's work, where the cuts make fewer pieces than devices."""


@dataclass(frozen=True)
class MindSporeOperator:
    """An operator's device matrix (as a mesh) and the layouts of its tensors.

    Attributes:
        mesh: the logical device matrix; one axis per letter, before them `REPEATED` if devices are left over.
        inputs: one layout per input.
        output: layout of the output; partial over the letters that are summed and cut.
    """

    mesh: MeshShape
    inputs: tuple[Layout, ...]
    output: Layout


def operator(equation: str, strategy: tuple[tuple[int, ...], ...], n_devices: int) -> MindSporeOperator:
    """Derives device matrix and layouts from a strategy.

    Args:
        equation: letters of the dims, as for einsum: "mk,kn->mn" is MatMul.
        strategy: for each input, how many pieces each dim is cut into.
        n_devices: devices there are.

    Raises:
        ValueError: the strategy does not fit the equation, cuts one letter in two ways, or does not fit the devices.
    """
    left, output = equation.replace(" ", "").split("->")
    inputs = left.split(",")
    if [len(x) for x in inputs] != [len(s) for s in strategy]:
        raise ValueError(f"strategy {strategy} does not fit {equation}: one number per dim of each input is needed")
    cuts: dict[str, int] = {}
    for letters, numbers in zip(inputs, strategy, strict=True):
        for letter, n in zip(letters, numbers, strict=True):
            if cuts.setdefault(letter, n) != n:
                raise ValueError(f"strategy {strategy} cuts dim {letter} of {equation} into {cuts[letter]} and into {n} pieces")
    pieces = MeshShape(tuple(cuts), tuple(cuts.values()))
    repeated, rest = divmod(n_devices, pieces.n_devices)
    if rest or not repeated:
        raise ValueError(f"strategy {strategy} makes {pieces.n_devices} pieces, which do not divide {n_devices} devices")
    mesh = pieces if repeated == 1 else MeshShape((REPEATED, *pieces.axes), (repeated, *pieces.sizes))
    partial = tuple(sorted((a, "sum") for a, n in pieces if a not in output and n > 1))
    return MindSporeOperator(mesh, tuple(_layout(x) for x in inputs), Layout(_layout(output).dims, partial))


def _layout(letters: str) -> Layout:
    return Layout(tuple((letter,) for letter in letters))
