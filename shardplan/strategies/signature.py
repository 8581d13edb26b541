"""One rule and one list of strategies per op signature: ops of one primitive, parameters and avals, which repeated layers share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan._jax import shard_map_specs
from shardplan.ir.graph import Graph, Op, Path
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import OpStrategies, enumerate_strategies, given_strategies
from shardplan.strategies.rule import Rule, factor_sizes
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.border import border_rule

REPLICATED_DTYPES = ("int2", "uint2")
"""Dtypes of which XLA has no reductions over devices, and whose gathers write past their buffers (jax 0.10.2)."""


@dataclass(frozen=True, eq=False)
class Signature:
    """What ops of one signature share.

    Attributes:
        number: unique.
        rule: their rule.
        known: whether it is one for their primitive.
        sums: whether the result may be a partial sum.
        strategies: what they may do.
    """

    number: int
    rule: Rule
    known: bool
    sums: bool
    strategies: OpStrategies


@dataclass(frozen=True, eq=False)
class _SizedRule:
    """A rule, whether it is one for the primitive, and the sizes of its factors."""

    rule: Rule
    known: bool
    sizes: dict[str, int]


class Signatures:
    """The signatures of ops on a mesh, each made once."""

    def __init__(self, mesh: MeshShape):
        self.mesh = mesh
        self.rules: dict[Hashable, _SizedRule] = {}
        self.signatures: dict[Hashable, Signature] = {}

    def read(self, graph: Graph, within: Mapping[Path, Sequence[str | None]], others: Sequence[str | None] | None) -> list[Signature]:
        """Per op, in order.

        Args:
            graph: the step.
            within: by path of an op, what is decided on each axis (`enumerate_strategies`).
            others: the same for all ops that are not in `within`.
        """
        out: list[Signature] = []
        for op in graph.ops:
            sums = bool(op.inputs) and all(v is not None and out[graph.values[v].producer[0]].sums for v in op.inputs)
            out.append(self._signature(op, sums, within.get(op.path, others)))
        return out

    def _signature(self, op: Op, operands_sum: bool, within: Sequence[str | None] | None) -> Signature:
        key = _key(op)
        if (sized := self.rules.get(key)) is None:
            sized = self.rules[key] = _sized_rule(op)
        rule = sized.rule
        linear = (rule.linear or op.accumulates) and (operands_sum or rule.accumulator_init)
        same = sized, linear, within
        if (found := self.signatures.get(same)) is None:
            given = _shard_map_strategies(op, self.mesh)
            strategies = given or enumerate_strategies(rule, sized.sizes, self.mesh, linear, within)
            sums, known = linear or (not op.traits.border and bool(rule.reduce)), sized.known or given is not None
            found = self.signatures[same] = Signature(len(self.signatures), rule, known, sums, strategies)
        return found


def _sized_rule(op: Op) -> _SizedRule:
    border = border_rule(op)
    rule, known = (border, True) if border else rule_for(op.primitive, op.ins, op.outs, op.params)
    ins, outs = (tuple(tuple(getattr(x, "shape", ())) for x in xs) for xs in (op.ins, op.outs))
    sizes = factor_sizes(rule, ins, outs, op.primitive)
    empty = not op.traits.step_input and any(0 in shape for shape in (*ins, *outs))  # XLA does not shard it
    if empty or any(str(getattr(x, "dtype", "")) in REPLICATED_DTYPES for x in (*op.ins, *op.outs)):
        rule = replace(rule, replicated=frozenset(sizes), linear=False)
    return _SizedRule(rule, known, sizes)


def _shard_map_strategies(op: Op, mesh: MeshShape) -> OpStrategies | None:
    """The one strategy of a `shard_map`: its specs are pins."""
    specs = shard_map_specs(op.params) if op.traits.layouts_in_params else None
    if specs is None:
        return None

    def layouts(specs, avals):
        return [Layout.from_spec(spec, len(aval.shape)) for spec, aval in zip(specs, avals, strict=True)]

    return given_strategies(layouts(specs[0], op.ins), layouts(specs[1], op.outs), mesh)


def _key(op: Op) -> Hashable:
    """All that rules look at."""

    def aval(x):
        return tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)

    literal = tuple(v is None for v in op.inputs)
    flags = op.is_follower, op.accumulates
    return op.primitive, _hashable(op.params), flags, tuple(map(aval, op.ins)), tuple(map(aval, op.outs)), literal


def _hashable(params: Mapping) -> Hashable:
    out = []
    for name, value in sorted(params.items()):
        try:
            hash(value)
            out.append((name, value))
        except TypeError:
            out.append((name, repr(value)))
    return tuple(out)
