"""Random numbers: with threefry keys an element is a function of key and position, so each device makes its part.

random_bits   -> a b           a key of rank 0; a factor of the result alone shards for free
random_split  k -> b a         head k  replicated b a   a generator that draws in order (`rbg`) uses the first key for all
"""

from __future__ import annotations

from functools import partial

from shardplan.ir.traits import Traits
from shardplan.strategies.rule import Rule, factors, replicated_rule, rule
from shardplan.strategies.rules.shape import move


def drawn(keys, *by: str) -> bool:
    """Whether one of these generators draws from the keys: an element then depends on its position among all that are drawn."""
    return any(f"<{name}>" in str(keys.dtype) for name in by)


def bits(in_order: tuple[str, ...], keys, *, out, **_) -> Rule:
    """Random elements per key; the generators `in_order` draw all of them from the first key."""
    a = factors(keys) + factors(out[0], "o")[len(keys.shape) :]
    if not drawn(keys, *in_order):
        return move((factors(keys),), (a,), flops=None)
    k = factors(keys, "k")
    return move((k,), (a,), a, flops=None, head=frozenset(x for (x,) in k))


rule("random_bits", traits=Traits(draws=True))(partial(bits, ("rbg", "urbg")))
rule("random_split")(partial(bits, ("urbg",)))  # threefry splits keys of `rbg`


@rule("random_seed", "random_clone")
def random_seed(x, *, out, **_):
    return move((factors(out[0]),), (factors(out[0]),), flops=None)


@rule()
def random_fold_in(keys, data, *, out, **_):
    """Unchecked keys (`unsafe_rbg`) all use the first element of the data."""
    a = factors(out[0])
    k, d = (a if x.shape else () for x in (keys, data))
    if not drawn(keys, "urbg"):
        return move((k, d), (a,), flops=None)
    d = factors(data, "d")
    return move((k, d), (a,), flops=None, head=frozenset(x for (x,) in d))


@rule()
def random_gamma(keys, shape, *, out, **_):
    a = factors(out[0])
    return move((a[: len(keys.shape)], a), (a,), a if drawn(keys, "rbg", "urbg") else (), fusion="none", flops=None)


@rule("rng_bit_generator", "rng_uniform")
def rng_bit_generator(*ins, out, **_):
    return replicated_rule(ins, out)
