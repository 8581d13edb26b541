"""Plans against expert layouts: every model planned and laid out by hand, compiled by XLA's GPU compiler for absent clusters, and
timed by one roofline.

    python benchmarks/quality.py                              every model on every cluster
    python benchmarks/quality.py gpt2 llama --target h100:8    some of them
    python benchmarks/quality.py --store quality.json          keep the results; with --again shardplan, compile these again
    python benchmarks/quality.py --markdown quality.md         the table as a file
    python benchmarks/quality.py --options plan                experts compiled with the options of our plan, too

Seconds are read from the compiled program alone (`shardplan.xla.seconds`): a roofline over its kernels, and the part of its
collectives, priced by the cluster model, that XLA's schedule leaves exposed. `collect` is all seconds of collectives; the second ratio
is that of steps without overlap. `sent` is bytes that a device sends in one step. A layout that exceeds a GPU's memory counts only
where none fits.
A plan is compiled with the compiler options that are part of it; experts with XLA's own, or with those of the plan (`--options plan`).
Needs "shardplan[gpu-check]", no GPU.
"""

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import experts  # noqa: E402
import jax  # noqa: E402
import measurements  # noqa: E402
import zoo  # noqa: E402

import shardplan  # noqa: E402
from shardplan.mesh.collective import wire_bytes  # noqa: E402
from shardplan.xla.compiler.compile import compile, lower_for  # noqa: E402
from shardplan.xla.compiler.options import as_known  # noqa: E402
from shardplan.xla.hlo.schedule import seconds  # noqa: E402

OURS = "shardplan"
TARGETS = {"h100:8": (2, 4), "h100:2x8": (2, 8), "h100:8x8": (8, 8)}
AXES = ("data", "model")


def judge(lowered, target: str, timeout_s: float, options: Mapping | None = None) -> dict:
    """What XLA makes of a lowered step, with these compiler options, in figures."""
    compiled = compile(lowered, target=target, timeout_s=timeout_s, options=as_known(options or {}))
    if not compiled.ok or compiled.memory is None:
        return {"error": compiled.error.strip().splitlines()[0][:200]}
    found = seconds(compiled, shardplan.Cluster.preset(target.partition(":")[0]))
    return {
        "seconds": found.compute_s + found.exposed_s,
        "serial": found.total_s,
        "compute": found.compute_s,
        "collectives": found.collective_s,
        "exposed": found.exposed_s,
        "sent": sum(c.runs * wire_bytes(c.kind, c.bytes, c.group_size) for c in compiled.collectives if c.group_size > 1),
        "peak": compiled.memory.peak_bytes,
        "fits": bool(compiled.fits),
    }


def lowered_by(name: str, model: str, target: str):
    """The step of a model as `name` splits it, lowered, with its predicted seconds and compiler options where there are any."""
    step, state, batch = zoo.QUALITY[model]()
    preset = target.partition(":")[0]
    mesh = experts.twin(jax.sharding.AbstractMesh(TARGETS[target], AXES))
    if name == OURS:
        planned = shardplan.auto(mesh, donate_argnums=0, cluster=preset)(step)
        plan = planned.plan(state, batch)
        function, args = plan.context.program(plan)
        return lower_for(target, function, *args), plan.seconds["total"], dict(plan.compiler_options)
    expert = next(e for e in experts.experts(mesh, shardplan.Cluster.preset(preset).node_size) if e.name == name)
    return lower_for(target, experts.laid_out(expert, step, state, batch, mesh), state, batch), None, {}


def names(target: str) -> list[str]:
    mesh = jax.sharding.AbstractMesh(TARGETS[target], AXES)
    return [OURS, *(e.name for e in experts.experts(mesh, 8))]


def measure(name: str, model: str, target: str, timeout_s: float, options: dict | None = None) -> dict:
    """Figures of a layout; an expert's is compiled with `options`, ours with the plan's own."""
    start = time.perf_counter()
    try:
        lowered, predicted, own = lowered_by(name, model, target)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    planning = time.perf_counter() - start
    used = own or options or {}
    return {"predicted": predicted, "planning": planning, "options": used} | judge(lowered, target, timeout_s, used)


# ---- tables


def verdict(cell: dict[str, dict], measure: str = "seconds") -> tuple[str, float]:
    """(best other, ours over its, by this measure): among those that fit, where any does."""
    ours = cell.get(OURS, {})
    others = {k: v for k, v in cell.items() if k != OURS and measure in v}
    fitting = {k: v for k, v in others.items() if v["fits"]}
    if measure not in ours:
        return "", math.nan
    if not fitting:
        return ("no other fits" if ours["fits"] else "nothing fits"), math.nan
    best = min(fitting, key=lambda k: fitting[k][measure])
    return best, ours[measure] / max(1e-9, fitting[best][measure]) if ours["fits"] else math.inf


