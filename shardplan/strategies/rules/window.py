"""Sliding windows: a dim passes through where the window is a single point, and is whole elsewhere.

reduce_window_max       n h w c -> n y x c                whole h w y x
select_and_scatter_add  n y x c, n h w c -> n h w c       whole h w y x
"""

from __future__ import annotations

from math import prod

from ..rule import Rule, letters, rule


def windowed(dims: int, window, strides, padding, base_dilation=None, window_dilation=None) -> list[bool]:
    """Per dim, whether a window reaches past a single point."""
    dilation = base_dilation or (1,) * dims
    return [
        not (w == s == d == 1 and tuple(p) == (0, 0)) for w, s, p, d in zip(window, strides, padding, dilation, strict=True)
    ]


def sides(x, y, cut):
    """Letters of the unwindowed tensor, of the windowed one, and the whole ones."""
    a = letters(x)
    b = tuple(own if c else shared for own, shared, c in zip(letters(y, "y"), a, cut, strict=True))
    return a, b, frozenset(n for own, other, c in zip(a, b, cut, strict=True) if c for n in own + other)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _(x, *, out, window_dimensions, window_strides, padding, base_dilation=None, window_dilation=None, **_):
    cut = windowed(len(x.shape), window_dimensions, window_strides, padding, base_dilation)
    a, b, whole = sides(x, out[0], cut)
    return Rule((a,), (b,), whole=whole, fusion="reduce", flops=prod(out[0].shape) * prod(window_dimensions))


@rule("reduce_window")
def _(*ins, out, window_dimensions, window_strides, padding, base_dilation=None, window_dilation=None, **_):
    cut = windowed(len(ins[0].shape), window_dimensions, window_strides, padding, base_dilation)
    a, b, whole = sides(ins[0], out[0], cut)
    flops = len(out) * prod(out[0].shape) * prod(window_dimensions)
    return Rule((a,) * len(out) + ((),) * len(out), (b,) * len(out), whole=whole, fusion="reduce", flops=flops)


@rule("select_and_scatter_add")
def _(source, x, *, out, window_dimensions, window_strides, padding, **_):
    a, b, whole = sides(x, source, windowed(len(x.shape), window_dimensions, window_strides, padding))
    return Rule((b, a), (a,), whole=whole, flops=prod(source.shape) * prod(window_dimensions))


@rule("select_and_scatter")
def _(x, source, init, *, out, window_dimensions, window_strides, padding, **_):
    a, b, whole = sides(x, source, windowed(len(x.shape), window_dimensions, window_strides, padding))
    return Rule((a, b, ()), (a,), whole=whole, flops=prod(source.shape) * prod(window_dimensions))


@rule("select_and_gather_add")
def _(tangents, x, *, out, window_dimensions, window_strides, padding, base_dilation=None, window_dilation=None, **_):
    cut = windowed(len(x.shape), window_dimensions, window_strides, padding, base_dilation)
    a, b, whole = sides(x, out[0], cut)
    return Rule((a, a), (b,), whole=whole, fusion="reduce", flops=prod(out[0].shape) * prod(window_dimensions))
