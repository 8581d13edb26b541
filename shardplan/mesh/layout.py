"""Where one tensor lives on a mesh: per dim the mesh axes that shard it, and the axes over which it is partial (unreduced).

One value, three faces (the mesh gives the sizes):

    JAX        PartitionSpec        P('data', None)              and the unreduced axes
    MindSpore  device matrix        (2, 4), tensor map (1, -1)   dims of the device matrix counted from the right
    OneFlow    SBP per mesh axis    (S(0), P(sum))               one entry per mesh axis

    >>> mesh = MeshShape(("data", "model"), (2, 4))
    >>> x = Layout((("data",), ()), (("model", "sum"),))
    >>> x.sbp(mesh), x.tensor_map(mesh), x.local_shape((8, 6), mesh)
    (('S(0)', 'P(sum)'), (1, -1), (4, 6))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardplan.errors import ShardingError


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh axes, major to minor; devices are numbered row-major.

    Attributes:
        axes: axis names, unique.
        sizes: axis sizes, same length, each >= 1.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self):
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise ShardingError(
                f"mesh axes {self.axes} and sizes {self.sizes} must have equal length and unique names.\n"
                "  way out: a mesh such as jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)"
            )

    @cached_property
    def _size(self) -> dict[str, int]:
        return dict(zip(self.axes, self.sizes, strict=True))

    def size(self, *axes: str) -> int:
        """Number of shards of a dim that `axes` shard; KeyError names an unknown axis."""
        return math.prod(self._size[a] for a in axes)

    @property
    def n_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes)

    def coordinates(self, device: int) -> dict[str, int]:
        """Position of a device (row-major number) along each axis."""
        return dict(zip(self.axes, map(int, np.unravel_index(device, self.sizes)), strict=True))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(zip(self.axes, self.sizes, strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{a}={n}" for a, n in self)


MOST_PADDING = 0.3
"""What a dim that is sharded unevenly may grow by, as a fraction of its elements, when its blocks are filled up to one size."""


def splits_unevenly(n: int, shards: int) -> bool:
    """Whether a dim of n elements is sharded in unequal blocks: n / shards rounded up each, but for the last ones.

    XLA fills the blocks up to one size and masks what it filled in, so a device computes on that size.
    """
    return n % shards != 0 and -(-n // shards) * shards <= (1 + MOST_PADDING) * n


REDUCTIONS = ("sum", "max", "min", "prod", "and", "or")
"""Kinds of partial tensors: the reductions that collectives compute."""


@dataclass(frozen=True)
class Layout:
    """Placement of one tensor.

    Attributes:
        dims: for each tensor dim, the mesh axes that shard it, major to minor; () is replicated.
        partial: (axis, kind) pairs, sorted by axis name: the tensor is the `kind`-reduction (one of `REDUCTIONS`) over `axis` of
            what the devices hold.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def replicated(rank: int) -> Layout:
        """The layout in which every device holds the whole tensor."""
        return Layout(((),) * rank)

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @cached_property
    def sharded_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard some dim, in the order of the dims."""
        return tuple(a for axes in self.dims for a in axes)

    @cached_property
    def partial_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the tensor is partial."""
        return tuple(a for a, _ in self.partial)

    def reduced(self) -> Layout:
        """The same dims, with every reduction complete."""
        return Layout(self.dims) if self.partial else self

    def shards(self, mesh: MeshShape) -> int:
        """Number of different shards: elements of the tensor over elements of one shard."""
        return mesh.size(*self.sharded_axes)

    def divides(self, shape: tuple[int, ...], mesh: MeshShape) -> bool:
        """Whether every sharded dim divides evenly."""
        return all(n % mesh.size(*axes) == 0 for n, axes in zip(shape, self.dims, strict=True))

    def splits(self, shape: tuple[int, ...], mesh: MeshShape) -> bool:
        """Whether every sharded dim divides evenly, or is sharded along one mesh axis and `splits_unevenly`."""
        dims = [(n, mesh.size(*axes), sum(mesh.size(a) > 1 for a in axes)) for n, axes in zip(shape, self.dims, strict=True)]
        return all(n % k == 0 or (axes == 1 and splits_unevenly(n, k)) for n, k, axes in dims)

    def local_shape(self, shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """Shape of one device's shard; uneven dims round up, as XLA pads them."""
        return tuple(-(-n // mesh.size(*axes)) for n, axes in zip(shape, self.dims, strict=True))

    def filled_shape(self, shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """Shape of the whole tensor with every dim filled up to equal blocks."""
        return tuple(-(-n // k) * k for n, k in zip(shape, (mesh.size(*axes) for axes in self.dims), strict=True))

    def slices(self, shape: tuple[int, ...], mesh: MeshShape, device: int) -> tuple[slice, ...]:
        """The slice of the whole tensor that `device` (row-major number) holds."""
        where, out = mesh.coordinates(device), []
        for n, width, axes in zip(shape, self.local_shape(shape, mesh), self.dims, strict=True):
            index = functools.reduce(lambda index, axis: index * mesh.size(axis) + where[axis], axes, 0)
            out.append(slice(min(index * width, n), min((index + 1) * width, n)))
        return tuple(out)

    # ---- MindSpore's face

    def tensor_map(self, mesh: MeshShape) -> tuple[int | tuple[int, ...], ...]:
        """Per dim, the device-matrix dim that shards it, from the right (0: the last axis); -1 for none, a tuple for several."""
        number = {a: len(mesh.axes) - 1 - i for i, a in enumerate(mesh.axes)}
        return tuple(-1 if not axes else number[axes[0]] if len(axes) == 1 else tuple(number[a] for a in axes) for axes in self.dims)

    # ---- OneFlow's face

    def sbp(self, mesh: MeshShape) -> tuple[str, ...]:
        """One of 'S(dim)', 'B', 'P(kind)' per mesh axis; SBP does not state the order of several axes on one dim."""
        sharded = {a: f"S({d})" for d, axes in enumerate(self.dims) for a in axes}
        partial = {a: f"P({kind})" for a, kind in self.partial}
        return tuple(sharded.get(a) or partial.get(a) or "B" for a in mesh.axes)

    # ---- JAX's face (plain tuples: this room does not import jax)

    def spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """Entries of the PartitionSpec: None, an axis name, or a tuple of them, per dim."""
        return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims)

    @staticmethod
    def from_spec(spec, rank: int) -> Layout:
        """The layout of a PartitionSpec's entries, which may be fewer than `rank`."""
        entries = tuple(spec) + (None,) * (rank - len(spec))
        return Layout(tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries))

    def __str__(self) -> str:
        entries = ", ".join(map(repr, self.spec()))
        partial = "".join(f" + {kind} over {axis}" for axis, kind in self.partial)
        return f"P({entries}){partial}"


def even_layout(shape: Sequence[int], mesh: MeshShape) -> Layout:
    """Every mesh axis on the largest dim that it divides."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    local = list(shape)
    for axis, n in mesh:
        fits = [d for d in range(len(local)) if n > 1 and local[d] % n == 0 and local[d] >= n]
        if fits:
            d = max(fits, key=lambda d: local[d])
            dims[d] += (axis,)
            local[d] //= n
    return Layout(tuple(dims))
