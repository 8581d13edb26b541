"""Convolutions that drawn training steps are made of, in one to three dims, with every option of `conv_general_dilated`."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
from drawn_layers import Draw, Layer, activation, cast, norm, residual, sequence_of

LETTERS = "DHW"


def convolution(
    draw: Draw, dims: int, m: int, n: int, stride: int = 1, transposed: bool = False, same: bool = True, kind: str | None = None
) -> Layer:
    """A convolution of x [b, *space, m] to n channels, space / stride; `transposed` to space x stride.

    Args:
        same: whether the space may only change by the stride; else windows may also leave out the border.
        kind: "dense", "grouped" or "depthwise"; drawn by default.
    """
    draw.made.append(f"{dims}-d convolution" if not transposed else f"{dims}-d transposed convolution")
    groups = next((g for g in draw.one_of((4, 2, 3), (8, 5, 2)) if m % g == 0 and n % g == 0), 1)
    kind = kind or draw.one_of("dense", "dense", "grouped" if groups > 1 else "dense", "depthwise" if n % m == 0 and m > 1 else "dense")
    groups = 1 if kind == "dense" else groups if kind == "grouped" else m
    if kind != "dense":
        draw.made.append(f"{kind} convolution")
    odd = draw.also("even windows", 0.1)
    window = tuple(draw.one_of(2, 4) if odd else draw.one_of(3, 3, 5, 7, 1) for _ in range(dims))
    dilation = (
        tuple(draw.one_of(2, 3) if w > 1 else 1 for w in window)
        if not transposed and draw.also("dilated windows", 0.25)
        else (1,) * dims
    )
    if stride > 1 and not transposed:
        draw.made.append("strides")
    spread = (stride,) * dims if transposed else (1,) * dims
    if transposed:  # as many elements as stride times the input, wherever they come from
        total = [d * (w - 1) + stride - 1 for w, d in zip(window, dilation, strict=True)]
        padding = tuple((t - t // 2, t // 2) for t in total)
        draw.made.append("dilated inputs")
    elif not same and draw.also("no padding", 0.3):
        padding = ((0, 0),) * dims
    else:
        reach = [d * (w - 1) for w, d in zip(window, dilation, strict=True)]
        uneven = draw.also("uneven padding", 0.2)
        padding = tuple((r, 0) if uneven else (r - r // 2, r // 2) for r in reach)
    channels_first = draw.also("channels first", 0.2)
    space = LETTERS[-dims:]
    numbers = (f"NC{space}", f"OI{space}", f"NC{space}") if channels_first else (f"N{space}C", f"{space}IO", f"N{space}C")
    strides = (1 if transposed else stride,) * dims
    bias = draw.chance(0.3)
    shape = (n, m // groups, *window) if channels_first else (*window, m // groups, n)

    def apply(p, x, _):
        p = cast(p, x)
        x = jnp.moveaxis(x, -1, 1) if channels_first else x
        y = jax.lax.conv_general_dilated(
            x,
            p["kernel"],
            strides,
            padding,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=groups,
        )
        y = jnp.moveaxis(y, 1, -1) if channels_first else y
        return y + p["bias"] if bias else y

    return Layer({"kernel": shape} | ({"bias": (n,)} if bias else {}), apply)


def mixer(draw: Draw, width: int) -> Layer:
    """A convolution over positions of x [b, t, width], depthwise or grouped and then a product, or down and up again."""
    act = activation(draw)
    if draw.chance(0.25):
        down, up = (
            convolution(draw, 1, width, width, stride=2, kind="dense"),
            convolution(draw, 1, width, width, stride=2, transposed=True),
        )

        def there_and_back(p, x, around):
            return up(p["up"], act(down(p["down"], x, around)), around)

        return Layer({"down": down.params, "up": up.params}, there_and_back)
    over = convolution(draw, 1, width, width, kind=draw.one_of("depthwise", "depthwise", "grouped", "dense"))

    def apply(p, x, around):
        return act(over(p["over"], x, around)) @ p["out"].astype(x.dtype)

    return Layer({"over": over.params, "out": (width, width)}, apply)


def block(draw: Draw, dims: int, width: int) -> Layer:
    """A residual block that keeps the space: two convolutions, or a depthwise one between two products (inverted bottleneck)."""
    kinds, act = ("batch norm", "group norm", "layer norm"), activation(draw)
    if draw.also("inverted bottleneck", 0.3):
        wide = 2 * width
        over = convolution(draw, dims, wide, wide, kind="depthwise")
        into, out = _product(width, wide), _product(wide, width)
        layer = sequence_of(into, over, _of(act), out)
    else:
        layer = sequence_of(convolution(draw, dims, width, width), _of(act), convolution(draw, dims, width, width))
    return residual(norm(draw, width, dims, kinds), layer, after=False)


def _product(m: int, n: int) -> Layer:
    return Layer({"kernel": (m, n)}, lambda p, x, _: x @ p["kernel"].astype(x.dtype))


def _of(function) -> Layer:
    return Layer({}, lambda p, x, _: function(x))


def pool(draw: Draw, dims: int) -> Layer:
    """Halves the space: maxima or means of windows."""
    largest, window = draw.ingredient("max pooling", "mean pooling") == "max pooling", draw.one_of(2, 3)

    def apply(p, x, _):
        shape, strides = (1, *(window,) * dims, 1), (1, *(2,) * dims, 1)
        if largest:
            return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, shape, strides, "SAME")
        return (jax.lax.reduce_window(x.astype(jnp.float32), 0.0, jax.lax.add, shape, strides, "SAME") / window**dims).astype(x.dtype)

    return Layer({}, apply)


def network(draw: Draw, dims: int, channels: int, widths: tuple[int, ...], depth: int) -> Layer:
    """x [b, *space, channels] -> [b, *space', widths[-1]]: stages of blocks, each but the first at half the space."""
    layers, m = [convolution(draw, dims, channels, widths[0], stride=draw.one_of(1, 2), kind="dense", same=False)], widths[0]
    for n, width in enumerate(widths):
        if n:
            halved = draw.chance(0.4)
            layers += [pool(draw, dims)] if halved else []
            layers.append(convolution(draw, dims, m, width, stride=1 if halved else 2, kind="dense"))
        layers += [block(draw, dims, width) for _ in range(depth)]
        m = width
    return sequence_of(*layers)


def there_and_back(draw: Draw, dims: int, channels: int, widths: tuple[int, ...], depth: int) -> Layer:
    """x [b, *space, channels] -> the same shape: a U-Net with transposed convolutions; 2 ** (len(widths) - 1) divides the space."""
    into = convolution(draw, dims, channels, widths[0], kind="dense")
    down = [sequence_of(*(block(draw, dims, w) for _ in range(depth))) for w in widths]
    halve = [convolution(draw, dims, m, n, stride=2, kind="dense") for m, n in pairwise(widths)]
    double = [convolution(draw, dims, n, m, stride=2, transposed=True, kind="dense") for m, n in pairwise(widths)]
    up = [sequence_of(_product(2 * w, w), *(block(draw, dims, w) for _ in range(depth))) for w in widths[:-1]]
    out = convolution(draw, dims, widths[0], channels, kind="dense")

    def apply(p, x, around):
        x, kept = into(p["into"], x, around), []
        for n, layer in enumerate(down):
            x = layer(p["down"][n], x, around)
            if n < len(halve):
                kept.append(x)
                x = halve[n](p["halve"][n], x, around)
        for n in reversed(range(len(up))):
            x = jnp.concatenate([double[n](p["double"][n], x, around), kept[n]], axis=-1)
            x = up[n](p["up"][n], x, around)
        return out(p["out"], x, around)

    parts = {"down": down, "halve": halve, "double": double, "up": up}
    shapes = {name: {n: layer.params for n, layer in enumerate(of)} for name, of in parts.items()}
    return Layer({"into": into.params, "out": out.params} | shapes, apply)
