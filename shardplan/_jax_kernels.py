"""The other module that touches JAX's internals: the parameters of kernels, and calls that bring their own partitioning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, dispatch, ffi, xla_bridge
from jax._src import custom_partitioning_sharding_rule as sharding_rules
from jax._src import linear_util as lu
from jax._src import mesh as mesh_lib
from jax._src.cudnn import fused_attention_stablehlo as attention
from jax._src.interpreters import mlir, partial_eval
from jax._src.state.types import AbstractRef
from jax.extend.core import ClosedJaxpr
from jax.extend.mlir import ir

from shardplan import _jax


def with_shape(aval, shape: tuple[int, ...]):
    """An array's or a reference's type, with another shape; the same object where the shape is the same."""
    if tuple(aval.shape) == tuple(shape):
        return aval
    if isinstance(aval, AbstractRef):
        return aval.update(inner_aval=with_shape(aval.inner_aval, shape))
    return aval.update(shape=tuple(shape))


def with_inputs(jaxpr, avals: Sequence):
    """An open jaxpr whose first inputs have the shapes of these types; an input that has another one must be unused."""
    first = [v if v.aval.shape == a.shape else core.Var(with_shape(v.aval, a.shape)) for v, a in zip(jaxpr.invars, avals, strict=False)]
    return jaxpr.replace(invars=[*first, *jaxpr.invars[len(first) :]])


def in_current_context(held):
    """A jaxpr, or a parameter that holds some, whose equations see the current mesh, not the one under which they were traced."""
    if isinstance(held, (tuple, list)) and any(isinstance(x, (ClosedJaxpr, core.Jaxpr)) for x in held):
        return type(held)(map(in_current_context, held))
    if isinstance(held, core.Jaxpr):  # before closed ones: in jax 0.12 both are one class
        now = core.JaxprEqnContext()
        params = ({name: in_current_context(value) for name, value in e.params.items()} for e in held.eqns)
        return held.replace(eqns=[e.replace(ctx=now, params=p) for e, p in zip(held.eqns, params, strict=True)])
    return held.replace(jaxpr=in_current_context(held.jaxpr)) if isinstance(held, ClosedJaxpr) else held


def call(closed: ClosedJaxpr, args: Sequence) -> list:
    """Results of a closed jaxpr."""
    return core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def traced_on_axes(function: Callable[..., list], shards: Sequence, axes: Mapping[str, int]) -> ClosedJaxpr:
    """The jaxpr of what a device runs on its shards, where mesh axes of these names and sizes are known."""
    with core.extend_axis_env_nd(list(axes.items())):
        return jax.make_jaxpr(function)(*shards)


def named_axes(eqn) -> list[str]:
    """Mesh axes that an equation, or one inside it, names."""
    return sorted(str(effect.name) for effect in eqn.effects if isinstance(effect, core.NamedAxisEffect))


def index_map(function: Callable[..., list], avals: Sequence, like: ClosedJaxpr) -> ClosedJaxpr:
    """A block mapping's index map, traced at grid indices and references of these types."""

    def as_integers(*args):
        return [jnp.asarray(x, a.dtype) for x, a in zip(function(*args), like.out_avals, strict=True)]

    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(lu.wrap_init(as_integers, debug_info=like.jaxpr.debug_info), list(avals))
    return ClosedJaxpr(jaxpr, consts)


def scaled(estimate, fraction: float):
    """A kernel's cost estimate for a part of its programs; None stays."""
    if estimate is None:
        return None
    names: Any = ("flops", "transcendentals", "bytes_accessed", "remote_bytes_transferred")
    return type(estimate)(**{name: int(getattr(estimate, name) * fraction) for name in names if hasattr(estimate, name)})


