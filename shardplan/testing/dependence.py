"""Proofs for ops without a local form (a device's shard of the result depends on its own shards alone), and for linear ops."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.strategies.rule import Dims, flat_factors
from shardplan.testing.compare import difference
from shardplan.testing.sharded_op import ShardedOp


def prove_dependence(op: ShardedOp) -> None:
    """Prove that each device's shard of the results stays the same when the elements of other devices are permuted."""
    if set(op.shards) & set(op.rule.reduce):
        op.fail("the op on local shards does not give a result of the local shape, so a partial result cannot be formed")
    for device in np.ndindex(*op.shards.values()):
        coordinates = dict(zip(op.shards, device, strict=True))
        operands = [_permute_others(op, x, d, coordinates) for x, d in zip(op.operands, op.rule.operands, strict=True)]
        for got, want, dims in zip(_jax.bind(op.eqn, operands), op.results, op.rule.results, strict=True):
            own = np.flatnonzero(_is_own(op, dims, want.shape, coordinates))
            if (error := difference(got.reshape(-1)[own], want.reshape(-1)[own])) is not None:
                op.fail(f"a shard depends on elements of other devices; {error}")


def _is_own(op: ShardedOp, dims: Dims, shape, coordinates: dict[str, int]) -> np.ndarray:
    """Mask of the elements of a tensor that the device at these coordinates holds or receives."""
    own = np.ones((), bool)
    for a in flat_factors(dims):
        at = np.arange(op.sizes[a])
        block = at == 0 if a in op.rule.head else at // (op.sizes[a] // op.shards.get(a, 1)) == coordinates.get(a, 0)
        own = np.logical_and.outer(own, block if a in coordinates else True | block)
    return own.reshape(shape)


def _permute_others(op: ShardedOp, x, dims: Dims, coordinates: dict[str, int]):
    x = jnp.asarray(x)
    own = _is_own(op, dims, x.shape, coordinates).reshape(-1)
    index = np.where(own, np.arange(own.size), np.roll(np.arange(own.size), own.size // 2 + 1))
    return x.reshape(-1)[index].reshape(x.shape)


def prove_linear(op: ShardedOp) -> None:
    """Prove f(x) = f(x - y) + f(y), of ops on numbers."""
    if not all(jnp.issubdtype(jax.typeof(x).dtype, jnp.number) for x in op.operands + op.results):
        return
    half = [jnp.roll(jnp.asarray(x).reshape(-1), 1).reshape(jnp.shape(x)) for x in op.operands]
    rest = [jnp.asarray(x) - h for x, h in zip(op.operands, half, strict=True)]
    for a, b, want in zip(_jax.bind(op.eqn, half), _jax.bind(op.eqn, rest), op.results, strict=True):
        if (error := difference(a + b, want)) is not None:
            replace(op, shards={}).fail(f"it is marked linear, but f(x) + f(y) is not f(x + y); {error}")
