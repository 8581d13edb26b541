"""Rules of the user's own: `register_rule` checks a pattern once and turns it into a rule function.

register_rule("my_matmul", "... d, d f -> ... f", reduce="d", flops=lambda n: 2 * math.prod(n.values()))
register_rule("ffi_call", "... d -> ... d", target="my_softmax", replicated="d")
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import REDUCTIONS
from shardplan.strategies.rule import RULES, Dims, Fusion, Rule, RuleError, factor_sizes, flat_factors, format_shapes

Attributes = Callable[[dict[str, Any], dict[str, int]], Mapping[str, Any]]
"""(Attributes of a foreign call, sizes of its factors on one device) -> attributes of that device's call."""


def register_rule(
    primitive,
    pattern: str,
    *,
    target: str | None = None,
    reduce: str | dict[str, str] = "",
    replicated: str = "",
    sizes: dict[str, int] | None = None,
    linear: bool = False,
    shard_local: bool = False,
    fusion: Fusion = "none",
    flops: Callable[[dict[str, int]], float] | None = None,
    attributes: Attributes | None = None,
) -> None:
    """Say how an op may be sharded; it takes the place of the rule the primitive, or the target, had.

        register_rule("my_softmax", "... d -> ... d", replicated="d", shard_local=True)
        register_rule("my_max", "a b -> a", reduce="b=max")
        register_rule("ffi_call", "... d, d -> ... d", target="my_norm", replicated="d")
        register_rule("ffi_call", "... d, ... d, d -> ... d, d", target="my_norm_backward", replicated="d", reduce="...")

    Args:
        primitive: a primitive or its name.
        pattern: operands and results, like "a b, b c -> a c". "..." stands for leading dims, the last of them the same in every
            tensor that has it, as numpy broadcasts; "1" for a dim of size one that belongs to no loop; an empty text for a scalar.
        target: of a `jax.ffi.ffi_call`, the name of its target. Every device makes the call on its own shards.
        reduce: reduction factors, "b" for a sum, "b=max" for another kind (max, min, prod, and, or), or a dict. Results that lack
            the factor are reduced.
        replicated: factors that need replication.
        sizes: sizes of factors that appear in compound dims only.
        linear: partial sums of all operands give partial sums of the results.
        shard_local: every device runs it on its own shards, where XLA would gather them: for what is lowered to a kernel or a
            foreign call.
        fusion: "loop" if XLA fuses it with its neighbours; "none" for a kernel of its own.
        flops: floating point operations from the size of every factor ("..." factors are "...0", "...1", ...).
        attributes: of a `ffi_call`, where attributes depend on shapes: those of a device's call, from all attributes of the call and
            the sizes of the factors on that device.

    Raises:
        RuleError: when the pattern contradicts itself; when planning, if it does not fit the shapes it meets.

    `shardplan.testing.check_rule` proves it in numbers.
    """
    name = getattr(primitive, "name", primitive)
    if not isinstance(name, str):
        raise RuleError(f"register_rule() takes a primitive or its name, not {primitive!r}.\n  way out: such as jax.lax.sin_p or 'sin'")
    if not isinstance(reduce, dict):
        reduce = dict([*item.split("="), "sum"][:2] for item in reduce.split())
    known, (left, right) = dict(sizes or {}), parse(pattern)
    template = Rule(left, right or ((),), dict(reduce), frozenset(replicated.split()), sizes=known, linear=linear, fusion=fusion)
    found = UserRule(target or name, pattern, template, shard_local or target is not None, flops, attributes)
    found.check(name, target)
    if target is None:
        RULES[name] = found
    else:
        TARGETS[target] = found


