"""Train steps of models that others published as Python packages: each imported by name, built from its own configuration.

`MODELS[name](small)` gives a `Program`: at full width, fewer layers where they repeat, with the computation in bfloat16 where the model
offers it; or small and in float32. Weights are drawn, never loaded. The packages are those of the extra "public-models".
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Program(NamedTuple):
    """A train step `step(state, batch)`, and functions that make both from a key."""

    step: Callable
    create: Callable
    batch: Callable

    def shapes(self) -> tuple[Any, Any]:
        return jax.eval_shape(self.create, jax.random.key(0)), jax.eval_shape(self.batch, jax.random.key(0))


def either(small: bool, sizes: dict, full: dict) -> dict:
    """Sizes of a configuration."""
    return sizes if small else full


def ints(bound: int, *shape: int) -> Callable:
    return lambda key: jax.random.randint(key, shape, 0, bound)


def floats(*shape: int) -> Callable:
    return lambda key: jax.random.normal(key, shape)


def drawn(entries: dict[str, Callable]) -> Callable:
    """A batch, every entry from a key of its own."""
    return lambda key: {name: make(jax.random.fold_in(key, n)) for n, (name, make) in enumerate(entries.items())}


def program(init: Callable, loss: Callable, batch: dict[str, Callable], rest: Callable = lambda params: (params, {})) -> Program:
    """A step of clipped AdamW.

    Args:
        init: key -> what the model is made with.
        loss: (params, rest, batch, key) -> (loss, rest), rest being what has no gradient: statistics, frozen weights.
        batch: name -> key -> array.
        rest: splits what `init` gives into params and rest.
    """
    # AdamW divides gradients that are zero but for rounding by eps: a large one, so that steps can be compared.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-3))

    def create(key):
        params, others = rest(init(key))
        return {"params": params, "opt": optimizer.init(params), "rest": others, "key": key}

    def step(state, batch):
        key, dropout = jax.random.split(state["key"])
        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], state["rest"], batch, dropout)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "rest": others, "key": key}, value

    return Program(step, create, drawn(batch))


def transformers_model(name: str, config, small: bool, input_shape: tuple[int, ...] | None = None):
    """A Flax model of transformers without weights, and its `init`."""
    import transformers

    shape = {} if input_shape is None else {"input_shape": input_shape}
    model = getattr(transformers, name)(config, _do_init=False, dtype=jnp.float32 if small else jnp.bfloat16, **shape)
    return model, lambda key: model.init_weights(key, model.input_shape)


def next_token(logits, tokens):
    """The causal loss as transformers' examples write it."""
    return cross_entropy(logits[:, :-1].astype(jnp.float32), tokens[:, 1:]).mean()


def causal(name: str, config, small: bool, rows: int, length: int) -> Program:
    model, init = transformers_model(name, config, small)

    def loss(params, rest, batch, key):
        logits = model(batch["tokens"], params=params, dropout_rng=key, train=True).logits
        return next_token(logits, batch["tokens"]), rest

    return program(init, loss, {"tokens": ints(config.vocab_size, rows, length)})


def gpt2(small: bool) -> Program:
    from transformers import GPT2Config

    sizes = either(small, dict(n_embd=64, n_head=8, vocab_size=160, n_positions=32), {})
    return causal("FlaxGPT2LMHeadModel", GPT2Config(n_layer=2, **sizes), small, *((16, 32) if small else (32, 1024)))


def bloom(small: bool) -> Program:
    from transformers import BloomConfig

    sizes = either(small, dict(hidden_size=64, n_head=8, vocab_size=160), dict(hidden_size=1024, n_head=16, vocab_size=250880))
    return causal("FlaxBloomForCausalLM", BloomConfig(n_layer=2, **sizes), small, *((16, 32) if small else (16, 1024)))


