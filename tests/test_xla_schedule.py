"""The model of the schedule, rule by rule (docs/xla_model.md), and the same rules in programs compiled for absent GPUs."""

import functools
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models import relu_loss, relu_step

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import nets
import zoo

import shardplan
from shardplan.costs.build import build_network
from shardplan.costs.combined_transfers import Combiner
from shardplan.costs.kernel_tasks import OUTSIDE, Tasks
from shardplan.ir.parse import parse
from shardplan.mesh import Cluster
from shardplan.xla import available, compile
from shardplan.xla.compiler.compile import lower_for
from shardplan.xla.hlo.schedule import overlaps
from shardplan.xla_model.combining import collective_sites
from shardplan.xla_model.copies import with_copies
from shardplan.xla_model.liveness import live_intervals, order_by_rules
from shardplan.xla_model.overlap_windows import OverlapWindows, overlap_windows

S, F32, BF16 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16
needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')


def step(params, x, given=lambda w: w):
    def loss(params):
        h = x
        for w, b in params:
            h = jax.nn.relu(h @ given(w.astype(BF16)) + b.astype(BF16))
        return jnp.mean(h.astype(F32) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def graph_of(layers=3, width=64, step=step):
    params = [(jnp.zeros((width, width)), jnp.zeros(width))] * layers
    closed = jax.make_jaxpr(step)(params, jnp.zeros((32, width), BF16))
    labels = [f"arg{n}" for n in range(2 * layers + 1)]
    return parse(closed, labels, [f"out{n}" for n in range(2 * layers)], [(n, n) for n in range(2 * layers)], range(2 * layers))


def test_rule_1_classes_of_a_train_step():
    graph = graph_of()
    found = collective_sites(graph, [False] * len(graph.values))
    queues: dict[tuple[str, str], set[str]] = {}
    for op in graph.ops:
        queues.setdefault((op.primitive, op.phase), set()).update(found[v].collective_class for v in op.outputs)
    assert queues["arg", "forward"] == {"prefetch"}
    assert queues["convert_element_type", "forward"] == {"prefetch", "blocking"}  # weights as bfloat16; activations as float32
    weights = [v for v, x in enumerate(graph.values) if x.shape == (64, 64) and graph.ops[x.producer[0]].primitive == "dot_general"]
    assert len(weights) == 3 and {(found[v].collective_class, found[v].group_size) for v in weights} == {("gradient", 6)}
    assert queues["sub", "update"] == {"update"}
    assert queues["max", "forward"] == {"blocking"}


def test_rule_1_a_layout_or_a_name_given_to_a_weight_leaves_the_class_of_its_gradient():
    whole = NamedSharding(AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), P())
    for given in (
        functools.partial(jax.lax.with_sharding_constraint, shardings=whole),
        functools.partial(checkpoint_name, name="w"),
        jnp.copy,
    ):
        graph = graph_of(step=lambda params, x, given=given: step(params, x, given))
        sites = collective_sites(graph, [False] * len(graph.values))
        made = [v for v, x in enumerate(graph.values) if x.shape == (64, 64) and graph.ops[x.producer[0]].primitive == "dot_general"]
        assert len(made) == 3 and {sites[v].collective_class for v in made} == {"gradient"}


def test_rule_2_small_sums_in_a_chain_are_not_combined():
    def chain(x):
        for _ in range(4):
            x = x - x.mean(axis=0)
        return x

    def side_by_side(x):
        return [x * n - (x * n).mean(axis=0) for n in range(4)]

    for fun, members in ((chain, 1), (side_by_side, 4)):
        closed = jax.make_jaxpr(fun)(jnp.zeros((8, 8)))
        graph = parse(closed, ["x"], [f"y{n}" for n in range(len(closed.out_avals))], (), ())
        sums = [graph.ops[v.producer[0]].primitive == "reduce_sum" for v in graph.values]
        assert {p.group_size for p, s in zip(collective_sites(graph, sums), sums, strict=True) if s} == {members}


def test_rules_9_and_10_a_window_is_the_work_between_producer_and_first_consumer():
    graph = graph_of()
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [1.0 if op.primitive == "dot_general" else 0.0 for op in graph.ops]
    apart = {place.origin: (place.origin, 1.0) for place in sites}  # no two by one way
    found, merged = overlap_windows(graph, sites, work, apart).seconds, overlap_windows(graph, sites, work).seconds
    fetched = [(at, k) for at, op in enumerate(graph.ops) for k, v in enumerate(op.inputs)
               if op.primitive == "convert_element_type" and v is not None and graph.values[v].shape == (64, 64) and (at, k) in found
               and op.phase == "forward"]  # fmt: skip
    assert [found[edge] for edge in fetched] == [0.0, 1.0, 2.0]  # products before the layer that reads the weights
    assert [merged[edge] for edge in fetched] == [0.0, 0.0, 0.0]  # the first is needed at once, and all come with it
    total = sum(work)
    gradients = {graph.values[v].producer[0]: found[at, k] for at, op in enumerate(graph.ops) for k, v in enumerate(op.inputs)
                 if op.primitive == "transpose" and v is not None and (at, k) in found and graph.values[v].shape[0] == 64}  # fmt: skip
    done = np.cumsum(work)
    assert gradients and all(left == total - done[made] for made, left in gradients.items())


