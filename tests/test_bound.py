"""The lower bound of the objective: no plan undercuts it, whatever its collectives share, combine and hide."""

import itertools
from collections import defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import H100, NEAR
from jax.sharding import PartitionSpec as P
from models import MODELS

import shardplan
from shardplan.costs.bound_network import Weights, slope
from shardplan.costs.decided_tasks import decided_tasks
from shardplan.costs.pricing import Pricing
from shardplan.costs.shared_collectives import shared_key
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate
from shardplan.ilp import integer_program
from shardplan.ilp.solver import solve
from shardplan.search import bound
from shardplan.search.bound_weights import _minimum_cut
from shardplan.search.objective import judge

S = jax.ShapeDtypeStruct


def unrolled(params, x):
    """A net whose partial sums are read by products and by elementwise ops."""

    def loss(params):
        h = x
        for up, down in params:
            y = h @ up
            h = h + (jnp.tanh(y) * y) @ down + y @ up.T
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def scanned(params, x):
    """The same as a loop."""

    def layer(h, w):
        y = h @ w[0]
        return h + (jnp.tanh(y) * y) @ w[1] + y @ w[0].T, None

    def loss(params):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def planned(step, params, monkeypatch, overlap):
    """The plan, and what its bound was asked for."""
    asked = []

    def recorded(task, best, deadline):
        asked.append((task, best))
        return bound.lower_bound(task, best, deadline)

    monkeypatch.setattr(integer_program, "lower_bound", recorded)
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    plan = shardplan.auto(mesh, cluster="h100", overlap=overlap)(step).plan(params, S((16384, 512), jnp.float32))
    return plan, *asked[0]


def sharing(task):
    """Problems in which two readers of one array want it in one layout, another one than it is made in."""
    problem, of = task.network(Pricing(), None).problem, task.space.strategies
    readers = defaultdict(list)
    for edge in task.space.array_edges:
        readers[shared_key(task.space.graph, edge.consumer, edge.value)].append(edge)
    for first, second, *_ in (edges for edges in readers.values() if len(edges) > 1):
        (i, r), j, k = task.space.graph.values[first.value].producer, first.consumer, second.consumer
        read = of[j].operands[first.operand], of[k].operands[second.operand]
        ways = itertools.product(enumerate(of[i].results[r]), *map(enumerate, read))
        for (s, made), (t, wanted), (u, also) in ways:
            if made.partial and not wanted.partial and wanted == also:
                costs = [cost.copy() for cost in problem.costs]
                for n, state in ((i, s), (j, t), (k, u)):
                    costs[n] = np.where(np.arange(len(costs[n])) == state, costs[n], np.inf)
                yield replace(problem, costs=tuple(costs))
                break


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["unrolled", "scanned"])
def test_no_plan_undercuts_the_bound(name, overlap, monkeypatch):
    weights = lambda *layers: (S((*layers, 512, 1024), jnp.float32), S((*layers, 1024, 512), jnp.float32))  # noqa: E731
    step, params = {"unrolled": (unrolled, [weights()] * 2), "scanned": (scanned, weights(2))}[name]
    plan, task, best = planned(step, params, monkeypatch, overlap)
    least = plan.seconds["bound"]
    found, problem, rng = bound._Ascent(task, best), task.network(Pricing(), None).problem, np.random.default_rng(0)
    shared = 0
    noisy = [tuple(cost + np.rint(scale * rng.random(len(cost))) for cost in problem.costs) for scale in (1e6, 1e7, 1e8, 1e9)]
    for drawn in (*(replace(problem, costs=costs) for costs in noisy), *itertools.islice(sharing(task), 8)):
        solution = solve(drawn, work_limit=1.0)
        if not solution.states:
            continue
        judged = judge(task, Candidate(task.network(Pricing(), None), solution), None)
        seconds, own = judged.timeline.total_s, bound._Ascent(task, judged)
        weights = [x.weights.best(plane) for x in (found, own) for plane in (found.planes[0], own.planes[0])]
        bounds = [least, *(own.tables.problem(w).objective(own.states(judged)) / PS for w in weights)]
        assert all(x <= seconds * (1 + 1e-9) for x in bounds), (bounds, seconds)
        states, network = judged.states, judged.network
        moved = network.moves(network.strategies(states), network.retained(states))
        steps = [step for *_, path in moved for step in path if step.kind != "slice"]
        shared += len(steps) - len(decided_tasks(network, states).transfers)
    assert shared > 0


