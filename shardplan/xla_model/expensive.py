"""Which functions cost XLA for GPU more to compute again than to write and read.

Facts: fusion-expensive, fusion-rows-exponentials.
"""

from __future__ import annotations

from math import inf

from shardplan.mesh.device import Device, gpu_of_device_kind

EXPENSIVE = ("tanh", "sin", "cos", "pow")
"""What costs more to compute again than to write and read (fact: fusion-expensive)."""
EXPENSIVE_S = {(9, 0): 2e-12}
"""Compute capability -> seconds an element that XLA counts for one of these: between 1.7 and 2.4 ps on Hopper. Elsewhere, where they
were written in every program seen, at least 5 ps (A100) and 1 ps (B200)."""
EXPONENTIALS = ("exp", "exp2")
"""What costs more to compute again than a number per row to write (fact: fusion-rows-exponentials)."""


def recomputed_from(device: Device) -> float:
    """Bytes an element from which expensive functions are computed again by kernels that read their argument anyway.

    Writing and reading the result takes longer than the function then.
    """
    gpu = gpu_of_device_kind(device.name)
    return EXPENSIVE_S.get(gpu.compute_capability, inf) * device.bytes_per_s / 2 if gpu else inf
