"""Dims of weights that are reshaped into heads which no axis divides are held as heads: the same numbers, sharded by heads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clusters import NEAR
from jax import lax
from jax.extend.core import jaxpr_as_fun

import shardplan
from shardplan._jax import equations
from shardplan._jax_programs import variable
from shardplan.mesh.layout import MeshShape
from shardplan.strategies.unfold import unfolded

pytestmark = pytest.mark.usefixtures("first_plan")

TWO = MeshShape(("x",), (2,))
ROWS, LENGTH, WIDTH, HEADS, DEPTH = 3, 5, 6, 7, 4
FLAT = HEADS * DEPTH


def random(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape)


X = random(ROWS, LENGTH, WIDTH)
W, B, FUSED, OUT = random(WIDTH, FLAT), random(FLAT), random(WIDTH, 3 * FLAT), random(FLAT, WIDTH)


def heads(y):
    return y.reshape(*y.shape[:2], HEADS, DEPTH)


def attend(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", scores, v)


def projected(y, w=OUT):
    return y.reshape(*y.shape[:2], FLAT) @ w


def layers(w, x):
    def layer(x, each):
        return x + projected(attend(*[heads(x @ each)] * 3)), None

    return lax.scan(jax.checkpoint(layer), x, w)[0]


def clipped(w, x):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    g = jax.grad(lambda w: (heads(x @ w) ** 2).sum())(w)
    return optax.apply_updates(w, tx.update(g, tx.init(w))[0])


STEPS = {
    "a bias": (lambda b, x: heads(x @ W + b), B),
    "a weight": (lambda w, x: projected(attend(*[heads(x @ w + B)] * 3)), W),
    "a cast weight": (lambda w, x: heads(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32), W),
    "a transposed weight": (lambda w, x: heads(x @ w.T), W.T),
    "the weight behind heads": (lambda w, x: projected(attend(*[heads(x @ W)] * 3), w), OUT),
    "three weights in one": (lambda w, x: attend(*jnp.moveaxis((x @ w).reshape(ROWS, LENGTH, 3, HEADS, DEPTH), 2, 0)), FUSED),
    "three weights in one, split": (lambda w, x: attend(*map(heads, jnp.split(x @ w, 3, axis=-1))), FUSED),
    "three weights in one, sliced": (lambda w, x: attend(*(heads((x @ w)[..., k * FLAT : (k + 1) * FLAT]) for k in range(3))), FUSED),
    "a weight that is split into one": (lambda w, x: heads(lax.split(x @ w, [FLAT], axis=2)[0]), W),
    "a shift by all": (lambda w, x: heads(lax.pad(y := x @ w, 0.0, [*[(0, 0, 0)] * 2, (-FLAT, FLAT, 0)]) + 2 * y), W),
    "weights that are joined": (
        lambda w, x: attend(*map(heads, jnp.split(x @ jnp.concatenate([w, 2 * w], -1), 2, -1)), heads(x @ w)),
        W,
    ),
    "rows of all sequences": (lambda w, x: heads((x.reshape(-1, WIDTH) @ w).reshape(ROWS, LENGTH, FLAT)), W),
    "a norm of all heads": (lambda w, x: heads((y := x @ w) / jnp.sqrt((y**2).mean(-1, keepdims=True))), W),
    "functions of JAX": (lambda w, x: heads(jax.nn.silu(x @ w) + jax.nn.relu(x @ w)), W),
    "a function of the flat dim": (lambda w, x: heads(jnp.cumsum(x @ w, -1)), W),
    "a part of the heads": (lambda w, x: heads(x @ w)[:, :, 0] + (x @ w)[..., 2:6], W),
    "a branch": (lambda w, x: heads(lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x @ w)), W),
    "two kinds of heads": (lambda w, x: heads(x @ w).sum(2) + (x @ w).reshape(ROWS, LENGTH, DEPTH, HEADS).sum(3), W),
    "no heads": (lambda w, x: jnp.concatenate([heads(y := x @ w), y[..., :0].reshape(ROWS, LENGTH, 0, DEPTH)], 2), W),
    "scanned layers": (layers, random(2, WIDTH, FLAT)),
    "an optimizer": (clipped, W),
}


def traced(fn, *args):
    return jax.jit(fn).trace(*args).jaxpr


@pytest.mark.parametrize(("fn", "weight"), STEPS.values(), ids=STEPS)
def test_an_unfolded_step_computes_the_same(fn, weight):
    def step(w, x):
        def loss(w, x):
            return (fn(w, x) ** 2).sum()

        return fn(w, x), *jax.grad(loss, (0, 1))(w, x)

    program = traced(step, weight, X)
    found = unfolded(program, TWO)
    assert (found.in_avals, found.out_avals) == (program.in_avals, program.out_avals)
    for got, want in zip(jaxpr_as_fun(found)(weight, X), step(weight, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * float(jnp.abs(want).max()))


def test_numbers_pass_through_a_call():
    def step(w, x):
        w, n, half = jax.jit(lambda w, n: (w, n, 0.5))(w, 2.0)
        return heads(x @ w), n, half

    program = traced(step, W, X)
    found = unfolded(program, TWO)
    assert found is not program
    for got, want in zip(jaxpr_as_fun(found)(W, X), step(W, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_variable_of_another_shape_is_in_the_same_memory():
    like = traced(lambda w: jax.device_put(w, jax.memory.Space.Host), W).jaxpr.outvars[0]
    made = variable(like, (WIDTH, HEADS, DEPTH)).aval
    assert (made.shape, made.dtype, made.memory_space) == ((WIDTH, HEADS, DEPTH), W.dtype, jax.memory.Space.Host)


BY_PRODUCTS = set(STEPS) - {"a bias", "weights that are joined", "a function of the flat dim", "a branch", "a shift by all"}
"""Of the steps, those in which no product is left whose flat dim is reshaped into heads, or was."""


@pytest.mark.parametrize("name", sorted(BY_PRODUCTS))
def test_products_make_and_read_heads(name):
    fn, weight = STEPS[name]
    program = traced(lambda w, x: jax.value_and_grad(lambda w: (fn(w, x) ** 2).sum())(w), weight, X)

    def flat_products(program):
        products = (eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "dot_general")
        return [eqn for eqn in products if any({FLAT, 3 * FLAT} & set(v.aval.shape) for v in eqn.invars)]

    assert flat_products(program)
    assert not flat_products(unfolded(program, TWO))


def patches(x):
    return lax.conv(jnp.broadcast_to(x[:, :, :1, None], (7, 3, HEADS, DEPTH)), jnp.ones((2, 3, 1, 1)), (1, 1), "SAME")


UNCHANGED = {
    "heads that divide": (lambda w, x: heads(x @ w), W, MeshShape(("x",), (7,))),
    "heads that would be filled up by more than is allowed": (lambda w, x: heads(x @ w), W, MeshShape(("x",), (16,))),
    "rows": (lambda w, x: (x.reshape(-1, WIDTH) @ w).reshape(7, 3, FLAT), W, TWO),
    "the elements of a head": (lambda w, x: (x @ w).reshape(*x.shape[:2], DEPTH, HEADS), W, TWO),
    "rows and columns of patches": (lambda w, x: patches(x).reshape(7, 2, FLAT) @ w.T, W, TWO),
    "what no weight has": (lambda w, x: jnp.repeat(x @ w, 2, -1)[..., :FLAT].cumsum(-1).reshape(7, 3, HEADS, DEPTH), W, TWO),
}


@pytest.mark.parametrize(("fn", "weight", "mesh"), UNCHANGED.values(), ids=UNCHANGED)
def test_other_steps_stay_as_they_were_traced(fn, weight, mesh):
    program = traced(fn, weight, random(7, 3, WIDTH))
    assert unfolded(program, mesh) is program


def attention_step(kind: str, axis: str, heads: int, depth: int):
    """A training step of one attention layer, its queries constrained to be sharded by heads."""
    flat = width = heads * depth
    shapes = {
        "flat": {n: (width, flat) for n in "qkv"},
        "fused": {"qkv": (width, 3 * flat)},
        "stored": {n: (width, heads, depth) for n in "qkv"},
    }
    out = (heads, depth, width) if kind == "stored" else (flat, width)

    def create():
        shaped = {**shapes[kind], "out": out} | ({"bias": (flat,)} if kind == "flat" else {})
        return {n: 0.1 * jax.random.normal(jax.random.key(k), s) for k, (n, s) in enumerate(shaped.items())}

    def loss(p, x):
        b, t, _ = x.shape
        if kind == "fused":
            q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(b, t, 3, heads, depth), 2, 0)
        elif kind == "stored":
            q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
        else:
            q, k, v = ((x @ p[n] + p["bias"]).reshape(b, t, heads, depth) for n in "qkv")
        free = jax.P.UNCONSTRAINED
        q = lax.with_sharding_constraint(q, jax.P(free, free, axis, free))
        y = attend(q, k, v)
        y = jnp.einsum("bthk,hkd->btd", y, p["out"]) if kind == "stored" else y.reshape(b, t, flat) @ p["out"]
        return ((x + y) ** 2).mean()

    def step(p, x):
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    return create, step


def mesh_of(shape):
    return jax.make_mesh(shape, ("data", "model")[-len(shape) :], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
@pytest.mark.parametrize("kind", ["flat", "fused", "stored"])
def test_25_heads_are_sharded_with_the_same_numbers(kind, shape):
    create, step = attention_step(kind, "model", 25, 4)
    x, mesh = random(2, 16, 100), mesh_of(shape)
    with jax.set_mesh(mesh):
        want = jax.jit(step)(create(), x)
    planned = shardplan.auto(mesh, cluster=NEAR)(step)
    plan = planned.plan(jax.eval_shape(create), x)
    found, unequal = plan.context.planned, set()
    for op, of, s in zip(found.graph.ops, found.space.strategies, found.strategies, strict=True):
        for y, made in zip(op.outs, of.results, strict=True):
            unequal |= {op.primitive for n, axes in zip(y.shape, made[s].dims, strict=True) if axes == ("model",) and n == 25}
    assert {"dot_general", "exp"} <= unequal
    got = planned(planned.init(create), x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
@pytest.mark.parametrize("kind", ["flat", "fused", "stored"])
def test_25_heads_are_compiled_as_planned(kind, shape):
    """No array is gathered whole (an "involuntary full rematerialization"): what is sent is what was planned."""
    create, step = attention_step(kind, "model", 25, 64)
    mesh = jax.sharding.AbstractMesh(shape, ("data", "model")[-len(shape) :], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(
        jax.eval_shape(create), jax.ShapeDtypeStruct((2, 2048, 1600), jnp.float32)
    )
    report = plan.check("h100:8")
    assert report.collectives_ratio == pytest.approx(1, abs=0.03)
    assert report.flops_ratio == pytest.approx(1, abs=0.01)
