"""Steps in the ways of flax nnx and equinox: what would train nothing is warned of, what is no array says how to keep it out."""

import warnings
from pathlib import PurePath

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType

import shardplan
from shardplan import _jax
from shardplan.errors import ShardingError, ShardingWarning
from shardplan.xla import available

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
X = jnp.linspace(-1, 1, 128).reshape(16, 8)
auto = shardplan.auto(MESH, cluster="h100")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def test_an_nnx_module_that_a_step_trains_and_does_not_return_is_warned_of():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.warns(
        ShardingWarning, match=r"changes argument .*down/bias.* and \d+ more in place and does not return.*\n  way out: nnx.split"
    ):
        auto(train).plan(model, optimizer, X)


def test_an_nnx_module_that_is_read_or_returned_is_not_warned_of():
    def trained(model, x):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto(lambda model, x: model(x)).plan(Net(nnx.Rngs(0)), X)
        auto(trained).plan(Net(nnx.Rngs(0)), X)


def test_a_state_whose_transforms_write_what_stays_as_it_was_is_not_warned_of():
    """`nnx.remat` in `nnx.scan` gives the merged module new tracers of its old values."""
    layers = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=(0,), out_axes=0))(nnx.Rngs(0))
    graph, state = nnx.split(layers)

    def trained(state, x):
        layer = nnx.remat(lambda x, layer: jnp.tanh(layer(x)) + x)
        model = nnx.merge(graph, state)
        grads = nnx.grad(lambda m: jnp.mean(nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, m) ** 2))(model)
        return jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto(trained).plan(state, X)


def test_functions_held_by_a_module_are_parted_from_its_arrays():
    model = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
    with pytest.raises(
        ShardingError, match=r"argument m/activation is .*, not an array\.\n  ways out: .*eqx.partition\(module, eqx.is_arr"
    ):
        auto(lambda m, x: jax.vmap(m)(x)).plan(model, X)
    arrays, rest = eqx.partition(model, eqx.is_array)
    assert auto(lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x)).plan(arrays, X).inputs


class Trainer:
    rate = 0.1

    @auto
    def step(self, params, x):
        return params - self.rate * x

    def plain(self, params, x):
        return params - self.rate * x


def test_a_method_is_planned_bound_or_with_a_static_self():
    with pytest.raises(
        ShardingError, match=r"argument self is Trainer .*\n  ways out: auto\(mesh, static_argnums=0\), or a bound method"
    ):
        Trainer().step(X, X)
    assert auto(Trainer().plain).plan(X, X).inputs
    assert shardplan.auto(MESH, static_argnums=0, cluster="h100")(Trainer.plain).plan(Trainer(), X, X).inputs


def test_equinoxs_loops_under_vmap_and_prints_are_sharded_without_a_warning():

    def one(x):
        def body(carry):
            x, n = carry
            return 0.5 * x + jnp.cos(x), n + 1

        return eqxi.while_loop(lambda c: jnp.sum(c[0]) < 5, body, (x, 0), max_steps=4, kind="bounded")[0].sum()

    def step(x):
        jax.debug.print("{x}", x=x.sum())
        return jax.grad(lambda x: jax.vmap(one)(x).sum())(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        plan = shardplan.auto(MESH, pins={"x": jax.P("data")}, cluster="h100")(step).plan(X)
    assert not plan.unknown
    assert {"unvmap_any", "nonbatchable", "debug_print"} <= {op.primitive for op in plan.context.planned.graph.ops}


def test_a_print_that_gathers_an_array_is_warned_of():
    def step(x, whole):
        y = jnp.sin(x)
        jax.debug.print("{y}", y=y if whole else y[0])
        return y

    planned = shardplan.auto(MESH, pins={"x": jax.P("data")}, cluster="h100", static_argnums=1)(step)
    x = jax.ShapeDtypeStruct((2**20, 4096), "float32")
    with pytest.warns(
        ShardingWarning, match=r"'debug_print' at test_libraries.py:\d+ .*\n  why: the host prints all of it\n.* a slice"
    ):
        planned.plan(x, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        planned.plan(x, False)


def test_what_equinox_writes_in_loops_under_vmap_is_sharded_with_the_same_numbers():
    """`kind="checkpointed"` writes into buffers by a primitive that is batched by its implementation."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def one(x, rows):
        def body(carry):
            x, n, seen = carry
            return 0.5 * x + jnp.cos(x), n + 1, seen.at[n].set(x)

        start = x, jnp.int32(0), rows
        return eqxi.while_loop(lambda c: jnp.sum(c[0]) < 5, body, start, max_steps=4, kind="checkpointed", buffers=lambda c: c[2])[2]

    def step(x, rows):
        return jax.grad(lambda x: (jax.vmap(one)(x, rows) ** 2).sum())(x)

    rows = jnp.zeros((16, 4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        planned = shardplan.auto(mesh, pins={"x": jax.P("data")}, cluster="h100")(step)
        plan = planned.plan(X, rows)
    assert not plan.unknown and "maybe_set" in str(jax.make_jaxpr(step)(X, rows))
    assert jnp.allclose(planned(X, rows), jax.jit(step)(X, rows), rtol=1e-5)


@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize("kind", ["print", "pure", "io"])
def test_a_step_that_calls_back_compiles_for_absent_gpus(kind):
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p) ** 2))(params)
        if kind == "print":
            jax.debug.print("loss {}", loss)
        else:
            callback = {"pure": jax.pure_callback, "io": io_callback}[kind]
            loss = callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), loss)
        return params - 0.1 * grads, loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)
        found = auto(step).check(X[:8], X, target="h100:8")
    assert found.compiled.ok and "xla_ffi_python_gpu_callback" in found.compiled.text


def test_a_weight_that_is_quantized_is_gathered_in_its_few_bits():
    """As XLA does with what it gathers behind the cast to more bits."""

    def step(params, x):
        quantized = params.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)
        return x @ quantized

    pins = {"params": jax.P("data"), "x": jax.P("data")}
    shapes = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((1 << 16, 4096), jnp.bfloat16)
    plan = shardplan.auto(MESH, pins=pins, cluster="h100")(step).plan(*shapes)
    assert [r.array for d in plan.decisions for r in d.reshards] == ["bfloat16[4096,4096]"]
    assert plan.comm_bytes == 7 / 8 * 4096**2


def test_what_no_result_needs_is_not_planned():
    """The gradient of a custom rule for an operand that is not differentiated."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def step(w, x):
        return jax.grad(lambda w: product(x, w).sum())(w)

    plan = auto(step).plan(X[:8], X)
    assert sum(op.primitive == "dot_general" for op in plan.context.planned.graph.ops) == 1


def test_what_is_moved_out_of_a_loop_has_a_line_of_the_step():
    """Work on weights alone, which JAX moves out of the scan of flax's LSTM, has a stack of frames in flax alone."""
    model = nn.RNN(nn.OptimizedLSTMCell(8))
    params = model.init(jax.random.key(0), X[None])

    def step(params, x):
        return jax.grad(lambda p: model.apply(p, x).sum())(params)

    traced = jax.make_jaxpr(step)(params, X[None])
    assert any(not _jax.names_user(e.source_info.traceback) for e in traced.eqns)
    plan = auto(step).plan(params, X[None])
    ops = [op for op in plan.context.planned.graph.ops if not op.traits.step_input and not op.traits.constant]
    assert {PurePath(op.source.file).name for op in ops} == {PurePath(__file__).name}
