"""Every primitive of common programs has a rule: jax.numpy, jax.nn, jax.random, optax, flax, equinox, and their gradients."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest

from shardplan._jax import EXPANDED, INLINED, inner_jaxpr
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.table import equations

HOLDERS = {*INLINED, "scan", "while", "cond"}
"""Primitives that hold a program of their own, planned through."""

KEY = jax.random.key(0)
X = jax.random.uniform(KEY, (8, 6), minval=0.1, maxval=0.9)
SQUARE, VECTOR, WHOLES, TRUTHS = X[:6], X[0], (X * 10).astype(int), X > 0.5


def without_rule(fn, *args) -> set[str]:
    """Primitives of a program that have no rule; a rule that does not fit raises."""
    missing, left = set(), [jax.make_jaxpr(fn)(*args).jaxpr]
    while left:
        for eqn in equations(left.pop()):
            if eqn.primitive.name in EXPANDED and (inner := inner_jaxpr(eqn)):
                left.append(inner.jaxpr)
            elif eqn.primitive.name not in HOLDERS:
                ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
                if not rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)[1]:
                    missing.add(eqn.primitive.name)
    return missing


def loss_of(fn):
    """Sum of squares of all floating results."""
    return lambda *args: sum(jnp.sum(y**2) for y in jax.tree.leaves(fn(*args)) if jnp.issubdtype(y.dtype, jnp.floating))


def functions(module):
    for name, fn in vars(module).items():
        if callable(fn) and not name.startswith("_") and not inspect.isclass(fn):
            yield name, fn


@pytest.mark.parametrize(
    "module", [jnp, jax.nn, jax.scipy.special, jnp.linalg, jnp.fft, jax.scipy.linalg], ids=lambda m: m.__name__
)
def test_every_function_has_rules(module):
    """Each function on the first operands it takes, and its gradient."""
    traced = 0
    for name, fn in functions(module):
        for args in [
            (X,),
            (X, X),
            (SQUARE,),
            (SQUARE, SQUARE),
            (WHOLES,),
            (TRUTHS, X, X),
            (VECTOR, VECTOR),
            (X, WHOLES[:, :1], 1),
        ]:
            dynamic = [a for a in args if not isinstance(a, int)]
            static = args[len(dynamic) :]
            call = lambda *xs, fn=fn, static=static: fn(*xs, *static)  # noqa: E731
            try:
                with warnings.catch_warnings(action="ignore"):
                    jax.eval_shape(call, *dynamic)
            except Exception:  # not made for these operands
                continue
            assert without_rule(call, *dynamic) == set(), name
            floats = tuple(i for i, a in enumerate(dynamic) if a.dtype == X.dtype)
            try:
                jax.eval_shape(grad := jax.grad(loss_of(call), floats), *dynamic)
            except Exception:  # not differentiable
                break
            assert without_rule(grad, *dynamic) == set(), f"gradient of {name}"
            break
        else:
            continue
        traced += 1
    assert traced > 15


def test_every_distribution_has_rules():
    for name, fn in functions(jax.random):
        for args in [(KEY,), (KEY, X), (KEY, VECTOR), (KEY, X, X)]:
            try:
                jax.eval_shape(fn, *args)
            except Exception:  # not made for these operands
                continue
            assert without_rule(fn, *args) == set(), name


def test_every_optax_loss_has_rules():
    optax = pytest.importorskip("optax")
    labels = WHOLES[:, 0] % 6
    for name, fn in functions(optax.losses):
        for args in [(X, X), (X, labels), (X,), (VECTOR, VECTOR), (X, X, X)]:
            try:
                jax.eval_shape(grad := jax.value_and_grad(loss_of(fn)), *args)
            except Exception:  # not made for these operands
                continue
            assert without_rule(grad, *args) == set(), name
            break


def test_every_optax_optimizer_has_rules():
    optax = pytest.importorskip("optax")
    params = {"w": X, "b": VECTOR}
    traced = 0
    for name, make in functions(optax):
        try:
            optimizer = optax.chain(optax.clip_by_global_norm(1.0), make(1e-3))
            state = optimizer.init(params)
            jax.eval_shape(optimizer.update, params, state, params)
        except Exception:  # not an optimizer of one learning rate
            continue
        traced += 1
        assert without_rule(optimizer.update, params, state, params) == set(), name
    assert traced > 20


IMAGES, TOKENS, SEQUENCE = jnp.ones((4, 8, 8, 6)), jnp.zeros((4, 8), int), jnp.ones((4, 8, 6))


def test_every_linen_layer_has_rules():
    nn = pytest.importorskip("flax.linen")
    layers = [
        (nn.Dense(8), X), (nn.DenseGeneral((2, 4)), X), (nn.Embed(16, 6), TOKENS), (nn.Conv(8, (3, 3)), IMAGES),
        (nn.Conv(6, (3, 3), (2, 2), feature_group_count=6), IMAGES), (nn.ConvTranspose(8, (3, 3), (2, 2)), IMAGES),
        (nn.ConvLocal(8, (3, 3)), IMAGES), (nn.LayerNorm(), X), (nn.RMSNorm(), X), (nn.GroupNorm(2), IMAGES),
        (nn.BatchNorm(use_running_average=False), IMAGES), (nn.InstanceNorm(), IMAGES), (nn.WeightNorm(nn.Dense(4)), X),
        (nn.MultiHeadDotProductAttention(2, qkv_features=8), SEQUENCE), (nn.RNN(nn.LSTMCell(8)), SEQUENCE),
        (nn.RNN(nn.GRUCell(8)), SEQUENCE), (nn.RNN(nn.ConvLSTMCell(8, (3, 3))), jnp.ones((4, 3, 8, 8, 6))),
        (nn.Dropout(0.5, deterministic=False), X), (nn.PReLU(), X), (nn.Einsum((6, 4), "bf,fh->bh"), X),
        (nn.Sequential([lambda x: nn.max_pool(x, (2, 2), (2, 2)), lambda x: nn.avg_pool(x, (2, 2)), nn.Dense(4)]), IMAGES),
    ]  # fmt: skip
    for layer, x in layers:
        variables = layer.init({"params": KEY, "dropout": KEY}, x)

        def loss(variables, x, layer=layer):
            return loss_of(lambda v: layer.apply(v, x, mutable=["batch_stats"], rngs={"dropout": KEY})[0])(variables)

        assert without_rule(jax.value_and_grad(loss), variables, x) == set(), layer


def test_every_nnx_layer_has_rules():
    nnx = pytest.importorskip("flax.nnx")
    r = nnx.Rngs(0)
    layers = [
        (nnx.Linear(6, 4, rngs=r), X), (nnx.LinearGeneral(6, (2, 4), rngs=r), X), (nnx.Einsum("bf,fh->bh", (6, 4), rngs=r), X),
        (nnx.Embed(16, 6, rngs=r), TOKENS), (nnx.Conv(6, 8, (3, 3), rngs=r), IMAGES), (nnx.LoRA(6, 2, 4, rngs=r), X),
        (nnx.ConvTranspose(6, 8, (3, 3), (2, 2), rngs=r), IMAGES), (nnx.BatchNorm(6, rngs=r), IMAGES),
        (nnx.Dropout(0.5, rngs=r), X),
        (nnx.LayerNorm(6, rngs=r), X), (nnx.RMSNorm(6, rngs=r), X), (nnx.GroupNorm(6, 2, rngs=r), IMAGES),
        (nnx.MultiHeadAttention(2, 6, 8, decode=False, rngs=r), SEQUENCE), (nnx.RNN(nnx.LSTMCell(6, 8, rngs=r)), SEQUENCE),
        (nnx.RNN(nnx.GRUCell(6, 8, rngs=r)), SEQUENCE),
    ]  # fmt: skip
    for layer, x in layers:
        graph, state = nnx.split(layer)
        floats = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), state)

        def loss(state, x, graph=graph):
            return loss_of(lambda s: nnx.merge(graph, s)(x))(state)

        step = jax.value_and_grad(loss, allow_int=True) if all(jax.tree.leaves(floats)) else loss
        assert without_rule(step, state, x) == set(), layer


def test_every_equinox_layer_has_rules():
    eqx = pytest.importorskip("equinox")
    layers = [
        (eqx.nn.MLP(6, 4, 8, 2, key=KEY), VECTOR), (eqx.nn.Conv2d(6, 4, 3, key=KEY), jnp.ones((6, 8, 8))),
        (eqx.nn.LayerNorm(6), VECTOR), (eqx.nn.GroupNorm(2, 6), jnp.ones((6, 8, 8))),
        (eqx.nn.AvgPool2d(2), jnp.ones((6, 8, 8))),
        (eqx.nn.MaxPool2d(2), jnp.ones((6, 8, 8))), (eqx.nn.AdaptiveAvgPool2d(4), jnp.ones((6, 8, 8))),
    ]  # fmt: skip
    for layer, x in layers:
        floats, rest = eqx.partition(layer, eqx.is_inexact_array)
        step = jax.value_and_grad(lambda f, x, rest=rest: loss_of(jax.vmap(eqx.combine(f, rest)))(x))
        assert without_rule(step, floats, jnp.stack([x] * 4)) == set(), layer
