"""Which part of every batch a process reads, and the global arrays that the parts of all processes make.

    rows         0    1    2    3    4    5    6    7       the axis data=4 goes over two processes
    process 0    |=================|                        part 0 of 2
    process 1                        |=================|    part 1 of 2

Processes whose devices hold the same rows read the same part. Where what two of them need overlaps in part, all read everything.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardplan import _jax
from shardplan.errors import ShardingError
from shardplan.plan.arguments import arguments_like
from shardplan.plan.data import Leaf
from shardplan.plan.stand_ins import stood_back, stood_in
from shardplan.units import format_array


def data_shard(leaves: Sequence[Leaf], mesh: jax.sharding.Mesh, process: int, dim: int) -> tuple[int, int]:
    """(number of a process's part, number of parts) in which the processes of a mesh read a batch, split along one dim.

    Args:
        leaves: of the batch; those without this dim are read by all.
        mesh: on which the batch is.
        process: whose part.
        dim: the dim that counts rows.
    """
    needs: dict[int, tuple[float, float]] = {}
    for leaf in (x for x in leaves if len(x.shape) > dim):
        held = _jax.sharding(mesh, leaf.layout.spec()).devices_indices_map(leaf.shape)
        for device, index in held.items():
            lo, hi, _ = index[dim].indices(leaf.shape[dim])
            before = needs.get(device.process_index, (1.0, 0.0))
            needs[device.process_index] = min(before[0], lo / leaf.shape[dim]), max(before[1], hi / leaf.shape[dim])
    parts = sorted(set(needs.values()))
    even = all(part == (n / len(parts), (n + 1) / len(parts)) for n, part in enumerate(parts))
    return (parts.index(needs[process]), len(parts)) if even and process in needs else (0, 1)


def global_batch(inputs: Sequence[Leaf], in_tree: Any, batch: Any, mesh: jax.sharding.Mesh, shard: tuple[int, int], dim: int) -> Any:
    """The global arrays of an argument (or of a tuple of several) of which this process has read its part, or everything.

    Raises:
        ShardingError: no argument is such a pytree, or an array is neither of the part's shape nor of the whole batch's.
    """
    local, tree = jax.tree.flatten(stood_in(batch))
    found = [*arguments_like(inputs, in_tree, tree, operator.eq)]
    if not found and isinstance(batch, tuple) and batch:
        return tuple(global_batch(inputs, in_tree, x, mesh, shard, dim) for x in batch)
    if not found:
        raise ShardingError(
            f"no argument of the step is a pytree like this one: {tree}.\n  way out: a whole argument of the step, or a tuple of them"
        )

    def fits(leaves: Sequence[Leaf]) -> tuple[bool, bool]:
        same = all(np.shape(x) in _shapes(leaf, shard, dim) for leaf, x in zip(leaves, local, strict=True))
        return same, any(x.kind == "batch" for x in leaves)

    leaves = max(found, key=fits)
    made = (_global_array(*x, mesh, shard, dim) for x in zip(leaves, map(np.asarray, local), strict=True))
    return stood_back(jax.tree.unflatten(tree, made))


def _shapes(leaf: Leaf, shard: tuple[int, int], dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a part of the rows, and of all."""
    return tuple(n // shard[1] if d == dim else n for d, n in enumerate(leaf.shape)), leaf.shape


def _global_array(leaf: Leaf, local: np.ndarray, mesh: jax.sharding.Mesh, shard: tuple[int, int], dim: int) -> jax.Array:
    (part, whole), (index, count) = _shapes(leaf, shard, dim), shard
    if local.shape not in (part, whole):
        every = f"part {index} of {count} of it is {format_array(jax.ShapeDtypeStruct(part, leaf.dtype))}"
        raise ShardingError(
            f"{leaf.path} is {format_array(leaf)} in the step; {every}, and this process gave {format_array(local)}.\n"
            "  ways out: the rows that plan.data_shard() says, or the whole batch on every process"
        )
    first = index * part[dim] if local.shape != whole else 0

    def rows(at: tuple[slice, ...] | None) -> np.ndarray:
        if not first or at is None:
            return local[at or ()]
        lo, hi, _ = at[dim].indices(leaf.shape[dim])
        return local[(*at[:dim], slice(lo - first, hi - first), *at[dim + 1 :])]

    return jax.make_array_from_callback(leaf.shape, _jax.sharding(mesh, leaf.layout.spec()), rows)