def test_rule_11_prefetches_start_as_late_as_they_are_done_in_time_and_hold_memory_from_then_on():
    graph = graph_of()
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [1.0 if op.primitive == "dot_general" else 0.0 for op in graph.ops]
    weights = [at for at in graph.args if graph.values[graph.ops[at].outputs[0]].shape == (64, 64)]
    apart = {at: (at, 1.0) for at in weights}  # no two by one way
    products = [at for at, done in enumerate(work) if done]
    taken = [at for at, op in enumerate(graph.ops) if op.primitive == "convert_element_type" and op.phase == "forward"
             and graph.values[op.outputs[0]].shape == (64, 64)]  # fmt: skip

    def begun(seconds):
        fetched = overlap_windows(graph, sites, work, apart, lambda way, size: seconds * size).prefetch_start
        live = live_intervals(
            graph, [True] * len(graph.values), lambda at, v: False, order_by_rules(graph, OverlapWindows(prefetch_start=fetched))
        )
        assert [live[graph.ops[at].outputs[0]][0] for at in taken] == [fetched.get(at, at) for at in taken]
        return [fetched.get(at, at) for at in taken[1:]]

    assert begun(0.0) == taken[1:]
    assert begun(1.0) == products[:2]  # each during the product before its own
    assert begun(1.5) == products[:1] * 2  # the second needs half of the first product's time, and the first begins at once


def test_rule_11_a_prefetch_has_the_time_that_later_ones_leave():
    graph = graph_of()
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [1.0 if op.primitive == "dot_general" else 0.0 for op in graph.ops]
    apart = {at: (at, 1.0) for at in graph.args if graph.values[graph.ops[at].outputs[0]].shape == (64, 64)}  # no two by one way
    fetched = [at for at, op in enumerate(graph.ops) if op.primitive == "convert_element_type" and op.phase == "forward"
               and graph.values[op.outputs[0]].shape == (64, 64)]  # fmt: skip

    def found(seconds):
        slack = overlap_windows(graph, sites, work, apart, lambda way, size: seconds * size).seconds
        return [slack[at, 0] for at in fetched]

    assert found(0.0) == [0.0, 1.0, 2.0]
    assert found(1.0) == [0.0, 1.0, 2.0]  # each during the product before its own
    assert found(1.25) == [0.0, 0.0, 2.0]  # the third begins with the first product, and the second is waited for before that


def test_rule_11_one_gradient_reduction_is_in_flight():
    graph = graph_of()
    sites = collective_sites(graph, [False] * len(graph.values))
    products = [at for at, op in enumerate(graph.ops) if op.primitive == "dot_general"]
    made = [
        at for at in products if graph.ops[at].phase == "backward" and sites[graph.ops[at].outputs[0]].collective_class == "gradient"
    ]
    updates = {at for at, op in enumerate(graph.ops) if op.primitive == "sub" and op.outs[0].shape == (64, 64)}
    work = [1.0 if at in products else 0.5 if at in updates else 0.0 for at in range(len(graph.ops))]
    leaves = [graph.readers(graph.ops[at].outputs[0]) for at in made]
    edges = [(reader, 0) for readers in leaves for reader in readers]
    apart = {at: (at, 1.0) for at in made}  # no two by one way

    def found(seconds):
        slack = overlap_windows(graph, sites, work, apart, lambda way, size: seconds).seconds
        return [slack[edge] for edge in edges]

    assert len(edges) == 3 and found(0.0) == [4.0, 2.5, 1.0]  # products that are left, and updates with gradients made before
    assert found(1.0) == [3.0, 2.0, 1.0]  # each until the next begins
    assert found(2.5) == [2.0, 2.0, 1.0]  # the last begins when it is there


def test_rules_6_7_9_and_10_gradients_and_prefetches_go_around_blocking_collectives():
    graph = graph_of()
    sites = collective_sites(graph, [False] * len(graph.values))
    products = [at for at, op in enumerate(graph.ops) if op.primitive == "dot_general"]
    work = [1.0 if at in products else 0.0 for at in range(len(graph.ops))]
    back = [at for at in products if graph.ops[at].phase == "backward"]
    chain = [at for at in back if sites[graph.ops[at].outputs[0]].collective_class == "blocking"]
    made = [at for at in back if at not in chain]
    edge = (next(iter(graph.readers(graph.ops[made[0]].outputs[0]))), 0)

    apart = {at: (("free", at), 1.0) for at in (*made, *graph.args)}  # no two by one way

    def found(*line):
        line = {at: (("blocking", at), 1.0) for at in line}
        return overlap_windows(graph, sites, work, apart, lambda way, size: float(way[0] == "blocking"), blocking=line)

    assert found().seconds[edge] == 4.0
    last = found(chain[-1])
    taken = [(at, k) for at, op in enumerate(graph.ops) for k, v in enumerate(op.inputs)
             if v is not None and sites[v].origin == chain[-1]]  # fmt: skip
    assert max(last.seconds.get(e, 0.0) for e in taken) == 1.0  # during the product of the first gradient, which is deferred
    assert last.seconds[edge] < 4.0  # and that leaves only afterwards
    first = products[0]
    weights = [(at, 0) for at, op in enumerate(graph.ops) if op.primitive == "convert_element_type" and op.phase == "forward"
               and op.outs[0].shape == (64, 64)]  # fmt: skip
    assert [found().seconds[e] for e in weights] == [0.0, 1.0, 2.0]
    assert [found(first).seconds[e] for e in weights] == [0.0, 1.0, 1.0]  # the third begins behind the blocking collective


