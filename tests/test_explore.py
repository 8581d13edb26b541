"""What-ifs without planning anew, the schedule that is shown, the instrument's data and the exports."""

import dataclasses
import html
import itertools
import json
import re
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.cli import main
from shardplan.emit.decide import decide
from shardplan.plan.asked import asked
from shardplan.plan.describe import describe
from shardplan.plan.schedule import StepSchedule
from shardplan.plan.what_if import WhatIf, sent_bytes
from shardplan.view.answers import Answers, known
from shardplan.view.exports import model_explorer, perfetto
from shardplan.view.instrument import Instrument
from shardplan.view.pieces import SWITCH_S, Pieces
from shardplan.view.rows import type_text
from shardplan.view.session import Entry, meshes
from shardplan.view.values import answer_values

pytestmark = pytest.mark.usefixtures("first_plan")

SHELL = SimpleNamespace(kernel=None, compile=SimpleNamespace(format_code_name=lambda file: None))
"""A notebook."""
EVIL = "</script><script>alert(1)</script>"
WIDTH, ROWS = 2048, 4096


def loss_fn(params, x):
    for w in params["layers"]:
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def train_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def scanned_step(params, x):
    def loss(params):
        body = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(width=WIDTH, rows=ROWS, name="down"):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": array(width, 4 * width), name: array(4 * width, width)}
    return {"layers": [layer, layer]}, array(rows, width)


@pytest.fixture(scope="module")
def plan():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    return shardplan.auto(mesh, cluster="h100", donate_argnums=0)(train_step).plan(*arguments())


@pytest.fixture(scope="module")
def looped():
    stack = {"up": jax.ShapeDtypeStruct((6, 1024, 4096), jnp.float32), "down": jax.ShapeDtypeStruct((6, 4096, 1024), jnp.float32)}
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    return shardplan.auto(mesh, cluster="h100", donate_argnums=0)(scanned_step).plan(
        stack, jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    )


# ---- what if


def test_a_choice_is_taken_at_the_price_that_was_said(plan):
    for what in ("params/layers/*/up", asked_result(plan), asked_reshard(plan)):
        answer = plan.why(what)
        choice = next(c for c in answer.choices if c.fits)
        found = plan.what_if(what, choice.text)
        figures = found.seconds["total"], found.memory().peak
        assert figures == (choice.seconds, choice.peak_bytes)
        assert found.comm_bytes == pytest.approx(choice.sent_bytes, rel=1e-12)
        assert found.why(what).layout == choice.layout or choice.text.startswith("read as")


def asked_result(plan):
    rows = Instrument(plan)
    return next(rows.targets[row["id"]] for row in rows.arrays if row["id"][0] == "r" and row["kind"] == "forward")


def asked_reshard(plan):
    rows = Instrument(plan)
    return rows.targets[rows.collectives[0]["id"]]


@pytest.mark.parametrize("which", ["plan", "looped"])
def test_what_is_decided_anew_near_a_choice_is_what_deciding_everything_gives(which, request):
    plan = request.getfixturevalue(which)
    kept = []
    for what in [*Instrument(plan).targets.values()][::3]:
        for choice in [*asked(plan, what).wanted][:2]:
            planned = plan.what_if(what, choice).context.planned
            everything = decide(planned.network, planned.strategies, planned.retained)
            assert [*planned.decisions.items()] == [*everything.items()]
            whole = describe(dataclasses.replace(planned, decisions=everything, kept={}, tasks=None))
            assert whole.decisions == describe(planned).decisions
            kept.append(len(planned.kept) / len(planned.user_ops))
    assert len(kept) > 10 and max(kept) > 0.5  # of a step of four products


def test_all_reshards_of_a_plan_are_those_of_its_ops(plan, looped):
    for planned in (plan.context.planned, looped.context.planned):
        network, chosen = planned.network, planned.strategies
        of, values, one_by_one = network.space.strategies, planned.graph.values, []
        for j, op in enumerate(planned.graph.ops):
            for k, v in enumerate(op.inputs if j not in planned.retained else ()):
                if v is not None:
                    i, r = values[v].producer
                    steps = network.path(j, k, of[i].results[r][chosen[i]], of[j].operands[k][chosen[j]])
                    one_by_one += [(j, k, steps)] if steps else []
        assert [(j, k, steps) for j, k, _, steps in network.moves(chosen, planned.retained)] == one_by_one != []


