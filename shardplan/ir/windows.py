"""How many multiply-adds of a sliding window meet data: the count that flops of convolutions rest on."""

from __future__ import annotations

import numpy as np


def window_hits(n: int, taps: int, results: int, stride: int = 1, low: int = 0, dilation: int = 1, spread: int = 1) -> int:
    """Pairs of a window tap and a result that read one of `n` elements, not padding or the gaps of a dilated operand.

    Tap k of result i stands at position i * stride + k * spread - low, element j at j * dilation.

    Args:
        n: elements along the dim.
        taps: taps of the window.
        results: positions of the window.
        stride: step from one position to the next.
        low: padding before the first element.
        dilation: distance between elements (`lhs_dilation`).
        spread: distance between taps (`rhs_dilation`).
    """
    few, many = sorted(((taps, spread), (results, stride)))
    places = np.arange(many[0]) * many[1] - low
    return sum(
        int(np.count_nonzero((p >= 0) & (p <= (n - 1) * dilation) & (p % dilation == 0)))
        for p in (places + k * few[1] for k in range(few[0]))
    )