@dataclass(frozen=True, eq=False)
class UserRule:
    """A rule function made from a pattern; called with the equation, like those of `rules/`. The template has "..." as written."""

    name: str
    pattern: str
    template: Rule
    shard_local: bool
    flops: Callable[[dict[str, int]], float] | None
    attributes: Attributes | None = None

    def check(self, primitive: str, target: str | None) -> None:
        """Raise a RuleError if it contradicts itself, or what is known of the primitive."""
        self._check_factors()
        if target is not None:
            self._check_target(primitive)
        elif self.attributes is not None:
            self._fail("attributes= are those of a foreign call", 'target="name of its target"')
        elif self.shard_local and traits_of(primitive).shapes_in_params:
            named = 'target="name of its target"' if traits_of(primitive).foreign else "a primitive of your own, lowered to it"
            self._fail("it says the global shapes, so no device can run it on a shard", named)
        if self.shard_local:
            self._check_kinds()

    def __call__(self, *ins, out, **_) -> Rule:
        """The rule of an equation."""
        template, shapes = self.template, (tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in out))
        left, right = template.operands, template.results
        if (len(ins), len(out)) != (len(left), len(right)):
            met = f"the op has {len(ins)} and {len(out)}: {format_shapes(shapes[0])} -> {format_shapes(shapes[1])}"
            why = f"it names {len(left)} operands and {len(right)} results, {met}"
            self._fail(why, "a tensor for each, separated by commas; an empty text for a scalar")
        leading = _leading((*left, *right), (*shapes[0], *shapes[1]))
        operands, results = (
            tuple(_expand(dims, shape, leading, stretched) for dims, shape in zip(of, those, strict=True))
            for of, those, stretched in ((left, shapes[0], True), (right, shapes[1], False))
        )
        for k, (dims, made) in enumerate(zip(right, results, strict=True)):
            if ("...",) in dims and (n := len(made) - len(dims) + 1) < len(leading):
                shown = f"{format_shapes(shapes[0])} -> {format_shapes(shapes[1])}"
                why = f"'...' stands for {n} dims in result {k} and for {len(leading)} in another tensor: {shown}"
                self._fail(why, "a result with all of them, or without '...'")
        named = list(dict.fromkeys(flat_factors(*operands, *results)))
        replicated = frozenset(_named(template.replicated, named))
        reduce = {b: kind for a, kind in template.reduce.items() for b in _named([a], named)}
        own: frozenset[str] = frozenset()
        if self.shard_local:  # a device cannot know its part of what only results have
            replicated |= set(flat_factors(*results)) - set(flat_factors(*operands))
            own = frozenset(flat_factors(*operands)) - replicated
        found = {"operands": operands, "results": results, "reduce": reduce, "replicated": replicated, "shard_local": own}
        rule = replace(template, **found)
        sizes = factor_sizes(rule, *shapes, self.name) if self.flops else {}
        return replace(rule, flops=self._count_flops(sizes)) if self.flops else rule

    def _fail(self, why: str, way_out: str):
        raise RuleError(f"rule {self.pattern!r} for {self.name}: {why}\n  way out: {way_out}")

    def _check_factors(self) -> None:
        rule = self.template
        left, right = flat_factors(*rule.operands), flat_factors(*rule.results)
        for text, dims in zip(self.pattern.replace("->", ",").split(","), rule.operands + rule.results, strict=False):
            if twice := [a for a, times in Counter(flat_factors(dims)).items() if times > 1]:
                why = f"{twice[0]!r} stands twice in {text.strip()!r}"
                self._fail(why, "a second factor for one of the two dims, both in replicated=")
        for a, kind in rule.reduce.items():
            if a not in left:
                self._fail(f"reduce= names {a!r}, which is in no operand", f"one of {sorted(set(left) - set(right))}")
            if all(a in flat_factors(dims) for dims in rule.results):
                where = "a result" if len(rule.results) == 1 else "every result"
                self._fail(f"{a!r} is reduced but stands in {where}", "take it out of the results, or out of reduce=")
            if kind not in REDUCTIONS:
                way_out = f"one of {', '.join(REDUCTIONS)}; any other reduction keeps its factor in replicated="
                self._fail(f"{a!r} is reduced by {kind!r}", way_out)
        if unknown := rule.replicated - set(left + right):
            self._fail(f"replicated= names {sorted(unknown)}, which are in no tensor", "factors of the pattern")
        named = {*rule.reduce, *rule.replicated}
        if dangling := [a for a in dict.fromkeys(left) if a not in {*right, *named}]:
            why = f"{dangling} are in operands only, so sharding leaves a partial result of unknown kind"
            self._fail(why, "name them in reduce= or replicated=")
        for k, dims in enumerate(rule.results):
            if lacking := [a for a in dict.fromkeys(left) if a not in {*flat_factors(dims), *named}]:
                why = f"{lacking} are not in result {k}, so sharding leaves a partial one of unknown kind"
                self._fail(why, "name them in reduce=, which reduces results that lack them, or in replicated=")

    def _check_target(self, primitive: str) -> None:
        if not traits_of(primitive).foreign:
            self._fail(f"{primitive} has no target", 'register_rule("ffi_call", ..., target=...), or no target=')
        if self.template.linear or self.template.fusion != "none":
            self._fail("a foreign call is a kernel of its own, which reads complete operands", "neither linear= nor fusion=")

    def _check_kinds(self) -> None:
        kinds = dict.fromkeys(self.template.reduce.values())
        if len(kinds) > 1:
            why = f"on a device's own shards partial results are of one kind, here of {', '.join(kinds)}"
            self._fail(why, "factors of one kind in reduce=, the others in replicated=")

    def _count_flops(self, sizes: dict[str, int]) -> float:
        way_out = f"a number from the sizes of the factors, here {sizes}"
        assert self.flops is not None
        try:
            count = float(self.flops(sizes))
        except Exception as error:
            raise RuleError(f"rule {self.pattern!r} for {self.name}: flops= raised {error!r}\n  way out: {way_out}") from error
        if not 0 <= count < float("inf"):
            self._fail(f"flops= says {count}", way_out)
        return count


