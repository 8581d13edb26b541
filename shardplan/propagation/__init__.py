"""The planner's other search: no integer program, linear in the size of the network."""

from shardplan.propagation.propagate import propagate

__all__ = ["propagate"]
