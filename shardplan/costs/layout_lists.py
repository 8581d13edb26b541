"""The layouts that an op reads or makes under its strategies, as arrays over the distinct ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardplan.mesh.layout import Layout, MeshShape


@dataclass(frozen=True, eq=False)
class LayoutList:
    """Layouts [s] of one operand or result; arrays are over the distinct ones, [layout].

    Attributes:
        mesh: its axes number the bits of `partial_axes` and `sharding_axes`.
        layouts: the distinct ones.
        index: [s] -> which of them.
        ids: equal for equal layouts, also of other lists.
        shards: number of shards.
        partial: whether the layout is a partial result.
    """

    mesh: MeshShape
    layouts: tuple[Layout, ...]
    index: np.ndarray
    ids: np.ndarray
    shards: np.ndarray
    partial: np.ndarray

    def equal(self, others: LayoutList) -> np.ndarray:
        """Bool [layout, other]."""
        return self.ids[:, None] == others.ids

    @property
    def partial_axes(self) -> np.ndarray:
        """Bit set of the mesh axes over which a layout is partial."""
        number = self.mesh.axes.index
        return np.array([sum(1 << number(a) for a in x.partial_axes) for x in self.layouts], np.int64)

    def sharding_axes(self, dims: Iterable[int] | None = None) -> np.ndarray:
        """Bit set of the mesh axes that shard these dims, by default all."""
        number, dims = self.mesh.axes.index, range(self.layouts[0].rank) if dims is None else list(dims)
        return np.array([sum(1 << number(a) for d in dims for a in x.dims[d]) for x in self.layouts], np.int64)


def reduce_scattered(sources: LayoutList, targets: LayoutList) -> np.ndarray:
    """Bool [source, target]: whether a partial source becomes sharded over an axis that it is partial over."""
    return (sources.partial_axes[:, None] & targets.sharding_axes()) != 0


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
            shards = np.array([x.shards(self.mesh) for x in number])
            partial = np.array([bool(x.partial) for x in number])
            found = self.lists[id(layouts)] = LayoutList(self.mesh, tuple(number), index, ids, shards, partial)
        return found
