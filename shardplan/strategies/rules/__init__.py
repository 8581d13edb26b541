"""The rule of every primitive, by family; importing this package fills `RULES` and `TRAITS`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from shardplan.ir.traits import Traits, declare_traits
from shardplan.strategies.register import is_registered
from shardplan.strategies.rule import RULES, Rule, RuleError, factor_sizes, replicated_rule
from shardplan.strategies.rules import (  # noqa: F401
    attention,
    elementwise,
    foreign,
    index,
    kernel,
    linalg,
    linear,
    partitioned,
    random,
    reduce,
    shape,
    window,
)

declare_traits(("pure_callback", "io_callback"), Traits(shapes_in_params=True))
declare_traits(("shard_map",), Traits(layouts_in_params=True))


def rule_for(primitive: str, ins, outs, params, strict: bool = False) -> tuple[Rule, bool]:
    """The rule of one equation and whether it is known; an op without a rule that fits is kept replicated.

    Args:
        primitive: its name.
        ins, outs: avals of operands and results, anything with `.shape` and `.dtype`.
        params: the equation's params.
        strict: raise where a rule exists and does not fit, instead of keeping the op replicated.

    Raises:
        RuleError: a rule of the user's, or with `strict` any rule, does not fit the equation.
    """
    try:
        if primitive in RULES:
            rule = _fitted(primitive, RULES[primitive], ins, tuple(outs), params)
            return rule, not rule.unsharded
    except RuleError:  # a parameter of a future jax must cost speed, not the run
        if strict or is_registered(primitive, params):
            raise
    return replicated_rule(ins, outs), False


def _fitted(primitive: str, function: Callable[..., Rule], ins, outs, params) -> Rule:
    try:
        _signature(function).bind(*ins, out=outs, **params)
    except TypeError as error:
        raise RuleError(f"the rule of {primitive} does not take the equation's operands and parameters: {error}") from None
    rule = function(*ins, out=outs, **params)
    factor_sizes(rule, tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in outs), primitive)
    return rule


_signature = functools.cache(inspect.signature)
