"""A solver of pairwise cost networks with interval memory; it imports neither jax nor any other part of shardplan.

>>> from shardplan.ilp.solver import Edge, Problem, Usage, solve
>>> solution = solve(Problem(costs, edges, usages, limit))
>>> solution.status, solution.states, solution.objective, solution.bound
"""

from shardplan.ilp.solver.min_peak import MinPeak, minimize_peak
from shardplan.ilp.solver.problem import Edge, Problem, Solution, Usage
from shardplan.ilp.solver.solve import solve

__all__ = ["Edge", "MinPeak", "Problem", "Solution", "Usage", "minimize_peak", "solve"]
