"""What XLA's compiler options do to a step: small programs, compiled for 8 absent H100s with one option after the other.

    python benchmarks/compiler_options.py                  all programs
    python benchmarks/compiler_options.py loop unrolled     those whose names begin so
    python benchmarks/compiler_options.py --target a100:8

Four layers, x += gelu(x @ up) @ down, of 2048 by 8192, on 16384 tokens in bfloat16. `loop` scans over them and recomputes them,
`unrolled` does not; weights are sharded over all devices (fsdp), or replicated (data). `barrier`: layers are recomputed behind an
optimization barrier, as `jax.checkpoint` does by default. Seconds are read from XLA's schedule by `shardplan.xla.seconds`.
Needs "shardplan[gpu-check]", no GPU.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import measurements  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shardplan import Cluster  # noqa: E402
from shardplan.xla.compiler.compile import compile, lower_for  # noqa: E402
from shardplan.xla.compiler.options import as_known  # noqa: E402
from shardplan.xla.hlo.schedule import seconds  # noqa: E402
from shardplan.xla_model.compiler_options import DEFAULT, LEVEL, PIPELINING, XlaOptions  # noqa: E402

LAYERS, TOKENS, WIDTH, HIDDEN = 4, 8 * 2048, 2048, 8192
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
GATHERS = XlaOptions(frozenset({"all-gather"}))

PROGRAMS = {
    "loop, fsdp": {},
    "loop, fsdp, barrier": {"barrier": True},
    "loop, data": {"sharded": False},
    "unrolled, fsdp": {"scanned": False},
    "unrolled, data": {"scanned": False, "sharded": False},
}
OPTIONS = {
    "none": {},
    "gathers pipelined": GATHERS.flags(),
    "sums pipelined": XlaOptions(frozenset({"all-reduce"})).flags(),
    "scatters pipelined": XlaOptions(frozenset({"reduce-scatter"})).flags(),
    "double buffering": replace(DEFAULT, double_buffering=True).flags(),
    "gathers pipelined, double buffering": replace(GATHERS, double_buffering=True).flags(),
    "all pipelined": replace(PIPELINING, double_buffering=False).flags(),
    "all pipelined, double buffering": PIPELINING.flags(),
    "optimization_level=19": {LEVEL: 19},
    "all of it, two in flight": replace(PIPELINING, in_flight=2).flags(),
    "two in flight": replace(DEFAULT, in_flight=2).flags(),
    "thresholds of 4 MiB": DEFAULT.combining(4 << 20).flags(),
    "thresholds of 128 MiB": DEFAULT.combining(128 << 20).flags(),
    "latency hiding asked for": replace(DEFAULT, latency_hiding=True).flags(),
}
OF_LOOPS = [label for label in OPTIONS if ("pipelined" in label or "buffering" in label) and label != "all pipelined, double buffering"]
"""Tried on loops only."""


def lowered(target: str, scanned: bool = True, sharded: bool = True, barrier: bool = False):
    def s(*entries):
        return NamedSharding(MESH, P(*entries) if sharded else P())

    def layer(x, w):
        y = x + jax.nn.gelu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)
        return jax.lax.with_sharding_constraint(y, NamedSharding(MESH, P("data")))

    if scanned:
        layer = jax.checkpoint(layer, prevent_cse=barrier)

    def loss(w, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)
        else:
            for one in w:
                x = layer(x, one)
        return x.astype(jnp.float32).var()

    def step(w, x):
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))

    shapes, stack = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}, (LAYERS,) * scanned
    w = {k: jax.ShapeDtypeStruct((*stack, *shape), jnp.float32) for k, shape in shapes.items()}
    spec = {"up": s(*(None,) * scanned, None, "data"), "down": s(*(None,) * scanned, "data")}
    w, spec = (w, spec) if scanned else ([w] * LAYERS, [spec] * LAYERS)
    rows = NamedSharding(MESH, P("data"))
    jitted = jax.jit(step, in_shardings=(spec, rows), out_shardings=spec, donate_argnums=0)
    return lower_for(target, jitted, w, jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help=f"starts of names, of {'; '.join(PROGRAMS)}")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/measurements.md")
    asked = parser.parse_args()
    cluster = Cluster.preset(asked.target.partition(":")[0])
    rows = ["| program | options | compute ms | collectives ms | exposed ms | step ms | peak MB |", "|---|---|---|---|---|---|---|"]
    print("\n".join(rows), flush=True)
    for name, program in PROGRAMS.items():
        if asked.programs and not name.startswith(tuple(asked.programs)):
            continue
        step = lowered(asked.target, **program)
        for label, flags in OPTIONS.items():
            if label in OF_LOOPS and not program.get("scanned", True):
                continue
            done = compile(step, target=asked.target, options=as_known(flags))
            assert done.memory is not None, done.error
            s = seconds(done, cluster)
            ms = " | ".join(f"{1e3 * x:.2f}" for x in (s.compute_s, s.collective_s, s.exposed_s, s.step_s))
            rows.append(f"| {name} | {label} | {ms} | {done.memory.peak_bytes / 1e6:.0f} |")
            print(rows[-1], flush=True)
    if asked.docs:
        measurements.write("compiler-options", "python benchmarks/compiler_options.py --docs", "\n".join(rows))


if __name__ == "__main__":
    main()
