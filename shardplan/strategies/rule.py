"""Which dims of an op may be sharded together: one factor map per primitive, in einops' notation.

    dot_general   "a b, b c -> a c"   reduce b        a factor is a loop dim of the op; dims that share a factor shard together
    reshape       "(a b) c -> a (b c)"                a dim may be a product of factors, major to minor
    reduce_max    "a b -> a"          reduce b=max    a reduction factor leaves a partial result on its mesh axes
    sort          "a b -> a b"        replicated b    a factor that needs replication
    pooling       "a b -> a b"        halo b=3/2      a windowed factor reads its neighbours (`halo.py`); its dims may differ in size
    cumsum        "a b -> a b"        scan b          a shard needs the totals of all shards before it
    top_k         "a b -> a c, a c"   arg_reduce b=2  every shard selects, and one selection among these follows
    random_bits   "a -> b c"          head a          only the first element is read, and broadcast to all (`rbg` keys)

A factor in operands and results alone is a pass-through factor. `@rule(...)` registers a function from an equation to its `Rule`,
under its own name unless others are given. Its parameters are the operands' avals (anything with `.shape` and `.dtype`), keyword
`out` (the tuple of result avals) and the equation's params as keywords:

    @rule()
    def transpose(x, *, permutation, **_):
        a = factors(x)
        return Rule((a,), (tuple(a[p] for p in permutation),))

A rule never mentions a mesh, a cost or a sharding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shardplan.ir.traits import Traits, declare_traits
from shardplan.mesh.rates import Attention
from shardplan.strategies.halo import Halo

Dims = tuple[tuple[str, ...], ...]
"""One tensor: per dim, its factors, major to minor; () for a dim of size one that belongs to no loop."""

Fusion = Literal["loop", "view", "reduce", "none"]


@dataclass(frozen=True)
class Rule:
    """The factor map of one op, in the words of the table above.

    Attributes:
        operands, results: factors of every operand and result; () for rank 0.
        reduce: factor -> kind (`REDUCTIONS`); it is in operands only, or in some results, and then those without it are reduced.
        halo: windowed factor -> operand -> how windows slide over it.
        arg_reduce: factor -> how many elements along it are selected.
        shard_local: factors that, when sharded, have every device run the op on its own shards (`emit`), where XLA would move more.
        sizes: factor -> size; needed for factors inside compound dims, others are read from the shapes.
        linear: partial sums of the operands pass through: every operand partial over an axis gives results partial over it.
        accumulator_init: the result may be partial while the operand, the initial value of an accumulator, is complete.
        fusion: how XLA's GPU back end treats the op: "loop" (elementwise-like, fuses with its neighbours), "view" (a bitcast:
            no bytes move), "reduce" (fuses its producers, writes its result), "none" (a kernel of its own).
        flops: floating point operations of the whole op; None means one per element of the largest result.
        attention: of an attention kernel, what decides how fast these operations are.
        bytes: that the whole op reads and writes, where a kernel states them; None means every operand and result once.
        unsharded: why no factor could be derived, for an op whose own description was looked at; "" otherwise.
        stopped: of an op with a rule, why some factors cannot be sharded, where the step can do something about it; "" otherwise.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduce: dict[str, str] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    halo: dict[str, dict[int, Halo]] = field(default_factory=dict)
    scan: frozenset[str] = frozenset()
    arg_reduce: dict[str, int] = field(default_factory=dict)
    head: frozenset[str] = frozenset()
    shard_local: frozenset[str] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)
    linear: bool = False
    accumulator_init: bool = False
    fusion: Fusion = "none"
    flops: float | None = None
    attention: Attention | None = None
    bytes: float | None = None
    unsharded: str = ""
    stopped: str = ""

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Factors along which shards need something of each other."""
        return *self.halo, *sorted(self.scan), *self.arg_reduce, *sorted(self.head)

    @functools.cached_property
    def is_follower(self) -> bool:
        """Whether the op propagates its operands' sharding: work inside fusions, without halos and lookups."""
        return self.fusion != "none" and not self.halo and not self.is_lookup

    @property
    def is_lookup(self) -> bool:
        """Whether the op reads arbitrary places of a table that shares no factor with another operand."""
        table, others = flat_factors(*self.operands[:1]), flat_factors(*self.operands[1:])
        return self.fusion == "loop" and not self.reduce.keys().isdisjoint(table) and set(table).isdisjoint(others)

    def __str__(self) -> str:
        kinds = {
            "reduce": [a if k == "sum" else f"{a}={k}" for a, k in self.reduce.items()],
            "halo": [f"{a}={','.join(dict.fromkeys(map(str, h.values())))}" for a, h in self.halo.items()],
            "scan": sorted(self.scan),
            "arg_reduce": [a if n == 1 else f"{a}={n}" for a, n in self.arg_reduce.items()],
            "head": sorted(self.head),
            "replicated": sorted(self.replicated),
        }
        pattern = ", ".join(map(format_dims, self.operands)) + " -> " + ", ".join(map(format_dims, self.results))
        text = "".join(f"  {kind} {' '.join(named)}" for kind, named in kinds.items() if named)
        return pattern + text + ("  linear" if self.linear else "")