def test_every_row_can_be_asked_about_where_layers_lie_differently():
    """Pins of single layers: a line's ops then lie differently, and not all of them reshard what they read."""
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("a", "b", "c"))
    pins = {"params/layers/0/up": P(None, "a"), "params/layers/1/up": P("b"), "x": P("c")}
    plan = shardplan.auto(mesh, cluster="a100", donate_argnums=0, pins=pins)(train_step).plan(*arguments())
    rows = Instrument(plan)
    for row in (*rows.arrays, *rows.collectives):
        found = asked(plan, rows.targets[row["id"]])
        if row["id"][0] == "c":
            assert row["to"].split(" {")[0] == type_text("float32", plan_shape(plan, found), found.reader[1]).split(" {")[0], row
        elif row["spec"] != "replicated":
            assert row["spec"] == str(dataclasses.replace(found.layout, partial=())) and len(found.ops) >= row["n"], row
            what = rows.targets[row["id"]]
            assert row["id"][0] == "i" or " as " in what or asked(plan, f"{what} as {row['spec']}").ops == found.ops
    moved = rows.targets[rows.collectives[0]["id"]]
    found = asked(plan, moved)
    assert asked(plan, f"{moved} as {found.layout} -> {found.reader[1]}").ops == found.ops
    with pytest.raises(shardplan.ShardingError, match="no input of the step has this path"):
        asked(plan, f"{moved} as {found.reader[1]} -> {found.layout}")


def plan_shape(plan, found):
    return plan.context.planned.graph.values[found.value].shape


@pytest.mark.parametrize("which", ["plan", "looped"])
def test_choices_of_an_array_are_priced_together_as_each_alone(which, request):
    """The least cost of the network near each choice, though what adapts to all of them is found once."""
    plan = request.getfixturevalue(which)
    near, problem = plan.context.prices.neighbourhood, plan.context.planned.network.problem
    priced = 0
    for what in [*Instrument(plan).targets.values()][::2]:
        wanted = asked(plan, what).wanted
        for text, change in plan.context.prices.changes(wanted).items():
            alone = near.states_with(wanted[text][1])
            assert (alone is None) == (change is None)
            if change is not None:
                assert change.cost == problem.objective(change.states) - near.objective == problem.objective(alone) - near.objective
                assert all(mask[plan.context.planned.network.strategies(change.states)[i]] for i, mask in wanted[text][1].items())
                priced += 1
    assert priced > 40


def test_choices_cost_the_same_where_tables_are_too_large_to_answer_all_of_them_at_once(plan, monkeypatch):
    prices, wanted = plan.context.prices, [asked(plan, what).wanted for what in Instrument(plan).targets.values()]

    def costs():
        return [[change and change.cost for change in prices.changes(some).values()] for some in wanted]

    at_once = costs()
    monkeypatch.setattr("shardplan.search.neighbourhood.MAX_ENTRIES", 0)
    assert costs() == at_once


@pytest.mark.parametrize("which", ["plan", "looped", "changed"])
def test_estimates_are_the_same_whether_followers_are_found_before_or_not(which, request, monkeypatch):
    plan = request.getfixturevalue("plan" if which == "changed" else which)
    plan = plan.what_if("params/layers/*/up", P("model")) if which == "changed" else plan
    targets = [x if isinstance(x, str) else list(x) for x in Instrument(plan).targets.values()]
    found = [plan.why(what, estimate=True) for what in targets]
    monkeypatch.setattr("shardplan.search.followers.ONLY_FOLLOWERS", ())  # every op leads
    monkeypatch.setitem(plan.context.__dict__, "prices", WhatIf(plan.context.planned))
    near = plan.context.prices.neighbourhood
    assert len(near.leading.members) == len(near.states)
    assert found == [plan.why(what, estimate=True) for what in targets]


def test_an_estimate_counts_the_bytes_and_the_peak_that_the_network_has_of_the_whole_step(plan):
    prices, network = plan.context.prices, plan.context.planned.network
    for what in ("params/layers/*/up", "x", asked_result(plan), asked_reshard(plan)):
        for change in filter(None, prices.changes(asked(plan, what).wanted).values()):
            _, grown, sent = prices.estimated(change)
            more = network.peak(change.states) - network.peak(plan.context.planned.solution.states)
            assert sent == pytest.approx(sent_bytes(network, change.states), rel=1e-9)
            assert grown == more


def test_what_was_chosen_stays_chosen(plan):
    once = plan.what_if("params/layers/*/up", P("model"))
    twice = once.what_if("params/layers/*/down", P(None, "data"))
    layouts = {x.path: str(x.layout) for x in twice.inputs}
    assert {layouts[f"params/layers/{n}/up"] for n in (0, 1)} == {"P('model', None)"}
    assert {layouts[f"params/layers/{n}/down"] for n in (0, 1)} == {"P(None, 'data')"}
    for estimate in (True, False):  # and can be chosen otherwise
        assert len(once.why("params/layers/*/up", estimate=estimate).choices) > 2


def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(plan):
    with pytest.raises(shardplan.ShardingError, match=r"is none of its layouts.\n  choices: .*P\('model'"):
        plan.what_if("params/layers/0/up", P("data", "data"))
    present = next(x.layout for x in plan.inputs if x.path == "params/layers/0/up")
    with pytest.raises(shardplan.ShardingError, match="is how it lies already"):
        plan.what_if("params/layers/0/up", present.spec())
    with pytest.raises(shardplan.ShardingError, match=r"replan.. takes pins, memory, mesh, cluster; not serach"):
        plan.replan(serach="ilp")


