"""Sliding windows: a dim passes through, its shards exchanging what windows reach over.

reduce_window_max       n h w c -> n h w c                halo h=3/2 w=3/2
select_and_scatter_add  n h w c, n H w c -> n H w c       windows side by side (w=2/2): nothing is exchanged; whole elsewhere
"""

from __future__ import annotations

from math import prod

from ..rule import Halo, Rule, letters, rule


def slid(operands: tuple[int, ...], x, window_dimensions, window_strides, padding, base_dilation=None, window_dilation=None, **_):
    """Letters of all tensors, and how windows slide over the first `operands`; a dim whose window is one point just passes through."""
    a, halo = letters(x), {}
    ones = (1,) * len(a)
    sizes = zip(window_dimensions, window_strides, padding, base_dilation or ones, window_dilation or ones, strict=True)
    for (name,), (window, stride, edges, dilation, spread) in zip(a, sizes, strict=True):
        if not (window == stride == dilation == 1 and tuple(edges) == (0, 0)):
            halo[name] = Halo(operands, (window - 1) * spread + 1, stride, edges[0], dilation)
    return a, halo


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _(x, *, out, window_dimensions, **params):
    a, halo = slid((0,), x, window_dimensions, **params)
    return Rule((a,), (a,), halo=halo, fusion="reduce", flops=prod(out[0].shape) * prod(window_dimensions))


# Operands, then their initial values.
@rule("reduce_window")
def _(*ins, out, window_dimensions, **params):
    a, halo = slid((0,), ins[0], window_dimensions, **params)
    if len(out) > 1:
        return several(ins[: len(out)], out, halo, window_dimensions, ((),) * len(out))
    return Rule((a, ()), (a,), halo=halo, fusion="reduce", flops=prod(out[0].shape) * prod(window_dimensions))


@rule("select_and_gather_add")
def _(tangents, x, *, out, window_dimensions, **params):
    return several((tangents, x), out, slid((0,), x, window_dimensions, **params)[1], window_dimensions)


def several(ins, out, cut, window_dimensions, rest=()) -> Rule:
    """Windows over several operands at once: XLA's partitioner may abort on those, so their dims are whole."""
    a = letters(ins[0])
    b = tuple((f"y{n}",) if n in cut else (n,) for (n,) in a)
    whole = frozenset(n for own, other in zip(a, b, strict=True) if own[0] in cut for n in own + other)
    flops = len(ins) * prod(out[0].shape) * prod(window_dimensions)
    return Rule((a,) * len(ins) + tuple(rest), (b,) * len(out), whole=whole, fusion="reduce", flops=flops)


def apart(source, x, operands: tuple[int, ...], window_dimensions, **params):
    """Letters of the source, of the operand, the windowed ones and the whole ones: windows that overlap keep their dim whole."""
    a, halo = slid(operands, x, window_dimensions, **params)
    sizes = {n: sizes for (n,), *sizes in zip(a, x.shape, source.shape, strict=True)}
    beside = {n: h for n, h in halo.items() if h.window == h.stride and not h.low and sizes[n][0] == sizes[n][1] * h.stride}
    whole = halo.keys() - beside.keys()
    b = tuple((f"y{n}",) if n in whole else (n,) for (n,) in a)
    return b, a, beside, frozenset(n for own, other in zip(a, b, strict=True) if own[0] in whole for n in own + other)


@rule("select_and_scatter_add")
def _(source, x, *, out, window_dimensions, **params):
    b, a, halo, whole = apart(source, x, (1,), window_dimensions, **params)
    return Rule((b, a), (a,), halo=halo, whole=whole, flops=prod(source.shape) * prod(window_dimensions))


@rule("select_and_scatter")
def _(x, source, init, *, out, window_dimensions, **params):
    b, a, halo, whole = apart(source, x, (0,), window_dimensions, **params)
    return Rule((a, b, ()), (a,), halo=halo, whole=whole, flops=prod(source.shape) * prod(window_dimensions))
