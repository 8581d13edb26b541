"""Which strategy each op gets: a pairwise cost network with interval memory, its exact shrinking, its solution and bound.

    >>> from shardplan.ilp import Edge, Problem, Usage, solve
    >>> solution = solve(Problem(costs, edges, usages, limit))
    >>> solution.status, solution.states, solution.objective, solution.bound
"""

from .least import LeastMemory, least_memory
from .problem import Edge, Problem, Solution, Usage
from .solve import solve

__all__ = ["Edge", "LeastMemory", "Problem", "Solution", "Usage", "least_memory", "solve"]