TARGETS: dict[str, UserRule] = {}
"""Target of a foreign call -> its rule."""


def is_registered(primitive: str, params: Mapping[str, Any] | None = None) -> bool:
    """Whether an op's rule is the user's: one that does not fit is an error, not an op kept replicated."""
    foreign = traits_of(primitive).foreign and (params or {}).get("target_name") in TARGETS
    return foreign or isinstance(RULES.get(primitive), UserRule)


def registered_text() -> str:
    """All rules of the user's as text: what plans depend on apart from the program."""
    users = [(name, found) for name, found in RULES.items() if isinstance(found, UserRule)]
    pairs = sorted([*users, *TARGETS.items()], key=lambda x: (x[0], x[1].pattern))
    return "\n".join(f"{name}: {x.pattern} {x.template} {x.shard_local} {_code_text(x.flops)}" for name, x in pairs)


def _code_text(function: Callable | None) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_code.hex()} {code.co_consts} {code.co_names}" if code else getattr(function, "__qualname__", "")


def parse(pattern: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Operands and results of a pattern like "(a b) c, c d -> a (b d)".

    Raises:
        RuleError: when the pattern has no single "->", unbalanced or nested parentheses.
    """

    def tensor(text: str) -> Dims:
        if re.search(r"[()]", re.sub(r"\([^()]*\)", "", text)):
            raise RuleError(f"rule {pattern!r}: parentheses in {text.strip()!r} are nested or unbalanced")
        dims = re.findall(r"\(([^()]*)\)|([^\s()]+)", text)
        return tuple(() if factor == "1" else (factor,) if factor else tuple(group.split()) for group, factor in dims)

    sides = pattern.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {pattern!r}: needs operands and results separated by one '->', like 'a b, b c -> a c'")
    left, right = (tuple(tensor(t) for t in side.split(",")) if side.strip() else () for side in sides)
    return left, right


def _leading(tensors: tuple[Dims, ...], shapes) -> list[int]:
    """The sizes of the dims that "..." stands for: per dim of the tensor that has most, the largest."""
    pairs = ((dims, shape) for dims, shape in zip(tensors, shapes, strict=True) if ("...",) in dims)
    found = [shape[(at := dims.index(("...",))) : at + max(0, len(shape) - len(dims) + 1)] for dims, shape in pairs]
    most = max(map(len, found), default=0)
    return [max(x[k - most] for x in found if len(x) >= most - k) for k in range(most)]


def _expand(dims: Dims, shape: tuple[int, ...], leading: list[int], stretched: bool) -> Dims:
    """The dims with "..." replaced by as many factors as the shape has more, the last of all; a stretched dim of one has none."""
    if ("...",) not in dims:
        return dims
    at, n = dims.index(("...",)), max(0, len(shape) - len(dims) + 1)
    numbers = range(len(leading) - n, len(leading))
    own = tuple(() if stretched and shape[at + i] == 1 < leading[k] else (f"...{k}",) for i, k in enumerate(numbers))
    return dims[:at] + own + dims[at + 1 :]


def _named(template, factors: list[str]) -> list[str]:
    """Factors that a template names, "..." for all leading ones."""
    return [a for t in template for a in (factors if t == "..." else [t]) if t != "..." or a.startswith("...")]
