"""How many multiply-adds of a sliding window meet data: the count that flops of convolutions rest on."""

from __future__ import annotations

import numpy as np


def window_hits(n: int, taps: int, results: int, stride: int = 1, low: int = 0, dilation: int = 1, spread: int = 1) -> int:
    """Pairs of a window tap and a result that read one of `n` elements, not padding or the gaps of a dilated operand.

    Tap k of result i stands at position i * stride + k * spread - low, element j at j * dilation: `low` is the padding before the first
    element, `dilation` is `lhs_dilation`, `spread` is `rhs_dilation`.
    """
    few, many = sorted(((taps, spread), (results, stride)))  # a numpy array of the many, a loop over the few
    starts = np.arange(many[0]) * many[1] - low
    positions = (starts + k * few[1] for k in range(few[0]))
    return sum(int(np.count_nonzero((p >= 0) & (p <= (n - 1) * dilation) & (p % dilation == 0))) for p in positions)
