"""Which strategy each op gets, by integer program: the searches that price, solve and price again, and the solver below them."""

from shardplan.ilp.solver import Edge, MinPeak, Problem, Solution, Usage, minimize_peak, solve

__all__ = ["Edge", "MinPeak", "Problem", "Solution", "Usage", "minimize_peak", "solve"]
