"""The planner's other searches, linear in the size of the network: over producers and consumers, and axis by axis."""

from shardplan.propagation.propagate import propagate
from shardplan.propagation.recursive import recursive
from shardplan.propagation.regions import conflicts

__all__ = ["conflicts", "propagate", "recursive"]
