"""Facts about XLA's compiler options (`options-*` in facts.toml), each seen in a scanned step compiled for 8 absent GPUs.

loop of 4 layers, x += gelu(x @ up) @ down, data parallel; "fsdp" shards the weights, "data" replicates them
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan import Cluster
from shardplan.xla import available, compile
from shardplan.xla.compiler.compile import lower_for
from shardplan.xla.compiler.options import as_known, refusal
from shardplan.xla.hlo.schedule import collective_s, kernels, overlaps, seconds, work_s
from shardplan.xla_model.compiler_options import DEFAULT, LATENCY_HIDING, LEVEL, PIPELINING, PROFILE, XlaOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"'),
]

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
LAYERS, TOKENS, WIDTH, HIDDEN = 4, 8 * 2048, 2048, 8192
WEIGHT = 2 * WIDTH * HIDDEN  # bytes of one gathered matrix, and of its gradient before it is summed

GATHERS = XlaOptions(frozenset({"all-gather"}))
SUMS = XlaOptions(frozenset({"all-reduce"}))


def s(*entries):
    return NamedSharding(MESH, P(*entries))


@functools.cache
def lowered(kind="fsdp", layers=LAYERS, barrier=False, scanned=True):
    """The step; with `barrier` its layers are recomputed behind an optimization barrier, as `jax.checkpoint` does by default."""

    def layer(x, w):
        return constrain(x + jax.nn.gelu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype), s("data"))

    layer = jax.checkpoint(layer, prevent_cse=barrier)

    def loss(w, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)
        else:
            for n in range(layers):
                x = layer(x, jax.tree.map(lambda a, n=n: a[n], w)) if isinstance(w, dict) else layer(x, w[n])
        return x.astype(jnp.float32).var()

    def step(w, x):
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))

    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    if scanned:
        w = {k: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for k, shape in shapes.items()}
        spec = {"up": s(None, None, "data"), "down": s(None, "data")} if kind == "fsdp" else {"up": s(), "down": s()}
    else:
        w = [{k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()} for _ in range(layers)]
        spec = [{"up": s(None, "data"), "down": s("data")} if kind == "fsdp" else {"up": s(), "down": s()}] * layers
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    jitted = jax.jit(step, in_shardings=(spec, s("data")), out_shardings=spec, donate_argnums=0)
    return lower_for("h100:8", jitted, w, x)


def compiled(options: XlaOptions | dict = DEFAULT, target="h100:8", **step):
    flags = as_known(options.flags() if isinstance(options, XlaOptions) else options)
    done = compile(lowered(**step), target=target, options=flags)
    assert done.ok, done.error
    return done


def spent(done):
    return seconds(done, Cluster.preset(done.target.gpu.key))


def in_flight(done, kind: str) -> list[tuple[float, bool]]:
    """(runs, whether a product runs meanwhile) of the large asynchronous collectives of a kind, in the order of the program."""
    found = [o for o in overlaps(done.module, done.mesh) if o.collective.kind == kind and o.collective.bytes > 1 << 20]
    return [(o.collective.runs, o.flops > 0) for o in found]


def loops(done) -> list[int]:
    """Trip counts of the loops."""
    return [done.module.trip_count(i) for some in done.module.computations.values() for i in some if i.opcode == "while"]


def test_pipelined_gathers_of_rows_run_one_iteration_ahead():
    before, after = compiled(), compiled(GATHERS)
    assert loops(before) == [LAYERS, LAYERS] and loops(after) == [LAYERS - 1, LAYERS - 1]
    assert {runs for runs, _ in in_flight(before, "all-gather")} == {LAYERS}
    assert sum(not hidden for _, hidden in in_flight(before, "all-gather")) == 2  # the first of each body has nothing to hide behind
    inside = [hidden for runs, hidden in in_flight(after, "all-gather") if runs == LAYERS - 1]
    assert inside == [True] * 4
    assert sum(runs for runs, _ in in_flight(after, "all-gather")) == 4 * LAYERS
    assert spent(after).exposed_s < 0.7 * spent(before).exposed_s


def test_but_not_behind_the_barrier_of_a_recomputed_layer():
    runs = [runs for runs, _ in in_flight(compiled(GATHERS, barrier=True), "all-gather")]
    assert sorted(runs) == [1, 1, LAYERS - 1, LAYERS - 1, LAYERS, LAYERS]


def test_pipelined_gathers_hold_the_weights_of_two_iterations():
    more = compiled(GATHERS).memory.peak_bytes - compiled().memory.peak_bytes
    assert more == pytest.approx(2 * WEIGHT, rel=0.15)


@pytest.mark.parametrize(("kind", "collective"), [("data", "all-reduce"), ("fsdp", "reduce-scatter")])
def test_pipelined_sums_of_gradients_end_one_iteration_later_also_where_they_are_scattered(kind, collective):
    before, after = compiled(kind=kind, barrier=True), compiled(SUMS, kind=kind, barrier=True)
    assert {runs for runs, _ in in_flight(before, collective)} == {LAYERS}
    inside = [hidden for runs, hidden in in_flight(after, collective) if runs == LAYERS - 1]
    assert inside and all(inside)
    assert spent(after).exposed_s < spent(before).exposed_s
    more = after.memory.peak_bytes - before.memory.peak_bytes
    assert 0.6 * 2 * WEIGHT < more < 1.1 * 2 * WEIGHT  # the gradients of an iteration, before they are summed


def test_pipelining_scatters_alone_changes_nothing():
    alone = compiled(XlaOptions(frozenset({"reduce-scatter"})))
    assert (spent(alone), alone.memory, loops(alone)) == (spent(compiled()), compiled().memory, loops(compiled()))


def test_double_buffering_alone_only_unrolls_loops_once():
    before, after = compiled(), compiled(replace(DEFAULT, double_buffering=True))
    assert loops(after) == [LAYERS // 2] * 2
    assert spent(after).exposed_s == pytest.approx(spent(before).exposed_s, rel=0.02)


def test_double_buffering_peels_an_iteration_of_an_odd_count():
    done = compiled(replace(DEFAULT, double_buffering=True), layers=5)
    assert loops(done) == [2, 2] and sum(runs for runs, _ in in_flight(done, "all-gather")) == 4 * 5


def test_double_buffering_spares_the_copies_of_pipelining():
    plain, pipelined, both = compiled(), compiled(replace(PIPELINING, double_buffering=False)), compiled(PIPELINING)
    assert spent(pipelined).compute_s > 1.05 * spent(plain).compute_s
    assert spent(both).compute_s < 1.01 * spent(plain).compute_s


@pytest.mark.parametrize("target", ["h100:8", "a100:8"])
def test_level_one_pipelines_double_buffers_and_hides_latency(target):
    level, named = compiled({LEVEL: 19}, target), compiled(replace(PIPELINING, latency_hiding=True), target)
    assert (spent(level), level.memory, loops(level)) == (spent(named), named.memory, loops(named))
    assert not jax.__version__.startswith("0.10") or spent(compiled({LEVEL: 1}, target)) == spent(compiled(target=target))


def test_latency_is_hidden_unasked_from_hopper_on():
    asked = compiled(replace(DEFAULT, latency_hiding=True))
    assert spent(asked) == spent(compiled()) == spent(compiled({LATENCY_HIDING: False}))
    asked = compiled(replace(DEFAULT, latency_hiding=True), target="a100:8")
    assert spent(asked).exposed_s < 0.5 * spent(compiled(target="a100:8")).exposed_s


@pytest.mark.parametrize(("target", "of_asked"), [("h100:8", 1.0), ("a100:8", 0.5)])
def test_with_a_profile_latency_is_hidden_unasked_in_an_order_by_its_seconds(target, of_asked, tmp_path):
    def profiled(kernel_times: float):
        done = compiled(replace(DEFAULT, latency_hiding=True), target=target, scanned=False)
        cluster = Cluster.preset(done.target.gpu.key)
        lasts = {i.name: kernel_times * work_s(work, cluster) for i, (work, _) in kernels(done.module).items()}
        lasts |= {c.name: collective_s(c, cluster) for c in done.collectives}
        profile = tmp_path / f"{kernel_times}.pbtxt"
        profile.write_text("\n".join(f'costs {{ name: "{name}" cost_us: {1e6 * s} }}' for name, s in lasts.items()))
        return spent(compiled({PROFILE: str(profile)}, target=target, scanned=False)).exposed_s

    asked = spent(compiled(replace(DEFAULT, latency_hiding=True), target=target, scanned=False)).exposed_s
    assert profiled(1.0) < of_asked * asked
    assert profiled(1.0) < 0.9 * profiled(0.01)  # wrong seconds, worse order


def most_in_flight(done) -> int:
    """The most large collectives of a loop's body that are in flight at once."""
    most = 0
    names = {c.name for c in done.collectives if c.asynchronous and c.bytes > 1 << 20}
    for some in done.module.computations.values():
        now = 0
        for i in some:
            now += i.name in names
            now -= bool(i.operands) and i.operands[0].name in names and i.opcode.endswith("-done")
            most = max(most, now)
    return most


