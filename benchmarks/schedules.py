"""Predicted against emitted overlap: unrolled residual multilayer perceptrons on 8 absent H100s, laid out by pins as experts do, and
as planned.

    python benchmarks/schedules.py              all of them, about five minutes
    python benchmarks/schedules.py 1024         some: parts of their names

Predicted seconds are the plan's, emitted ones those of the compiled program (`shardplan.xla.seconds`), both in ms. The
planner was not tuned on these nets, and their layers are identical, so an error about one layer counts many times.
Needs "shardplan[gpu-check]", no GPU.
"""

import argparse
import os
import statistics
import sys
import warnings
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import quality
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.xla.compiler.compile import lower_for

TARGET = "h100:8"
NETS = [
    (layers, width, hidden * width, batch, dtype)
    for hidden in (1, 4)
    for layers, width, batch, dtype in (
        (6, 1024, 4096, "float32"),
        (12, 1024, 16384, "float32"),
        (4, 4096, 8192, "float32"),
        (16, 512, 8192, "float32"),
        (8, 2048, 8192, "bfloat16"),
        (12, 1024, 2048, "bfloat16"),
        (8, 4096, 32768, "bfloat16"),
    )
]
"""Layers, width, hidden width, batch, type of the parameters; momentum is kept in float32."""


def net(layers: int, width: int, hidden: int, batch: int, dtype: str):
    """A training step with its state and batch, as shapes."""

    def loss(params, x):
        for p in params:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return (x.astype(jnp.float32) ** 2).mean()

    def step(state, x):
        params, momentum = state
        value, grads = jax.value_and_grad(loss)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), momentum, grads)
        return (jax.tree.map(lambda p, m: p - (0.01 * m).astype(p.dtype), params, momentum), momentum), value

    def matrices(kind: str) -> list:
        up, down = (jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for shape in ((width, hidden), (hidden, width)))
        return [{"up": up, "down": down}] * layers

    return step, (matrices(dtype), matrices("float32")), jax.ShapeDtypeStruct((batch, width), jnp.dtype(dtype))


def pins(axes: tuple[str, ...]) -> dict[str, dict[str, P] | None]:
    """Layout name -> pins of the parameters and the momentum; the planner chooses the rest."""
    inner = axes[-1]
    return {
        "data": {"state/**": P()},
        "zero1": {"state/0/**": P(), "state/1/**": P(axes)},
        "fsdp": {"state/**": P(axes)},
        "tensor": {"**/up": P(None, axes), "**/down": P(axes, None)},
        **({"data,tensor": {"**/up": P(None, inner), "**/down": P(inner, None)}} if len(axes) > 1 else {}),
        "planned": None,
    }


def compared(step, state, batch, mesh, wanted: dict[str, P] | None) -> dict:
    """Predicted and emitted seconds of a step with some layouts given."""
    plan = shardplan.auto(mesh, donate_argnums=0, cluster="h100", pins=wanted)(step).plan(state, batch)
    function, args = plan.context.program(plan)
    return quality.judge_lowered(lower_for(TARGET, function, *args), TARGET, 600.0) | {"predicted": plan.seconds["total"]}


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("nets", nargs="*", help="parts of their names")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    parts, behind = [], []
    print(f"{'layers, width, hidden, batch, type':<36} {'mesh':<7} {'by':<12} predicted   emitted   part   exposed")
    for given in NETS:
        name = ", ".join(map(str, given))
        if options.nets and not any(n in name for n in options.nets):
            continue
        found: dict[tuple[str, str], float] = {}
        for sizes in ((8,), (2, 4)):
            axes = ("data", "model")[: len(sizes)]
            mesh = quality.experts.twin(jax.sharding.AbstractMesh(sizes, axes))
            for layout, wanted in pins(axes).items():
                r = compared(*net(*given), mesh, wanted)
                if "error" in r:
                    print(f"{name:<36} {layout:<12} {r['error']}")
                    continue
                shape = "x".join(map(str, sizes))
                found[shape, layout] = r["seconds"]
                parts.append(r["predicted"] / r["seconds"])
                ms = [1e3 * r[k] for k in ("predicted", "seconds", "exposed")]
                print(f"{name:<36} {shape:<7} {layout:<12} {ms[0]:>9.3f} {ms[1]:>9.3f} {parts[-1]:>6.2f}  {ms[2]:>8.3f}", flush=True)
            others = [s for (where, layout), s in found.items() if where == shape and layout != "planned"]
            behind.append(found[shape, "planned"] / min(others))
    low, middle, high = statistics.quantiles(parts, n=20, method="inclusive")[0::9]
    print(f"predicted over emitted: median {middle:.2f}, nine of ten from {low:.2f} to {high:.2f}")
    print(f"planned over the best of the others: mean {statistics.geometric_mean(behind):.3f}, most {max(behind):.3f}")


if __name__ == "__main__":
    main()
