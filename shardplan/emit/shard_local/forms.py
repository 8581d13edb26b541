"""Ops that every device runs on its own shards, under `shard_map`, where XLA would move more than necessary or compute wrongly.

What XLA's partitioner makes of them in the layouts that their rules allow (`benchmarks/rules_on_xla.py`, jax 0.10.2):

    fft, triangular_solve, tridiagonal_solve, symmetric_product    all-gather, also of batch dims, and the whole op on every device
    conv_general_dilated with groups                               all-gather of the input, or a move between the groups' devices
    conv_general_dilated over a sharded spatial dim                wrong if output channels are sharded, too: summed over their devices
    igamma, betainc, ...                                           while loops in which all devices wait for each other each iteration
    reduce                                                         the initial value counted once per piece of the operand
    slice, pad, rev, concatenate of a sharded dim                  more collective-permutes than necessary; aborts on some pads
    select_and_scatter_add, select_and_gather_add,                 halo exchanges of three arrays; aborts on some
    reduce_window over several arrays
    select_and_scatter_add, of any dtype but float32, bfloat16     all-gather, also of batch dims, and all windows on every device
    cumsum, ... along a sharded dim                                a window as long as the dim, hence an all-gather
    argmax, argmin, top_k, approx_top_k along a sharded dim        all-gather
    top_k, approx_top_k along another                              all-gather of batch dims
    dynamic_slice, dynamic_update_slice, gather and scatter        all-gather of the sharded dim
    of one window
    ragged_dot_general over its rows or groups                     all-gather of both
    scatter-add over two axes, its sum sharded in another order    all-reduce

Facts: local-library-calls, local-grouped-convolution, local-initial-value, local-halo, local-dynamic-index, local-ragged-product,
local-top-k, partition-scattered-windows, partition-scatter-in-one-order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from shardplan import _jax, _jax_kernels
from shardplan.emit import uneven
from shardplan.emit.shard_local import dynamic_index, kernels, ragged, window
from shardplan.emit.shard_local.halo import HaloDims, halo_dims
from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import Layout
from shardplan.strategies.register import is_registered
from shardplan.strategies.rule import Dims, Rule, factor_sizes, flat_factors
from shardplan.strategies.rules import rule_for

LocalOp = tuple[Callable[..., list], tuple[Layout, ...]]
"""An op as a device runs it: (shards of the operands -> shards of the results, layouts of the results; partial ones are summed)."""
Layouts = Sequence[Layout | None]
"""Per operand or result of an equation; None where nothing was decided."""


# ---- ops that run on their shards in every layout (`Traits.runs_on_shards`)


def unchanged(eqn, operands: Layouts, results: Layouts, sizes: Mapping[str, int]) -> LocalOp | None:
    """The op itself on the shards."""
    decided = tuple(x for x in results if x is not None)
    return (lambda *shards: bind(eqn, shards, context=False), decided) if len(decided) == len(results) else None


def convolution(eqn, operands: Layouts, results: Layouts, sizes: Mapping[str, int]) -> LocalOp | None:
    """A device's groups, over its halo; None where there are neither groups nor halos (fact: local-grouped-convolution)."""
    p, found = eqn.params, shard_factors(eqn, (*operands, *results), sizes)
    if found is None or (p["feature_group_count"] == p["batch_group_count"] == 1 and not found[2][0]):
        return None
    rule, axes, halos = found
    (lhs, rhs, out), (x, w) = p["dimension_numbers"], (layout.dims for layout in operands if layout)
    counts = {"batch_group_count": lhs[0], "feature_group_count": lhs[1]}
    groups = {name: max(1, p[name] // prod(sizes[a] for a in x[d])) for name, d in counts.items()}
    dims = [axes.get(dim[0], ()) if dim else () for dim in rule.results[0]]
    dims[out[0]] = tuple(a for a in x[lhs[0]] if a not in w[rhs[0]])  # not those of the groups
    dims[out[1]] = w[rhs[0]]
    return lambda *shards: window.convolution(eqn, shards, halos, groups), (Layout(tuple(dims), _summed(rule, axes)),)


def ragged_product(eqn, operands: Layouts, results: Layouts, sizes: Mapping[str, int]) -> LocalOp | None:
    """A device's rows of a device's groups; None where neither is sharded."""
    found = shard_factors(eqn, (*operands, *results), sizes)
    if found is None or not (local := [a for a in sorted(found[0].shard_local) if found[1].get(a)]):
        return None
    rule, axes, _ = found
    groups = axes.get("g", ()) if "g" in local else ()
    rows = next((axes[a] for a in local if a != "g"), ())
    per_device = eqn.invars[2].aval.shape[-1] // prod(sizes[a] for a in groups)
    return lambda *shards: ragged.ragged_dot(eqn, shards, rows, groups, per_device), tuple(_made(rule, of, axes) for of in rule.results)


# ---- ops that run on their shards where a factor is sharded that is shard-local (`Rule.shard_local`)

SCATTERS = ("scatter", *(f"scatter{to}{how}" for to in "-_" for how in ("add", "sub", "mul", "max", "min")))

FORMS: dict[str, Callable[..., list]] = {
    "slice": window.slice_,
    "pad": window.pad,
    "rev": window.rev,
    "concatenate": window.concatenate,
    "reduce_window": window.reduce_window,
    "select_and_gather_add": window.select_and_gather_add,
    "select_and_scatter_add": window.select_and_scatter_add,
    "cumsum": partial(window.cumulative, jnp.add),
    "cumprod": partial(window.cumulative, jnp.multiply),
    "cummax": partial(window.cumulative, jnp.maximum),
    "cummin": partial(window.cumulative, jnp.minimum),
    "cumlogsumexp": partial(window.cumulative, jnp.logaddexp),
    **dict.fromkeys(("argmax", "argmin"), window.arg_reduce),
    **dict.fromkeys(("top_k", "approx_top_k"), window.top_k),
    "dynamic_slice": dynamic_index.dynamic_slice,
    "dynamic_update_slice": dynamic_index.dynamic_update_slice,
    "gather": dynamic_index.gather,
    **dict.fromkeys(SCATTERS, dynamic_index.scatter),
}
"""Primitive -> (equation, shards of the operands, their halo dims) -> shards of the results."""


def run_form(eqn, shards, halos: HaloDims) -> list:
    """An op with shard-local factors, on shards: its form, by default the op itself."""
    form = FORMS.get(eqn.primitive.name)
    return form(eqn, shards, halos) if form else _jax.bind(eqn, shards, context=False)


def by_rule(eqn, operands: Layouts, results: Layouts, sizes: Mapping[str, int]) -> LocalOp | None:
    """An op of which some shard-local factor is sharded; None where XLA does as well."""
    if eqn.primitive.name in kernels.CALLS or is_registered(eqn.primitive.name):
        return kernel(eqn, operands, results, sizes)
    if traits_of(eqn.primitive.name).grouped_matmul:
        return ragged_product(eqn, operands, results, sizes)
    found = shard_factors(eqn, (*operands, *results), sizes) if eqn.primitive.name in FORMS else None
    if found is None or not found[0].shard_local:
        return None
    rule, axes, halos = found
    every = [s for dims in halos for s in dims]
    slides = all(a in rule.halo for a in rule.shard_local if axes.get(a))
    if slides and not any(max(s.halo.window, s.halo.dilation) > 1 or s.halo.permutes(s.n, s.m, s.shards) for s in every):
        return None
    dims = (tuple(axes.get(dim[0], ()) if len(dim) == 1 else () for dim in of) for of in rule.results)
    return lambda *shards: run_form(eqn, shards, halos), tuple(Layout(of, _summed(rule, axes)) for of in dims)


def kernel(eqn, operands: Layouts, results: Layouts, sizes: Mapping[str, int]) -> LocalOp | None:
    """A kernel, or a primitive of the user's, that is called at the shapes of its shards; None where no factor is sharded."""
    ins, outs = ([v.aval for v in of] for of in (eqn.invars, eqn.outvars))
    rule, known = rule_for(eqn.primitive.name, ins, outs, eqn.params)
    n = factor_sizes(rule, tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in outs))
    axes = compound_axes(rule, n, operands, sizes)
    if not known or not axes or not rule.shard_local.issuperset(axes):
        return None
    counts = {a: prod(sizes[n] for n in of) for a, of in axes.items()}
    if not kernels.runs(eqn, rule, counts):
        return None
    run = kernels.unchanged if is_registered(eqn.primitive.name) else kernels.CALLS[eqn.primitive.name]
    return lambda *shards: run(eqn, rule, shards, counts), tuple(_made(rule, of, axes) for of in rule.results)


def scattered_sum(eqn, operands: Layouts, order: Sequence[str], sizes: Mapping[str, int]) -> LocalOp | None:
    """A scatter-add of a device's own updates, to be summed over axes in this order; only the first adds to the operand."""
    found = shard_factors(eqn, (*operands, None), sizes)
    if found is None:
        return None
    rule, axes, _ = found
    shards = {a: prod(sizes[n] for n in of) for a, of in axes.items()}
    avals = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    sharded = halo_dims(replace(rule, shard_local=frozenset(axes)), 0, axes, shards, *avals)
    indexed = [x for x in sharded if x.dim in eqn.params["dimension_numbers"].scatter_dims_to_operand_dims]

    def run(x, *others):
        x = jnp.where(jax.lax.axis_index(tuple(order)) == 0, x, jnp.zeros((), x.dtype))
        return dynamic_index.scatter(eqn, (x, *others), [indexed]) if indexed else _jax.bind(eqn, (x, *others), context=False)

    return run, (replace(_made(rule, rule.results[0], axes), partial=tuple((axis, "sum") for axis in order)),)


def _made(rule: Rule, dims: Dims, axes: FactorAxes) -> Layout:
    """The layout of a result that is partial over the reduction factors it does not have."""
    reduced = {a: kind for a, kind in rule.reduce.items() if a not in flat_factors(dims)}
    of = tuple(tuple(axis for a in dim for axis in axes.get(a, ())) for dim in dims)
    return Layout(of, tuple((axis, kind) for a, kind in reduced.items() for axis in axes.get(a, ())))


FactorAxes = dict[str, tuple[str, ...]]
"""Factor -> the mesh axes it is sharded over."""


def shard_factors(eqn, layouts: Layouts, sizes: Mapping[str, int]) -> tuple[Rule, FactorAxes, HaloDims] | None:
    """An op's rule, the axes of its factors and its halo dims, given layouts of all its tensors; None where these do not agree."""
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    rule, _ = rule_for(eqn.primitive.name, ins, outs, eqn.params)
    axes: FactorAxes = {}
    for dims, layout in zip(rule.operands + rule.results, layouts, strict=True):
        for dim, of in zip(dims, layout.dims if layout else (), strict=bool(layout)):
            if len(dim) == 1 and axes.setdefault(dim[0], of) != of:
                return None
    shards = {a: prod(sizes[n] for n in of) for a, of in axes.items()}
    return rule, axes, [halo_dims(rule, k, axes, shards, ins, outs) for k in range(len(ins))]


def compound_axes(rule: Rule, n: Mapping[str, int], layouts: Layouts, sizes: Mapping[str, int]) -> FactorAxes | None:
    """The axes of sharded factors, also of those in compound dims, given operands' layouts and factors' sizes n; None if they differ.

    A factor of a compound dim is sharded once those before it are fully sharded, so the axes of a dim fill its factors in order.
    """
    axes: FactorAxes = {}
    for dims, layout in zip(rule.operands, layouts, strict=True):
        for dim, of in zip(dims, layout.dims if layout else (), strict=bool(layout)):
            left = list(of)
            for a in dim:
                taken = []
                while left and n[a] % (prod(sizes[x] for x in taken) * sizes[left[0]]) == 0:
                    taken.append(left.pop(0))
                if axes.setdefault(a, tuple(taken)) != tuple(taken):
                    return None
            if left:
                return None
    return {a: of for a, of in axes.items() if of}


def _summed(rule: Rule, axes: FactorAxes) -> tuple[tuple[str, str], ...]:
    return tuple((axis, kind) for a, kind in rule.reduce.items() for axis in axes.get(a, ()))


# ---- one equation


def run(eqn, values: Sequence, operands: Layouts, results: Layouts, mesh, sum_order: Sequence[str] = ()) -> list:
    """The results of one equation, run on shards where that is better.

    Args:
        eqn: the equation.
        values: its operands.
        operands, results: their layouts.
        mesh: with axes of type Auto.
        sum_order: as of `EmitDecision`.
    """
    traits = traits_of(eqn.primitive.name)
    if traits.barrier_operands and any(x is not None for x in operands):
        return _jax.bind(eqn, jax.lax.optimization_barrier(list(values)))
    layouts = [layout or Layout(()) if not v.aval.ndim else layout for v, layout in zip(eqn.invars, operands, strict=True)]
    made = [layout or Layout(()) if not v.aval.ndim else layout for v, layout in zip(eqn.outvars, results, strict=True)]
    if traits.scatter == "add" and (padded := uneven.scatter_add(eqn, values, layouts, mesh)):
        return padded
    read = [x for x in layouts if x is not None]
    local = None
    either = [*read, *(x for x in made if x and traits.grouped_matmul)]  # the groups of a ragged product may be its result's alone
    if len(read) == len(layouts) and any(x.sharded_axes for x in either):
        plan = convolution if traits.convolution else unchanged if traits.runs_on_shards else by_rule
        local = scattered_sum(eqn, layouts, sum_order, mesh.shape) if sum_order else plan(eqn, layouts, made, mesh.shape)
    if local is None and eqn.primitive.name in kernels.CALLS and _jax_kernels.asks_for_mesh(eqn):
        # Outside of `shard_map` it could not be lowered without devices: every device runs all of it.
        read, made = ([Layout(((),) * v.aval.ndim) for v in of] for of in (eqn.invars, eqn.outvars))
        local = (lambda *shards: kernels.whole(eqn, shards)), tuple(made)
    if local is None:
        return bind(eqn, values)
    run_shards, made = local
    # A partial result leaves with a dim in front, one row from every device.
    rows = [Layout((tuple(axis for axis, _ in x.partial), *x.dims)) if x.partial else x for x in made]
    on_shards = jax.shard_map(
        lambda *shards: tuple(x[None] if of.partial else x for x, of in zip(run_shards(*shards), made, strict=True)),
        mesh=mesh,
        in_specs=tuple(jax.sharding.PartitionSpec(*x.spec()) for x in read),
        out_specs=tuple(jax.sharding.PartitionSpec(*x.spec()) for x in rows),
        check_vma=False,
    )
    with _jax.at_source(eqn):
        parts = on_shards(*values)
        return [join_rows(x, of.partial[0][1]) if of.partial else x for x, of in zip(parts, made, strict=True)]


def join_rows(parts, kind: str = "sum"):
    """The reduction over the first dim; the sum of booleans is whether any is true."""
    if kind != "sum":
        return getattr(jax.lax, f"reduce_{kind}")(parts, (0,))
    join = jax.lax.bitwise_or if parts.dtype == bool else jax.lax.add
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), join, (0,))


def bind(eqn, values: Sequence, context: bool = True) -> list:
    """The equation itself, in a form that XLA compiles correctly.

    XLA for CPU assigns an FFT's operands other layouts than row-major next to collectives, and then fails; XLA's partitioner aborts on
    a gather's indices of less than 32 bits.
    """
    traits = traits_of(eqn.primitive.name)
    if traits.gather and values[1].dtype.itemsize < 4:
        values = [values[0], jnp.asarray(values[1], "int32"), *values[2:]]
    if not traits.row_major:
        return _jax.bind(eqn, values, context=context)
    return [_jax.row_major(x) for x in _jax.bind(eqn, [_jax.row_major(x) for x in values], context=context)]
