"""Which bfloat16 results XLA for GPU keeps in 32 bits, on GPUs that compute no elementwise work in bfloat16: those before Hopper.

    tanh bf16   =  cast to f32, tanh, cast to bf16
    tanh, times =  .., tanh, cast to bf16, cast to f32, times, ..       the two casts fall away, also where tanh is written between

What other kernels read for elementwise work and sums is written in float32; what is read for a product, a collective, a stack or a
result, or moved as it is, in bfloat16, besides.

Fact: elementwise-in-32-bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from shardplan.ir.graph import Graph, Op
from shardplan.mesh.device import Device, gpu_of_device_kind
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import absorbs
from shardplan.xla_model.kernel_groups import Kernels
from shardplan.xla_model.overlapping_parts import moves_elements

WIDER = 2.0
"""Bytes of float32 over those of bfloat16."""
HOPPER = (9, 0)
"""Compute capability of the first GPUs that compute elementwise work in bfloat16."""


def kept_wide(graph: Graph, rules: Sequence[Rule], kernels: Kernels, device: Device | None) -> dict[int, float]:
    """Value in bfloat16 that is written in float32 -> bytes written over its own: `WIDER`, and 1 more if it is written as it is too.

    No value is where the device is no GPU that is known.
    """
    out: dict[int, float] = {}
    gpu = gpu_of_device_kind(device.name) if device else None
    if gpu is None or gpu.compute_capability >= HOPPER:
        return out
    for at, op in enumerate(graph.ops):
        for v in op.outputs if at not in graph.dead and computes_numbers(op, rules[at]) else ():
            if not kernels.written[v] or graph.values[v].dtype != jnp.bfloat16:
                continue
            wide = narrow = False
            for reader in {*graph.readers(v)} - graph.dead:
                elementwise = computes_numbers(graph.ops[reader], rules[reader])
                if not (elementwise and absorbs(graph, rules, op, reader, prologue=False)):
                    narrow = True
                elif kernels.inside[reader] - {kernels.own[at]}:
                    wide = True
            if wide:
                out[v] = WIDER + narrow
    return out


def computes_numbers(op: Op, rule: Rule) -> bool:
    """Whether an op of a fusion computes new numbers, elementwise or as a sum."""
    return rule.fusion in ("loop", "reduce") and not _hands_on_numbers(op)


def _hands_on_numbers(op: Op) -> bool:
    """Whether the numbers of a result are those of an operand: some of them, elsewhere, or several times."""
    traits = op.traits
    chosen = traits.selects or traits.gather or traits.broadcast or traits.concatenates or traits.transpose
    return chosen or traits.border or moves_elements(op)
