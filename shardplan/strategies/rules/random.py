"""Random numbers: with threefry keys an element is a function of key and position, so each device makes its part.

random_bits   -> a b           a key of rank 0; a letter only in the result is split for free
random_split  k -> b a         first k  whole b a   where the generator draws in order, as `rbg` does, for many keys from the first
random_wrap   a b -> a         whole b: the words of one key
"""

from __future__ import annotations

from ..rule import Rule, factors, rule
from .shape import leading, move


def drawn(keys, *by: str) -> bool:
    """Whether one of these generators makes what is asked of the keys: an element then depends on its place in all that is drawn."""
    return any(f"<{name}>" in str(keys.dtype) for name in by)


def made(keys, out, in_order: bool) -> Rule:
    a = factors(keys) + factors(out[0], "o")[len(keys.shape) :]
    if not in_order:
        return move((factors(keys),), (a,), flops=None)
    k = factors(keys, "k")
    return move((k,), (a,), a, flops=None, head=frozenset(x for (x,) in k))


@rule("random_bits")
def _(keys, *, out, **_):
    return made(keys, out, drawn(keys, "rbg", "urbg"))


# Keys of `rbg` are split by threefry.
@rule("random_split")
def _(keys, *, out, **_):
    return made(keys, out, drawn(keys, "urbg"))


@rule("random_seed", "random_clone")
def _(x, *, out, **_):
    a = factors(out[0])
    return move((a,), (a,), flops=None)


# What is folded into unchecked keys is drawn for all of them from its first.
@rule("random_fold_in")
def _(keys, data, *, out, **_):
    a = factors(out[0])
    k, d = (a if x.shape else () for x in (keys, data))
    if not drawn(keys, "urbg"):
        return move((k, d), (a,), flops=None)
    d = factors(data, "d")
    return move((k, d), (a,), flops=None, head=frozenset(x for (x,) in d))


@rule("random_wrap", "random_unwrap")
def _(x, *, out, **_):
    return leading(x, out[0])


@rule("random_gamma")
def _(keys, shape, *, out, **_):
    a = factors(out[0])
    return move((a[: len(keys.shape)], a), (a,), a if drawn(keys, "rbg", "urbg") else (), fusion="none", flops=None)


@rule("iota_2x32_shape")
def _(*, out, **_):
    return move((), (factors(out[0]),) * len(out))


@rule("rng_bit_generator", "rng_uniform")
def _(*ins, out, **_):
    x, y = ([factors(t, f"{side}{i}_") for i, t in enumerate(ts)] for side, ts in (("x", ins), ("y", out)))
    return move(x, y, [d for t in (*x, *y) for d in t], fusion="none", flops=None)
