"""What the systems of published steps do, as far as predicted seconds depend on it, each with its source.

A row of steps.csv names its system; those that are not listed here are as PyTorch's FSDP, but for the order of a step on JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import published_models as models

TORCHTITAN_SAVES = "query", "value", "attention", "gate", "down"
"""Its selective recomputation saves attention and each second product (torchtitan/parallelisms/parallelize_llama.py)."""


@dataclass(frozen=True)
class System:
    """A training system; the defaults are PyTorch's FSDP with FlashAttention.

    Attributes:
        on_jax: XLA's scheduler orders its step by its own estimates. PyTorch fetches a block's weights while the one before computes,
            in an order that no estimate decides.
        attention: its kernel; "unfused" keeps scores and weights in memory.
        fused_softmax: of unfused attention: softmax is one kernel, and so is its gradient.
        dropout: of unfused attention: its weights pass through dropout, in a kernel of its own.
        one_hot: tokens are looked up by products, and the loss multiplies with one-hot targets.
        sequence_parallel: what is not tensor-parallel is sharded over the sequence.
        hides: compute hides collectives.
        saves: what a layer whose recomputation is selective saves besides its operands, of `models.NAMES`; None is all.
        recomputes_one_of: start of a GPU's name -> one block of so many is recomputed whole, where recomputation is selective.
    """

    on_jax: bool = False
    attention: Literal["flash", "cudnn", "unfused"] = "flash"
    fused_softmax: bool = True
    dropout: bool = False
    one_hot: bool = False
    sequence_parallel: bool = False
    hides: bool = True
    saves: tuple[str, ...] | None = None
    recomputes_one_of: Mapping[str, int] = field(default_factory=dict)


SYSTEMS = {
    "torchtitan": System(sequence_parallel=True, saves=TORCHTITAN_SAVES),
    # Recomputed blocks are 3 (HFU / MFU - 1) of all, as the forward pass is a third of the model's flops. The README of fms-fsdp has
    # 0.69 / 0.61 on A100s (0.39; one of 3 is nearest) and 0.46 / 0.43 on H100s (0.21). Which blocks they are is in its
    # fms_fsdp/policies/ac_handler.py.
    "PyTorch FSDP (IBM fms-fsdp)": System(recomputes_one_of={"A100": 3, "H100": 5}),
    # Selective recomputation is of core attention (arXiv:2205.05198), which the backward pass of FlashAttention computes again anyway.
    "Megatron-Core": System(sequence_parallel=True),
    # Gradients are summed after the backward pass (arXiv:2104.04473); dropout is 0.1 unless told otherwise (arguments.py), that of the
    # residual stream part of fused kernels.
    "Megatron-LM 2021": System(attention="unfused", dropout=True, hides=False),
    # Scores, weights and dropout are computed again (arXiv:2205.05198).
    "Megatron-LM 2022": System(attention="unfused", dropout=True, sequence_parallel=True, saves=models.NAMES),
    # praxis/layers/embedding_softmax.py and attentions.py; XLA's kernels of whole rows were off (rosetta/projects/pax of JAX-Toolbox).
    "Pax": System(on_jax=True, attention="unfused", fused_softmax=False, one_hot=True),
    # Its row names cuDNN's fused attention and what "minimal" saves: products, and with "attention out" attention's result.
    "MaxText": System(on_jax=True, attention="cudnn", saves=tuple(name for name in models.NAMES if name != "attention")),
}


def system_of(row: Mapping[str, str]) -> System:
    """The system of a row, with what the row itself says of it."""
    other = System(on_jax="JAX" in row["framework"])
    found = next((system for name, system in SYSTEMS.items() if row["framework"].startswith(name)), other)
    if "TE" in row["precision"]:  # its own kernel; attention is unfused unless NVTE_FUSED_ATTN asks
        found = replace(found, fused_softmax=True)
    return replace(found, saves=models.NAMES) if "attention out" in row["remat"] else found


def saved_by(row: Mapping[str, str]) -> tuple[tuple[str, ...] | None, int]:
    """What a layer of a row saves for its backward pass besides its operands, None is all; and one layer of how many does so."""
    system = system_of(row)
    if row["remat"].startswith(("every", "full")):
        return (), 1
    if not any(word in row["remat"] for word in ("selective", "per-op", "minimal")):
        return None, 1
    one_of = next((n for gpu, n in system.recomputes_one_of.items() if row["gpu"].startswith(gpu)), 0)
    return ((), one_of) if one_of else (system.saves, 1)