def test_rule_2_scattered_gradients_arrive_small_and_are_combined():
    graph = graph_of(layers=4, width=3600)
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [1.0 if op.primitive == "dot_general" else 0.0 for op in graph.ops]
    weights = {v for v, x in enumerate(graph.values) if sites[v].collective_class == "gradient" and x.shape == (3600, 3600)}
    leaves = {(at, k): sites[v].origin for at, op in enumerate(graph.ops) for k, v in enumerate(op.inputs)
              if op.primitive == "transpose" and v in weights}  # fmt: skip

    def windows(moved):
        found = overlap_windows(graph, sites, work, moved, shards=8, scattered=moved or ())
        return [slack[edge] for edge in leaves for slack in (found.seconds, found.scatter_seconds)]

    together = pytest.approx([5, 0, 3, 0, 1, 0, 0, 0], abs=0.01)  # each with the bias made after it; scattered, all with the last
    assert windows(None) == together
    known = {origin: (("reduce-scatter", ("data",)), 1e6) for origin in leaves.values()}
    assert windows(known) == [6, 0, 4, 0, 2, 0, 0, 0]  # moved otherwise, without the biases


def scanned(params, x):
    """Layers of two weights and a scale in a loop, computed again in the backward pass, and a matrix behind them."""

    @jax.checkpoint
    def layer(h, p):
        up, down, scale = p
        return jax.nn.relu(h * scale @ up) @ down, None

    def loss(params):
        layers, last = params
        return jnp.mean((jax.lax.scan(layer, x, layers)[0] @ last) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_rule_7_the_last_blocking_collective_is_filled_first_by_the_optimizer_and_then_by_deferred_products():
    """The gradient of what stands behind a loop is made behind its backward pass, where the optimizer can do nothing yet."""

    def loss(params, x):
        first, layers, last = params
        h, _ = jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), jnp.tanh(x @ first), layers)
        return jnp.mean((h @ last) ** 2)

    params = (S((64, 64), F32), S((5, 64, 64), F32), S((64, 96), F32))
    closed = jax.make_jaxpr(lambda p, x: jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, x)))(params, S((32, 64), F32))
    graph = parse(closed, list("abcx"), list("abc"), [(n, n) for n in range(3)], range(3))
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [1.0 if op.primitive in ("dot_general", "sub") else 0.0 for op in graph.ops]
    behind, before = (
        next(at for at, op in enumerate(graph.ops) if op.phase == "backward" and op.primitive == kind and op.outs[0].shape == shape)
        for kind, shape in (("dot_general", (32, 64)), ("mul", (32, 64)))
    )
    shapes = {(96, 64), (64, 64), (5, 64, 64)}
    head, layers, first = (
        at for at, op in enumerate(graph.ops) if op.loop < 0 or op.primitive == "loop_stack" if op.phase == "backward"
        if sites[op.outputs[0]].collective_class == "gradient" and op.outs[0].shape in shapes and op.primitive != "transpose"
    )  # fmt: skip

    def runs(*moved):
        line = {at: (("blocking", at), 1.0) for at in (behind, before)}
        ways = {at: (("gradient", at), 1.0) for at in moved}
        return overlap_windows(graph, sites, work, ways, lambda way, size: float(way[0] == "blocking"), blocking=line).deferred_until[
            head
        ]

    loop = max(graph.loops, key=lambda loop: loop.start)
    assert head < runs(head, first) < loop.start  # the update of the layers fills the last
    assert runs(head, first, layers) >= loop.stop  # which waits for a gradient on its way


