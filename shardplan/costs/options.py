"""What a person asked of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardplan.costs.corrections import CostCorrections

if TYPE_CHECKING:
    from shardplan.costs.pins import PinDims


@dataclass(frozen=True)
class Options:
    """What a person asked for.

    Attributes:
        memory: bytes per device, or None for no limit.
        search: one of `searches.SEARCHES`.
        time_limit: seconds for the search, or None for its own deterministic limit.
        in_pins, out_pins: by flat number.
        pins: entries of a PartitionSpec by path pattern.
        corrections: what strategies and reshards cost beyond the model, as observed in a compiled plan.
        thrift: part of the way from the fastest plan's peak to the leanest plan's that memory has to go down.
        overlap: whether collectives that nobody waits for run beside other work, on a cluster that lets them.
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
