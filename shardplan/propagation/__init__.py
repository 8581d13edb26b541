"""The planner's other searches, linear in the size of the network: over producers and consumers, and axis by axis."""

from shardplan.propagation.axis_by_axis import recursive
from shardplan.propagation.conflicts import conflicts
from shardplan.propagation.propagate import propagate

__all__ = ["conflicts", "propagate", "recursive"]