def test_rules_5_9_and_10_windows_of_a_loop():
    """Rows are prefetched during the loop's work, gradients reduced during each other's products; outside gathers wait for it."""
    layers = jnp.zeros((4, 64, 256)), jnp.zeros((4, 256, 64)), jnp.zeros((4, 64))
    closed = jax.make_jaxpr(scanned)((layers, jnp.zeros((64, 32))), jnp.zeros((128, 64)))
    names = ["up", "down", "scale", "last"]
    graph = parse(closed, [*names, "x"], names, [(n, n) for n in range(4)], range(4))
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [1.0 if op.primitive == "dot_general" else 0.0 for op in graph.ops]
    found = overlap_windows(graph, sites, work, {place.origin: (place.origin, 1.0) for place in sites}).seconds

    def edges(primitive, phase, shape):
        return [found.get((at, k), 0.0) for at, op in enumerate(graph.ops) for k, v in enumerate(op.inputs)
                if v is not None and (op.primitive, op.phase, graph.values[v].shape) == (primitive, phase, shape)]  # fmt: skip

    assert edges("dot_general", "forward", (256, 64)) == [1.0]  # during the other product of the layer
    assert max(edges("dot_general", "backward", (256, 64))) >= 1.0  # behind the barrier of what is computed again, too
    assert edges("loop_stack", "backward", (64,)) == [2.0]  # the scale's gradient: during the products that make the weights'
    assert sorted(edges("transpose", "backward", (64, 256)) + edges("transpose", "backward", (256, 64))) == [0.0, 1.0]
    assert edges("dot_general", "forward", (64, 32)) == [0.0]


def test_rules_3_and_8_combined_gradients_wait_for_the_last_and_are_made_then():
    """Neighbours of one transfer are combined up to the threshold; what they are computed from waits for the last."""
    graph = graph_of(layers=4, width=256)
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [1.0 if op.primitive == "dot_general" else 0.0 for op in graph.ops]
    made = [v for v, p in enumerate(sites) if p.collective_class == "gradient" and graph.values[v].shape == (256, 256)]
    products = sorted({sites[v].origin for v in made})
    assert len(products) == 4

    def found(ways, size):
        return overlap_windows(graph, sites, work, {at: (way, size) for at, way in zip(products, ways, strict=True)})

    equal, unequal, large = found("rrrr", 1e3), found("rras", 1e3), found("rrrr", 2e7)
    assert [equal.deferred_until[at] for at in products] == [products[-1]] * 4
    assert [unequal.deferred_until[at] for at in products] == [products[1], *products[1:]]
    assert [large.deferred_until[at] for at in products] == products

    def dies(starts):
        live = live_intervals(
            graph, [True] * len(graph.values), lambda at, v: False, order_by_rules(graph, OverlapWindows(deferred_until=starts))
        )
        return [max(live[v][1] for v in graph.ops[at].inputs) for at in products]

    assert all(end <= after for end, after in zip(dies(large.deferred_until), products[1:], strict=False))
    assert all(end > products[-1] for end in dies(equal.deferred_until))


@needs_gpu_compiler
def test_rule_8_xla_holds_the_operands_of_combined_gradients():
    """Wide batches and small weights: the gradients of all layers are one reduce-scatter, and all their operands wait."""
    params, batch = [S((512, 512), F32)] * 8, S((1 << 16, 512), BF16)
    pins = {"params/**": P("data"), "x": P("data")}
    planned = shardplan.auto(AbstractMesh((8,), ("data",)), cluster="h100", donate_argnums=0, pins=pins)(relu_step)
    report = planned.check(params, batch, target="h100:8")
    scattered = [len(c.parts) for c in report.compiled.collectives if c.kind == "reduce-scatter"]
    assert scattered == [8] and report.memory_ratio == pytest.approx(1, abs=0.2)


@needs_gpu_compiler
@pytest.mark.parametrize("scattered", [False, True])
def test_rule_8_xla_makes_gradients_first_where_activations_are_larger(scattered):
    """The step of the test above with twice the rows: the activations of one layer exceed the parts of a gradient's product."""
    params, batch = [S((512, 512), F32)] * 8, S((1 << 17, 512), BF16)
    pins = {"params/**": P("data") if scattered else P(), "x": P("data")}
    planned = shardplan.auto(AbstractMesh((8,), ("data",)), cluster="h100", donate_argnums=0, pins=pins)(relu_step)
    assert planned.check(params, batch, target="h100:8").memory_ratio == pytest.approx(1, abs=0.12)


@needs_gpu_compiler
@pytest.mark.parametrize("between", [lambda x: x, jnp.tanh])
def test_rule_8_a_split_product_of_a_gradient_runs_behind_the_product_that_hands_it_on(between):
    """So that one activation more is in memory: 16 rows of partial products, small beside the activations."""

    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = between(y @ w)
            return (y**2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    planned = shardplan.auto(AbstractMesh((8,), ("data",)), cluster="h100", donate_argnums=0, pins={"params/**": P(), "x": P("data")})
    report = planned(step).check([S((512, 512), F32)] * 3, S((1 << 18, 512), F32), target="h100:8")
    assert report.memory_ratio == pytest.approx(1, abs=0.04)


@needs_gpu_compiler
def test_rule_8_without_collectives_each_gradient_runs_where_it_is_made():
    params, batch = [S((512, 512), F32)] * 8, S((1 << 16, 512), BF16)
    planned = shardplan.auto(AbstractMesh((1,), ("data",)), cluster="h100", donate_argnums=0)(relu_step)
    assert planned.check(params, batch, target="h100:1").memory_ratio == pytest.approx(1, abs=0.05)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("gpu", "dtype", "blocking", "deferred"), [("h100", BF16, False, False), ("h100", BF16, True, True), ("a100", F32, True, False)]
)
def test_rule_6_xla_defers_gradients_of_filters_where_a_collective_blocks(gpu, dtype, blocking, deferred):
    """All are one all-reduce. Means over the batch are sums that block; without them each gradient runs where it is made.

    So it does where XLA hides no latency.
    """

    def step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                h = jnp.tanh(h - h.mean((0, 1, 2)) if blocking else h)
            return (h.astype(F32) ** 2).mean()

        return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]

    params, batch = [S((3, 3, 64, 64), dtype)] * 6, S((256, 32, 32, 64), dtype)
    planned = shardplan.auto(AbstractMesh((8,), ("data",)), cluster=gpu, donate_argnums=0, pins={"x": P("data")})(step)
    report = planned.check(params, batch, target=f"{gpu}:8")
    assert report.memory_ratio == pytest.approx(1, abs=0.12)
    assert report.compiled.memory is not None
    assert (report.compiled.memory.peak_bytes > 10 * batch.size * dtype.dtype.itemsize / 8) == deferred


