"""Equations and variables of rewritten programs, with JAX's internals; a part of `_jax.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core
from jax.extend.core import ClosedJaxpr

from shardplan import _jax

REWRITABLE = "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"
"""Calls that say nothing of the shapes of their operands but in the jaxpr that they hold."""


def variable(like, shape: Sequence[int]):
    """A new variable of another's dtype, in the same memory."""
    return core.Var(like.aval.update(shape=tuple(shape), sharding=None))


def reshape_equation(operand, shape: Sequence[int], at):
    """An equation that reshapes a variable into a new one, on the line of equation `at`, if there is one."""
    params = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
    source = (at.source_info, at.ctx) if at else ()
    return core.new_jaxpr_eqn([operand], [variable(operand, shape)], jax.lax.reshape_p, params, core.no_effects, *source)


def equation(eqn, operands: Sequence, params: dict[str, Any], shapes: Sequence[Sequence[int]]):
    """An equation with other operands, some other parameters and new results of these shapes.

    A sharding among the parameters, as differentiation gives one of Auto axes, says nothing and has the rank of the old result.
    """
    params = {**dict.fromkeys(eqn.params.keys() & {"sharding", "out_sharding"}), **params}
    results = [variable(v, shape) for v, shape in zip(eqn.outvars, shapes, strict=True)]
    return eqn.replace(invars=list(operands), outvars=results, params={**eqn.params, **params})


def body(eqn):
    """The jaxpr that an equation runs once, or once per trip of a scan, if it can be replaced; else None."""
    if _jax.region(eqn) == "scan":
        return _jax.scan_parts(eqn)[0]
    placed = (x for name in ("in_shardings", "out_shardings") for x in eqn.params.get(name) or ())
    if eqn.primitive.name not in REWRITABLE or any(isinstance(x, jax.sharding.Sharding) for x in placed):
        return None
    return _jax.inner_jaxpr(eqn)


def with_body(eqn, closed, operands: Sequence, shapes: Sequence[Sequence[int]]):
    """An equation that runs another jaxpr."""
    name = next(name for name in _jax.HELD if eqn.params.get(name) is not None)
    held = closed if isinstance(eqn.params[name], ClosedJaxpr) else closed.jaxpr
    return equation(eqn, operands, {name: held}, shapes)
