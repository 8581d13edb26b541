"""Ops that every device runs on its own shards, under `shard_map`, where XLA would move what need not move or get them wrong.

As emitted by XLA for the layouts a rule allows (`benchmarks/rules_on_xla.py`, jax 0.10.2):

    fft, triangular_solve, tridiagonal_solve, symmetric_product    gathered, batches too, and run whole on every device
    conv_general_dilated with groups                               the input gathered, or moved between the groups' devices
    conv_general_dilated over a split dim                          wrong where output channels are split, too: summed over their devices
    igamma and its like                                            loops whose every turn waits for all devices
    reduce                                                         the initial value counted once for each piece of the operand
    slice, pad, rev, concatenate of a split dim                    more permutes than it takes; aborts on a pad that cuts and spreads
    select_and_scatter_add, select_and_gather_add,                 pieces of three arrays exchanged; aborts on some
    reduce_window over several arrays
    cumsum and its like along a split dim                          a window as long as the dim: gathered
    argmax, argmin, top_k, approx_top_k along a split dim          gathered
    slices and updates at places known when it runs, also          the split dim gathered
    gather and scatter of one place

Slices, pads and windows fetch what they lack (`neighbours.py`); what sums up or chooses gathers a small result of every shard; the last
two have to know where a shard begins (`places.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from shardplan import _jax
from shardplan.emit import dynamic_index as places
from shardplan.emit.halo_exchange import Slide, seen, slides
from shardplan.mesh.layout import Layout
from shardplan.strategies.rule import Halo, Rule, is_registered
from shardplan.strategies.rules import rule_for

LOCAL = (
    *("fft", "triangular_solve", "tridiagonal_solve", "symmetric_product"),
    *("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"),
    "conv_general_dilated",
)
"""Primitives that run on shards as they are, a convolution with what its windows see and its part of the groups (`convolved`)."""


Slides = Sequence[Sequence[Slide]]
"""Per operand, the dims along which it lacks what other devices have."""


def _slice(eqn, shards, slides: Slides) -> list:
    p, done = eqn.params, {s.dim for s in slides[0]}
    x = seen(shards[0], slides[0], 0)
    kept = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * x.ndim, x.shape, strict=True)
    taken = zip(*((0, n, 1) if d in done else (a, min(b, n), step) for d, (a, b, step, n) in enumerate(kept)), strict=True)
    return _jax.bind(eqn, [x], dict(zip(("start_indices", "limit_indices", "strides"), taken, strict=True)), context=False)


def _pad(eqn, shards, slides: Slides) -> list:
    x, value = shards
    edges = rest(eqn.params["padding_config"], slides[0], (0, 0, 0))
    return _jax.bind(eqn, [seen(x, slides[0], value), value], {"padding_config": edges}, context=False)


def _rev(eqn, shards, slides: Slides) -> list:
    done = {s.dim for s in slides[0]}
    left = tuple(d for d in eqn.params["dimensions"] if d not in done)
    return _jax.bind(eqn, [seen(shards[0], slides[0], 0)], {"dimensions": left}, context=False)


def _concatenate(eqn, shards, slides: Slides) -> list:
    if not slides[0]:
        return _jax.bind(eqn, shards, context=False)
    (slide,) = slides[0]
    shape = [slide.m // slide.shards if d == slide.dim else n for d, n in enumerate(shards[0].shape)]
    joined = jnp.zeros(shape, shards[0].dtype)
    for x, each in zip(shards, slides, strict=True):
        joined = seen(x, each, joined)
    return [joined]


def convolution(eqn, shards, slides: Slides, groups: Mapping[str, int]) -> list:
    """Windows over what they see, and the groups that a device has."""
    p, found = eqn.params, {s.dim: gapped(s) for s in slides[0]}
    thin = {s.dim for s in slides[0] if s.halo.window == 1}  # of what these pass over nothing is fetched
    read: dict[str, list] = {name: list(p[name]) for name in ("padding", "lhs_dilation", "window_strides", "rhs_dilation")}
    for i, d in enumerate(p["dimension_numbers"].lhs_spec[2:]):
        if d in found:
            _, read["padding"][i], read["lhs_dilation"][i] = found[d]
        if d in thin:
            read["window_strides"][i] = read["rhs_dilation"][i] = 1
    x = seen(shards[0], [s for s, *_ in found.values()], 0)
    return _jax.bind(eqn, [x, *shards[1:]], {name: tuple(each) for name, each in read.items()} | dict(groups), context=False)


def gapped(slide: Slide) -> tuple[Slide, tuple[int, int], int]:
    """What to fetch of elements with gaps, the padding and the gaps left to the op, so that it multiplies no zeros.

    Only where all shards begin alike: else what is fetched has the gaps filled.
    """
    halo, made = slide.halo, slide.m // slide.shards
    span, low, gaps = halo.span(made), halo.low % halo.dilation, halo.dilation
    held = (span - 1 - low) // gaps + 1  # elements
    if halo.window == 1 or gaps == 1 or made * halo.stride % gaps or held < 1:
        return slide, (0, 0), 1
    close = Halo(held, made * halo.stride // gaps, halo.low // gaps)
    return replace(slide, halo=close, m=slide.shards), (low, span - low - (held - 1) * gaps - 1), gaps


def windows(eqn, shards, slides: Slides, beyond: Sequence) -> list:
    """Windows over the first arrays, `beyond` their ends."""
    p, slid = eqn.params, len(beyond)
    arrays = [seen(x, each, fill) for x, each, fill in zip(shards, slides, beyond, strict=False)]
    thin = [s for s in slides[0] if s.halo.window == 1]
    params = {
        "padding": rest(p["padding"], slides[0], (0, 0)),
        "base_dilation": rest(p["base_dilation"], slides[0], 1),
        "window_strides": rest(p["window_strides"], thin, 1),
    }
    return _jax.bind(eqn, [*arrays, *shards[slid:]], params, context=False)


def _reduce_window(eqn, shards, slides: Slides) -> list:
    return windows(eqn, shards, slides, shards[len(shards) // 2 :])


def _select_and_gather_add(eqn, shards, slides: Slides) -> list:
    return windows(eqn, shards, slides, (0, last(eqn)))


def _select_and_scatter_add(eqn, shards, slides: Slides) -> list:
    source, x = (seen(x, each, fill) for x, each, fill in zip(shards, slides, (0, last(eqn)), strict=True))
    for s in slides[0]:  # its elements, a window each, from the first that sees this shard
        stride = eqn.params["window_strides"][s.dim]
        source = jax.lax.slice_in_dim(source, s.halo.low % stride, None, stride, s.dim)
    (out,) = _jax.bind(eqn, [source, x], {"padding": rest(eqn.params["padding"], slides[0], (0, 0))}, context=False)
    for s in slides[1]:
        out = jax.lax.slice_in_dim(out, s.halo.low, s.halo.low + s.n // s.shards, axis=s.dim)
    return [out]


def _cumulative(join: Callable, eqn, shards, slides: Slides) -> list:
    """A shard's own, joined with what the totals of all before it (after it, if reversed) come to."""
    (own,) = _jax.bind(eqn, shards, context=False)
    for s in slides[0]:
        reverse, q = eqn.params["reverse"], jax.lax.axis_index(s.axes)
        total = jax.lax.index_in_dim(own, 0 if reverse else -1, s.dim)
        totals = jax.lax.all_gather(total, s.axes, axis=s.dim, tiled=True)
        (upto,) = _jax.bind(eqn, [totals], context=False)
        before = jax.lax.dynamic_index_in_dim(upto, q + 1 if reverse else q - 1, s.dim)
        own = jnp.where(q == (s.shards - 1 if reverse else 0), own, join(own, before))
    return [own]


