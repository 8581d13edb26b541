"""Observed cost corrections: what a compiled plan took beyond the model's seconds; `feedback` measures it, the cost network adds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardplan.mesh.layout import Layout

ReshardKey = tuple[int, int, Layout, Layout]
"""(op, operand, layout it is made in, layout it is read in)."""


@dataclass(frozen=True)
class CostCorrections:
    """Seconds per step beyond the model's, as observed in a compiled plan.

    Attributes:
        strategies: by (op, strategy).
        reshards: by op, operand and layouts.
    """

    strategies: Mapping[tuple[int, int], float]
    reshards: Mapping[ReshardKey, float]

    def __bool__(self) -> bool:
        return bool(self.strategies or self.reshards)


def merge_corrections(corrections: Iterable[CostCorrections]) -> CostCorrections:
    """All corrections; of those of one choice the largest."""
    strategies: dict[tuple[int, int], float] = {}
    reshards: dict[ReshardKey, float] = {}
    for c in corrections:
        strategies.update({key: max(extra, strategies.get(key, 0.0)) for key, extra in c.strategies.items()})
        reshards.update({key: max(extra, reshards.get(key, 0.0)) for key, extra in c.reshards.items()})
    return CostCorrections(strategies, reshards)
