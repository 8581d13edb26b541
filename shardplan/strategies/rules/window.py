"""Sliding windows: a dim passes through, its shards exchange halos.

reduce_window_max       n h w c -> n h w c                halo h=3/2 w=3/2
select_and_scatter_add  n h w c, n h w c -> n h w c       halo h=3 w=3      windows of its elements and all that these read

Facts: partition-scattered-windows.
"""

from __future__ import annotations

from math import prod

from shardplan.ir.traits import Traits
from shardplan.strategies.halo import Halo
from shardplan.strategies.rule import Dims, Rule, factors, flat_factors, rule


def windowed(k: int, x, window_dimensions, window_strides, padding, base_dilation=None, window_dilation=None, **_):
    """Factors of all tensors, and halos of the first k; a dim whose window is one point just passes through."""
    a, halo = factors(x), {}
    ones = (1,) * len(a)
    sizes = zip(window_dimensions, window_strides, padding, base_dilation or ones, window_dilation or ones, strict=True)
    for (name,), (window, stride, edges, dilation, spread) in zip(a, sizes, strict=True):
        if not (window == stride == dilation == 1 and tuple(edges) == (0, 0)):
            halo[name] = dict.fromkeys(range(k), Halo((window - 1) * spread + 1, stride, edges[0], dilation))
    return a, halo


def apart(dims: Dims, names) -> tuple[Dims, frozenset[str]]:
    """The dims with other factors in place of the named ones, and all factors that need replication then."""
    return tuple((f"y{n}",) if n in names else (n,) for (n,) in dims), frozenset(x for n in names for x in (n, f"y{n}"))


def unsupported(halo) -> frozenset[str]:
    """Factors with base dilation and negative padding: XLA aborts when these are sharded."""
    return frozenset(name for name, of in halo.items() if any(h.dilation > 1 and h.low < 0 for h in of.values()))


def scattered_on_shards(x, a: Dims) -> frozenset[str]:
    """Factors along which XLA gathers an array before it scatters to its windows: all, but for two dtypes."""
    return frozenset() if x.dtype.name in ("float32", "bfloat16") else frozenset(flat_factors(a))


def filled(a: Dims, padding, base_dilation=None, **_) -> frozenset[str]:
    """Factors of dims whose windows reach beyond the array, or between its elements."""
    dilation = base_dilation or (1,) * len(a)
    return frozenset(name for (name,), edges, of in zip(a, padding, dilation, strict=True) if max(edges) > 0 or of > 1)


def idempotent(jaxpr) -> bool:
    """Whether a window's function gives the same however often it takes in the initial value."""
    names = [eqn.primitive.name for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns]
    return len(names) == 1 and names[0] in ("max", "min", "and", "or")


@rule("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def reduce_window(*ins, out, window_dimensions, **params):
    """Operands, then their initial values where the parameters name no function.

    Shards take these in for what lies beyond the array, and may be wrong with any but neutral ones: whole dims take them in once.
    """
    k = len(out)
    a, halo = windowed(k, ins[0], window_dimensions, **params)
    b, whole = apart(a, filled(a, **params) if "jaxpr" in params and not idempotent(params["jaxpr"]) else ())
    halo = {name: of for name, of in halo.items() if name not in whole}
    own, fixed = (frozenset(halo), frozenset()) if k > 1 else (frozenset(), unsupported(halo))
    operands, flops = (a,) * k + ((),) * (len(ins) - k), k * prod(out[0].shape) * prod(window_dimensions)
    return Rule(operands, (b,) * k, halo=halo, shard_local=own, replicated=fixed | whole, fusion="reduce", flops=flops)


@rule()
def select_and_gather_add(tangents, x, *, out, window_dimensions, **params):
    a, halo = windowed(2, x, window_dimensions, **params)
    flops = 2 * prod(out[0].shape) * prod(window_dimensions)
    return Rule((a, a), (a,), halo=halo, shard_local=frozenset(halo), fusion="reduce", flops=flops)


@rule(traits=Traits(zeros_after=1))
def select_and_scatter_add(source, x, *, out, window_dimensions, **params):
    """An element reads the windows it is in, and a shard, which begins where a window does, all that these read."""
    a, found = windowed(1, x, window_dimensions, **params)
    sizes, halo = {name: each for (name,), *each in zip(a, source.shape, x.shape, strict=True)}, {}
    for name, halos in found.items():
        window, stride, low = halos[0].window, halos[0].stride, halos[0].low
        if sizes[name][0] * stride == sizes[name][1] and stride <= window and 0 <= low < window:
            before = low + (window - 1 - low) // stride * stride
            after = (low - 1) // stride * stride - low + window
            halo[name] = {0: Halo(window, 1, window - 1 - low, stride), 1: Halo(before + 1 + after, 1, before)}
    b, replicated = apart(a, found.keys() - halo)
    flops, own = prod(source.shape) * prod(window_dimensions), halo.keys() | scattered_on_shards(x, a) - replicated
    return Rule((b, a), (a,), halo=halo, shard_local=frozenset(own), replicated=replicated, flops=flops)


@rule(traits=Traits(zeros_after=0))
def select_and_scatter(x, source, init, *, out, window_dimensions, **params):
    a, halo = windowed(1, x, window_dimensions, **params)
    b, replicated = apart(a, halo)
    return Rule((a, b, ()), (a,), replicated=replicated, flops=prod(source.shape) * prod(window_dimensions))
