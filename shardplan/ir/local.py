"""Ops that every device runs on its own shards, under `shard_map`, where XLA would move what need not move or get them wrong.

As emitted by XLA for the layouts a rule allows (`benchmarks/rules_on_xla.py`, jax 0.10.2):

    fft, triangular_solve, tridiagonal_solve, symmetric_product    gathered, batches too, and run whole on every device
    conv_general_dilated with groups                               the input gathered, or moved between the groups' devices
    igamma and its like                                            loops whose every turn waits for all devices
    reduce                                                         the initial value counted once for each piece of the operand
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import jax

from shardplan import _jax
from shardplan.mesh.layout import Layout


def as_it_is(eqn, operands: Sequence[Layout], sizes: Mapping[str, int]) -> dict | None:
    return {}


def grouped(eqn, operands: Sequence[Layout], sizes: Mapping[str, int]) -> dict | None:
    """A device has its share of the groups; None where there are none, or a spatial dim is split, which XLA does well."""
    p, (lhs, _, _) = eqn.params, eqn.params["dimension_numbers"]
    batch, feature, *spatial = (prod(sizes[a] for a in operands[0].dims[d]) for d in lhs)
    groups = p["feature_group_count"], p["batch_group_count"]
    if max(groups) == 1 or max(spatial, default=1) > 1:
        return None
    return {"feature_group_count": max(1, groups[0] // feature), "batch_group_count": max(1, groups[1] // batch)}


LOCAL: dict[str, Callable[..., dict | None]] = {
    **dict.fromkeys(("fft", "triangular_solve", "tridiagonal_solve", "symmetric_product"), as_it_is),
    **dict.fromkeys(("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"), as_it_is),
    "conv_general_dilated": grouped,
}
"""Primitive -> the params that its shards need changed; None where XLA splits this one as well as we would."""


def run(eqn, values: Sequence, operands: Sequence[Layout | None], results: Sequence[Layout | None], mesh) -> list:
    """One equation, on shards where that is better.

    Args:
        eqn: the equation.
        values: its operands.
        operands, results: layouts as decided; None where nothing was (a scalar, a partial result).
        mesh: all axes of type Auto.
    """
    if eqn.primitive.name == "reduce" and any(x is not None for x in operands):
        return _jax.bind(eqn, jax.lax.optimization_barrier(list(values)))
    form = LOCAL.get(eqn.primitive.name)
    taken = [layout or Layout(()) if not v.aval.ndim else layout for v, layout in zip(eqn.invars, operands, strict=True)]
    made = [layout or Layout(()) if not v.aval.ndim else layout for v, layout in zip(eqn.outvars, results, strict=True)]
    if form is None or any(x is None for x in (*taken, *made)) or not any(x.split_axes for x in taken if x is not None):
        return _jax.bind(eqn, values)
    params = form(eqn, taken, dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
    if params is None:
        return _jax.bind(eqn, values)
    specs = [jax.sharding.PartitionSpec(*x.spec()) for x in (*taken, *made) if x is not None]
    on_shards = jax.shard_map(
        lambda *shards: tuple(_jax.bind(eqn, shards, params, context=False)),
        mesh=mesh,
        in_specs=tuple(specs[: len(taken)]),
        out_specs=tuple(specs[len(taken) :]),
        check_vma=False,
    )
    return list(on_shards(*values))
