"""Proofs of one sharding: the op run shard by shard, joined, equals the op on global arrays.

Of an op without a local form, proof that a device's shard of the result depends on its own shards alone; and proof of linearity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.emit.shard_local import dynamic_index, kernels, ragged
from shardplan.emit.shard_local.forms import FORMS, run_form
from shardplan.emit.shard_local.halo import HaloDim, halo_dims
from shardplan.emit.shard_local.window import convolution, windows
from shardplan.strategies.rule import Dims, Rule, RuleError, flat_factors

AXES = ("s", "t", "u")
"""Mesh axes of a proof, one per sharded factor."""


@dataclass(frozen=True)
class ShardedOp:
    """One equation, global arrays of its operands and results, and per sharded factor the number of shards."""

    eqn: Any
    rule: Rule
    sizes: dict[str, int]
    operands: tuple
    results: tuple
    shards: dict[str, int]

    @property
    def name(self) -> str:
        """The primitive."""
        return self.eqn.primitive.name

    @property
    def text(self) -> str:
        """The sharding as text, "a:8 b:2"."""
        return " ".join(f"{a}:{k}" for a, k in self.shards.items())

    @property
    def types(self) -> str:
        """Types of operands and results."""
        return " -> ".join(", ".join(str(jax.typeof(x)) for x in side) for side in (self.operands, self.results))

    def local_shape(self, dims: Dims, shape) -> tuple[int, ...]:
        """Shape of one device's shard of a tensor."""
        return tuple(n // math.prod(self.shards.get(a, 1) for a in d) for d, n in zip(dims, shape, strict=True))

    @property
    def local_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one device's shards of all results."""
        return [self.local_shape(d, x.shape) for d, x in zip(self.rule.results, self.results, strict=True)]

    def factor_shape(self, dims: Dims, shape) -> list[int]:
        """Shape of a tensor with one dim per factor; a windowed factor differs from tensor to tensor."""
        return [n if len(d) == 1 else self.sizes[a] for d, n in zip(dims, shape, strict=True) for a in d]

    @property
    def axes(self) -> dict[str, str]:
        """Sharded factor -> its mesh axis."""
        return dict(zip(self.shards, AXES, strict=False))

    def mesh(self, n_devices: int) -> Mesh:
        """The sharded factors' axes, and one more for the devices that are left."""
        shape = (*self.shards.values(), n_devices // math.prod(self.shards.values()))
        return Mesh(np.asarray(jax.devices()[:n_devices]).reshape(shape), AXES[: len(shape)])

    def spec(self, dims: Dims) -> PartitionSpec:
        """PartitionSpec of a tensor with one dim per factor."""
        return PartitionSpec(*(self.axes.get(a) for a in flat_factors(dims)))

    def shard_index(self, factor: str):
        """This device's number along a factor."""
        return lax.axis_index(self.axes[factor]) if factor in self.shards else 0

    def halo_dims(self, k: int) -> list[HaloDim]:
        """Sharded dims of operand k over which windows slide."""
        axes = {a: (axis,) for a, axis in self.axes.items()}
        return halo_dims(self.rule, k, axes, self.shards, self.operands, self.results)

    def sharded_dims(self, k: int) -> list[HaloDim]:
        """All sharded dims of operand k."""
        return replace(self, rule=replace(self.rule, shard_local=frozenset(self.shards))).halo_dims(k)

    def compare(self, got, want, why: str = "") -> None:
        """Raise a RuleError unless the arrays are equal up to rounding."""
        if (error := difference(got, want)) is not None:
            self.fail(f"{why}{error}")

    def fail(self, why: str):
        """Raise a RuleError that names the op and this sharding."""
        raise RuleError(
            f"rule '{self.rule}' of {self.name} on {self.types} is wrong when sharded as {self.text}: {why}\n"
            f"  ways out: replicate a factor that needs its neighbours, or name its kind in reduce="
        )


def difference(got, want) -> str | None:
    """None when equal up to rounding of the dtype (NaN equals NaN), else where and by how much they differ."""
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    got, want = jax.device_get((got, want))
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = got != want
        bound = 0.0
        gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
    else:
        wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
        digits = {8: 1e-11, 4: 3e-5, 2: 4e-2}.get(want.dtype.itemsize // (2 if wide is np.complex128 else 1), 0.6)
        got, want = got.astype(wide), want.astype(wide)
        finite = np.isfinite(want)
        bound = digits * max(1.0, np.abs(want[finite]).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            gap = np.where(finite, np.abs(got - want), np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.inf))
        wrong = ~(gap <= bound)
    if not wrong.any():
        return None
    return f"{wrong.sum()} of {wrong.size} elements differ by up to {np.where(wrong, gap, 0).max():.3g} (allowed {bound:.3g})"


class _NoLocalFormError(Exception):
    """The primitive on local shards does not give a local shard of the result."""


def prove_local(group: list[ShardedOp], n_devices: int) -> bool:
    """Prove shardings of one op that take so many devices, in one program; False if the op has no local form."""
    try:
        replicated = NamedSharding(group[0].mesh(n_devices), PartitionSpec())
        operands = jax.device_put([jnp.asarray(x) for x in group[0].operands], replicated)
        joined = jax.jit(lambda xs: [_join(op, xs, n_devices) for op in group], out_shardings=replicated)(operands)
    except _NoLocalFormError:
        return False
    for op, results in zip(group, joined, strict=True):
        for got, want in zip(results, op.results, strict=True):
            op.compare(got, want)
    return True


def _join(op: ShardedOp, operands, n_devices: int) -> list:
    """Results of the op run on shards, put together."""
    specs = {"in_specs": tuple(map(op.spec, op.rule.operands)), "out_specs": list(map(op.spec, op.rule.results))}
    run = jax.shard_map(lambda *shards: _run_on_shards(op, shards), mesh=op.mesh(n_devices), check_vma=False, **specs)
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
        _reduce_partial(op, x, d).reshape(
            [n // op.shards.get(a, 1) for a, n in zip(flat_factors(d), op.factor_shape(d, y.shape), strict=True)]
        )
        for x, d, y in zip(results, op.rule.results, op.results, strict=True)
    ]


def _reduce_partial(op: ShardedOp, x, dims: Dims):
    """A partial result, reduced by the collective of its kind."""
    for factor, axis in op.axes.items():
        kind = op.rule.reduce.get(factor) if factor not in flat_factors(dims) else None
        if kind in ("sum", "max", "min"):
            x = getattr(lax, f"p{kind}")(x, axis)
        elif kind:
            x = getattr(lax, f"reduce_{kind}")(lax.all_gather(x, axis), (0,))
    return x


def _with_local_shape(op: ShardedOp, shards):
    return _jax.bind(op.eqn, shards, {"new_sizes" if op.name == "reshape" else "shape": op.local_shapes[0]})


def _iota(op: ShardedOp, shards):
    (x,), dim = _with_local_shape(op, shards), op.eqn.params["dimension"]
    starts = [op.shard_index(a) * op.local_shapes[0][dim] for a in op.rule.results[0][dim]]
    return [x + jnp.asarray(sum(starts), x.dtype)]


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


def _kernel(op: ShardedOp, shards):
    return kernels.CALLS[op.name](op.eqn, op.rule, shards, op.shards)


def _ragged(op: ShardedOp, shards):
    if not op.rule.shard_local:
        return _jax.bind(op.eqn, shards)
    (dim,) = op.eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    rows, groups = ((op.axes[a],) if a in op.shards else () for a in (op.rule.operands[0][dim][0], "g"))
    return ragged.ragged_dot(op.eqn, shards, rows, groups, op.operands[2].shape[-1] // op.shards.get("g", 1))


LOCAL_FORMS: dict[str, Callable | None] = {
    **dict.fromkeys(kernels.CALLS, _kernel),
    **dict.fromkeys(("reshape", "broadcast_in_dim", "broadcast_to", "empty"), _with_local_shape),
    "iota": _iota,
    "gather": lambda op, shards: dynamic_index.gather(op.eqn, shards, [op.sharded_dims(0)]),
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged,
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
            op.compare(got.reshape(-1)[own], want.reshape(-1)[own], "a shard depends on elements of other devices; ")


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
        replace(op, shards={}).compare(a + b, want, "it is marked linear, but f(x) + f(y) is not f(x + y); ")