def line(model: str, target: str, name: str, r: dict) -> str:
    if "seconds" not in r:
        return f"{model:<12} {target:<9} {name:<12} {r.get('error', '')}"
    ms = " ".join(f"{1e3 * r[k]:>9.2f}" for k in ("seconds", "compute", "exposed", "collectives"))
    predicted = f"{1e3 * r['predicted']:>9.2f}" if r.get("predicted") else " " * 9
    memory = f"{r['peak'] / 1e9:>7.2f}{' ' if r['fits'] else '!'}"
    return f"{model:<12} {target:<9} {name:<12} {ms} {r['sent'] / 1e6:>9.0f} {memory} {predicted}"


HEAD = (
    f"{'model':<12} {'target':<9} {'by':<12} {'ms':>9} {'compute':>9} {'exposed':>9} {'collect':>9} {'sent MB':>9} {'GB':>7}  "
    f"{'predicted':>9}"
)


def markdown(store: dict[str, dict[str, dict]]) -> str:
    """The table of all cells: milliseconds of each layout, and ours over the best other."""
    columns = list(dict.fromkeys(name for cell in store.values() for name in cell))
    rows = ["| model | target | " + " | ".join(columns) + " | ours over the best other | nothing hidden |"]
    rows.append("|---" * (len(columns) + 4) + "|")
    for key, cell in store.items():
        model, target = key.split(" ")
        entries = [
            f"{1e3 * cell[c]['seconds']:.4g}" + ("" if cell[c]["fits"] else " (too large)") if "seconds" in cell.get(c, {}) else "–"
            for c in columns
        ]
        ratios = [verdict(cell, measure)[1] for measure in ("seconds", "serial")]
        shown = ["–" if math.isnan(r) else f"{r:.3f}" for r in ratios]
        rows.append(f"| {model} | {target} | {' | '.join((*entries, *shown))} |")
    return "\n".join(rows) + "\n"


def summary(store: dict[str, dict[str, dict]]) -> str:
    lines = []
    for key, cell in store.items():
        (best, ratio), (other, serial) = verdict(cell), verdict(cell, "serial")
        lines.append(f"{key:<24} ours / best {ratio:6.3f} {best or 'none':<13}   nothing hidden {serial:6.3f} {other or 'none'}")
    best = [(cell[OURS], cell[name]) for cell in store.values() if (name := verdict(cell)[0]) in cell]
    if exposed := [ours["exposed"] / other["exposed"] for ours, other in best if ours["exposed"] and other["exposed"]]:
        lines.append(f"exposed communication over that of the best other: geometric mean {mean(exposed):.3f}")
    for measure in ("seconds", "serial"):
        found = [verdict(cell, measure)[1] for cell in store.values()]
        if ratios := [r for r in found if math.isfinite(r)]:
            behind = sum(r > 1.02 for r in found)
            lines.append(f"{measure}: behind by more than 2 % in {behind} of {len(found)} cells, geometric mean {mean(ratios):.3f}")
    return "\n".join(lines)


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"starts of names, of {', '.join(zoo.QUALITY)}")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--by", action="append", help="only these layouts")
    parser.add_argument("--store", type=Path, help="JSON of what was compiled; read and written")
    parser.add_argument("--again", action="append", default=[], help="compile these layouts again, although the store has them")
    which = "what experts' layouts are compiled with: XLA's defaults, or the options of our plan (compiled before, or in the store)"
    parser.add_argument("--options", choices=["default", "plan"], default="default", help=which)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/measurements.md")
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    store = json.loads(options.store.read_text()) if options.store and options.store.exists() else {}
    models = [m for m in zoo.QUALITY if not options.models or any(m.startswith(c) for c in options.models)]
    shown = {}
    print(HEAD, flush=True)
    for target in options.target or TARGETS:
        for model in models:
            key = f"{model} {target}"
            cell = store.setdefault(key, {})
            for name in names(target):
                if options.by and name not in options.by:
                    continue
                if name not in cell or name in options.again:
                    same = cell.get(OURS, {}).get("options") if options.options == "plan" and name != OURS else None
                    cell[name] = measure(name, model, target, options.timeout, same)
                    if options.store:
                        options.store.write_text(json.dumps(store, indent=1))
                print(line(model, target, name, cell[name]), flush=True)
            shown[key] = cell
    print(summary(shown))
    if options.markdown:
        options.markdown.write_text(markdown(shown))
    if options.docs:
        text = f"{markdown(shown)}\n```text\n{summary(shown)}\n```"
        measurements.write("quality", "python benchmarks/quality.py --docs", text)


if __name__ == "__main__":
    main()