def gemma(small: bool) -> Program:
    from transformers import GemmaConfig

    sizes = either(
        small,
        dict(hidden_size=64, intermediate_size=128, num_attention_heads=8, head_dim=8, vocab_size=160),
        dict(hidden_size=2048, intermediate_size=16384, num_attention_heads=8, head_dim=256, vocab_size=256000),
    )
    config = GemmaConfig(
        num_hidden_layers=2, num_key_value_heads=1, max_position_embeddings=1024, hidden_activation="gelu_pytorch_tanh", **sizes
    )
    return causal("FlaxGemmaForCausalLM", config, small, *((16, 32) if small else (16, 1024)))


def llama_lora(small: bool) -> Program:
    """Llama whose weights are frozen; products of two low-rank matrices are added to those of queries and values."""
    from transformers import LlamaConfig

    sizes = either(
        small,
        dict(hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8, vocab_size=160),
        dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32, vocab_size=32000),
    )
    config = LlamaConfig(num_hidden_layers=2, max_position_embeddings=2048, **sizes)
    model, init = transformers_model("FlaxLlamaForCausalLM", config, small)
    rank = 8 if small else 16

    def adapted(path) -> bool:
        return any(k.key in ("q_proj", "v_proj") for k in path)

    def split(params):
        key = jax.random.key(1)

        def adapter(path, w):
            return (
                {"a": 0.01 * jax.random.normal(key, (w.shape[0], rank)), "b": jnp.zeros((rank, w.shape[1]))} if adapted(path) else None
            )

        return jax.tree_util.tree_map_with_path(adapter, params), params

    def loss(lora, params, batch, key):
        merged = jax.tree_util.tree_map_with_path(
            lambda path, w, low: w + low["a"] @ low["b"] if adapted(path) else w, params, lora, is_leaf=lambda x: x is None
        )
        logits = model(batch["tokens"], params=merged, dropout_rng=key, train=True).logits
        return next_token(logits, batch["tokens"]), params

    rows, length = (16, 32) if small else (16, 2048)
    return program(init, loss, {"tokens": ints(config.vocab_size, rows, length)}, split)


def bert(small: bool) -> Program:
    from transformers import BertConfig

    sizes = (
        dict(hidden_size=64, num_attention_heads=8, intermediate_size=128, vocab_size=160, max_position_embeddings=32) if small else {}
    )
    config = BertConfig(num_hidden_layers=2, **sizes)
    model, init = transformers_model("FlaxBertForMaskedLM", config, small)

    def loss(params, rest, batch, key):
        inputs = jnp.where(batch["mask"] > 0, batch["tokens"], 3)
        logits = model(inputs, attention_mask=batch["attended"], params=params, dropout_rng=key, train=True).logits
        masked = batch["mask"] == 0
        return (cross_entropy(logits.astype(jnp.float32), batch["tokens"]) * masked).sum() / masked.sum(), rest

    shape = (16, 32) if small else (64, 512)
    tokens, attended = ints(config.vocab_size, *shape), lambda key: jnp.ones(shape, jnp.int32)
    return program(init, loss, {"tokens": tokens, "mask": ints(7, *shape), "attended": attended})


def encoder_decoder(name: str, config, small: bool, rows: int, length: int, targets: int) -> Program:
    """Translation: teacher forcing, padded targets left out of the loss."""
    model, init = transformers_model(name, config, small)

    def loss(params, rest, batch, key):
        targets = batch["targets"]
        start = jnp.full_like(targets[:, :1], config.decoder_start_token_id or 0)
        shifted = jnp.concatenate([start, targets[:, :-1]], axis=1)
        logits = model(batch["tokens"], decoder_input_ids=shifted, params=params, dropout_rng=key, train=True).logits
        used = targets != config.pad_token_id
        return (cross_entropy(logits.astype(jnp.float32), targets) * used).sum() / used.sum(), rest

    vocab = config.vocab_size
    return program(init, loss, {"tokens": ints(vocab, rows, length), "targets": ints(vocab, rows, targets)})


