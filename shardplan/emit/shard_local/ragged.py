"""Ragged products on shards of their rows, their groups, or both: a device takes the part of each of its groups that its rows have.

    groups of 3, 1, 2 and 2 rows, rows and groups over 2 devices each    device (0, 0): rows 0 to 3 of groups 0 and 1, sizes 3, 1
                                                                         device (0, 1): rows 0 to 3 of groups 2 and 3, sizes 0, 0
                                                                         device (1, 0): rows 4 to 7 of groups 0 and 1, sizes 0, 0
                                                                         device (1, 1): rows 4 to 7 of groups 2 and 3, sizes 2, 2

Under `shard_map`. Rows that begin before a device's first group count as its, and are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from shardplan import _jax
from shardplan.emit.shard_local.halo import along


def ragged_dot(eqn, shards: Sequence, rows: tuple[str, ...], groups: tuple[str, ...], per_device: int) -> list:
    """The product of a device's rows and groups.

    Args:
        eqn: the equation, a `ragged_dot_general` with sizes of shape [groups].
        shards: of the operands; all sizes.
        rows, groups: the mesh axes over which they are sharded.
        per_device: groups of a device.
    """
    x, y, sizes = shards
    n = eqn.params["ragged_dot_dimension_numbers"]
    (left, right), _ = n.dot_dimension_numbers
    (dim,) = n.lhs_ragged_dimensions
    sizes = sizes.astype("int32")
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    if rows:
        begin, held = lax.axis_index(rows) * x.shape[dim], x.shape[dim]
        starts, ends = (jnp.clip(at - begin, 0, held) for at in (starts, ends))
    if groups:
        first = lax.axis_index(groups) * per_device
        starts, ends = (lax.dynamic_slice_in_dim(at, first, per_device) for at in (starts, ends))
    sizes = ends - starts
    if groups:
        sizes = sizes.at[0].add(starts[0])
        own = lax.iota(starts.dtype, x.shape[dim]) >= starts[0]
        x = _masked(x, own, dim)
        if dim in left:
            y = _masked(y, own, right[left.index(dim)])
    return _jax.bind(eqn, [x, y, sizes], {"out_sharding": None}, context=False)  # else that of the whole result


def _masked(x, own, dim: int):
    """An array with zeros along one dim where a device's groups have no rows."""
    return jnp.where(along(own, dim, x.ndim), x, jnp.zeros((), x.dtype))
