"""How a scatter-add whose arrays are sharded in unequal blocks is written, so that XLA's partitioner neither aborts nor adds too much.

    61 updates on 8 devices    three more that add -0.0 to the first row: 64, in blocks of 8
    indices of uint32          of int32, as those beyond its range are beyond any array

XLA does not mask what it fills such blocks up with where another mesh axis is idle, and adds it (fact: uneven-updates-are-not-masked).
Blocks of the updates and of the filled up ones have one size, so nothing is moved. It fills indices up with an int32, whatever their
dtype, and aborts (fact: uneven-indices-of-int32).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp

from shardplan import _jax
from shardplan.mesh.layout import Layout


def scatter_add(eqn, values: Sequence, layouts: Sequence[Layout | None], mesh) -> list | None:
    """The results of a scatter-add with its updates filled up; None where all blocks are equal.

    Args:
        eqn: the equation.
        values: operand, indices and updates.
        layouts: of these; None where none was decided.
        mesh: with axes of type Auto.
    """
    blocks = [_blocks(layout, mesh) for layout in layouts]
    if not any(x.shape[d] % n for x, of in zip(values, blocks, strict=True) for d, n in enumerate(of)):
        return None
    (operand, indices, updates), n = values, eqn.params["dimension_numbers"]
    changes, indices = {}, _as_int32(indices)
    rows = [d for d in range(updates.ndim) if d not in n.update_window_dims]  # one per dim of the indices but the last
    shared = {d for k, d in enumerate(rows) if k in n.scatter_indices_batching_dims}  # with the operand: no sum
    missing = {d: 0 if d in shared else -updates.shape[d] % blocks[2][d] for d in rows} if blocks[2] else {}
    if layouts[2] is not None and any(missing.values()):
        neutral = jnp.asarray(-0.0 if jnp.issubdtype(updates.dtype, jnp.inexact) else 0, updates.dtype)
        indices = jnp.pad(indices, [*((0, missing[d]) for d in rows), (0, 0)])
        updates = jnp.pad(updates, [(0, missing.get(d, 0)) for d in range(updates.ndim)], constant_values=neutral)
        updates = jax.lax.with_sharding_constraint(updates, _jax.sharding(mesh, layouts[2].spec()))
        changes = {"unique_indices": False, "indices_are_sorted": False}
    return _jax.bind(eqn, (operand, indices, updates), changes)


def _blocks(layout: Layout | None, mesh) -> tuple[int, ...]:
    """Number of blocks of each dim; () if no layout was decided."""
    return tuple(prod(mesh.shape[a] for a in axes) for axes in layout.dims) if layout else ()


def _as_int32(indices):
    """Indices as int32: those that it cannot hold lie beyond any array, and still do."""
    held = jnp.iinfo(jnp.int32)
    dtype = jnp.iinfo(indices.dtype)
    if dtype.max > held.max:
        indices = jnp.clip(indices, None if dtype.min == 0 else held.min, held.max)
    return indices.astype(jnp.int32)
