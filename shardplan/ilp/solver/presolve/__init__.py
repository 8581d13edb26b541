"""Exact reductions of a problem, and the way back for its answers."""
