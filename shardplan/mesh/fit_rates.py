"""Rates of products and attention kernels, fitted to measured ones: the constants of the least log errors (soft-L1 loss, 0.1).

The measurements are published tables (benchmarks/fit_rates.py) or those of the GPU at hand (`one_device.py`). Deterministic: the same
measurements, the same constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardplan.mesh.device import AttentionRate, ProductRate
from shardplan.mesh.rates import compute_seconds

CONSTANTS = ("efficiency", "fill", "edge", "latency_s")
START = ProductRate(efficiency=0.8, fill=150.0, edge=30.0, latency_s=4e-6)
SOFT = 0.1
"""Log errors from which a measurement pulls less: some are of two kernels, or of a busy machine."""


def least_errors(
    start: Mapping[str, float], errors: Callable[[Mapping[str, float]], np.ndarray]
) -> tuple[dict[str, float], np.ndarray]:
    """The positive constants of the least log errors, to four digits, and these errors.

    Args:
        start: of the search, by name.
        errors: constants -> the log of predicted over measured seconds, [rows].
    """
    from scipy.optimize import least_squares  # takes half a second to load

    def named(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(start, np.exp(logs).tolist(), strict=True))

    found = least_squares(lambda x: errors(named(x)), np.log([*start.values()]), loss="soft_l1", f_scale=SOFT, diff_step=1e-3)
    return {name: float(f"{value:.4g}") for name, value in named(found.x).items()}, errors(named(found.x))


def residuals(off: np.ndarray) -> dict[str, float]:
    """What a `MeasuredRate` says of its log errors."""
    return {
        "rows": len(off),
        "median_error": round(float(np.median(abs(off))), 4),
        "p90_error": round(float(np.quantile(abs(off), 0.9)), 4),
    }


def product_errors(
    rate: ProductRate, sizes: np.ndarray, measured_s: np.ndarray, peak: float, multiprocessors: int, memory_rate: float, itemsize: float
) -> np.ndarray:
    """Log of predicted over measured seconds of products.

    Args:
        rate: what predicts.
        sizes: batch, rows, columns, contracted elements, [rows, 4].
        measured_s: seconds of each.
        peak: FLOP/s of the device.
        multiprocessors: of the device.
        memory_rate: bytes per second that it reaches.
        itemsize: bytes of an element of operands and results.
    """
    b, m, n, k = sizes.T
    moved_s = itemsize * b * (m * k + k * n + m * n) / memory_rate
    compute = compute_seconds(rate, sizes, peak / multiprocessors, multiprocessors, memory_rate)
    return np.log((rate.latency_s + np.maximum(compute, moved_s)) / measured_s)


def fit_products(start: ProductRate, free: Sequence[str], sizes: np.ndarray, measured_s: np.ndarray, **device) -> ProductRate:
    """The rate whose constants `free` agree best with measured products; the others are those of `start`.

    Args:
        start: where the search starts.
        free: of `CONSTANTS`.
        sizes, measured_s: as in `product_errors`.
        device: its other arguments.
    """
    start = replace(start, sustained=1.0)

    def errors(constants: Mapping[str, float]) -> np.ndarray:
        return product_errors(replace(start, **constants), sizes, measured_s, **device)

    constants, off = least_errors({name: getattr(start, name) for name in free}, errors)
    return replace(start, **constants, **residuals(off))


def attention_rates(constants: Mapping[str, float], heads: Sequence[float]) -> dict[str, AttentionRate]:
    """Forward and backward kernels of these constants.

    Args:
        constants: the forward efficiency of each head size, by its number as text, and of `ATTENTION`.
        heads: elements of a head, ascending.
    """
    forward = tuple(constants[f"{head:g}"] for head in heads)
    short, causal, slower, shorter = (constants[name] for name in ATTENTION)
    backward = tuple(slower * x for x in forward)
    return {
        "forward": AttentionRate(tuple(heads), forward, short, causal),
        "backward": AttentionRate(tuple(heads), backward, shorter * short, shorter * causal),
    }


ATTENTION = {"short": 120.0, "short_causal": 350.0, "slower": 0.9, "shorter": 1.5}
"""Constants of attention kernels besides an efficiency per head size, and where the search starts: keys that halve the rate, without
and with a causal mask, and by which factors the efficiency and these keys are worse backward."""
