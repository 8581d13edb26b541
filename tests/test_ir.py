"""A jaxpr becomes a graph and comes back as the same program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardplan.emit.emit import emit
from shardplan.ir.graph import Graph
from shardplan.ir.parse import parse
from shardplan.ir.repeated_layers import ROUNDS, repeated_layers
from shardplan.xla_model.copies import with_copies


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


@pytest.mark.parametrize(
    ("bound", "trips"),
    [
        (lambda n, c: c[0] < 9, 3),
        (lambda n, c: c[0] < n, 1),  # known at run time only
        (lambda n, c: c[0] < c[2], 1),  # moves
        (lambda n, c: c[0] < c[3], 7),
    ],
)
def test_a_while_loop_counts_to_a_bound_that_is_known_and_stays(bound, trips):
    def fn(x, n):
        return jax.lax.while_loop(lambda c: bound(n, c), lambda c: (c[0] + 3, c[1] * 2, c[2] - 1, c[3]), (0, x, 100, 20))

    graph = parse(jax.jit(fn).trace(X, 5).jaxpr)
    assert [loop.trips for loop in graph.loops] == [trips]


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


@pytest.mark.parametrize(("rounds", "loops"), [(0, 0), (1, 0), (2, 1)])
def test_a_scan_of_no_trip_or_one_is_no_loop(rounds, loops):
    def fn(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, ws)

    graph = parse(jax.jit(fn).trace(jnp.ones((4, 4)), jnp.ones((rounds, 4, 4))).jaxpr)
    assert len(graph.loops) == loops and any(op.traits.loop_slice for op in graph.ops) == bool(loops)
    assert {op.loop for op in graph.ops if op.primitive == "tanh"} == ({loops - 1} if rounds else set())


def test_what_changes_no_number_of_an_array_is_no_op():
    def fn(weak, x):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((8,), "d", axis_types=(jax.sharding.AxisType.Auto,))):
            return sum([jax.sharding.reshard(x, jax.P()) * weak])

    jaxpr = jax.jit(fn).trace(jnp.full(4, 0.5), X[0]).jaxpr
    assert {e.primitive.name for e in jaxpr.eqns} == {"convert_element_type", "reshard", "mul", "add"}
    graph = parse(jaxpr)
    assert [op.primitive for op in graph.ops] == ["arg", "arg", "mul", "out"]
    assert np.array_equal(emit(jaxpr, {}, None)(jnp.full(4, 0.5), X[0])[0], X[0] * 0.5)


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x: optax.apply_updates(x, optax.set_to_zero().update(x, None)[0]), []),
        (lambda x: jnp.ones_like(x) * x / jnp.full((), 1.0, x.dtype) - jnp.zeros(4), []),
        (lambda x: jnp.zeros_like(x) - x, ["sub"]),
        (lambda x: 1 / x, ["div"]),
        (lambda x: x * jnp.zeros_like(x), ["mul"]),  # of infinity no zero
        (lambda x: x - 0.1 * jax.grad(lambda x: 1.0)(x), ["mul"]),  # which nobody reads
        (lambda x: x - np.inf * jax.grad(lambda x: 1.0)(x), ["mul", "sub"]),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.bfloat16) * 2, ["convert_element_type"] * 2 + ["mul"]),
        (lambda x: x.astype(jnp.float16).astype(jnp.bfloat16).astype(jnp.float16), ["convert_element_type"] * 3),
        (lambda x: x.astype(jnp.int8).astype(jnp.float32).astype(jnp.int8), ["convert_element_type"] * 3),
    ],
)
def test_a_number_that_changes_nothing_is_no_op(fn, left):
    jaxpr = jax.jit(fn).trace(X[0]).jaxpr
    ops = [op for op in parse(jaxpr).ops if not (op.traits.broadcast or op.traits.border)]
    assert [op.primitive for op in ops] == left
    assert np.array_equal(emit(jaxpr, {}, None)(X[0])[0], fn(X[0]), equal_nan=True)


def loss_and_metric(w, x):
    """The gradient of a loss, and the same forward pass once more for a metric; `silu` is a function of its own to JAX."""

    def predict(w):
        return jax.nn.silu(x @ w) @ w

    return jax.grad(lambda w: (predict(w) ** 2).mean())(w), jnp.abs(predict(w)).max()


def in_branches(w, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: jnp.tanh(x @ w) * 2) + jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ("fn", "products"),
    [
        (loss_and_metric, 5),  # two of the forward pass, three of the backward pass
        (lambda w, x: jnp.tanh(x @ w) + jnp.tanh(x @ w), 1),
        (lambda w, x: jax.jit(jnp.dot)(x, w) + x @ w, 1),
        (lambda w, x: jax.lax.scan(lambda c, _: (jnp.sin(c @ w) + jnp.cos(c @ w), None), x, None, length=3)[0] + x @ w, 2),
        (in_branches, 3),  # branches compute for themselves
        (lambda w, x: jnp.dot(x, w, precision="highest") + jnp.dot(x, w), 2),
        (lambda w, x: jax.checkpoint(lambda w: x @ w)(w) + x @ w, 1),
        (lambda w, x: sum(jax.jit(lambda w, n: jnp.dot(x, w * n))(w, n) for n in (2.0, 3.0)), 2),  # numbers handed to a function
        (jax.grad(lambda w, x: (jax.checkpoint(lambda w: jnp.sin(x @ w))(w) ** 2).mean()), 3),  # once more behind a barrier
    ],
)
def test_what_is_computed_twice_is_one_op(fn, products):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = X[:4, :4], X[:, :4]
    w = w[: x.shape[1], : x.shape[1]]
    jaxpr = jax.jit(fn).trace(w, x).jaxpr
    graph = parse(jaxpr)
    check(graph)
    assert sum(op.primitive == "dot_general" for op in graph.ops) == products
    for a, b in zip(emit(jaxpr, {}, mesh, graph.repeats)(w, x), jax.tree.leaves(fn(w, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def primitive(run, **options):
    """A primitive of a library's own; all have one name."""
    new = Primitive("activation")
    new.def_impl(run)
    new.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(new, mlir.lower_fun(run, multiple_results=False), **options)
    return new


