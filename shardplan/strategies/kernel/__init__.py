"""How a kernel that the planner can read may be sharded: Pallas calls by their grid, partitioned calls by the rule they bring."""
