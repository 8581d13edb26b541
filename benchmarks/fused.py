"""Steps of fused kernels, of experts that drop no token, and of sizes that do not divide: planned over emitted, and the same numbers.

    python benchmarks/fused.py                      every case, compiled for absent H100s
    python benchmarks/fused.py pallas --show        names with "pallas", with every finding
    python benchmarks/fused.py --numbers            small ones on 8 emulated devices: planned steps against plain jit

Columns are those of `fidelity.py`. `kernels` counts the fused kernels that all devices share, of those that can be sharded at all: the
gradient of a norm's scale sums over the grid, which no device can do alone. `remat` counts XLA's involuntary full rematerializations.
cuDNN's attention runs on the CPU as `tests/cudnn_on_cpu.py` computes it, Pallas' interpreted. Needs "shardplan[gpu-check]", no GPU;
`--numbers` needs pytest.
"""

import argparse
import itertools
import os
import sys
import time
import warnings
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

import fidelity  # noqa: E402
import fused_models  # noqa: E402
import jax  # noqa: E402
import measurements  # noqa: E402
import uneven  # noqa: E402
import zoo  # noqa: E402
from clusters import NEAR  # noqa: E402

import shardplan  # noqa: E402

STEPS = 3
PLACES = {"8": ((8,), ("data",)), "2,4": ((2, 4), ("data", "model")), "2,2,2": ((2, 2, 2), ("data", "model", "expert"))}
KINDS = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
KERNELS = "pallas_call", "dot_product_attention", "ragged_dot_general"
"""Starts of the primitives that are fused kernels."""


def fused(name: str):
    create_state, train_step, batch = fused_models.build(name)
    key = jax.random.key(0)
    return train_step, jax.eval_shape(create_state, key), jax.eval_shape(batch, key)


CASES = {
    **{name: (lambda name=name: fused(name), ("8", "2,4"), "h100:8") for name in fused_models.MODELS},
    "gpt2-50257": (lambda: zoo.gpt2(scan=True, vocab=50257), ("8", "2,4"), "h100:8"),
    "llama-7b-96": (lambda: uneven.llama_7b(96)(None), ("96",), "h100:12x8", uneven.PADDED | {"memory": "6GB"}),
}
"""Name -> (train step, state, batch), the meshes, the machine that it is compiled for, and options of `shardplan.auto`."""


def check(name: str, place: str) -> tuple[list, object]:
    """A row of the table, and the report."""
    case, _, target, *options = CASES[name]
    shape, axes = PLACES.get(place) or ((int(place),), ("data",))
    measured, report = fidelity.measure(case, jax.sharding.AbstractMesh(shape, axes), target, **(options[0] if options else {}))
    if not measured:
        return [name, place, *[""] * (len(fidelity.SHOWN) + 2)], report
    whole, kernels = kernels_of(report.plan)
    return [name, place, *fidelity.cells(measured), f"{whole} of {kernels}", len(report.report.rematerializations)], report


def kernels_of(plan) -> tuple[int, int]:
    """(fused kernels that all devices share, fused kernels with a factor)."""
    planned, counts = plan.context.planned, []
    for i, op in enumerate(planned.graph.ops):
        if op.primitive.startswith(KERNELS) and len(planned.space.strategies[i]) > 1:
            counts.append(planned.space.strategies[i].work[planned.strategies[i]] * planned.space.mesh.n_devices <= 1)
    return sum(counts), len(counts)


def numbers(name: str, shape: tuple[int, ...], axes: tuple[str, ...], kind) -> float:
    """How far planned steps are off, as a share of what is allowed."""
    import cudnn_on_cpu
    import same_numbers

    from shardplan._jax_kernels import cudnn_assumed

    cudnn_on_cpu.install()
    create_state, train_step, batch = fused_models.build(name, fused_models.SMALL)
    batches = [batch(jax.random.key(n)) for n in range(STEPS)]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(shape))
    with cudnn_assumed():
        state, plain = jax.jit(create_state)(jax.random.key(0)), jax.jit(train_step)
        for each in batches:
            state, loss = plain(state, each)
    planned = shardplan.auto(mesh, cluster=NEAR, donate_argnums=0)(train_step)
    got = planned.init(create_state, jax.random.key(0))
    for each in batches:
        got, got_loss = planned(got, each)
    return max(same_numbers.off(got, state), same_numbers.off(got_loss, loss))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("cases", nargs="*", help=f"parts of names of {', '.join(CASES)}")
    parser.add_argument("--numbers", action="store_true", help="small, against plain jit")
    parser.add_argument("--show", action="store_true", help="print each comparison")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/measurements.md")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    names, bad, rows = [n for n in CASES if not options.cases or any(c in n for c in options.cases)], 0, []
    if options.numbers:
        jax.config.update("jax_num_cpu_devices", 8)
        for name, (place, of), (word, kind) in itertools.product(names, PLACES.items(), KINDS.items()):
            if name in fused_models.MODELS:
                start = time.perf_counter()
                worst = numbers(name, of[0], of[1], kind)
                bad += not worst <= 1
                print(f"{name:<18}{place:<7}{word:<10}off {worst:.1e}  {'same' if worst <= 1 else 'WRONG'}"
                      f"{time.perf_counter() - start:>6.0f} s", flush=True)  # fmt: skip
                jax.clear_caches()
        return int(bad > 0)
    head = ("case", "mesh", *fidelity.SHOWN, "kernels", "remat")
    print("  ".join(head), flush=True)
    for name, place in ((n, p) for n in names for p in CASES[n][1]):
        row, report = check(name, place)
        bad += not row[2]
        rows.append(row)
        print("  ".join(map(str, row)), flush=True)
        if options.show or not row[2]:
            print(report, "\n", flush=True)
    if options.docs:
        measurements.write("fused", "python benchmarks/fused.py --docs", measurements.table(head, rows))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