def test_copies_that_a_loop_stacks_are_made_in_every_iteration():
    def run(x):
        def body(c, _):
            y = jnp.tanh(c @ x)
            return y, y * 2

        return jax.lax.scan(body, x, None, length=7)[1].sum()

    closed = jax.make_jaxpr(run)(jnp.zeros((256, 256)))
    graph = parse(closed, ["x"], ["y"], (), ())
    follows = [op.primitive in ("tanh", "mul") for op in graph.ops]
    shared = with_copies(graph, follows, [op.primitive == "dot_general" for op in graph.ops])
    rows = [op.inputs[0] for op in shared.ops if op.primitive == "loop_stack"]
    stacked = [shared.ops[shared.values[v].producer[0]] for v in rows if v is not None]
    assert stacked and all(op.runs == op.reads == 7 for op in stacked if op.traits.copy)
    assert any(op.traits.copy for op in stacked)


@needs_gpu_compiler
def test_rule_2_gradients_of_a_net_with_batch_statistics_are_combined():
    """XLA fuses a parameter's update with its cast for the backward pass, and each gradient then waits for the one before."""

    def batch_norm_step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jax.lax.conv_general_dilated(h, w.astype(BF16), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                h = jax.nn.relu((h - h.mean((0, 1, 2))) * jax.lax.rsqrt(h.var((0, 1, 2)) + 1e-3))
            return jnp.mean(h.astype(F32) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params, batch = [S((1, 1, 252, 252), F32)] * 6, S((512, 32, 32, 252), BF16)  # no dim that a reduce-scatter could split
    pins = {"params/**": P(), "x": P("data")}
    planned = shardplan.auto(AbstractMesh((8,), ("data",)), cluster="h100", donate_argnums=0, pins=pins)(batch_norm_step)
    report = planned.check(params, batch, target="h100:8")
    gradients = [c for c in report.compiled.collectives if c.kind == "all-reduce" and c.bytes > 1e5]
    assert len(gradients) == 1 and gradients[0].bytes == 6 * 252 * 252 * 2


@pytest.mark.parametrize(("width", "merged"), [(512, True), (4096, False)])
def test_rule_3_combined_windows_open_with_the_last_made_and_close_with_the_first_needed(width, merged):
    """Of two weights that a loop gathers, the second is needed one product later; combined, it may not take that long."""

    def loss(w, x):
        return jax.lax.scan(lambda x, w: ((x @ w[0]) @ w[1], None), x, w)[0].sum()

    w = [S((3, width, width), F32)] * 2
    graph = parse(jax.make_jaxpr(jax.grad(loss))(w, S((8, width), F32)))
    work = [1.0 if op.primitive == "dot_general" else 0.0 for op in graph.ops]
    found = overlap_windows(graph, collective_sites(graph, [False] * len(graph.values)), work).seconds
    read = [found[at, k] for at, op in enumerate(graph.ops) for k, v in enumerate(op.inputs)
            if op.primitive == "dot_general" and op.phase == "forward" and v is not None
            and graph.ops[graph.values[v].producer[0]].primitive == "loop_slice"]  # fmt: skip
    made = [found[at, k] for at, op in enumerate(graph.ops) for k in range(len(op.inputs))
            if op.primitive == "loop_stack" and op.phase == "backward" and (at, k) in found]  # fmt: skip
    assert read == ([0.0, 0.0] if merged else [0.0, 1.0])
    assert len(set(made)) == (1 if merged else 2)


def norm_step(params, x):
    """A net of many layers whose gradients' norm is taken, as optax.global_norm does."""
    grads = jax.grad(relu_loss)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    return [p - 0.1 * g / norm for p, g in zip(params, grads, strict=True)]


def planned_norm(pins, memory=None, cluster="h100"):
    params, batch = [S((1024, 1024), F32)] * 8, S((4096, 1024), BF16)
    mesh = AbstractMesh((8, 8), ("node", "gpu"))
    step = shardplan.auto(mesh, cluster=cluster, donate_argnums=0, pins=pins | {"x": P(("node", "gpu"))}, memory=memory)(norm_step)
    return step, (params, batch)


def test_the_norm_of_equally_sharded_gradients_is_reduced_once():
    """Python's sum begins with 0 + x, which is x; partial sums are added up before they are reduced, as XLA does."""
    graph = parse(jax.make_jaxpr(norm_step)([jnp.zeros((8, 8))] * 3, jnp.zeros((8, 8), BF16)))
    assert not any(op.primitive == "add" and None in op.inputs for op in graph.ops)
    step, args = planned_norm({"params/**": P(("node", "gpu"))})
    found = step.plan(*args).context.planned
    sums = [i for i, op in enumerate(found.graph.ops) if op.phase == "update" and op.outs[0].shape == ()]
    moved = found.network.moves(found.strategies, found.retained)
    reduced = [s for i, _, _, steps in moved if i in sums for s in steps if s.kind == "all-reduce"]
    assert len(reduced) == 1


@needs_gpu_compiler
def test_rule_2_xla_reduces_that_norm_once_and_combines_scatters_of_small_gradients():
    step, args = planned_norm({"params/**": P(("node", "gpu"))})
    report = step.check(*args, target="h100:8x8")
    kinds = [(c.kind, len(c.parts)) for c in report.compiled.collectives]
    assert kinds.count(("all-reduce", 1)) == 1 and [n for kind, n in kinds if kind == "reduce-scatter"] == [8]


def test_prices_agree_with_the_collectives_that_the_plan_combines():
    """Each of many small arrays pays its part of one latency, and no more kinds of collectives are used than pay."""
    h100 = Cluster.preset("h100")
    step, args = planned_norm({}, cluster=replace(h100, device=replace(h100.device, kernel_latency_s=3e-6)))
    plan = step.plan(*args)
    found = plan.context.planned
    moved = found.network.combined_groups(found.solution.states)
    kinds = Counter(crowd for (crowd, _), _ in moved)
    assert plan.seconds["bound"] > 0.4 * plan.seconds["total"] and max(kinds.values()) <= 2
    pricing = replace(found.network.pricing, combined=moved)
    again = build_network(found.space, found.network.prices.resharders[0], None, pricing=pricing)
    assumed, combined = (network.step_seconds(found.solution.states) for network in (found.network, again))
    assert combined.total(0.0) == pytest.approx(assumed.total(0.0), rel=0.02)
    assert combined.total(1.0) >= found.solution.objective >= combined.compute  # of which the timeline hides a part


@pytest.mark.slow
def test_the_large_gradients_of_a_loop_all_move_in_one_way():
    """On 64 GPUs latencies count: an array that moved otherwise than the others would pay one of its own."""
    step, state, batch = nets.vit(layers=6)
    plan = shardplan.auto(AbstractMesh((8, 8), ("node", "gpu")), cluster="h100", donate_argnums=0)(step).plan(state, batch)
    found = plan.context.planned
    pairs = zip(found.graph.values, found.space.collective_sites, strict=True)
    gradients = [(v, place) for v, place in pairs if place.collective_class == "gradient" and place.sum_dtype == "bfloat16"]
    large = {place.group for v, place in gradients if found.graph.ops[v.producer[0]].loop >= 0}
    moved = [arrays for (crowd, _), arrays in found.network.combined_groups(found.solution.states) if crowd in large]
    assert moved and len({frozenset(at for at, _ in arrays) for arrays in moved}) == 1 and len(moved[0]) > 4


def test_gradients_are_scattered_along_the_major_dim():
    """Along another dim XLA transposes parameters and moments for the update; equal costs are split there."""
    step, args = planned_norm({}, memory=40 << 20)
    layouts = {x.layout.dims for x in step.plan(*args).inputs if x.path.startswith("params")}
    assert layouts and all(rows and not columns for rows, columns in layouts)


@pytest.mark.slow
def test_where_all_fast_plans_need_too_much_memory_one_that_fits_is_found():
    """The fast plans hold copies of parameters; without, all arrays at the peak are split over all devices, nothing less is left."""
    step, state, batch = zoo.example("gpt", layers=1, width=512, length=512, batch=64)
    mesh = AbstractMesh((2, 4), ("data", "model"))
    free = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(state, batch).memory().peak
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0, memory=0.99 * free)(step).plan(state, batch)
    assert plan.memory().peak <= 0.99 * free


def normalised(x):
    mean = jnp.mean(x, 0)
    return (x - mean) * jax.lax.rsqrt(jnp.mean(x * x, 0) - mean * mean + 1e-5)


def by_gradient_norms(ws, x):
    """Batch norms, whose sums come between the gradients of the weights, and a norm of each gradient, that of the last layer first."""
    mesh = AbstractMesh((8,), ("data",))

    def loss(ws):
        h = x
        for w in reversed(ws):
            h = jax.nn.relu(normalised(h @ w))
        return jnp.mean(h**2)

    grads = jax.lax.with_sharding_constraint(jax.grad(loss)(ws), jax.sharding.NamedSharding(mesh, P("data")))
    return [w - 0.1 * g * jax.lax.rsqrt(jnp.sum(g * g)) for w, g in zip(ws, grads, strict=True)]


@needs_gpu_compiler
@pytest.mark.slow
def test_all_reduces_are_combined_across_reduce_scatters_which_then_stay_apart():
    args = [S((1024, 1024), F32)] * 3, S((65536, 1024), F32)
    pins = {f"ws/{n}": P("data", None) for n in range(3)} | {"x": P("data", None)}
    plan = shardplan.auto(AbstractMesh((8,), ("data",)), cluster="h100", donate_argnums=0, pins=pins)(by_gradient_norms).plan(*args)
    planned, emitted = collectives_of(plan)
    assert planned["all-reduce"] == emitted["all-reduce"] == 7
    assert planned["reduce-scatter"] == emitted["reduce-scatter"] == 3


def collectives_of(plan):
    """How many collectives of each kind are planned, and emitted."""
    program = plan.context.planned.program(plan.context.planned.xla)
    planned = Counter(program.tasks.kind(n) for n in program.acyclic.joined[1])
    step, arguments = plan.context.program(plan)
    done = compile(lower_for("h100:8", step, *arguments), target="h100:8")
    return planned, Counter(c.kind for c in done.collectives)


@needs_gpu_compiler
@pytest.mark.slow
def test_a_weight_is_gathered_together_with_what_is_computed_before_it_is_needed():
    whole = jax.sharding.NamedSharding(AbstractMesh((8,), ("data",)), P())

    def step(w, x):
        y, w = jax.lax.with_sharding_constraint((jnp.tanh(x), w), whole)
        return jax.lax.with_sharding_constraint(y @ w, whole)

    auto = shardplan.auto(whole.mesh, cluster="h100", pins={"*": P("data", None)}, compiler_options=None)
    planned, emitted = collectives_of(auto(step).plan(S((1024, 1024), F32), S((2048, 1024), F32)))
    assert planned == emitted == {"all-gather": 1}


def by_norms_of_norms(ws, x):
    """Each parameter is updated by a norm that waits for another norm of it, as optimizers with trust ratios guard theirs against 0."""
    grads = jax.grad(lambda ws: jnp.mean(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1] @ ws[2]) ** 2))(ws)

    def safe_norm(w):
        w = jnp.where(jnp.sqrt(jnp.sum(w * w)) <= 1e-6, 1.0, w)
        return jnp.sqrt(jnp.sum(w * w))

    return [w - 1e-3 * safe_norm(w) / safe_norm(g) * g for w, g in zip(ws, grads, strict=True)]


