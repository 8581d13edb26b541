"""Drawn problems of the contest's form: their planted states are optimal, and short limits of time find them or nearly."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import iopddl_drawn

from shardplan.ilp.solver import iopddl, solve
from shardplan.ilp.solver.primal.iterated_search import IteratedLocalSearch
from shardplan.ilp.solver.problem import Edge, Problem, Usage

FAMILIES = {
    "layers": iopddl_drawn.Family((2, 4), 10),
    "levels, tight": iopddl_drawn.Family((4, 4), 8, "levels", follow=0.7, tightness=1.05),
    "hub, three axes": iopddl_drawn.Family((2, 2, 2), 6, "hub", follow=0.8, chain=4),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def test_planted_states_are_optimal(family):
    planted = iopddl_drawn.plant(iopddl_drawn.train_step(family, 1), 1)
    assert planted.problem.fits(planted.states)
    assert planted.bound() == pytest.approx(planted.optimum, rel=1e-9)
    assert min(float(t.min()) for t in (*planted.problem.costs, *(e.cost for e in planted.problem.edges))) >= 0


def test_the_solver_proves_what_was_planted():
    planted = iopddl_drawn.plant(iopddl_drawn.train_step(FAMILIES["layers"], 2), 2)
    solution = solve(planted.problem, time_limit=20.0)
    assert solution.objective <= planted.optimum <= solution.bound * (1 + 1e-9) or solution.objective == planted.optimum


@pytest.fixture
def free():
    """400 arrays in a chain: to replicate all is free but for the limit, sharding one costs up to a million, and resharding more."""
    rng, n = np.random.default_rng(0), 400
    reshard = 1e6 * (1.0 - np.eye(4))
    reshard[:, 0] = 0.0
    problem = Problem(
        costs=tuple(np.array([0.0, *rng.integers(1, 10**6, 3)]) for _ in range(n)),
        edges=tuple(Edge(i, i + step, reshard) for step in (1, 7, 40) for i in range(n - step)),
        usages=tuple(Usage(i, i, int(rng.integers(i + 2, n + 2)), np.array([32.0, 8.0, 4.0, 1.0])) for i in range(n)),
    )
    return replace(problem, limit=1.1 * problem.peak([3] * n))


def test_first_prices_are_found_where_only_the_limit_costs_anything(free):
    search = IteratedLocalSearch(free, 4_000)
    _, prices, scale = search._start(1)
    bytes_held = [
        free.usage_table.profile(search.trws_states(search.net.unary + free.usage_table.penalty(p))).max()
        for p in (prices, prices / 16)
    ]
    assert bytes_held[0] < 1.5 * free.limit < bytes_held[1]
    assert scale >= prices.sum() * free.limit


def test_the_first_answer_comes_early_where_only_the_limit_costs_anything(free, monkeypatch):
    iopddl.compile_ahead()
    monkeypatch.setattr(time, "monotonic", time.process_time)  # other processes may keep this one waiting
    found = []
    search = IteratedLocalSearch(free, 4_000)
    for states in search.first_feasible():
        assert free.fits(states)
        found.append(free.objective(states))
    assert len(found) == 2 and found[1] <= found[0]
    best = min(free.objective(states) for states in search.run(0, 4, lambda turn: turn / 100))
    assert found[1] < 1.3 * best and np.isfinite(best)