def test_primitives_of_one_name_and_parameters_that_python_finds_equal_are_different():
    sine, cosine = primitive(jnp.sin), primitive(jnp.cos)
    power = primitive(lambda x, by: jnp.copysign(x, by) if isinstance(by, float) else x + by, cacheable=False)
    of = X[:, 0] + 1

    def fn(x):
        return sine.bind(x) - cosine.bind(x), power.bind(x, by=0.0), power.bind(x, by=-0.0), power.bind(x, by=1), power.bind(x, by=1.0)

    jaxpr = jax.jit(fn).trace(of).jaxpr
    graph = parse(jaxpr)
    assert not graph.repeats
    for a, b in zip(emit(jaxpr, {}, None, graph.repeats)(of), jax.jit(fn)(of), strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_array_behind_a_barrier_depends_on_the_one_before_it_alone():
    def fn(x, w):
        y, v = jax.lax.optimization_barrier((jnp.tanh(x), w))
        return jnp.sin(y), v * 2

    graph = parse(jax.jit(fn).trace(X, X).jaxpr)

    def before_barrier(name):
        [at] = [at for at, op in enumerate(graph.ops) if op.primitive == name]
        barrier = graph.ops[graph.values[graph.ops[at].inputs[0]].producer[0]]
        assert barrier.traits.recompute_barrier
        return [graph.ops[graph.values[v].producer[0]].primitive for v in barrier.inputs]

    assert before_barrier("sin") == ["tanh"] and before_barrier("mul") == ["arg"]


@pytest.mark.parametrize(("prevent", "barriers"), [(True, 3), (False, 0), ((True, False), 2), ((False, False), 1)])
def test_only_operands_that_are_asked_for_stand_behind_the_barrier_of_a_recomputed_layer(prevent, barriers):
    """JAX puts the gradient of the result there, too, unless nothing is to be computed again."""

    def loss(w, x):
        return jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x) @ w), prevent_cse=prevent)(w, x).sum()

    graph = parse(jax.jit(jax.grad(loss)).trace(X[:4, :4], X[:, :4]).jaxpr)
    assert sum(op.traits.recompute_barrier and op.outs[0].shape != () for op in graph.ops) == barriers


def test_numbers_differ_however_few_digits_numpy_prints():
    with np.printoptions(precision=2):
        graph = parse(jax.jit(lambda x: jnp.sin(x * 1.234) + jnp.sin(x * 1.2341)).trace(X).jaxpr)
    assert [op.primitive for op in graph.ops].count("sin") == 2


def test_what_is_random_or_calls_back_is_computed_as_often_as_it_is_written():
    def fn(x):
        seen = [jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) for _ in range(2)]
        return sum(seen) + jax.lax.rng_uniform(0.0, x[0, 0], (4,))[0] + jax.lax.rng_uniform(0.0, x[0, 0], (4,))[0]

    names = [op.primitive for op in parse(jax.jit(fn).trace(X).jaxpr).ops]
    assert names.count("pure_callback") == names.count("rng_uniform") == 2


def test_each_value_is_followed_once_however_many_paths_lead_to_it():
    def diamonds(x):
        for _ in range(64):  # 2 ** 64 paths
            x = jnp.sin(x) + jnp.cos(x)
        return x

    graph = parse(jax.jit(diamonds).trace(X).jaxpr)
    reached = list(graph.reached(graph.ops[graph.args[0]].outputs[0], lambda at: True))
    assert set(reached) == {at for at, op in enumerate(graph.ops) if not op.traits.step_input}
    assert len(reached) == sum(len(op.inputs) for op in graph.ops)


def classes(fun, *args) -> dict[str, list[int]]:
    """Primitive -> the classes of its ops, in the order of the program."""
    graph = parse(jax.make_jaxpr(fun)(*args))
    number: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    signature = [number.setdefault(op.primitive, len(number)) for op in graph.ops]
    for op, at in zip(graph.ops, repeated_layers(graph, signature), strict=True):
        found.setdefault(op.primitive, []).append(at)
    return found


def test_what_makes_one_side_of_a_product_is_no_layer_of_what_makes_the_other():
    """Else a weight's gather ties that of the rows that meet it: queries would be gathered with their keys, and sliced again."""
    layers = 2 * ROUNDS + 1  # the last of them do not see the inputs

    def product(x, y):
        for _ in range(layers):
            x, y = (jnp.sin(z) for z in (x, y))
        return x @ y

    left, right = classes(product, jnp.ones((8, 8)), jnp.ones((8, 8)))["sin"][-2:]
    assert left != right


def test_equal_layers_of_a_stack_are_of_one_class():
    def stack(x, weights):
        for w in weights:
            x = jnp.sin(x @ w)
        return x

    found = classes(stack, jnp.ones((8, 8)), [jnp.ones((8, 8))] * (2 * ROUNDS + 3))
    assert all(len(set(found[primitive][ROUNDS:-ROUNDS])) == 1 for primitive in ("dot_general", "sin"))
