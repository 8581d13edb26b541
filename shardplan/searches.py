"""All searches by name. To add one: subclass `search.protocol.Search` in a file of its own, and name it here (docs/searches.md)."""

SEARCHES: dict[str, str] = {
    "ilp": "shardplan.ilp.integer_program:IntegerProgram",
    "propagation": "shardplan.propagation.search:Propagation",
    "recursive": "shardplan.propagation.axis_by_axis:AxisByAxis",
}
"""Name, as in `auto(search=...)` -> "module:class"; text, so that the names are known before a solver is loaded."""
