"""Sliding windows: a dim passes through, its shards exchanging what windows reach over.

reduce_window_max       n h w c -> n h w c                halo h=3/2 w=3/2
select_and_scatter_add  n h w c, n h w c -> n h w c       halo h=3 w=3      windows that a shard's elements are in, and all they see
"""

from __future__ import annotations

from math import prod

from shardplan.ir.traits import Traits

from ..halo import Halo
from ..rule import Rule, factors, rule


def slid(k: int, x, window_dimensions, window_strides, padding, base_dilation=None, window_dilation=None, **_):
    """Letters of all tensors, and how windows slide over the first k; a dim whose window is one point just passes through."""
    a, halo = factors(x), {}
    ones = (1,) * len(a)
    sizes = zip(window_dimensions, window_strides, padding, base_dilation or ones, window_dilation or ones, strict=True)
    for (name,), (window, stride, edges, dilation, spread) in zip(a, sizes, strict=True):
        if not (window == stride == dilation == 1 and tuple(edges) == (0, 0)):
            halo[name] = dict.fromkeys(range(k), Halo((window - 1) * spread + 1, stride, edges[0], dilation))
    return a, halo


def cut_and_spread(halo) -> frozenset[str]:
    """Letters along which windows begin behind the first of elements that have gaps between them: XLA aborts when these are split."""
    return frozenset(name for name, of in halo.items() if any(h.dilation > 1 and h.low < 0 for h in of.values()))


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _(x, *, out, window_dimensions, **params):
    a, halo = slid(1, x, window_dimensions, **params)
    flops = prod(out[0].shape) * prod(window_dimensions)
    return Rule((a,), (a,), halo=halo, replicated=cut_and_spread(halo), fusion="reduce", flops=flops)


# Operands, then their initial values.
@rule("reduce_window")
def _(*ins, out, window_dimensions, **params):
    k = len(out)
    a, halo = slid(k, ins[0], window_dimensions, **params)
    flops = k * prod(out[0].shape) * prod(window_dimensions)
    shard_local, replicated = (frozenset(halo), frozenset()) if k > 1 else (frozenset(), cut_and_spread(halo))
    return Rule((a,) * k + ((),) * k, (a,) * k, halo=halo, shard_local=shard_local, replicated=replicated, fusion="reduce", flops=flops)


@rule("select_and_gather_add")
def _(tangents, x, *, out, window_dimensions, **params):
    a, halo = slid(2, x, window_dimensions, **params)
    flops = 2 * prod(out[0].shape) * prod(window_dimensions)
    return Rule((a, a), (a,), halo=halo, shard_local=frozenset(halo), fusion="reduce", flops=flops)


# An element reads the windows it is in, and a shard all that these see. Shards begin where a window does; where windows leave
# elements out between them, the dim is whole.
@rule("select_and_scatter_add", traits=Traits(zeros_after=1))
def _(source, x, *, out, window_dimensions, **params):
    a, found = slid(1, x, window_dimensions, **params)
    sizes, halo = {name: each for (name,), *each in zip(a, source.shape, x.shape, strict=True)}, {}
    for name, halos in found.items():
        window, stride, low = halos[0].window, halos[0].stride, halos[0].low
        if sizes[name][0] * stride == sizes[name][1] and stride <= window and 0 <= low < window:
            before = low + (window - 1 - low) // stride * stride
            after = (low - 1) // stride * stride - low + window
            halo[name] = {0: Halo(window, 1, window - 1 - low, stride), 1: Halo(before + 1 + after, 1, before)}
    b = tuple((f"y{n}",) if n in found and n not in halo else (n,) for (n,) in a)
    replicated = frozenset(n for own, other in zip(a, b, strict=True) if own != other for n in own + other)
    flops = prod(source.shape) * prod(window_dimensions)
    return Rule((b, a), (a,), halo=halo, shard_local=frozenset(halo), replicated=replicated, flops=flops)


@rule("select_and_scatter", traits=Traits(zeros_after=0))
def _(x, source, init, *, out, window_dimensions, **params):
    a, halo = slid(1, x, window_dimensions, **params)
    b = tuple((f"y{n}",) if n in halo else (n,) for (n,) in a)
    replicated = frozenset(n for own, other in zip(a, b, strict=True) if own != other for n in own + other)
    return Rule((a, b, ()), (a,), replicated=replicated, flops=prod(source.shape) * prod(window_dimensions))
