"""How a `custom_partitioning` call may be sharded: as its Shardy rule says, along the factors that its `partition` really serves.

    sharding_rule="... i, i j -> ... j", reduction_factors=("i",)        ...0 i, i j -> ...0 j    reduce i

Every factor is asked for alone. A call without a rule has those of a few likely ones that it serves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardplan import _jax_kernels
from shardplan.ir.traits import Traits
from shardplan.strategies.kernel.count import program_flops
from shardplan.strategies.kernel.partition import answer, first_line, joins
from shardplan.strategies.rule import Dims, Rule, flat_factors, rule
from shardplan.strategies.rules.kernel import unsharded_rule


@rule(traits=Traits(shapes_in_params=True))
def custom_partitioning(*ins, out, **params):
    try:
        found = stated_rule(params, ins, out)
    except Exception as error:  # of whichever kind: a callable rule is the user's code
        return unsharded_rule(ins, out, f"its sharding_rule does not fit: {error}")
    reduce: dict[str, str] = {}
    refused: dict[str, str] = {}
    for a in dict.fromkeys(flat_factors(*found.operands)):
        if a not in found.replicated:
            try:
                reduce |= joins(params, found, ins, out, {a: _smallest_divisor(found.sizes[a])})
            except Exception as error:  # of whichever kind: it is the user's code
                refused[a] = first_line(error)
    free = frozenset(flat_factors(*found.operands)) - found.replicated - refused.keys()
    if not free:
        none_shards = NOTHING_ANSWERED if params["sharding_rule"] is None else NOTHING_STATED
        return unsharded_rule(ins, out, "; ".join(f"factor {a}: {why}" for a, why in refused.items()) or none_shards)
    flops = program_flops(params["call"].jaxpr)
    return replace(found, reduce=reduce, replicated=frozenset(found.sizes) - free, shard_local=free, flops=flops)


NOTHING_STATED = "its sharding_rule has no factor that shards"
NOTHING_ANSWERED = "it has no sharding_rule, which def_partition takes, and its partition does not tell which shardings it serves"


def stated_rule(params: Mapping[str, Any], ins, out) -> Rule:
    """What the `sharding_rule` of a call states, whatever its `partition` serves; raises what a rule made from types raises.

    Without a rule, what its `partition` answers to likely shardings.
    """
    if params["sharding_rule"] is None:
        return answered_rule(params, ins, out)
    return shardy_rule(_jax_kernels.sharding_rule(params, ins, out), ins, out)


def shardy_rule(given, ins, out) -> Rule:
    """A `SdyShardingRule` at these shapes; what only results have, or is permuted, needs replication.

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
    special = {*given.need_replication_factors, *given.permutation_factors}
    twice = {a for dims in kept for a in flat_factors(dims) if flat_factors(dims).count(a) > 1}
    empty = {a for a, n in sizes.items() if n == 0}
    return Rule(operands, results, replicated=frozenset((right - left) | twice | empty | special & (left | right)), sizes=sizes)


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


# ---- calls without a rule

Place = tuple[int, int]
"""Number of a tensor, operands before results, and of a dim."""


def answered_rule(params: Mapping[str, Any], ins, out) -> Rule:
    """Factors that the `partition` of a call without a rule serves, as it answers to the shardings of `_likely`.

    It is believed of operands of which it leaves some dim whole, whatever it is asked for. A `partition` that shards every dim may rely
    on what the step shards, and tells nothing.
    """
    factors: list[frozenset[Place]] = []
    believed: set[int] = set()
    for place in ((k, d) for k, x in enumerate(ins) for d, n in enumerate(x.shape) if n > 1):
        if not any(place in of for of in factors):
            served, left_whole = _served(params, ins, out, place)
            if left_whole:
                believed.add(place[0])
            if served and not any(served & of for of in factors):
                factors.append(served)
    return _rule_of(ins, out, [of for of in factors if not believed.isdisjoint(t for t, _ in of)])


def _served(params: Mapping[str, Any], ins, out, place: Place) -> tuple[frozenset[Place] | None, bool]:
    """The dims that shard with an operand's dim, None if it does not; and whether `partition` leaves it whole in all its answers."""
    tensors, answers = (*ins, *out), []
    shards = {"f0": _smallest_divisor(tensors[place[0]].shape[place[1]])}
    for asked in _likely(tensors, len(ins), place):
        try:
            _, specs, _ = answer(params, _rule_of(ins, out, [asked]), ins, out, shards)
            found = frozenset((t, i) for t, spec in enumerate(specs) for i, axes in enumerate(spec or ()) if axes)
            answers.append(found)
            if place in found and len({tensors[t].shape[i] for t, i in found}) == 1:
                joins(params, _rule_of(ins, out, [found]), ins, out, shards)
                return found, False
        except Exception:  # of whichever kind: it is the user's code
            continue
    return None, bool(answers) and not any(place in found for found in answers)


def _likely(tensors: Sequence, n_operands: int, place: Place) -> Iterator[frozenset[Place]]:
    """Dims that may shard together with an operand's dim, all of its size.

    Those at its place from the front; those at its place from the back; the first one of every other operand; none.
    """
    k, d = place
    n, back = tensors[k].shape[d], d - len(tensors[k].shape)
    equal = [(t, i, i - len(x.shape)) for t, x in enumerate(tensors) for i, m in enumerate(x.shape) if m == n]
    yield frozenset((t, i) for t, i, _ in equal if i == d)
    yield frozenset((t, i) for t, i, at in equal if at == back)
    firsts = {t: i for t, i, _ in reversed(equal) if t < n_operands and t != k}
    yield frozenset({place, *firsts.items()})
    yield frozenset({place})


def _rule_of(ins, out, factors: Sequence[frozenset[Place]]) -> Rule:
    """A rule of factors f0, f1, ... at these dims; every other dim needs replication."""
    names = {place: f"f{n}" for n, of in enumerate(factors) for place in of}
    tensors = [tuple((names.get((t, i), f"x{t}_{i}"),) for i in range(len(x.shape))) for t, x in enumerate((*ins, *out))]
    sizes = {dims[i][0]: n for dims, x in zip(tensors, (*ins, *out), strict=True) for i, n in enumerate(x.shape)}
    operands, results = tuple(tensors[: len(ins)]), tuple(tensors[len(ins) :])
    return Rule(operands, results, replicated=frozenset(sizes.keys() - set(names.values())), sizes=sizes)
