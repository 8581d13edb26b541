"""Kernels on shards: the call with its grid, shapes and cost estimate cut down to what one device holds.

    grid (4, 8), q (1, 64) at (b, h)     b over 2 devices     grid (2, 8), q[:2] at (b, h)

Where a digit is sharded that is not the major one of its grid axis, or of a dim, index maps are traced anew: the local index is
taken apart into the digits that are left, and put together with the places that they have on the shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardplan import _jax, _jax_kernels
from shardplan.strategies.kernel.grid import KernelDim, KernelGrid, kernel_grid
from shardplan.strategies.kernel.partition import refusal, run_shards
from shardplan.strategies.rule import Rule, factor_sizes
from shardplan.strategies.rules import foreign


def pallas_call(eqn, rule: Rule, shards: Sequence, counts: Mapping[str, int]) -> list:
    """Results of a `pallas_call` on shards of its operands; `counts` has, per sharded factor, the number of shards."""
    return _jax.bind(eqn, shards, local_params(eqn, counts), context=False)


def local_params(eqn, counts: Mapping[str, int]) -> dict[str, Any]:
    """The parameters of a `pallas_call` on one device's shards."""
    found = kernel_grid(eqn.params, len(eqn.invars))
    assert isinstance(found, KernelGrid), found  # a rule was derived
    params, mapping = eqn.params, eqn.params["grid_mapping"]
    local = _LocalGrid(found, counts)
    n_scalars = mapping.num_index_operands
    avals = tuple(
        _jax_kernels.with_shape(aval, local.shape(dims))
        for aval, dims in zip(mapping.index_map_avals[len(found.grid) :], found.operands[:n_scalars], strict=True)
    )
    avals = (*mapping.index_map_avals[: len(found.grid)], *avals)
    tensors = (*found.operands[n_scalars:], *found.results)
    blocks = tuple(local.block(b, dims, avals) for b, dims in zip(mapping.block_mappings, tensors, strict=True))
    outs = tuple(_jax_kernels.with_shape(a, local.shape(d)) for a, d in zip(params["out_avals"], found.results, strict=True))
    return {
        "grid_mapping": mapping.replace(grid=local.grid, block_mappings=blocks, index_map_avals=avals),
        "jaxpr": _jax_kernels.in_current_context(_jax_kernels.with_inputs(params["jaxpr"], avals[len(found.grid) :])),
        "out_avals": outs,
        "cost_estimate": _jax_kernels.scaled(params["cost_estimate"], 1 / math.prod(counts.values())),
    }


