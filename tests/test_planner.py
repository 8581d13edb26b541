"""The chain from graph to plan: exact objective, valid bounds, the same bytes everywhere."""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import MODELS, relu_step
from sweeps import sweep

import shardplan
from shardplan.costs.build import build_network
from shardplan.costs.decided_program import decided_program
from shardplan.costs.pins import matches
from shardplan.costs.states import PS
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.presolve.reductions import ReduceDomain, TieClasses
from shardplan.propagation.search import propagate

MESH = ((2, 4), ("data", "model"))


@functools.cache
def planned(name, **options):
    create, step, batches = MODELS[name]()
    mesh = jax.sharding.AbstractMesh(*MESH)
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0, **options)(step).plan(
        jax.eval_shape(create, jax.random.key(0)), next(iter(batches(1)))
    )
    return plan, plan.context.planned


def is_large(name) -> bool:
    return name in ("gpt", "llama", "moe")


@pytest.mark.parametrize("name", sweep(MODELS, is_large))
def test_examples_are_within_a_tenth_of_the_bound_and_tying_loses_nothing(name):
    plan, found = planned(name)
    problem, states = found.network.problem, found.solution.states
    assert 0 <= plan.gap <= 0.1 and plan.status == ("optimal" if plan.gap <= 1e-6 else "feasible")
    assert plan.seconds["bound"] == pytest.approx((1 - plan.gap) * plan.seconds["total"])
    line = decided_program(found.network, states, found.xla).step_timeline()
    assert line == found.timeline and found.solution.objective == round(line.total_s * PS)
    tied, free = (solve(x, hint=states) for x in (problem, replace(problem, ties=())))  # at the prices of what the plan combines
    assert free.bound <= tied.objective <= 1.005 * free.objective


def project(presolved, states):
    """States of the remaining problem from given ones; None if they use a state that was removed."""
    for reduction in presolved.trail:
        if isinstance(reduction, TieClasses):  # every class takes the state of its first node
            states = [states[i] for i in np.unique(reduction.member, return_index=True)[1]]
        elif isinstance(reduction, ReduceDomain):
            (i,) = reduction.nodes
            found = np.flatnonzero(reduction.keep == states[i])
            if not len(found):
                return None
            states = [*states[:i], int(found[0]), *states[i + 1 :]]
    return [int(states[i]) for i in presolved.nodes]


@pytest.mark.parametrize("name", sweep(("dlrm", "gpt", "moe"), is_large))
def test_presolve_keeps_the_objective(name):
    _, found = planned(name)
    problem = replace(found.network.problem, limit=None)
    presolved = presolve(problem, tie=True)
    for states in (found.solution.states, propagate(problem).states):
        projected = project(presolved, states)
        if projected is not None:
            cost = problem.objective(presolved.invert(projected))
            assert presolved.problem.objective(projected) + presolved.offset == cost <= problem.objective(states)


@pytest.mark.parametrize("name", sweep(MODELS, is_large))
def test_propagation_is_never_better_than_the_optimum_and_not_far(name):
    best, _ = planned(name)
    fast, _ = planned(name, search="propagation")
    assert best.seconds["total"] <= fast.seconds["total"] * (1 + 1e-12)
    assert fast.seconds["total"] < 2 * best.seconds["total"]


PROGRAM = """
import sys, jax
sys.path[:0] = {paths!r}
from test_planner import planned
sys.stdout.write(planned({name!r})[0].dumps())
"""


@pytest.mark.parametrize("name", sweep(("dlrm", "gpt"), is_large))
def test_same_bytes_in_every_process(name):
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    command = [sys.executable, "-c", PROGRAM.format(paths=paths, name=name)]
    environments = ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    texts = {subprocess.run(command, env=env, capture_output=True, check=True).stdout for env in environments}
    assert len(texts) == 1 and len(texts.pop()) > 1000


def test_a_time_limit_of_nothing_falls_back_to_an_answer():
    plan, _ = planned("gpt", time_limit=1e-3)
    assert plan.status in ("optimal", "feasible") and 0 <= plan.gap < 1
    assert np.isfinite(plan.seconds["total"])


@pytest.mark.parametrize("name", sweep(("digits_cnn", "dlrm"), lambda name: name == "digits_cnn"))
def test_when_the_time_is_over_a_plan_that_fits_is_taken_and_no_other_looked_for(name, monkeypatch):
    made = []
    for room in ("costs.task", "propagation.axis_by_axis"):
        monkeypatch.setattr(f"shardplan.{room}.build_network", lambda *a, **kw: made.append(a) or build_network(*a, **kw))
    limit = 0.6 * planned(name)[0].memory().peak
    made.clear()
    full, _ = planned(name, memory=limit)
    needed = len(made)
    made.clear()
    plan, found = planned(name, memory=limit, time_limit=1e-9)
    assert len(made) < needed
    assert plan.status == "feasible" and plan.seconds["total"] >= full.seconds["total"]
    assert plan.seconds["bound"] <= full.seconds["total"]
    assert found.network.peak(found.solution.states) <= limit


def test_paths_match_by_segment():
    assert matches("state/params/block/3/kernel", "params/**/kernel")
    assert matches("state/params/kernel", "params/**/kernel")
    assert matches("state/params/block/kernel", "block/*")
    assert not matches("state/params/block/kernel", "params/*")
    assert not matches("state/params/block/kernels", "kernel")


READERS = {
    "sum": (lambda x, p: x + p, 1),
    "product": (lambda x, p: x @ p, 1),
    "sum of computed": (lambda x, p: x + jax.numpy.sin(p), 1),
    "product of computed": (lambda x, p: x @ jax.numpy.sin(p), 0),
}