def test_a_plan_with_a_choice_runs_with_the_same_numbers():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    step = shardplan.auto(mesh, cluster="h100")(train_step)
    shapes = arguments(64, 32)
    changed = step.plan(*shapes).what_if("params/layers/*/up", P("model", "data"))
    values = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 8, shapes)
    jitted, _ = changed.context.program(changed)
    got, expected = jitted(*values), jax.jit(train_step)(*values)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, expected)
    assert got[0]["layers"][0]["up"].sharding.spec == P("model", "data")


def test_the_history_states_code_that_gives_each_plan(plan):
    first = Entry(plan, "as planned")
    row = next(x["id"] for x in first.instrument.arrays if x["name"] == "params/layers/*/down")
    choice = first.answers.answer(row)["choices"][0]["text"]
    taken = first.taken(0, row, choice)
    moved = taken.instrument.collectives[0]["id"]
    again = taken.taken(1, moved, next(c["text"] for c in taken.answers.answer(moved)["choices"] if c["fits"]))
    anew = taken.anew(1)
    other = first.retargeted(0, mesh={"data": 8}, cluster="a100")
    less = anew.retargeted(3, memory=1e9)
    for entry in (first, taken, again, anew, other, less):
        names = {"plan": plan}
        exec(entry.code, names)
        assert names["changed"].dumps() == entry.plan.dumps(), entry.code
    assert (dict(other.plan.mesh), other.plan.cluster, less.plan.memory().limit) == ({"data": 8}, "a100", 1e9)
    names = {"P": P}
    exec(taken.pins_code, names)
    assert names["pins"].keys() == {"params/layers/*/down"}
    assert "params/layers/*/down" in first.pins_code


def test_every_mesh_of_as_many_devices_can_be_picked():
    found = meshes(8, ("data", "model"))
    assert (("data", 8),) in found and (("model", 8),) in found and (("data", 4), ("model", 2)) in found
    assert len(found) == 4 and all(np.prod([n for _, n in mesh]) == 8 for mesh in found)
    assert (("x", 2), ("model", 4)) in meshes(8, ("x",)) and (("model", 2), ("data", 4)) in meshes(8, ("model",))


class Kernel:
    """A widget, and messages to it as a page sends them."""

    def __init__(self, plan):
        self.widget, self.said = plan.explore(), []
        self.widget.send = self.said.append

    def ask(self, **message):
        self.widget._on_message(None, message, None)

    def done(self, holds=lambda: True):
        end = time.monotonic() + 60
        while (self.widget.work or not holds()) and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.widget.work and holds(), (self.widget.message, self.widget.work)
        return self.widget


def small_plan(sizes, axes, **options):
    return shardplan.auto(jax.sharding.AbstractMesh(sizes, axes), **{"cluster": "h100", **options})(train_step).plan(
        *arguments(256, 64)
    )


def test_the_mesh_of_a_plan_can_be_picked_even_with_an_axis_of_one_device():
    kernel = Kernel(small_plan((8, 1), ("data", "model")))
    assert kernel.widget.pickers["meshes"][0] == "data=8, model=1" and "data=4, model=2" in kernel.widget.pickers["meshes"]
    kernel.ask(do="target", mesh="data=4, model=2", cluster="h100")
    assert dict(kernel.done().plan.mesh) == {"data": 4, "model": 2}
    kernel.ask(do="target", mesh="data=8, model=1", cluster="h100")
    widget = kernel.done()
    assert dict(widget.plan.mesh) == {"data": 8, "model": 1} and widget.message == ""


def test_a_cluster_of_ones_own_can_be_picked_again(tmp_path):
    dataclasses.replace(shardplan.Cluster.preset("a100"), name="ours").save(tmp_path / "ours.json")
    kernel = Kernel(small_plan((2, 4), ("data", "model"), cluster=tmp_path / "ours.json"))
    assert kernel.widget.plan.cluster == "ours"
    first = kernel.widget.plan
    kernel.ask(do="target", mesh="data=8", cluster="h100")
    assert kernel.done().plan.cluster == "h100"
    kernel.ask(do="target", mesh="data=8", cluster="ours")
    widget = kernel.done()
    assert (widget.plan.cluster, dict(widget.plan.mesh), widget.message) == ("ours", {"data": 8}, "")
    kernel.ask(do="target", mesh="data=2, model=4", cluster="h100")
    kernel.done()
    kernel.ask(do="target", mesh="data=2, model=4", cluster="ours")
    assert kernel.done().plan is first


