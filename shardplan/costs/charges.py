"""What a compiled plan took beyond the model's seconds: `feedback` measures it, the cost network adds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.mesh.layout import Layout


@dataclass(frozen=True)
class Charges:
    """Seconds per step beyond the model's, as seen in a compiled plan.

    Attributes:
        strategies: by (op, strategy).
        reshards: by (op, operand, layout it is made in, layout it is taken in).
    """

    strategies: Mapping[tuple[int, int], float]
    reshards: Mapping[tuple[int, int, Layout, Layout], float]