@needs_gpu_compiler
@pytest.mark.slow
def test_sums_in_chains_are_combined_in_the_order_of_the_program_with_the_next_chain():
    split = jax.sharding.NamedSharding(AbstractMesh((8,), ("data",)), P("data"))
    args = [S((4096, 4096), F32)] * 3, S((65536, 4096), F32)
    auto = shardplan.auto(split.mesh, cluster="h100", donate_argnums=0, pins={"*": P("data", None)}, out_shardings=[split] * 3)
    planned, emitted = collectives_of(auto(by_norms_of_norms).plan(*args))
    assert planned["all-reduce"] == emitted["all-reduce"] == 7  # of 12 sums, 6 of which wait for another


@pytest.mark.parametrize(("merged", "expected"), [([], [[0], [4, 1]]), ([[2, 3]], [[0], [4], [1]])])
def test_what_waits_for_a_merged_product_waits_for_all_its_operands_when_collectives_are_combined(merged, expected):
    """Gathers of two weights, 0 and 1, of the products 2 and 3, and of the first product's result, 4."""
    tasks = Tasks([0.0, 0.0, 1.0, 1.0, 0.0], [OUTSIDE] * 5, [(), (), (0,), (1,), (2,)], dict.fromkeys((0, 1, 4)))
    assert [*Combiner(tasks, merged).combined([0, 4, 1], lambda _: 1.0, 10.0)] == expected