def test_a_curve_belongs_to_its_mesh_and_its_points_are_shown_without_planning(plan, monkeypatch):
    monkeypatch.setattr("shardplan.view.session.SHARES", (0.95, 0.9))
    kernel = Kernel(plan)
    kernel.ask(do="pareto")
    widget = kernel.done(lambda: len(kernel.widget.pareto) > 2)
    assert widget.pickers["more"] is False and len(widget.history) == 1
    curve = widget.pareto
    kernel.ask(do="target", mesh="data=8", cluster="h100")
    assert kernel.done(lambda: kernel.widget.current == 1).pareto == [] and widget.pickers["more"]
    assert widget.pickers["most"] == pytest.approx(1.3 * widget.plan.memory().peak, rel=1e-3)
    kernel.ask(do="undo")
    assert widget.pareto == curve
    monkeypatch.setattr("shardplan.plan.plan.Plan.replan", lambda *_, **__: pytest.fail("it planned again"))
    for _ in range(2):
        kernel.ask(do="point", n=2)
        assert widget.plan.memory().peak == pytest.approx(curve[2]["peak"], rel=1e-3) and widget.plan.memory().limit < curve[0]["peak"]
    assert len(widget.history) == 3


def test_a_path_with_brackets_names_itself():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    step = lambda s, x: {name: w - 0.1 * jnp.sum(x) for name, w in s.items()}  # noqa: E731
    state = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in ("w[0]", "w0", "a*")}
    pins = {"s/w[0]": P("model"), "w0": P(None, "data")}
    plan = shardplan.auto(mesh, cluster="h100", pins=pins)(step).plan(state, jax.ShapeDtypeStruct((64,), jnp.float32))
    assert {x.path: P(*x.layout.spec()) for x in plan.inputs if x.path[2:3] == "w"} == {
        "s/w[0]": P("model", None),
        "s/w0": P(None, "data"),
    }
    assert plan.why("s/w[0]").name == "s/w[0]" and plan.why("s/a*").name == "s/a*"


# ---- the schedule


@pytest.mark.parametrize("which", ["plan", "looped"])
def test_the_schedule_sums_to_the_seconds_of_the_plan(which, request):
    plan = request.getfixturevalue(which)
    schedule = StepSchedule(plan.context.planned)
    sums = {lane: sum(x.seconds for x in schedule.spans if x.lane == lane) for lane in ("compute", "network")}
    s = plan.seconds
    for lane, part in (("compute", "compute"), ("network", "communication")):  # each takes longer by what the other slows it by
        assert sums[lane] == pytest.approx(s[part] + s["interference"], rel=1e-9)
    assert sum(x.exposed_s for x in schedule.spans) == pytest.approx(s["communication"] - s["hidden"], rel=1e-6, abs=1e-12)
    assert schedule.end_s == pytest.approx(s["total"], rel=1e-9)
    for lane in sums:  # a stream does one thing at a time
        here = [x for x in schedule.spans if x.lane == lane]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(here))
    assert [band[0] for band in schedule.bands] == ["forward", "backward", "update"]
    assert sum(x.bytes for x in schedule.at_peak()) == plan.memory().peak


def test_the_instrument_divides_all_exposed_seconds_among_its_collectives(plan):
    data = Instrument(plan).data()
    s = plan.seconds
    assert sum(row["exposed"] for row in data["collectives"]) == pytest.approx(s["communication"] - s["hidden"], rel=1e-4)
    assert sum(row["sent"] for row in data["collectives"]) == pytest.approx(plan.comm_bytes, rel=1e-4)
    assert sum(row["bytes"] for row in data["memory"]["buffers"]) == pytest.approx(plan.memory().peak, rel=1e-4)
    assert all(row["line"].startswith("test_explore.py:") for row in data["collectives"])
    assert {row["n"] for row in data["roles"]} >= {2}  # repeated layers are one row


# ---- exports


def test_a_trace_has_both_streams_and_memory(plan, tmp_path):
    plan.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    busy = {name: sum(e["dur"] for e in events if e["ph"] == "X" and threads[e["tid"]] == name) for name in threads.values()}
    slower = plan.seconds["interference"]
    assert busy["compute"] == pytest.approx(1e6 * (plan.seconds["compute"] + slower), rel=1e-4)
    assert busy["network"] == pytest.approx(1e6 * (plan.seconds["communication"] + slower), rel=1e-4)
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") <= plan.memory().peak + 8


def test_an_export_that_cannot_be_written_is_refused_in_words(plan, tmp_path):
    for export in (plan.to_perfetto, plan.to_model_explorer):
        with pytest.raises(
            shardplan.ShardingError, match=r"cannot be written: Is a directory.\n  way out: a file in a folder that exists"
        ):
            export(tmp_path)


def test_the_graph_has_every_op_and_its_operands(plan):
    nodes = json.loads(model_explorer(plan))["graphs"][0]["nodes"]
    ids = {node["id"] for node in nodes}
    assert len(ids) == len(plan.context.planned.user_ops)
    assert all(edge["sourceNodeId"] in ids for node in nodes for edge in node["incomingEdges"])
    products = [node for node in nodes if node["label"] == "dot_general"]
    assert products and all(len(node["incomingEdges"]) == 2 and node["namespace"].count("/") == 2 for node in products)


