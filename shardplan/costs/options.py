"""What the user asked of the planner, and what a compiled plan taught it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout
from shardplan.xla_model.compiler_options import DEFAULT, XlaOptions

FREE = "*"
"""A dim of a pin that the planner may shard as it likes."""

PinDims = tuple[tuple[str, ...] | str, ...]
"""A pin: per dim its mesh axes, or FREE; dims left out at the end are unsharded."""

ReshardKey = tuple[int, int, Layout, Layout]
"""(op, operand, layout it is made in, layout it is read in)."""


@dataclass(frozen=True)
class CostCorrections:
    """Seconds per step that a compiled plan took beyond the model's, by (op, strategy) and by reshard; `feedback` measures them."""

    strategies: Mapping[tuple[int, int], float]
    reshards: Mapping[ReshardKey, float]


def merge_corrections(corrections: Iterable[CostCorrections]) -> CostCorrections:
    """All corrections; of those of one choice the largest."""
    strategies: dict[tuple[int, int], float] = {}
    reshards: dict[ReshardKey, float] = {}
    for c in corrections:
        strategies.update({key: max(extra, strategies.get(key, 0.0)) for key, extra in c.strategies.items()})
        reshards.update({key: max(extra, reshards.get(key, 0.0)) for key, extra in c.reshards.items()})
    return CostCorrections(strategies, reshards)


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        memory: bytes per device, or None for no limit.
        search: a name in `searches.SEARCHES`.
        time_limit: seconds for the search, or None for its own deterministic work limit.
        in_pins: of inputs, by flat number.
        out_pins: of outputs, by flat number.
        pins: entries of a PartitionSpec by path pattern.
        progress: called by the solver with (states, bound, gap), or None.
        corrections: what strategies and reshards cost beyond the model.
        reserve: fraction of `memory` that is left free if some plan fits in the rest.
        memory_saving: how far memory has to go down from the fastest plan's peak (0) to the lowest one found (1).
        overlap: whether background collectives overlap with compute, on a cluster that can.
        xla: XLA's compiler options to choose among; of equal ones the first.
        own_xla: the user's own compiler options.
        chooses_xla: whether other combine thresholds are tried, too.
        constraints: whether the program's own `with_sharding_constraint`s are kept, only a "hint", or ignored.
    """

    memory: float | None = None
    search: str = "ilp"
    time_limit: float | None = None
    in_pins: Mapping[int, PinDims] = field(default_factory=dict)
    out_pins: Mapping[int, PinDims] = field(default_factory=dict)
    pins: Mapping[str, Sequence] = field(default_factory=dict)
    progress: Any = None
    corrections: CostCorrections | None = None
    reserve: float = 0.0
    memory_saving: float = 0.0
    overlap: bool = True
    xla: tuple[XlaOptions, ...] = (DEFAULT,)
    own_xla: XlaOptions = DEFAULT
    chooses_xla: bool = False
    constraints: Literal["keep", "hint", "ignore"] = "keep"

    def interference(self, cluster: Cluster) -> float:
        """Fraction of the seconds in which kernels and collectives run at once that is lost; 1 where nothing overlaps."""
        return cluster.interference if self.overlap else 1.0
