"""What the user asked of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardplan.costs.corrections import CostCorrections

FREE = "*"
"""A dim of a pin that the planner may shard as it likes."""

PinDims = tuple[tuple[str, ...] | str, ...]
"""A pin: per dim its mesh axes, or FREE; dims left out at the end are unsharded."""


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
        corrections: what strategies and reshards cost beyond the model, as observed in a compiled plan.
        memory_saving: how far memory has to go down from the fastest plan's peak (0) to that of least average memory (1).
        overlap: whether background collectives overlap with compute, on a cluster that can.
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
    memory_saving: float = 0.0
    overlap: bool = True
    constraints: Literal["keep", "hint", "ignore"] = "keep"
