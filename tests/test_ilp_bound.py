"""Laws of bounds and proofs: reparametrization changes no choice's cost, targets are valid, nothing depends on numba or hashing."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import MODELS
from sweeps import sweep
from test_ilp import brute_force, chain, choices, laws, networks

import shardplan
from shardplan.ilp import Edge, Problem, Usage
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.deadline import Deadline, OutOfTimeError
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.relax import trws
from shardplan.ilp.solver.relax.buckets import BucketElimination
from shardplan.ilp.solver.relax.dual import Relaxation
from shardplan.ilp.solver.relax.fixing import bound
from shardplan.ilp.solver.search import branch, cpsat
from shardplan.ilp.solver.search.branch import BranchAndBound, Incumbent, Subproblem
from shardplan.ilp.solver.search.repair import LocalSearch, repair_and_descend
from shardplan.ilp.solver.settings import DEFAULT, Settings
from shardplan.ilp.solver.solve import Chain


def grid(side, k, seed=0, tight=None):
    """A grid, whose treewidth elimination cannot afford, with memory that binds at `tight` of what cheap states hold."""
    rng = np.random.default_rng(seed)
    n = side * side
    costs = tuple(rng.integers(0, 1000, k).astype(float) for _ in range(n))
    pairs = [(i, i + 1) for i in range(n) if (i + 1) % side] + [(i, i + side) for i in range(n - side)]
    edges = tuple(Edge(i, j, rng.integers(0, 1000, (k, k)).astype(float)) for i, j in pairs)
    usages = tuple(Usage(i, i, min(n, i + 3 * side), rng.integers(1, 100, k).astype(float)) for i in range(n))
    problem = Problem(costs, edges, usages)
    if tight is None:
        return problem
    cheap = [int(c.argmin()) for c in costs]
    return Problem(costs, edges, usages, float(int(tight * problem.peak(cheap))))


def presolved(**kinds):
    """Presolved networks that have an answer."""
    return networks(**kinds).map(presolve).filter(lambda small: small.feasible).map(lambda small: small.problem)


def reparametrized(problem, messages):
    """The problem with the reparametrization that TRW-S has reached."""
    costs, committed = messages.commit(problem.cost_row, 2.0**-20)
    tables = [e.cost - m_i[:, None] - m_j for e, (m_i, m_j) in zip(problem.edges, committed, strict=True)]
    return Problem(tuple(costs), tuple(Edge(e.i, e.j, t) for e, t in zip(problem.edges, tables, strict=True)))


@laws
@given(presolved(limit=False), st.booleans())
def test_reparametrization_changes_no_choices_cost_and_bounds_them_all(problem, compiled):
    messages = trws.TRWS(problem, compiled)
    messages.iterate(problem.cost_row, 5)
    moved = reparametrized(problem, messages)
    for states in choices(problem):
        assert moved.objective(states) == problem.objective(states)
    least = sum(c.min() for c in moved.costs) + sum(e.cost.min() for e in moved.edges)
    assert least <= min(problem.objective(states) for states in choices(problem))


@pytest.mark.parametrize("tight", [None, 0.8])
def test_every_round_of_trws_bounds_more_and_so_does_any_mini_bucket_partition(tight):
    """Committed messages include every node's last share, so the least entries add up to a bound that only rises."""
    problem, before = grid(7, 5, tight=tight), -np.inf
    messages = trws.TRWS(problem)
    for _ in range(6):
        messages.iterate(problem.cost_row, 1)
        moved = reparametrized(problem, messages)
        least = sum(c.min() for c in moved.costs) + sum(e.cost.min() for e in moved.edges)
        assert least >= before - 1e-3
        assert all(
            BucketElimination(problem, cap).run(*messages.commit(problem.cost_row, 2.0**-20)).value >= least for cap in (1, 30, 200)
        )
        before = least


@pytest.mark.parametrize("room", [5e3, 2e4, 1e5])
def test_all_bucket_tables_together_stay_within_their_total(room, monkeypatch):
    """Memory of a bound grows neither with the entries a bucket table may have, nor with the largest edge."""
    settings, problem = Settings(exact_states=0, total_entries=room), grid(8, 6)
    assert BucketElimination(problem, 1 << 16).size > room >= Relaxation(problem, 1 << 16, settings=settings).elimination.size
    assert bound(problem, np.inf, 1 << 16, 0, settings=settings).value <= sum(e.cost.max() for e in problem.edges) + sum(
        c.max() for c in problem.costs
    )


