"""What an index map computes: scalars of a jaxpr over all points of a kernel's grid, and how they depend on each grid axis.

    b // 4          over a grid of 16      (0 0 0 0 1 1 1 1 ...)    place 1: 4 steps of 0, place 4: 4 steps of 1
    b * 8 + h       over (4, 8)            b: steps of 8            h: steps of 1
    table[b]        a value read at run time: the axes its place depends on, and the place

Values are numpy arrays that broadcast over the grid, of size one along axes they do not depend on; so a map is evaluated at every
point, and what is said of it holds at every point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from shardplan import _jax

MOST_POINTS = 1 << 22
"""A value that depends on so many grid points is not followed."""


@dataclass(frozen=True, eq=False)
class RunTimeValue:
    """A value that is known only when the kernel runs; `axes` are those that it depends on other than through what it reads."""

    axes: frozenset[int] = frozenset()


GridValue = np.ndarray | RunTimeValue


@dataclass(frozen=True, eq=False)
class ScalarRead:
    """A place that index maps read in an operand: per dim its index, or None for all of the dim."""

    operand: int
    index: tuple[GridValue | None, ...]


@dataclass(eq=False)
class GridEvaluator:
    """Evaluates scalar jaxprs over a grid; collects what they read of the operands that stand behind the grid's indices."""

    grid: tuple[int, ...]
    reads: list[ScalarRead] = field(default_factory=list)

    def index(self, axis: int) -> np.ndarray:
        """The index along one axis, at every point."""
        return np.arange(self.grid[axis]).reshape([-1 if a == axis else 1 for a in range(len(self.grid))])

    def indices(self) -> list[np.ndarray]:
        """The index along every axis."""
        return [self.index(axis) for axis in range(len(self.grid))]

    def index_map(self, closed) -> list[GridValue]:
        """Results of an index map: a closed jaxpr of the grid's indices and of the operands that it may read."""
        n = len(self.grid)
        operands = [_Operand(k) for k in range(len(closed.jaxpr.invars) - n)]
        return self.evaluate(closed.jaxpr, [*map(self.constant, closed.consts), *self.indices(), *operands])

    def constant(self, value) -> GridValue:
        """A literal or constant as a value over the grid."""
        value = np.asarray(value)
        if value.ndim or value.dtype.kind not in "iub":
            return RunTimeValue()
        return value.astype(bool if value.dtype.kind == "b" else np.int64).reshape((1,) * len(self.grid))

    def evaluate(self, jaxpr, values: Sequence) -> list:
        """Values of an open jaxpr's outputs, from those of its constants and inputs."""
        return _jax.interpret(jaxpr, values, lambda _, eqn, xs: self._equation(eqn, xs), lambda atom: self.constant(atom.val))

    def _equation(self, eqn, operands: Sequence) -> list:
        if eqn.primitive.name == "get" and isinstance(operands[0], _Operand):
            return [self._read(eqn, operands)]
        if (inner := _jax.inner_jaxpr(eqn)) is not None:
            return self.evaluate(inner.jaxpr, [*map(self.constant, inner.consts), *operands])
        return self.apply(eqn, operands)

    def apply(self, eqn, operands: Sequence) -> list:
        """Results of an equation of its own."""
        axes = frozenset[int]().union(*map(axes_of, operands))
        function = FUNCTIONS.get(eqn.primitive.name)
        known = all(isinstance(x, np.ndarray) for x in operands) and not any(v.aval.shape for v in eqn.outvars)
        shape = np.broadcast_shapes(*(x.shape for x in operands)) if known else ()
        if function is None or not known or math.prod(shape) > MOST_POINTS:
            return [RunTimeValue(axes)] * len(eqn.outvars)
        with np.errstate(all="ignore"):
            return [function(eqn, *operands)]

    def _read(self, eqn, operands: Sequence) -> RunTimeValue:
        transforms = jax.tree.unflatten(eqn.params["tree"], list(operands[1:]))
        indexer = transforms[0] if len(transforms) == 1 else None
        index = [None if hasattr(i, "size") and hasattr(i, "start") else i for i in getattr(indexer, "indices", ())]
        index = [self.constant(i) if isinstance(i, (int, np.integer)) else i for i in index]
        if indexer is None or not all(i is None or isinstance(i, GridValue) for i in index):
            return RunTimeValue(frozenset().union(*map(axes_of, operands)))
        self.reads.append(ScalarRead(operands[0].number, tuple(index)))
        return RunTimeValue(frozenset().union(*(i.axes for i in index if isinstance(i, RunTimeValue))))


