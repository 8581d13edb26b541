"""The train steps of published measurements, as shapes: a transformer at a row's sizes, and its layout as pins.

Layers are unrolled, as all of these systems run them: a scan would copy what the backward pass reads into stacks and out of them. Norms
and activations keep their operands for the backward pass and compute the rest again, as the fused kernels of all these systems do.
Attention is one kernel (flash attention) with its own rule, so its flops are known and its scores are never in memory. The rule's
flops are those that take as long at the rate of the planner's large products as the kernel takes by `flash_rate`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan import register_rule

ATTENTION = {
    ("A100", 64): (178e12, 540.0),
    ("A100", 128): (204e12, 500.0),
    ("H100", 64): (300e12, 520.0),
    ("H100", 128): (340e12, 540.0),
}
"""(GPU, head size) -> (FLOP/s of causal FlashAttention-2 at long sequences, forward and backward together; s). Of these
1 / (1 + s / length) are reached. Read off the FlashAttention-2 paper's figures (arXiv:2307.08691), which agree within 6 %."""
TENSOR = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "gate": 1, "down": 0, "up_bias": 0, "embed": 0, "head": 1}
"""Parameter -> its dim that tensor parallelism shards: heads, hidden, vocabulary."""


NAMES = ("query", "key", "value", "attention", "out", "gate", "up", "down")
"""Checkpoint names of a layer: its products by their weights, and attention."""

Float8 = Literal["", "delayed", "dynamic"]
"""Scales of earlier steps, or of the largest value of every array, which is read once more for it."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a row; `micro` sequences per replica and microbatch, `accum` microbatches."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    gated: bool
    vocab: int
    tied: bool
    seq: int
    batch: int
    accum: int
    saved: tuple[str, ...] | None  # what a layer saves for its backward pass, of `NAMES`, besides its operands; None is all
    compute_dtype: str
    flash: bool = True
    float8: Float8 = ""  # how the products of a block's weights are scaled to 8 bits, if they are
    sequence_parallel: bool = False  # what is not tensor-parallel is sharded over the sequence
    one_hot: bool = False  # embeddings are products with one-hot tokens, and the loss multiplies with one-hot targets
    recompute_one_of: int = 1  # of so many layers the middle one saves `saved`, the others all
    fused_softmax: bool = True  # if attention is not one kernel: softmax is, and so is its gradient
    dropout: bool = False  # of attention's weights, in a kernel of its own


def flash_rate(gpu: str, head: int, seq: int) -> float:
    """FLOP/s of causal FlashAttention-2, of which half count."""
    rate, half = ATTENTION[gpu, 64 if head < 96 else 128]
    return rate / (1 + half / seq)


# ---- kernels as primitives

forward_p, backward_p = Primitive("published_flash_forward"), Primitive("published_flash_backward")
transposed_p, transposed_matrix_p = Primitive("published_transposed"), Primitive("published_transposed_matrix")
exponentials_p, row_products_p = Primitive("published_exponentials"), Primitive("published_row_products")
dropout_p, dropped_p = Primitive("published_dropout"), Primitive("published_dropped")
dropout_p.multiple_results = exponentials_p.multiple_results = backward_p.multiple_results = forward_p.multiple_results = True


def _priced_only(ctx, *args, **params):
    raise NotImplementedError("steps of published models are priced, never run")


for primitive in (forward_p, backward_p, transposed_p, transposed_matrix_p, exponentials_p, row_products_p, dropout_p, dropped_p):
    mlir.register_lowering(primitive, _priced_only)


@forward_p.def_abstract_eval
def _forward(q, k, v):
    b, t, g, r, _ = q.shape
    return q, jax.core.ShapedArray((b, g, r, t), jnp.float32)


@backward_p.def_abstract_eval
def _backward(q, k, v, out, sums, grad):
    return q, k, v


@transposed_p.def_abstract_eval
@transposed_matrix_p.def_abstract_eval
def _transposed(x):
    return jax.core.ShapedArray((x.shape[-1], *x.shape[:-1]), x.dtype)


@exponentials_p.def_abstract_eval
def _exponentials(scores, largest):
    return [jax.core.ShapedArray(x.shape, jnp.float32) for x in (scores, largest)]


@row_products_p.def_abstract_eval
def _row_products(exponentials, sums, grad):
    return sums


@dropout_p.def_abstract_eval
def _dropout_forward(x):
    return [jax.core.ShapedArray(x.shape, dtype) for dtype in (x.dtype, jnp.bool_)]


@dropped_p.def_abstract_eval
def _dropped(grad, kept):
    return grad


@jax.custom_vjp
def dropout(x):
    """Some elements, and zeros for the others, by a kernel that also writes which."""
    return dropout_p.bind(x)[0]


dropout.defvjp(lambda x: tuple(dropout_p.bind(x)), lambda kept, grad: (dropped_p.bind(grad, kept),))


@jax.custom_vjp
def flash(q, k, v):
    """Causal attention of q [b, t, g, r, d] over k, v [b, s, g, d]."""
    return forward_p.bind(q, k, v)[0]


def _flash_forward(q, k, v):
    out, sums = (checkpoint_name(x, "attention") for x in forward_p.bind(q, k, v))
    return out, (q, k, v, out, sums)


flash.defvjp(_flash_forward, lambda saved, grad: tuple(backward_p.bind(*saved, grad)))


def register_kernels(forward: float, backward: float) -> None:
    """Registers the rules of kernels; a flop of flash attention's passes counts as so many flops of a large product."""

    def flops(products: float):
        return lambda n: products * math.prod(n[name] for name in "btsgrd")  # 2 flops each, half of them masked

    q, kv = "b t g r d", "b s g d"
    register_rule(forward_p, f"{q}, {kv}, {kv} -> {q}, b g r t", replicated="t s d", flops=flops(2 * forward))
    register_rule(
        backward_p, f"{q}, {kv}, {kv}, {q}, b g r t, {q} -> {q}, {kv}, {kv}", reduce="r", replicated="t s d", flops=flops(5 * backward)
    )
    register_rule(exponentials_p, "b h t s, b h t -> b h t s, b h t", replicated="s")
    register_rule(row_products_p, "b h t s, b h t, b h t s -> b h t", replicated="s")
    register_rule(dropout_p, "b h t s -> b h t s, b h t s")
    register_rule(dropped_p, "b h t s, b h t s -> b h t s")
    register_rule(transposed_p, "b t k -> k b t")
    register_rule(transposed_matrix_p, "k n -> n k")