def test_the_command_line_writes_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.py").write_text(
        "import jax, jax.numpy as jnp\ndef step(w, x):\n    return w - jax.grad(lambda w: jnp.sum(x @ w))(w)\n"
        "def example():\n    return step, (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32))\n"
    )
    monkeypatch.chdir(tmp_path)
    words = [
        "plan",
        "tiny.py:example",
        "--mesh",
        "data=2",
        "--cluster",
        "h100",
        "-o",
        "p.json",
        "--perfetto",
        "t.json",
        "--model-explorer",
        "g.json",
    ]
    assert main(words) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] and json.loads((tmp_path / "g.json").read_text())["graphs"]
    with pytest.raises(shardplan.ShardingError, match="read from a file"):
        shardplan.Plan.load(tmp_path / "p.json").to_perfetto(tmp_path / "no.json")
    capsys.readouterr()


# ---- the page


def test_names_of_the_program_stay_text_on_the_page():
    mesh = jax.sharding.AbstractMesh((2,), (EVIL,))
    plan = shardplan.auto(mesh, cluster="h100")(train_step_named(EVIL)).plan(*arguments(64, 32, EVIL))
    page = plan.html()
    assert EVIL not in page and page.count("<script") == 3
    state = json.loads(re.search(r'id="shardplan-data">(.*?)</script>', page, re.S)[1])
    assert any(EVIL in row["name"] for row in state["data"]["arrays"]) and state["data"]["mesh"] == [[EVIL, 2]]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|\ssrc=|<link", page)
    for text in (perfetto(plan), model_explorer(plan)):
        json.loads(text)


def train_step_named(name):
    def step(params, x):
        return jax.tree.map(
            lambda p, g: p - 0.1 * g, params, jax.grad(lambda p: jnp.sum((x @ p["layers"][0]["up"]) @ p["layers"][0][name]))(params)
        )

    return step


def test_the_widget_prices_replans_undoes_and_cancels(unasked):
    kernel = Kernel(unasked)
    widget, said, ask = kernel.widget, kernel.said, kernel.ask

    def until(holds):
        end = time.monotonic() + 60
        while not holds() and time.monotonic() < end:
            time.sleep(0.02)
        assert holds(), (widget.message, widget.work)

    row = next(x["id"] for x in widget.data["arrays"] if x["name"] == "params/layers/*/down")
    answers = []
    widget.observe(lambda change: answers.append(change["new"].get(row)), "answers")
    ask(do="ask", id=row)
    until(lambda: not widget.answers[row]["estimated"])
    facts, *_, estimate, scheduled = answers  # the first before anything is priced
    assert {c["text"] for c in estimate["choices"]} <= {*facts["pending"]} and estimate["pending"] == []
    assert estimate["estimated"] and {c["text"] for c in estimate["choices"]} == {c["text"] for c in scheduled["choices"]}
    choice = scheduled["choices"][0]
    ask(do="take", id=row, choice=choice["text"])
    until(lambda: widget.current == 1 and not widget.work)
    assert widget.history[1]["seconds"] == pytest.approx(choice["seconds"], rel=1e-5)
    assert widget.data["figures"]["total"] == pytest.approx(widget.plan.seconds["total"], rel=1e-5)
    ask(do="name", n=1, name="up otherwise")
    assert widget.history[1]["name"] == "up otherwise"
    ask(do="compare", a=0, b=1)
    ask(do="copy", what="code")
    assert "params/layers/*/down" in said[-2]["text"] and "what_if" in said[-1]["text"]
    ask(do="anew")
    ask(do="cancel")
    until(lambda: not widget.work)
    assert widget.message == "cancelled" and len(widget.history) == 2
    ask(do="undo")
    assert widget.current == 0 and widget.plan is unasked
    ask(do="nonsense")
    ask(do="show", n=99)
    assert "IndexError" in widget.message
    ask(do="hello")
    assert "IndexError" in widget.message
    ask(do="show", n=1)
    assert widget.message == "" and widget.current == 1


def test_a_plan_that_was_taken_over_is_solved_when_a_row_is_opened(tmp_path):
    first, kept = (small_plan((2, 4), ("data", "model"), cache=tmp_path) for _ in range(2))
    assert kept.context.planned is None and kept == first
    kernel = Kernel(kept)
    kernel.ask(do="hello")
    row = next(x["id"] for x in kernel.widget.data["arrays"] if x["name"] == "params/layers/*/down")
    assert kernel.said == [{"hello": True}] and kernel.widget.plan is kept
    kernel.ask(do="ask", id=row)
    widget = kernel.done(lambda: not kernel.widget.answers.get(row, {"estimated": True})["estimated"])
    assert widget.plan == first and widget.plan.context.planned is not None and len(widget.history) == 1
    assert [c["text"] for c in widget.answers[row]["choices"]] == [c.text for c in first.why("params/layers/*/down").choices]
    kernel.ask(do="take", id=row, choice=widget.answers[row]["choices"][0]["text"])
    assert kernel.done().current == 1 and widget.message == ""


