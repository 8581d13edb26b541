"""Which strategy each op gets, by integer program: the searches that price, solve and price again, and the solver below them."""

from shardplan.ilp.solver import Edge, LeastMemory, Problem, Solution, Usage, least_memory, solve

__all__ = ["Edge", "LeastMemory", "Problem", "Solution", "Usage", "least_memory", "solve"]
