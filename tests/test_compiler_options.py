"""Compiler options are part of a plan: chosen for GPUs, the user's own first, saved, shown, and used where it is compiled."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import Plan, ShardingError, _jax
from shardplan.costs.kernel_tasks import OUTSIDE
from shardplan.xla import available
from shardplan.xla.compiler.options import as_known
from shardplan.xla.hlo.schedule import seconds
from shardplan.xla_model.combining import COMBINE_THRESHOLD_BYTES
from shardplan.xla_model.compiler_options import (
    DEFAULT,
    DOUBLE_BUFFERING,
    LATENCY_HIDING,
    LEVEL,
    LEVELS,
    PIPELINED,
    PIPELINING,
    PROFILE,
    RENAMED,
    THRESHOLDS,
    XlaOptions,
    candidates,
    merged,
    thresholds,
)

GATHER = PIPELINED["all-gather"]
NEW_NAME = RENAMED[GATHER][0]
MESH = AbstractMesh((8,), ("data",))
SHAPES = {"up": (2048, 8192), "down": (8192, 2048)}
FASTER = shardplan.Cluster.preset("h100").scaled(0.9)
"""GPUs on which a round computes too little to hide its collectives."""
SHARDED = {"w/up": P(None, None, "data"), "w/down": P(None, "data", None), "x": P("data")}


def loss(w, x, scanned):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype), None

    if scanned:
        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)
    else:
        for n in range(4):
            x, _ = layer(x, {k: v[n] for k, v in w.items()})
    return x.astype(jnp.float32).var()


def step(w, x, scanned=True):
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x, scanned))


def arguments():
    w = {k: jax.ShapeDtypeStruct((4, *shape), jnp.float32) for k, shape in SHAPES.items()}
    return w, jax.ShapeDtypeStruct((8 * 2048, 2048), jnp.bfloat16)


def plan(mesh=MESH, **options):
    options = {"cluster": FASTER, "pins": SHARDED} | options
    return shardplan.auto(mesh, donate_argnums=0, static_argnames="scanned", **options)(step).plan(*arguments())


@pytest.fixture(scope="module")
def planned():
    return plan()


@pytest.fixture(scope="module")
def cpus():
    return jax.make_mesh((8,), ("data",))


def test_a_loop_of_sharded_weights_is_pipelined_and_double_buffered(planned):
    found = XlaOptions.of(planned.compiler_options)
    assert found.pipelined == {"all-gather", "all-reduce"} and found.double_buffering


def test_what_is_carried_counts_in_the_peak(planned):
    found = planned.context.planned
    more = planned.memory().peak - found.network.peak(found.solution.states)
    assert more == 4 * 2 * 2048 * 8192  # in the backward loop: two gathered weights, and two gradients before they are summed
    assert sum(planned.memory().at_peak.values()) == pytest.approx(planned.memory().peak)


def test_pipelining_is_left_out_where_the_memory_does_not_allow_it():
    peak = plan(compiler_options=None).memory().peak
    assert plan(memory=peak * 1.001).compiler_options == {}


def unrolled(**options):
    auto = shardplan.auto(MESH, static_argnames="scanned", cluster="h100", pins=SHARDED, **options)
    return auto(step).plan(*arguments(), scanned=False)


def test_thresholds_alone_are_chosen_without_loops_and_nothing_for_none():
    assert unrolled().compiler_options.keys() == {*THRESHOLDS.values()}
    assert unrolled(compiler_options=None).compiler_options == plan(compiler_options=None).compiler_options == {}


@pytest.mark.skipif(not available(), reason="needs the GPU compiler")
@pytest.mark.slow
def test_what_is_scattered_between_layers_is_combined_as_planned():
    """Gradients that a layer scatters wait for no other, and are combined up to 30 MiB of results, with those of other layers."""
    planned = unrolled(compiler_options=None)
    program, report = planned.context.planned.program(DEFAULT), planned.check("h100:8")
    combined = [[program.tasks.transfers[n].result_bytes for n in some] for some in program.acyclic.joined[1].values()]
    scattered = sorted(8 * sum(some) for some in combined if len(some) > 1)
    assert scattered and scattered == sorted(
        c.bytes for c in report.compiled.collectives if c.kind == "reduce-scatter" and c.bytes > 2**26
    )


def test_latency_that_the_user_asks_to_hide_is_predicted_hidden_without_loops():
    def modelled(**options):
        options = {"cluster": "a100", "pins": SHARDED} | options
        found = shardplan.auto(MESH, static_argnames="scanned", **options)(step).plan(*arguments(), scanned=False)
        return found.context.planned.xla

    assert modelled(compiler_options={LATENCY_HIDING: True}) == replace(DEFAULT, latency_hiding=True)
    assert modelled(compiler_options={PROFILE: "profile.pbtxt"}) == replace(DEFAULT, profiled=True)
    assert modelled() == DEFAULT


def test_a_step_with_a_profile_is_ordered_by_its_own_seconds():
    def tasks(**options):
        found = shardplan.auto(MESH, static_argnames="scanned", pins=SHARDED, **options)(step).plan(*arguments(), scanned=False)
        planned = found.context.planned
        return planned.program(planned.xla).listed(OUTSIDE)[0].tasks

    estimated, profiled = (tasks(cluster="h100", compiler_options=own) for own in (None, {PROFILE: "profile.pbtxt"}))
    assert all(t.estimated_s == t.seconds for t in profiled)
    assert any(t.estimated_s != t.seconds for t in estimated) and any(t.collective for t in profiled)


def test_ampere_is_asked_to_hide_latency():
    assert XlaOptions.of(plan(cluster="a100").compiler_options) == replace(DEFAULT, latency_hiding=True)
    assert not XlaOptions.of(plan().compiler_options).latency_hiding


@pytest.mark.parametrize("own", [{GATHER: False}, {NEW_NAME: 1}])
def test_the_users_own_options_win_by_any_name(planned, own):
    flags = merged(planned.compiler_options, own)
    assert "all-gather" not in XlaOptions.of(flags).pipelined
    assert flags[DOUBLE_BUFFERING] is True and own.items() <= flags.items()


def test_the_users_own_options_win(planned):
    name = next(iter(as_known({GATHER: True})))
    own = plan(compiler_options={name: as_known({GATHER: False})[name]}).compiler_options
    assert XlaOptions.of(own) == XlaOptions(frozenset({"all-reduce"}), double_buffering=True)
    of_loops = planned.compiler_options.keys() - {*THRESHOLDS.values()}
    assert own.keys() - {name} == of_loops - {GATHER}


def test_nothing_is_passed_on_cpus_but_the_users_own(cpus):
    def passed(**options):
        auto = shardplan.auto(cpus, donate_argnums=0, pins=SHARDED, static_argnames="scanned", **options)(step)
        auto.plan(*arguments())
        return _jax.compiler_options(auto.lower(*arguments()))

    assert plan(cpus, cluster=None, memory="disable").compiler_options == {}
    assert plan(cpus).compiler_options and passed(cluster="h100") == {}  # priced as another machine
    assert passed(compiler_options={"xla_llvm_disable_expensive_passes": True}) == {"xla_llvm_disable_expensive_passes": True}


def test_what_is_planned_reaches_jit_on_gpus(cpus, monkeypatch):
    monkeypatch.setattr("shardplan.options.GPU_PLATFORMS", ("cpu",))  # XLA for CPU takes the names, too
    auto = shardplan.auto(cpus, donate_argnums=0, pins=SHARDED, static_argnames="scanned", cluster="h100")(step)
    chosen = auto.plan(*arguments()).compiler_options
    assert chosen and _jax.compiler_options(auto.lower(*arguments())) == as_known(chosen)
    small = jnp.ones((64, 32)), jnp.ones((32, 32))
    own = shardplan.auto(cpus, compiler_options=chosen)(lambda x, w: x @ w)
    assert (own(*small) == 32).all()


def test_the_step_of_absent_gpus_is_lowered_with_them(planned):
    function, args = planned.context.program(planned)
    assert _jax.compiler_options(function.trace(*args).lower(lowering_platforms=("cuda",))) == as_known(planned.compiler_options)


def test_a_plan_file_keeps_them_and_an_older_one_has_none(planned, tmp_path):
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned
    value = json.loads(planned.dumps())
    assert value["compiler_options"] == planned.compiler_options
    del value["compiler_options"]
    (tmp_path / "old.json").write_text(json.dumps(value))
    assert Plan.load(tmp_path / "old.json").compiler_options == {}


def test_a_saved_plan_is_compiled_as_it_was_planned_unless_the_user_says_otherwise(planned, tmp_path):
    planned.save(tmp_path / "plan.json")
    assert plan(plan=tmp_path / "plan.json").compiler_options == planned.compiler_options
    assert plan(plan=tmp_path / "plan.json", compiler_options=None).compiler_options == {}
    assert plan(plan=tmp_path / "plan.json", compiler_options={DOUBLE_BUFFERING: False}).compiler_options[DOUBLE_BUFFERING] is False


def test_they_are_shown(planned):
    assert f"options {GATHER}=true" in planned.explain() and f"{GATHER}=true" in planned.html()
    assert "options " not in plan(compiler_options=None).explain()


def test_unknown_ones_are_refused_before_planning(monkeypatch):
    monkeypatch.setattr("shardplan.step.make_plan", None)
    with pytest.raises(ShardingError, match=r"refuses them: No such compile option: 'xla_gpu_fast'.*\n  ways out: drop that option"):
        plan(compiler_options={"xla_gpu_fast": True})
    with pytest.raises(ShardingError, match=f"did you mean '{DOUBLE_BUFFERING}'"):
        plan(compiler_options={"xla_gpu_enable_while_loop_double_bufering": True})
    with pytest.raises(ShardingError, match='compiler_options=3 is none of "auto", None and a mapping'):
        plan(compiler_options=3)


def test_options_are_read_back_from_flags():
    tried = [y for hides in (True, False) for x in candidates(hides) for y in thresholds(x)]
    assert len(set(tried)) == len(tried) and all(XlaOptions.of(x.flags()) == x for x in tried)
    assert XlaOptions.of({LEVEL: "O1"}) == XlaOptions.of({LEVEL: LEVELS["O2"]}) == replace(PIPELINING, latency_hiding=True)
    assert XlaOptions.of({LEVEL: 1}) == XlaOptions.of({}) == DEFAULT and not DEFAULT.flags()
    assert candidates()[0] == DEFAULT and {x.without_loops(DEFAULT) for x in candidates(False)} == {DEFAULT}


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_check_compiles_with_them(planned):
    own = planned.context.planned
    default = dict.fromkeys(THRESHOLDS.values(), COMBINE_THRESHOLD_BYTES)
    off = as_known({name: default.get(name, False) for name in planned.compiler_options})
    ours = {name: value for name, value in default.items() if name in planned.compiler_options}
    found = [planned.check("h100:8", options=o).compiled for o in (as_known(ours), off, {})]
    exposed = [seconds(done, shardplan.Cluster.preset("h100")).exposed_s for done in found]
    assert exposed[0] < 0.7 * exposed[1] and exposed[2] < 0.8 * exposed[1]
    more = found[0].memory.peak_bytes - found[1].memory.peak_bytes
    assert 0.5 < more / (planned.memory().peak - own.network.peak(own.solution.states)) < 1.05
