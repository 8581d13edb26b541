"""Predictions against XLA: plans for absent H100s, compiled by XLA's GPU compiler, planned over emitted figure by figure.

    python benchmarks/fidelity.py                        every case on every mesh
    python benchmarks/fidelity.py gpt2 llama --mesh 2,4   some of them
    python benchmarks/fidelity.py moe --show              with each case's comparison, line by line

`collectives` is bytes that a device sends in one step (ring algorithm); `peak` and `live` are the planned memory over XLA's peak and
over the buffers that its dump lists there, which may be too few; `products` is flops of products and convolutions; `compute` is
seconds of everything but collectives over those of a roofline over the emitted kernels. `unplanned` is the fraction of emitted bytes
that no planned collective explains. `quality.py` has these figures of its plans, at full size. Needs "shardplan[gpu-check]", no GPU.
"""

import argparse
import math
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import jax  # noqa: E402
import measurements  # noqa: E402
import zoo  # noqa: E402

import shardplan  # noqa: E402
from shardplan.xla import PlanReport  # noqa: E402
from shardplan.xla.hlo.schedule import seconds  # noqa: E402

MESHES = {"8": ((8,), ("data",)), "2,4": ((2, 4), ("data", "model")), "2,2,2": ((2, 2, 2), ("data", "model", "expert"))}


CASES = {
    "gpt2": lambda: zoo.gpt2(layers=4),
    "gpt2-scan": lambda: zoo.gpt2(scan=True),
    "gpt2-remat": lambda: zoo.gpt2(scan=True, remat=True),
    "gpt2-wide": lambda: zoo.gpt2(layers=3, batch=8, seq=2048, d=4096, heads=32),
    "llama-1b": lambda: zoo.llama("1b", 32, 2048, layers=4),
    "llama-8b": lambda: zoo.llama("8b", 16, 4096, layers=8),
    "llama-70b": lambda: zoo.llama("70b", 16, 4096, layers=2),
    "gpt3": lambda: zoo.gpt3_96(layers=2, batch=16),
    "gpt2-xl": lambda: zoo.gpt2(layers=48, batch=64, d=1600, heads=25, scan=True, remat=True),
    "gpt": lambda: zoo.example("gpt", layers=3, width=1024, length=512, batch=64),
    "moe": lambda: zoo.example("moe", width=512, hidden=2048, length=512, batch=64),
    "hybrid_mlp": lambda: zoo.example("hybrid_mlp", inputs=1024, hidden=1024, classes=1 << 17, batch=1 << 13),
    "face_softmax": lambda: zoo.example("face_softmax", side=32, channels=64, embedding=256, people=1 << 18, batch=1024),
    "dlrm": lambda: zoo.example("dlrm", tables=(1 << 20, 1 << 18, 1 << 16, 1024, 64), width=128, batch=1 << 15),
    "digits_cnn": lambda: zoo.example("digits_cnn", channels=128, hidden=1024, batch=4096),
    "classes": lambda: zoo.classifier(1 << 19),
    "classes-8m": lambda: zoo.classifier(1 << 23),
    "resnet-50": zoo.nets.resnet,
    "unet": zoo.nets.unet,
    "vit-l": lambda: zoo.nets.vit(batch=256),
    "lstm": zoo.nets.lstm,
    "mamba": zoo.nets.mamba,
    "long": lambda: zoo.nets.long_context(length=1 << 15),
}

SHOWN = ("MB sent", "collectives", "unplanned", "GB", "peak", "live", "products", "compute")
COLUMNS = ("collectives", "peak", "live", "products", "compute")
HEAD = (
    f"{'case':<14} {'mesh':<6} {'sent':>9} {'collectives':>11} {'unplanned':>9} {'memory':>8} {'peak':>5} {'live':>5} "
    f"{'products':>8} {'compute':>7} {'s':>5}"
)


def measure(case, mesh: jax.sharding.AbstractMesh, target: str, **options) -> tuple[dict[str, float], PlanReport | str]:
    """Planned over emitted of one case; nothing where there is nothing to compare. And the report, or why there is none.

    `options` are those of `shardplan.auto`.
    """
    step, state, batch = case()
    preset = target.partition(":")[0]
    try:
        found = shardplan.auto(mesh, donate_argnums=0, cluster=preset, **options)(step).check(state, batch, target=target)
    except shardplan.ShardingError as error:
        return {}, str(error)
    return figures(found, preset) if found.compiled.ok else {}, found