# ---- the step


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _float8_product(x, w, scaling: Float8):
    """x [b, t, k] times w [k, n], both and the gradient cast to 8 bits."""
    return _float8_forward(x, w, scaling)[0]


def _float8(x, dtype, scaling: Float8):
    scale = float(jnp.finfo(dtype).max) / jnp.abs(x).max() if scaling == "dynamic" else 1.0
    return (x * scale).astype(dtype)


def _float8_dot(x, y, contracted: tuple[tuple[int, ...], tuple[int, ...]], dtype):
    return jax.lax.dot_general(x, y, (contracted, ((), ())), preferred_element_type=dtype)


def _float8_forward(x, w, scaling):
    x8, w8 = (_float8(a, jnp.float8_e4m3fn, scaling) for a in (x, w))
    return _float8_dot(x8, w8, ((2,), (0,)), x.dtype), (x8, w8)


def _float8_backward(scaling, saved, grad):
    """cuBLAS multiplies only operands of 8 bits whose contracted dim is the last in memory; others are transposed by a kernel."""
    (x8, w8), grad8 = saved, _float8(grad, jnp.float8_e5m2, scaling)
    by_x = _float8_dot(grad8, transposed_matrix_p.bind(w8), ((2,), (0,)), grad.dtype)
    return by_x, _float8_dot(transposed_p.bind(x8), transposed_p.bind(grad8), ((1, 2), (1, 2)), grad.dtype)


_float8_product.defvjp(_float8_forward, _float8_backward)


