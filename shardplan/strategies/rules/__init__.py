"""The rule of every primitive, by family; importing this package fills `RULES`.

>>> rule, known = rule_for("neg", (x,), (x,), {})
"""

from __future__ import annotations

from shardplan.ir.traits import Traits, declare_traits

from ..register import is_registered
from ..rule import RULES, Rule, factor_sizes, factors
from . import elementwise, index, linalg, linear, random, reduce, shape, window  # noqa: F401

declare_traits(("pallas_call", "ffi_call", "custom_partitioning", "pure_callback", "io_callback"), Traits(shapes_in_params=True))
declare_traits(("shard_map",), Traits(layouts_in_params=True))


def replicated_rule(ins, outs) -> Rule:
    """Nothing may be split."""
    left, right = (tuple(factors(x, f"{side}{i}_") for i, x in enumerate(xs)) for side, xs in (("x", ins), ("y", outs)))
    return Rule(left, right, replicated=frozenset(a for x in left + right for d in x for a in d))


def rule_for(primitive: str, ins, outs, params, strict: bool = False) -> tuple[Rule, bool]:
    """The rule of one equation and whether it is known; an op without a rule that fits is kept whole.

    Args:
        primitive: its name.
        ins: avals of the operands, anything with `.shape` and `.dtype`.
        outs: avals of the results.
        params: the equation's params.
        strict: raise where a rule exists and fails, instead of keeping the op whole.
    """
    if primitive not in RULES:
        return replicated_rule(ins, outs), False
    try:
        found = RULES[primitive](*ins, out=tuple(outs), **params)
        factor_sizes(found, tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in outs), primitive)
        return found, True
    except Exception:  # a parameter of a future jax must cost speed, not the run
        if strict or is_registered(primitive):
            raise
        return replicated_rule(ins, outs), False
