"""Drawing shapes, types and values, and the registry of drawn calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from shardplan._jax import equations

SIZES = (8, 4, 6, 2, 3, 12, 16, 5, 1, 9)
SMALL = (4, 2, 6, 3, 1, 5)
FLOATS = ("float32", "bfloat16", "float16")
FINER = (*FLOATS, "float8_e4m3fn", "float8_e5m2")
INTS = ("int32", "int8", "uint8", "int16", "uint16", "uint32", "int4", "uint4")
NUMBERS = (*FINER, *INTS, "complex64")
ALL = (*NUMBERS, "bool")


@dataclass(frozen=True)
class Case:
    """A call of one primitive, perhaps among others."""

    primitive: str
    fn: Callable
    args: tuple

    def __repr__(self) -> str:
        try:
            return f"{self.primitive}: {jax.make_jaxpr(self.fn)(*self.args)}"
        except NotImplementedError as error:  # a derivative that this jax lacks
            return f"{self.primitive}: {error}"

    @property
    def is_made(self) -> bool:
        """Whether the primitive is among what the function traces to."""
        return any(e.primitive.name == self.primitive for e in equations(jax.make_jaxpr(self.fn)(*self.args).jaxpr))


CASES: dict[str, st.SearchStrategy[Case]] = {}
"""Primitive -> calls of it."""

FAMILIES: dict[str, st.SearchStrategy[Case]] = {}
"""The same of primitives that are drawn alike."""


def made(family: str, names: str = ""):
    """Registers a function from (draw, primitive) to (function, *operands) for the primitives named, default the family's name."""

    def register(make):
        @st.composite
        def cases(draw, name):
            fn, *args = make(draw, name)
            return Case(name, fn, tuple(args))

        found = {name: cases(name) for name in names.split() or [family]}
        CASES.update(found)
        FAMILIES[family] = st.one_of(*found.values())
        return make

    return register


# ---- what is drawn


def one_of(draw, *options):
    return draw(st.sampled_from(options))


def shape_of(draw, low: int = 1, high: int = 3, sizes=SIZES, most: int = 1500) -> tuple[int, ...]:
    """Of rank low..high and at most so many elements."""
    shape = draw(st.lists(st.sampled_from(sizes), min_size=low, max_size=high))
    while np.prod(shape, dtype=int) > most:
        shape[int(np.argmax(shape))] = 2
    return tuple(shape)


def array(draw, shape, dtype: str = "float32", values: str = "mixed"):
    """Values drawn from a drawn seed.

    Args:
        values: "mixed" numbers of both signs; "inner" ones in (0.1, 0.9); "ties" few different ones; "any" also infinities, NaN and
            the largest integers; "sums" what may be added up in any order: "mixed", or "inner" where a type has few digits.
    """
    random = np.random.default_rng(draw(st.integers(0, 99)))
    if values == "sums":
        values = "inner" if dtype in FINER[1:] else "mixed"
    if dtype == "bool":
        return jnp.asarray(random.integers(0, 2, shape), bool)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        low, high = (info.min, info.max) if values == "any" else (max(info.min, -3), min(info.max, 4))
        return jnp.asarray(random.integers(int(low), int(high), shape, endpoint=True), dtype)

    def real():
        if values == "inner":
            return random.uniform(0.1, 0.9, shape)
        if values == "ties":
            return random.integers(-2, 3, shape).astype(float)
        x = random.normal(0, 1, shape)
        return np.where(random.random(shape) < 0.1, random.choice([np.nan, np.inf, -np.inf, -0.0], shape), x) if values == "any" else x

    if dtype == "complex64":
        x = np.empty(shape, dtype)
        x.real, x.imag = real(), real()
        return jnp.asarray(x)
    return jnp.asarray(real(), dtype)


def axes_of(draw, rank: int, low: int = 1, high: int = 9) -> tuple[int, ...]:
    """Some dims, in order."""
    kept = draw(st.sets(st.integers(0, rank - 1), min_size=min(low, rank), max_size=min(high, rank))) if rank else set()
    return tuple(sorted(kept))


def keys(draw, shape=(), kinds=("threefry2x32", "rbg")):
    key = jax.random.key(draw(st.integers(0, 99)), impl=one_of(draw, *kinds))
    return jax.random.split(key, shape) if shape else key
