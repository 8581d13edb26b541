"""When values are in memory, by the rules of docs/xla_model.md, and where copies stand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.costs.space import StepFacts, make_strategy_space
from shardplan.ir.parse import parse
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.xla import available, compile
from shardplan.xla_model.copies import with_copies
from shardplan.xla_model.liveness import live_intervals, order_by_rules, takes_over_buffer
from shardplan.xla_model.overlap_windows import OverlapWindows

X = np.linspace(0.5, 2.0, 16, dtype=np.float32).reshape(4, 4)


def test_rule_13_a_donated_input_dies_with_its_last_reader_and_others_stay():
    def fun(a, b):
        return jnp.tanh(a @ b) @ b

    traced = jax.jit(fun).trace(X, X)
    for donated in ((), (0,)):
        graph = parse(traced.jaxpr, donated=donated)
        live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False)
        first_dot = next(i for i, op in enumerate(graph.ops) if op.primitive == "dot_general")
        assert live[0] == ((0, first_dot + 1) if donated else (0, len(graph.ops)))
        assert live[1] == (0, len(graph.ops))


def test_rule_16_donated_state_is_overwritten_once_nobody_reads_it():
    def step(state, x):
        mean = 0.9 * state["mean"] + x
        return {"mean": mean, "late": jnp.sin(mean)}, mean @ state["late"]

    state = {"mean": X, "late": X}
    graph = parse(jax.jit(step).trace(state, X).jaxpr, tied=((0, 0), (1, 1)), donated=(0, 1))
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v, graph=graph: graph.ops[at].primitive != "dot_general")
    made = {op.primitive: live[op.outputs[0]] for op in graph.ops if op.outputs}
    assert made["add"] is None and made["sin"] is not None  # the product reads the old "late" after the sine


def test_rule_13_only_a_result_of_the_same_size_reuses_an_operands_buffer():
    def fun(a, b):
        y = a @ b
        return jnp.sin(y) if same else jnp.sin(y).astype(jnp.bfloat16)

    for same in (True, False):
        graph = parse(jax.jit(fun).trace(X, X).jaxpr)
        sine = next(i for i, op in enumerate(graph.ops) if op.primitive == "sin")
        fused = [v != graph.ops[sine].outputs[0] or same for v in range(len(graph.values))]
        live = live_intervals(graph, fused, lambda at, v, graph=graph: graph.ops[at].primitive != "dot_general")
        (product,) = graph.ops[sine].inputs
        assert product is not None
        written = sine if same else sine + 1
        assert live[product] == (sine - 1, written if same else written + 1)


@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_rule_13_logits_that_a_loss_slices_are_held_once():
    """The loss of a causal model: `logits[:, :-1]` in float32 of a product in bfloat16."""

    def loss(w, x, ids):
        logits = (x @ w).astype(jnp.float32)[:, :-1]
        picked = jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    pins = {"w": P(), "x": P("data"), "ids": P("data")}
    shapes = (512, 16000, jnp.bfloat16), (16, 256, 512, jnp.bfloat16), (16, 256, jnp.int32)
    plan = shardplan.auto(mesh, cluster="h100", pins=pins)(jax.grad(loss)).plan(*(jax.ShapeDtypeStruct(x[:-1], x[-1]) for x in shapes))
    live_bytes = plan.check("h100:8").compiled.live_bytes  # w, logits in bfloat16, and what picks of them give back in float32
    assert plan.memory().peak == pytest.approx(live_bytes, rel=0.03)


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_rule_13_a_mask_of_dropout_is_written_not_the_random_bits(generator):
    def loss(w, x, seed):
        kept = jax.random.bernoulli(jax.random.key(seed, impl=generator), 0.9, x.shape)
        return ((jnp.where(kept, (x @ w) / 0.9, 0) @ w) ** 2).sum()

    mesh = MeshShape(("x",), (1,))
    space = make_strategy_space(StepFacts.of(parse(jax.jit(jax.grad(loss)).trace(X, X, 0).jaxpr), mesh), mesh, Cluster.preset("h100"))
    graph = space.graph
    bits = next(i for i, op in enumerate(graph.ops) if op.primitive == "random_bits")
    drawn = [i for i in graph.reached(graph.ops[bits].outputs[0], lambda i: graph.ops[i].primitive != "select_n")]
    written = {graph.ops[i].primitive for i in (bits, *drawn) if any(space.materialised[v] for v in graph.ops[i].outputs)}
    assert written - {"select_n"} == {"lt"}


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize("draw", ["mask", "factor"])
def test_rule_13_a_mask_of_dropout_is_held_for_the_backward_pass(draw):
    rows, width = 4096, 1024

    def layer(h, key):
        kept = jax.random.bernoulli(key, 0.9, h.shape)
        return h * kept.astype(h.dtype) / 0.9 if draw == "factor" else jnp.where(kept, h / 0.9, 0)

    def loss(ws, x, seed):
        for w, key in zip(ws, jax.random.split(jax.random.key(seed), 3), strict=True):
            x = layer(jax.nn.relu(x @ w), key)
        return ((x @ ws[0]) ** 2).mean()

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, width, width), (rows, width))]
    text = compile(jax.grad(loss), *types, jax.ShapeDtypeStruct((), jnp.int32), target="h100:1").text
    written = re.findall(r"= (.*) fusion\(", text[text.index("ENTRY") :])
    assert sum(f"pred[{rows},{width}]" in types for types in written) == 3  # one per layer, for both passes
    assert not any(f"u32[{rows},{width}]" in types for types in written)


def test_rule_14_results_of_two_branches_are_not_held_at_once():
    def fun(x, flag):
        return jax.lax.cond(flag > 0, lambda x: x @ x, lambda x: (x + 1) @ x, x) * 2

    graph = parse(jax.jit(fun).trace(X, 1).jaxpr)
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False)
    first, second = (live[op.outputs[0]] for op in graph.ops if op.primitive == "dot_general")
    assert first is not None and second is not None and first[1] < second[0]


def looks_up_in_rounds(table, w, ids):
    """As gradient accumulation does: the loop reads the table in every round."""

    def add(total, some):
        return total + jax.grad(lambda table: jnp.tanh(table[some] @ w).mean())(table), None

    return table - jax.lax.scan(add, jnp.zeros_like(table), ids)[0]


def looks_up_in_a_branch(table, w, ids):
    def loss(table):
        return jax.lax.cond(ids[0, 0] > 0, lambda t: jnp.tanh(t[ids] @ w).mean(), lambda t: jnp.sin(t[ids] @ w).mean(), table)

    return table - jax.grad(loss)(table)


def looks_up_anew(table, w, ids):
    """The backward pass reads the table behind a barrier, which keeps XLA from using what it computed before."""
    layer = jax.checkpoint(lambda table, h: jnp.tanh(h @ table[:128]) @ w)
    return table - jax.grad(lambda table: layer(table, jnp.tanh(layer(table, table[ids]))).mean())(table)


@pytest.mark.parametrize(
    "border, step", [("loop_const", looks_up_in_rounds), ("branch_in", looks_up_in_a_branch), ("barrier", looks_up_anew)]
)
def test_rule_16_a_copy_takes_over_no_alias(border, step):
    """Else an input that a loop, a branch or a recomputed layer reads a copy of would be in memory twice."""
    shapes = ((1 << 12, 128), jnp.float32), ((128, 128), jnp.float32), ((8, 64), jnp.int32)
    mesh = AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.auto(mesh, donate_argnums=0, cluster="h100")(step).plan(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    space = plan.context.planned.space
    reads = ((at, op.inputs[0]) for at, op in enumerate(space.graph.ops) if op.traits.copy)
    made = [(at, space.graph.ops[space.graph.values[v].producer[0]]) for at, v in reads if v is not None]
    copies = [at for at, maker in made if maker.primitive == border]
    assert copies and not any(takes_over_buffer(space.graph, space.materialised, at) for at in copies)


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_rule_14_a_carry_that_one_branch_hands_through_is_updated_in_place_by_another():
    def sums(x, flags):
        def add(total, flag):
            return jax.lax.cond(flag > 0, lambda t: t + jnp.sin(x) * flag, lambda t: t, total), None

        return jax.lax.scan(add, jnp.zeros_like(x), flags)[0]

    x, flags = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1 << 13, 4096), (16,)))
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    plan = shardplan.auto(mesh, cluster="h100", pins={"x": P("data")})(sums).plan(x, flags)
    assert plan.memory().peak == pytest.approx(plan.check("h100:8").compiled.live_bytes, rel=0.03)


@pytest.mark.parametrize("how", ["set", "add", "subtract", "multiply", "min", "max"])
def test_rule_13_a_scatter_writes_into_the_array_that_it_is_the_last_to_read(how):
    def fun(x, y):
        return getattr((x * 2).at[jnp.array([1, 3])].set(y).at[jnp.array([0, 1])], how)(y)

    graph = parse(jax.jit(fun).trace(X, X[:2]).jaxpr)
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False)
    first, second = (i for i, op in enumerate(graph.ops) if op.primitive.startswith("scatter"))
    for at in (first, second):
        (v, *_) = graph.ops[at].inputs
        assert v is not None and (live[v] or (0, 0))[1] == at


def into_scatter(y, w, i):
    return y.at[jnp.arange(len(y)), i].add(-1.0) @ w


def into_slice(y, w, i):
    return jax.lax.dynamic_update_slice(y, w[:1, :1], (i[0], i[1])) @ w


def into_loop(y, w, i):
    return jax.lax.fori_loop(0, 8, lambda k, c: jnp.cos(c) * k, y) @ w


def into_branches(y, w, i):
    return jax.lax.cond(i[0] > 0, lambda y: y * 2, jnp.cos, y) @ w


def of_product(w, v, i):
    return w @ v


def of_scatter(w, v, i):
    return (w @ v).at[jnp.arange(len(w)), i].add(-1.0)


def of_loop(w, v, i):
    return jax.lax.fori_loop(0, 8, lambda k, c: jnp.cos(c) * k, w @ v)


def of_stack(w, v, i):
    return jax.lax.scan(lambda c, row: (jnp.cos(c) + row[0], c), v[0], w)[1]


def of_branches(w, v, i):
    return jax.lax.cond(i[0] > 0, lambda y: y * 2, jnp.cos, w @ v)


INTO_BUFFERS = [(of_product, into) for into in (into_scatter, into_slice, into_loop, into_branches)]
OF_BUFFERS = [(of, None) for of in (of_scatter, of_loop, of_stack, of_branches)]


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize(("made", "read"), [(of_product, None), *INTO_BUFFERS, *OF_BUFFERS])
def test_rule_13_an_elementwise_op_takes_over_no_buffer_that_several_values_share(made, read):
    """`y = sin(z * sum(z))` is written over z, unless z or y is in a buffer with other values."""

    def step(w, v, i):
        z = made(w, v, i)
        y = jnp.sin(z * z.sum())
        return read(y, w, i) if read else y @ w

    n, k = 4096, 64
    types = [jax.ShapeDtypeStruct(*x) for x in (((n, k), jnp.float32), ((k, n), jnp.float32), ((n,), jnp.int32))]
    plan = shardplan.auto(AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,)), cluster="h100")(step).plan(*types)
    done = plan.check("h100:1").compiled
    assert done.ok and done.memory is not None, done.error
    buffers = 1 if (made, read) == (of_product, None) else 2
    for peak in (done.memory.peak_bytes, plan.memory().peak):
        assert peak == pytest.approx(buffers * 4 * n * n, rel=0.2)


def test_rule_14_a_copy_of_what_a_loop_slices_is_one_of_the_stack_until_the_loop_ends():
    def steps(w, x):
        return jax.lax.scan(lambda c, w: (c @ w, None), x, w)[0]

    graph = parse(jax.jit(steps).trace(np.ones((3, 256, 256)), np.ones((4, 256))).jaxpr)
    graph = with_copies(graph, [op.primitive == "loop_slice" for op in graph.ops], [False] * len(graph.ops))
    (sliced,) = (op for op in graph.ops if op.primitive == "loop_slice")
    (stack,) = sliced.inputs
    assert stack is not None
    at = graph.values[stack].producer[0]
    assert graph.ops[at].traits.copy and graph.values[stack].shape == (3, 256, 256) and graph.ops[at].runs == 1
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False)
    assert live[stack] == (at, graph.loops[0].stop)


def two_stacks(width):
    """Two loops one after the other, each of which stacks rows; the second stacks `width` columns of them."""

    def run(x):
        _, rows = jax.lax.scan(lambda c, _: (jnp.sin(c @ c), c), x, length=64)
        x = jnp.cos(rows * rows[:, ::-1]).sum(0)
        _, rows = jax.lax.scan(lambda c, _: (jnp.sin(c @ c), c[:, :width]), x, length=64)
        return jnp.cos(rows * rows[:, ::-1]).sum(0)

    return run


@pytest.mark.parametrize(("width", "together"), [(512, True), (384, False)])
def test_rule_14_stacks_of_one_shape_are_live_from_the_start_of_the_first_loop(width, together):
    graph = parse(jax.make_jaxpr(two_stacks(width))(jax.ShapeDtypeStruct((512, 512), jnp.float32)))
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False)
    births = [interval[0] for op in graph.ops if op.traits.loop_stack and (interval := live[op.outputs[0]])]
    assert births == [graph.loops[0].start, graph.loops[0 if together else 1].start]


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize(("width", "together"), [(512, True), (384, False)])
def test_rule_14_stacks_of_one_shape_exist_from_the_first_loop_on(width, together):
    done = compile(jax.jit(two_stacks(width)), jax.ShapeDtypeStruct((512, 512), jnp.float32), target="h100:1")
    assert done.ok and done.memory is not None, done.error
    assert (done.memory.peak_bytes > 1.9 * 64 * 512 * 512 * 4) == together


def test_a_copy_for_the_backward_pass_stands_behind_the_read_of_the_forward_pass():
    """A gated unit: half of a product is read once in each pass, as it is in the first and through a copy in the second."""

    def loss(w, x):
        gate, up = jnp.split(x @ w, 2, axis=1)
        return (jnp.tanh(gate) * up).sum()

    graph = parse(jax.make_jaxpr(jax.grad(loss))(np.zeros((64, 1024), np.float32), np.zeros((128, 64), np.float32)))
    shared = with_copies(graph, [op.primitive not in ("slice", "dot_general") for op in graph.ops], [False] * len(graph.ops))
    assert any(shared.ops[copy].traits.copy for copy in shared.retainable_from)
    for copy, (reader, k) in shared.retainable_from.items():
        assert reader < copy and shared.ops[reader].inputs[k] == shared.ops[copy].inputs[0]


def test_rule_15_the_zeros_of_max_poolings_gradient_live_as_long_as_its_windows():
    def pooled(x):
        return (jax.lax.reduce_window(jnp.sin(x), -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID") ** 2).sum()

    graph = parse(jax.jit(jax.grad(pooled)).trace(X).jaxpr)
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False)
    (scatter,) = (op for op in graph.ops if op.primitive == "select_and_scatter_add")
    sine = next(op for op in graph.ops if op.primitive == "sin")
    born, died = live[scatter.outputs[0]] or (0, 0)
    assert born == graph.values[sine.outputs[0]].producer[0] < graph.values[scatter.outputs[0]].producer[0] < died


def test_rule_8_a_product_of_the_backward_pass_holds_its_operands_until_its_result_is_needed():
    def loss(p, v, w):
        return (jnp.tanh(p @ (v @ w)) ** 2).sum()

    graph = parse(jax.jit(jax.grad(loss, argnums=(0, 2))).trace(X, X, X).jaxpr)
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False)
    products = [i for i, op in enumerate(graph.ops) if op.primitive == "dot_general" and op.phase == "backward"]
    handed = [i for i in products if any(at in products for at in _readers_through_views(graph, i))]
    assert len(handed) == 1
    (reader,) = set(_readers_through_views(graph, handed[0])) & {*products}
    assert all((live[v] or (0, 0))[1] > reader for v in graph.ops[handed[0]].inputs if v is not None)


def _readers_through_views(graph, at):
    for reader, _ in graph.values[graph.ops[at].outputs[0]].consumers:
        yield from _readers_through_views(graph, reader) if graph.ops[reader].primitive == "transpose" else (reader,)


def test_a_product_is_in_memory_from_its_op_on_though_its_weight_is_fetched_earlier():
    graph = parse(jax.jit(lambda w, x: jnp.sin(jnp.sin(x) @ w) @ w).trace(X, X).jaxpr)
    graph = with_copies(graph, [op.primitive != "dot_general" for op in graph.ops], [False] * len(graph.ops))
    readers = [i for i, op in enumerate(graph.ops) if op.traits.copy or op.primitive == "dot_general"]
    fetched = OverlapWindows(prefetch_start=dict.fromkeys(readers, 1))
    live = live_intervals(graph, [True] * len(graph.values), lambda at, v: False, order_by_rules(graph, fetched))
    births = {i: (live[graph.ops[i].outputs[0]] or (-1, -1))[0] for i in readers}
    assert any(op.traits.copy for op in graph.ops)
    assert births == {i: 1 if graph.ops[i].traits.copy else i for i in readers}


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_a_ragged_product_holds_a_masked_copy_of_the_rows_per_group_and_where_it_contracts_them_of_both_operands():
    groups, rows, width = 8, 1 << 14, 512

    def step(w, x, sizes):
        return w - 0.1 * jax.grad(lambda w: (jax.lax.ragged_dot(x, w, sizes) ** 2).mean())(w)

    types = jax.ShapeDtypeStruct((groups, width, width), jnp.float32), jax.ShapeDtypeStruct((rows, width), jnp.float32)
    mesh = AbstractMesh((8,), ("data",))
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(*types, jax.ShapeDtypeStruct((groups,), jnp.int32))
    least = 2 * groups * rows * width * 4 / 8
    report = plan.check("h100:8")
    assert least < plan.memory().peak == pytest.approx(report.compiled.memory.peak_bytes, rel=0.06)  # XLA no longer holds the rows


def test_readers_of_what_a_loop_hands_out_share_one_gather():
    """As the scale and the choice in `optax.clip_by_global_norm` read a gradient."""

    def step(rows):
        total, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros_like(rows[0]), rows)
        return sum(jax.lax.with_sharding_constraint(f(total), P()) for f in (jnp.exp, jnp.sin, jnp.cos))

    mesh, size = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), 1 << 20
    plan = shardplan.auto(mesh, pins={"rows": P(None, "data")}, cluster="h100")(step).plan(jax.ShapeDtypeStruct((8, size), jnp.float32))
    assert plan.comm_bytes == 7 / 8 * 4 * size


PEAKS = {
    "a softmax writes over no scores": lambda x, w, u, v: jax.nn.softmax(x @ w) @ v,
    "elementwise work writes over them": lambda x, w, u, v: jax.nn.silu(x @ w) @ v,
    "a kernel of rows writes over what it does not reduce": lambda x, w, u, v: (jax.nn.softmax(x @ w) + x @ u) @ v,
    "but not over what it reduces a sum of": lambda x, w, u, v: jax.nn.softmax(x @ w + x @ u) @ v,
    "what is cast in a product has no buffer": lambda x, w, u, v: (x @ w).astype(jnp.bfloat16).astype(jnp.float32) @ v,
    "nor has an input that is": lambda x, w, u, v: jnp.isnan(x @ w).astype(jnp.float32) @ v,
}


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize("name", PEAKS)
def test_rule_13_the_peak_of_products_with_a_kernel_between_them_is_xlas(name):
    def step(w, x, u, v):
        return w - PEAKS[name](x, w, u, v).mean()

    shapes = {"w": (64, 2048), "x": (1 << 17, 64), "u": (64, 2048), "v": (2048, 64)}
    mesh, given = AbstractMesh((8,), ("data",)), [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    pins = {"w": P(), "x": P("data"), "u": P(), "v": P()}
    plan = shardplan.auto(mesh, cluster="h100", compiler_options=None, donate_argnums=0, pins=pins)(step).plan(*given)
    assert plan.memory().peak == pytest.approx(plan.check("h100:8").compiled.memory.peak_bytes, rel=0.02)
