"""Why an array lies as it does, and what other choices would cost: `Plan.why`."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.mesh.layout import Layout
from shardplan.plan.what_if import WhatIf, sent_bytes
from shardplan.plan.why import ArrayUse, LayoutChoice, Why
from shardplan.units import to_digits

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
WIDTH, ROWS = 4096, 8192


def mlp(x, w):
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def loss_fn(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = x + mlp(x, w)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, loss


def shapes(head=4 * WIDTH):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": array(WIDTH, 4 * WIDTH), "down": array(4 * WIDTH, WIDTH)}
    params = {"layers": [layer, layer], "head": array(WIDTH, head)}
    return {"params": params, "moments": params}, {"x": array(ROWS, WIDTH), "y": array(ROWS, head)}


def planned(head=4 * WIDTH, **options):
    return shardplan.auto(MESH, cluster="h100", donate_argnums=0, **options)(train_step).plan(*shapes(head))


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_the_plan_itself_has_its_own_figures(plan):
    chosen, of = plan.why("params/layers/1/up").chosen, plan.context.planned
    assert (chosen.seconds, chosen.peak_bytes) == (plan.seconds["total"], plan.memory().peak)
    assert chosen.sent_bytes == pytest.approx(plan.comm_bytes, rel=1e-12)
    again = WhatIf(of).judged(of.solution.states)
    assert (again.timeline, again.peak_bytes) == (of.timeline, plan.memory().peak)


def test_a_choice_is_priced_as_a_plan_that_makes_it(plan):
    what_if = WhatIf(plan.context.planned)
    graph, space = what_if.planned.graph, what_if.planned.space
    at = next(i for i in graph.args if graph.ops[i].label == "state/params/layers/1/up")
    for choice in plan.why("params/layers/1/up").choices:
        mask = np.array([x == choice.layout for x in space.strategies[at].results[0]])
        change = what_if.changes({choice.text: (choice.layout, {at: mask})})[choice.text]
        assert change is not None
        states = change.states
        assert what_if.planned.network.allows(states)
        judged = what_if.judged(states)
        assert space.strategies[at].results[0][judged.network.strategies(states)[at]] == choice.layout
        assert (to_digits(judged.timeline.total_s), judged.peak_bytes) == (choice.seconds, choice.peak_bytes)
        assert sent_bytes(judged.network, states) == choice.sent_bytes


@pytest.mark.filterwarnings("ignore::shardplan.ShardingWarning")  # where a faster plan is found on the way
def test_planning_again_with_a_layout_takes_at_most_what_was_said():
    what, plan = "params/layers/1/down", planned(4 * WIDTH + 1)
    for choice in [c for c in plan.why(what).choices if c.fits][:1]:
        fixed = plan.fix(what, P(*choice.layout.spec()))
        assert fixed.why(what).layout == choice.layout and fixed.seconds["total"] <= choice.seconds


@pytest.mark.filterwarnings("ignore::shardplan.ShardingWarning")
def test_a_pin_is_never_slower_than_what_is_known_of_it(plan):
    weak = planned(search="propagation", memory=1.2 * plan.memory().peak)  # finds less than "ilp" does
    choice = next(c for c in weak.why("params/head").choices if c.fits)
    known = weak.what_if("params/head", choice.text)
    pin = {"params/head": P(*choice.layout.spec())}
    for found in (weak.fix(*next(iter(pin.items()))), known.replan(pin)):  # the second as the widget's button does
        assert found.seconds["total"] <= known.seconds["total"] and "pin: " in str(found.why("params/head"))


def test_it_says_who_makes_and_reads_an_array_and_where(plan):
    found = plan.why("params/layers/1/up")
    assert found.maker.what == "input of the step, parameters"
    reader = next(use for use in found.readers if use.phase == "forward")
    line = mlp.__code__.co_firstlineno + 1
    assert reader.what == f"dot_general at test_why.py:{line} in mlp"
    assert [frame.rsplit(" in ")[1] for frame in reader.stack[:3]] == ["mlp", "loss_fn", "train_step"]
    text = str(found)
    assert f"test_why.py:{line} in mlp" in text and "  ops near the array adapt" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_collective_is_asked_for_by_its_line_or_as_a_reshard(plan):
    decision = max((d for d in plan.decisions if d.reshards), key=lambda d: d.comm_seconds)
    reshard = max(decision.reshards, key=lambda r: r.seconds)
    found = plan.why(reshard)
    assert found.array == reshard.array and found.layout == reshard.before
    sent = next(use for use in found.readers if use.collectives)
    assert sent.sent_bytes == pytest.approx(decision.runs * reshard.sent_bytes(plan.mesh))
    assert all(c.text.startswith(("read as ", "made as ")) for c in found.choices) and found.choices
    assert "result of" in found.name or "gradient of" in found.name or "state/" in found.name
    assert plan.why(f"test_why.py:{decision.line}").array
    with pytest.raises(shardplan.ShardingError, match=rf"lines with collectives: .*test_why\.py:{decision.line}"):
        plan.why("test_why.py:1")


def test_gradients_are_called_by_their_parameter():
    pins = {"params/**": P(), "moments/**": P(), "batch/**": P(("data", "model"))}
    plan = planned(pins=pins, search="propagation")
    names = {plan.why(r).name for d in plan.decisions if d.phase != "forward" for r in d.reshards}
    assert {f"gradient of state/params/layers/{n}/{w}" for n in (0, 1) for w in ("up", "down")} <= names


def test_a_dim_that_no_axis_divides_is_named():
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH + 1), (ROWS, WIDTH)))
    step = shardplan.auto(MESH, cluster="h100")(lambda w, x: w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w))
    text = f"divisibility: dim 1 of {WIDTH + 1} elements is no multiple of data=2, model=4; pad_state=True would fill it up"
    assert text in step.plan(w, x).why("w").constraints
    assert not any("divisibility" in text for text in step.with_options(pad_state=True).plan(w, x).why("w").constraints)


def test_constraints_that_bind_are_named(plan):
    assert any("tie: the output" in text for text in plan.why("params/head").constraints)
    pinned = plan.fix("params/layers/0/up", P(None, "model")).why("params/layers/0/up")
    assert any(text.startswith("pin: ") and "'model'" in text for text in pinned.constraints)
    assert not pinned.choices and pinned.impossible


@pytest.mark.slow
def test_memory_that_binds_is_named():
    """Gradients wait for those they are combined with, and hold their operands: the first plan needs more than it was found with."""
    free = planned(memory="disable")
    tight = planned(memory=0.8 * free.memory().peak)
    assert tight.memory().peak <= 0.8 * free.memory().peak
    text = [t for x in tight.inputs for t in tight.why(x.path).constraints if t.startswith("memory: ")]
    assert text and " would take " in text[0] and " and needs " in text[0]
    assert "DOES NOT FIT" in "".join(str(tight.why(x.path)) for x in tight.inputs)


@pytest.mark.slow
def test_the_page_answers_for_the_largest_inputs_and_the_most_expensive_reshards(plan):
    page = plan.html()
    state = json.loads(re.search(r'id="shardplan-data">(.*?)</script>', page, re.DOTALL)[1])
    found, here = {x["name"]: x for id_, x in state["answers"].items() if id_[0] == "i"}, plan.why("params/head")
    choices = found[here.name]["choices"]
    assert [c["text"] for c in choices] == [c.text for c in here.choices]
    assert [c["seconds"] for c in choices] == pytest.approx([c.seconds for c in here.choices], rel=1e-3)
    collectives = {x["id"] for x in state["data"]["collectives"]}
    assert collectives & set(state["answers"]), "reshards are asked for, too"
    assert "Classical layouts on the same objective" in page and plan.baselines().rows[0].name in page


def test_a_line_is_named_whole_however_long_its_function_is_called():
    class AttentionOfManyHeads:
        @staticmethod
        def project_and_reshape(x, w):
            return jnp.tanh(x @ w)

    step = lambda w, x: w - jax.grad(lambda w: jnp.sum(AttentionOfManyHeads.project_and_reshape(x, w)))(w)  # noqa: E731
    arrays = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    plan = shardplan.auto(MESH, cluster="h100", pins={"w": P("model"), "x": P("data")})(step).plan(*arrays)
    lines = str(plan.why("w")).splitlines()
    (reader,) = [x for x in lines if x.startswith("  forward ")]
    assert re.match(r"  forward +dot_general at test_why\.py:\d+ in ", reader) and re.search(r" as P\(.*\), .* over model ", reader)
    assert max(map(len, lines)) <= 120


def test_a_layout_and_how_it_is_read_are_whole_while_the_name_of_a_function_can_be_cut():
    layout, other = Layout((("data", "model"), (), ())), Layout((("data",), (), ("model",)))
    read = ArrayUse("scatter-add at model.py:1077 in project_and_reshape_all_heads_of_attention", "backward", other)
    gathered = replace(read, collectives=("all-gather over model",), sent_bytes=67.6e6, seconds=200e-6)
    chosen = LayoutChoice("chosen", layout, 1e-3, 1e9, 1e6, True)
    use = ArrayUse("input of the step, parameters", "", layout)
    lines = str(Why("w", "float32[8,8,8]", layout, use, (read, gathered), chosen, (), 0, (), ())).splitlines()
    (copied,) = [x for x in lines if "a copy that is there already" in x]
    assert f"as {other}, a copy that is there already" in copied and "scatter-add at model.py:1077" in copied
    assert max(map(len, lines)) <= 120
