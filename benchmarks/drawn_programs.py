"""Training steps drawn from a seed, with a mesh and a cluster: shapes only, nothing is allocated.

program = drawn_programs.draw(7)              the same in every process
program.step, program.state, program.batch    a step and trees of `jax.ShapeDtypeStruct`
program.about, program.made                   a line that describes it, and the ingredients that were drawn
drawn_programs.draw(7, "tiny")                the same kind of program, of a size that a CPU runs; "small" compiles in seconds
program.create_state(key), program.create_batch(key)    arrays of these shapes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import drawn_convolutions as convolutions
import jax
import jax.numpy as jnp
import optax
from drawn_layers import Draw, Layer, Shapes, attention, experts, mlp, norm, recurrence, residual, sequence_of
from drawn_training import Batch, Model, trained

PLACES = (
    ("h100:8", (8,)), ("h100:8", (2, 4)), ("h100:8", (4, 2)), ("h100:8", (2, 2, 2)), ("h200:8", (2, 4)), ("a100:8", (2, 4)),
    ("a100:8", (8,)), ("b200:8", (2, 4)), ("h100:4", (2, 2)), ("h100:2x8", (2, 8)), ("h100:2x8", (4, 4)), ("h200:2x8", (16,)),
    ("a100:2x8", (2, 8)), ("h100:4x8", (4, 8)), ("h100:2x8", (2, 2, 4)), ("h100:8x8", (8, 8)), ("h200:8x8", (4, 16)),
)  # fmt: skip
"""Clusters and meshes on them."""
AXES = {1: ("data",), 2: ("data", "model"), 3: ("data", "model", "expert")}


@dataclass(frozen=True)
class Drawn:
    """A training step, and where it is planned.

    Attributes:
        step: (state, batch) -> (state, loss).
        state, batch: shapes.
        made: its ingredients, each once.
        create_state: a key to the state's arrays.
        create_batch: a key to a batch.
    """

    seed: int
    family: str
    step: Callable = field(repr=False)
    state: Any = field(repr=False)
    batch: Any = field(repr=False)
    made: tuple[str, ...]
    target: str
    mesh_shape: tuple[int, ...]
    create_state: Callable = field(repr=False)
    create_batch: Callable = field(repr=False)

    @property
    def mesh(self) -> jax.sharding.AbstractMesh:
        types = (jax.sharding.AxisType.Auto,) * len(self.mesh_shape)
        return jax.sharding.AbstractMesh(self.mesh_shape, AXES[len(self.mesh_shape)], axis_types=types)

    @property
    def parameters(self) -> int:
        return sum(math.prod(x.shape) for x in jax.tree.leaves((self.state["params"], self.state.get("frozen"))))

    @property
    def place(self) -> str:
        return f"{self.target} {'x'.join(map(str, self.mesh_shape))}"

    @property
    def about(self) -> str:
        return f"{self.seed} {self.family}, {_count(self.parameters)} parameters on {self.place}: {', '.join(self.made)}"


def _count(n: float) -> str:
    return next(f"{n / size:.3g} {unit}" for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")) if n >= size)


SIZES = ("full", "small", "tiny", "exact")
"""As the paper has them; compiled in seconds; run by a CPU; the same in float32."""


def draw(seed: int, size: str = "full") -> Drawn:
    """The program of a seed, of one of `SIZES`."""
    d = Draw(seed, size)
    target, mesh_shape, family, (step, create_state, create_batch) = _drawn(d)
    state, batch = (jax.eval_shape(create, jax.random.key(0)) for create in (create_state, create_batch))
    made = tuple(dict.fromkeys(d.made))
    return Drawn(seed, family, step, state, batch, made, target, mesh_shape, create_state, create_batch)


def ingredients(seed: int, size: str = "full") -> tuple[str, ...]:
    """`draw(seed, size).made`, without tracing anything."""
    d = Draw(seed, size)
    _drawn(d)
    return tuple(dict.fromkeys(d.made))


def _drawn(d: Draw):
    target, mesh_shape = d.one_of(*PLACES)
    family, devices = d.one_of(*("sequence",) * 6, "images", "images", "tables", "classes"), math.prod(mesh_shape)
    model = {"sequence": sequence, "images": images, "tables": tables, "classes": classes}[family](d, devices)
    return target, mesh_shape, family, trained(d, model, devices)


# ---- sizes


def between(d: Draw, low: float, high: float) -> float:
    """A number drawn evenly by its logarithm."""
    return math.exp(d.sizes.uniform(math.log(low), math.log(high)))


def near(x: float, *multiples: int, d: Draw) -> int:
    """x as a multiple of one of these."""
    m = d.sizes.choice(multiples)
    return max(1, round(x / m)) * m


@dataclass(frozen=True)
class SequenceSizes:
    """Layers, width, heads, hidden, positions and examples of a sequence model, and whether its activations ask for checkpoints."""

    layers: int
    width: int
    heads: int
    hidden: int
    length: int
    examples: int
    vocab: int
    checkpoint: bool


def sequence_sizes(d: Draw, devices: int) -> SequenceSizes:
    """Of 1 M to 10 B parameters and 2 to 16 thousand positions per device."""
    parameters = between(d, 1e6, 1e8 if d.small else 1e10)
    odd = d.also("sizes that do not divide", 0.2)
    layers = round(min(48, max(2, 2 * (parameters / 1e7) ** 0.4)))
    head = d.sizes.choice((48, 80)) if odd else d.sizes.choice((64, 64, 128))
    width = max(2, min(96, round((parameters / 12 / layers) ** 0.5 / head))) * head
    if not odd and width // head > 4:
        width = width // (4 * head) * 4 * head
    layers = 2 if d.small else layers
    length = 1 << round(d.sizes.uniform(7, 9 if d.small else 11.5))
    per_device = between(d, 1 << 11, 1 << 14)
    examples = max(1, round(devices * per_device / length))
    examples = examples + 3 if odd else max(devices, 1 << round(math.log2(examples)))
    vocab = d.sizes.choice((50257, 32003, 9999)) if odd else d.sizes.choice((8192, 32768, 50304, 128256, 1024))
    checkpoint = d.chance(0.3)
    hidden = near(width * d.sizes.choice((2, 3, 4, 4, 5.3)), 16, 64, d=d)
    if d.tiny:
        width, length, layers = (2 if odd else 4) * 8, 16, 2 + layers % 2
        return SequenceSizes(layers, width, width // 8, 4 * width, length, 18 if odd else 16, 96, checkpoint)
    held = layers * examples * length / devices * (40 * width + 6 * length * width / head)
    return SequenceSizes(layers, width, width // head, hidden, length, examples, vocab, checkpoint or held > 2e10)


# ---- families


def sequence(d: Draw, devices: int) -> Model:
    """A model of sequences: what is read, blocks of layers, what is asked."""
    s = sequence_sizes(d, devices)
    crossed = d.chance(0.2)
    reads = d.ingredient("tokens", "tokens", "frames", "patches")
    parts: Shapes = {"norm": (last := norm(d, s.width)).params}
    table: Batch = {}
    embed, source = _input(d, s, reads, parts, table)
    blocks = [_block(d, s, crossed) for _ in range(1 if d.chance(0.75) else 2)]
    stack = stacked(d, blocks, s)
    parts["blocks"] = stack.params
    if crossed:
        memory = stacked(d, [_block(d, s, False)], s)
        parts["memory"] = memory.params
        parts["memory_in"] = (channels := d.sizes.choice((80, 128)), s.width)
        table["memory"] = ((s.examples, max(1, s.length // 2), channels), jnp.float32, 0)
    ask = _output(d, s, reads, parts, table)

    def loss(p, batch, dtype):
        around = {}
        if crossed:
            seen = batch["memory"].astype(dtype) @ p["memory_in"].astype(dtype)
            around["memory"] = memory(p["memory"], seen, around)
        x = embed(p, batch[source], dtype)
        x = stack(p["blocks"], x, around)
        return ask(p, last(p["norm"], x, around), batch)

    return Model(parts, loss, table)


def _input(d: Draw, s: SequenceSizes, reads: str, parts: Shapes, table: Batch):
    """(parameters, inputs, dtype) -> [b, t, width], and the name of what it reads."""
    learned = d.also("learned positions", 0.5)
    if learned:
        parts["positions"] = (s.length, s.width)

    def positioned(p, x):
        return x + p["positions"].astype(x.dtype) if learned else x

    if reads == "tokens":
        parts["embed"] = (s.vocab, s.width)
        table["inputs"] = ((s.examples, s.length), jnp.int32, s.vocab)
        return lambda p, x, dtype: positioned(p, p["embed"].astype(dtype)[x]), "inputs"
    if reads == "frames":
        channels = d.sizes.choice((80, 128, 40))
        table["frames"] = ((s.examples, s.length, channels), jnp.float32, 0)
        into = convolutions.convolution(d, 1, channels, s.width, kind="dense")
        parts["into"] = into.params
        return lambda p, x, dtype: positioned(p, into(p["into"], x.astype(dtype), {})), "frames"
    side = d.sizes.choice((8, 16)) if not d.tiny else 4
    table["patches"] = ((s.examples, s.length, side * side * 3), jnp.float32, 0)
    parts["into"] = (side * side * 3, s.width)
    return lambda p, x, dtype: positioned(p, x.astype(dtype) @ p["into"].astype(dtype)), "patches"


def _block(d: Draw, s: SequenceSizes, crossed: bool) -> Layer:
    """A mixer of positions and a network at each of them; cross attention between them."""
    after = d.also("norms after", 0.15)
    kind = d.one_of("attention", "attention", "attention", "convolution", "recurrence")
    mixer = {"convolution": convolutions.mixer, "recurrence": recurrence}
    layers = [attention(d, s.width, s.heads) if kind == "attention" else mixer[kind](d, s.width)]
    if crossed:
        layers.append(attention(d, s.width, s.heads, ("cross attention",)))
    if d.chance(0.2):
        count = d.sizes.choice((8, 16, 32)) if not d.tiny else 8
        layers.append(experts(d, s.width, max(16, s.hidden // 4), count))
    else:
        layers.append(mlp(d, s.width, s.hidden))
    return sequence_of(*(residual(norm(d, s.width), layer, after) for layer in layers))


def stacked(d: Draw, blocks: list[Layer], s: SequenceSizes) -> Layer:
    """The blocks in turns: scanned over layers, unrolled, or some unrolled and the rest scanned; with `jax.checkpoint` or not."""
    how = d.ingredient("scanned", "scanned", "unrolled", "both")
    rounds = max(1, s.layers // len(blocks))
    first = {"scanned": 0, "unrolled": min(rounds, 6)}.get(how, 1)
    rest = 0 if how == "unrolled" else max(2, rounds - first)
    one = sequence_of(*blocks)
    apply = one.apply
    if s.checkpoint:
        d.made.append("checkpoint")
        apply = jax.checkpoint(one.apply)

    def run(p, x, around):
        for n in range(first):
            x = apply(p["unrolled"][n], x, around)
        if rest:
            x, _ = jax.lax.scan(lambda x, p: (apply(p, x, around), None), x, p["scanned"])
        return x

    shapes = {"unrolled": {n: one.params for n in range(first)}} if first else {}
    if rest:
        shapes["scanned"] = jax.tree.map(lambda shape: (rest, *shape), one.params, is_leaf=lambda x: isinstance(x, tuple))
    return Layer(shapes, run)


def _output(d: Draw, s: SequenceSizes, reads: str, parts: Shapes, table: Batch):
    """(parameters, [b, t, width], batch) -> loss."""
    kinds = {
        "tokens": ("next token", "next token", "next token", "classes"),
        "frames": ("regression", "classes"),
        "patches": ("classes", "contrast"),
    }
    ask = d.ingredient(*kinds[reads])
    if ask == "next token":
        tied = d.also("tied embeddings", 0.4)
        smooth, z = d.also("label smoothing", 0.15), d.also("z loss", 0.15)
        if not tied:
            parts["head"] = (s.width, s.vocab)
        table["targets"] = ((s.examples, s.length), jnp.int32, s.vocab)

        def next_token(p, x, batch):
            logits = (x @ (p["embed"].T if tied else p["head"]).astype(x.dtype)).astype(jnp.float32)
            if smooth:
                labels = optax.smooth_labels(jax.nn.one_hot(batch["targets"], s.vocab), 0.1)
                loss = optax.softmax_cross_entropy(logits, labels)
            else:
                loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return (loss + (1e-4 * jnp.square(jax.nn.logsumexp(logits, -1)) if z else 0)).mean()

        return next_token
    if ask == "regression":
        parts["head"] = (s.width, 16)
        table["targets"] = ((s.examples, s.length, 16), jnp.float32, 0)
        huber = d.also("huber loss", 0.5)

        def regression(p, x, batch):
            found = (x @ p["head"].astype(x.dtype)).astype(jnp.float32)
            return optax.huber_loss(found, batch["targets"]).mean() if huber else jnp.square(found - batch["targets"]).mean()

        return regression
    if ask == "contrast":
        parts["head"], parts["other"] = (s.width, s.width), (64, s.width)
        table["other"] = ((s.examples, 64), jnp.float32, 0)

        def contrast(p, x, batch):
            a, b = x.mean(1) @ p["head"].astype(x.dtype), batch["other"].astype(x.dtype) @ p["other"].astype(x.dtype)
            a, b = (y * jax.lax.rsqrt(jnp.square(y).sum(-1, keepdims=True) + 1e-6) for y in (a, b))
            logits, labels = (a @ b.T).astype(jnp.float32) * 10, jnp.arange(len(a))
            return sum(optax.softmax_cross_entropy_with_integer_labels(y, labels).mean() for y in (logits, logits.T)) / 2

        return contrast
    classes_ = d.sizes.choice((1000, 10, 101)) if not d.tiny else 10
    parts["head"] = (s.width, classes_)
    table["label"] = ((s.examples,), jnp.int32, classes_)
    pooled = d.ingredient("mean over positions", "first position")

    def classified(p, x, batch):
        x = x.mean(1) if pooled.startswith("mean") else x[:, 0]
        logits = (x @ p["head"].astype(x.dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return classified


def images(d: Draw, devices: int) -> Model:
    """Convolutions over one to three dims: a classifier, or a network from images to images."""
    dims = d.one_of(1, 2, 2, 2, 3)
    odd = d.also("sizes that do not divide", 0.25)
    stages, depth = d.one_of(2, 3, 4), d.one_of(1, 2)
    first = d.sizes.choice((24, 36, 100) if odd else (32, 64, 128))
    sides = {1: (2048, 4096, 1000), 2: (64, 128, 56), 3: (16, 32, 24)}[dims]
    side = d.sizes.choice(sides)
    per_device = max(1, round(between(d, 1 << 12, 1 << 17) / side**dims))
    if d.tiny:
        first, side, per_device, stages, depth = 12 if odd else 8, {1: 32, 2: 16, 3: 8}[dims], 2, 2, 1
    examples = devices * per_device + (3 if odd else 0)
    widths, channels = tuple(min(1024, first << n) for n in range(stages)), d.one_of(1, 3, 4)
    shape = (examples, *(side,) * dims, channels)
    if d.also("images to images", 0.4):
        net = convolutions.there_and_back(d, dims, channels, widths, depth)

        def denoised(p, batch, dtype):
            return jnp.square(net(p["net"], batch["image"].astype(dtype), {}).astype(jnp.float32) - batch["noise"]).mean()

        return Model({"net": net.params}, denoised, {"image": (shape, jnp.float32, 0), "noise": (shape, jnp.float32, 0)})
    net, count = convolutions.network(d, dims, channels, widths, depth), 1000 if not d.tiny else 10
    many = d.also("several labels", 0.25)

    def classified(p, batch, dtype):
        x = net(p["net"], batch["image"].astype(dtype), {})
        logits = (x.mean(tuple(range(1, dims + 1))) @ p["head"].astype(dtype)).astype(jnp.float32)
        if many:
            return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    label = ((examples, count), jnp.float32, 0) if many else ((examples,), jnp.int32, count)
    return Model({"net": net.params, "head": (widths[-1], count)}, classified, {"image": (shape, jnp.float32, 0), "label": label})


def tables(d: Draw, devices: int) -> Model:
    """A recommender: embedding tables of many sizes, some read at several places, their products, and a network."""
    d.made.append("embedding tables")
    n, width = d.sizes.choice((3, 6, 12)), d.sizes.choice((16, 64, 128))
    largest = between(d, 1e5, 5e7) if not d.tiny else 64
    rows = (
        tuple(near(max(8, between(d, 64, largest) if k else largest), 8, 8, 1, d=d) for k in range(n)) if not d.tiny else (64, 24, 30)
    )
    several = d.one_of(1, 1, 8)
    examples = devices * (d.sizes.choice((1024, 4096)) if not d.tiny else 4)
    dense, top = 13, d.sizes.choice((256, 1024)) if not d.tiny else 32
    bottom, above = mlp(d, width, top), mlp(d, top, 2 * top)
    pairs = (len(rows) + 1) * len(rows) // 2
    parts = {"tables": {k: (r, width) for k, r in enumerate(rows)}, "into": (dense, width), "bottom": bottom.params,
             "above": above.params, "join": (pairs + width, top), "head": (top, 1)}  # fmt: skip
    batch: Batch = {f"at{k}": ((examples, several), jnp.int32, r) for k, r in enumerate(rows)}
    batch |= {"dense": ((examples, dense), jnp.float32, 0), "label": ((examples,), jnp.float32, 0)}

    def loss(p, batch, dtype):
        found = [p["tables"][k].astype(dtype)[batch[f"at{k}"]].sum(1) for k in range(len(rows))]
        x = bottom(p["bottom"], batch["dense"].astype(dtype) @ p["into"].astype(dtype), {})
        every = jnp.stack([x, *found], 1)
        products = jnp.einsum("bid,bjd->bij", every, every)
        lower = jnp.tril_indices(every.shape[1], -1)
        y = jnp.concatenate([x, products[:, *lower]], -1) @ p["join"].astype(dtype)
        logits = (above(p["above"], jax.nn.relu(y), {}) @ p["head"].astype(dtype))[:, 0].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()

    return Model(parts, loss, batch)


def classes(d: Draw, devices: int) -> Model:
    """Networks on vectors with many classes: a softmax of angles with a margin, a plain one, or a student of a frozen teacher."""
    ask = d.ingredient("huge softmax", "margin softmax", "teacher and student")
    width = d.sizes.choice((256, 1024, 2000)) if not d.tiny else 32
    count = near(between(d, 1 << 13, 1 << 21), 64, 1000, d=d) if not d.tiny else 64
    examples, depth = devices * (d.sizes.choice((64, 256, 1024)) if not d.tiny else 4), d.one_of(1, 3)
    layers = [residual(norm(d, width), mlp(d, width, 4 * width), False) for _ in range(depth)]
    net = sequence_of(*layers)
    parts: Shapes = {"net": net.params, "head": (width, count)}
    batch: Batch = {"x": ((examples, width), jnp.float32, 0), "label": ((examples,), jnp.int32, count)}
    frozen: Shapes = {}
    if ask == "teacher and student":
        d.made.append("frozen parts")
        teacher = sequence_of(residual(norm(d, width), mlp(d, width, 8 * width), False))
        frozen = {"teacher": teacher.params, "teacher_head": (width, count)}

    def loss(p, batch, dtype):
        x = batch["x"].astype(dtype)
        y = net(p["net"], x, {})
        head = p["head"].astype(dtype)
        if ask == "margin softmax":
            y, head = (a * jax.lax.rsqrt(jnp.square(a).sum(axis, keepdims=True) + 1e-6) for a, axis in ((y, -1), (head, 0)))
        logits = (y @ head).astype(jnp.float32)
        if ask == "margin softmax":
            logits = 16 * (logits - 0.3 * jax.nn.one_hot(batch["label"], count))
        if ask == "teacher and student":
            wanted = jax.nn.softmax((teacher(p["teacher"], x, {}) @ p["teacher_head"].astype(dtype)).astype(jnp.float32))
            return optax.softmax_cross_entropy(logits, wanted).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return Model(parts, loss, batch, frozen)
