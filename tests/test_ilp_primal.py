"""Laws of primal search: kernels count what the problem says, and moves never increase the cost."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_ilp import brute_force, chain

pytest.importorskip("numba")

from shardplan.ilp.solver import kernels, solve
from shardplan.ilp.solver.primal.iterated_search import IteratedLocalSearch
from shardplan.ilp.solver.primal.tree_moves import elimination_schedule, tree_move
from shardplan.ilp.solver.relax.buckets import BucketElimination
from shardplan.ilp.solver.relax.fixing import bound


@pytest.fixture
def problem():
    return chain(12, 4, seed=3, limit=400.0)


@pytest.fixture
def some(problem):
    rng = np.random.default_rng(0)
    return [np.array([rng.integers(len(c)) for c in problem.costs]) for _ in range(20)]


def test_flat_arrays_say_what_the_problem_says(problem, some):
    net = kernels.flatten(problem)
    for states in some:
        assert kernels.objective(net, states) == problem.objective(states)
        assert np.array_equal(problem.usage_table.profile(states), problem.memory(states))
        tree = kernels.profile_tree(net, states)
        for lo, hi in ((0, net.steps), (2, 5), (7, 8)):
            assert kernels.tree_max(tree, lo, hi) == problem.memory(states)[lo:hi].max()


def test_a_field_is_the_change_of_cost(problem, some):
    net = kernels.flatten(problem)
    for states in some:
        field = kernels.conditional_costs(net, states, np.zeros(len(net.unary)))
        for i in range(len(states)):
            for s in range(len(problem.costs[i])):
                other = states.copy()
                other[i] = s
                change = field[net.start[i] + s] - field[net.start[i] + states[i]]
                assert change == problem.objective(other) - problem.objective(states)


@pytest.mark.parametrize("cap", [4, 16, 64, 1 << 20])
def test_a_tree_move_is_the_optimum_given_the_fixed_nodes(problem, some, cap):
    net = kernels.flatten(problem)
    schedule = elimination_schedule(net, cap, np.linspace(1, 2, len(problem.costs)))
    for states in some:
        after = states.copy()
        tree_move(net, schedule, np.zeros(len(net.unary)), after)
        assert (after[schedule.fixed] == states[schedule.fixed]).all()
        assert problem.objective(after) <= problem.objective(states)
        if not schedule.fixed.any():
            free = chain(12, 4, seed=3)
            assert problem.objective(after) == BucketElimination(free).run().value


def test_repaired_states_fit(problem, some):
    iterated = IteratedLocalSearch(problem, 64)
    fitted = [next(iterated.feasible(states, 1e4), None) for states in some]
    assert any(states is not None for states in fitted)
    assert all(problem.peak(states) <= problem.limit for states in fitted if states is not None)


def test_a_first_answer_fits_where_the_cheapest_states_are_far_from_it():
    problem = chain(40, 5, seed=3, limit=600.0)
    assert problem.peak([int(c.argmin()) for c in problem.costs]) > 1.2 * problem.limit
    found = next(IteratedLocalSearch(problem, 64).first_feasible())
    assert problem.peak(found) <= problem.limit and np.isfinite(problem.objective(found))


def test_prices_that_follow_the_memory_bound_nearly_as_well_as_the_optimum_allows():
    problem = chain(40, 5, seed=3, limit=850.0)
    iterated = IteratedLocalSearch(problem, 64)
    list(iterated.run(0, 4, lambda turn: turn / 20))
    prices, best = iterated.ascend_dual(iterated.prices, 300), solve(problem).objective
    high, free = (bound(problem, np.inf, 1, 0, p, iterated.trws.sent_messages()).value for p in (prices, np.zeros(len(prices))))
    assert free < high <= best and high - free > 0.8 * (best - free)


def test_runs_find_the_optimum_of_a_small_problem_and_repeat_themselves():
    problem = chain(8, 3, seed=1, limit=250.0)

    def best():
        iterated = IteratedLocalSearch(problem, 64)
        found = [s for number in range(4) for s in iterated.run(number, 4, lambda turn: turn / 60)]
        assert all(problem.peak(s) <= problem.limit for s in found)
        return min(found, key=problem.objective)

    assert problem.objective(best()) == brute_force(problem)
    assert best() == best()


SIGNATURES = """
import numba
from shardplan.ilp.solver import kernels
from shardplan.ilp.solver.primal import iterated_search, tree_moves
from test_ilp import chain

def compiled():
    jitted = [f for m in (kernels, tree_moves) for f in vars(m).values() if isinstance(f, numba.core.dispatcher.Dispatcher)]
    return sum(len(f.signatures) for f in jitted)

iterated_search.compile_kernels()
before = compiled()
iterated = iterated_search.IteratedLocalSearch(chain(40, 5, seed=1, limit=400), 50)
assert list(iterated.run(0, 4, lambda turn: turn / 200))
iterated.ascend_dual(iterated.prices, 3)
assert before and compiled() == before, (before, compiled())
"""


def test_compiling_ahead_leaves_nothing_to_compile():
    """In a process of its own, where nothing has been called yet."""
    subprocess.run([sys.executable, "-c", SIGNATURES], check=True, cwd=Path(__file__).parent)
