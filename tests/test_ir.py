"""A jaxpr becomes a graph and comes back as the same program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan.emit.emit import emit
from shardplan.ir.graph import Graph
from shardplan.ir.parse import parse
from shardplan.xla_model.copies import with_copies
from shardplan.xla_model.liveness import live_intervals


def scan_with_remat(w, x):
    def body(c, w):
        return jax.checkpoint(lambda c: jax.nn.gelu(c @ w))(c), c.sum()

    y, sums = jax.lax.scan(body, x, w)
    return y.sum() + sums.sum()


def loops(x):
    def body(carry):
        k, y = carry
        return k + 1, jax.lax.fori_loop(0, 3, lambda _, z: jnp.sin(z) + k, y)

    return jax.lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1]


def branches(x, k):
    return jax.lax.switch(k, [lambda x: x + 1, lambda x: x @ x, lambda x: jnp.where(x > 0, x, 0.0)], x)


def batched_while(x):
    return jax.vmap(lambda v: jax.lax.while_loop(lambda c: c < 100.0, lambda c: c * 2, v))(x)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))


@jax.custom_jvp
def softened(x):
    return jnp.sqrt(jnp.abs(x))


softened.defjvp(lambda p, t: (softened(*p), t[0] * 0.5))

X = np.linspace(0.5, 2.0, 16, dtype=np.float32).reshape(4, 4)
PROGRAMS = {
    "remat in scan, differentiated": (jax.value_and_grad(scan_with_remat, argnums=(0, 1)), (np.ones((3, 4, 4), np.float32) * 0.1, X)),
    "nested loops": (loops, (X,)),
    "reverse scan": (lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x, reverse=True, unroll=2), (X,)),
    "scan without xs": (lambda x: jax.lax.scan(lambda c, _: (jnp.cos(c), None), x, None, length=5), (X,)),
    "branches": (branches, (X, 1)),
    "differentiated branches": (jax.grad(lambda x: branches(x, 2).sum()), (X,)),
    "batched condition": (batched_while, (X[0],)),
    "custom derivatives": (jax.grad(lambda x: (clipped(x * 3) + softened(x)).sum()), (X,)),
    "random numbers": (lambda x: x + jax.random.normal(jax.random.key(3), x.shape), (X,)),
    "typed keys in and out": (lambda k, x: (jax.random.split(k, 3), jax.random.uniform(k, x.shape) + x), (jax.random.key(0), X)),
    "constants and unused inputs": (lambda x, unused: x @ jnp.asarray(X), (X, X)),
    "inputs handed through": (lambda x, y: (x, y, 3.0, x), (X, X)),
    "nested jit": (lambda x: jax.jit(lambda y: jax.jit(jnp.tanh)(y) * 2)(x), (X,)),
    "integers and booleans": (lambda x: ((x > 1).astype(jnp.int8).sum(0), jnp.argmax(x, 1), jnp.sort(x)[::-1]), (X,)),
    "complex": (lambda x: jnp.abs(jnp.fft.fft(x * 1j)), (X,)),
}


@pytest.mark.parametrize("fun, args", PROGRAMS.values(), ids=PROGRAMS)
def test_emitting_without_decisions_gives_the_same_program(fun, args):
    traced = jax.jit(fun).trace(*args)
    graph = parse(traced.jaxpr)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    run = emit(traced.jaxpr, {}, mesh)
    want = jax.tree.leaves(jax.jit(fun)(*args))
    for a, b in zip(jax.jit(run)(*jax.tree.leaves(args)), want, strict=True):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    check(graph)
    check(with_copies(graph, [True] * len(graph.ops), [False] * len(graph.ops)))
    check(with_copies(graph, [False] * len(graph.ops), [True] * len(graph.ops)))


def check(graph: Graph):
    """Producers come before readers, and both know of each other; paths are unique."""
    assert len({op.path for op in graph.ops}) == len(graph.ops)
    for v, value in enumerate(graph.values):
        at, k = value.producer
        assert graph.ops[at].outputs[k] == v
        for reader, operand in value.consumers:
            assert reader > at and graph.ops[reader].inputs[operand] == v
    for loop in graph.loops:
        assert 0 <= loop.start <= loop.stop <= len(graph.ops)
    for a, b in graph.same_layout:
        assert graph.ops[a].outs[0].shape == graph.ops[b].outs[0].shape


def test_trip_counts_multiply():
    def nested(x):
        return jax.lax.scan(lambda c, _: (jax.lax.fori_loop(0, 7, lambda i, z: jnp.sin(z), c), None), x, None, length=5)[0]

    graph = parse(jax.jit(nested).trace(X).jaxpr)
    assert [op.runs for op in graph.ops if op.primitive == "sin"] == [35]


def test_counting_while_loops_are_counted():
    graph = parse(jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 3, c[1] * 2), (0, x))).trace(X).jaxpr)
    assert {op.runs for op in graph.ops if op.primitive == "mul"} == {3}


def test_phases_of_a_train_step():
    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.tanh(x @ w).sum())(w)
        return w - 0.1 * grad, value

    graph = parse(jax.jit(step).trace(X, X).jaxpr)
    dots = [op.phase for op in graph.ops if op.primitive == "dot_general"]
    assert dots == ["forward", "backward"]
    assert [op.phase for op in graph.ops if op.primitive == "sub"][-1] == "update"


def test_a_donated_input_dies_with_its_last_reader_and_others_stay():
    def fun(a, b):
        return jnp.tanh(a @ b) @ b

    traced = jax.jit(fun).trace(X, X)
    for donated in ((), (0,)):
        graph = parse(traced.jaxpr, donated=donated)
        live = live_intervals(graph, [True] * len(graph.values), [False] * len(graph.ops))
        first_dot = next(i for i, op in enumerate(graph.ops) if op.primitive == "dot_general")
        assert live[0] == ((0, first_dot + 1) if donated else (0, len(graph.ops)))
        assert live[1] == (0, len(graph.ops))


def test_donated_state_is_written_over_once_nobody_reads_it():
    def step(state, x):
        mean = 0.9 * state["mean"] + x
        return {"mean": mean, "late": jnp.sin(mean)}, mean @ state["late"]

    state = {"mean": X, "late": X}
    graph = parse(jax.jit(step).trace(state, X).jaxpr, same_layout=((0, 0), (1, 1)), donated=(0, 1))
    live = live_intervals(graph, [True] * len(graph.values), [op.primitive != "dot_general" for op in graph.ops])
    made = {op.primitive: live[op.outputs[0]] for op in graph.ops if op.outputs}
    assert made["add"] is None and made["sin"] is not None  # the product reads the old "late" after the sine


def test_only_a_result_of_the_same_size_takes_an_operands_place():
    def fun(a, b):
        y = a @ b
        return jnp.sin(y) if same else jnp.sin(y).astype(jnp.bfloat16)

    for same in (True, False):
        graph = parse(jax.jit(fun).trace(X, X).jaxpr)
        sine = next(i for i, op in enumerate(graph.ops) if op.primitive == "sin")
        fused = [v != graph.ops[sine].outputs[0] or same for v in range(len(graph.values))]
        live = live_intervals(graph, fused, [op.primitive != "dot_general" for op in graph.ops])
        (product,) = graph.ops[sine].inputs
        assert product is not None
        written = sine if same else sine + 1
        assert live[product] == (sine - 1, written if same else written + 1)


@pytest.mark.parametrize("how", ["set", "add", "subtract", "multiply", "min", "max"])
def test_what_scatters_writes_into_the_array_that_it_is_the_last_to_read(how):
    def fun(x, y):
        return getattr((x * 2).at[jnp.array([1, 3])].set(y).at[jnp.array([0, 1])], how)(y)

    graph = parse(jax.jit(fun).trace(X, X[:2]).jaxpr)
    live = live_intervals(graph, [True] * len(graph.values), [False] * len(graph.ops))
    first, second = (i for i, op in enumerate(graph.ops) if op.primitive.startswith("scatter"))
    for at in (first, second):
        (v, *_) = graph.ops[at].inputs
        assert v is not None and (live[v] or (0, 0))[1] == at


def test_a_copy_of_what_a_loop_slices_is_one_of_the_whole_stack_until_the_loop_ends():
    def steps(w, x):
        return jax.lax.scan(lambda c, w: (c @ w, None), x, w)[0]

    graph = parse(jax.jit(steps).trace(np.ones((3, 256, 256)), np.ones((4, 256))).jaxpr)
    graph = with_copies(graph, [op.primitive == "loop_slice" for op in graph.ops], [False] * len(graph.ops))
    (sliced,) = (op for op in graph.ops if op.primitive == "loop_slice")
    (stack,) = sliced.inputs
    assert stack is not None
    at = graph.values[stack].producer[0]
    assert graph.ops[at].traits.copy and graph.values[stack].shape == (3, 256, 256) and graph.ops[at].runs == 1
    live = live_intervals(graph, [True] * len(graph.values), [False] * len(graph.ops))
    assert live[stack] == (at, graph.loops[0].stop)


def test_a_copy_for_the_backward_pass_is_made_after_what_the_forward_pass_read():
    """A gated unit: half of a product is read once in each pass, as it is in the first and through a copy in the second."""

    def loss(w, x):
        gate, up = jnp.split(x @ w, 2, axis=1)
        return (jnp.tanh(gate) * up).sum()

    graph = parse(jax.make_jaxpr(jax.grad(loss))(np.zeros((64, 1024), np.float32), np.zeros((128, 64), np.float32)))
    shared = with_copies(graph, [op.primitive not in ("slice", "dot_general") for op in graph.ops], [False] * len(graph.ops))
    assert any(shared.ops[copy].traits.copy for copy in shared.retainable_from)
    for copy, (reader, k) in shared.retainable_from.items():
        assert reader < copy and shared.ops[reader].inputs[k] == shared.ops[copy].inputs[0]


def test_max_pooling_has_the_zeros_its_gradient_starts_from_since_it_had_its_windows():
    def pooled(x):
        return (jax.lax.reduce_window(jnp.sin(x), -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID") ** 2).sum()

    graph = parse(jax.jit(jax.grad(pooled)).trace(X).jaxpr)
    live = live_intervals(graph, [True] * len(graph.values), [False] * len(graph.ops))
    (scatter,) = (op for op in graph.ops if op.primitive == "select_and_scatter_add")
    sine = next(op for op in graph.ops if op.primitive == "sin")
    born, died = live[scatter.outputs[0]] or (0, 0)
    assert born == graph.values[sine.outputs[0]].producer[0] < graph.values[scatter.outputs[0]].producer[0] < died


def test_a_product_of_the_backward_pass_holds_its_operands_until_its_result_is_needed():
    def loss(p, v, w):
        return (jnp.tanh(p @ (v @ w)) ** 2).sum()

    graph = parse(jax.jit(jax.grad(loss, argnums=(0, 2))).trace(X, X, X).jaxpr)
    live = live_intervals(graph, [True] * len(graph.values), [False] * len(graph.ops))
    products = [i for i, op in enumerate(graph.ops) if op.primitive == "dot_general" and op.phase == "backward"]
    handed = [i for i in products if any(at in products for at in _readers_through_views(graph, i))]
    assert len(handed) == 1
    (reader,) = set(_readers_through_views(graph, handed[0])) & {*products}
    assert all((live[v] or (0, 0))[1] > reader for v in graph.ops[handed[0]].inputs if v is not None)


def _readers_through_views(graph, at):
    for reader, _ in graph.values[graph.ops[at].outputs[0]].consumers:
        yield from _readers_through_views(graph, reader) if graph.ops[reader].primitive == "transpose" else (reader,)
