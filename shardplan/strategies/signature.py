"""One rule and one list of strategies per op signature: ops of one primitive, parameters and avals, which repeated layers share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from shardplan._jax import shard_map_specs
from shardplan.ir.graph import Graph, Op, Path
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import AxisFactors, OpStrategies, enumerate_strategies
from shardplan.strategies.rule import Rule, RuleError, factor_sizes, factors, flat_factors
from shardplan.strategies.rules import rule_for
from shardplan.strategies.uneven import uneven_factors

REPLICATED_DTYPES = ("int2", "uint2")
"""Dtypes of which XLA has no reductions over devices, and whose gathers write past their buffers (jax 0.10.2)."""


@dataclass(frozen=True, eq=False)
class Signature:
    """What ops of one signature share: a rule, `known` if it is one for their primitive; `sums` if the result may be a partial sum."""

    number: int
    rule: Rule
    known: bool
    sums: bool
    strategies: OpStrategies


class Signatures:
    """The signatures of ops on a mesh, each made once."""

    def __init__(self, mesh: MeshShape):
        self.mesh = mesh
        self.numbers = count()
        self.sized_rules: dict[Hashable, tuple[Rule, bool, dict[str, int], frozenset[str], dict[Hashable, Signature]]] = {}

    def read(self, graph: Graph, within: Mapping[Path, AxisFactors], others: AxisFactors | None) -> list[Signature]:
        """Per op, in order.

        Args:
            graph: the step.
            within: by path of an op, what is decided on each axis (`enumerate_strategies`).
            others: the same for all ops that are not in `within`.
        """
        out: list[Signature] = []
        for op in graph.ops:
            sums = bool(op.inputs) and all(v is not None and out[graph.values[v].producer[0]].sums for v in op.inputs)
            try:
                out.append(self._signature(op, sums, within.get(op.path, others)))
            except RuleError as error:
                raise RuleError(_at_source(str(error), op)) from error
        return out

    def _signature(self, op: Op, operands_sum: bool, within: AxisFactors | None) -> Signature:
        key = _key(op)
        if key not in self.sized_rules:
            self.sized_rules[key] = *_sized_rule(op), {}
        rule, known, sizes, uneven, signatures = self.sized_rules[key]
        linear = (rule.linear or op.accumulates) and (operands_sum or rule.accumulator_init)
        if (linear, within) not in signatures:
            pinned = _shard_map_strategies(op, self.mesh)
            strategies = pinned or enumerate_strategies(rule, sizes, self.mesh, linear, within, uneven)
            sums = linear or (not op.traits.border and bool(rule.reduce))
            signatures[linear, within] = Signature(next(self.numbers), rule, known or pinned is not None, sums, strategies)
        return signatures[linear, within]


def _at_source(text: str, op: Op) -> str:
    """An error's text with the line of the op that it is about."""
    what, *rest = text.split("\n")
    return "\n".join([what, f"  at {op.source}", *rest]) if op.source.file else text


def _sized_rule(op: Op) -> tuple[Rule, bool, dict[str, int], frozenset[str]]:
    """The rule, whether it is one for the primitive, the sizes of its factors, and which of these may be sharded unevenly."""
    border = _border_rule(op)
    rule, known = (border, True) if border else rule_for(op.primitive, op.ins, op.outs, op.params)
    ins, outs = (tuple(tuple(getattr(x, "shape", ())) for x in xs) for xs in (op.ins, op.outs))
    sizes = factor_sizes(rule, ins, outs, op.primitive)
    made = (shape for dims, shape in zip(rule.results, outs, strict=True) if not rule.replicated.issuperset(flat_factors(dims)))
    empty = not op.traits.step_input and any(0 in shape for shape in made)  # XLA does not shard it
    if empty or any(str(getattr(x, "dtype", "")) in REPLICATED_DTYPES for x in (*op.ins, *op.outs)):
        rule = replace(rule, replicated=frozenset(sizes), linear=False)
    elif not op.traits.step_input and any(0 in shape for shape in ins):
        dims = (dim for of, shape in zip(rule.operands, ins, strict=True) for dim, n in zip(of, shape, strict=True) if not n)
        rule = replace(rule, replicated=rule.replicated.union(*dims))
    return rule, known, sizes, uneven_factors(rule, op.traits, op.padded)


def _border_rule(op: Op) -> Rule | None:
    """The rule of a border op: every dim passes through, the trip dim of a loop's stacked arrays needs replication; else None."""
    trip = ("trip",)
    match op.primitive:
        case "arg":
            return Rule((), (factors(op.outs[0]),))
        case "const":
            return Rule((), (a := factors(op.outs[0]),), replicated=frozenset(flat_factors(a)))
        case "branch_index":
            return Rule(((),), ())
        case "loop_slice":
            return Rule(((trip, *(a := factors(op.outs[0]))),), (a,), replicated=frozenset(trip), fusion="loop")
        case "loop_stack":
            return Rule((a := factors(op.ins[0]),), ((trip, *a),), replicated=frozenset(trip))
    if not op.traits.border:
        return None
    a = factors(op.outs[0])
    return Rule((a,) * len(op.ins), (a,), accumulator_init=op.accumulates and op.traits.loop_carry, fusion="view")


def _shard_map_strategies(op: Op, mesh: MeshShape) -> OpStrategies | None:
    """The one strategy of a `shard_map`, whose specs are pins; None for other ops, and where specs name axes the mesh lacks."""
    specs = shard_map_specs(op.params) if op.traits.layouts_in_params else None
    if specs is None:
        return None
    tensors = [Layout.from_spec(spec, len(aval.shape)) for spec, aval in zip(specs[0] + specs[1], (*op.ins, *op.outs), strict=True)]
    named = {axis for layout in tensors for axis in layout.sharded_axes}
    if not named <= set(mesh.axes):
        return None
    used = [(Layout(tuple(tuple(a for a in dim if mesh.size(a) > 1) for dim in layout.dims)),) for layout in tensors]
    operands, results = tuple(used[: len(op.ins)]), tuple(used[len(op.ins) :])
    return OpStrategies.of(((None,) * len(mesh.axes),), (mesh.axes,), operands, results, np.array([1.0 / mesh.size(*named)]), mesh)


def _key(op: Op) -> Hashable:
    """All that rules look at."""

    def aval(x):
        return tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)

    literal = tuple(v is None for v in op.inputs)
    if op.traits.shapes_in_params:  # kernels: equal ones of two layers are two programs
        params = repr(rule_for(op.primitive, op.ins, op.outs, op.params))
    else:
        params = tuple((name, _hashable(value)) for name, value in sorted(op.params.items()))
    return op.primitive, params, op.is_follower, op.accumulates, op.padded, tuple(map(aval, op.ins)), tuple(map(aval, op.outs)), literal


def _hashable(value) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
