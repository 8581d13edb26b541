"""Overlap: which collectives compute hides, what they cost, and how plans change."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import relu_loss

import shardplan
from shardplan.costs.decided_program import decided_program
from shardplan.costs.network import StepSeconds
from shardplan.costs.task import Candidate
from shardplan.ilp import Edge, Problem
from shardplan.ilp.solver import solve
from shardplan.plan.schedule import StepSchedule
from shardplan.search.objective import NEAR_TIE
from shardplan.search.overlap_price import cheapest_price
from shardplan.units import format_seconds
from shardplan.xla import available
from shardplan.xla.compiler.compile import compile
from shardplan.xla.hlo.schedule import seconds

F32, BF16 = jnp.float32, jnp.bfloat16
S = jax.ShapeDtypeStruct
needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')


def mlp(state, x):
    grads = jax.grad(relu_loss)(state["params"], x)
    m = [0.9 * a + g for a, g in zip(state["m"], grads, strict=True)]
    return {"params": [p - 0.1 * a for p, a in zip(state["params"], m, strict=True)], "m": m}


def plan_of(batch=1 << 15, width=2048, layers=4, cluster="h100", **options):
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    params = [S((width, width), F32)] * layers
    step = shardplan.auto(mesh, cluster=cluster, donate_argnums=0, **options)(mlp)
    return step.plan({"params": params, "m": params}, S((batch, width), BF16))


def test_gradient_reductions_overlap_with_the_backward_pass():
    plain, overlapped = plan_of(overlap=False), plan_of()
    exposed = overlapped.seconds["communication"] - overlapped.seconds["hidden"]
    assert plain.seconds["hidden"] == 0 < overlapped.seconds["hidden"]
    assert exposed > 27.5e-6  # of the loss; the last gradients' reduction waits for nothing that it could run beside
    for p in (plain, overlapped):
        assert p.seconds["total"] == pytest.approx(
            p.seconds["compute"] + p.seconds["communication"] - p.seconds["hidden"] + p.seconds["interference"]
        )
        assert plain.seconds["compute"] - 1e-9 <= p.seconds["bound"] and p.gap == pytest.approx(
            1 - p.seconds["bound"] / p.seconds["total"]
        )
    # The rest of it is the last gradients' reduction, and latencies: the loss may be sent with them.
    assert plain.gap < 0.10 and overlapped.gap < 0.21
    compute, communication = overlapped.seconds["compute"], overlapped.seconds["communication"]
    assert overlapped.seconds["total"] < plain.seconds["total"] <= compute + communication + 1e-12


def test_a_fraction_of_what_runs_at_once_is_lost():
    """The seconds go linearly from those of two streams to those of one."""
    plan = plan_of()
    found, lost = plan.context.planned, shardplan.Cluster.preset("h100").interference
    program = decided_program(found.network, found.solution.states, found.xla)
    two, some, one = (program.step_timeline(x).total_s for x in (0.0, lost, 1.0))
    assert two < some < one == pytest.approx(plan.seconds["compute"] + plan.seconds["communication"])
    assert some == pytest.approx((1 - lost) * two + lost * one) == pytest.approx(plan.seconds["total"])
    assert plan.seconds["interference"] == pytest.approx(lost * plan.seconds["hidden"], rel=1e-6)
    saved = plan.seconds["hidden"] - plan.seconds["interference"]
    assert f"communication − {format_seconds(saved)} by overlap" in str(plan)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"cluster": "cpu"}])
def test_the_time_line_has_what_kernels_and_collectives_slow_each_other_by(options):
    schedule = StepSchedule(plan_of(**options).context.planned)
    kernels = sum(x.seconds for x in schedule.spans if x.lane == "compute")
    s = schedule.planned.timeline
    assert kernels == pytest.approx(s.compute_s + s.interference_s) and schedule.end_s == pytest.approx(s.total_s)
    assert (s.interference_s > 0) == (not options)
    assert sum(x.exposed_s for x in schedule.spans) == pytest.approx(s.exposed_s)


def test_little_is_hidden_where_there_is_little_compute():
    few = plan_of(batch=64, width=4096)
    assert few.seconds["hidden"] <= 0.5 * few.seconds["compute"]


def test_nothing_is_hidden_on_cpu_devices():
    assert plan_of(cluster="cpu", batch=64).seconds["hidden"] == 0


def residual(layers, x):
    def loss(layers):
        h = x
        for up, down in layers:
            h = h + jnp.tanh(h @ up) @ down
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, grads), value


def residual_plan(layers=6, width=4096, batch=4096, **options):
    args = [(S((1024, width), F32), S((width, 1024), F32))] * layers, S((batch, 1024), F32)
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    return shardplan.auto(mesh, cluster="h100", donate_argnums=0, **options)(residual).plan(*args)


@pytest.mark.slow
def test_repeated_layers_differ_where_the_first_have_no_compute_to_overlap_with():
    """Gathers for the first layers are exposed, and so are the last gradients."""
    pins = {"layers/*/1": P("data")}
    plan = residual_plan(pins=pins)
    assert not plan.symmetric_layers
    found = {leaf.layout.spec() for leaf in plan.inputs if leaf.path.endswith("/0")}
    assert len(found) > 1
    alike = [residual_plan(pins={**pins, "layers/*/0": spec}) for spec in found]
    assert plan.seconds["total"] < (1 - NEAR_TIE) * min(x.seconds["total"] for x in alike)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("memory", [None, 360 << 20])
def test_exposed_seconds_of_unrolled_layers_are_those_of_the_compiled_program(memory):
    plan = residual_plan(memory=memory)
    function, args = plan.context.program(plan)
    compiled = compile(function, *args, target="h100:8", timeout_s=300)
    emitted = seconds(compiled, shardplan.Cluster.preset("h100"))
    exposed_s = plan.seconds["communication"] - plan.seconds["hidden"]
    assert exposed_s == pytest.approx(emitted.exposed_s, abs=0.05 * emitted.step_s)
    assert plan.seconds["total"] == pytest.approx(emitted.step_s, rel=0.1)


# ---- the two prices


class Toy:
    """A network whose second half of edges is background communication."""

    def __init__(self, rng, price):
        n, k = 6, 3
        self.overlap_capacity = float(1e3 * rng.integers(1, 60))
        costs = [1e3 * rng.integers(0, 30, k) for _ in range(n)]
        pairs = list(itertools.combinations(range(n), 2))[::2]
        tables = [1e3 * rng.integers(0, 40, (k, k)) for _ in pairs]
        half = len(pairs) // 2
        self.full = Problem(tuple(costs), tuple(Edge(i, j, t) for (i, j), t in zip(pairs, tables, strict=True)))
        paid = [np.rint(t * (price if e >= half else 1.0)) for e, t in enumerate(tables)]
        self.problem = Problem(tuple(costs), tuple(Edge(i, j, t) for (i, j), t in zip(pairs, paid, strict=True)))
        self.half = half

    def step_seconds(self, states):
        edges = [float(e.cost[states[e.i], states[e.j]]) for e in self.full.edges]
        compute = sum(float(c[s]) for c, s in zip(self.full.costs, states, strict=True))
        return StepSeconds(compute, sum(edges[: self.half]), sum(edges[self.half :]), self.overlap_capacity)


@pytest.mark.parametrize("interference", [0.0, 0.5, 1.0])
def test_bound_is_below_every_plan_and_the_answer_near_the_best(interference):
    gaps = []
    for seed in range(12):

        def search(price, seed=seed):
            network = Toy(np.random.default_rng(seed), price)
            return Candidate(network, solve(network.problem))

        network, found = cheapest_price(search, interference)
        every = [network.step_seconds(s).total(interference) for s in itertools.product(range(3), repeat=6)]
        assert found.bound - len(network.problem.edges) <= min(every) <= found.objective + 1e-6
        assert found.objective == pytest.approx(network.step_seconds(found.states).total(interference))
        assert found.status != "optimal" or found.objective == pytest.approx(min(every))
        gaps.append(found.objective / min(every) - 1)
    assert np.mean(gaps) < 0.02


def test_a_single_price_is_one_search():
    prices = []
    network = SimpleNamespace(step_seconds=lambda s: StepSeconds(5.0, 1.0, 100.0, 5.0))
    cheapest_price(lambda price: prices.append(price) or Candidate(network, solve(Problem((np.array([0.0]),)))), 1.0)
    assert prices == [1.0]
