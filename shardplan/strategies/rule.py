"""Which dims of an op may be split together: one factor map per primitive, in einops' notation.

    dot_general   "a b, b c -> a c"   reduce b        a letter is a loop dim of the op; dims sharing a letter split together
    reshape       "(a b) c -> a (b c)"                a dim may be a product of letters, major to minor
    reduce_max    "a b -> a"          reduce b=max    a reduced letter leaves a partial result on the axes put on it
    slice         "a b -> a c"        whole b c       a whole letter may not be split
    pooling       "a b -> a b"        halo b=3/2      a windowed letter needs its neighbours (`halo.py`); its dims may differ in size
    cumsum        "a b -> a b"        prefix b        along a prefix letter a shard needs the totals of those before it
    top_k         "a b -> a c, a c"   best b=2        along such a letter every shard chooses, and all choose among what was chosen
    random_bits   "a -> b c"          first a         of such a letter the first element is read, and sent to all (`rbg` keys)

`@rule("name", ...)` registers a function from an equation to its `Rule`; its parameters are the operands' avals (anything with
`.shape` and `.dtype`), keyword `out` (the tuple of result avals) and the equation's params as keywords:

    @rule("transpose")
    def transpose(x, *, permutation, **_):
        a = letters(x)
        return Rule((a,), (tuple(a[p] for p in permutation),))

A rule never mentions a mesh, a cost or a sharding.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardplan.ir.traits import Traits, declare_traits

Dims = tuple[tuple[str, ...], ...]
"""One tensor: per dim, its letters, major to minor; () for a dim of size one that belongs to no loop."""

Fusion = Literal["loop", "view", "reduce", "none"]


@dataclass(frozen=True)
class Halo:
    """How results along a letter read an operand: result i the elements whose positions, `dilation` apart, fall in its window.

        i * stride - low  <=  element * dilation  <  i * stride - low + window

    Attributes:
        window, stride, low, dilation: in positions; a negative stride reads backwards.
    """

    window: int = 1
    stride: int = 1
    low: int = 0
    dilation: int = 1

    def __str__(self) -> str:
        return f"{self.window}/{self.stride}" if self.stride != 1 else str(self.window)

    def span(self, made: int) -> int:
        """Positions from the first to the last that `made` results in a row read; of windows of one, without those in between."""
        return made if self.window == 1 else (made - 1) * self.stride + self.window

    def growth(self, n: int, m: int) -> float:
        """Positions that the m results read, per element."""
        return self.span(m) / n

    def needs(self, n: int, m: int, shards: int, q: int) -> tuple[int, int]:
        """(first, one past the last) of the n elements that shard q reads for its share of the m results."""
        made = m // shards
        first, last = sorted((q * made * self.stride - self.low, (q * made + made - 1) * self.stride - self.low))
        return max(0, -(-first // self.dilation)), min(n, (last + self.window - 1) // self.dilation + 1)

    def pieces(self, n: int, m: int, shards: int) -> list[Piece]:
        """What shards read of each other's elements."""
        own = n // shards
        reads = ((q, *self.needs(n, m, shards, q)) for q in range(shards))
        return [
            Piece(source, q, max(first, source * own), min(stop, (source + 1) * own))
            for q, first, stop in reads
            for source in (range(first // own, -(-stop // own)) if first < stop else ())
            if source != q
        ]

    def hops(self, n: int, m: int, shards: int) -> dict[int, int]:
        """Distance -> elements that come from the shard so far before (after, if negative); the most of any shard."""
        out: dict[int, int] = {}
        for x in self.pieces(n, m, shards):
            out[x.target - x.source] = max(out.get(x.target - x.source, 0), x.size)
        return dict(sorted(out.items()))

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def permutes(self, n: int, m: int, shards: int) -> tuple[tuple[Piece, ...], ...]:
        """All pieces in few permutes, of which each shard sends and receives at most one piece; the largest pieces together."""
        out: list[tuple[set[int], set[int], list[Piece]]] = []
        for x in sorted(self.pieces(n, m, shards), key=lambda x: (-x.size, abs(x.target - x.source), x.target - x.source)):
            fits = next((p for p in out if x.source not in p[0] and x.target not in p[1]), None)
            if fits is None:
                out.append(fits := (set(), set(), []))
            fits[0].add(x.source)
            fits[1].add(x.target)
            fits[2].append(x)
        return tuple(tuple(pieces) for _, _, pieces in out)


@dataclass(frozen=True)
class Piece:
    """Elements first .. stop - 1 of a dim, from the shard that holds them to one that reads them."""

    source: int
    target: int
    first: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Rule:
    """The factor map of one op.

    Attributes:
        operands: letters of every operand (rank-0 operands are ()).
        results: letters of every result.
        reduce: letter -> kind ("sum", "max", "min", "prod", "and", "or") for letters that appear in operands only; putting a
            mesh axis on such a letter leaves every result that depends on it partial.
        whole: letters that may not be split.
        halo: letter -> operand -> how windows slide over it; splitting it costs an exchange between neighbours.
        prefix: letters along which an element is joined of all up to it; splitting one costs the totals of all shards.
        best: letter -> how many elements along it are chosen; splitting it costs what all shards choose, and the places of that.
        first: letters of operands only of which the first element is all that is read; splitting one sends that to all.
        local: letters that, when split, have every device run the op on its own shards (`emit`), where XLA would move more.
        sizes: letter -> size; needed for letters inside compound dims, others are read from the shapes.
        linear: partial sums of the operands pass through: every operand partial over an axis gives results partial over it.
        begins: where the result is partial, what the operand holds is a part of the sum, and whole itself.
        fusion: how XLA's GPU back end treats the op: "loop" (elementwise-like, fuses with its neighbours), "view" (a bitcast:
            no bytes move), "reduce" (fuses its producers, writes its result), "none" (a kernel of its own).
        flops: floating point operations of the whole op; None means one per element of the largest result.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduce: dict[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    halo: dict[str, dict[int, Halo]] = field(default_factory=dict)
    prefix: frozenset[str] = frozenset()
    best: dict[str, int] = field(default_factory=dict)
    first: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)
    linear: bool = False
    begins: bool = False
    fusion: Fusion = "none"
    flops: float | None = None

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Letters along which shards need something of each other."""
        return *self.halo, *sorted(self.prefix), *self.best, *sorted(self.first)

    @functools.cached_property
    def follows(self) -> bool:
        """Whether the op takes arrays in the layout they have: work within fusions, but for what reads neighbours or looks up."""
        return self.fusion != "none" and not self.halo and not self.looks_up

    @property
    def looks_up(self) -> bool:
        """Whether the op reads a table at any places, which no other operand is split with."""
        table, *others = [frozenset(a for dim in x for a in dim) for x in self.operands] or [frozenset()]
        return self.fusion == "loop" and not self.reduce.keys().isdisjoint(table) and all(table.isdisjoint(x) for x in others)

    def __str__(self) -> str:
        text = ", ".join(map(written, self.operands)) + " -> " + ", ".join(map(written, self.results))
        if self.reduce:
            text += "  reduce " + " ".join(a if k == "sum" else f"{a}={k}" for a, k in self.reduce.items())
        if self.halo:
            text += "  halo " + " ".join(f"{a}={','.join(dict.fromkeys(map(str, h.values())))}" for a, h in self.halo.items())
        if self.prefix:
            text += "  prefix " + " ".join(sorted(self.prefix))
        if self.best:
            text += "  best " + " ".join(a if n == 1 else f"{a}={n}" for a, n in self.best.items())
        if self.first:
            text += "  first " + " ".join(sorted(self.first))
        if self.whole:
            text += "  whole " + " ".join(sorted(self.whole))
        return text + ("  linear" if self.linear else "")


def written(dims: Dims) -> str:
    """One tensor of a pattern as text."""
    return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" if d else "1" for d in dims)


class RuleError(ValueError):
    """A rule that does not fit its op: the pattern, the shapes, what is wrong."""


RULES: dict[str, Callable[..., Rule]] = {}


def rule(*primitives: str, traits: Traits | None = None):
    """Register one rule function for the named primitives, and the traits that all of them have."""

    def register(fn):
        for name in primitives:
            RULES[name] = fn
        if traits is not None:
            declare_traits(primitives, traits)
        return fn

    return register


def letters(x, prefix: str = "") -> Dims:
    """Fresh letters, one per dim of `x`: a, b, c, ... (a1, b1, ... past 26), with a prefix to keep tensors apart."""
    return tuple((f"{prefix}{chr(97 + i % 26)}{i // 26 or ''}",) for i in range(len(x.shape)))


def parse(pattern: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Operands and results of a pattern like "(a b) c, c d -> a (b d)".

    Raises:
        RuleError: when the pattern has no single "->", unbalanced or nested parentheses.
    """

    def tensor(text: str) -> Dims:
        dims, group = [], None
        for token in re.findall(r"[()]|[^\s()]+", text):
            if token == "(" and group is None:
                group = []
            elif token == ")" and group is not None:
                dims.append(tuple(group))
                group = None
            elif token in "()":
                raise RuleError(f"rule {pattern!r}: parentheses in {text.strip()!r} are nested or unbalanced")
            elif group is not None:
                group.append(token)
            else:
                dims.append(() if token == "1" else (token,))
        if group is not None:
            raise RuleError(f"rule {pattern!r}: parentheses in {text.strip()!r} are nested or unbalanced")
        return tuple(dims)

    sides = pattern.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {pattern!r}: needs operands and results separated by one '->', like 'a b, b c -> a c'")
    left, right = (tuple(tensor(t) for t in side.split(",")) if side.strip() else () for side in sides)
    return left, right


def letter_sizes(
    rule: Rule, shapes: tuple[tuple[int, ...], ...], out_shapes: tuple[tuple[int, ...], ...], primitive: str = ""
) -> dict[str, int]:
    """Size of every letter, checked against all shapes it appears in; of a windowed one what divides all its dims.

    Raises:
        RuleError: on a wrong rank or contradicting sizes, naming the primitive, the rule, the shapes and the letter.
    """
    sizes = dict(rule.sizes)

    def fail(why: str, way_out: str):
        op, where = f" of {primitive}" if primitive else "", f"{_shapes(shapes)} -> {_shapes(out_shapes)}"
        raise RuleError(f"rule '{rule}'{op} does not fit {where}: {why}\n  way out: {way_out}")

    tensors = list(zip(rule.operands + rule.results, shapes + out_shapes, strict=False))
    if len(rule.operands) != len(shapes) or len(rule.results) != len(out_shapes):
        fail(f"it names {len(rule.operands)} operands and {len(rule.results)} results", "one of each, a scalar as an empty text")
    for dims, shape in tensors:
        if len(dims) != len(shape):
            why = f"'{written(dims)}' names {len(dims)} dims, {_shapes([shape])} has {len(shape)}"
            fail(why, "a letter for each, or '...' for leading dims of any number")
        for dim, n in zip(dims, shape, strict=True):
            if len(dim) == 1 and dim[0] in rule.halo:
                sizes[dim[0]] = math.gcd(sizes.get(dim[0], 0), n)
            elif len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
                fail(f"letter {dim[0]!r} is both {sizes[dim[0]]} and {n}", "a second letter for one of the two, both in whole=")
    for dims, shape in tensors:
        for dim, n in zip(dims, shape, strict=True):
            unknown = [a for a in dim if a not in sizes]
            if len(unknown) == 1:
                known = math.prod(sizes[a] for a in dim if a in sizes)
                sizes[unknown[0]] = n // known if known else 0
            elif unknown:
                fail(f"sizes of {unknown} in '{written((dim,))}' are not given", "all but one of them in sizes=")
            if dim and (made := math.prod(sizes[a] for a in dim)) != n and dim[0] not in rule.halo:
                fail(f"'{written((dim,))}' is {made}, the dim {n}", "letters whose sizes multiply to the dim's")
    return sizes


def _shapes(shapes) -> str:
    return ", ".join(f"[{','.join(map(str, x))}]" for x in shapes)


def extents(rule: Rule, letter: str, operand: int, ins, outs) -> tuple[int, int]:
    """Sizes of an exchanged letter's dim: in an operand, and where no windows slide."""
    sizes = {}
    for k, (dims, x) in enumerate(zip(rule.operands + rule.results, (*ins, *outs), strict=True)):
        for dim, size in zip(dims, x.shape, strict=True):
            if dim == (letter,):
                sizes[k] = size
    return sizes[operand], next(size for k, size in sizes.items() if k not in rule.halo.get(letter, ()))


KINDS = ("sum", "max", "min", "prod", "and", "or")

WHOLE_SHAPES = ("pallas_call", "ffi_call", "custom_partitioning", "pure_callback", "io_callback")
"""Primitives whose parameters hold the shapes of what they make."""


def register_rule(
    primitive,
    pattern: str,
    *,
    reduce: str | dict[str, str] = "",
    whole: str = "",
    sizes: dict[str, int] | None = None,
    linear: bool = False,
    local: bool = False,
    fusion: Fusion = "none",
    flops: Callable[[dict[str, int]], float] | None = None,
) -> None:
    """Say how an op may be split; it takes the place of the rule the primitive had.

        register_rule("my_matmul", "... d, d f -> ... f", reduce="d", flops=lambda n: 2 * math.prod(n.values()))
        register_rule("my_softmax", "... d -> ... d", whole="d", local=True)
        register_rule("my_max", "a b -> a", reduce="b=max")

    Args:
        primitive: a primitive or its name.
        pattern: operands and results, like "a b, b c -> a c". "..." stands for the same leading dims in every tensor that has
            it; "1" for a dim of size one that belongs to no loop; an empty text for a scalar.
        reduce: letters that are reduced, "b" for a sum, "b=max" for another kind (max, min, prod, and, or), or a dict.
        whole: letters that may not be split.
        sizes: sizes of letters that appear in compound dims only.
        linear: partial sums of all operands give partial sums of the results.
        local: every device runs it on its own shards, where XLA would gather them: what is lowered to a kernel or a foreign call.
        fusion: "loop" if XLA fuses it with its neighbours; "none" for a kernel of its own.
        flops: floating point operations from the size of every letter ("..." letters are "...0", "...1", ...).

    Raises:
        RuleError: when the pattern contradicts itself; when planning, if it does not fit the shapes it meets.

    `shardplan.testing.check_rule` proves it in numbers.
    """
    name = getattr(primitive, "name", primitive)
    left, right = parse(pattern)
    if not isinstance(reduce, dict):
        reduce = dict([*item.split("="), "sum"][:2] for item in reduce.split())
    whole_letters = frozenset(whole.split())

    def fail(why: str, way_out: str):
        raise RuleError(f"rule {pattern!r} for {name}: {why}\n  way out: {way_out}")

    def found(side):
        return [a for dims in side for d in dims for a in d]

    for text, dims in zip(pattern.replace("->", ",").split(","), (*left, *right), strict=False):
        for a in found([dims]):
            if found([dims]).count(a) > 1:
                fail(f"{a!r} stands twice in {text.strip()!r}", "a second letter for one of the two dims, both in whole=")
    for a, kind in reduce.items():
        if a not in found(left):
            fail(f"reduce= names {a!r}, which is in no operand", f"one of {sorted(set(found(left)) - set(found(right)))}")
        if a in found(right):
            fail(f"{a!r} is reduced but stands in a result", "take it out of the results, or out of reduce=")
        if kind not in KINDS:
            fail(f"{a!r} is reduced by {kind!r}", f"one of {', '.join(KINDS)}; any other reduction keeps its letter in whole=")
    if unknown := whole_letters - set(found(left + right)):
        fail(f"whole= names {sorted(unknown)}, which are in no tensor", "letters of the pattern")
    dangling = [a for a in dict.fromkeys(found(left)) if a not in {*found(right), *reduce, *whole_letters}]
    if dangling:
        fail(
            f"{dangling} are in operands only, so a split leaves a partial result of unknown kind",
            "name them in reduce= or whole=",
        )

    if local and name in WHOLE_SHAPES:
        fail("it says the shapes of the whole, so no device can run it on a shard", "a primitive of your own, lowered to it")
    if local and any(len(d) > 1 for dims in (*left, *right) for d in dims):
        fail("on a device's own shards every dim has to be one letter", "a reshape around the op")
    if local and (others := [a for a, kind in reduce.items() if kind != "sum"]):
        fail(f"on a device's own shards {others} can only be summed", "these letters in whole=")

    def user(*ins, out, **_):
        def expand(dims: Dims, x) -> Dims:
            extra = len(x.shape) - len(dims) + 1
            dots = tuple((f"...{i}",) for i in range(extra))
            return tuple(e for d in dims for e in (dots if d == ("...",) else (d,)))

        if (len(ins), len(out)) != (len(left), len(right)):
            fail(
                f"it names {len(left)} operands and {len(right)} results, the op has {len(ins)} and {len(out)}"
                f": {_shapes(x.shape for x in ins)} -> {_shapes(x.shape for x in out)}",
                "a tensor for each, separated by commas; an empty text for a scalar",
            )
        operands = tuple(expand(d, x) for d, x in zip(left, ins, strict=True))
        results = tuple(expand(d, x) for d, x in zip(right, out, strict=True))
        dots = frozenset(a for a in found(operands + results) if a.startswith("...")) if "..." in whole_letters else frozenset()
        kept = whole_letters - {"..."} | dots
        own = frozenset(found(operands)) - kept if local else frozenset()
        made = Rule(operands, results, dict(reduce), kept, local=own, sizes=dict(sizes or {}), linear=linear, fusion=fusion)
        shapes = tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in out)
        return replace(made, flops=counted(flops, letter_sizes(made, *shapes, name))) if flops else made

    def counted(flops, of: Mapping[str, int]) -> float:
        way_out = f"a number from the sizes of the letters, here {dict(of)}"
        try:
            count = float(flops(of))
        except Exception as error:
            raise RuleError(f"rule {pattern!r} for {name}: flops= raised {error!r}\n  way out: {way_out}") from error
        if not 0 <= count < float("inf"):
            fail(f"flops= says {count}", way_out)
        return count

    user.registered = True
    RULES[name] = user


def is_registered(primitive: str) -> bool:
    """Whether a primitive's rule is the user's: one that does not fit is an error, not an op kept whole."""
    return getattr(RULES.get(primitive), "registered", False)
