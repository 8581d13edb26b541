"""Which primitives stand for a program of their own, and that program; a part of `_jax.py`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import prod

import jax
from jax._src.lax import slicing
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def expansion(eqn) -> Callable[..., list] | None:
    """What traces the program that an equation stands for, from the equation and its operands; None for an op of its own."""
    run = EXPANDED.get(eqn.primitive.name)
    return None if run is _filled and _is_one_gather(eqn) else run


def closed(inner) -> ClosedJaxpr:
    """A jaxpr with its constants, whichever form the parameter has."""
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, tuple(getattr(inner, "consts", ())))


def _linear_solve(eqn, *xs) -> list:
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return jaxpr_as_fun(closed(eqn.params["jaxprs"].solve))(*xs[first : first + lengths.solve], *xs[sum(lengths) :])


def _filled(eqn, *xs) -> list:
    p = {name: x for name, x in eqn.params.items() if name != "mode"}
    return [slicing._gather_fill(*xs, **p, output_shape=eqn.outvars[0].aval.shape)]


def _is_one_gather(eqn) -> bool:
    """Whether a gather does not fill, or runs on shards as it is: a single lookup (`strategies/rules/index.py`), keys."""
    (operand, indices, *more), fills = eqn.invars, eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    single = prod(indices.aval.shape[:-1]) == 1
    return not fills or single or jax.numpy.issubdtype(operand.aval.dtype, jax.dtypes.extended) or bool(more)


def _high_level(eqn, *xs) -> list:
    prim = eqn.params["_prim"]
    return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, xs)))


def _slices(eqn, x) -> list:
    cuts = pairwise(accumulate(eqn.params["sizes"], initial=0))
    return [jax.lax.slice_in_dim(x, *cut, axis=eqn.params["axis"]) for cut in cuts]


def _sparse(eqn, *xs) -> list:
    name = eqn.primitive.name
    module = importlib.import_module(f"jax.experimental.sparse.{name.partition('_')[0]}")
    return jax.tree.leaves(getattr(module, f"_{name}_impl")(*xs, **eqn.params))


def _implementation(eqn, *xs) -> list:
    return list(eqn.primitive.impl(*xs, **eqn.params))


def _dense(eqn, *xs) -> list:
    x = jax.tree.unflatten(eqn.params["tree"], xs)
    return [x.todense() if hasattr(x, "todense") else x]


SPARSE = """
    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general
    bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
    coo_fromdense coo_matmat coo_matvec coo_todense csr_fromdense csr_matmat csr_matvec csr_todense
"""

EXPANDED: dict[str, Callable[..., list]] = {
    "custom_linear_solve": _linear_solve,
    "call_hi_primitive": _high_level,
    "gather": _filled,
    "split": _slices,
    "todense": _dense,
    **dict.fromkeys(SPARSE.split(), _sparse),
    **dict.fromkeys(("linear_solve", "maybe_set", "vprim"), _implementation),
}
"""Primitives that stand for a program of their own, which has to be traced first: linear solves (JAX's and lineax's), the newest JAX's
high-level primitives (searchsorted, expm, ...), splits, writes into Equinox's loops and what it batches by their implementation, what
sparse arrays are made of (gathers and scatters), and gathers in mode "fill": XLA gathers, completes the parts of a sharded operand, and
then selects (fact: partition-filled-gather)."""
