"""The other module that touches JAX's internals: the parameters of kernels, and calls that bring their own partitioning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax._src import core
from jax._src import linear_util as lu
from jax._src.interpreters import partial_eval
from jax._src.state.types import AbstractRef
from jax.extend.core import ClosedJaxpr


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
    if isinstance(held, ClosedJaxpr):
        return held.replace(jaxpr=in_current_context(held.jaxpr))
    if isinstance(held, (tuple, list)) and any(isinstance(x, (ClosedJaxpr, core.Jaxpr)) for x in held):
        return type(held)(map(in_current_context, held))
    if not isinstance(held, core.Jaxpr):
        return held
    context = core.JaxprEqnContext()
    eqns = [e.replace(ctx=context, params={name: in_current_context(value) for name, value in e.params.items()}) for e in held.eqns]
    return held.replace(eqns=eqns)


def call(closed: ClosedJaxpr, args: Sequence) -> list:
    """Results of a closed jaxpr."""
    return core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


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