def t5(small: bool) -> Program:
    from transformers import T5Config
    from transformers.models.t5 import modeling_flax_t5

    def clip(x, low=None, high=None, a_max=None):  # jax 0.10 has no `a_max` any more
        return jnp.clip(x, low, high if a_max is None else a_max)

    modeling_flax_t5.jnp = SimpleNamespace(**vars(jnp) | {"clip": clip})
    sizes = either(
        small, dict(d_model=64, d_kv=8, d_ff=128, num_heads=8, vocab_size=160), dict(d_model=768, d_kv=64, d_ff=3072, num_heads=12)
    )
    config = T5Config(num_layers=2, num_decoder_layers=2, decoder_start_token_id=0, **sizes)
    return encoder_decoder("FlaxT5ForConditionalGeneration", config, small, *((16, 32, 16) if small else (64, 512, 128)))


def wmt(small: bool) -> Program:
    """Marian, the transformer of arXiv:1706.03762, as for WMT's languages."""
    from transformers import MarianConfig

    widths = either(
        small,
        dict(d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=160, pad_token_id=159),
        dict(d_model=512, encoder_ffn_dim=2048, decoder_ffn_dim=2048, vocab_size=58104, pad_token_id=58103),
    )
    config = MarianConfig(
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        max_position_embeddings=256,
        decoder_start_token_id=widths["pad_token_id"],
        **widths,
    )
    return encoder_decoder("FlaxMarianMTModel", config, small, *((16, 32, 16) if small else (64, 256, 256)))


def whisper(small: bool) -> Program:
    from transformers import WhisperConfig

    sizes = either(
        small,
        dict(
            d_model=64,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            vocab_size=160,
            num_mel_bins=16,
            max_source_positions=24,
            max_target_positions=16,
            pad_token_id=159,
            bos_token_id=158,
            eos_token_id=157,
            decoder_start_token_id=156,
        ),
        dict(d_model=768, encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072),
    )
    config = WhisperConfig(encoder_layers=2, decoder_layers=2, **sizes)
    frames, words, rows = (48, 16, 16) if small else (3000, 448, 32)
    shape = (1, config.num_mel_bins, frames)
    model, init = transformers_model("FlaxWhisperForConditionalGeneration", config, small, shape)

    def loss(params, rest, batch, key):
        logits = model(batch["sound"], batch["words"], params=params, dropout_rng=key, train=True).logits
        return next_token(logits, batch["words"]), rest

    return program(init, loss, {"sound": floats(rows, *shape[1:]), "words": ints(config.vocab_size, rows, words)})


def clip(small: bool) -> Program:
    from transformers import CLIPConfig

    text = either(
        small,
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=8,
            vocab_size=160,
            max_position_embeddings=16,
            projection_dim=32,
            eos_token_id=159,
        ),
        {},
    )
    vision = (
        dict(hidden_size=64, intermediate_size=128, num_attention_heads=8, image_size=32, patch_size=8, projection_dim=32)
        if small
        else {}
    )
    config = CLIPConfig(text | {"num_hidden_layers": 2}, vision | {"num_hidden_layers": 2}, projection_dim=32 if small else 512)
    words, side, rows = (16, 32, 16) if small else (77, 224, 512)
    model, init = transformers_model("FlaxCLIPModel", config, small, ((1, words), (1, side, side, 3)))

    def loss(params, rest, batch, key):
        out = model(batch["tokens"], batch["images"], params=params, dropout_rng=key, train=True)
        logits, same = out.logits_per_text.astype(jnp.float32), jnp.arange(rows)
        return (cross_entropy(logits, same).mean() + cross_entropy(logits.T, same).mean()) / 2, rest

    vocab = config.text_config.vocab_size
    return program(init, loss, {"tokens": ints(vocab, rows, words), "images": floats(rows, 3, side, side)})