def _arg(eqn, shards, slides: Slides) -> list:
    """Where the best is of what is best on each shard; of equals the first, since shards stand in order."""
    (at,) = _jax.bind(eqn, shards, context=False)
    for s in slides[0]:
        at = jnp.expand_dims(at, s.dim)
        found = jnp.take_along_axis(shards[0], at, s.dim), at + places.first(s).astype(at.dtype)
        values, where = (jax.lax.all_gather(x, s.axes, axis=s.dim, tiled=True) for x in found)
        (of,) = _jax.bind(eqn, [values], context=False)
        at = jnp.take_along_axis(where, jnp.expand_dims(of, s.dim), s.dim).squeeze(s.dim)
    return [at]


def _top_k(eqn, shards, slides: Slides) -> list:
    """The best of what is best on each shard, in order."""
    along = eqn.params.get("reduction_dimension", eqn.params.get("axis", -1))
    values, at = _jax.bind(eqn, shards, {"k": min(eqn.params["k"], shards[0].shape[along])}, context=False)
    for s in slides[0]:
        found = values, at + places.first(s).astype(at.dtype)
        values, where = (jax.lax.all_gather(x, s.axes, axis=s.dim, tiled=True) for x in found)
        values, of = _jax.bind(eqn, [values], context=False)
        at = jnp.take_along_axis(where, of, s.dim)
    return [values, at]