def test_prices_keep_their_bits_however_large_some_costs_are():
    """Bytes are quantized where that lets prices be finer than the unit in which sums of costs are exact."""
    problem = grid(6, 4, tight=0.6)
    problem = replace(problem, usages=tuple(replace(u, bytes=2.0**20 * u.bytes) for u in problem.usages), limit=2.0**20 * problem.limit)
    dear = replace(problem, costs=(*problem.costs, np.array([0.0, 2.0**42])))
    plain, same = (bound(p, np.inf, 1 << 16, 30).value for p in (problem, dear))
    assert bound(replace(problem, usages=(), limit=None), np.inf, 1 << 16, 0).value < 0.95 * plain < same <= solve(problem).objective


def test_trws_makes_small_mini_buckets_bound_well(monkeypatch):
    settings = Settings(exact_states=0, first_rounds=(4, 4))  # after many rounds single edges bound as well
    problem = grid(8, 6)
    best = solve(problem, work_limit=40.0)
    bare, good = (bound(problem, np.inf, cap, 0, settings=settings).value for cap in (1, 300))
    assert best.status == "optimal"
    assert bare <= good <= best.objective
    assert good > 0.9 * best.objective


def test_compiled_rounds_are_the_same_to_the_last_bit(monkeypatch):
    """And take over once numpy has visited as many entries as loading them costs; tables may be row-major, column-major or strided."""
    pytest.importorskip("numba")
    whole = grid(6, 5)
    orders = (np.ascontiguousarray, np.asfortranarray, lambda table: np.repeat(table, 2, axis=1)[:, ::2])
    problem = replace(whole, edges=tuple(e._replace(cost=orders[n % 3](e.cost)) for n, e in enumerate(whole.edges)))
    plain, later, compiled = trws.TRWS(problem, compiled=False), trws.TRWS(problem), trws.TRWS(problem, compiled=True)
    plain.iterate(problem.cost_row, 7)
    monkeypatch.setattr(trws, "LOADING", 0.0)
    monkeypatch.setattr(trws.TRWS, "visited", 0.0)
    monkeypatch.setattr(trws, "kernels_loaded", lambda: False)
    later.iterate(problem.cost_row, 3)
    assert later.compiled is None
    later.iterate(problem.cost_row, 4)
    compiled.iterate(problem.cost_row, 7)
    assert plain.compiled is None and later.compiled is not None
    assert plain.messages.tobytes() == later.messages.tobytes() == compiled.messages.tobytes() and plain.messages.any()


@laws
@given(presolved(), st.sampled_from([0, DEFAULT.exact_states]))
def test_a_min_marginal_bounds_every_choice_that_takes_the_state(problem, small):
    result = bound(problem, np.inf, 8, 4, settings=Settings(exact_states=small))
    fitting = [s for s in choices(problem) if problem.limit is None or problem.peak(s) <= problem.limit]
    for states in fitting:
        cost = problem.objective(states)
        assert result.value <= cost
        assert all(result.min_marginals[i][s] <= cost for i, s in enumerate(states))
        assert result.reduced_cost_fixing(problem, cost).objective(states) == cost


def test_pairs_are_fixed_whose_states_survive():
    equal, costs = np.where(np.eye(2), 0.0, 9.0), (np.zeros(2),) * 3
    problem = Problem(costs, (Edge(0, 1, equal), Edge(1, 2, equal)))
    left = bound(problem, np.inf, 8, 4).reduced_cost_fixing(problem, 5.0)
    assert all(map(np.array_equal, left.costs, costs))
    assert all(np.array_equal(e.cost, np.where(np.eye(2), 0.0, np.inf)) for e in left.edges)
    assert not presolve(left, dominance=0).problem.edges  # what follows is decided


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_core_search_takes_more_states_where_few_hold_no_answer(share):
    problem = grid(6, 4)
    settings = Settings(core_share=share)
    chain = Chain(Subproblem(problem, tuple, 0.0), Incumbent(problem, None), Deadline(work=2.0), settings)
    chain.tree.repaired_points = 0
    chain.core_search(chain.subproblem, chain.bound())
    assert chain.incumbent.found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", [{}, {"core": 0}, {"core": 0, "hard": 0}, {"core": 0, "hard": 0, "bucket_entries": 1}])
def test_targets_below_the_optimum_are_proven_empty_and_targets_above_find_it(seed, how):
    settings = Settings(exact_states=0) if "bucket_entries" in how else DEFAULT
    problem = chain(9, 3, seed=seed, limit=250.0)
    best = brute_force(problem)
    small = presolve(problem)
    subproblem = Subproblem(small.problem, small.invert, small.offset, **how)
    for target, found in ((best - 1, np.inf), (best, best), (2 * best, best)):
        incumbent = Incumbent(problem, None)
        tree = BranchAndBound(incumbent, Deadline(work=20.0), settings)
        tree.repaired_points = 0  # answers come from the search alone
        assert tree.search([subproblem], target, 1.0) == []
        assert incumbent.objective == found
        if np.isfinite(found):
            assert problem.objective(incumbent.states) == best and problem.peak(incumbent.states) <= problem.limit