def vit(small: bool) -> Program:
    from transformers import ViTConfig

    sizes = either(small, dict(hidden_size=64, num_attention_heads=8, intermediate_size=128, image_size=32, patch_size=8), {})
    config = ViTConfig(num_hidden_layers=2, num_labels=16 if small else 1000, **sizes)
    model, init = transformers_model("FlaxViTForImageClassification", config, small)

    def loss(params, rest, batch, key):
        logits = model(batch["images"], params=params, dropout_rng=key, train=True).logits
        return cross_entropy(logits.astype(jnp.float32), batch["labels"]).mean(), rest

    rows, side = (16, 32) if small else (256, 224)
    return program(init, loss, {"images": floats(rows, 3, side, side), "labels": ints(config.num_labels, rows)})


def resnet(small: bool) -> Program:
    from transformers import ResNetConfig

    # Small with a smooth activation: where relu meets a 0, rounding alone decides whether a gradient passes.
    sizes = either(small, dict(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], hidden_act="gelu"), {})
    config = ResNetConfig(num_labels=16 if small else 1000, **sizes)
    model, init = transformers_model("FlaxResNetForImageClassification", config, small)

    def loss(params, stats, batch, key):
        out, stats = model(batch["images"], params={"params": params, "batch_stats": stats}, train=True)
        return cross_entropy(out.logits.astype(jnp.float32), batch["labels"]).mean(), stats["batch_stats"]

    rows, side = (16, 32) if small else (256, 224)
    entries = {"images": floats(rows, 3, side, side), "labels": ints(config.num_labels, rows)}
    return program(init, loss, entries, lambda made: (made["params"], made["batch_stats"]))


def linen(model, loss: Callable, batch: dict[str, Callable], arguments: Callable) -> Program:
    """A flax.linen module, initialised with `arguments(batch)`."""
    shapes = jax.eval_shape(drawn(batch), jax.random.key(0))
    zeros = arguments(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
    return program(lambda key: model.init(key, *zeros)["params"], loss, batch)


def seq2seq(small: bool) -> Program:
    """flax's own LSTMs: an encoder, and a decoder that starts from its carry."""
    from flax import linen as nn

    width, vocab, rows, length = (64, 160, 16, 12) if small else (1024, 32768, 256, 64)

    class Seq2seq(nn.Module):
        @nn.compact
        def __call__(self, tokens, targets):
            embed = nn.Embed(vocab, width)
            carry, _ = nn.RNN(nn.OptimizedLSTMCell(width), return_carry=True)(embed(tokens))
            return nn.Dense(vocab)(nn.RNN(nn.OptimizedLSTMCell(width))(embed(targets), initial_carry=carry))

    model = Seq2seq()

    def loss(params, rest, batch, key):
        logits = model.apply({"params": params}, batch["tokens"], batch["targets"])
        return next_token(logits, batch["targets"]), rest

    entries = {"tokens": ints(vocab, rows, length), "targets": ints(vocab, rows, length)}
    return linen(model, loss, entries, lambda b: (b["tokens"], b["targets"]))


def graph(small: bool) -> Program:
    """jraph's graph network, as for OGB's molecules: messages along edges, summed at nodes, then over each graph."""
    import jraph
    from flax import linen as nn

    width, graphs, nodes, edges = (32, 8, 64, 128) if small else (512, 1024, 1 << 15, 1 << 17)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, g):
            def mlp(name):
                layers = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(width)], name=name)
                return jraph.concatenated_args(layers)

            g = jraph.GraphMapFeatures(nn.Dense(width), nn.Dense(width), nn.Dense(width))(g)
            for n in range(3):
                update = {f"update_{part}_fn": mlp(f"{part}{n}") for part in ("edge", "node", "global")}
                g = jraph.GraphNetwork(**update)(g)
            return nn.Dense(128)(g.globals)

    model = Net()

    def of(b):
        counts = jnp.full(graphs, nodes // graphs), jnp.full(graphs, edges // graphs)
        return jraph.GraphsTuple(b["nodes"], b["edges"], b["receivers"], b["senders"], b["globals"], *counts)

    def loss(params, rest, batch, key):
        logits = model.apply({"params": params}, of(batch))
        return optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).mean(), rest

    entries = {
        "nodes": floats(nodes, 16),
        "edges": floats(edges, 16),
        "globals": floats(graphs, 16),
        "receivers": ints(nodes, edges),
        "senders": ints(nodes, edges),
        "labels": ints(2, graphs, 128),
    }
    return linen(model, loss, entries, lambda b: (of(b),))


