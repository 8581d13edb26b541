"""A state on its way to another plan: every example, over five pairs of meshes, through a checkpoint and moved while it runs.

    python benchmarks/checkpoints.py [--only gpt,moe] [--megabytes 64]

Per example and pair: whether every bit of the state after two steps is the same in a checkpoint of orbax that another plan restores,
and when `shardplan.transfer` moves it there; how many arrays took collectives, parts of shards, and nothing; and the most bytes of
the state on one device meanwhile, as a ratio of the larger of before and after. The planner's propagation makes the plans, on axes of
type Auto and Explicit in turn. Then a state of twelve arrays of so many megabytes is moved: by how much the memory of the process
grows at most (the devices are emulated), with room, and under a limit that sends arrays over the host.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import jax

jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from models import MODELS  # noqa: E402
from test_checkpoints import PAIRS, budget, exact_memory, held, mesh_of, moves_of, peak_kib, planned  # noqa: E402

import shardplan  # noqa: E402
from shardplan import checkpoints  # noqa: E402
from shardplan.plan import transfer as module  # noqa: E402


def bits(x) -> bytes:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()


def differing(got, want: list[bytes]) -> int:
    return sum(bits(x) != y for x, y in zip(jax.tree.leaves(got), want, strict=True))


def most_held(moves, limit: float) -> float:
    """Bytes of the state on the fullest device at any moment of a transfer."""
    low, high = 0.0, limit
    while high - low > 1e-3 * limit:  # the least limit under which nothing goes over the host
        middle = (low + high) / 2
        try:
            fits = not any(over_host for _, over_host in module._schedule(moves, middle, True))
        except shardplan.ShardingError:
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    return high


def example(name: str) -> int:
    create, fun, batches = MODELS[name]()
    data, plans, wrong = list(batches(2)), {}, 0
    for n, pair in enumerate(PAIRS):
        kinds = (AxisType.Auto, AxisType.Explicit) if n % 2 else (AxisType.Auto, AxisType.Auto)
        ends = []
        for shape, kind in zip(pair, kinds, strict=True):
            if (shape, kind) not in plans:
                step = shardplan.auto(mesh_of(shape, kind), search="propagation")(fun)
                plans[shape, kind] = step, step.plan(jax.eval_shape(create, jax.random.key(0)), data[0])
            ends.append(plans[shape, kind])
        (step, a), (_, b) = ends
        state = step.init(create, jax.random.key(0))
        for batch in data:
            state, _ = step(state, batch)
        want = [bits(x) for x in jax.tree.leaves(state)]
        with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
            checkpoints.save(manager, 1, state, a)
            manager.wait_until_finished()
            restored = differing(checkpoints.restore(manager, b).state, want)
        moves = [*moves_of(state, b).values()]
        ways = Counter("in place" if m.in_place else "collectives" if m.steps else "parts" for m in moves)
        ends_bytes = [sum((Counter(getattr(m, end)) for m in moves), Counter()) for end in ("before", "after")]
        larger = max(max(x.values()) for x in ends_bytes)
        ratio = max(1.0, most_held(moves, 4.0 * larger) / larger)
        there = " -> ".join("x".join(map(str, shape)).ljust(5) for shape in pair)
        moved = differing(shardplan.transfer(state, b), want)
        wrong += restored + moved
        print(
            f"{name:13} {there} {len(want):4} arrays, {restored} restored and {moved} moved differ; {dict(ways)}; "
            f"at most {ratio:.2f} of the larger end on a device",
            flush=True,
        )
    return wrong


def memory(megabytes: int) -> None:
    width = int((megabytes * 1e6 / 4) ** 0.5) // 8 * 8

    def wide(key):
        return {"params": {f"w{n}": jnp.full((width, width), float(n)) for n in range(12)}}

    def sums(state, batch):
        return state, batch.sum()

    (_, a), (_, b) = (planned((2, 4), spec=spec, fun=sums, make=wide) for spec in (jax.P("a", "b"), jax.P("b", "a")))
    shard = width * width * 4 / 8
    for title, limit in (("with room", None), ("under a limit of the state and half a shard", 12.5 * shard)):
        plan = budget(b, limit)
        with exact_memory():
            shardplan.transfer(held(a, jax.jit(wide)(jax.random.key(0))), plan)  # what compiling takes
            state = held(a, jax.jit(wide)(jax.random.key(0)))
            _, grew = peak_kib(lambda state=state, plan=plan: jax.block_until_ready(shardplan.transfer(state, plan)))
        print(f"12 arrays of {megabytes} MB, {title}: the process grows by {grew / 1e3:.0f} MB at most", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--megabytes", type=int, default=64)
    options = parser.parse_args()
    memory(options.megabytes)
    wrong = sum(map(example, options.only.split(",")))
    print(f"{wrong} arrays differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
