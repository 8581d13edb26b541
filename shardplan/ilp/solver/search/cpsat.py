"""What CP-SAT makes of the core that the other links leave: (1)-(3) as a 0-1 program.

x[i, s]          node i takes state s, exactly one                                                     (3)
y[e, a, b] >= 0  edge e pays table entry (a, b):  sum_b y[e, a, b] = x[i, a],  sum_a y[e, a, b] = x[j, b]
(2) for the steps that can be broken; costs in whole units, rounded down so that its bound stays a bound
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from shardplan.ilp.solver.problem import Problem

LARGEST = 2**52
SLOWER = 1.0  # seconds per deterministic second of CP-SAT, roughly
STATUS = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible", cp_model.INFEASIBLE: "infeasible"}


@dataclass(frozen=True)
class Answer:
    """CP-SAT's word: "optimal", "feasible", "infeasible" or "unknown"; states or (); a valid lower bound of (1); work done."""

    status: str
    states: tuple[int, ...]
    bound: float
    work: float


def entries(problem: Problem) -> int:
    """Size of the program: variables it would have, and a hundredth of the terms in (2)."""
    variables = problem.n_states + sum(int(np.isfinite(e.cost).sum()) for e in problem.edges)
    return variables + sum((u.hi - u.lo) * len(u.bytes) for u in problem.usages) // 100


def solve_core(
    problem: Problem,
    *,
    work: float,
    seconds: float | None = None,
    most: float = np.inf,
) -> Answer:
    """Solves the whole problem as one 0-1 program, in one deterministic thread.

    Args:
        work: about seconds.
        seconds: wall-clock limit, if any.
        most: only answers that cost at most this much are wanted; the bound is inf when there are none.
    """
    model = cp_model.CpModel()
    unit = _unit(problem)
    x = [[model.new_bool_var("") for _ in c] for c in problem.costs]
    for node in x:
        model.add_exactly_one(node)
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
    _limit(model, problem, x)
    model.minimize(cp_model.LinearExpr.weighted_sum(terms, weights) if terms else 0)
    if np.floor(most / unit) < sum(weights):  # else any answer will do, and the number may be more than CP-SAT takes
        model.add(cp_model.LinearExpr.weighted_sum(terms, weights) <= int(np.floor(most / unit)))

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2  # the linear relaxation is what proves here
    solver.parameters.add_lp_constraints_lazily = False
    solver.parameters.optimize_with_core = True
    solver.parameters.cp_model_probing_level = 0  # what probing finds, bounds have found before
    solver.parameters.max_deterministic_time = max(work / SLOWER, 1e-3)
    if seconds is not None:
        solver.parameters.max_time_in_seconds = max(seconds, 1e-2)

    status = solver.solve(model)
    name = STATUS.get(status, "unknown")
    states = _read(solver, x) if name in ("optimal", "feasible") else ()
    bound = {"infeasible": np.inf, "unknown": -np.inf}.get(name, solver.best_objective_bound * unit)
    return Answer(name, states, float(bound), SLOWER * solver.deterministic_time)


def _read(solver, x) -> tuple[int, ...]:
    return tuple(next(s for s, variable in enumerate(node) if solver.boolean_value(variable)) for node in x)


def _unit(problem: Problem) -> float:
    """1 when every cost is a whole number that CP-SAT can add up; else a power of two that makes the sums fit."""
    arrays = [*problem.costs, *(e.cost for e in problem.edges)]
    finite = [a[np.isfinite(a)] for a in arrays]
    total = sum(float(np.abs(a).max(initial=0.0)) for a in finite)
    unit = 2.0 ** max(0, int(np.ceil(np.log2(max(total, 1.0) / LARGEST))))
    if all((a == np.floor(a)).all() for a in finite):
        return unit
    return 2.0 ** int(np.ceil(np.log2(max(total, 1e-300) / LARGEST)))


def _limit(model, problem: Problem, x) -> None:
    """(2) at every step; bytes and limit are rounded down, which is a relaxation where they are not whole numbers."""
    if problem.limit is None:
        return
    rows: list[tuple[list, list]] = [([], []) for _ in range(max((u.hi for u in problem.usages), default=0))]
    for u in problem.usages:
        amounts = [int(np.floor(b)) for b in u.bytes]
        for variables, weights in rows[u.lo : u.hi]:
            variables += x[u.node]
            weights += amounts
    for variables, weights in rows:
        if variables:
            model.add(cp_model.LinearExpr.weighted_sum(variables, weights) <= int(np.floor(problem.limit)))