class _LocalGrid:
    """A kernel's grid on one device, given the number of shards per factor."""

    def __init__(self, found: KernelGrid, counts: Mapping[str, int]):
        self.found = found
        self.sizes = {d: d.size // counts.get(d.name, 1) for axis in found.digits for d in axis}
        self.grid = tuple(
            math.prod(self.sizes[d] for d in digits) if digits else n for n, digits in zip(found.grid, found.digits, strict=True)
        )

    def shape(self, dims: Sequence[KernelDim]) -> tuple[int, ...]:
        """Shape of a shard of a tensor."""
        return tuple(math.prod(self.sizes[d] for d in dim.digits) * dim.rest for dim in dims)

    def block(self, block, dims: Sequence[KernelDim], avals):
        """A block mapping over the shard; its index map gets the local index and the places of all scalars."""
        array = _jax_kernels.with_shape(block.array_aval, self.shape(dims))
        index_map = block.index_map_jaxpr
        if self.index_maps_change(dims) or any(x is not y for x, y in zip(avals, index_map.in_avals, strict=True)):
            index_map = _jax_kernels.index_map(lambda *args: self.indices(block, dims, args), avals, index_map)
        return block.replace(array_aval=array, index_map_jaxpr=_jax_kernels.in_current_context(index_map))

    def index_maps_change(self, dims: Sequence[KernelDim]) -> bool:
        """Whether the local index does not stand for the same block of the shard as of the array."""
        axes = any(d.place != place for axis in self.found.digits for d, place in zip(axis, self.places(axis), strict=True))
        return axes or any(a != b for dim in dims for a, b in self.steps(dim))

    def places(self, digits) -> list[int]:
        """Places of an axis' digits in the local index."""
        return [math.prod(self.sizes[d] for d in digits[:k]) for k in range(len(digits))]

    def steps(self, dim: KernelDim) -> list[tuple[int, int]]:
        """Per digit of a dim, its step in the index on the shard and in the whole array."""
        unit, minor = dim.unit, [dim.digits[k + 1 :] for k in range(len(dim.digits))]
        return [
            (math.prod(self.sizes[d] for d in m) * dim.rest // unit, math.prod(d.size for d in m) * dim.rest // unit) for m in minor
        ]

    def indices(self, block, dims: Sequence[KernelDim], args: Sequence) -> list:
        """The index map on the shard: that of the array at the first shard's digits, each digit then moved to its local place."""
        n = len(self.found.grid)
        digits = {
            d: args[axis] // place % self.sizes[d] if len(of) > 1 else args[axis]
            for axis, of in enumerate(self.found.digits)
            for d, place in zip(of, self.places(of), strict=True)
        }
        at = [sum(digits[d] * d.place for d in of) if len(of) > 1 else args[axis] for axis, of in enumerate(self.found.digits)]
        out = _jax_kernels.call(block.index_map_jaxpr, (*at, *args[n:]))
        for k, dim in enumerate(dims):
            for d, (local, whole) in zip(dim.digits, self.steps(dim), strict=True):
                if local != whole:
                    out[k] = out[k] + digits[d] * (local - whole)
        return out


def unchanged(eqn, rule: Rule, shards: Sequence, counts: Mapping[str, int]) -> list:
    """Results of a kernel that takes its shapes from its operands."""
    return _jax.bind(eqn, shards, context=False)


def foreign_call(eqn, rule: Rule, shards: Sequence, counts: Mapping[str, int]) -> list:
    """Results of a foreign function on shards of its operands, whose rule the user registered."""
    ins, outs = _avals(eqn)
    sizes = factor_sizes(rule, tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in outs))
    given, local = _jax_kernels.ffi_attributes(eqn.params), foreign.local_sizes(sizes, counts)
    attributes = foreign.local_attributes(eqn.params["target_name"], given, local)
    params = _jax_kernels.ffi_params(eqn.params, foreign.local_shapes(rule, sizes, counts), attributes)
    return _jax.bind(eqn, shards, params, context=False)


def partitioned(eqn, rule: Rule, shards: Sequence, counts: Mapping[str, int]) -> list:
    """Results of a `custom_partitioning` call on shards of its operands: its `lower_fn`'s, before it joins them."""
    return run_shards(eqn.params, rule, *_avals(eqn), counts, shards)


def whole(eqn, values: Sequence) -> list:
    """Results of a kernel that every device runs on all of its operands."""
    if "call" in eqn.params:
        call: Any = _jax_kernels.in_current_context(eqn.params["call"])
        return _jax_kernels.call(call, values)
    return _jax.bind(eqn, values, context=False)


def runs(eqn, rule: Rule, counts: Mapping[str, int]) -> bool:
    """Whether a kernel that has a rule runs with so many shards per factor."""
    refuses = REFUSALS.get(eqn.primitive.name)
    return refuses is None or not refuses(eqn, rule, counts)


def _unserved(eqn, rule: Rule, counts: Mapping[str, int]) -> str:
    return refusal(eqn.params, rule, *_avals(eqn), counts)


def _avals(eqn) -> tuple[list, list]:
    return [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]


ATTENTION = "fwd", "bwd", "fp8_fwd", "fp8_bwd"
CALLS: dict[str, Callable[..., list]] = {
    "pallas_call": pallas_call,
    "custom_partitioning": partitioned,
    "ffi_call": foreign_call,
    **{f"dot_product_attention_{which}_wrapper": unchanged for which in ATTENTION},
}
"""Primitive -> (equation, its rule, shards of the operands, shards per factor) -> shards of the results."""
REFUSALS: dict[str, Callable[..., str]] = {"custom_partitioning": _unserved}
"""Primitive -> (equation, its rule, shards per factor) -> why the user's code, which serves each, refuses them together; "" if not."""
