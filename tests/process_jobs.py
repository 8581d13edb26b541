"""What one of several processes runs: `python process_jobs.py NUMBER COUNT PORT FOLDER PART`, a JSON line per claim.

PART is "all" of the claims of `tests/test_processes.py`, one of them, or "example NAME WAY...": an example on both kinds of axes, once
per way of planning. `benchmarks/processes.py` runs those, also by one process, to compare.
"""

import hashlib
import itertools
import json
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from models import MODELS, loss_of

import shardplan

DEVICES = 8


def create(key):
    up, down = jax.random.split(key)
    return {"up": 0.1 * jax.random.normal(up, (64, 128)), "down": 0.1 * jax.random.normal(down, (128, 64))}


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def batches(n):
    for k in range(n):
        x = np.random.default_rng(k).normal(size=(32, 64)).astype(np.float32)
        yield {"x": x, "y": np.roll(x, 1, axis=1)}


def losses(step, plan, create=create, data=None):
    """Of a few steps, each process reading its own rows."""
    state, found = step.init(create, jax.random.key(0)), []
    index, count = plan.data_shard()
    for batch in data or batches(3):
        mine = jax.tree.map(lambda x: np.split(np.asarray(x), count)[index], batch)
        state, out = step(state, plan.global_batch(mine))
        found.append(float(loss_of(out)))
    return found


def shapes():
    return jax.eval_shape(create, jax.random.key(0)), next(batches(1))


def mesh_of(kind, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)


def refused(make):
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def trained(mesh, **options):
    """The text of a plan, and what a few steps by it lose."""
    step = shardplan.auto(mesh, donate_argnums=0, process_timeout=60, **options)(train_step)
    plan = step.plan(*shapes())
    return {"plan": plan.dumps(), "losses": losses(step, plan)}


def jobs():
    """Claim -> mesh and options of a training job that one process and several run alike."""
    auto = mesh_of(AxisType.Auto)
    return {
        "ilp": (auto, {}),
        "Explicit axes": (mesh_of(AxisType.Explicit), {}),
        "propagation": (auto, {"search": "propagation"}),
        "recursive, time limit": (auto, {"search": "recursive", "time_limit": 30}),
        "every process reads all": (mesh_of(AxisType.Auto, (1, 8)), {"pins": {"*/up": jax.P(None, "model"), "batch/*": jax.P()}}),
    }


WAYS = {
    "ilp": {},
    "propagation": {"search": "propagation"},
    "recursive": {"search": "recursive"},
    "file": {"plan": True},
    "limit": {"time_limit": 20},
    "verify": {"verify": "h100:8"},
}
"""How an example is planned; "file" takes over the plan of "ilp", which the last process alone has."""


def example(name, ways, folder, say):
    """Trains an example by a plan of each way, on axes of both kinds."""
    create, fun, some = MODELS[name]()
    data = list(some(3))
    for kind, way in itertools.product((AxisType.Auto, AxisType.Explicit), ways):
        options, file = dict(WAYS[way]), folder / f"{kind}{jax.process_index()}.json"
        if "plan" in options:
            options["plan"] = file
        step = shardplan.auto(mesh_of(kind), donate_argnums=0, process_timeout=100, **options)(fun)
        start = time.perf_counter()
        plan = step.plan(jax.eval_shape(create, jax.random.key(0)), data[0])
        planned = time.perf_counter() - start
        if way == "ilp" and jax.process_index() == jax.process_count() - 1:
            plan.save(file)
        text = hashlib.sha256(plan.dumps().encode()).hexdigest()
        say(f"{name} {kind} {way}", plan=text, losses=losses(step, plan, create, data), seconds=round(planned, 1))
        jax.clear_caches()


