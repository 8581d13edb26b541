"""Proofs for ops without a local form, and for linear ops.

Dependence: other devices' elements are replaced, and a device's own shard of the result must stay the same. Linearity: the op on a sum
equals the sum of the op on its terms.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.strategies.rule import Dims
from shardplan.testing.compare import difference
from shardplan.testing.sharded_op import ShardedOp


def prove_dependence(op: ShardedOp) -> None:
    """Prove that every device's shard of the results depends on its own shards of the operands alone.

    Raises:
        RuleError: when it does not, or when a sharded factor is a reduction.
    """
    if set(op.shards) & set(op.rule.reduce):
        op.fail("the op on local shards does not give a result of the local shape, so a partial result cannot be formed")
    for device in np.ndindex(*op.devices):
        coordinates = dict(zip(op.shards, device, strict=True))
        operands = [_permute_others(op, x, d, coordinates) for x, d in zip(op.operands, op.rule.operands, strict=True)]
        for got, want, dims in zip(_jax.bind(op.eqn, operands), op.results, op.rule.results, strict=True):
            own = np.flatnonzero(_is_own(op, dims, want.shape, coordinates))
            if (error := difference(got.reshape(-1)[own], want.reshape(-1)[own])) is not None:
                op.fail(f"a shard depends on elements of other devices; {error}")


def _is_own(op: ShardedOp, dims: Dims, shape, coordinates: dict[str, int]) -> np.ndarray:
    """Mask of the elements of a tensor that the device at these coordinates holds or receives."""
    own = np.ones([op.sizes[a] for a in op.factors_of(dims)], bool)
    for axis, a in enumerate(op.factors_of(dims)):
        if a in coordinates:
            at = np.arange(op.sizes[a])
            block = at == 0 if a in op.rule.head else at // (op.sizes[a] // op.shards[a]) == coordinates[a]
            own &= block.reshape([-1 if i == axis else 1 for i in range(own.ndim)])
    return own.reshape(shape)


def _permute_others(op: ShardedOp, x, dims: Dims, coordinates: dict[str, int]):
    x = jnp.asarray(x)
    own = _is_own(op, dims, x.shape, coordinates).reshape(-1)
    index = np.where(own, np.arange(own.size), np.roll(np.arange(own.size), own.size // 2 + 1))
    return x.reshape(-1)[index].reshape(x.shape)


def prove_linear(op: ShardedOp) -> None:
    """Prove f(x) = f(x - y) + f(y), of ops on numbers.

    Raises:
        RuleError: when the op is not linear.
    """
    if not all(jnp.issubdtype(jax.typeof(x).dtype, jnp.number) for x in op.operands + op.results):
        return
    half = [jnp.roll(jnp.asarray(x).reshape(-1), 1).reshape(jnp.shape(x)) for x in op.operands]
    rest = [jnp.asarray(x) - h for x, h in zip(op.operands, half, strict=True)]
    for a, b, want in zip(_jax.bind(op.eqn, half), _jax.bind(op.eqn, rest), op.results, strict=True):
        if (error := difference(a + b, want)) is not None:
            replace(op, shards={}).fail(f"it is marked linear, but f(x) + f(y) is not f(x + y); {error}")
