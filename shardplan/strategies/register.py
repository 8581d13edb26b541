"""Rules of the user's own: `register_rule` checks a pattern once and turns it into a rule function.

register_rule("my_matmul", "... d, d f -> ... f", reduce="d", flops=lambda n: 2 * math.prod(n.values()))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import REDUCTIONS
from shardplan.strategies.rule import RULES, Dims, Fusion, Rule, RuleError, factor_sizes, flat_factors, format_shapes


def register_rule(
    primitive,
    pattern: str,
    *,
    reduce: str | dict[str, str] = "",
    replicated: str = "",
    sizes: dict[str, int] | None = None,
    linear: bool = False,
    shard_local: bool = False,
    fusion: Fusion = "none",
    flops: Callable[[dict[str, int]], float] | None = None,
) -> None:
    """Say how an op may be sharded; it takes the place of the rule the primitive had.

        register_rule("my_softmax", "... d -> ... d", replicated="d", shard_local=True)
        register_rule("my_max", "a b -> a", reduce="b=max")

    Args:
        primitive: a primitive or its name.
        pattern: operands and results, like "a b, b c -> a c". "..." stands for the same leading dims in every tensor that has
            it; "1" for a dim of size one that belongs to no loop; an empty text for a scalar.
        reduce: reduction factors, "b" for a sum, "b=max" for another kind (max, min, prod, and, or), or a dict.
        replicated: factors that need replication.
        sizes: sizes of factors that appear in compound dims only.
        linear: partial sums of all operands give partial sums of the results.
        shard_local: every device runs it on its own shards, where XLA would gather them: for what is lowered to a kernel or a
            foreign call.
        fusion: "loop" if XLA fuses it with its neighbours; "none" for a kernel of its own.
        flops: floating point operations from the size of every factor ("..." factors are "...0", "...1", ...).

    Raises:
        RuleError: when the pattern contradicts itself; when planning, if it does not fit the shapes it meets.

    `shardplan.testing.check_rule` proves it in numbers.
    """
    name = getattr(primitive, "name", primitive)
    if not isinstance(reduce, dict):
        reduce = dict([*item.split("="), "sum"][:2] for item in reduce.split())
    known = dict(sizes or {})
    template = Rule(*parse(pattern), dict(reduce), frozenset(replicated.split()), sizes=known, linear=linear, fusion=fusion)
    RULES[name] = UserRule(name, pattern, template, shard_local, flops)


@dataclass(frozen=True, eq=False)
class UserRule:
    """A rule function made from a pattern; called with the equation, like those of `rules/`. The template has "..." as written."""

    name: str
    pattern: str
    template: Rule
    shard_local: bool
    flops: Callable[[dict[str, int]], float] | None

    def __post_init__(self):
        self._check_factors()
        if self.shard_local:
            self._check_shard_local()

    def __call__(self, *ins, out, **_) -> Rule:
        """The rule of an equation."""
        template, shapes = self.template, (tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in out))
        left, right = template.operands, template.results
        if (len(ins), len(out)) != (len(left), len(right)):
            met = f"the op has {len(ins)} and {len(out)}: {format_shapes(shapes[0])} -> {format_shapes(shapes[1])}"
            why = f"it names {len(left)} operands and {len(right)} results, {met}"
            self._fail(why, "a tensor for each, separated by commas; an empty text for a scalar")
        operands, results = (tuple(map(_expand, *sides)) for sides in zip((left, right), shapes, strict=True))
        replicated = template.replicated
        if "..." in replicated:
            replicated = replicated - {"..."} | {a for a in flat_factors(*operands, *results) if a.startswith("...")}
        own = frozenset(flat_factors(*operands)) - replicated if self.shard_local else frozenset()
        rule = replace(template, operands=operands, results=results, replicated=replicated, shard_local=own)
        return replace(rule, flops=self._count_flops(factor_sizes(rule, *shapes, self.name))) if self.flops else rule

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
            if a in right:
                self._fail(f"{a!r} is reduced but stands in a result", "take it out of the results, or out of reduce=")
            if kind not in REDUCTIONS:
                way_out = f"one of {', '.join(REDUCTIONS)}; any other reduction keeps its factor in replicated="
                self._fail(f"{a!r} is reduced by {kind!r}", way_out)
        if unknown := rule.replicated - set(left + right):
            self._fail(f"replicated= names {sorted(unknown)}, which are in no tensor", "factors of the pattern")
        if dangling := [a for a in dict.fromkeys(left) if a not in {*right, *rule.reduce, *rule.replicated}]:
            why = f"{dangling} are in operands only, so sharding leaves a partial result of unknown kind"
            self._fail(why, "name them in reduce= or replicated=")

    def _check_shard_local(self) -> None:
        rule = self.template
        if traits_of(self.name).shapes_in_params:
            self._fail("it says the global shapes, so no device can run it on a shard", "a primitive of your own, lowered to it")
        if any(len(d) > 1 for dims in rule.operands + rule.results for d in dims):
            self._fail("on a device's own shards every dim has to be one factor", "a reshape around the op")
        if others := [a for a, kind in rule.reduce.items() if kind != "sum"]:
            self._fail(f"on a device's own shards {others} can only be summed", "these factors in replicated=")

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


def is_registered(primitive: str) -> bool:
    """Whether a primitive's rule is the user's: one that does not fit is an error, not an op kept replicated."""
    return isinstance(RULES.get(primitive), UserRule)


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


def _expand(dims: Dims, shape: tuple[int, ...]) -> Dims:
    """The dims with "..." replaced by as many leading factors as the shape has more."""
    leading = tuple((f"...{i}",) for i in range(len(shape) - len(dims) + 1))
    return tuple(e for d in dims for e in (leading if d == ("...",) else (d,)))
