"""How a step is traced: as `jax.jit` does on the mesh with Auto axes; what jit passes over or says in other words is said here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax

from shardplan import _jax, _jax_kernels
from shardplan.errors import ShardingError, warn
from shardplan.plan.stand_ins import on_stand_ins
from shardplan.units import format_array, format_memory

if TYPE_CHECKING:
    from shardplan.options import AutoOptions
    from shardplan.signature import Call

BEING_PLANNED: ContextVar[bool] = ContextVar("BEING_PLANNED", default=False)
"""Whether a step is traced to be planned: what it calls is planned with it, be it a planned step by itself."""
LARGE_CONSTANT_BYTES = 1 << 20
"""Arrays that a step closes over are no inputs, so every device holds them whole; a warning names them from this size on."""


def trace(fun: Callable, call: Call, auto: AutoOptions):
    """`jax.jit(fun).trace` on this mesh.

    A function that names axes which the mesh lacks, and none where there is no mesh, is traced as it is without one.

    Raises:
        ShardingError: the step asks for axes that are not there.
    """
    args, kwargs = call.abstract()
    fun = on_stand_ins(fun)

    def by_jit(fun: Callable):
        before = BEING_PLANNED.set(True)
        try:
            with _jax_kernels.cudnn_assumed():
                return jax.jit(fun, **auto.jit_arguments).trace(*args, **kwargs)
        finally:
            BEING_PLANNED.reset(before)

    try:
        traced = by_jit(_watched(fun))
        _warn_of_constants(traced.jaxpr.consts)
        return traced
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ShardingError(
            f"the step calls a collective by hand: {str(error).split('.')[0]}. A planned step sees whole arrays, not a device's part.\n"
            "  ways out: leave out lax.pmean and lax.psum (a mean over the batch is one over all devices' rows already); or put what "
            "needs them in jax.shard_map"
        ) from error
    except ValueError as error:
        if _jax.OTHER_SHARD_MAP_MESH in str(error):
            raise ShardingError(
                "a jax.shard_map or jax.pmap in the step is given a mesh of its own; a planned step is traced on its mesh with Auto "
                "axes.\n  ways out: leave mesh= out of that jax.shard_map (it takes the mesh in use); in place of jax.pmap, plan what "
                "it maps with jax.vmap; or plan on jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)"
            ) from error
        if _jax.EXPLICIT_SPEC in str(error):
            raise ShardingError(
                f"the step shards its own arrays as Explicit axes do, and a planned step is traced with Auto axes: {error}\n"
                "  ways out: leave out out_sharding= and jax.sharding.reshard there, and the planner chooses; or write "
                "jax.lax.with_sharding_constraint(x, P(...)), which is kept as a pin"
            ) from error
        if _jax.UNKNOWN_AXIS not in str(error):
            raise
        unknown = error
    why, way = f"the step asks for layouts that the mesh has no axis for: {unknown}", f"name axes of {auto.shape}"
    try:
        traced = by_jit(_jax.without_mesh(fun))
    except Exception:
        raise ShardingError(f"{why}\n  way out: {way}, or plan on a mesh that has it") from unknown
    warn(f"{why}\n  All that it asks for only where there is a mesh is left to the planner.\n  way out: {way}")
    return traced


def _watched(fun: Callable) -> Callable:
    """The function, with a warning of objects among its arguments (nnx modules) that it changes without returning what they hold.

    Dicts and lists are left out: a batch that is normalised in place means no change of the caller's.
    """

    @functools.wraps(fun)
    def watched(*args, **kwargs):
        before = jax.tree.leaves((args, kwargs))
        out = fun(*args, **kwargs)
        after = jax.tree_util.tree_leaves_with_path((args, kwargs))
        results = jax.tree_util.tree_leaves_with_path(out)
        returned = {id(x) for _, x in results}
        lost = [
            keys
            for x, (keys, y) in zip(before, after, strict=False)
            if x is not y and id(y) not in returned and isinstance(keys[-1], jax.tree_util.GetAttrKey)
        ]
        # A leaf of the same name is the new one: transforms of nnx write to modules what stays as it was, too.
        lost = [keys for keys in lost if not any(of[len(of) - len(keys) + 2 :] == keys[2:] for of, _ in results)]
        if lost and len(after) == len(before):
            path = jax.tree_util.keystr(lost[0][1:], simple=True, separator="/")
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            warn(
                f"the step changes argument {path}{more} in place and does not return it: under jit, and so in a plan, the caller's "
                "object stays as it was.\n  way out: nnx.split before the step, nnx.merge in it, and return the new state"
            )
        return out

    return watched


def _warn_of_constants(consts: list[Any]) -> None:
    """Warns of large arrays that the step closes over: parameters that were meant to be arguments."""
    large = [x for x in consts if getattr(x, "nbytes", 0) >= LARGE_CONSTANT_BYTES]
    if large:
        size, first, several = format_memory(sum(x.nbytes for x in large)), format_array(large[0]), len(large) > 1
        what = f"{len(large)} large arrays, {size} in all (the first is {first})" if several else f"a large array, {first}, {size}"
        it, arguments = ("them", "arguments") if several else ("it", "an argument")
        warn(
            f"the step closes over {what}: every device holds {it} whole, and no plan shards {it}.\n"
            f"  way out: make {it} {arguments} of the step"
        )