def figures(found: PlanReport, preset: str) -> dict[str, float]:
    """Planned over emitted of a compiled plan; NaN where there is nothing to compare."""
    emitted = found.comparison.emitted_bytes
    unplanned = sum(f.emitted_bytes for f in found.comparison.of("unplanned"))
    memory = found.compiled.memory
    return {
        "sent": emitted,
        "collectives": found.collectives_ratio,
        "unplanned": unplanned / emitted if emitted else 0.0,
        "memory": memory.peak_bytes if memory else math.nan,
        "peak": found.memory_ratio or math.nan,
        "live": found.plan.memory().peak / found.compiled.live_bytes if found.compiled.live_bytes else math.nan,
        "products": found.flops_ratio if found.flops_ratio is not None else math.nan,
        "compute": found.plan.seconds["compute"] / seconds(found.compiled, shardplan.Cluster.preset(preset)).compute_s,
    }


def row(name: str, mesh: str, m: dict[str, float], took_s: float) -> str:
    if not m:
        return f"{name:<14} {mesh:<6} no program"
    return (
        f"{name:<14} {mesh:<6} {m['sent'] / 1e6:>7.0f}MB {m['collectives']:>11.2f} {m['unplanned']:>9.1%} {m['memory'] / 1e9:>6.2f}GB "
        f"{m['peak']:>5.2f} {m['live']:>5.2f} {m['products']:>8.2f} {m['compute']:>7.2f} {took_s:>5.0f}"
    )


def cells(m: dict[str, float]) -> list[str]:
    """A row of the page's table."""
    ratios = (f"{m[c]:.2f}" for c in ("peak", "live", "products", "compute"))
    return [f"{m['sent'] / 1e6:.0f}", f"{m['collectives']:.2f}", f"{m['unplanned']:.1%}", f"{m['memory'] / 1e9:.2f}", *ratios]


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"starts of names, of {', '.join(CASES)}")
    parser.add_argument("--mesh", action="append", choices=list(MESHES), help="default: 8 and 2,4")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--show", action="store_true", help="print each comparison")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/measurements.md")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    places = {n: MESHES[n] for n in options.mesh or ("8", "2,4")}
    found, lines = [], []
    print(f"planned over emitted, {options.target}, jax {jax.__version__}\n{HEAD}", flush=True)
    for name in (n for n in CASES if not options.cases or any(n.startswith(c) for c in options.cases)):
        for place, (shape, axes) in places.items():
            start = time.perf_counter()
            measured, report = measure(CASES[name], jax.sharding.AbstractMesh(shape, axes), options.target)
            print(row(name, place, measured, time.perf_counter() - start), flush=True)
            if measured:
                found.append(measured)
                lines.append((name, place, *cells(measured)))
            if options.show or not measured:
                print(report, "\n", flush=True)
    print(f"{'median':<14} {len(found):<6} {'':>9} {_median(found, 'collectives'):>11.2f} {_median(found, 'unplanned'):>9.1%} {'':>8} "
          f"{_median(found, 'peak'):>5.2f} {_median(found, 'live'):>5.2f} {_median(found, 'products'):>8.2f} "
          f"{_median(found, 'compute'):>7.2f}")  # fmt: skip
    worst = {c: max((abs(math.log(m[c])) for m in found if m[c] > 0 and math.isfinite(m[c])), default=0.0) for c in COLUMNS}
    if options.docs:
        measurements.write("fidelity", "python benchmarks/fidelity.py --docs", table(lines, found))
    print("largest factor between planned and emitted: " + ", ".join(f"{c} {math.exp(w):.2f}" for c, w in worst.items()))


def table(lines: list[tuple[str, ...]], found: list[dict[str, float]]) -> str:
    """The page's table of these rows, with their medians."""
    medians = cells({c: _median(found, c) for c in found[0]})
    medians[0] = medians[3] = ""
    return measurements.table(("model", "mesh", *SHOWN), [*lines, ("**median**", "", *medians)])


def _median(found: list[dict[str, float]], column: str) -> float:
    values = [m[column] for m in found if math.isfinite(m[column])]
    return statistics.median(values) if values else math.nan


if __name__ == "__main__":
    main()
