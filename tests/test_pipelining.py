"""What runs a round ahead where all-gathers of loops are pipelined, and what then runs twice: planned, and as XLA compiles it.

gradient accumulation over rounds, layers in a loop; behind them an activation is gathered for the head
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import Cluster
from shardplan.costs.decided_memory import DecidedMemory
from shardplan.xla import available, compile
from shardplan.xla.compiler.compile import lower_for
from shardplan.xla.hlo.schedule import seconds
from shardplan.xla_model.compiler_options import DEFAULT, PIPELINING, XlaOptions
from shardplan.xla_model.timeline import spans

GATHERS = XlaOptions(frozenset({"all-gather"}))
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
ROUNDS, LAYERS, TOKENS, WIDTH, HIDDEN, VOCABULARY = 4, 8, 8 * 512, 2048, 8192, 8192
SPLIT = {"layers": P(None, "data"), "head": P(None, "data")}
WHOLE = {"layers": P(), "head": P(None, "data")}

compiled_for_gpus = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')


def split(x, *entries):
    return constrain(x, NamedSharding(MESH, P(*entries)))


def loss(w, x, gathered, fetched=False):
    def layer(x, w):
        w = jax.tree.map(lambda a: split(split(a, "data", None), None, None), w) if fetched else w
        return split(x + jnp.tanh(x @ w["up"]) @ w["down"], "data"), None

    x, _ = jax.lax.scan(layer, split(x, "data"), w["layers"])
    x = split(x, None) if gathered else x
    return (split(x @ w["head"], None, "data").astype(jnp.float32) ** 2).mean()


def trained(w, batch, fetched=False):
    def add(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x, True, fetched)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), batch)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, total)


def fetched(w, batch):
    """The weights of a layer are gathered in the loop of the layers."""
    return trained(w, batch, fetched=True)


def evaluated(w, batch):
    return w, jax.lax.scan(lambda total, x: (total + loss(w, x, True), None), 0.0, batch)[0]


def carried(w, batch):
    """The gathered array is one that the round before made."""

    def one(x, _):
        return split(jnp.tanh(split(x, None) @ w["layers"]["up"][0]) @ w["layers"]["down"][0], "data"), None

    return w, jax.lax.scan(one, batch[0], None, length=ROUNDS)[0]


@functools.cache
def planned(step=trained, layers="split"):
    spec = SPLIT if layers == "split" else WHOLE
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    w = {"layers": {"up": of((LAYERS, WIDTH, HIDDEN)), "down": of((LAYERS, HIDDEN, WIDTH))}, "head": of((WIDTH, VOCABULARY))}
    pins = {"layers": dict.fromkeys(w["layers"], spec["layers"]), "head": spec["head"]}
    auto = shardplan.auto(MESH, cluster="h100", donate_argnums=0, in_shardings=(pins, P(None, "data")), compiler_options=None)
    return auto(step).plan(w, of((ROUNDS, TOKENS, WIDTH)))


def program(options, **step):
    found = planned(**step).context.planned
    return found.program(options).acyclic


def outermost(some):
    """What is pipelined in the loop of the rounds."""
    return some.pipelined[min(some.pipelined, key=lambda n: len(some.graph.loop_holders[n]))]


def test_a_round_ahead_of_gradient_accumulation_runs_its_forward_pass_twice():
    before, after = program(DEFAULT, layers="whole"), program(GATHERS, layers="whole")
    rounds = outermost(after)
    assert rounds.ahead and any(kind == "loop" for kind, _ in rounds.twice)
    assert after.step_timeline().compute_s > 1.25 * before.step_timeline().compute_s


def test_the_forward_pass_that_runs_a_round_ahead_does_not_stack_what_only_the_backward_pass_reads():
    some = program(GATHERS)
    home = min(some.pipelined, key=lambda n: len(some.graph.loop_holders[n]))
    (loop,) = (n for kind, n in some.pipelined[home].twice if kind == "loop")
    ahead = some._pipelining.run_ahead(home, loop, some.pipelined[home])
    stacks = [j for j, op in enumerate(some.graph.ops) if op.held_during == loop and op.traits.loop_stack]
    assert not {some.member(some.tasks.made[j], loop) for j in stacks} <= ahead < set(some._members[loop])
    assert some.timed(loop, some=ahead).line.compute_s < 0.95 * some.timed(loop).line.compute_s


def test_what_only_the_gather_needs_runs_a_round_ahead_but_once():
    before, after = program(DEFAULT, step=evaluated), program(GATHERS, step=evaluated)
    rounds = outermost(after)
    assert rounds.ahead and any(kind == "loop" for kind, _ in rounds.needed) and not any(kind == "loop" for kind, _ in rounds.twice)
    assert after.step_timeline().compute_s == pytest.approx(before.step_timeline().compute_s, rel=0.02)


def test_a_gather_of_what_the_round_before_hands_on_stays_in_its_round():
    assert not any(found.ahead for found in program(GATHERS, step=carried).pipelined.values())


def test_a_gather_behind_a_loop_whose_own_gathers_run_ahead_stays_in_its_round():
    some = program(GATHERS, step=fetched)
    layers = [found for n, found in some.pipelined.items() if len(some.graph.loop_holders[n]) > 2]
    assert layers and all(found.ahead for found in layers) and not outermost(some).twice


def test_what_a_pipelined_gather_made_is_copied_for_the_next_round_before_the_gather_may_end():
    """So the sums of gradients end last in a round, and the gather hides behind what is computed before them."""
    some = program(GATHERS, step=fetched)
    backward = max(some.pipelined)  # the loop that begins last
    (tasks, nested, members, _), _ = some.listed(backward)
    starts = [start for start, _ in spans(tasks, nested)]
    at = {some.tasks.kind(n): starts[m] for m, (_, n) in members.items() if tasks[m].collective}
    assert at["all-gather"] < at["reduce-scatter"]


def test_sums_of_gradients_of_weights_that_a_layer_gathers_are_planned_as_the_reduce_scatters_that_xla_makes():
    shown = [c.kind for d in planned(step=fetched).decisions for reshard in d.reshards for c in reshard.collectives]
    assert shown.count("reduce-scatter") == 3 and "all-reduce" not in shown


@pytest.mark.slow
@compiled_for_gpus
def test_layers_that_gather_their_weights_send_what_is_planned():
    report = planned(step=fetched).check("h100:8")
    assert report.collectives_ratio == pytest.approx(1, abs=0.02) and report.ok


def test_the_last_round_stands_behind_the_loop_and_its_stacks_are_in_memory_before():
    stacks = LAYERS * TOKENS // 8 * (WIDTH + HIDDEN) * 2  # what the forward pass keeps of each layer, at least
    assert DecidedMemory(program(GATHERS)).peak_bytes() - DecidedMemory(program(DEFAULT)).peak_bytes() > 0.9 * stacks


@functools.cache
def compiled(options, **step):
    plan = planned(**step)
    function, args = plan.context.program(plan)
    done = compile(lower_for("h100:8", function, *args), target="h100:8", options=options.flags())
    assert done.ok, done.error
    return done


@pytest.mark.slow
@compiled_for_gpus
@pytest.mark.parametrize("layers", ["split", "whole"])
@pytest.mark.parametrize(
    ("options", "step"),
    [(DEFAULT, trained), (GATHERS, trained), (PIPELINING, trained), (DEFAULT, fetched), (GATHERS, fetched)],
    ids=["default", "gathers", "all", "default, fetched", "gathers, fetched"],
)
def test_rounds_take_what_is_planned(options, layers, step):
    found = seconds(compiled(options, layers=layers, step=step), Cluster.preset("h100"))
    line = program(options, layers=layers, step=step).step_timeline()
    assert line.compute_s == pytest.approx(found.compute_s, rel=0.06)
    assert line.total_s == pytest.approx(found.step_s, rel=0.08)


@pytest.mark.slow
@compiled_for_gpus
def test_what_a_pipelined_gather_and_the_round_need_is_computed_twice():
    flops = [compiled(options, layers="whole").flops for options in (DEFAULT, GATHERS)]
    assert flops[1] / flops[0] == pytest.approx(4 / 3, rel=0.03)  # the forward pass is a third


@pytest.mark.slow
@compiled_for_gpus
def test_behind_a_loop_whose_own_gathers_run_ahead_nothing_is_computed_twice():
    flops = [compiled(options, step=fetched).flops for options in (DEFAULT, GATHERS)]
    assert flops[1] == pytest.approx(flops[0], rel=0.03)


@pytest.mark.slow
@compiled_for_gpus
@pytest.mark.parametrize("step", [trained, fetched])  # of the second only the gathers before the loops of the layers are issued ahead
def test_the_stacks_of_a_last_round_are_in_memory_during_the_rounds_before(step):
    peaks = [compiled(options, step=step).memory.peak_bytes for options in (DEFAULT, GATHERS)]
    found = [DecidedMemory(program(options, step=step)).peak_bytes() for options in (DEFAULT, GATHERS)]
    assert found == pytest.approx(peaks, rel=0.05)
    assert found[1] - found[0] == pytest.approx(peaks[1] - peaks[0], rel=0.15)
