"""Laws of the solver: it equals brute force on small networks; its bounds and reductions are valid."""

import dataclasses
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardplan.ilp import Edge, Problem, Usage, minimize_peak
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.presolve.timeline import remove_redundant_steps
from shardplan.ilp.solver.relax.buckets import BucketElimination

laws = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def networks(draw, limit=True, ties=False, largest=20, forbidden=0.15):
    """Random networks of up to 6 nodes with up to 4 states."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n = draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, 4))] * n if ties else [draw(st.integers(1, 4)) for _ in range(n)]

    def table(*shape):
        values = rng.integers(0, largest, shape).astype(float)
        return np.where(rng.random(shape) < forbidden, np.inf, values)

    shared = {}
    pairs = list(itertools.combinations(range(n), 2)) or [(0, 0)]
    edges = []
    for _ in range(draw(st.integers(0, 2 * n))):
        i, j = pairs[rng.integers(len(pairs))]
        if i != j:
            i, j = (i, j) if rng.random() < 0.5 else (j, i)
            cost = table(sizes[i], sizes[j])
            if rng.random() < 0.3:
                cost = shared.setdefault(cost.shape, cost)
            edges.append(Edge(i, j, cost))
    usages = []
    for _ in range(draw(st.integers(0, 8)) if limit else 0):
        i, lo = int(rng.integers(n)), int(rng.integers(6))
        usages.append(Usage(i, lo, lo + int(rng.integers(4)), rng.integers(0, 10, sizes[i]).astype(float)))
    return Problem(
        costs=tuple(table(k) if rng.random() < 0.5 else rng.integers(0, largest, k).astype(float) for k in sizes),
        edges=tuple(edges),
        usages=tuple(usages),
        limit=float(draw(st.integers(0, 25))) if limit else None,
        ties=tuple(int(c) for c in rng.integers(0, 3, n)) if ties else (),
    )


def choices(problem):
    for states in itertools.product(*(range(len(c)) for c in problem.costs)):
        first = {}
        if not problem.ties or all(first.setdefault(c, s) == s for c, s in zip(problem.ties, states, strict=True)):
            yield states


def brute_force(problem):
    """The least cost of a choice that fits, inf when none does."""
    return min(
        (problem.objective(s) for s in choices(problem) if problem.limit is None or problem.peak(s) <= problem.limit),
        default=np.inf,
    )


def check(problem, solution):
    best = brute_force(problem)
    if np.isinf(best):
        assert solution.status == "infeasible" and solution.states == ()
        return
    assert solution.status == "optimal"
    assert solution.objective == solution.bound == best == problem.objective(solution.states)
    assert problem.limit is None or problem.peak(solution.states) <= problem.limit


@laws
@given(networks(limit=False))
def test_equals_brute_force_without_a_limit(problem):
    check(problem, solve(problem))


@laws
@given(networks())
def test_equals_brute_force_under_a_limit(problem):
    check(problem, solve(problem))


@laws
@given(networks(), st.integers(-3, 3))
def test_answers_above_the_cutoff_are_not_returned(problem, more):
    best = brute_force(problem)
    most = (best if np.isfinite(best) else 10.0) + more
    hint = next((s for s in choices(problem) if np.isfinite(problem.objective(s))), None)
    found = solve(problem, cutoff=most, hint=hint)
    if best <= most:
        check(problem, found)
    else:
        assert found.status == "infeasible" and found.states == ()


@laws
@given(networks(largest=200), st.sampled_from([0.01, 0.1, 0.5]), st.booleans())
def test_an_answer_within_the_tolerance_comes_with_a_bound_that_is_true(problem, tolerance, hinted):
    best = brute_force(problem)
    hint = next((s for s in choices(problem) if np.isfinite(problem.objective(s))), None) if hinted else None
    found = solve(problem, tolerance=tolerance, hint=hint)
    if np.isinf(best):
        assert found.status == "infeasible" and found.states == ()
        return
    assert found.bound <= best <= found.objective == problem.objective(found.states)
    assert found.bound >= (1 - tolerance) * found.objective
    assert (found.status == "optimal") == (found.bound == found.objective)


@laws
@given(networks(ties=True))
def test_nodes_of_one_class_take_the_same_state(problem):
    solution = solve(problem)
    assert solution.tied
    check(problem, solution)


@laws
@given(networks(limit=False), st.integers(0, 2**32 - 1))
def test_nodes_that_presolve_keeps_can_be_given_costs_later(problem, seed):
    rng = np.random.default_rng(seed)
    kept = [i for i in range(len(problem.costs)) if rng.random() < 0.5]
    small = presolve(problem, kept=kept)
    later = {i: np.where(rng.random(len(problem.costs[i])) < 0.3, np.inf, rng.integers(0, 9, len(problem.costs[i]))) for i in kept}
    whole = dataclasses.replace(problem, costs=tuple(c + later.get(i, 0.0) for i, c in enumerate(problem.costs)))
    if not small.feasible:
        assert np.isinf(brute_force(problem))
        return
    assert set(kept) <= set(small.nodes)
    costs = tuple(c + later.get(i, 0.0) for i, c in zip(small.nodes, small.problem.costs, strict=True))
    part = dataclasses.replace(small.problem, costs=costs)
    best = min(choices(part), key=part.objective)
    assert part.objective(best) + small.offset == brute_force(whole)
    if np.isfinite(part.objective(best)):
        assert whole.objective(small.invert(best)) == brute_force(whole)


@laws
@given(networks(), st.booleans())
def test_presolve_solve_invert_is_solve(problem, tie):
    small = presolve(problem, tie=tie)
    if not small.feasible:
        assert np.isinf(brute_force(problem))
        return
    inner = min(
        (s for s in choices(small.problem) if small.problem.limit is None or small.problem.peak(s) <= small.problem.limit),
        key=small.problem.objective,
        default=None,
    )
    if inner is None:
        assert np.isinf(brute_force(problem))
        return
    states = small.invert(inner)
    value = small.problem.objective(inner) + small.offset
    assert value == brute_force(problem)
    if np.isfinite(value):
        assert problem.objective(states) == value
        assert problem.limit is None or problem.peak(states) <= problem.limit


@laws
@given(networks())
def test_removed_time_steps_are_redundant(problem):
    timed, steps = remove_redundant_steps(problem)
    assert len(steps) == max((u.hi for u in timed.usages), default=len(steps))
    for states in itertools.product(*(range(len(c)) for c in problem.costs)):
        assert (problem.peak(states) <= problem.limit) == (timed.limit is None or timed.peak(states) <= timed.limit)


@laws
@given(networks(limit=False), st.sampled_from([2, 8, 1 << 20]))
def test_elimination_is_exact_or_a_lower_bound(problem, cap):
    elimination = BucketElimination(problem, cap)
    sweep = elimination.run()
    best = brute_force(problem)
    assert sweep.value == best if elimination.exact else sweep.value <= best
    for i, marginal in enumerate(sweep.min_marginals()):
        for s, value in enumerate(marginal):
            exact = min((problem.objective(c) for c in choices(problem) if c[i] == s), default=np.inf)
            assert value == exact if elimination.exact else value <= exact


@laws
@given(networks(forbidden=0.05))
def test_bound_never_exceeds_the_optimum(problem):
    seen = []
    solve(problem, progress=lambda states, bound, gap: seen.append((problem.objective(states), bound, gap)))
    best = brute_force(problem)
    for objective, bound, gap in seen:
        assert bound <= best <= objective
        assert gap >= 0


@laws
@given(networks(forbidden=0.1))
def test_min_peak_is_the_least_peak_or_a_bound_of_it(problem):
    least = minimize_peak(problem)
    peak = min((problem.peak(s) for s in choices(problem) if np.isfinite(problem.objective(s))), default=np.inf)
    assert least.bound_bytes <= peak + 1e-6
    assert least.bytes >= peak
    if np.isfinite(peak) and least.states:
        assert problem.peak(least.states) == least.bytes
        assert least.bytes == 0 or problem.memory(least.states)[least.step] == least.bytes


def chain(n, k, seed=0, limit=None):
    """A chain with links back, as a training step has, where memory can bind in the middle."""
    rng = np.random.default_rng(seed)
    costs = tuple(rng.integers(0, 1000, k).astype(float) for _ in range(n))
    pairs = [(i, i + 1) for i in range(n - 1)] + [(i, n - 1 - i) for i in range(n // 2 - 1)]
    edges = tuple(Edge(i, j, rng.integers(0, 1000, (k, k)).astype(float)) for i, j in pairs)
    usages = tuple(Usage(i, i, max(i + 1, n - i), rng.integers(1, 100, k).astype(float)) for i in range(n))
    return Problem(costs, edges, usages, limit)


def test_of_rising_and_falling_memory_only_the_local_peaks_remain():
    """A step at which no choice holds more bytes than at a remaining neighbor is redundant."""
    up = [Usage(i, i, 40 - i, np.array([1.0, 2.0])) for i in range(20)]
    problem = Problem((np.zeros(2),) * 20, (), (*up, Usage(0, 60, 61, np.array([30.0, 20.0]))), 25.0)
    timed, steps = remove_redundant_steps(problem)
    assert steps.tolist() == [19, 60] and timed.peak([1] * 20) == problem.peak([1] * 20) == 40


def test_large_chain_without_pressure_is_solved_by_elimination():
    solution = solve(chain(400, 12))
    assert solution.status == "optimal"


def test_tight_limit_gives_a_proof_or_an_honest_gap():
    free = solve(chain(60, 5))
    least = minimize_peak(chain(60, 5))
    loose = chain(60, 5).peak(free.states)
    tight = chain(60, 5, limit=float(np.ceil((least.bytes + loose) / 2)))
    solution = solve(tight)
    assert solution.status in ("optimal", "feasible")
    assert tight.peak(solution.states) <= tight.limit
    assert free.objective <= solution.bound <= solution.objective
    assert solution.gap < 0.02


def test_a_limit_below_the_least_peak_is_infeasible():
    least = minimize_peak(chain(60, 5))
    assert solve(chain(60, 5, limit=least.bound_bytes * 0.99)).status == "infeasible"


def test_an_integrality_gap_of_the_memory_limit_is_proven_infeasible():
    """Prices cannot exclude an odd number of equal arrays on two steps that each hold half of them; branching does."""
    rng, n = np.random.default_rng(0), 15
    costs = tuple(rng.integers(0, 1000, 2).astype(float) for _ in range(n))
    edges = tuple(Edge(i, j, rng.integers(0, 1000, (2, 2)).astype(float)) for i in range(n) for j in (i + 1, i + 3) if j < n)
    usages = tuple(Usage(i, t, t + 1, np.array(held)) for i in range(n) for t, held in ((60, (2.0, 0.0)), (62, (0.0, 2.0))))
    solution = solve(Problem(costs, edges, usages, float(n)))
    assert solution.status == "infeasible" and solution.stats["bounds"] < 10
    assert solve(Problem(costs, edges, usages, n + 1.0)).status == "optimal"


def test_time_limit_returns_the_best_answer_so_far():
    problem = chain(120, 6)
    least = minimize_peak(problem)
    problem = chain(120, 6, limit=float(np.ceil(least.bytes * 1.05)))
    solution = solve(problem, time_limit=0.5, hint=least.states)
    assert solution.states and problem.peak(solution.states) <= problem.limit
    assert solution.objective <= problem.objective(least.states)


def test_hint_is_returned_when_nothing_better_is_found_in_the_work_limit():
    problem = chain(60, 5)
    hint = minimize_peak(problem).states
    problem = chain(60, 5, limit=float(problem.peak(hint)))
    solution = solve(problem, work_limit=0.0, hint=hint)
    assert solution.objective <= problem.objective(hint)
    assert solution.status in ("fallback", "feasible", "optimal")


SCRIPT = """
import sys; sys.path.insert(0, "tests")
from test_ilp import chain
from shardplan.ilp import solve, minimize_peak
least = minimize_peak(chain(60, 5))
print(solve(chain(60, 5, limit=float(int(least.bytes * 1.1)))).states, least.states)
"""


def test_same_answer_in_processes_with_different_hashing():
    def answer(seed):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True).stdout

    assert answer("1") == answer("2") != ""


def test_ties_of_an_unrolled_model_share_its_tables():
    layers, k = 500, 6
    rng = np.random.default_rng(0)
    inner, between = rng.integers(0, 99, (k, k)).astype(float), rng.integers(0, 99, (k, k)).astype(float)
    cost = rng.integers(0, 99, k).astype(float)
    edges = [Edge(2 * n, 2 * n + 1, inner) for n in range(layers)]
    edges += [Edge(2 * n + 1, 2 * n + 2, between) for n in range(layers - 1)]
    problem = Problem((cost,) * (2 * layers), tuple(edges), ties=(0, 1) * layers)
    a, b = min(
        itertools.product(range(k), repeat=2),
        key=lambda s: layers * (cost[s[0]] + cost[s[1]] + inner[s]) + (layers - 1) * between[s[1], s[0]],
    )
    assert solve(problem).states == (a, b) * layers


@pytest.mark.parametrize("limit", [None, 10.0])
def test_no_nodes_is_an_answer(limit):
    solution = solve(Problem((), limit=limit))
    assert solution.status == "optimal" and solution.states == () and solution.objective == 0


@pytest.mark.parametrize("where", ["node 1", "edge \\(0, 1\\)"])
def test_fractions_are_refused(where):
    costs, table = [np.zeros(2), np.array([np.inf, 0.5 if "node" in where else 1.0])], np.array([[np.inf, 3.0], [0.0, 1.25]])
    with pytest.raises(ValueError, match=f"{where} has cost (0.5|1.25), which is no whole number"):
        solve(Problem(tuple(costs), (Edge(0, 1, np.rint(table) if "node" in where else table),)))