def ffi_attributes(params: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a `ffi_call` as the user gave them."""
    return ffi._unwrap_kwargs_hashable(params["attributes"])


def ffi_params(params: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a `ffi_call` whose results have these shapes, with these attributes."""
    avals = tuple(core.ShapedArray(s, x.dtype) for s, x in zip(shapes, params["result_avals"], strict=True))
    return {"result_avals": avals, "attributes": ffi_hashable(attributes)}


def ffi_hashable(attributes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as a `ffi_call` holds them: sorted, and comparable."""
    return tuple(ffi._wrap_kwargs_hashable(dict(attributes)))


PARTITIONED = frozenset(
    p
    for p in dispatch.prim_requires_devices_during_lowering
    if p.name == "custom_partitioning" or p.name.startswith("dot_product_attention")
)
"""Primitives that ask for devices when lowered, unless under a `shard_map` over all axes."""
CALLBACKS = frozenset(p for p in dispatch.prim_requires_devices_during_lowering if p.name in ("pure_callback", "io_callback"))
"""Primitives that ask for devices to name the one whose process calls back: where none is named, it is the first."""
PRINTS = frozenset({"debug_print", "debug_callback"})
"""Names of the primitives of `jax.debug`."""


def asks_for_mesh(eqn) -> bool:
    """Whether an equation calls back into Python or brings its own partitioning: both ask for the mesh when lowered."""
    asks = PARTITIONED | dispatch.prim_requires_devices_during_lowering
    return "callback" in eqn.primitive.name or eqn.primitive in asks


def knows_its_mesh(closed: ClosedJaxpr) -> bool:
    """Whether any equation, however deep, asks for the mesh."""
    return any(map(asks_for_mesh, _jax.equations(closed.jaxpr)))


@contextlib.contextmanager
def devices_not_needed():
    """Context in which calls that ask for devices when lowered are lowered on an `AbstractMesh`.

    Under `shard_map` over all axes, as a planned step runs them, kernels are lowered to what one device runs and ask for none.
    Callbacks ask for the client of the platform they are lowered for, which only a TPU's use.
    """
    asks, get_backend = dispatch.prim_requires_devices_during_lowering, mlir.ModuleContext.get_backend
    held = asks & (PARTITIONED | CALLBACKS)
    asks -= held
    mlir.ModuleContext.get_backend = lambda self, optional=False: get_backend(self, True)
    try:
        yield
    finally:
        asks |= held
        mlir.ModuleContext.get_backend = get_backend


def sharding_rule(params, ins: Sequence, out: Sequence):
    """The `SdyShardingRule` of a `custom_partitioning` call; one that the user makes from types is made from these."""
    given = params["sharding_rule"]
    if not callable(given):
        return given
    with mlir.make_ir_context(), ir.Location.unknown():
        types = [[ir.RankedTensorType.get(x.shape, mlir.dtype_to_ir_type(x.dtype)) for x in of] for of in (ins, out)]
        made = given(*params["static_args"], mesh_lib.AbstractMesh((), ()), *types)
    text, options = made if isinstance(made, (list, tuple)) else (made, {})
    return sharding_rules.str_to_sdy_sharding_rule(text, **options) if isinstance(text, str) else text


def is_batching(factor: str) -> bool:
    """Whether a name in a `SdyShardingRule` stands for any number of leading dims, as "...2" does."""
    return sharding_rules._is_batching(factor)


ASSUMED_CUDNN, ASSUMED_CAPABILITY = 91100, (9, 0)
"""cuDNN 9.11 on an H100."""


@contextlib.contextmanager
def cudnn_assumed():
    """Context in which a step with cuDNN's attention is traced where cuDNN or a GPU is not there.

    Tracing asks for cuDNN's version and the GPU's architecture only to refuse what these do not support; what is not there is assumed
    to be `ASSUMED_CUDNN` and `ASSUMED_CAPABILITY`. Where both are there, nothing changes.
    """
    names = "check_cudnn_version", "check_compute_capability"
    found = {name: getattr(attention, name) for name in names if hasattr(attention, name)}
    if len(found) == len(names) and not _has_cudnn():
        attention.check_cudnn_version = lambda: ASSUMED_CUDNN
    if len(found) == len(names) and "cuda" not in xla_bridge.get_backend().platform_version:
        attention.check_compute_capability = lambda capability: tuple(map(int, capability.split("."))) <= ASSUMED_CAPABILITY
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(attention, name, function)


def _has_cudnn() -> bool:
    try:
        return bool(attention.check_cudnn_version())
    except Exception:  # of whichever kind: no library, or one that does not load
        return False