def test_a_plan_that_is_planned_otherwise_now_stays_beside_the_new_one(tmp_path):
    (file,) = (small_plan((2, 4), ("data", "model"), cache=tmp_path), *tmp_path.iterdir())[1:]
    file.write_text(file.read_text().replace('"gap": ', '"gap": 1'))
    kernel = Kernel(small_plan((2, 4), ("data", "model"), cache=tmp_path))
    kernel.ask(do="hello")
    kernel.ask(do="ask", id=kernel.widget.data["arrays"][0]["id"])
    widget = kernel.done(lambda: kernel.widget.answers)
    assert [x["name"] for x in widget.history] == ["as planned", "planned again"] and widget.current == 1
    assert widget.message == "the step is planned otherwise now than the plan that was taken over"


@pytest.fixture
def unasked(plan):
    """The plan, of which nothing was asked or estimated."""
    vars(plan).pop("_known", None)
    return plan


def values(plan, id_, targets, **options):
    what = targets[id_]
    return answer_values(plan.why(what if isinstance(what, str) else list(what), **options))


def test_an_opened_row_says_all_but_prices_before_any_is_found(unasked, monkeypatch):
    kernel = Kernel(unasked)
    targets = kernel.widget._entries[0].instrument.targets
    expected = {id_: values(unasked, id_, targets, estimate=True) for id_ in targets}
    monkeypatch.setattr(kernel.widget._pricing, "begin", lambda job: None)
    monkeypatch.setattr("shardplan.plan.what_if.WhatIf.changing", lambda *_: pytest.fail("it priced"))
    priced = "choices", "pending", "unpriced", "impossible", "constraints"
    for id_, answer in expected.items():
        kernel.ask(do="ask", id=id_)
        facts = kernel.widget.answers[id_]
        assert {k: v for k, v in facts.items() if k not in priced} == {k: v for k, v in answer.items() if k not in priced}
        assert len(facts["pending"]) == sum(len(answer[x]) for x in ("choices", "impossible")) + answer["unpriced"]
        assert not facts["choices"] and facts["constraints"] == answer["constraints"][: len(facts["constraints"])]
    assert not known(unasked).asked


def test_an_opened_row_shows_its_best_estimates_so_far_until_all_are_there(unasked, monkeypatch):
    monkeypatch.setattr("shardplan.view.explore.SHOW_EVERY_S", 0.0)
    kernel = Kernel(unasked)
    targets, told = kernel.widget._entries[0].instrument.targets, []
    row = next(id_ for id_, what in targets.items() if what == "params/layers/*/down")
    kernel.widget.observe(lambda change: told.append(change["new"][row]), "answers")
    kernel.ask(do="ask", id=row)
    kernel.done(lambda: told and not told[-1]["pending"])
    *growing, estimate = told[: next(n for n, x in enumerate(told) if not x["pending"]) + 1]
    assert [len(x["pending"]) for x in growing] == sorted({len(x["pending"]) for x in growing}, reverse=True) and len(growing) > 3
    final = {x["text"]: x for x in estimate["choices"]}
    for some in growing[1:]:
        costs = [x["seconds"] for x in some["choices"]]
        assert costs == sorted(costs) and all(final.get(x["text"], x) == x for x in some["choices"])
        assert not {x["text"] for x in some["choices"]} & {*some["pending"]}
    assert estimate == values(unasked, row, targets, estimate=True)


def test_rows_of_the_line_that_was_opened_last_are_estimated_first(unasked):
    instrument = Instrument(unasked)
    rows = [*instrument.arrays, *instrument.collectives]
    lines = {x["id"]: x.get("line") for x in rows}
    opened = next(id_ for id_, line in reversed(lines.items()) if line and [*lines.values()].count(line) > 2)
    answers = Answers(unasked, instrument)
    answers.open(opened)
    for _ in answers.ahead():
        pass
    order = [lines[id_] for id_ in known(unasked).estimates]
    own = order.count(lines[opened])
    assert order[:own] == [lines[opened]] * own


def test_facts_found_ahead_are_those_found_when_a_row_is_opened(unasked, monkeypatch):
    instrument = Instrument(unasked)
    answers = Answers(unasked, instrument)
    for id_ in instrument.targets:
        answers.open(id_)
    vars(unasked).pop("_known")
    later = Answers(unasked, instrument)
    ahead = later.ahead()
    while len(known(unasked).facts) < len(instrument.targets):
        next(ahead)
    monkeypatch.setattr("shardplan.view.answers.growing", lambda *_: pytest.fail("they are known"))
    assert not later.shown  # nobody has opened them
    for id_ in instrument.targets:
        later.open(id_)
    assert later.shown == answers.shown


