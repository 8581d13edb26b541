"""Observed cost corrections: what a compiled plan took beyond the model's seconds; `feedback` measures it, the cost network adds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.costs.edge_templates import EdgeTemplate
from shardplan.costs.step_seconds import PS
from shardplan.mesh.layout import Layout

ReshardKey = tuple[int, int, Layout, Layout]
"""(op, operand, layout it is made in, layout it is read in)."""


@dataclass(frozen=True)
class CostCorrections:
    """Seconds per step beyond the model's, by (op, strategy) and by reshard, as observed in a compiled plan."""

    strategies: Mapping[tuple[int, int], float]
    reshards: Mapping[ReshardKey, float]

    def __bool__(self) -> bool:
        return bool(self.strategies or self.reshards)

    def on_nodes(self, n_strategies: Sequence[int], n_states: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """(op, picoseconds [state]) of every corrected strategy."""
        for (i, s), seconds in self.strategies.items():
            yield i, np.where(np.arange(n_states[i]) % n_strategies[i] == s, np.rint(seconds * PS), 0.0)

    def on_edge(self, j: int, k: int, template: EdgeTemplate, cost: np.ndarray) -> np.ndarray:
        """The picoseconds [state, state] of operand k of op j, with the corrections of its reshards."""
        for (at, operand, before, after), seconds in self.reshards.items():
            if (at, operand) == (j, k):
                made, read = template.result_layouts, template.operand_layouts
                rows, columns = cost.shape[0] // len(made), cost.shape[1] // len(read)
                place = np.outer(np.tile([x == before for x in made], rows), np.tile([x == after for x in read], columns))
                moves = place & np.isfinite(cost) & (cost > 0)
                cost = cost + np.where(moves, 1.0, 0.0) * np.rint(seconds * PS)
        return cost


def merge_corrections(corrections: Iterable[CostCorrections]) -> CostCorrections:
    """All corrections; of those of one choice the largest."""
    strategies: dict[tuple[int, int], float] = {}
    reshards: dict[ReshardKey, float] = {}
    for c in corrections:
        strategies.update({key: max(extra, strategies.get(key, 0.0)) for key, extra in c.strategies.items()})
        reshards.update({key: max(extra, reshards.get(key, 0.0)) for key, extra in c.reshards.items()})
    return CostCorrections(strategies, reshards)