def ppo(small: bool) -> Program:
    """brax's clipped objective, with advantages by a scan over time."""
    from brax.training.agents.ppo import losses, networks
    from brax.training.types import Transition

    steps, rows, seen, acts, hidden = (8, 16, 16, 8, (64, 64)) if small else (32, 8192, 256, 32, (1024, 1024, 1024))
    nets = networks.make_ppo_networks(seen, acts, policy_hidden_layer_sizes=hidden, value_hidden_layer_sizes=hidden)

    def init(key):
        one, two = jax.random.split(key)
        return losses.PPONetworkParams(policy=nets.policy_network.init(one), value=nets.value_network.init(two))

    def loss(params, rest, batch, key):
        extras = {
            "state_extras": {"truncation": batch["truncation"].astype(jnp.float32)},
            "policy_extras": {
                "raw_action": batch["actions"],
                "log_prob": batch["log_prob"],
                "distribution_params": jnp.zeros((rows, steps, 2 * acts)),
            },
        }
        discount = (batch["discount"] > 0).astype(jnp.float32)
        data = Transition(batch["seen"], batch["actions"], batch["reward"], discount, batch["seen"], extras)
        return losses.compute_ppo_loss(params, None, data, key, nets)[0], rest

    entries = {
        "seen": floats(rows, steps, seen),
        "actions": floats(rows, steps, acts),
        "reward": floats(rows, steps),
        "log_prob": floats(rows, steps),
        "truncation": ints(2, rows, steps),
        "discount": ints(9, rows, steps),
    }
    return program(init, loss, entries)


def noise(model, side: int, channels: int, rows: int, tail: Callable, more: dict[str, Callable]) -> Program:
    """A network that predicts the noise in an image, of arguments (image, time, ...)."""

    def loss(params, rest, batch, key):
        mixed = jnp.sqrt(0.7) * batch["images"] + jnp.sqrt(0.3) * batch["noise"]
        got = model.apply({"params": params}, *tail(batch | {"images": mixed}))
        got = getattr(got, "sample", got)
        return jnp.mean((got.astype(jnp.float32).reshape(mixed.shape) - batch["noise"]) ** 2), rest

    shape = (rows, *((channels, side, side) if channels == 4 else (side, side, channels)))
    entries = {"images": floats(*shape), "noise": floats(*shape), "time": ints(1000, rows)} | more
    return linen(model, loss, entries, tail)


def dit(small: bool) -> Program:
    from flaxdiff.models.simple_dit import SimpleDiT

    width, heads, side, patch, rows = (64, 8, 16, 4, 16) if small else (1152, 16, 256, 16, 128)
    dtype = jnp.float32 if small else jnp.bfloat16
    model = SimpleDiT(3, patch, width, num_layers=2, num_heads=heads, dtype=dtype)
    text = {"text": floats(rows, 8 if small else 77, 64 if small else 768)}
    return noise(model, side, 3, rows, lambda b: (b["images"], b["time"].astype(jnp.float32), b["text"]), text)


def unet(small: bool) -> Program:
    """Stable Diffusion's U-Net, one block less and one layer per block."""
    from diffusers import FlaxUNet2DConditionModel

    widths, heads, side, rows, context = ((32, 64), 8, 16, 16, 64) if small else ((320, 640, 1280), 8, 64, 64, 768)
    last = len(widths) - 1
    model = FlaxUNet2DConditionModel(
        sample_size=side,
        block_out_channels=widths,
        layers_per_block=1,
        attention_head_dim=heads,
        cross_attention_dim=context,
        down_block_types=("CrossAttnDownBlock2D",) * last + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * last,
        dtype=jnp.float32 if small else jnp.bfloat16,
    )
    text = {"text": floats(rows, 8 if small else 77, context)}
    return noise(model, side, 4, rows, lambda b: (b["images"], b["time"], b["text"]), text)


