"""Solves a small subproblem, the core, with OR-Tools' CP-SAT: (1)-(3) as a 0-1 program.

x[i, s]          node i takes state s, exactly one                                                     (2)
y[e, a, b] >= 0  edge e pays entry (a, b):  sum_b y[e, a, b] = x[i, a],  sum_a y[e, a, b] = x[j, b]     local marginal polytope
(3) at every step; costs in integer units, rounded down so that CP-SAT's bound stays a bound

OR-Tools are loaded by the first core that is solved: most small problems have none, and it imports pandas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.ilp.solver.or_tools import or_tools
from shardplan.ilp.solver.problem import Problem, Solution, Status, Usage

MAX_SUM = 2**52  # sums of all costs that CP-SAT adds without overflow

STATUS: dict[str, Status] = {"OPTIMAL": "optimal", "FEASIBLE": "feasible", "INFEASIBLE": "infeasible"}
"""Every other status of CP-SAT means that work or time ran out: "fallback"."""


def size(problem: Problem) -> int:
    """Size of the 0-1 program: its variables, and a hundredth of the terms in (3)."""
    variables = problem.n_states + sum(int(np.isfinite(e.cost).sum()) for e in problem.edges)
    return variables + sum((u.hi - u.lo) * len(u.bytes) for u in problem.usages) // 100


def solve_core(problem: Problem, *, work: float, seconds: float | None = None, cutoff: float = np.inf) -> Solution:
    """Solves the whole problem as one 0-1 program, in one deterministic thread.

    `work` limits CP-SAT's deterministic seconds, `seconds` the wall-clock time. The answer's bound is inf if there is none within the
    cutoff, and its `stats["work"]` the work done.
    """
    cp_model = or_tools("sat.python.cp_model")

    model, unit = cp_model.CpModel(), _unit(problem)
    x = [[model.new_bool_var("") for _ in c] for c in problem.costs]
    for node in x:
        model.add_exactly_one(node)
    terms, weights = _cost_terms(model, problem, x, unit)
    if problem.limit is not None:
        _limit_memory(model, problem.usages, int(np.floor(problem.limit)), x)
    total = cp_model.LinearExpr.weighted_sum(terms, weights) if terms else 0
    model.minimize(total)
    if np.floor(cutoff / unit) < sum(weights):  # a greater cutoff excludes nothing, and may be more than CP-SAT accepts
        model.add(total <= int(np.floor(cutoff / unit)))
    solver = cp_model.CpSolver()
    _set_parameters(solver.parameters, work, seconds)
    status = STATUS.get(solver.status_name(solver.solve(model)), "fallback")
    if status not in ("optimal", "feasible"):
        return Solution(status, (), np.inf, np.inf if status == "infeasible" else -np.inf, stats={"work": solver.deterministic_time})
    states = tuple(next(s for s, variable in enumerate(node) if solver.boolean_value(variable)) for node in x)
    bound = float(solver.best_objective_bound * unit)
    return Solution(status, states, problem.objective(states), bound, stats={"work": solver.deterministic_time})


def _cost_terms(model, problem: Problem, x, unit: float) -> tuple[list, list[int]]:
    """Variables and integer weights of (1); adds edge variables y where an edge costs anything."""
    terms, weights = [], []

    def pay(variable, cost: float) -> None:
        if np.isinf(cost):
            model.add(variable == 0)
        elif cost:
            terms.append(variable)
            weights.append(int(np.floor(cost / unit)))

    for node, cost in zip(x, problem.costs, strict=True):
        for variable, c in zip(node, cost, strict=True):
            pay(variable, c)
    for e in problem.edges:
        if not e.cost.any():
            continue
        y = {(a, b): model.new_bool_var("") for a, b in np.argwhere(np.isfinite(e.cost)).tolist()}
        for a, variable in enumerate(x[e.i]):
            model.add(sum(y[a, b] for b in range(e.cost.shape[1]) if (a, b) in y) == variable)
        for b, variable in enumerate(x[e.j]):
            model.add(sum(y[a, b] for a in range(e.cost.shape[0]) if (a, b) in y) == variable)
        for (a, b), variable in y.items():
            pay(variable, e.cost[a, b])
    return terms, weights


def _set_parameters(parameters, work: float, seconds: float | None) -> None:
    """CP-SAT, deterministic. Core-based search and no probing prove 28 cores of the planner's in 8 s instead of 24."""
    parameters.num_workers, parameters.random_seed = 1, 0
    parameters.linearization_level, parameters.add_lp_constraints_lazily = 2, False  # the linear relaxation proves most
    parameters.optimize_with_core = True
    parameters.cp_model_probing_level = 0  # reduced-cost fixing found before what probing would find
    parameters.max_deterministic_time = max(work, 1e-3)
    if seconds is not None:
        parameters.max_time_in_seconds = max(seconds, 1e-2)


def _unit(problem: Problem) -> float:
    """Cost per unit of the 0-1 program: 1 if costs are integers that CP-SAT can add, else a power of two that makes them so."""
    arrays = [*problem.costs, *(e.cost for e in problem.edges)]
    finite = [a[np.isfinite(a)] for a in arrays]
    total = sum(float(np.abs(a).max(initial=0.0)) for a in finite)
    unit = 2.0 ** max(0, int(np.ceil(np.log2(max(total, 1.0) / MAX_SUM))))
    integers = all((a == np.floor(a)).all() for a in finite)
    return unit if integers else 2.0 ** int(np.ceil(np.log2(max(total, 1e-300) / MAX_SUM)))


def _limit_memory(model, usages: Sequence[Usage], limit: int, x) -> None:
    """(3) at every step; bytes and limit are rounded down, a relaxation where they are not integers."""
    cp_model = or_tools("sat.python.cp_model")

    rows: list[tuple[list, list]] = [([], []) for _ in range(max((u.hi for u in usages), default=0))]
    for u in usages:
        amounts = np.floor(u.bytes).astype(int).tolist()
        for variables, weights in rows[u.lo : u.hi]:
            variables += x[u.node]
            weights += amounts
    for variables, weights in rows:
        if variables:
            model.add(cp_model.LinearExpr.weighted_sum(variables, weights) <= limit)