def test_no_weights_value_a_plan_above_its_plane(monkeypatch):
    """The value of a plan is concave in the weights, so what it changes by at some weights bounds it at all others."""
    weights = [(S((512, 1024), jnp.float32), S((1024, 512), jnp.float32))] * 2
    _, task, best = planned(unrolled, weights, monkeypatch, overlap=True)
    found, rng = bound._Ascent(task, best), np.random.default_rng(0)
    states, ends = found.states(best), found.columns
    figures = found.tables.figures(states)

    def some():
        noisy = Weights(*(x * rng.random(x.shape) for x in ends[rng.integers(len(ends))]))
        latency, network, kernels, around = np.sort(rng.random((4, len(task.space.array_edges))), axis=0)
        kernels = rng.permutation(kernels)
        return Weights(noisy.ops, np.stack([network, latency, kernels, around], axis=1))

    for _ in range(20):
        here, there = some(), some()
        plane, value = slope(figures, there), found.tables.problem(here).objective(states)
        assert value <= here.times(plane) * (1 + 1e-9)
        assert found.tables.problem(there).objective(states) == pytest.approx(there.times(plane), rel=1e-6)


def test_a_bound_of_plans_in_which_followers_reshard_is_one_of_more_plans(monkeypatch):
    weights = [(S((512, 1024), jnp.float32), S((1024, 512), jnp.float32))] * 2
    _, task, best = planned(unrolled, weights, monkeypatch, overlap=True)
    ascent = bound._Ascent(task, best)
    some, more = (ascent.bounding(released) for released in (False, True))
    states = ascent.states(best)
    assert some.hold(states) and more.hold(states)
    fewer, all_of = (tables.problem(ascent.even).edges for tables in (some, more))
    assert all((b.cost <= a.cost).all() for a, b in zip(fewer, all_of, strict=True))
    added = next(a for a, b in zip(fewer, all_of, strict=True) if (np.isinf(a.cost) & np.isfinite(b.cost)).any())
    other = list(states)
    other[added.i] = next(s for s, row in enumerate(added.cost) if np.isinf(row[states[added.j]]))
    assert not some.hold(other)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_a_plan_found_among_fewer_strategies_keeps_to_its_bound(sizes):
    """A search axis by axis has fewer layouts, in which a follower may reshard."""
    create_state, train_step, batches = MODELS["dlrm"]("DEMO")
    args = jax.eval_shape(create_state, jax.random.key(0)), next(iter(batches(1)))
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "model")[: len(sizes)])
    plan = shardplan.auto(mesh, cluster="cpu", donate_argnums=0)(train_step).plan(*args)
    assert 0.8 * plan.seconds["total"] < plan.seconds["bound"] <= plan.seconds["total"] < 4.5e-3


def test_a_bound_is_rounded_down_where_picoseconds_count():
    """The selection is resharded twice, each in 174.7 ps."""
    step, mesh = (lambda x: jax.lax.top_k(x, 2)), jax.sharding.AbstractMesh((4, 2), ("a", "b"))
    plan = shardplan.auto(mesh, cluster=NEAR, pins={"x": P("a", None, None, "b")})(step).plan(S((4, 8, 8, 2), "float32"))
    assert 0.9 * plan.seconds["total"] < plan.seconds["bound"] <= plan.seconds["total"] < 1e-9


def test_a_loop_that_begins_with_another_counts_its_own_rounds():
    """Small kernels: 3 that count rounds of the outer loop, 6 those of the inner one, and 6 that compute."""

    def outer(x, _):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x) * x, None), x, None, length=2)[0], None

    step, mesh = (lambda x: jax.lax.scan(outer, x, None, length=3)[0]), jax.sharding.AbstractMesh((8,), ("a",))
    plan = shardplan.auto(mesh, cluster=H100)(step).plan(S((16, 32), "float32"))
    assert plan.seconds["total"] == pytest.approx(15 * H100.device.kernel_latency_s, rel=1e-6)
    assert plan.seconds["bound"] == pytest.approx(plan.seconds["total"], rel=1e-6)


def test_a_bound_above_a_plan_is_an_internal_error(monkeypatch):
    weights = [(S((512, 1024), jnp.float32), S((1024, 512), jnp.float32))]
    _, _, best = planned(unrolled, weights, monkeypatch, overlap=True)
    assert best.proven(best.solution.objective).solution.status == "optimal"
    with pytest.raises(AssertionError, match=r"internal error: no plan takes less than \d+ ps, but one takes \d+ ps"):
        best.proven(1.01 * best.solution.objective)


def test_the_equilibrium_of_a_matrix_game():
    rows, columns, value = bound.equilibrium(np.array([[3.0, -1.0], [-2.0, 2.0]]))
    assert rows == pytest.approx([0.5, 0.5]) and columns == pytest.approx([3 / 8, 5 / 8]) and value == pytest.approx(0.5)


def test_the_exposed_set_is_a_minimum_cut():
    """Of two collectives of 5 and 1 seconds the first is independent of 2 seconds of compute, the second of 3 others."""
    assert _minimum_cut([5e3, 1e3], [(0b10, 2e3), (0b01, 3e3)]) == 0b01
    assert _minimum_cut([5e3, 1e3], []) == 0b11 and _minimum_cut([], [(0, 1e3)]) == 0
