"""Which strategy each op gets, by integer program, and the solver below it."""

from shardplan.ilp.solver import Edge, MinPeak, Problem, Solution, Usage, minimize_peak, solve

__all__ = ["Edge", "MinPeak", "Problem", "Solution", "Usage", "minimize_peak", "solve"]
