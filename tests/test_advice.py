"""Advice: attention and cross-entropies written as products and elementwise ops are found however they are spelled; nothing else is."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from clusters import NEAR
from jax.sharding import AbstractMesh

import shardplan
from shardplan.plan.advice import LEAST_SHARE, Advice
from shardplan.view.values import plan_values

pytestmark = pytest.mark.usefixtures("first_plan")

BF16 = jnp.bfloat16
B, T, S, H, D, W = 4, 1024, 1536, 4, 64, 32768  # batch, queries, keys, heads, depth, words
SCORES, RESULT = "bthd,bshd->bhts", "bhts,bshd->bthd"


def like(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def plan_of(fn, *args, shape=(2,), cluster="h100", **options):
    return shardplan.auto(AbstractMesh(shape, ("x", "y")[: len(shape)]), cluster=cluster, **options)(fn).plan(*args)


# ---- attention


def scores(q, k):
    return jnp.einsum(SCORES, q, k) / math.sqrt(D)


def plain(q, k, v):
    return jnp.einsum(RESULT, jax.nn.softmax(scores(q, k), -1), v)


def by_hand(q, k, v):
    s = scores(q, k).astype("float32")
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return jnp.einsum(RESULT, (e / e.sum(-1, keepdims=True)).astype(v.dtype), v)


def by_logsumexp(q, k, v):
    s = scores(q, k)
    return jnp.einsum(RESULT, jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def divided_late(q, k, v):
    s = scores(q, k)
    e = jnp.exp2((s - s.max(-1, keepdims=True)) * math.log2(math.e))
    return jnp.einsum(RESULT, e, v) / jnp.moveaxis(e.sum(-1), 1, 2)[..., None]


def masked_after(q, k, v):
    s = scores(q, k)
    seen = jnp.arange(T)[:, None] >= jnp.arange(S)
    e = jnp.where(seen, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return jnp.einsum(RESULT, e / e.sum(-1, keepdims=True), v)


def masked_and_biased(q, k, v):
    s = 30 * jnp.tanh(scores(q, k) / 30) + jnp.linspace(0, 1, H)[:, None, None].astype(q.dtype)
    s = jnp.where(jnp.arange(T)[:, None] >= jnp.arange(S), s, jnp.finfo(s.dtype).min)
    return jnp.einsum(RESULT, jax.nn.softmax(s.astype("float32"), axis=-1).astype(v.dtype), v)


def dropped(q, k, v):
    p = jax.nn.softmax(scores(q, k), -1)
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, p.shape)
    return jnp.einsum(RESULT, jnp.where(kept, p / 0.9, 0), v)


def dropped_alike(q, k, v):
    """One mask for all batches and heads."""
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, (T, S))
    return jnp.einsum(RESULT, jax.nn.softmax(scores(q, k), -1) * kept.astype(q.dtype) / 0.9, v)


def in_heads(q, k, v):
    one = lambda q, k, v: jax.nn.softmax(q @ k.T / math.sqrt(D)) @ v  # noqa: E731
    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def grouped(q, k, v):
    q = q.reshape(B, T, H // 2, 2, D)
    s = jnp.einsum("btmgd,bsmd->bmgts", q, k[:, :, ::2])
    return jnp.einsum("bmgts,bsmd->btmgd", jax.nn.softmax(s), v[:, :, ::2]).reshape(B, T, H, D)


SPELLINGS = {
    "jax.nn.softmax": plain,
    "by hand, cast": by_hand,
    "by logsumexp": by_logsumexp,
    "exp2, divided late": divided_late,
    "masked after exp": masked_after,
    "masked, capped, biased": masked_and_biased,
    "dropout": dropped,
    "dropout, one mask": dropped_alike,
    "head by head": in_heads,
    "grouped queries": grouped,
    "jax.nn.dot_product_attention": partial(jax.nn.dot_product_attention, implementation="xla"),
    "recomputed": jax.checkpoint(plain),
}
WEIGHTS = {"q": like(H * D, H * D), "k": like(H * D, H * D), "v": like(H * D, H * D)}


def forward(attend, weights, x, y):
    q, k, v = (((y if n in "kv" else x) @ weights[n]).reshape(B, -1, H, D) for n in "qkv")
    return attend(q, k, v)


def train(attend, weights, x, y):
    value, grads = jax.value_and_grad(lambda w: (forward(attend, w, x, y).astype("float32") ** 2).mean())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def layers(attend, weights, x, y):
    """Training of a scan over layers."""

    def loss(weights):
        body = lambda x, w: (x + forward(attend, w, x, y).reshape(x.shape), ())  # noqa: E731
        return (jax.lax.scan(body, x, weights)[0].astype("float32") ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


X, Y = like(B, T, H * D), like(B, S, H * D)


@pytest.mark.parametrize("step", [forward, train, layers], ids=lambda f: f.__name__)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention_is_found_in_every_spelling(spelling, step):
    weights = WEIGHTS if step is not layers else {n: like(3, *w.shape) for n, w in WEIGHTS.items()}
    plan = plan_of(partial(step, SPELLINGS[spelling]), weights, X, Y)
    (found,) = plan.advice()
    assert found.kind == "attention" and found.source.startswith("test_advice.py:")
    assert LEAST_SHARE <= found.share <= 1 and math.isclose(found.share * plan.seconds["total"], found.seconds, rel_tol=1e-6)
    assert 0 < found.fused_seconds < found.seconds < found.unfused_seconds <= plan.seconds["total"]
    assert found.use.startswith('jax.nn.dot_product_attention(..., implementation="cudnn")')
    assert ("dropout" in found.use) == spelling.startswith("dropout")


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("step", [forward, train, layers], ids=lambda f: f.__name__)
def test_the_fused_seconds_are_those_of_a_plan_with_cudnns_attention(step, mesh):
    weights = WEIGHTS if step is not layers else {n: like(3, *w.shape) for n, w in WEIGHTS.items()}
    (found,) = plan_of(partial(step, plain), weights, X, Y, shape=mesh).advice()
    fused = plan_of(partial(step, partial(jax.nn.dot_product_attention, implementation="cudnn")), weights, X, Y, shape=mesh)
    planned = fused.context.planned
    kernels = [s for op, s in zip(planned.graph.ops, planned.kernel_seconds, strict=True) if op.traits.fused_attention]
    assert len(kernels) == (1 if step is forward else 2) and fused.advice() == ()
    assert found.fused_seconds == pytest.approx(sum(kernels), rel=0.05)


def test_attention_that_is_recomputed_twice_is_no_cross_entropy():
    """Of a chunk of queries at a time, in a layer that is recomputed, too."""

    def in_chunks(q, k, v):
        chunks = q.reshape(B, 4, T // 4, H, D).swapaxes(0, 1)
        found = jax.lax.map(jax.checkpoint(lambda q: plain(q, k, v)), chunks)
        return found.swapaxes(0, 1).reshape(B, T, H, D)

    plan = plan_of(
        partial(layers, jax.checkpoint(in_chunks)), {n: like(3, *w.shape) for n, w in WEIGHTS.items()}, X, like(B, 8192, H * D)
    )
    assert [found.kind for found in plan.advice()] == ["attention"]


# ---- cross-entropies


def logits(w, x):
    return jnp.einsum("btd,vd->btv", x, w).astype("float32")


def by_log_softmax(w, x, labels):
    found = jnp.take_along_axis(jax.nn.log_softmax(logits(w, x)), labels[..., None], -1)
    return -found.mean()


def by_optax(w, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, x), labels).mean()


def one_hot(w, x, labels):
    y = jax.nn.one_hot(labels, W) * 0.9 + 0.1 / W
    return -(y * jax.nn.log_softmax(logits(w, x))).sum(-1).mean()


def with_penalty(w, x, labels):
    z = logits(w, x)
    lse = jax.nn.logsumexp(z, -1)
    return (lse - jnp.take_along_axis(z, labels[..., None], -1)[..., 0] + 1e-4 * lse**2).sum()


def in_chunks(w, x, labels):
    chunks = x.reshape(B, 4, T // 4, -1).swapaxes(0, 1), labels.reshape(B, 4, T // 4).swapaxes(0, 1)
    body = jax.checkpoint(lambda total, of: (total + with_penalty(w, *of), ()))
    return jax.lax.scan(body, 0.0, chunks)[0] / labels.size


def by_probability(w, x, labels):
    return -jnp.log(jnp.take_along_axis(jax.nn.softmax(logits(w, x)), labels[..., None], -1)).mean()


def of_all_but_the_last(w, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, x)[:, :-1], labels[:, 1:]).mean()


def of_a_frozen_head(w, x, labels):
    return by_log_softmax(jax.lax.stop_gradient(w), x, labels)


LOSSES = [by_log_softmax, by_optax, one_hot, with_penalty, in_chunks, by_probability, of_all_but_the_last, of_a_frozen_head]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_a_cross_entropy_over_a_large_vocabulary_is_found(loss, trained):
    def step(w, x, labels):
        if not trained:
            return loss(w["w"], jnp.tanh(x @ w["u"]), labels)
        value, grads = jax.value_and_grad(lambda w: loss(w["w"], jnp.tanh(x @ w["u"]), labels))(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value

    plan = plan_of(step, {"w": like(W, 256), "u": like(256, 256)}, like(B, T, 256), like(B, T, dtype="int32"))
    (found,) = plan.advice()
    assert found.kind == "cross-entropy" and LEAST_SHARE <= found.share <= 1 and "linear cross-entropy" in found.use
    products = (3 if loss is of_a_frozen_head else 4) if trained else 1
    flops = 2 * B * T * W * 256 * products / 2  # on one of two devices
    device = plan.context.planned.space.cluster.device
    assert found.fused_seconds == pytest.approx(flops / device.flops_per_s("bfloat16"), rel=0.3)
    assert found.fused_seconds < found.unfused_seconds


# ---- what is neither


def silu(x):
    return x / (1 + jnp.exp(-x))


def network(w, x):
    h = silu(x @ w["up"])
    h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
    return h @ w["down"]


def memory_layer(w, x):
    return jax.nn.softmax(x @ w["up"]) @ w["down"]


def router(w, x):
    gates = jax.nn.softmax((x @ w["gate"]).astype("float32"))
    return jnp.einsum("te,td,edf->tf", gates.astype(x.dtype), x, w["experts"])


def linear_attention(w, x):
    q, k, v = (x @ w["up"][:, :512] for _ in range(3))
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    return (q @ (k.T @ v)) / (q @ k.sum(0))[:, None]


def few_classes(w, x):
    return jax.nn.log_softmax((x @ w["gate"]).astype("float32"))[:, 0].mean() + x.sum()


def returned(w, x):
    k = jnp.tanh(x @ w["up"])
    p = jax.nn.softmax(k @ k.T)
    return p @ k, p


def logits_returned(w, x):
    z = (x @ w["up"]).astype("float32")
    return jax.nn.logsumexp(z, -1).mean(), z


NEITHER = [network, memory_layer, router, linear_attention, few_classes, returned, logits_returned]
LAYER = {"up": like(512, 16384), "down": like(16384, 512), "gate": like(512, 64), "experts": like(64, 512, 64)}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fn", NEITHER, ids=lambda f: f.__name__)
def test_other_steps_get_no_advice(fn, trained):
    def step(w, x):
        if not trained:
            return fn(w, x)

        def total(w):
            out = fn(w, x)
            return sum(y.astype("float32").mean() for y in jax.tree.leaves(out)), out

        grads, out = jax.grad(total, has_aux=True)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), out if fn in (returned, logits_returned) else ()

    assert plan_of(step, LAYER, like(2048, 512)).advice() == ()


def test_below_a_tenth_there_is_no_advice():
    wide = lambda w, x, y: (forward(plain, w, x, y), jax.lax.fori_loop(0, 400, lambda i, z: jnp.sin(z @ w["q"]), x))  # noqa: E731
    (found,) = plan_of(partial(forward, plain), WEIGHTS, X, Y).advice()
    plan = plan_of(wide, WEIGHTS, X, Y)
    assert found.seconds < LEAST_SHARE * plan.seconds["total"] and plan.advice() == ()


def test_the_fused_kernels_are_for_gpus():
    assert plan_of(partial(forward, plain), WEIGHTS, X, Y, cluster="cpu").advice() == ()
    assert plan_of(partial(forward, plain), WEIGHTS, X, Y, cluster=NEAR).advice()


def test_heads_that_no_kernel_takes_get_no_advice():
    one_head = lambda w, x, y: plain(*((z @ w[n])[:, :, None] for n, z in zip("qkv", (x, y, y), strict=True)))  # noqa: E731
    many = like(B, 4 * T, H * D), like(B, 4 * S, H * D)
    for depth, n in ((256, 1), (264, 0)):
        assert len(plan_of(one_head, {name: like(H * D, depth) for name in WEIGHTS}, *many).advice()) == n


# ---- where it is shown


def test_the_plan_shows_it_in_text_page_and_json():
    plan = plan_of(partial(train, plain), WEIGHTS, X, Y)
    (found,) = plan.advice()
    assert str(found) == f"{found.finding}\n  way out: {found.use}"
    for text in (str(plan), plan.explain()):
        assert f"advice  {found.finding}\nadvice    way out: {found.use}\n" in f"{text}\n"
    assert "<h2>Advice</h2>" in plan.html() and "<h2>Advice</h2>" not in plan_of(jnp.sin, X).html()
    (shown,) = plan_values(plan, brief=True)["advice"]
    assert Advice(**json.loads(json.dumps(shown))) == found


def test_a_plan_from_a_file_has_no_advice(tmp_path):
    plan = plan_of(partial(forward, plain), WEIGHTS, X, Y)
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json").advice() == ()