def main(own, count, port, folder, part):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, own, heartbeat_timeout_seconds=10)
    warnings.simplefilter("ignore")

    def say(claim, **values):
        print(json.dumps({"claim": claim, **values}), flush=True)

    if part.startswith("example"):
        _, name, *ways = part.split()
        return example(name, ways, Path(folder), say)
    auto = mesh_of(AxisType.Auto)
    for claim, (mesh, options) in jobs().items():
        if part == "all" or claim == part:
            say(claim, **trained(mesh, **options))
    if part == "all":
        file = Path(folder) / f"{own}.json"
        if own == count - 1:
            wide = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
            shardplan.auto(wide, cluster="h100", donate_argnums=0)(train_step).plan(*shapes()).save(file)
        say("a file that the last process has", **trained(auto, plan=file))
        say("memory differs", **trained(auto, memory=1e6 if own else 2e6))
        calibrated = Path(folder) / f"cluster{own}.json"
        shardplan.Cluster.preset("cpu").scaled(1.0 + own).save(calibrated)
        say("calibrations differ", **trained(auto, cluster=calibrated))
        example("hybrid_mlp", ["propagation"], Path(folder), say)
        say("init", grew=grown_by_init(auto))
        say("moved", differ=moved(auto))
        say("moved to other devices", error=moved_elsewhere(jax.process_count()))
        faults(own, auto, say)
        say("after all faults", **trained(auto))


def grown_by_init(mesh):
    """By what part of a state of 128 MiB the memory of a process grows at most while it is made."""

    def status(name):
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

    def wide(key):
        return {f"w{n}": jnp.full((2048, 2048), 1.0 + n) for n in range(8)}

    step = shardplan.auto(mesh, pins={"state/*": jax.P("data", "model")}, process_timeout=60)(lambda state, x: (state, x.sum()))
    step.plan(jax.eval_shape(wide, jax.random.key(0)), jnp.ones(8))
    jax.block_until_ready(step.init(lambda key: {f"w{n}": jnp.ones(64) for n in range(8)}, jax.random.key(0)))
    if not Path("/proc/self/clear_refs").exists():
        return 0.5
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    state = jax.block_until_ready(step.init(wide, jax.random.key(0)))
    return (status("VmHWM") - before) * 1024 / sum(x.nbytes for x in state.values())


def moved(mesh):
    """How many arrays differ when a state has gone to a plan of another mesh of the same devices, to one of another order, and back."""
    meshes = mesh, mesh_of(AxisType.Explicit, (4, 2)), jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    spec = jax.P("model", "data")
    steps = [shardplan.auto(m, pins={"*/up": spec}, search="propagation", process_timeout=60)(train_step) for m in meshes]
    plans = [step.plan(*shapes()) for step in steps]
    state = steps[0].init(create, jax.random.key(0))
    want = [np.asarray(multihost_utils.process_allgather(x, tiled=True)).tobytes() for x in jax.tree.leaves(state)]
    found = []
    for plan in (*plans[1:], plans[0]):
        state = shardplan.transfer(state, plan)
        assert all(x.sharding == s for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(plan.in_shardings[0][0]), strict=True))
        now = [np.asarray(multihost_utils.process_allgather(x, tiled=True)).tobytes() for x in jax.tree.leaves(state)]
        found.append(sum(a != b for a, b in zip(now, want, strict=True)))
    return found


def moved_elsewhere(count):
    """What is said when a state on half of the devices of every process has to go to the other half."""
    first, other = (jax.sharding.Mesh(x, ("data", "model")) for x in np.split(np.array(jax.devices()).reshape(count, -1), 2, axis=1))
    state, plan = (shardplan.auto(mesh, pins={"*/up": jax.P("data")}, process_timeout=60)(train_step) for mesh in (first, other))
    state.plan(*shapes()), plan.plan(*shapes())
    held = state.init(create, jax.random.key(0))
    error = refused(lambda: shardplan.transfer(held, plan.plan(*shapes())))
    jax.block_until_ready(held)  # nothing was given up
    return error


def faults(own, mesh, say):
    """Each is an error on every process."""

    def planned(fun=train_step, inputs=None, process_timeout=60, **options):
        return refused(lambda: shardplan.auto(mesh, process_timeout=process_timeout, **options)(fun).plan(*(inputs or (state, batch))))

    def another(state, batch):
        return train_step(jax.tree.map(jnp.sin, state), batch)

    def breaks(state, batch):
        raise RuntimeError("no data here")

    state, batch = shapes()
    wider = {name: np.concatenate([x, x]) for name, x in batch.items()}
    say("other shapes", error=planned(inputs=(state, wider if own else batch)))
    say("other code", error=planned(another if own else train_step))
    say("nothing fits", error=planned(memory=10_000))
    say("no such file", error=planned(plan="missing.json"))
    say("one cannot trace", error=planned(breaks if own else train_step))
    time.sleep(8 if own else 0)
    say("one comes late", error=planned(process_timeout=4))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
