"""How a `custom_partitioning` call may be sharded: as its Shardy rule says, along the factors that its `partition` really serves.

    sharding_rule="... i, i j -> ... j", reduction_factors=("i",)        ...0 i, i j -> ...0 j    replicated i

Every factor is asked for alone: `partition` has to answer with the shardings it was asked for, and its `lower_fn` has to take shards
to shards, without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardplan import _jax_kernels
from shardplan.ir.traits import Traits
from shardplan.strategies.kernel.count import program_flops
from shardplan.strategies.rule import Dims, Rule, flat_factors, rule
from shardplan.strategies.rules.kernel import unsharded_rule


@rule(traits=Traits(shapes_in_params=True))
def custom_partitioning(*ins, out, **params):
    if params["sharding_rule"] is None:
        return unsharded_rule(ins, out, "it has no sharding_rule; its def_partition takes one")
    try:
        found = stated_rule(params, ins, out)
    except Exception as error:  # of whichever kind: a callable rule is the user's code
        return unsharded_rule(ins, out, f"its sharding_rule does not fit: {error}")
    names = [a for a in dict.fromkeys(flat_factors(*found.operands)) if a not in found.replicated]
    answers = {a: refusal(params, found, ins, out, {a: _smallest_divisor(found.sizes[a])}) for a in names}
    free = frozenset(a for a, why in answers.items() if not why)
    if not free:
        why = "; ".join(f"factor {a}: {why}" for a, why in answers.items()) or "its sharding_rule has no factor that shards"
        return unsharded_rule(ins, out, why)
    flops = program_flops(params["call"].jaxpr)
    return replace(found, replicated=frozenset(found.sizes) - free, shard_local=free, flops=flops)


def stated_rule(params: Mapping[str, Any], ins, out) -> Rule:
    """What the `sharding_rule` of a call states, whatever its `partition` serves; raises what a rule made from types raises."""
    return shardy_rule(_jax_kernels.sharding_rule(params, ins, out), ins, out)


def shardy_rule(given, ins, out) -> Rule:
    """A `SdyShardingRule` at these shapes; what only operands or only results have, is reduced or permuted, needs replication.

    Raises:
        ValueError: it names other tensors or ranks than there are.
    """
    mappings, tensors = (*given.operand_mappings, *given.result_mappings), (*ins, *out)
    if (len(given.operand_mappings), len(given.result_mappings)) != (len(ins), len(out)):
        raise ValueError(f"it names {len(given.operand_mappings)} operands and {len(given.result_mappings)} results")
    sizes: dict[str, int] = dict(given.factor_sizes)
    named = [_dims(mapping, x.shape) for mapping, x in zip(mappings, tensors, strict=True)]
    unequal: set[str] = set()
    for dims, x in zip(named, tensors, strict=True):
        for dim, n in zip(dims, x.shape, strict=True):
            if len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
                unequal.add(dim[0])
    kept = [_distinct(dims, x.shape, unequal, k) for k, (dims, x) in enumerate(zip(named, tensors, strict=True))]
    sizes |= {d[0]: n for dims, x in zip(kept, tensors, strict=True) for d, n in zip(dims, x.shape, strict=True) if len(d) == 1}
    operands, results = tuple(kept[: len(ins)]), tuple(kept[len(ins) :])
    left, right = set(flat_factors(*operands)), set(flat_factors(*results))
    sizes = {a: n for a, n in sizes.items() if a in left | right}
    special = {*given.reduction_factors, *given.need_replication_factors, *given.permutation_factors}
    twice = {a for dims in kept for a in flat_factors(dims) if flat_factors(dims).count(a) > 1}
    empty = {a for a, n in sizes.items() if n == 0}
    return Rule(operands, results, replicated=frozenset((left ^ right) | twice | empty | special & (left | right)), sizes=sizes)


def _dims(mapping: Sequence, shape: tuple[int, ...]) -> Dims:
    """Factors of one tensor; the dims that "..." stands for are named "...0", "...1", by group ("...2" becomes "...2_0")."""
    leading = len(mapping) > 0 and isinstance(mapping[0], str) and _jax_kernels.is_batching(mapping[0])
    rest = tuple((d,) if isinstance(d, str) else tuple(d) for d in mapping[leading:])
    n = len(shape) - len(rest)
    if n < 0 or (n and not leading):
        raise ValueError(f"it names {len(rest)} dims of an array with {len(shape)}")
    group = mapping[0][1:].removeprefix("0") if leading else ""
    return tuple((f"...{group and group + '_'}{i}",) for i in range(n)) + rest


def _distinct(dims: Dims, shape: tuple[int, ...], unequal: set[str], k: int) -> Dims:
    """The dims, with no factor where the size is one; a factor of several sizes is one per size, inside a compound dim one per dim."""
    names = (
        d if unequal.isdisjoint(d) else (f"{d[0]}.{n}" if len(d) == 1 else f"{'.'.join(d)}.{k}.{i}",)
        for i, (d, n) in enumerate(zip(dims, shape, strict=True))
    )
    return tuple(d if n != 1 else () for d, n in zip(names, shape, strict=True))


def _smallest_divisor(n: int) -> int:
    return next((k for k in range(2, math.isqrt(n) + 1) if n % k == 0), n)


# ---- what `partition` answers


@dataclass(frozen=True)
class AskedShardings:
    """Shardings asked of a `partition`: one mesh axis, of the factor's name, per sharded factor."""

    mesh: AbstractMesh
    operands: list[NamedSharding]
    results: list[NamedSharding]

    @classmethod
    def of(cls, rule: Rule, counts: Mapping[str, int]) -> AskedShardings:
        """With so many shards per factor."""
        axes = tuple(counts)
        mesh = AbstractMesh(tuple(counts.values()), axes, axis_types=(AxisType.Auto,) * len(axes))
        sides = [[NamedSharding(mesh, _spec(dims, counts)) for dims in side] for side in (rule.operands, rule.results)]
        return cls(mesh, *sides)