OVER = Deadline(0.0)


def test_every_link_stops_within_itself_at_the_time_limit():
    problem = grid(6, 4, tight=0.8)
    result = bound(problem, np.inf, 16, 0)
    subproblem = Subproblem(problem, tuple, 0.0)
    for link in (
        lambda: presolve(problem, deadline=OVER),
        lambda: trws.TRWS(problem, deadline=OVER).iterate(problem.cost_row, 1),
        lambda: BucketElimination(problem, 16, OVER),
        lambda: bound(problem, np.inf, 16, 0, deadline=OVER),
        lambda: subproblem.restrict(result, result.value * 1.1, deadline=OVER),
    ):
        with pytest.raises(OutOfTimeError):
            link()


class Stopwatch:
    """Time that stands still for a number of looks, and is over then."""

    def __init__(self, looks: int):
        self.left = looks

    def monotonic(self) -> float:
        self.left -= 1
        return 0.0 if self.left >= 0 else 1e9


@pytest.mark.parametrize("large", [0, 20_000])
@pytest.mark.parametrize("looks", sweep([1, 30, 1_000, 10_000, 30_000], lambda looks: looks == 30_000))
def test_at_whichever_look_the_time_is_over_the_search_ends_with_its_incumbent(large, looks, monkeypatch):
    problem, watch = grid(25, 4, tight=0.8), Stopwatch(looks)
    for module in ("deadline", "primal.iterated_search"):
        if importlib.util.find_spec("numba") or module == "deadline":
            monkeypatch.setattr(importlib.import_module(f"shardplan.ilp.solver.{module}"), "time", watch)
    answer = solve(problem, time_limit=1e6, settings=Settings(large_states=large))
    assert -10 <= watch.left < 0
    assert problem.lower_bound() <= answer.bound <= 541_790.0  # of an answer that is known
    assert answer.states or looks < 30_000
    if answer.states:
        assert problem.objective(answer.states) == answer.objective >= answer.bound
        assert problem.peak(answer.states) <= problem.limit


def test_subproblems_not_searched_in_time_remain_to_be_searched():
    problem = grid(6, 4, tight=0.8)
    deadline = Deadline(1e3)
    deadline.check = OVER.check
    tree = BranchAndBound(Incumbent(problem, None), deadline)
    subproblem = Subproblem(problem, tuple, 0.0, core=0)
    assert tree.search([subproblem], np.inf, 1.0) == [subproblem]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("large", [0, 20_000])
def test_a_small_problem_has_an_answer_without_any_time(compiled, large, monkeypatch):
    if not compiled:
        monkeypatch.setattr(Chain, "primal", None)
    problem = grid(6, 4, tight=0.8)
    answer = solve(problem, time_limit=0.0, settings=Settings(large_states=large))
    assert answer.status == "feasible" and np.isfinite(answer.objective) and problem.peak(answer.states) <= problem.limit


@laws
@given(networks())
def test_dominated_states_that_remain_for_want_of_time_change_no_optimum(problem):
    small, whole = presolve(problem, deadline=Deadline(work=0.0)), solve(problem)
    if small.feasible and whole.states:
        assert solve(small.problem).objective + small.offset == whole.objective


def test_a_subproblem_without_a_limit_gets_larger_buckets_before_branching(monkeypatch):
    def never(result, surviving):
        raise AssertionError

    problem = replace(grid(5, 4), usages=())
    best = solve(problem).objective
    monkeypatch.setattr(branch, "split", never)
    tree = BranchAndBound(Incumbent(problem, None), Deadline(work=20.0), Settings(exact_states=0))
    assert tree.search([Subproblem(problem, tuple, 0.0, core=0, bucket_entries=16)], best - 1, 1.0) == []


def test_capacity_is_relaxed_only_where_no_byte_has_a_price():
    for tight, looked in ((0.8, True), (0.6, False)):
        problem = grid(6, 4, tight=tight)
        small = presolve(problem)
        links = Chain(Subproblem(small.problem, small.invert, small.offset), Incumbent(problem, None), Deadline(work=2.0))
        assert not links.relax_capacity() and np.isfinite(links.incumbent.bound) == looked != links.bound().best.prices.any()


