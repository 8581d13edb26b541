"""What is claimed of any file: it is read, or refused with a ShardingError, in bounded time and in few words."""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from mutations import mutations
from plans import transformer

import shardplan
from shardplan.plan.cache import CachedPlan

MOST_S, MOST_CHARACTERS = 2.0, 1_500
SHAPES = (
    {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32), "down": jax.ShapeDtypeStruct((256, 64), jnp.float32)},
    jax.ShapeDtypeStruct((32, 64), jnp.float32),
)


def step(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def used(plan: shardplan.Plan) -> None:
    """All that needs no program."""
    plan.explain(), str(plan), repr(plan), plan.html(), plan.to_python(), str(plan.diff(PLAN))
    assert shardplan.Plan.loads(plan.dumps()) == plan


def taken_over(plan: shardplan.Plan) -> None:
    """Traced and lowered by the plan of the file."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardplan.ShardingWarning)
        shardplan.auto(mesh, plan=plan)(step).lower(*SHAPES)


PLAN = transformer(layers=1)


def own_plan() -> bytes:
    """A plan of `step`."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return shardplan.auto(mesh, pins={"*/up": jax.P(None, "model")})(step).plan(*SHAPES).dumps().encode()


def cached(path: Path) -> Any:
    return CachedPlan(path).load()


KINDS: dict[str, tuple[Callable[[], bytes], Callable[[Path], Any], Callable[[Any], Any], int]] = {
    "plan file": (lambda: PLAN.dumps().encode(), shardplan.Plan.load, used, 4),
    "plan to take over": (own_plan, shardplan.Plan.load, taken_over, 1),
    "cache entry": (lambda: PLAN.dumps().encode(), cached, lambda plan: plan is None or used(plan), 4),
    "cluster file": (
        lambda: json.dumps(shardplan.Cluster.preset("cpu").to_json()).encode(),
        shardplan.Cluster.load,
        lambda cluster: shardplan.Cluster.from_json(json.loads(json.dumps(cluster.to_json()))),
        1,
    ),
}
"""Kind of file -> (one as it is saved, how it is read, what is done with what was read, of how many that are read)."""


def claims(kind: str, count: int, folder: Path, seed: int = 0) -> Iterator[str]:
    """Of so many other files, what does not hold; then, in one line, how many were refused and read, and the longest seconds."""
    make, load, use, every = KINDS[kind]
    path, read, refused, longest_s = folder / "file.json", 0, 0, 0.0
    for n, raw in enumerate(mutations(make(), count, seed)):
        path.write_bytes(raw)
        start = time.process_time()
        try:
            found = load(path)
            read += found is not None
            refused += found is None
            if found is not None and read % every == 0:
                use(found)
        except shardplan.ShardingError as error:
            refused += 1
            if len(str(error)) > MOST_CHARACTERS:
                yield f"file {n} of seed {seed}: an error of {len(str(error))} characters"
        except Exception as error:
            yield f"file {n} of seed {seed}: {type(error).__name__}: {str(error)[:200]}"
        seconds = time.process_time() - start
        longest_s = max(longest_s, seconds)
        if seconds > MOST_S:
            yield f"file {n} of seed {seed}: {seconds:.1f} s"
    yield f"{count} files: {refused} refused, {read} read, {longest_s:.2f} s at most"
