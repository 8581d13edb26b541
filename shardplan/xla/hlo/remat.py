"""XLA's warnings of involuntary full rematerialization: reshards for which it replicates a whole tensor, with layouts and source lines.

The compiler writes them to stderr only, with its own shardings and no source line:

    [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {devices=[2,1,1,4]<=[4,2]T(1,0)} to
    {devices=[1,1,8,1]<=[4,2]T(1,0)} efficiently for HLO operation %copy = f32[16,4,16,2]{3,2,1,0} copy(...), ...

    >>> print(rematerializations(stderr, mesh)[0])
    full rematerialization of f32[32,4,16], P('model', None, 'data') -> P(None, ('model', 'data'), None), train.py:14
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from shardplan.mesh.layout import Layout, MeshShape
from shardplan.xla.hlo.groups import axes_of
from shardplan.xla.hlo.text import Frame, HloArray, HloModule, arrays

_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) "
    r"efficiently for HLO operation %?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<opcode>[\w\-]+)\((?P<rest>.*)"
)


@dataclass(frozen=True)
class Rematerialization:
    """One tensor that XLA replicates in full on every device to change its layout.

    Attributes:
        array: the global array, where `before` could be read; else one device's shard.
        before, after: layouts; None where XLA's sharding is not made of axes of the mesh.
        sharding_before, sharding_after: as XLA wrote them.
        op_name, stack: JAX's name of the op, and its source lines, innermost first.
    """

    array: HloArray
    before: Layout | None
    after: Layout | None
    sharding_before: str
    sharding_after: str
    instruction: str
    op_name: str
    stack: tuple[Frame, ...] = ()

    @property
    def source(self) -> str | None:
        """'file:line' of the innermost frame; None where XLA kept none."""
        return str(self.stack[0]) if self.stack else None

    def __str__(self) -> str:
        before, after = self.before or self.sharding_before, self.after or self.sharding_after
        source = f", {self.source}" if self.source else ""
        return f"full rematerialization of {self.array}, {before} -> {after}{source}"


def rematerializations(stderr: str, mesh: MeshShape | None = None, before: HloModule | None = None) -> tuple[Rematerialization, ...]:
    """The warnings in a compiler's stderr, each once, in order.

    Args:
        stderr: of the compiler.
        mesh: reads XLA's shardings as layouts.
        before: the program before any pass; source lines are looked up there by op name.
    """
    out = []
    for found in _WARNING.finditer(stderr):
        array = arrays(found["type"])[0]
        rank = len(array.shape)
        was, is_ = (layout_of(found[k], mesh, rank) if mesh else None for k in ("before", "after"))
        if mesh and was:
            shape = tuple(n * mesh.size(*axes) for n, axes in zip(array.shape, was.dims, strict=True))
            array = HloArray(array.dtype, shape)
        op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', found["rest"])
        name = op_name[1] if op_name else ""
        file, line = (re.search(rf"{k}=\"?([^\"\s}}]+)", found["rest"]) for k in ("source_file", "source_line"))
        stack = (Frame(file[1], int(line[1])),) if file and line else _place(before, name, array) if before else ()
        out.append(Rematerialization(array, was, is_, found["before"], found["after"], found["name"], name, stack))
    return tuple(dict.fromkeys(out))


def _place(before: HloModule, op_name: str, array: HloArray) -> tuple[Frame, ...]:
    """Source lines of the op of this name that makes this array; frame numbers differ from pass to pass, names stay."""
    named = [i for body in before.computations.values() for i in body if op_name and i.op_name == op_name]
    same = [i for i in named if i.arrays[:1] == (array,)]
    return next((stack for i in (*same, *named) if (stack := before.stack(i))), ())


def layout_of(sharding: str, mesh: MeshShape, rank: int) -> Layout | None:
    """XLA's sharding as a layout on `mesh`; None where it divides a mesh axis.

    >>> mesh = MeshShape(("data", "model"), (4, 2))
    >>> str(layout_of("{devices=[1,8]<=[4,2]T(1,0)}", mesh, 2)), str(layout_of("{replicated}", mesh, 2))
    ("P(None, ('model', 'data'))", 'P(None, None)')
    """
    if "replicated" in sharding and "devices" not in sharding:
        return Layout.replicated(rank)
    if "mesh[" in sharding:
        return _named(sharding, mesh, rank)
    tiles = re.search(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))", sharding)
    if not tiles:
        return None
    shape = [int(n) for n in tiles[1].split(",")]
    if tiles[2]:
        dims = [int(n) for n in tiles[2].split(",")]
        ids = np.arange(np.prod(dims)).reshape(dims)
        ids = ids.transpose([int(n) for n in tiles[3].split(",")]) if tiles[3] else ids
    else:
        ids = np.array([int(n) for n in tiles[4].split(",")])
    if ids.size != mesh.n_devices or len(shape) < rank:
        return None
    ids = ids.reshape(shape)
    split = []
    for dim in range(rank):
        line = np.moveaxis(ids, dim, -1).reshape(-1, shape[dim])[0]
        axes = axes_of((tuple(int(d) for d in line),), mesh)
        if mesh.size(*axes) != len(line):
            return None
        where = [mesh.coordinates(int(d)) for d in line]

        def first_change(axis: str, where=where) -> int:
            return next(i for i, at in enumerate(where) if at[axis] != where[0][axis])

        split.append(tuple(sorted(axes, key=first_change, reverse=True)))
    return Layout(tuple(split))


def _named(sharding: str, mesh: MeshShape, rank: int) -> Layout | None:
    """`{mesh['data'=4,'model'=2], [{'model'}, {}]}`, when that mesh is ours."""
    found = re.search(r"mesh\[(.*?)\](,\s*device_ids=.*?\))?,\s*\[(.*?)\]", sharding)
    if not found or found[2]:
        return None
    sizes = re.findall(r"'?([^',=]+)'?=(\d+)", found[1])
    if tuple((a, int(n)) for a, n in sizes) != tuple(mesh) or ":(" in found[3]:
        return None
    dims = [tuple(re.findall(r"'([^']+)'", dim)) for dim in re.findall(r"\{(.*?)\}", found[3])]
    return Layout(tuple(dims)) if len(dims) == rank else None
