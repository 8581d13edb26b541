"""Which factors of an op may be sharded in unequal blocks: XLA's partitioner fills these up to one size, and masks what it filled in.

    dot_general   61 of a on 8 devices      blocks of 8 rows, the last has 5: 64 rows of work
    reduce_max    197 of b on 4 devices     blocks of 50; what is filled in counts as -inf, so the maxima are right

XLA masks operands of sums, products and other reductions with the neutral element, lookups and updates by indices. Equal blocks are
needed by ops that every device runs on its own shards, by factors inside compound dims, by factors along which shards exchange
something, and at the ends of the step, where JAX refuses others, but for state that is held padded (`plan/padded.py`).

Facts: uneven-blocks-are-masked, uneven-sum-is-all-reduced.
"""

from __future__ import annotations

from shardplan.ir.traits import Traits
from shardplan.strategies.rule import Rule

FUSIONS = ("loop", "view", "reduce")
"""Kinds of ops (`Rule.fusion`) whose blocks XLA fills up; of others, products and scatters."""


def uneven_factors(rule: Rule, traits: Traits, padded: bool = False) -> frozenset[str]:
    """The factors of an op that may be sharded unevenly.

    Args:
        rule: the op's rule.
        traits: of its primitive.
        padded: whether it is an end of the step where the array may be held padded.
    """
    pointwise = rule.fusion in FUSIONS and not rule.scan and not rule.arg_reduce and not rule.head
    adds = traits.scatter == "add" and not rule.shard_local  # of several windows
    fills_up = pointwise or traits.matmul or adds or traits.border
    if (traits.endpoint and not padded) or traits.runs_on_shards or traits.convolution or not fills_up:
        return frozenset()
    dims = {dim for tensor in rule.operands + rule.results for dim in tensor}
    compound = {a for dim in dims if len(dim) > 1 for a in dim}
    return frozenset(a for dim in dims for a in dim) - compound - rule.replicated - rule.shard_local - rule.halo.keys()
