"""Which reductions XLA for GPU makes in two, because the dims that they reduce do not lie side by side in memory.

    sum of x[n, t, g, c] over t and c      t is reduced first, if it is the longer one: [n, g, c]; then c

The longest run of reduced dims comes first, unless all are short. A kernel of its own reduces what is left, or, where that is few
elements, the kernels that read the result do.

Facts: reduction-split-dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from shardplan.xla_model.row_kernels import Dim, few_elements

SHORT = 8
"""Reduced dims of no more elements are not reduced first (fact: reduction-split-dims)."""


class SplitReduction(NamedTuple):
    """A reduction that is made in two.

    Attributes:
        reduced: how many elements each of the first results is made of.
        rows: whether these lie side by side.
        elements: of the first result.
        alone: whether a kernel of its own makes the second result.
    """

    reduced: int
    rows: bool
    elements: int
    alone: bool


def split_reduction(dims: Sequence[Dim]) -> SplitReduction | None:
    """How the reduction of an array with these dims, the outermost first, is made in two; None if it is not."""
    runs = [[*run] for _, run in groupby((dim for dim in dims if dim.size > 1), lambda dim: dim.reduced)]
    sizes = [math.prod(dim.size for dim in run) if run[0].reduced else 0 for run in runs]
    if sum(size > 0 for size in sizes) < 2 or (longest := max(sizes)) <= SHORT:
        return None
    at = sizes.index(longest)
    left = [dim for n, run in enumerate(runs) if n != at for dim in run]
    return SplitReduction(longest, at == len(runs) - 1, math.prod(dim.size for dim in left), not few_elements(left))