def last(eqn) -> float:
    """What no window selects."""
    return -jnp.inf if eqn.params["select_prim"].name == "ge" else jnp.inf


def rest(params: Sequence, done: Sequence[Slide], nothing) -> tuple:
    """A param per dim, `nothing` where that has been done."""
    return tuple(nothing if d in {s.dim for s in done} else p for d, p in enumerate(params))


SHARDED: dict[str, Callable[..., list]] = {
    "slice": _slice,
    "pad": _pad,
    "rev": _rev,
    "concatenate": _concatenate,
    "reduce_window": _reduce_window,
    "select_and_gather_add": _select_and_gather_add,
    "select_and_scatter_add": _select_and_scatter_add,
    "cumsum": partial(_cumulative, jnp.add),
    "cumprod": partial(_cumulative, jnp.multiply),
    "cummax": partial(_cumulative, jnp.maximum),
    "cummin": partial(_cumulative, jnp.minimum),
    "cumlogsumexp": partial(_cumulative, jnp.logaddexp),
    "argmax": _arg,
    "argmin": _arg,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "dynamic_slice": places.dynamic_slice,
    "dynamic_update_slice": places.dynamic_update_slice,
    "gather": places.gather,
    **dict.fromkeys(("scatter", *(f"scatter{to}{how}" for to in "-_" for how in ("add", "sub", "mul", "max", "min"))), places.scatter),
}
"""Primitive -> how it runs on shards that know their place along the dims that are split."""


def runs(eqn, shards, slides: Slides) -> list:
    """An op whose rule says `local`, on shards: by default as it is."""
    form = SHARDED.get(eqn.primitive.name)
    return form(eqn, shards, slides) if form else _jax.bind(eqn, shards, context=False)


def on_shards(primitive: str, rule: Rule, letters: Sequence[str | None]) -> bool:
    """Whether an op may run on its shards with mesh axes put on these letters: then all its layouts have to be decided."""
    return primitive in LOCAL or not rule.local.isdisjoint(letters)


@dataclass(frozen=True)
class Part:
    """What a device runs on its shards of the operands.

    Attributes:
        run: shards of the operands -> shards of the results.
        results: their layouts; partial ones are summed over their axes.
    """

    run: Callable[..., list]
    results: tuple[Layout, ...]


def split_letters(rule: Rule, tensors: Sequence[Layout | None]) -> dict[str, tuple[str, ...]] | None:
    """Letter -> the axes it is split over; None where tensors do not agree."""
    found: dict[str, tuple[str, ...]] = {}
    for dims, layout in zip(rule.operands + rule.results, tensors, strict=True):
        for dim, axes in zip(dims, layout.dims if layout else (), strict=bool(layout)):
            if len(dim) == 1 and found.setdefault(dim[0], axes) != axes:
                return None
    return found


def sharded(eqn, operands: Sequence[Layout], results: Sequence[Layout | None], sizes: Mapping[str, int]) -> Part | None:
    """What runs on shards that lack something or have to know their place; None where XLA does as well."""
    name, ins, outs = eqn.primitive.name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    if name not in SHARDED and not is_registered(name):
        return None
    rule, _ = rule_for(name, ins, outs, eqn.params)
    axes = split_letters(rule, (*operands, *results)) if rule.local else None
    if axes is None:
        return None
    shards = {a: prod(sizes[x] for x in of) for a, of in axes.items()}
    slid = [slides(rule, k, axes, shards, ins, outs) for k in range(len(ins))]
    every = [s for of in slid for s in of]
    if not any(not rule.halo or max(s.halo.window, s.halo.dilation) > 1 or s.halo.permutes(s.n, s.m, s.shards) for s in every):
        return None
    partial = tuple((axis, kind) for a, kind in rule.reduce.items() for axis in axes.get(a, ()))
    made = [Layout(tuple(axes.get(dim[0], ()) if len(dim) == 1 else () for dim in dims), partial) for dims in rule.results]
    return Part(lambda *shards: runs(eqn, shards, slid), tuple(made))