def mixer(small: bool) -> Program:
    from jax_models.models.mlp_mixer import MLPMixer

    patch, width, channels, tokens, classes, side, rows = (
        (8, 64, 128, 32, 16, 32, 16) if small else (16, 768, 3072, 384, 1000, 224, 256)
    )
    model = MLPMixer(patch, 2, width, channels, tokens, 0.1)
    head = {"head": floats(width, classes)}

    def loss(params, rest, batch, key):
        x = model.apply({"params": params}, batch["images"], False, rngs={"dropout": key}).mean(1)
        return cross_entropy(x @ batch["head"], batch["labels"]).mean(), rest

    entries = {"images": floats(rows, side, side, 3), "labels": ints(classes, rows)} | head
    return linen(model, loss, entries, lambda b: (b["images"], True))


def mamba(small: bool) -> Program:
    from flax import nnx
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    sizes = either(small, dict(hidden_size=64, state_size=16, head_dim=16, chunk_size=8, vocab_size=160), dict(vocab_size=50304))
    config = Mamba2Config(num_hidden_layers=2, **sizes)
    definition = nnx.graphdef(nnx.eval_shape(lambda: Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))))
    rows, length = (16, 32) if small else (32, 1024)

    def init(key):
        return nnx.state(Mamba2ForCausalLM(config, rngs=nnx.Rngs(key)), nnx.Param)

    def loss(params, rest, batch, key):
        return nnx.merge(definition, params)(batch["tokens"], labels=batch["tokens"])["loss"], rest

    return program(init, loss, {"tokens": ints(config.vocab_size, rows, length)})


def fp8(small: bool) -> Program:
    """flax's layers with products in 8-bit floats; their scales are written over by their gradients, as flax's TrainState does."""
    from flax import linen as nn
    from flax.training.train_state import TrainState

    width, rows, layers = (64, 64, 3) if small else (4096, 16384, 4)

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(layers):
                x = nn.relu(nn.Dense(width, dot_general_cls=nn.Fp8DotGeneralOp, dtype=x.dtype)(x))
            return x

    model, optimizer = Mlp(), optax.adamw(1e-3, eps=1e-3)
    dtype = jnp.float32 if small else jnp.bfloat16

    def create(key):
        return TrainState.create(apply_fn=model.apply, params=model.init(key, jnp.zeros((8, width), dtype)), tx=optimizer)

    def step(state, batch):
        def loss(params):
            return jnp.mean((model.apply(params, batch["x"].astype(dtype)).astype(jnp.float32) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return Program(step, create, drawn({"x": floats(rows, width), "y": floats(rows, width)}))


def ode(small: bool) -> Program:
    """diffrax: a network is the derivative of the state; adaptive steps, gradients by recursive checkpoints."""
    import diffrax
    import equinox as eqx

    size, width, rows, times = (16, 64, 16, 5) if small else (64, 2048, 4096, 17)
    saved = jnp.linspace(0.0, 1.0, times)

    def make(key):
        return eqx.nn.MLP(size, size, width, 2, activation=jax.nn.softplus, final_activation=jnp.tanh, key=key)

    _, static = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss(params, rest, batch, key):
        field = eqx.combine(params, static)

        def solve(start):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                0.0,
                1.0,
                0.05,
                start,
                saveat=diffrax.SaveAt(ts=saved),
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
                max_steps=64,
            ).ys

        return jnp.mean((jax.vmap(solve)(batch["paths"][:, 0]) - batch["paths"]) ** 2), rest

    return program(lambda key: eqx.filter(make(key), eqx.is_array), loss, {"paths": floats(rows, times, size)})


MODELS: dict[str, Callable[[bool], Program]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        gpt2,
        bert,
        t5,
        wmt,
        whisper,
        clip,
        vit,
        resnet,
        llama_lora,
        bloom,
        gemma,
        seq2seq,
        graph,
        ppo,
        dit,
        unet,
        mixer,
        mamba,
        fp8,
        ode,
    )
}
