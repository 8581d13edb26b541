"""Twenty models that others published: planned with splits forced, the same numbers; at full width, planned against XLA's program.

    python benchmarks/public_models.py --numbers          small, on emulated devices (8,) and (2, 4): planned steps against plain jit
    python benchmarks/public_models.py --check            at full width, compiled for 8 absent H100s, figure by figure
    python benchmarks/public_models.py --check gpt2 t5 --mesh 2,4 --show   some of them, with every finding

Before `of` stands the number of ops that are sharded over every mesh axis, of all; then the last loss, and the largest difference of
any state array after five steps, as a share of what is allowed. Columns of `--check` are those of `benchmarks/fidelity.py`; `no line`
counts findings of at least a thousandth of the bytes that name no line of the model, `remat` XLA's involuntary full rematerializations.
Below a row stand the warnings. Needs `pip install "shardplan[public-models]"`; `--check` needs "shardplan[gpu-check]", too, and
`--numbers` pytest.
"""

import argparse
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Else devices that the CPU plays may wait for each other (docs/troubleshooting.md).
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fidelity  # noqa: E402
import jax  # noqa: E402
import measurements  # noqa: E402
import public_zoo  # noqa: E402
from clusters import NEAR  # noqa: E402

import shardplan  # noqa: E402

STEPS = 5
NOT_OF_MODELS = re.compile(r"(^|/)((jax|jaxlib|flax|optax|chex|equinox|einops|shardplan)/|public_models\.py|fidelity\.py)")
"""Files of libraries, and of what asks for plans."""


def numbers(name: str, shape: tuple[int, ...]) -> tuple[bool, str]:
    """Whether five planned steps on emulated devices give what plain ones do, and the row."""
    import same_numbers  # its programs are those of tests, and need pytest

    found = public_zoo.MODELS[name](True)
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    batches = [found.batch(jax.random.key(n + 1)) for n in range(STEPS)]
    state, plain = jax.jit(found.create)(jax.random.key(0)), jax.jit(found.step)
    for batch in batches:
        state, want = plain(state, batch)
    planned = shardplan.auto(mesh, donate_argnums=0, cluster=NEAR)(found.step)
    plan = planned.plan(*found.shapes())
    got_state = planned.init(found.create, jax.random.key(0))
    for batch in batches:
        got_state, got = planned(got_state, batch)
    off = max(same_numbers.off(got_state, state), same_numbers.off(got, want))
    split = sum(set(d.strategy) == set(mesh.axis_names) for d in plan.decisions)
    return off <= 1, f"{split:>6} of {len(plan.decisions):>5} {float(want):>9.4f} {off:>7.1g} {'same' if off <= 1 else 'WRONG'}"


def check(name: str, place: str, target: str) -> tuple[dict[str, float], object]:
    """Figures of one model at full width, and its report."""
    found = public_zoo.MODELS[name](False)
    shape, axes = fidelity.MESHES[place]
    measured, report = fidelity.measure(lambda: (found.step, *found.shapes()), jax.sharding.AbstractMesh(shape, axes), target)
    if measured:
        measured["no line"] = sum(
            max(f.planned_bytes, f.emitted_bytes) >= 1e-3 * measured["sent"] and not _named(f.source)
            for f in report.comparison.findings
        )
        measured["remat"] = len(report.report.rematerializations)
    return measured, report


def _named(source: str) -> bool:
    return bool(source) and not NOT_OF_MODELS.search(source)


def _row(m: dict[str, float], took_s: float) -> str:
    return f"{m['no line']:>7} {m['remat']:>5} {took_s:>5.0f}"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(public_zoo.MODELS)}; default: all")
    parser.add_argument("--numbers", action="store_true", help="small, on emulated devices, against plain jit")
    parser.add_argument("--check", action="store_true", help="at full width, compiled for absent GPUs")
    parser.add_argument("--mesh", action="append", choices=["8", "2,4"], help="default: both; with --check: 8")
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--show", action="store_true", help="print each comparison")
    parser.add_argument("--docs", action="store_true", help="put the table of --check into docs/measurements.md")
    options = parser.parse_args(argv)
    bad, rows = 0, []
    if options.check:
        print(f"{fidelity.HEAD[:-6]} {'no line':>7} {'remat':>5} {'s':>5}", flush=True)
    for name in options.models or public_zoo.MODELS:
        for place in options.mesh or (["8"] if options.check else ["8", "2,4"]):
            start = time.perf_counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", shardplan.ShardingWarning)
                try:
                    if options.numbers:
                        same, text = numbers(name, fidelity.MESHES[place][0])
                        bad += not same
                        print(f"{name:<14} {place:<6} {text} {time.perf_counter() - start:>5.0f} s", flush=True)
                    if options.check:
                        measured, report = check(name, place, options.target)
                        bad += not measured
                        took_s = time.perf_counter() - start
                        shown = fidelity.row(name, place, measured, took_s)
                        print(shown[:-6] + _row(measured, took_s) if measured else shown, flush=True)
                        if measured:
                            rows.append((name, place, *fidelity.cells(measured), measured["no line"], measured["remat"]))
                            if options.docs:
                                text = measurements.table(("model", "mesh", *fidelity.SHOWN, "no line", "remat"), rows)
                                measurements.write("public-models", "python benchmarks/public_models.py --check --docs", text)
                        if options.show or not measured:
                            print(report, "\n", flush=True)
                except Exception:
                    bad += 1
                    print(f"{name:<14} {place:<6} FAILED\n{traceback.format_exc()}", flush=True)
            for message in {str(w.message) for w in caught if issubclass(w.category, shardplan.ShardingWarning)}:
                print(f"    {message}", flush=True)
        jax.clear_caches()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