def test_rows_estimated_ahead_are_answered_with_their_prices_and_nothing_else_shows_them(unasked):
    page = unasked.html()
    known(unasked).asked.clear()
    kernel = Kernel(unasked)
    widget, targets = kernel.widget, kernel.widget._entries[0].instrument.targets
    assert not known(unasked).estimates  # no page has said hello: a saved notebook has none
    kernel.ask(do="hello")
    kernel.done(lambda: known(unasked).estimates.keys() == targets.keys())
    assert not widget.answers and not known(unasked).asked and unasked.html() == page
    known(unasked).asked.clear()
    fresh = WhatIf(unasked.context.planned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widget._pricing, "begin", lambda job: None)
        some = [*targets][::3]
        for id_ in some:
            kernel.ask(do="ask", id=id_)
        patch.setitem(unasked.context.__dict__, "prices", fresh)
        assert widget.answers == {id_: values(unasked, id_, targets, estimate=True) for id_ in some}


def test_a_page_is_the_same_text_whenever_it_is_asked_for_and_whatever_was_priced(plan):
    again = shardplan.auto(jax.sharding.AbstractMesh((2, 4), ("data", "model")), cluster="h100", donate_argnums=0)(train_step)
    other = again.plan(*arguments())
    page = other.html()
    assert other.html() == page and "classical layouts" in page  # what it saves, also in the first
    other.why("params/layers/*/up", estimate=True)
    other.what_if("params/layers/*/up", P("model"))
    assert other.html() == page
    rows = [id_ for id_ in Instrument(other).targets if id_ in known(other).asked]
    known(other).asked.clear()
    for id_ in reversed(rows):  # in whatever order rows were opened
        Entry(other, "as planned").answers.answer(id_, estimate=True)
    assert other.html() == page


def test_a_row_that_is_opened_while_it_is_estimated_ahead_goes_on_where_it_is(unasked, monkeypatch):
    instrument = Instrument(unasked)
    answers = Answers(unasked, instrument)
    ahead = answers.ahead()
    for _ in range(len(instrument.targets) + 4):
        next(ahead)
    assert known(unasked).facts.keys() == instrument.targets.keys()  # all facts first
    (id_,) = answers._begun
    begun = []
    monkeypatch.setattr("shardplan.view.answers.growing", lambda *_: pytest.fail("it began anew"))
    begun += answers.answering(id_, estimate=True)
    assert not answers.asked[id_]["pending"] and begun
    monkeypatch.undo()
    assert next(ahead, None) is None and id_ not in answers._begun


@pytest.mark.parametrize("how", ["closed", "planning"])
def test_nothing_is_estimated_ahead_after_closing_and_while_something_is_planned(how, unasked, monkeypatch):
    kernel, planning, planned = Kernel(unasked), threading.Event(), threading.Event()
    monkeypatch.setattr(Entry, "anew", lambda entry, n: (planning.set(), planned.wait(60), entry)[-1])
    pieces = []
    ahead = Answers.ahead
    monkeypatch.setattr(Answers, "ahead", lambda answers: (pieces.append(x) for x in ahead(answers)))
    kernel.ask(do="hello")
    kernel.done(lambda: pieces)
    if how == "closed":
        kernel.widget.close()
    else:
        kernel.ask(do="anew")
        planning.wait(60)
    kernel.widget._pricing._thread.submit(lambda: None).result(60)
    before = len(pieces)
    time.sleep(0.2)
    assert len(pieces) <= before + 1 and len(known(unasked).estimates) < len(kernel.widget._entries[0].instrument.targets)
    if how == "planning":
        planned.set()
        kernel.done(lambda: len(pieces) > before + 1)
        kernel.widget.close()


def test_a_widget_that_is_renamed_meanwhile_still_gets_its_prices(unasked):
    kernel = Kernel(unasked)
    drawn, row = kernel.widget._entries[0].instrument, next(iter(kernel.widget._entries[0].instrument.targets))
    kernel.ask(do="ask", id=row)
    kernel.ask(do="name", n=0, name="mine")
    kernel.done(lambda: not kernel.widget.answers[row]["estimated"])
    assert kernel.widget._entries[0].instrument is drawn


def test_threads_in_the_background_give_way_sooner_as_long_as_one_of_them_works():
    before, during = sys.getswitchinterval(), []

    def job():
        during.append(sys.getswitchinterval())
        yield

    some = [Pieces("one"), Pieces("other")]
    for pieces in some:
        pieces.begin(job())
    for pieces in some:
        pieces._thread.shutdown(wait=True)
    assert during == pytest.approx([SWITCH_S] * 2) and sys.getswitchinterval() == before


