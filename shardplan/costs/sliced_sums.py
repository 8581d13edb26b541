"""A sum that is completed and then sliced over all its axes: if nothing reads it whole, XLA reduce-scatters it instead.

    all-reduce over x, y -> slice over x, y     of the only reader, or of each of them: a reduce-scatter over x, y
    all-reduce -> transpose, constraint         so, too, if all that read it, or what hands it on, slice it the same way
               -> slice, all over x, y
    all-reduce over x, y -> slice over x        stays: other sums over x, y are combined with the all-reduce
    all-reduce over x, y -> slice over x, y     of one reader, while another one reads the whole sum: stays, as into unequal blocks

A search takes such a path where the all-reduce shares its latency with others, or where the user's own constraint completes the sum.
Facts: partition-sum-sliced-whole, partition-sum-handed-on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardplan.costs.array_edges import ArrayEdge
from shardplan.costs.space import StrategySpace
from shardplan.mesh import collective
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import ReshardStep

Path = tuple[ReshardStep, ...]


class SlicedSums(NamedTuple):
    """The reshard paths of a plan as XLA emits them.

    Attributes:
        space: the ops and their strategies.
        path: array edge -> its reshard path, cheapest edge by edge.
    """

    space: StrategySpace
    path: Callable[[ArrayEdge], Path]

    def emitted(self, edge: ArrayEdge, steps: Path) -> Path:
        """The path `steps` of an array edge, as XLA emits it; () if another edge's collective is all of it."""
        first, *rest = steps
        if first.kind == "all-reduce" and (after := self._slice(edge.value, first, bool(rest))) is not None:
            space = self.space
            if space.cluster.reduce_scatter and after.divides(space.graph.values[edge.value].shape, space.mesh):
                seconds = collective.seconds("reduce-scatter", first.bytes, first.axes, space.mesh, space.cluster)
                scatter = ReshardStep("reduce-scatter", first.axes, first.bytes, seconds, first.before, after)
                return scatter, *rest[1:]
        if first.kind == "slice" and self._is_scattered_before(edge, first):
            return tuple(rest)
        return steps

    def _slice(self, v: int, whole: ReshardStep, at_once: bool) -> Layout | None:
        """The layout to which all readers slice the sum that this all-reduce of value v completes; None if some do not.

        `at_once`: whether they do so in the path that completes it, or behind it.
        """
        found: set[Layout | None] = set()
        for edge in self.space.edges_of[v]:
            first, *rest = self.path(edge) or (None,)
            if first != whole or bool(rest) != at_once:
                return None
            found.add(_sliced(rest, whole.axes) if rest else self._slice_behind(edge.consumer, whole.axes))
        return found.pop() if len(found) == 1 else None

    def _slice_behind(self, j: int, axes: tuple[str, ...]) -> Layout | None:
        """The layout to which all readers slice what op j hands on, over these axes, as one of op j's operand; None if some do not."""
        op, found = self.space.graph.ops[j], set[Layout | None]()
        for edge in self.space.edges_of.get(op.outputs[0], ()) if self._hands_on(j) else ():
            steps = self.path(edge)
            found.add(_sliced(steps, axes) if steps else self._slice_behind(edge.consumer, axes))
        after = found.pop() if len(found) == 1 else None
        if after is not None and op.traits.transpose:
            dims = dict(zip(op.params["permutation"], after.dims, strict=True))
            after = Layout(tuple(dims[d] for d in range(after.rank)))
        return after

    def _is_scattered_before(self, edge: ArrayEdge, part: ReshardStep) -> bool:
        """Whether the slice that a path begins with is part of the reduce-scatter of the sum."""
        j = edge.producer
        while self._hands_on(j):
            (v,) = self.space.graph.ops[j].inputs
            before = next((x for x in self.space.edges_of.get(v, ()) if x.consumer == j), None) if v is not None else None
            if before is None:
                return False
            if steps := self.path(before):
                sums = steps[0].kind == "all-reduce" and steps[0].axes == part.axes
                return sums and self.emitted(before, steps)[0].kind == "reduce-scatter"
            j = before.producer
        return False

    def _hands_on(self, j: int) -> bool:
        """Whether op j is nothing that XLA computes: a copy, a constraint, or a transpose that the product behind it writes."""
        op = self.space.graph.ops[j]
        if op.traits.transpose:
            return op.inputs[0] is not None and not self.space.materialised[op.inputs[0]]
        return op.traits.copy or op.traits.sharding_constraint


def _sliced(steps: Path | list[ReshardStep], axes: tuple[str, ...]) -> Layout | None:
    """The layout behind the slice that a path begins with, if it is one over all these axes."""
    return steps[0].after if steps[0].kind == "slice" and steps[0].axes == axes else None
