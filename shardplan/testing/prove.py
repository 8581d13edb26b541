"""Proofs of one sharding: the op run shard by shard, joined, equals the op on global arrays.

Of an op without a local form, proof that a device's shard of the result depends on its own shards alone; and proof of linearity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.emit.shard_local import dynamic_index
from shardplan.emit.shard_local.forms import FORMS, run_form
from shardplan.emit.shard_local.window import convolution, windows
from shardplan.strategies.rule import Dims, flat_factors
from shardplan.testing.compare import difference
from shardplan.testing.sharded_op import AXES, ShardedOp


def prove_local(group: list[ShardedOp], n_devices: int) -> bool:
    """Prove shardings of one op that take so many devices, in one program; False if the op has no local form."""

    def join_all(operands):
        return [_join(op, operands, n_devices) for op in group]

    try:
        replicated = NamedSharding(Mesh(np.asarray(jax.devices()[:n_devices]), AXES[:1]), PartitionSpec())
        operands = jax.device_put([jnp.asarray(x) for x in group[0].operands], replicated)
        joined = jax.jit(join_all, out_shardings=replicated)(operands)
    except _NoLocalFormError:
        return False
    for op, results in zip(group, joined, strict=True):
        for got, want in zip(results, op.results, strict=True):
            if (error := difference(got, want)) is not None:
                op.fail(error)
    return True


class _NoLocalFormError(Exception):
    """The primitive on local shards does not give a local shard of the result."""


def _join(op: ShardedOp, operands, n_devices: int) -> list:
    """Results of the op run on shards, put together."""
    shape = (*op.shards.values(), n_devices // math.prod(op.shards.values()))
    mesh = Mesh(np.asarray(jax.devices()[:n_devices]).reshape(shape), AXES[: len(shape)])
    specs = {"in_specs": tuple(map(op.spec, op.rule.operands)), "out_specs": list(map(op.spec, op.rule.results))}
    run = jax.shard_map(lambda *shards: _run_on_shards(op, shards), mesh=mesh, check_vma=False, **specs)
    results = run(*(x.reshape(op.factor_shape(d, x.shape)) for x, d in zip(operands, op.rule.operands, strict=True)))
    return [x.reshape(y.shape) for x, y in zip(results, op.results, strict=True)]


def _run_on_shards(op: ShardedOp, shards) -> list:
    """One device's results, one dim per factor."""
    # The barrier keeps XLA from reading past a shard's end into the global operand.
    shards = lax.optimization_barrier(shards)
    shards = [x.reshape(op.local_shape(dims, y.shape)) for x, dims, y in zip(shards, op.rule.operands, op.operands, strict=True)]
    if op.rule.head:
        raise _NoLocalFormError
    if op.name not in LOCAL_FORMS or (op.rule.shard_local and op.name in FORMS):
        results = run_form(op.eqn, shards, [op.halo_dims(k) for k in range(len(shards))])
    else:
        form = LOCAL_FORMS[op.name]
        results = form(op, shards) if form else []
    if [x.shape for x in results] != op.local_shapes:
        raise _NoLocalFormError
    return [
        _reduce_partial(op, x).reshape(
            [n // op.shards.get(a, 1) for a, n in zip(flat_factors(d), op.factor_shape(d, y.shape), strict=True)]
        )
        for x, d, y in zip(results, op.rule.results, op.results, strict=True)
    ]


def _reduce_partial(op: ShardedOp, x):
    """A partial result, reduced by the collective of its kind."""
    for factor, axis in zip(op.shards, AXES, strict=False):
        kind = op.rule.reduce.get(factor)
        if kind in ("sum", "max", "min"):
            x = getattr(lax, f"p{kind}")(x, axis)
        elif kind:
            x = getattr(lax, f"reduce_{kind}")(lax.all_gather(x, axis), (0,))
    return x


def _with_local_shape(op: ShardedOp, shards):
    return _jax.bind(op.eqn, shards, {"new_sizes" if op.name == "reshape" else "shape": op.local_shapes[0]})


def _iota(op: ShardedOp, shards):
    (x,) = _with_local_shape(op, shards)
    return [x + jnp.asarray(op.shard_start(op.rule.results[0][op.eqn.params["dimension"]]), x.dtype)]


def _tile(op: ShardedOp, shards):
    return _jax.bind(op.eqn, shards, {"reps": tuple(n // m for n, m in zip(op.local_shapes[0], shards[0].shape, strict=True))})


IDENTITY: dict[str, Callable] = {
    "sum": lambda t: 0,
    "prod": lambda t: 1,
    "max": lambda t: -jnp.inf if jnp.issubdtype(t, jnp.floating) else jnp.iinfo(t).min,
    "min": lambda t: jnp.inf if jnp.issubdtype(t, jnp.floating) else jnp.iinfo(t).max,
}
"""Kind of a reduction -> its identity element, from the dtype."""


def _scatter(op: ShardedOp, shards):
    x, *rest = shards
    for factor, kind in op.rule.reduce.items():
        if factor in op.shards:
            x = jnp.where(op.shard_index(factor) == 0, x, jnp.asarray(IDENTITY[kind](x.dtype), x.dtype))
    return dynamic_index.scatter(op.eqn, [x, *rest], [op.sharded_dims(0)])


def _convolution(op: ShardedOp, shards):
    k, p = op.shards.get("g", 1), op.eqn.params
    groups = {name: max(1, p[name] // k) for name in ("feature_group_count", "batch_group_count")}
    return convolution(op.eqn, shards, [op.halo_dims(0)], groups)


def _windows(op: ShardedOp, shards):
    kind = op.name.removeprefix("reduce_window").removeprefix("_")
    fill = IDENTITY[kind](shards[0].dtype) if kind else shards[1]
    return windows(op.eqn, shards, [op.halo_dims(0)], [fill])


LOCAL_FORMS: dict[str, Callable | None] = {
    **dict.fromkeys(("reshape", "broadcast_in_dim", "broadcast_to", "empty"), _with_local_shape),
    "iota": _iota,
    "gather": lambda op, shards: dynamic_index.gather(op.eqn, shards, [op.sharded_dims(0)]),
    "conv_general_dilated": _convolution,
    "tile": _tile,
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows),
    **dict.fromkeys(("random_bits", "random_split", "random_gamma")),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"), _scatter),
}
"""Primitives whose parameters name a size or a position: how they run on local shards; None where an element's position matters."""


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