@laws
@given(presolved())
def test_messages_carried_through_presolve_change_no_choices_cost(problem):
    messages = trws.TRWS(problem)
    messages.iterate(problem.cost_row, 5)
    small = presolve(Problem(tuple(np.where(np.arange(len(c)) % 3 < 2, c, np.inf) for c in problem.costs), problem.edges))
    if not small.feasible:
        return
    part, carried = small.problem, small.carry_messages(messages.sent_messages())
    assert all(len(m) == len(part.costs[i]) for (i, _), m in carried.items())
    moved = reparametrized(part, trws.TRWS(part, messages=carried))
    assert all(moved.objective(states) == part.objective(states) for states in choices(part))


@laws
@given(networks())
def test_parts_without_a_search_for_dominated_states_keep_the_optimum(problem):
    small = presolve(problem, dominance=0)
    whole = solve(problem)
    if small.feasible and whole.states:
        best = solve(small.problem)
        assert best.objective + small.offset == whole.objective == problem.objective(small.invert(best.states))


@pytest.mark.slow
def test_three_axes_and_a_tight_budget_are_proven():
    create, step, batches = MODELS["hybrid_mlp"]()
    state, batch = jax.eval_shape(create, jax.random.key(0)), next(iter(batches(1)))
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("data", "model", "expert"))
    peak = shardplan.auto(mesh, donate_argnums=0, cluster="h100")(step).plan(state, batch).memory().peak
    for share in (0.7, 0.4):
        tight = shardplan.auto(mesh, donate_argnums=0, cluster="h100", memory=share * peak)(step).plan(state, batch)
        assert tight.memory().peak <= share * peak
        assert solve(tight.context.planned.network.problem).status == "optimal"


def test_cpsat_answers_within_the_cutoff_or_proves_that_nothing_does():
    problem = chain(7, 3, seed=2, limit=220.0)
    best = brute_force(problem)
    assert problem.objective(cpsat.solve_core(problem, work=5.0).states) == best
    assert problem.objective(cpsat.solve_core(problem, work=5.0, cutoff=best).states) == best
    assert problem.objective(cpsat.solve_core(problem, work=5.0, cutoff=1e30).states) == best
    none = cpsat.solve_core(problem, work=5.0, cutoff=best - 1)
    assert none.status == "infeasible" and none.bound == np.inf and none.states == ()


def test_repaired_states_fit_and_no_single_flip_pays():
    problem = grid(6, 4, tight=0.9)
    local = LocalSearch(problem)
    rng = np.random.default_rng(1)
    for _ in range(5):
        states = repair_and_descend(local, [int(rng.integers(len(c))) for c in problem.costs])
        assert states is not None and problem.peak(states) <= problem.limit
        cost = problem.objective(states)
        assert cost + local.flip_gains[local.start[0]] == problem.objective((0, *states[1:]))
        for i in range(len(states)):
            for s in range(len(problem.costs[i])):
                other = (*states[:i], s, *states[i + 1 :])
                assert problem.objective(other) >= cost or problem.peak(other) > problem.limit


SCRIPT = """
import sys; sys.path.insert(0, "tests")
if sys.argv[1] == "without": sys.modules["numba"] = None
from test_ilp_bound import grid
from test_ilp import chain
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.relax import trws
if sys.argv[1] == "compiled": trws.LOADING = -1.0
print([solve(p, work_limit=2.0) for p in (grid(7, 5, tight=0.9), grid(5, 6, 1, tight=0.8), chain(40, 5, limit=1000.0))])
"""


@pytest.mark.slow
def test_same_answer_with_and_without_numba_and_with_other_hashing():
    def answer(how, seed):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT, how]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    pytest.importorskip("numba")
    assert answer("without", "1") == answer("compiled", "2") == answer("with", "3") != ""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("digits_cnn", (2, 4)), ("dlrm", (8,)), ("face_softmax", (2, 4))])
def test_tight_budgets_are_proven_within_one_percent(name, shape):
    create, step, batches = MODELS[name]()
    state, batch = jax.eval_shape(create, jax.random.key(0)), next(iter(batches(1)))
    mesh = jax.sharding.AbstractMesh(shape, ("data", "model")[: len(shape)])
    free = shardplan.auto(mesh, donate_argnums=0, cluster="h100")(step).plan(state, batch)
    for share in (0.4, 0.2):
        tight = shardplan.auto(mesh, donate_argnums=0, cluster="h100", memory=share * free.memory().peak)(step).plan(state, batch)
        assert tight.memory().peak <= share * free.memory().peak
        answer = solve(tight.context.planned.network.problem)
        assert answer.status == "optimal" or answer.gap < 0.01
        assert tight.seconds["total"] >= free.seconds["bound"]
