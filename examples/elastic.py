"""A job that survives: preempted or killed at any moment, restarted on other devices, with other batches, with another optimizer.

    python examples/elastic.py                                         # the story below, in child processes, on emulated devices
    python examples/elastic.py --folder out/elastic --devices 8        # the job itself; kill it, and start it again with --devices 4

Every checkpoint has the state, the plan that it is laid out by, and how many rows were read. A restart plans for the devices that it
finds and goes on behind the last complete checkpoint, with the losses of a job that was never interrupted.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from harness import DATA, emulate_devices
from jax.experimental import multihost_utils

import shardplan
from shardplan import checkpoints

LENGTH, WIDTH = 16, 256
TEXT = np.frombuffer(DATA.read_bytes(), np.uint8)
OPTIMIZERS = {"adam": optax.adam(3e-3), "momentum": optax.sgd(0.1, momentum=0.9)}


@dataclass(frozen=True)
class Job:
    folder: Path
    devices: int = 8
    steps: int = 20
    batch: int = 64
    optimizer: str = "adam"
    every: int = 5  # steps between checkpoints


def rows(first: int, count: int) -> dict[str, np.ndarray]:
    """Rows of an endless epoch: what a step reads depends on how many rows were read before, not on who reads them."""
    starts = np.arange(first, first + count) * 2_654_435_761 % (len(TEXT) - LENGTH)
    windows = TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, -1]}


def build(optimizer: str):
    """(create_state, train_step): guesses the next byte of a novel."""
    tx = OPTIMIZERS[optimizer]

    def create_state(key):
        embed, up, down = jax.random.split(key, 3)
        params = {
            "embed": 0.1 * jax.random.normal(embed, (128, 32)),
            "up": jax.random.normal(up, (LENGTH * 32, WIDTH)) * (LENGTH * 32) ** -0.5,
            "down": jax.random.normal(down, (WIDTH, 128)) * WIDTH**-0.5,
        }
        return {"params": params, "opt": tx.init(params)}

    def loss_fn(params, batch):
        x = params["embed"][batch["inputs"]].reshape(-1, LENGTH * 32)
        logits = jax.nn.gelu(x @ params["up"]) @ params["down"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return create_state, train_step


class Preemption:
    """Whether this job is to end: SIGTERM has come, to any of its processes."""

    def __init__(self):
        self._seen = threading.Event()
        if jax.process_count() == 1:  # with jax.distributed, its own service catches the signal
            signal.signal(signal.SIGTERM, lambda *_: self._seen.set())

    def reached(self, n: int) -> bool:
        """At the same step on all processes."""
        return self._seen.is_set() if jax.process_count() == 1 else multihost_utils.reached_preemption_sync_point(n)


def run(job: Job, say: Callable[[str], None] = print) -> dict[int, float]:
    """Trains from the last complete checkpoint to the last step, or until preempted; the loss of every step."""
    devices = jax.devices()[: job.devices]
    mesh = jax.make_mesh((2, len(devices) // 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2, devices=devices)
    create_state, train_step = build(job.optimizer)
    step = shardplan.auto(mesh, donate_argnums=0, process_timeout=60)(train_step)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=job.every)
    preemption, losses = Preemption(), {}
    with ocp.CheckpointManager(job.folder.absolute(), options=options) as manager:
        say(f"planning for mesh {dict(mesh.shape)}")
        plan = step.plan(jax.eval_shape(create_state, jax.random.key(0)), rows(0, job.batch))
        state, first, read = step.init(create_state, jax.random.key(0)), 0, 0
        if manager.latest_step() is not None:
            restored = checkpoints.restore(manager, plan, initial=state)  # what another optimizer adds begins anew
            state, first, read = restored.state, restored.step, restored.notes["rows"]
            say(f"restored step {first}, saved on mesh {restored.plan.mesh}")
        index, count = plan.data_shard()
        part = job.batch // count
        say("compiling")
        for n in range(first + 1, job.steps + 1):
            batch = plan.global_batch(rows(read + index * part, part))  # this process's rows
            state, loss = step(state, batch)
            read += job.batch
            losses[n] = float(loss)
            say(f"step {n} loss {losses[n]:.6f}")
            ending = preemption.reached(n)
            if ending or manager.should_save(n) or n == job.steps:
                say(f"saving step {n}")
                checkpoints.save(manager, n, state, plan, {"rows": read}, force=ending or n == job.steps)
            if ending:
                say("preempted")
                break
    say("all is saved")  # leaving the manager waits for its last save
    return losses


def story() -> None:
    """A preemption, a kill, fewer devices, larger batches, another optimizer: each a new process."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            ("8 devices, preempted at step 7", ["--devices", "8"], (7, signal.SIGTERM)),
            ("4 devices, killed while saving step 10", ["--devices", "4"], (10, signal.SIGKILL)),
            ("6 devices, to step 20", ["--devices", "6"], None),
            ("8 devices, larger batches", ["--devices", "8", "--batch", "96", "--steps", "25"], None),
            ("8 devices, another optimizer", ["--devices", "8", "--optimizer", "momentum", "--steps", "30"], None),
        ]
        for title, options, end in parts:
            print(f"\n{title}", flush=True)
            words = [sys.executable, "-u", __file__, "--folder", folder, *options]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
                for line in child.stdout or ():
                    print(f"  {line}", end="", flush=True)
                    words = ("saving step" if end and end[1] == signal.SIGKILL else "step") + f" {end[0] if end else -1}"
                    if line.startswith(words):
                        os.kill(child.pid, end[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the checkpoints; without it, the story")
    parser.add_argument("--devices", type=int, default=8, help="of all processes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="number of this one")
    parser.add_argument("--port", type=int, default=12345, help="of the first process")
    options = parser.parse_args()
    if options.folder is None:
        return story()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    emulate_devices(options.devices // options.processes)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        where = f"localhost:{options.port}"
        jax.distributed.initialize(where, options.processes, options.process, heartbeat_timeout_seconds=10)
    job = Job(options.folder, options.devices, options.steps, options.batch, options.optimizer, options.every)
    run(job, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
