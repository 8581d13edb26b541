"""Exact search: branch and bound, CP-SAT on cores, repair of relaxed answers."""