def _linear(x, p: Mapping[str, jax.Array], name: str, s: Shape, contracted: int = 1):
    """x times a weight, of which the first dims are contracted with as many last dims of x."""
    w = p[name]
    if not s.float8:
        return checkpoint_name(jnp.tensordot(x, w, contracted), name)
    rows, columns = math.prod(w.shape[:contracted]), w.shape[contracted:]
    out = _float8_product(x.reshape(*x.shape[:2], rows), w.reshape(rows, -1), s.float8)
    return checkpoint_name(out.reshape(*x.shape[:2], *columns), name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _norm(x, p, gated: bool):
    y = x.astype(jnp.float32)
    if not gated:
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
    return (y * p["scale"] + (0 if gated else p["bias"])).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gelu(x, bias):
    return jax.nn.gelu(x + bias)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


@dataclass(frozen=True)
class Layouts:
    """Constraints of a step on a mesh, most of them for tensor parallelism; all arrays' first dim is sharded over the axes `rows`."""

    mesh: jax.sharding.AbstractMesh
    rows: tuple[str, ...] | None
    sequence_parallel: bool

    @property
    def tensor(self) -> str | None:
        """The axis of tensor parallelism."""
        return "tensor" if "tensor" in self.mesh.axis_names else None

    def laid(self, x, *dims):
        """Constrained to these dims behind the first."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(self.rows, *dims)))

    def split(self, x):
        """Heads or hidden, dim 2, over the tensor axis."""
        return self.laid(x, None, self.tensor)

    def between(self, x):
        """The residual stream, between blocks' products."""
        sequence = self.tensor if self.sequence_parallel else None
        return self.laid(x, sequence, None)

    def whole(self, x):
        """What the first products of attention and of the MLP read."""
        return self.laid(x, None, None)

    def gathered(self, name: str, w):
        """A layer's weight as its product reads it: whole but for tensor parallelism. Its gradient may be in any layout."""
        dims: list = [None] * w.ndim
        if self.tensor and (at := TENSOR.get(name)) is not None and w.shape[at] % self.mesh.shape["tensor"] == 0:
            dims[at] = "tensor"
        return _as_read(w, NamedSharding(self.mesh, P(*dims)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _as_read(w, sharding):
    return jax.lax.with_sharding_constraint(w, sharding)


_as_read.defvjp(lambda w, sharding: (_as_read(w, sharding), None), lambda sharding, _, grad: (grad,))


@jax.custom_vjp
def _added_to(params, totals):
    """The parameters; their gradients are these and the totals, each added as it comes, as PyTorch does."""
    return params


_added_to.defvjp(lambda params, totals: (params, totals), lambda totals, grads: (jax.tree.map(jnp.add, totals, grads), None))


def _masked(scores):
    return jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores.astype(jnp.float32), -1e9)


@jax.custom_vjp
def _softmax_kernels(scores):
    """Causal weights of attention by the kernels of XLA until 2024.

    It computed no exponential twice: those of all scores are an array of 32 bits that both passes read
    (xla/service/instruction_fusion.cc).
    """
    return _softmax_forward(scores)[0]


def _softmax_forward(scores):
    exponentials, sums = exponentials_p.bind(scores, _masked(scores).max(-1))
    return (exponentials / sums[..., None]).astype(scores.dtype), (exponentials, sums)


def _softmax_backward(saved, grad):
    exponentials, sums = saved
    products = row_products_p.bind(exponentials, sums, grad)
    return ((exponentials / sums[..., None] * (grad.astype(jnp.float32) - products[..., None])).astype(grad.dtype),)


_softmax_kernels.defvjp(_softmax_forward, _softmax_backward)


def _unfused(q, k, v, s: Shape):
    """Causal attention of q [b, t, g, r, d] over k, v [b, s, g, d], its scores and weights arrays."""
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    k, v = (jnp.repeat(x, q.shape[3], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", heads * heads.shape[-1] ** -0.5, k)
    weights = jax.nn.softmax(_masked(scores)).astype(q.dtype) if s.fused_softmax else _softmax_kernels(scores)
    weights = dropout(weights) if s.dropout else weights
    return checkpoint_name(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(q.shape), "attention")


def _attention(x, p, s: Shape, split: Callable):
    q, k, v = (split(_linear(x, p, name, s)) for name in ("query", "key", "value"))
    out = flash(q, k, v) if s.flash else _unfused(q, k, v, s)
    return _linear(split(out), p, "out", s, 3)


def _block(x, p, s: Shape, at: Layouts):
    """One layer."""
    split = at.split
    p = {name: at.gathered(name, w.astype(x.dtype)) if name not in ("norm1", "norm2") else w for name, w in p.items()}
    y = at.between(_attention(at.whole(_norm(x, p["norm1"], s.gated)), p, s, split))
    x = x + (y if s.gated else y + p["out_bias"])
    y = at.whole(_norm(x, p["norm2"], s.gated))
    if s.gated:
        gate, up = (split(_linear(y, p, name, s)) for name in ("gate", "up"))
        return x + at.between(_linear(split(_swiglu(gate, up)), p, "down", s))
    hidden = split(_gelu(split(_linear(y, p, "up", s)), p["up_bias"]))
    return x + at.between(_linear(hidden, p, "down", s)) + p["down_bias"]


def _params(s: Shape) -> dict:
    d, f, g, size = s.width, s.hidden, s.kv_heads, s.width // s.heads

    def norm():
        return {"scale": jnp.ones(d)} | ({} if s.gated else {"bias": jnp.ones(d)})

    shapes = {"query": (d, g, s.heads // g, size), "key": (d, g, size), "value": (d, g, size), "out": (g, s.heads // g, size, d)}
    shapes |= {"up": (d, f), "down": (f, d)} | ({"gate": (d, f)} if s.gated else {"up_bias": (f,), "down_bias": (d,), "out_bias": (d,)})
    layer = {name: jnp.zeros(shape) for name, shape in shapes.items()} | {"norm1": norm(), "norm2": norm()}
    params = {"embed": jnp.zeros((s.vocab, d)), "norm": norm(), "layers": [layer] * s.layers}
    if not s.gated:
        params["positions"] = jnp.zeros((s.seq, d))
    return params if s.tied else params | {"head": jnp.zeros((d, s.vocab))}


def block_bytes(s: Shape) -> int:
    """Bytes of a block's parameters, all in the dtype of compute."""
    layer = jax.eval_shape(lambda: _params(s))["layers"][0]
    return sum(x.size for x in jax.tree.leaves(layer)) * jnp.dtype(s.compute_dtype).itemsize


def build(s: Shape, mesh: jax.sharding.AbstractMesh, sizes: Mapping[str, int], zero: int):
    """(train step, state, batch, pins of both) of a row; state and batch as shapes. The batch is [accum, sequences, tokens].

    Activations are constrained to be sharded over the batch, to tensor parallelism within blocks and to the sequence between them where
    a row says so, and the logits over the vocabulary. Each microbatch gathers the weights anew, from where the state has them.

    Args:
        s: sizes.
        mesh: the axes of `sizes` that are larger than 1.
        sizes: of the axes "data", "fsdp", "tensor", in this order.
        zero: 3 shards parameters and optimizer, 1 the optimizer alone (over "data" and "fsdp"), 0 neither.
    """
    at = Layouts(mesh, tuple(a for a in ("data", "fsdp") if mesh.shape.get(a, 1) > 1) or None, s.sequence_parallel)
    vocabulary = at.tensor if at.tensor and s.vocab % mesh.shape["tensor"] == 0 else None
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def create_state():
        params = _params(s)
        return {"params": params, "opt": optimizer.init(params)}

    def loss_fn(params, batch, totals=None):
        if totals is not None:
            params = {name: _added_to(w, totals[name]) if name != "layers" else w for name, w in params.items()}
        embed = params["embed"].astype(s.compute_dtype)
        x = jax.nn.one_hot(batch["inputs"], s.vocab, dtype=embed.dtype) @ embed if s.one_hot else embed[batch["inputs"]]
        if "positions" in params:
            x = x + params["positions"].astype(x.dtype)

        def block(x, p):
            return at.between(_block(x, p, s, at))

        x = at.between(x)
        again = jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names(*s.saved or ()))
        for i, p in enumerate(params["layers"]):
            one = again if s.saved is not None and i % s.recompute_one_of == s.recompute_one_of // 2 else block
            x = one(x, p if totals is None else _added_to(p, totals["layers"][i]))
        x = at.whole(_norm(x, params["norm"], s.gated))
        head = params["embed"].astype(x.dtype).T if s.tied else params["head"].astype(x.dtype)
        logits = at.laid(x @ head, None, vocabulary)
        logits = logits.astype(jnp.float32)
        if s.one_hot:
            return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["targets"], s.vocab)).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def train_step(state, batch):
        grads_of = jax.value_and_grad(loss_fn)
        if s.accum == 1:
            loss, grads = grads_of(state["params"], jax.tree.map(lambda x: x[0], batch))
        else:
            zeros = jax.tree.map(jnp.zeros_like, state["params"])

            def add(total, one):
                params = jax.tree.map(jax.lax.with_sharding_constraint, state["params"], at_rest)
                loss, grads = grads_of(params, one, total[1])
                return (total[0] + loss, grads), None

            (loss, grads), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    tokens = jax.ShapeDtypeStruct((s.accum, s.batch // s.accum, s.seq), jnp.int32)
    state = jax.eval_shape(create_state)
    wanted = pins(state, sizes, zero)
    names = jax.tree.map_with_path(lambda path, _: "state/params/" + _path(path), state["params"])
    at_rest = jax.tree.map(lambda name: NamedSharding(mesh, wanted[name]), names)
    return train_step, state, {"inputs": tokens, "targets": tokens}, wanted


# ---- the layout


def _path(path) -> str:
    """Of a leaf, as the planner names it."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def pins(state, mesh: Mapping[str, int], zero: int) -> dict[str, P]:
    """Layouts of the state and the batch: tensor-parallel dims over "tensor", the state over "fsdp" as far as ZeRO of that level does.

    Args: of `build`.
    """
    found: dict[str, P] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        keys = _path(path).split("/")
        dims: list = [None] * leaf.ndim
        if leaf.ndim and (at := TENSOR.get(keys[-1])) is not None and mesh["tensor"] > 1 and leaf.shape[at] % mesh["tensor"] == 0:
            dims[at] = "tensor"
        axes = ("fsdp",) if zero == 3 else ("data", "fsdp") if zero and keys[0] == "opt" else ()
        axes = tuple(a for a in axes if mesh[a] > 1)
        n = math.prod(mesh[a] for a in axes)
        free = [d for d in range(leaf.ndim) if dims[d] is None and leaf.shape[d] % n == 0]
        if n > 1 and free and leaf.size > 1 << 14:
            dims[max(free, key=lambda d: (leaf.shape[d], -d))] = axes if len(axes) > 1 else axes[0]
        found["state/" + "/".join(keys)] = P(*dims)
    rows = tuple(a for a in ("data", "fsdp") if mesh[a] > 1)
    return found | {"batch/**": P(None, rows or None)}