class _Operand(NamedTuple):
    number: int


def axes_of(x) -> frozenset[int]:
    """The grid axes that a value depends on other than through what it reads."""
    if isinstance(x, RunTimeValue):
        return x.axes
    return frozenset(a for a, n in enumerate(x.shape) if n > 1) if isinstance(x, np.ndarray) else frozenset()


def _divide(x, y):
    return np.where(y == 0, 0, np.sign(x) * np.sign(y) * (np.abs(x) // np.maximum(np.abs(y), 1)))


def _convert(eqn, x):
    kind = np.dtype(eqn.params["new_dtype"]).kind if not jax.numpy.issubdtype(eqn.params["new_dtype"], jax.numpy.floating) else "f"
    return x.astype(bool) if kind == "b" else x.astype(np.int64) if kind in "iu" else x.astype(float)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda e, x, y: x + y,
    "sub": lambda e, x, y: x - y,
    "mul": lambda e, x, y: x * y,
    "div": lambda e, x, y: x / y if "f" in (x.dtype.kind, y.dtype.kind) else _divide(x, y),
    "rem": lambda e, x, y: np.fmod(x, y),
    "neg": lambda e, x: -x,
    "abs": lambda e, x: np.abs(x),
    "sign": lambda e, x: np.sign(x),
    "max": lambda e, x, y: np.maximum(x, y),
    "min": lambda e, x, y: np.minimum(x, y),
    "clamp": lambda e, low, x, high: np.clip(x, low, high),
    "eq": lambda e, x, y: x == y,
    "ne": lambda e, x, y: x != y,
    "lt": lambda e, x, y: x < y,
    "le": lambda e, x, y: x <= y,
    "gt": lambda e, x, y: x > y,
    "ge": lambda e, x, y: x >= y,
    "and": lambda e, x, y: x & y,
    "or": lambda e, x, y: x | y,
    "xor": lambda e, x, y: x ^ y,
    "not": lambda e, x: ~x,
    "floor": lambda e, x: np.floor(x),
    "ceil": lambda e, x: np.ceil(x),
    "integer_pow": lambda e, x: x ** e.params["y"],
    "shift_left": lambda e, x, y: x << y,
    "shift_right_arithmetic": lambda e, x, y: x >> y,
    "select_n": lambda e, which, *xs: np.select([which == k for k in range(len(xs))], np.broadcast_arrays(*xs)),
    "convert_element_type": _convert,
    **dict.fromkeys(("broadcast_in_dim", "squeeze", "reshape", "stop_gradient", "copy"), lambda e, x, *_: x),
}
"""Primitive -> (equation, values) -> value, of scalars."""


class Place(NamedTuple):
    """A digit of an index and what a step of it adds to a value: the index is the sum of digit * place, each digit below its size."""

    place: int
    size: int
    step: int


def steps_along(value: np.ndarray) -> dict[int, tuple[Place, ...]] | None:
    """Per axis that a value varies along, its steps by digit; None where it is not a sum of such steps.

    The value at the grid's first point is not part of it.
    """
    first = value.reshape(-1)[0]
    out, total = {}, np.zeros_like(value)
    for axis, n in enumerate(value.shape):
        along = value[tuple(slice(None) if a == axis else slice(1) for a in range(value.ndim))].reshape(-1) - first
        if n == 1 or not along.any():
            continue
        if (places := _places(along)) is None:
            return None
        out[axis] = places
        total = total + along.reshape([-1 if a == axis else 1 for a in range(value.ndim)])
    return out if (value - first == total).all() else None


def _places(along: np.ndarray) -> tuple[Place, ...] | None:
    """The fewest digits of 0..n-1 of which each adds a constant per step; None where there are none."""
    out, place, n = [], 1, len(along)
    while place < n:
        rows = along[::place]
        off = np.flatnonzero(rows != rows[1] * np.arange(len(rows)))
        size = int(off[0]) if len(off) else len(rows)
        if n % (place * size):
            return None
        out.append(Place(place, size, int(rows[1])))
        place *= size
    at = np.arange(n)
    return tuple(out) if np.array_equal(sum((p.step * (at // p.place % p.size) for p in out), np.zeros(n)), along) else None


def digit_places(n: int, found: Sequence[tuple[Place, ...]]) -> tuple[int, ...] | None:
    """Places of the digits into which all of some decompositions of an axis of n split it, 1 first; None where they do not nest."""
    places = sorted({1, *(p.place for places in found for p in places)})
    nested = all(b % a == 0 for a, b in zip(places, (*places[1:], n), strict=True))
    return tuple(places) if nested else None
