"""One equation, the values it runs on, and one sharding of its factors: the geometry that proofs share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from shardplan.emit.shard_local.halo import HaloDim, halo_dims
from shardplan.strategies.rule import Dims, Rule, RuleError, flat_factors

AXES = ("s", "t", "u")
"""Mesh axes of a proof, one per sharded factor."""


@dataclass(frozen=True)
class ShardedOp:
    """One equation, global arrays of its operands and results, and per sharded factor the number of shards."""

    eqn: Any
    rule: Rule
    sizes: dict[str, int]
    operands: tuple
    results: tuple
    shards: dict[str, int]

    @property
    def name(self) -> str:
        """The primitive."""
        return self.eqn.primitive.name

    @property
    def text(self) -> str:
        """The sharding as text, "a:8 b:2"."""
        return " ".join(f"{a}:{k}" for a, k in self.shards.items())

    @property
    def types(self) -> str:
        """Types of operands and results."""
        return " -> ".join(", ".join(str(jax.typeof(x)) for x in side) for side in (self.operands, self.results))

    def local_shape(self, dims: Dims, shape) -> tuple[int, ...]:
        """Shape of one device's shard of a tensor."""
        return tuple(n // math.prod(self.shards.get(a, 1) for a in d) for d, n in zip(dims, shape, strict=True))

    @property
    def local_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one device's shards of all results."""
        return [self.local_shape(d, x.shape) for d, x in zip(self.rule.results, self.results, strict=True)]

    def factor_shape(self, dims: Dims, shape) -> list[int]:
        """Shape of a tensor with one dim per factor; a windowed factor differs from tensor to tensor."""
        return [n if len(d) == 1 else self.sizes[a] for d, n in zip(dims, shape, strict=True) for a in d]

    def spec(self, dims: Dims) -> PartitionSpec:
        """PartitionSpec of a tensor with one dim per factor."""
        axes = dict(zip(self.shards, AXES, strict=False))
        return PartitionSpec(*(axes.get(a) for a in flat_factors(dims)))

    def shard_index(self, factor: str):
        """This device's number along a factor."""
        return lax.axis_index(AXES[list(self.shards).index(factor)]) if factor in self.shards else 0

    def shard_start(self, dim: tuple[str, ...]):
        """Position along a dim of one factor at which this device's shard starts."""
        return self.shard_index(dim[0]) * (self.sizes[dim[0]] // self.shards.get(dim[0], 1)) if dim else 0

    def halo_dims(self, k: int) -> list[HaloDim]:
        """Sharded dims of operand k over which windows slide."""
        axes = {a: (axis,) for a, axis in zip(self.shards, AXES, strict=False)}
        return halo_dims(self.rule, k, axes, self.shards, self.operands, self.results)

    def sharded_dims(self, k: int) -> list[HaloDim]:
        """All sharded dims of operand k."""
        return replace(self, rule=replace(self.rule, shard_local=frozenset(self.shards))).halo_dims(k)

    def fail(self, why: str):
        """Raise a RuleError that names the op and this sharding."""
        raise RuleError(
            f"rule '{self.rule}' of {self.name} on {self.types} is wrong when sharded as {self.text}: {why}\n"
            f"  ways out: replicate a factor that needs its neighbours, or name its kind in reduce="
        )
