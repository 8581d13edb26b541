"""Drawn graphs of a few ops on one device each: seconds of their kernels and bytes of memory, predicted over those of XLA for GPU.

    python benchmarks/drawn_kernels.py --seeds 0:60              products, elementwise work, casts, reductions: results alone
    python benchmarks/drawn_kernels.py --seeds 0:60 --gradients  with the gradients of the weights

Which op is part of which kernel, and what is written between kernels, is all that these programs are about: the batch is sharded over
8 GPUs, weights are whole, and nothing but scalars and gradients is sent. Needs "shardplan[gpu-check]", no GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(Path(__file__).parent.parent)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AbstractMesh, AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardplan  # noqa: E402
from shardplan.xla.hlo import schedule  # noqa: E402

TARGET = "h100:8"
ROWS, WIDTH, WEIGHTS = 1 << 18, 512, 3
F32, BF16 = jnp.float32, jnp.bfloat16


def normalized(x):
    """Layer norm without parameters, of rows."""
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def scaled_to_one(x):
    """Root mean square norm of rows, in 32 bits."""
    y = x.astype(F32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


UNARY: dict[str, Callable] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "exp": lambda x: jnp.exp(jnp.minimum(x, 1)),
    "square": jnp.square,
    "scale": lambda x: x * 0.3,
    "clip": lambda x: jnp.clip(x, -1, 1),
    "mask": lambda x: jnp.where(x > 0.5, x, -1.0).astype(x.dtype),
    "softmax": jax.nn.softmax,
    "norm": normalized,
    "rms": scaled_to_one,
    "less its largest": lambda x: x - x.max(-1, keepdims=True),
    "less its column's mean": lambda x: x - x.mean(0).astype(x.dtype),
    "to 32 bits": lambda x: x.astype(F32),
    "to 16 bits": lambda x: x.astype(BF16),
    "halves swapped": lambda x: jnp.concatenate([x[:, WIDTH // 2 :], x[:, : WIDTH // 2]], 1),
    "heads transposed": lambda x: x.reshape(-1, 8, WIDTH // 8).swapaxes(1, 2).reshape(x.shape),
}
BINARY: dict[str, Callable] = {
    "add": lambda x, y: x + y.astype(x.dtype),
    "mul": lambda x, y: x * y.astype(x.dtype),
    "max": lambda x, y: jnp.maximum(x, y.astype(x.dtype)),
    "where": lambda x, y: jnp.where(y > 0, x, 0).astype(x.dtype),
}
PRODUCT, BIAS = "product", "bias"


class Drawn(NamedTuple):
    """A graph: its ops, each with the numbers of the values that it reads (0 is the batch, n what op n makes), and a dtype."""

    ops: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: type

    def __str__(self) -> str:
        ops = (f"{name}({','.join(map(str, reads))})" for name, reads in self.ops)
        return f"{jnp.dtype(self.dtype).name}: {' '.join(ops)}"

    def apply(self, weights, x):
        """What the last op makes of a batch [rows, width]."""
        values, products = [x], 0
        for name, reads in self.ops:
            some = [values[n] for n in reads]
            if name == PRODUCT:
                values.append(some[0].astype(self.dtype) @ weights["products"][products % WEIGHTS].astype(self.dtype))
                products += 1
            elif name == BIAS:
                values.append(some[0] + weights["bias"].astype(some[0].dtype))
            else:
                values.append((BINARY if len(some) == 2 else UNARY)[name](*some))
        return values[-1]


def draw(seed: int, gradients: bool) -> Drawn:
    """The graph of a seed, of 3 to 8 ops; for gradients it starts with a product, so that there is something to differentiate."""
    pick = random.Random(seed)
    ops: list[tuple[str, tuple[int, ...]]] = [(PRODUCT, (0,))] if gradients else []
    for n in range(len(ops), pick.randint(3, 8)):
        if n > 1 and pick.random() < 0.35:
            ops.append((pick.choice([*BINARY]), (pick.randrange(n + 1), pick.randrange(n + 1))))
        else:
            ops.append((pick.choice([*UNARY, BIAS, *[PRODUCT] * 4]), (n if pick.random() < 0.75 else pick.randrange(n + 1),)))
    return Drawn(tuple(ops), pick.choice([F32, BF16, BF16]))


def step_of(drawn: Drawn, gradients: bool) -> Callable:
    """A step (weights, x) -> weights: of gradient descent, or with the loss subtracted from the bias."""

    def loss(weights, x):
        return (drawn.apply(weights, x).astype(F32) ** 2).mean()

    def step(weights, x):
        if gradients:
            return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, jax.grad(loss)(weights, x))
        return weights | {"bias": weights["bias"] - 1e-3 * loss(weights, x)}

    return step


def measured(drawn: Drawn, gradients: bool) -> tuple[float, float] | None:
    """Compute seconds and bytes of memory, predicted over emitted; None where the step computes nothing.

    Raises:
        RuntimeError: XLA does not compile the step.
    """
    shaped = partial(jax.ShapeDtypeStruct, dtype=F32)
    weights = {"products": [shaped((WIDTH, WIDTH))] * WEIGHTS, "bias": shaped((WIDTH,))}
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    auto = shardplan.auto(
        mesh,
        cluster=TARGET.partition(":")[0],
        in_shardings=(jax.tree.map(lambda _: P(), weights), P("data")),
        donate_argnums=0,
        compiler_options=None,
        memory="disable",
    )
    plan = auto(step_of(drawn, gradients)).plan(weights, jax.ShapeDtypeStruct((ROWS, WIDTH), drawn.dtype))
    done = plan.check(TARGET).compiled
    if not done.ok:
        raise RuntimeError(done.error)
    emitted = schedule.seconds(done, shardplan.Cluster.preset(TARGET.partition(":")[0]))
    if not emitted.compute_s:
        return None
    return plan.seconds["compute"] / emitted.compute_s, plan.memory().peak / done.memory.peak_bytes


def rows(seeds: range, gradients: bool) -> Iterator[tuple[float, float]]:
    """Prints a line per seed, and yields its figures; graphs whose results read no batch, or have no gradient, are left out."""
    for seed in seeds:
        drawn = draw(seed, gradients)
        if found := measured(drawn, gradients):
            print(f"{seed:5} {found[0]:8.3f} {found[1]:8.3f}  {drawn}", flush=True)
            yield found


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="first:end")
    parser.add_argument("--gradients", action="store_true")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    print(f"{'seed':>5} {'compute':>8} {'peak':>8}  predicted over emitted")
    found = [*rows(range(*map(int, options.seeds.split(":"))), options.gradients)]
    for name, figures in zip(("compute", "peak"), zip(*found, strict=True), strict=True):
        off = sorted(abs(x - 1) for x in figures)
        middle, most = statistics.median(off), off[int(0.95 * len(off))]
        print(f"{name:8} off by: median {middle:.2%}, 95th percentile {most:.2%}, worst {off[-1]:.2%}")


if __name__ == "__main__":
    main()