@pytest.mark.parametrize(("reader", "kernels"), READERS.values(), ids=READERS)
def test_an_array_gathered_along_an_inner_dim_is_transposed(reader, kernels):
    """Before it by a kernel if it is an input; behind it unless a product reads it, which may read it in any order."""
    mesh, cluster = jax.sharding.AbstractMesh((8,), ("data",)), shardplan.Cluster.preset("h100")
    x, p = jax.ShapeDtypeStruct((64, 1024, 1024), "float32"), jax.ShapeDtypeStruct((1024, 1024), "float32")

    def total(spec):
        pins = {"x": jax.P("data"), "p": spec}
        step = shardplan.auto(mesh, cluster=cluster, pins=pins, out_shardings=jax.P("data"))(reader)
        return step.plan(x, p).seconds["total"]

    more = total(jax.P(None, "data")) - total(jax.P("data", None))
    assert more == pytest.approx(kernels * cluster.device.kernel_latency_s, abs=1e-9)


def test_the_least_memory_that_the_error_names_is_enough():
    """It is, although gradients of one combined collective keep their operands in memory longer."""
    params, batch = [jax.ShapeDtypeStruct((512, 512), "float32")] * 8, jax.ShapeDtypeStruct((1 << 16, 512), "bfloat16")

    def plan(**options):
        mesh = jax.sharding.AbstractMesh((8,), ("data",))
        return shardplan.auto(mesh, cluster="h100", donate_argnums=0, **options)(relu_step).plan(params, batch)

    with pytest.raises(shardplan.ShardingError, match="ways out") as refused:
        plan(memory=0.3 * plan().memory().peak)
    budget = float(str(refused.value).split("memory=")[1].split()[0])
    assert plan(memory=budget).memory().peak <= budget
    assert plan(memory="heavy").memory().peak <= plan(memory="slight").memory().peak <= plan().memory().peak


def test_a_plan_made_without_the_limit_that_breaks_it_is_replaced(monkeypatch):
    free, _ = planned("hybrid_mlp")
    tight = 0.9 * free.memory().peak
    asked, _ = planned("hybrid_mlp", memory=tight)
    assert planned("hybrid_mlp", memory=1e12)[0].memory().limit == 1e12
    monkeypatch.setattr("shardplan.search.protocol.replicated_bytes", lambda space: 0.0)  # as if nothing could break it
    again, _ = planned("hybrid_mlp", memory=tight)
    assert again.dumps() == asked.dumps() and asked.memory().peak <= tight < free.memory().peak


@pytest.mark.parametrize(("table", "scattered"), [(None, {1, 2}), (P("model", "data"), {1, 2, 3})])
def test_sums_of_a_weight_with_two_uses_are_scattered(table, scattered):
    """After they are added, or each, which XLA makes one (fact: reassociate-reduced-addends); over two axes in one step or two."""
    bf16, f32, shape = jnp.bfloat16, jnp.float32, jax.ShapeDtypeStruct

    def loss(params, batch):
        table = params["table"].astype(bf16)
        h = table[batch["x"]]
        for up, down in params["layers"]:
            h = h + jnp.tanh(h @ up.astype(bf16)) @ down.astype(bf16)
        logits = jax.nn.log_softmax((h @ table.T).astype(f32))
        return -jnp.mean(jnp.take_along_axis(logits, batch["y"][..., None], -1))

    def step(state, batch):
        params, momentum = state
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(params, batch))
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    params = {"table": shape((50304, 768), f32), "layers": [(shape((768, 3072), f32), shape((3072, 768), f32))] * 4}
    batch = {name: shape((64, 1024), jnp.int32) for name in "xy"}
    pins = {"**/table": table} if table else {}
    auto = shardplan.auto(jax.sharding.AbstractMesh(*MESH), cluster="h100", donate_argnums=0, pins=pins)
    moves = (m for d in auto(step).plan((params, params), batch).decisions if d.phase != "forward" for m in d.reshards)
    large = [c for m in moves for c in m.collectives if c.bytes >= 50304 * 768 * 2 / 4]
    kinds = [c.kind for c in large if c.kind in ("reduce-scatter", "all-reduce")]
    assert set(kinds) == {"reduce-scatter"} and len(kinds) in scattered


def with_memory(memory_bytes, **options):
    """The plan of two layers on 8 devices that have so much memory."""

    def step(ws, x):
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(lambda ws: ((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2).mean())(ws))

    *ws, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512), (4096, 512)))
    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    h100 = shardplan.Cluster.preset("h100")
    cluster = replace(h100, device=replace(h100.device, memory_bytes=memory_bytes))
    return shardplan.auto(mesh, cluster=cluster, donate_argnums=0, **options)(step).plan(ws, x)


def test_a_twentieth_of_a_devices_memory_stays_free_where_a_plan_fits_in_the_rest():
    peak = with_memory(80e9, memory="disable").memory().peak
    tight = 1.02 * peak
    assert with_memory(tight).memory().peak <= 0.95 * tight < peak
    assert with_memory(tight, memory=tight).memory().peak == peak  # the user says how much there is
    assert with_memory(tight).memory().limit == pytest.approx(tight)
    fixed = {"in_shardings": (P(), P("d")), "out_shardings": P()}
    with pytest.raises(shardplan.ShardingError, match="fits") as refused:
        with_memory(tight / 10, **fixed)
    least = float(str(refused.value).split("memory=")[1].split()[0])
    assert 0.95 * 1.01 * least < with_memory(1.01 * least, **fixed).memory().peak <= 1.01 * least