# ---- the rules in compiled programs

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
D = 1024


def sharded(*entries):
    return jax.sharding.NamedSharding(MESH, P(*entries))


def chain(ws, x):
    for w in ws:
        x = jnp.tanh(x @ jax.lax.with_sharding_constraint(w, sharded()))
    return x


def updated(loss):
    return lambda ws, x: jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))


def stacked_loss(ws, x):
    def layer(h, p):
        up, down = (jax.lax.with_sharding_constraint(w, sharded()) for w in p)
        return jnp.tanh(h @ up) @ down, None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)


def megatron_loss(ws, x):
    for up, down in ws:
        x = jnp.tanh(jax.lax.with_sharding_constraint(jnp.tanh(x @ up) @ down, sharded("data", None)))
    return jnp.sum(x**2)


LARGE, SMALL, HIDDEN = S((4 * D, 4 * D), F32), S((D, D), F32), S((2 * D, 8 * D), F32)
PROGRAMS = {
    "twelve small weights": (chain, [SMALL] * 12, [sharded("data")] * 12, S((D, D), F32)),
    "four large weights": (chain, [LARGE] * 4, [sharded("data")] * 4, S((4 * D, 4 * D), F32)),
    "fsdp step": (updated(lambda ws, x: jnp.sum(chain(ws, x) ** 2)), [LARGE] * 4, [sharded("data")] * 4, S((4 * D, 4 * D), F32)),
    "fsdp loop": (updated(stacked_loss), (S((6, 2 * D, 2 * D), F32),) * 2, (sharded(None, "data"),) * 2, S((4 * D, 2 * D), F32)),
    "megatron step": (
        updated(megatron_loss), [(HIDDEN, S((8 * D, 2 * D), F32))] * 3, [(sharded(None, "model"), sharded("model", None))] * 3,
        S((4 * D, 2 * D), F32),
    ),
}  # fmt: skip