def format_dims(dims: Dims) -> str:
    """One tensor of a pattern as text."""
    return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" if d else "1" for d in dims)


def format_shapes(shapes) -> str:
    """Shapes as text: "[8,4], [4]"."""
    return ", ".join(f"[{','.join(map(str, x))}]" for x in shapes)


class RuleError(ValueError):
    """A rule that does not fit its op: the pattern, the shapes, what is wrong."""


RULES: dict[str, Callable[..., Rule]] = {}
"""Primitive -> the function from an equation to its rule."""


def rule(*primitives: str, traits: Traits | None = None):
    """Register a rule function and the traits of its primitives: by default the one of its name, trailing underscores removed."""

    def register(fn: Callable[..., Rule]):
        names = primitives or (fn.__name__.rstrip("_"),)
        RULES.update(dict.fromkeys(names, fn))
        if traits is not None:
            declare_traits(names, traits)
        return fn

    return register


def factors(x, start: str = "") -> Dims:
    """Fresh factors, one per dim of `x`: a, b, c, ... (a1, b1, ... past 26); `start` keeps tensors apart."""
    return tuple((f"{start}{chr(97 + i % 26)}{i // 26 or ''}",) for i in range(len(x.shape)))


def flat_factors(*tensors: Dims) -> list[str]:
    """Factors of tensors in order, major to minor, repeated as they are."""
    return [a for dims in tensors for dim in dims for a in dim]


def replicated_rule(ins, outs) -> Rule:
    """Every factor needs replication."""
    left, right = (tuple(factors(x, f"{side}{i}_") for i, x in enumerate(xs)) for side, xs in (("x", ins), ("y", outs)))
    return Rule(left, right, replicated=frozenset(flat_factors(*left, *right)))


def factor_sizes(rule: Rule, shapes: tuple, out_shapes: tuple, primitive: str = "") -> dict[str, int]:
    """Size of every factor, checked against all shapes it appears in; of a windowed one, what divides all its dims.

    Raises:
        RuleError: on a wrong rank or contradicting sizes.
    """
    sizes = dict(rule.sizes)

    def fail(why: str, way_out: str):
        op = f" of {primitive}" if primitive else ""
        raise RuleError(
            f"rule '{rule}'{op} does not fit {format_shapes(shapes)} -> {format_shapes(out_shapes)}: {why}\n  way out: {way_out}"
        )

    tensors = list(zip(rule.operands + rule.results, shapes + out_shapes, strict=False))
    if len(rule.operands) != len(shapes) or len(rule.results) != len(out_shapes):
        fail(f"it names {len(rule.operands)} operands and {len(rule.results)} results", "one of each, a scalar as an empty text")
    for dims, shape in tensors:
        if len(dims) != len(shape):
            why = f"'{format_dims(dims)}' names {len(dims)} dims, {format_shapes([shape])} has {len(shape)}"
            fail(why, "a factor for each, or '...' for leading dims of any number")
        for dim, n in zip(dims, shape, strict=True):
            if len(dim) == 1 and dim[0] in rule.halo:
                sizes[dim[0]] = math.gcd(sizes.get(dim[0], 0), n)
            elif len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
                fail(f"factor {dim[0]!r} is both {sizes[dim[0]]} and {n}", "a second factor for one of the two, both in replicated=")
    for dims, shape in tensors:
        for dim, n in zip(dims, shape, strict=True):
            unknown = [a for a in dim if a not in sizes]
            if len(unknown) == 1:
                known = math.prod(sizes[a] for a in dim if a in sizes)
                sizes[unknown[0]] = n // known if known else 0
            elif unknown:
                fail(f"sizes of {unknown} in '{format_dims((dim,))}' are not given", "all but one of them in sizes=")
            if dim and (product := math.prod(sizes[a] for a in dim)) != n and dim[0] not in rule.halo:
                fail(f"'{format_dims((dim,))}' is {product}, the dim {n}", "factors whose sizes multiply to the dim's")
    return sizes


def exchanged_sizes(rule: Rule, factor: str, operand: int, ins, outs) -> tuple[int, int]:
    """Sizes of an exchanged factor's dim: in an operand, and in a tensor over which no windows slide."""
    tensors = enumerate(zip(rule.operands + rule.results, (*ins, *outs), strict=True))
    sizes = {k: n for k, (dims, x) in tensors for dim, n in zip(dims, x.shape, strict=True) if dim == (factor,)}
    return sizes[operand], next(size for k, size in sizes.items() if k not in rule.halo.get(factor, ()))
