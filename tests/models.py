"""The examples at their tiny sizes, by name: `MODELS[name]()` gives `create_state, train_step, batches`, plain functions."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

NAMES = ("digits_cnn", "dlrm", "face_softmax", "gpt", "hybrid_mlp", "llama", "moe")


def _builder(name: str) -> Callable:
    def build(config: str = "TINY"):
        module = importlib.import_module(name)
        return module.build(getattr(module, config))

    return build


MODELS: dict[str, Callable] = {name: _builder(name) for name in NAMES}


def relu_loss(weights, x):
    """The mean square of what a net of plain layers makes of bfloat16 activations, parameters in float32."""
    for w in weights:
        x = jax.nn.relu(x @ w.astype(jnp.bfloat16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def relu_step(params, x):
    """One step of gradient descent on that."""
    return [p - 0.1 * g for p, g in zip(params, jax.grad(relu_loss)(params, x), strict=True)]


def loss_of(out):
    """The loss in what a train step returned beside its state: itself, or the entry called `loss`."""
    return out["loss"] if isinstance(out, dict) else out
