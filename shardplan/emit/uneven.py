"""How updates of a scatter-add that are sharded in unequal blocks become equal ones: they are filled up with neutral updates.

    61 updates on 8 devices    three more that add -0.0 to the first row: 64, in blocks of 8

XLA does not mask what it fills such blocks up with where another mesh axis is idle, and adds it (fact: uneven-updates-are-not-masked).
Blocks of the updates and of the filled up ones have one size, so nothing is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp

from shardplan import _jax
from shardplan.mesh.layout import Layout


def scatter_add(eqn, values: Sequence, updates: Layout | None, mesh) -> list | None:
    """The results of a scatter-add with its updates filled up; None where their blocks are equal, or no layout was decided.

    Args:
        eqn: the equation.
        values: operand, indices and updates.
        updates: the layout of the updates.
        mesh: with axes of type Auto.
    """
    n, shape = eqn.params["dimension_numbers"], values[2].shape
    rows = [d for d in range(len(shape)) if d not in n.update_window_dims]  # one per dim of the indices but the last
    shared = {d for k, d in enumerate(rows) if k in n.scatter_indices_batching_dims}  # with the operand: no sum
    missing = {d: 0 if d in shared else -shape[d] % prod(mesh.shape[a] for a in updates.dims[d]) for d in rows} if updates else {}
    if updates is None or not any(missing.values()):
        return None
    neutral = -0.0 if jnp.issubdtype(values[2].dtype, jnp.inexact) else 0
    indices = jnp.pad(values[1], [*((0, missing[d]) for d in rows), (0, 0)])
    added = jnp.pad(
        values[2], [(0, missing.get(d, 0)) for d in range(len(shape))], constant_values=jnp.asarray(neutral, values[2].dtype)
    )
    added = jax.lax.with_sharding_constraint(added, _jax.sharding(mesh, updates.spec()))
    return _jax.bind(eqn, (values[0], indices, added), {"unique_indices": False, "indices_are_sorted": False})
