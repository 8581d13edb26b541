"""Random numbers: with threefry keys an element is a function of key and position, so each device makes its part.

random_bits   -> a b           a key of rank 0; a letter only in the result is split for free
random_split  k -> k a         whole k for other generators: they draw in order
random_wrap   a b -> a         whole b: the words of one key
"""

from __future__ import annotations

from ..rule import Rule, letters, rule
from .shape import leading, move


@rule("random_bits", "random_split")
def _(keys, *, out, **_):
    a = letters(keys) + letters(out[0], "o")[len(keys.shape) :]
    ordered = () if "fry" in str(keys.dtype) else a[len(keys.shape) :]
    return move((letters(keys),), (a,), ordered, flops=None)


@rule("random_seed", "random_fold_in", "random_clone")
def _(*ins, out, **_):
    a = letters(out[0])
    return Rule(tuple(a if x.shape else () for x in ins), (a,), fusion="loop")


@rule("random_wrap", "random_unwrap")
def _(x, *, out, **_):
    return leading(x, out[0])


@rule("random_gamma")
def _(keys, shape, *, out, **_):
    a = letters(out[0])
    return Rule((a[: len(keys.shape)], a), (a,))


@rule("iota_2x32_shape")
def _(*, out, **_):
    return move((), (letters(out[0]),) * len(out))


@rule("rng_bit_generator", "rng_uniform")
def _(*ins, out, **_):
    x, y = ([letters(t, f"{side}{i}_") for i, t in enumerate(ts)] for side, ts in (("x", ins), ("y", out)))
    return move(x, y, [d for t in (*x, *y) for d in t], fusion="none", flops=None)
