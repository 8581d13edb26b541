"""All searches by name. To add one: subclass `Search` in a file of its own, and name it here."""

from __future__ import annotations

from shardplan.ilp.integer_program import IntegerProgram
from shardplan.ilp.search import Search
from shardplan.propagation.axis_by_axis import AxisByAxis
from shardplan.propagation.search import Propagation

SEARCHES: dict[str, type[Search]] = {"ilp": IntegerProgram, "propagation": Propagation, "recursive": AxisByAxis}
"""Name, as in `auto(search=...)` -> class."""