@functools.cache
def compiled(name):
    fun, weights, shardings, x = PROGRAMS[name]
    step = {"out_shardings": shardings, "donate_argnums": 0} if "step" in name or "loop" in name else {}
    done = compile(jax.jit(fun, in_shardings=(shardings, sharded("data")), **step), weights, x, target="h200:8")
    assert done.ok, done.error
    return done


def products_in_flight(done, *kinds):
    """(kind, axes, products that the schedule puts between start and done) of every collective with such a pair, in order."""
    found = {o.collective.name: sum("gemm" in step for step in o.steps) for o in overlaps(done.module, done.mesh)}
    return [(c.kind, c.axes, found.get(c.name, 0)) for c in done.collectives if c.kind in kinds]


def order(done, computation):
    """Shapes of the products of a computation, in the order of the schedule."""
    return [i.arrays[0].shape for i in done.module.computations[computation] if i.name.startswith("gemm")]


@pytest.mark.slow
@needs_gpu_compiler
def test_rule_2_xla_combines_up_to_the_threshold():
    assert [len(c.parts) for c in compiled("twelve small weights").collectives] == [7, 5]  # of 4 MiB each


@pytest.mark.slow
@needs_gpu_compiler
def test_rule_5_xla_reduces_gradients_of_a_loop_during_products_of_the_same_iteration():
    """Here a product that the next iteration needs; rule 5 has one of another gradient."""
    done = compiled("fsdp loop")
    assert products_in_flight(done, "reduce-scatter") == [("reduce-scatter", ("data",), 1)]


@pytest.mark.slow
@needs_gpu_compiler
def test_rule_6_xla_defers_products_of_scattered_gradients_to_the_end():
    done = compiled("fsdp step")
    assert order(done, done.module.entry) == [(D, 4 * D)] * 7 + [(4 * D, 4 * D)] * 4
    assert [n for *_, n in products_in_flight(done, "reduce-scatter")] == [1, 1, 1, 0]


@pytest.mark.slow
@needs_gpu_compiler
def test_rules_6_7_and_10_xla_fills_the_last_blocking_collective_and_reduces_gradients_afterwards():
    done = compiled("megatron step")
    found = products_in_flight(done, "all-reduce")
    assert [axes for _, axes, _ in found] == [("model",)] * 5 + [("data",)] * 6
    assert [n for _, _, n in found[:5]] == [0, 0, 0, 0, 1]
    assert all(n for _, _, n in found[5:-1])


@pytest.mark.slow
@needs_gpu_compiler
def test_rule_11_xla_has_one_collective_of_a_kind_in_flight():
    for name in PROGRAMS:
        for instructions in compiled(name).module.computations.values():
            in_flight = Counter()
            for i in instructions:
                kind = next((k for k in ("all-gather", "all-reduce", "reduce-scatter") if i.opcode.startswith(k)), None)
                in_flight[kind] += i.opcode.endswith("-start") - i.opcode.endswith("-done")
                assert kind is None or in_flight[kind] <= 1


@pytest.mark.slow
@needs_gpu_compiler
def test_rule_11_windows_are_those_of_the_compiled_schedule():
    """Four gathers that take two products each: what the later ones need is not there for the earlier ones."""
    emitted = [n for *_, n in products_in_flight(compiled("four large weights"), "all-gather")]
    graph = parse(jax.make_jaxpr(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x))([LARGE] * 4, LARGE))
    sites = collective_sites(graph, [False] * len(graph.values))
    work = [float(op.primitive == "dot_general") for op in graph.ops]
    transfers = {at: (at, 1.0) for at in graph.args[:4]}
    windows = overlap_windows(graph, sites, work, transfers, lambda transfer, size: 2.0).seconds
    assert emitted == [min(2.0, windows[at, 1]) for at, n in enumerate(work) if n] == [0, 0, 1, 2]


@pytest.mark.slow
@needs_gpu_compiler
def test_rule_16_xla_writes_new_state_over_donated_state():
    for name in ("fsdp step", "megatron step"):
        memory = compiled(name).memory
        assert 0 <= memory.output_bytes - memory.alias_bytes < 1024  # the table of the outputs
