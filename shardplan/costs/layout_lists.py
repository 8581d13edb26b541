"""The layouts that an op reads or makes under its strategies, as arrays over the distinct ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardplan.mesh.layout import Layout, MeshShape


@dataclass(frozen=True, eq=False)
class LayoutList:
    """Layouts [s] of one operand or result; arrays are over the distinct ones, [layout]; bit n stands for mesh axis n.

    Attributes:
        mesh: its axes.
        layouts: the distinct ones.
        index: [s] -> which of them.
        ids: equal for equal layouts, also of other lists.
    """

    mesh: MeshShape
    layouts: tuple[Layout, ...]
    index: np.ndarray
    ids: np.ndarray

    def equal(self, others: LayoutList) -> np.ndarray:
        """Bool [layout, other]."""
        return self.ids[:, None] == others.ids

    @cached_property
    def shards(self) -> np.ndarray:
        """Number of shards."""
        return np.array([x.shards(self.mesh) for x in self.layouts])

    @cached_property
    def partial_axes(self) -> np.ndarray:
        """Bit set of the mesh axes over which a layout is partial."""
        return self._bit_sets(x.partial_axes for x in self.layouts)

    def sharding_axes(self, dims: Iterable[int] | None = None) -> np.ndarray:
        """Bit set of the mesh axes that shard these dims, by default all."""
        dims = range(self.layouts[0].rank) if dims is None else tuple(dims)
        return self._bit_sets([a for d in dims for a in x.dims[d]] for x in self.layouts)

    def _bit_sets(self, axes: Iterable[Iterable[str]]) -> np.ndarray:
        return np.array([sum(1 << self.mesh.axes.index(a) for a in some) for some in axes], np.int64)


class LayoutLists:
    """The list of every tuple of layouts, made once per tuple object: ops of one signature share one, and the space keeps it alive."""

    def __init__(self, mesh: MeshShape):
        self.mesh = mesh
        self.lists: dict[int, LayoutList] = {}
        self.ids: dict[Layout, int] = {}

    def __call__(self, layouts: tuple[Layout, ...]) -> LayoutList:
        """The list of layouts [s]."""
        if (found := self.lists.get(id(layouts))) is None:
            number: dict[Layout, int] = {}
            index = np.array([number.setdefault(x, len(number)) for x in layouts], dtype=np.int64)
            ids = np.array([self.ids.setdefault(x, len(self.ids)) for x in number])
            found = self.lists[id(layouts)] = LayoutList(self.mesh, tuple(number), index, ids)
        return found
