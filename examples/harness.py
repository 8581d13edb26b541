"""What the examples share: the bundled novel as batches, this machine's mesh, and `run`, which plans, trains and prints."""

import ctypes
import importlib.util
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import shardplan

DATA = Path(__file__).parent / "data" / "persuasion.txt"
OUT = Path(__file__).parent.parent / "out"


def text_batches(n: int, batch: int, length: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """n batches of random windows of the novel, one token per byte: `inputs` and `targets`, both int32[batch, length]."""
    text = np.frombuffer(DATA.read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    for _ in range(n):
        starts = rng.integers(0, len(text) - length, batch)
        windows = text[starts[:, None] + np.arange(length + 1)]
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def emulate_devices(count: int = 8) -> None:
    """Where there is no accelerator, lets the CPU play `count` devices; call before anything touches a device.

    A device keeps the memory it once had. XLA's CPU client has malloc return it after every step, and glibc then gives large
    arrays back to the kernel, which clears each page anew: up to a third of a step. So malloc is set to keep it, too.
    """
    cuda_without_driver = importlib.util.find_spec("jax_plugins") and not any(Path("/dev").glob("nvidia[0-9]*"))
    if cuda_without_driver and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no array of its own mapping
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing back


def local_mesh(names: tuple[str, ...] = ("data", "model")) -> jax.sharding.Mesh:
    """All devices of this machine as a mesh of one or two axes: 8 as (2, 4), 4 as (2, 2), 1 as (1, 1)."""
    count = len(jax.devices())
    if len(names) == 1:
        return jax.make_mesh((count,), names)
    first = next(d for d in range(math.isqrt(count), 0, -1) if count % d == 0)
    return jax.make_mesh((first, count // first), names)


def loss_of(out) -> float:
    """The loss in what a train step returned beside its state: itself, or the entry called `loss`."""
    return float(out["loss"] if isinstance(out, dict) else out)


def train(step, state, batches) -> tuple[list[float], float]:
    """Runs every batch; returns the losses and the median seconds of a step, the first (it compiles) left out."""
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        state, out = step(state, batch)
        losses.append(loss_of(out))
        seconds.append(time.perf_counter() - start)
    return losses, float(np.median(seconds[1:] or seconds))


def curve(losses: list[float], width: int = 72, height: int = 10) -> str:
    """The losses as a chart of `height` lines for a terminal, each column the mean of its share of the steps."""
    columns = [float(np.mean(part)) for part in np.array_split(np.asarray(losses), min(width, len(losses)))]
    low, high = min(columns), max(columns)
    level = [round((value - low) / ((high - low) or 1) * (height * 8 - 1)) + 1 for value in columns]
    rows = []
    for row in reversed(range(height)):
        label = f"{low + (high - low) * row / max(height - 1, 1):7.3f} "
        rows.append(label + "".join(" ▁▂▃▄▅▆▇█"[min(max(v - row * 8, 0), 8)] for v in level))
    return "\n".join([*rows, " " * 8 + f"step 1 … {len(losses)}"])


def layouts(plan, rows: int = 6) -> str:
    """Where the plan puts the largest parameters: one line per shape and layout, with an example of who has it."""
    groups: dict[tuple, list[str]] = {}
    for leaf in plan.inputs:
        if leaf.kind == "parameters":
            array = f"{leaf.dtype}{list(leaf.shape)}"
            layout = str(leaf.layout) if any(leaf.layout.dims) else "replicated"
            groups.setdefault((-math.prod(leaf.shape), array, layout), []).append(leaf.path)
    lines = (f"  {array:27} {layout:40} {len(who)} x, e.g. {who[0]}" for (_, array, layout), who in sorted(groups.items()))
    return "\n".join([*lines][:rows])


def run(name: str, build, config, steps: int = 30, axes: tuple[str, ...] = ("data", "model")) -> None:
    """Plans the train step of one example for this machine, trains it so, and prints what was found."""
    emulate_devices()
    mesh = local_mesh(axes)
    create_state, train_step, batches = build(config)

    step = shardplan.auto(mesh, donate_argnums=0)(train_step)
    key = jax.random.key(0)
    plan = step.plan(jax.eval_shape(create_state, key), next(batches(1)))  # shapes are enough
    print(f"{name} on mesh {', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())}; its largest parameters:")
    print(layouts(plan))
    peak, proof = plan.memory().peak / 1e6, "optimal" if plan.status == "optimal" else f"{plan.status}, gap {plan.gap:.2%}"
    moved = sorted({c.kind for d in plan.decisions for m in d.reshards for c in m.collectives} - {"slice"})
    print(f"collectives: {', '.join(moved) or 'none'}; peak {peak:.1f} MB per device; {proof}")
    state = step.init(create_state, key)  # created sharded, as the plan wants it
    losses, seconds = train(step, state, batches(steps))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps of {seconds * 1e3:.0f} ms")
