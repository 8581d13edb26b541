"""Primal heuristics for large problems under a time limit; they need numba."""