def test_what_was_asked_for_last_goes_on_first_and_spare_work_after_all_else():
    pieces, did = Pieces("test"), []
    busy, gate, done = threading.Event(), threading.Event(), threading.Event()

    def job(name, n):
        for k in range(n):
            did.append(f"{name}{k}")
            yield

    def first():
        busy.set()
        yield gate.wait(60)

    def last():
        yield from job("spare", 2)
        done.set()

    pieces.begin(first())
    assert busy.wait(60), "the thread does the first job while the others are begun"
    pieces.spare(last())
    for name in "ab":
        pieces.begin(job(name, 2))
    gate.set()
    assert done.wait(60) and did == ["b0", "b1", "a0", "a1", "spare0", "spare1"]
    pieces.end()
    pieces.begin(job("c", 1))
    pieces._thread.shutdown()
    assert did[-1] == "spare1"


def test_marimo_shows_the_widget_and_html_where_there_is_none(plan, monkeypatch):
    assert type(plan._display_()).__name__ == "Explorer" and plan._display_().plan is plan
    monkeypatch.setattr("shardplan.view.explore.AnyWidget", None)
    assert "Plan for mesh data=2, model=4" in plan._display_()._repr_html_()


def test_a_large_plan_is_shown_in_a_cell_without_planning_what_it_is_compared_with(monkeypatch):
    plan = small_plan((2, 4), ("data", "model"))
    monkeypatch.setattr(type(plan), "answers_quickly", property(lambda self: False))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SHELL))
    shown = plan._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown and not {"_baselines", "_fastest_pure"} & vars(plan).keys()
    assert html.escape(plan.saving) not in shown["text/html"]
    assert html.escape(plan.saving) in plan._repr_mimebundle_()["text/html"], "what is known is said"


def test_without_a_widget_a_cell_says_what_a_large_plan_saves(monkeypatch):
    plan = small_plan((2, 4), ("data", "model"))
    monkeypatch.setattr(type(plan), "answers_quickly", property(lambda self: False))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    shown = plan._repr_mimebundle_()
    assert {*shown} == {"text/plain", "text/html"} and html.escape(plan.saving) in shown["text/html"]


class TestChoicesThatPinsCannotSay:
    @pytest.fixture
    def chosen(self, plan):
        """A plan with a result laid out otherwise."""
        entry = Entry(plan, "as planned")
        for row in entry.instrument.arrays:
            what = entry.instrument.targets.get(row["id"])
            if row["id"][0] == "r" and what is not None:
                others = [c.text for c in plan.why(what, estimate=True).choices]
                if others:
                    return entry.taken(0, row["id"], others[0])
        raise AssertionError("no result has another layout")

    def test_are_named_in_copied_pins(self, chosen):
        (choice,) = chosen.unpinned
        assert choice == chosen.name and chosen.pins_code.startswith(f"# pins cannot say {choice}; the copied code does\n")
        exec(chosen.pins_code, {"P": P})  # and are still code

    def test_are_said_where_the_step_is_planned_anew_without_them(self, chosen):
        assert chosen.loss == f"planned without {chosen.name}: no pin says it"
        anew = chosen.retargeted(1, memory=1.5 * chosen.plan.memory_report.peak)
        assert anew.unpinned == () and anew.loss == ""


def test_a_curve_belongs_to_layouts_not_to_paths(plan):
    first = Entry(plan, "as planned")
    one, other = (
        dataclasses.replace(first, pins={"params/layers/*/up": layout})
        for layout in (shardplan.Layout(((), ("data",))), shardplan.Layout((("data",), ())))
    )
    assert one.target != other.target and one.target == dataclasses.replace(one, name="again").target


def test_what_was_asked_for_is_on_the_page_of_a_large_plan(plan, monkeypatch):
    monkeypatch.setattr(type(plan), "answers_quickly", False)
    mine = plan.replan()
    pages = []
    for ask in (False, True):
        if ask:
            mine.why("params/layers/*/down")
        state = re.search(r'<script type="application/json" id="shardplan-data">(.*?)</script>', mine.html(), re.S)
        data = json.loads(state[1])
        (row,) = (r for r in data["data"]["arrays"] if r["name"] == "params/layers/*/down")
        assert data["answers"].keys() >= {r["id"] for r in data["data"]["arrays"]}, "facts of every row"
        assert data["answers"][row["id"]]["readers"]
        pages.append(bool(data["answers"][row["id"]].get("choices")))
    assert pages == [False, True]


def test_a_line_without_collectives_names_what_it_makes(plan):
    moved = {f"{d.file}:{d.line}" for d in plan.decisions if d.reshards}
    address = next(
        name
        for name, ops in plan.context.planned.addressed.items()
        if not any(at.endswith(name.split()[0]) for at in moved) and not name.startswith(":")
    )
    line = address.split()[0]
    with pytest.raises(
        shardplan.ShardingError, match=rf"(?s){re.escape(line)}'\): no collective is on this line.*results that it makes: "
    ):
        plan.why(line)
    with pytest.raises(shardplan.ShardingError, match="no input of the step has this path"):
        plan.why(line + "0000")