def convolved(eqn, operands: Sequence[Layout], results: Sequence[Layout | None], sizes: Mapping[str, int]) -> Part | None:
    """A device has its share of the groups, and what its windows see; None where there is neither, which XLA does well."""
    p, ins, outs = eqn.params, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    rule, _ = rule_for(eqn.primitive.name, ins, outs, p)
    axes = split_letters(rule, (*operands, *results))
    if axes is None:
        return None
    (lhs, rhs, out), (x, w) = p["dimension_numbers"], (layout.dims for layout in operands)
    slid = [slides(rule, 0, axes, {a: prod(sizes[n] for n in of) for a, of in axes.items()}, ins, outs)]
    if p["feature_group_count"] == p["batch_group_count"] == 1 and not slid[0]:
        return None
    counts = {"batch_group_count": lhs[0], "feature_group_count": lhs[1]}
    groups = {name: max(1, p[name] // prod(sizes[a] for a in x[d])) for name, d in counts.items()}
    dims = [axes.get(dim[0], ()) if dim else () for dim in rule.results[0]]
    dims[out[0]] = tuple(a for a in x[lhs[0]] if a not in w[rhs[0]])  # not those of the groups
    dims[out[1]] = w[rhs[0]]
    summed = tuple(a for letter in rule.reduce for a in axes.get(letter, ()))
    return Part(lambda *shards: convolution(eqn, shards, slid, groups), (Layout(tuple(dims), tuple((a, "sum") for a in summed)),))


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
    taken = [layout or Layout(()) if not v.aval.ndim else layout for v, layout in zip(eqn.invars, operands, strict=True)]
    made = [layout or Layout(()) if not v.aval.ndim else layout for v, layout in zip(eqn.outvars, results, strict=True)]
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if any(x is None for x in taken) or not any(x.split_axes for x in taken if x is not None):
        return bind(eqn, values)
    if (part := part_of(eqn, taken, made, sizes)) is None:
        return bind(eqn, values)
    # A partial result leaves with a dim in front, a row from every device.
    rows = [Layout((tuple(axis for axis, _ in x.partial), *x.dims)) if x.partial else x for x in part.results]
    split = jax.shard_map(
        lambda *shards: tuple(x[None] if of.partial else x for x, of in zip(part.run(*shards), part.results, strict=True)),
        mesh=mesh,
        in_specs=tuple(jax.sharding.PartitionSpec(*x.spec()) for x in taken if x is not None),
        out_specs=tuple(jax.sharding.PartitionSpec(*x.spec()) for x in rows),
        check_vma=False,
    )
    return [added(x) if of.partial else x for x, of in zip(split(*values), part.results, strict=True)]


def bind(eqn, values: Sequence, params: dict | None = None, context: bool = True) -> list:
    """The equation itself, in a form that XLA gets right.

    A transform has its arrays in rows, since XLA for CPU lays them out for collectives and then fails; a lookup has places of 32 bits,
    since its partitioner aborts on shorter ones.
    """
    if eqn.primitive.name == "gather" and values[1].dtype.itemsize < 4:
        values = values[0], jnp.asarray(values[1], "int32")
    if eqn.primitive.name != "fft":
        return _jax.bind(eqn, values, params, context)
    return [_jax.row_major(x) for x in _jax.bind(eqn, [_jax.row_major(x) for x in values], params, context)]


def added(parts):
    """The sum of the rows; of booleans whether any is true."""
    join = jax.lax.bitwise_or if parts.dtype == bool else jax.lax.add
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), join, (0,))


def part_of(eqn, taken, made, sizes: Mapping[str, int]) -> Part | None:
    """What a device runs on its shards; None where XLA splits the op as well as we would."""
    if eqn.primitive.name == "conv_general_dilated":
        return convolved(eqn, taken, made, sizes)
    if eqn.primitive.name not in LOCAL:
        return sharded(eqn, taken, made, sizes)
    return None if None in made else Part(lambda *shards: bind(eqn, shards, context=False), tuple(made))