def _spec(dims: Dims, counts: Mapping[str, int]) -> PartitionSpec:
    found = (tuple(a for a in dim if a in counts) for dim in dims)
    return PartitionSpec(*(of[0] if len(of) == 1 else of or None for of in found))


def lower_fn(params: Mapping[str, Any], rule: Rule, ins, out, counts: Mapping[str, int]):
    """What a device runs with so many shards per factor: a function of shards of the operands, in the call's own tree.

    Raises:
        ValueError: `partition` answers with other shardings than it was asked for.
    """
    asked = AskedShardings.of(rule, counts)
    sides = zip((ins, out), (asked.operands, asked.results), (params["in_tree"], params["out_tree"]), strict=True)
    types = [
        tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(xs, of, strict=True)])
        for xs, of, tree in sides
    ]
    _, run, results, operands = params["partition"](*params["static_args"], asked.mesh, *types)
    pairs = ((params["in_tree"], operands, asked.operands), (params["out_tree"], results, asked.results))
    for tree, answer, wanted in pairs:
        for got, want in zip(tree.flatten_up_to(answer), wanted, strict=True):
            if not isinstance(got, NamedSharding) or _entries(got, want) != _entries(want, want):
                raise ValueError(f"its partition answers {getattr(got, 'spec', got)} where {want.spec} is asked for")
    return run


def _entries(sharding: NamedSharding, like: NamedSharding) -> tuple:
    spec = tuple(sharding.spec)
    spec += (None,) * (len(like.spec) - len(spec))
    return tuple((d,) if isinstance(d, str) else d or None for d in spec)


def refusal(params: Mapping[str, Any], rule: Rule, ins, out, counts: Mapping[str, int]) -> str:
    """Why a call cannot run with so many shards per factor; "" if it can."""
    try:
        run = lower_fn(params, rule, ins, out, counts)
        shards = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(local_shapes(rule.operands, ins, counts), ins, strict=True)]
        made = jax.tree.leaves(jax.eval_shape(run, *params["in_tree"].unflatten(shards)))
    except Exception as error:  # of whichever kind: it is the user's code
        return str(error).split("\n")[0]
    wanted = [(s, x.dtype) for s, x in zip(local_shapes(rule.results, out, counts), out, strict=True)]
    got = [(tuple(x.shape), x.dtype) for x in made]
    return "" if got == wanted else f"its lower_fn makes {_text(got)} of shards where the rule has {_text(wanted)}"


def _text(types) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)


def local_shapes(tensors: Sequence[Dims], avals, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Shapes of the shards of tensors."""
    of = zip(tensors, avals, strict=True)
    return [tuple(n // math.prod(counts.get(a, 1) for a in d) for d, n in zip(dims, x.shape, strict=True)) for dims, x in of]
