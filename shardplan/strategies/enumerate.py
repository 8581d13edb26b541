"""Which strategies an op has on a mesh: rule x mesh, one factor (or none) per mesh axis.

For one mesh axis a rule offers: replicate; put the axis on one factor, which shards every dim the factor appears in and leaves results
partial if it is a reduction factor; and, if the rule is linear, pass partial sums on (`PARTIAL`). A mesh of several axes takes the
product, as long as every dim divides evenly, or is sharded along one mesh axis in blocks that are nearly equal (`uneven.py`):

    a b, b c -> a c  reduce b     on data=2, model=4:   (data on a, model on c)    R S1 . on model, S0 R . on data, ...

Several axes on one factor stack in mesh order, major to minor, or with any one of them last: a collective over the last axis alone
leaves the other shards where they are (`mesh/reshard.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardplan.mesh.layout import Layout, MeshShape, splits_unevenly
from shardplan.strategies.rule import Dims, Rule, flat_factors

PARTIAL = "+"
"""Stands for the factor of an axis over which a linear op passes partial sums on."""

OPEN = "*"
"""Stands for the factor of an axis that is still to be chosen."""

UnevenSizes = tuple[tuple[str, int], ...]
"""Factors that may be sharded unevenly, with their sizes."""

AxisFactors = tuple[str | None, ...]
"""One strategy: per mesh axis the factor it is put on, None, or PARTIAL."""

Key = tuple[AxisFactors, tuple[str, ...]]
"""What tells a strategy from all others of an op: its factors, and the order in which the mesh axes on one factor stack."""


@dataclass(frozen=True, eq=False)
class OpStrategies:
    """Every strategy of one op on one mesh; index s runs over strategies.

    Attributes:
        factors: [s] -> per mesh axis the factor it is put on, None, or PARTIAL.
        orders: [s] -> the mesh axes in the order in which those on one factor stack, major to minor.
        operands: per operand, [s] -> its layout.
        results: per result, [s] -> its layout.
        work: [s], the fraction of the op's flops that one device does (1 when replicated).
        shards: per operand, then per result, [s] -> the number of its shards: elements of the tensor over those of the largest shard.
    """

    factors: tuple[AxisFactors, ...]
    orders: tuple[tuple[str, ...], ...]
    operands: tuple[tuple[Layout, ...], ...]
    results: tuple[tuple[Layout, ...], ...]
    work: np.ndarray
    shards: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, factors, orders, operands, results, work: np.ndarray, mesh: MeshShape) -> OpStrategies:
        """With the `shards` of the layouts."""
        shards = (np.array([layout.shards(mesh) for layout in of], dtype=float) for of in operands + results)
        return cls(factors, orders, operands, results, work, tuple(shards))

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """[s] -> its key."""
        return tuple(zip(self.factors, self.orders, strict=True))

    @cached_property
    def numbers(self) -> Mapping[Key, int]:
        """Key -> s."""
        return {key: s for s, key in enumerate(self.keys)}

    def __len__(self) -> int:
        return len(self.factors)

    def sharded(self, s: int, mesh: MeshShape) -> dict[str, str]:
        """Mesh axis -> the factor it is put on or PARTIAL, in the order in which they stack; without those that are put on none."""
        factors = dict(zip(mesh.axes, self.factors[s], strict=True))
        return {axis: x for axis in self.orders[s] if (x := factors[axis]) is not None}

    def only(self, some: Sequence[int]) -> OpStrategies:
        """Some of the strategies, by number."""
        operands, results = (tuple(tuple(of[s] for s in some) for of in layouts) for layouts in (self.operands, self.results))
        factors, orders = tuple(self.factors[s] for s in some), tuple(self.orders[s] for s in some)
        return OpStrategies(factors, orders, operands, results, self.work[list(some)], tuple(of[list(some)] for of in self.shards))


def enumerate_strategies(
    rule: Rule,
    sizes: dict[str, int],
    mesh: MeshShape,
    linear: bool | None = None,
    within: AxisFactors | None = None,
    uneven: Collection[str] = (),
) -> OpStrategies:
    """All strategies of a rule on a mesh.

    Args:
        rule: the op's rule.
        sizes: size of every factor (`factor_sizes`).
        mesh: axis names and sizes; axes of size 1 are never used.
        linear: whether partial operands pass; default `rule.linear`.
        within: per axis the factor that is fixed, or OPEN; default all OPEN.
        uneven: factors that may be sharded in unequal blocks (`uneven_factors`).
    """
    linear = rule.linear if linear is None else linear
    divisors = tuple((a, math.gcd(n, mesh.n_devices) if n else 1, n > 0 and mesh.n_devices % n == 0) for a, n in sizes.items())
    unequal = tuple((a, sizes[a]) for a in sorted(uneven) if any(splits_unevenly(sizes[a], n) for n in mesh.sizes))
    local = rule.shard_local if unequal else frozenset()
    found = _assignments(rule.operands + rule.results, rule.replicated, divisors, linear, within, mesh, unequal, local)
    ordered = frozenset(sizes).difference(rule.exchanged, rule.shard_local)
    keys = tuple((factors, order) for factors in found for order in _orders(factors, mesh, ordered))
    return _strategies(keys, rule.operands, rule.results, tuple(rule.reduce.items()), rule.accumulator_init, mesh, unequal)


@functools.lru_cache(maxsize=4096)
def _assignments(
    tensors: tuple[Dims, ...],
    replicated: frozenset[str],
    divisors: tuple[tuple[str, int, bool], ...],
    linear: bool,
    within: AxisFactors | None,
    mesh: MeshShape,
    unequal: UnevenSizes,
    shard_local: frozenset[str],
) -> tuple[AxisFactors, ...]:
    """The strategies in which every dim divides. In a compound dim only fully sharded factors stand before a sharded one.

    `divisors` has, per factor, the most shards it may have (every number of shards that divides its size divides that), and whether
    each then holds one element. Sizes matter in no other way but for `unequal` factors, so factors of many sizes share an answer. A
    factor is sharded unevenly along one mesh axis, and never together with one of those that devices run on their shards.
    """
    compound = [dim for dims in tensors for dim in dims if len(dim) > 1]
    most, single = {a: n for a, n, _ in divisors}, {a for a, _, one in divisors if one}
    usable = [a for a in dict.fromkeys(flat_factors(*tensors)) if a not in replicated]
    nearly_equal = {(a, n) for a, size in unequal for n in mesh.sizes if splits_unevenly(size, n)}

    def options(axis: int, n: int) -> list[str | None]:
        if within is not None and within[axis] != OPEN:
            return [within[axis]]
        found = (a for a in usable if most[a] % n == 0 or (a, n) in nearly_equal)
        return [None, *found, *([PARTIAL] if linear else [])] if n > 1 else [None]

    def divides(strategy: AxisFactors) -> bool:
        shards: dict[str, int] = {}
        for x, n in zip(strategy, mesh.sizes, strict=True):
            if x is not None and x != PARTIAL:
                shards[x] = shards.get(x, 1) * n
        filled = [a for a, n in shards.items() if most[a] % n]
        if any((a, shards[a]) not in nearly_equal or strategy.count(a) > 1 for a in filled):
            return False
        if filled and not shard_local.isdisjoint(shards):
            return False
        for dim in compound:
            partly = itertools.dropwhile(lambda a: a in single and shards.get(a, 1) == most[a], dim)
            if any(a in shards for a in itertools.islice(partly, 1, None)):
                return False
        return True

    return tuple(filter(divides, itertools.product(*itertools.starmap(options, enumerate(mesh.sizes)))))


def _orders(strategy: AxisFactors, mesh: MeshShape, ordered: Collection[str]) -> list[tuple[str, ...]]:
    """The mesh order, and for each axis that other axes follow on one of the `ordered` factors the order in which it comes last."""
    axes = [(axis, factor) for (axis, n), factor in zip(mesh, strategy, strict=True) if n > 1]
    before = [axis for n, (axis, factor) in enumerate(axes) if factor in ordered and factor in (x for _, x in axes[n + 1 :])]
    return [mesh.axes, *((*(axis for axis in mesh.axes if axis != last), last) for last in before)]


@functools.lru_cache(maxsize=4096)
def _strategies(
    keys: tuple[Key, ...],
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    reduce: tuple[tuple[str, str], ...],
    accumulator_init: bool,
    mesh: MeshShape,
    unequal: UnevenSizes,
) -> OpStrategies:
    """The strategies of these keys; they depend on no sizes but those of `unequal` factors, so ops of many sizes share them."""
    factors, orders = tuple(factors for factors, _ in keys), tuple(order for _, order in keys)
    work = np.array([1.0 / mesh.size(*(a for a, x in zip(mesh.axes, c, strict=True) if x not in (None, PARTIAL))) for c in factors])
    left = tuple(tuple(_layout(dims, c, mesh, {}, not accumulator_init) for c in keys) for dims in operands)
    right = tuple(tuple(_layout(dims, c, mesh, dict(reduce), True) for c in keys) for dims in results)
    even = OpStrategies.of(factors, orders, left, right, work, mesh)
    return _filled_up(even, operands + results, dict(unequal), mesh) if unequal else even


def _filled_up(even: OpStrategies, tensors: tuple[Dims, ...], sizes: Mapping[str, int], mesh: MeshShape) -> OpStrategies:
    """Strategies of which some shard factors of these sizes unevenly: work and shards are those of the largest block."""

    def padding(factor: str, strategy: AxisFactors) -> float:
        shards = math.prod(n for x, n in zip(strategy, mesh.sizes, strict=True) if x == factor)
        return -(-sizes[factor] // shards) * shards / sizes[factor]

    grows = {a: np.array([padding(a, strategy) for strategy in even.factors]) for a in sizes}
    work = even.work * np.prod(list(grows.values()), axis=0)
    inside = ([grows[a] for a in flat_factors(dims) if a in grows] for dims in tensors)
    shards = tuple(of / np.prod(found, axis=0) if found else of for of, found in zip(even.shards, inside, strict=True))
    return replace(even, work=work, shards=shards)


def _layout(dims: Dims, key: Key, mesh: MeshShape, reduce: Mapping[str, str], passes_partial: bool) -> Layout:
    """Layout of a tensor. `reduce`: a result's reduction factors -> kind; `passes_partial`: it is partial over PARTIAL axes."""
    on: dict[str, tuple[str, ...]] = {}
    partial = []
    factors = dict(zip(mesh.axes, key[0], strict=True))
    for axis in key[1]:
        x = factors[axis]
        if x == PARTIAL:
            partial += [(axis, "sum")] if passes_partial else []
        elif x is not None:
            on[x] = (*on.get(x, ()), axis)
            if x in reduce and not any(x in dim for dim in dims):
                partial.append((axis, reduce[x]))
    sharded = tuple(tuple(axis for a in dim for axis in on.get(a, ())) for dim in dims)
    return Layout(sharded, tuple(sorted(partial)))
