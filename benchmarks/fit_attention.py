"""The fit of fused attention kernels to measured ones; `fit_rates.py` runs it.

A row of attention_rates.csv has FLOP/s by direction, head size, keys and causal mask; `shardplan.mesh.rates.attention_rate` gives them
from `AttentionRate`. Least squares of log FLOP/s, soft-L1 loss (0.1). Backward kernels were measured for FlashAttention-2 alone: how
much slower they are than forward ones, at long and at short sequences, is taken from it for the kernels of other libraries.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardplan.mesh.device import AttentionRate, Device
from shardplan.mesh.fit_rates import ATTENTION, attention_rates, least_errors, residuals
from shardplan.mesh.rates import Attention, attention_rate

FLASH2 = "figures of the FlashAttention-2 paper (arXiv:2307.08691)"
IN_STEPS = "in-step attention rate"
"""In the source of the rows of attention in training steps."""
BACKWARD = f"backward: as much slower than forward as FlashAttention-2 is on an H100, by the {FLASH2}"


@dataclass(frozen=True)
class Fit:
    """Which rows say what of a GPU.

    Attributes:
        rows: whether a row counts.
        free: constants of `ATTENTION` that are fitted; others are those of the fit of FlashAttention-2 on the H100.
        sustained: fraction of these rates that is left in steps, or the GPU of the row that says it.
        source: for people.
    """

    rows: Callable[[Mapping[str, str]], bool]
    free: tuple[str, ...]
    sustained: float | str
    source: str


def _of(gpus: tuple[str, ...], *implementations: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda r: r["gpu"] in gpus and r["impl"] in implementations and r["causal"] != ""


FLASH2_H100 = Fit(_of(("H100-SXM",), "flash2"), tuple(ATTENTION), 1.0, FLASH2)
FITS = {
    "h100": Fit(
        _of(("H100-SXM",), "cudnn"),
        ("short", "short_causal"),
        "H200",
        f"cuDNN's forward kernels in the figures of the FlashAttention-3 paper (arXiv:2407.08608); {BACKWARD}; what steps keep of it: "
        "FlashAttention-3 in steps on the H200 by stas00/ml-engineering (CC BY-SA 4.0)",
    ),
    "a100": Fit(
        _of(("A100-80GB-SXM", "A100-SXM"), "flash2"),
        ("short", "short_causal"),
        0.87,
        f"FlashAttention-2: {FLASH2}, whose kernels for this GPU cuDNN's resemble; what steps keep of it: as for products",
    ),
    "b200": Fit(
        _of(("B200",), "flash4"),
        ("short", "short_causal"),
        "B200",
        f"FlashAttention-4's forward kernels (github.com/Dao-AILab/flash-attention, pull request 2605); {BACKWARD}; what steps keep: "
        "stas00/ml-engineering (CC BY-SA 4.0)",
    ),
}


def predicted(row: Mapping[str, str], device: Device) -> float:
    """The fraction of the peak that a row's kernel, or its two kernels together, reach."""
    ahead, back = (
        attention_rate(device, "bfloat16", Attention(int(row["headdim"]), int(row["seq"]), row["causal"] == "1", backward))
        for backward in (False, True)
    )
    return {"fwd": ahead, "bwd": back}.get(row["pass"], 3.5 / (1 / ahead + 2.5 / back))  # a backward kernel has 2.5 times the flops


def fit_one(fit: Fit, table: list[Mapping[str, str]], peak: float, shape: Mapping[str, float]) -> tuple[Device, dict, np.ndarray]:
    """The kernels of a GPU, their constants, and the log errors of the rows."""
    rows = [r for r in table if fit.rows(r)]
    heads = tuple(sorted({float(r["headdim"]) for r in rows}))
    start = {**ATTENTION, **shape}
    free = {f"{head:g}": 0.5 for head in heads} | {name: start[name] for name in fit.free}

    def device(constants: Mapping[str, float]) -> Device:
        found = attention_rates(start | constants, heads)
        return Device("", {"float32": 1.0, "bfloat16": 1.0}, 1.0, 1.0, 0.0, attention=found)

    def errors(constants: Mapping[str, float]) -> np.ndarray:
        found = device(constants)
        return np.log([predicted(r, found) * peak / 1e12 / float(r["tflops"]) for r in rows])

    constants, off = least_errors(free, errors)
    return device(constants), start | constants, off


def fitted(published: Path, gpus: Mapping) -> dict[str, dict[str, AttentionRate]]:
    """Per GPU, the rates of kernels forward and backward."""
    with open(published / "attention_rates.csv") as f:
        table = list(csv.DictReader(f))
    _, flash2, _ = fit_one(FLASH2_H100, table, gpus["h100"]["flops"]["bfloat16"], {})
    out = {}
    for gpu, fit in FITS.items():
        peak = gpus[gpu]["flops"]["bfloat16"]
        device, _, off = fit_one(fit, table, peak, {name: flash2[name] for name in ("slower", "shorter")})
        in_steps = [r for r in table if IN_STEPS in r["source"] and r["gpu"] == fit.sustained]
        steps = [float(r["tflops"]) * 1e12 / predicted(r, device) / peak for r in in_steps]
        sustained = _rounded(np.median(steps)) if steps else fit.sustained
        out[gpu] = {
            way: AttentionRate(
                rate.head_sizes,
                tuple(_rounded(x) for x in rate.efficiency),
                _rounded(rate.short),
                _rounded(rate.short_causal),
                sustained=sustained,
                **residuals(off),
                source=fit.source,
            )
            for way, rate in device.attention.items()
        }
    return out


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")
