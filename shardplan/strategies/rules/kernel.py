"""Kernels and calls that lower to one: Pallas calls, calls with a partitioning of their own.

pallas_call  (8,16,4,32), (8,16,2,32) -> (8,16,4,32)   g0 g1 g2_2 ...
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.ir.traits import Traits
from shardplan.strategies.kernel.count import kernel_flops
from shardplan.strategies.kernel.grid import KernelGrid, kernel_grid
from shardplan.strategies.rule import Rule, replicated_rule, rule


@rule(traits=Traits(shapes_in_params=True))
def pallas_call(*ins, out, **params):
    found, flops = kernel_grid(params, len(ins)), kernel_flops(params)
    name = f"kernel {params.get('name') or ''}".strip()
    if isinstance(found, KernelGrid) and found.free:
        estimate = params["cost_estimate"]
        moved = None if estimate is None else float(estimate.bytes_accessed)
        return replace(grid_rule(found), flops=flops, bytes=moved, stopped=f"{name}: {found.stops}" if found.stops else "")
    why = found if isinstance(found, str) else found.reason
    return replace(unsharded_rule(ins, out, f"{name}: {why}"), flops=flops)


def grid_rule(found: KernelGrid) -> Rule:
    """The rule of a kernel whose grid lies over its arrays so."""
    k = len(found.operands)
    tensors = tuple(found.factor_dims(n) for n in range(k + len(found.results)))
    free = frozenset(d.name for d in found.free)
    return Rule(tensors[:k], tensors[k:], replicated=frozenset(found.sizes) - free, shard_local=free, sizes=found.sizes)


def unsharded_rule(ins, out, why: str) -> Rule:
    """An op of which no factor could be derived."""
    return replace(replicated_rule(ins, out), unsharded=why)


@rule("core_map", "mpmd_map", traits=Traits(shapes_in_params=True))
def without_blocks(*ins, out, **params):
    """Kernels of `plgpu.kernel`, `pl.core_map` and their like: their bodies copy what they read, at places that they compute."""
    why = "its body computes the places that it reads and writes; no block mappings say them"
    return unsharded_rule(ins, out, f"kernel {params.get('name') or ''}".strip() + f": {why}")