def test_two_collectives_may_be_in_flight():
    assert most_in_flight(compiled(scanned=False)) == 1
    assert most_in_flight(compiled(replace(DEFAULT, in_flight=2), scanned=False)) == 2


def test_a_smaller_threshold_hides_more_of_an_unrolled_step():
    before, after = compiled(scanned=False), compiled(DEFAULT.combining(4 << 20), scanned=False)
    scatters = [[len(c.parts) for c in done.collectives if c.kind == "reduce-scatter"] for done in (before, after)]
    assert max(scatters[0]) > 1 and scatters[1] == [1] * 2 * LAYERS
    assert spent(after).exposed_s < 0.6 * spent(before).exposed_s


@pytest.mark.parametrize("constrained", [False, True])
def test_windowed_einsums_are_not_made(constrained):
    square = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def product(x, w):
        x = constrain(x, NamedSharding(square, P("data"))) if constrained else x
        return constrain(x @ w, NamedSharding(square, P("data", "model"))) * 2

    ins = NamedSharding(square, P(("data", "model"))), NamedSharding(square, P(None, "model"))
    args = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.bfloat16)
    asked = {"xla_gpu_threshold_for_windowed_einsum_mib": 0, "xla_gpu_multi_streamed_windowed_einsum": True}
    done = compile(jax.jit(product, in_shardings=ins), *args, target="h100:8", options=asked)
    assert [c.kind for c in done.collectives] == ["all-gather"]


def test_every_option_is_known_by_some_name():
    full = replace(PIPELINING.combining(1 << 20), in_flight=2, latency_hiding=True)
    assert not refusal(tuple(as_known(full.flags()).items()))
    assert XlaOptions.of(as_known(full.flags())) == XlaOptions.of(full.flags()) == full
