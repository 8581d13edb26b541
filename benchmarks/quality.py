"""Plans against expert layouts: every model planned and laid out by hand, compiled by XLA's GPU compiler for absent clusters, and
timed by one roofline.

    python benchmarks/quality.py                              every model on every cluster
    python benchmarks/quality.py gpt2 llama --target h100:8    some of them
    python benchmarks/quality.py --store quality.json          keep the results; with --again shardplan, compile these again
    python benchmarks/quality.py --store quality.json --docs   put the tables into docs/measurements.md, once every cell is stored

Seconds are read from the compiled program alone (`shardplan.xla.seconds`): a roofline over its kernels, and the part of its
collectives, priced by the cluster model, that XLA's schedule leaves exposed. `collect` is all seconds of collectives; the second ratio
is that of steps without overlap. `sent` is bytes that a device sends in one step. A layout that exceeds a GPU's memory counts only
where none fits.
A plan is compiled with the compiler options that are part of it; experts with XLA's own and, unless that is far behind, with those of
the plan, of which the faster program counts. Figures of plans against their own programs are those of `fidelity.py`.
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
import fidelity  # noqa: E402
import jax  # noqa: E402
import measurements  # noqa: E402
import zoo  # noqa: E402

import shardplan  # noqa: E402
from shardplan.mesh.collective import wire_bytes  # noqa: E402
from shardplan.xla.compiler.compile import Compiled, compile, lower_for  # noqa: E402
from shardplan.xla.compiler.options import as_known  # noqa: E402
from shardplan.xla.hlo.schedule import seconds  # noqa: E402

OURS = "shardplan"
TARGETS = {"h100:8": (2, 4), "h100:2x8": (2, 8), "h100:8x8": (8, 8)}
AXES = ("data", "model")
Store = dict[str, dict[str, dict]]
"""Model and target -> layout -> what was measured of it."""


def judge(compiled: Compiled, target: str) -> dict:
    """What XLA made of a step, in figures."""
    if not compiled.ok or compiled.memory is None:
        return {"error": compiled.error.strip().splitlines()[0][:200]}
    found = seconds(compiled, shardplan.Cluster.preset(target.partition(":")[0]))
    return {
        "seconds": found.step_s,
        "serial": found.total_s,
        "compute": found.compute_s,
        "collectives": found.collective_s,
        "exposed": found.exposed_s,
        "sent": sum(c.runs * wire_bytes(c.kind, c.bytes, c.group_size) for c in compiled.collectives if c.group_size > 1),
        "peak": compiled.memory.peak_bytes,
        "fits": bool(compiled.fits),
    }


def judge_lowered(lowered: jax.stages.Lowered, target: str, timeout_s: float, options: Mapping | None = None) -> dict:
    """What XLA makes of a step with these compiler options, in figures."""
    return judge(compile(lowered, target=target, timeout_s=timeout_s, options=as_known(options or {})), target)


FAR = 1.5
"""How far behind our plan a layout is with XLA's own compiler options, over which it is not compiled with the plan's, too."""


def measure(name: str, model: str, target: str, timeout_s: float, ours: Mapping) -> dict:
    """Figures of a layout: of our plan, or of an expert's faster program with XLA's own compiler options or with those of `ours`."""
    step, state, batch = zoo.QUALITY[model]()
    preset, mesh = target.partition(":")[0], mesh_of(target)
    start = time.perf_counter()
    try:
        if name == OURS:
            plan = shardplan.auto(mesh, donate_argnums=0, cluster=preset)(step).plan(state, batch)
            known = {"predicted": plan.seconds["total"], "planning": time.perf_counter() - start}
            report = plan.check(target, timeout_s=timeout_s)
            known |= {"options": dict(plan.compiler_options), **judge(report.compiled, target)}
            return known | ({"fidelity": fidelity.figures(report, preset)} if report.compiled.ok else {})
        expert = next(e for e in experts_on(target) if e.name == name)
        lowered = lower_for(target, experts.laid_out(expert, step, state, batch, mesh), state, batch)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    found: list[dict] = []
    for o in ({}, ours.get("options")):
        far = found and found[0].get("seconds", math.inf) > FAR * ours.get("seconds", math.inf)
        if o is not None and o not in [r["options"] for r in found] and not far:
            found.append({"options": o} | judge_lowered(lowered, target, timeout_s, o))
    return min(found, key=lambda r: (not r.get("fits"), r.get("seconds", math.inf)))


def mesh_of(target: str):
    return experts.twin(jax.sharding.AbstractMesh(TARGETS[target], AXES))


def experts_on(target: str) -> list[experts.Expert]:
    found = experts.experts(mesh_of(target), shardplan.Cluster.preset(target.partition(":")[0]).node_size)
    return [e for e in found if e.written]


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


COLUMNS = (OURS, *(e.name for e in experts_on("h100:8")))
HEADS = ("model", "GPUs", *COLUMNS, "ours over the best other")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.4g}"


def markdown(store: Store) -> str:
    """Milliseconds of each layout, and ours over the best other."""
    found, ratios = [], []
    for key, cell in store.items():
        model, target = key.split(" ")
        shown = {c: f"{milliseconds(r['seconds'])}{'' if r['fits'] else '!'}" for c, r in cell.items() if "seconds" in r}
        ratio = verdict(cell)[1]
        ratios += [] if math.isnan(ratio) else [ratio]
        last = "–" if math.isnan(ratio) else f"{ratio:.3f}"
        found.append((model, target.partition(":")[2], *(shown.get(c, "none fits" if c == OURS else "–") for c in COLUMNS), last))
    behind, finite = sum(r > 1.01 for r in ratios), [r for r in ratios if math.isfinite(r)]
    last = (
        f"{len(ratios)} cells, ours behind by more than 1 % in {behind}, geometric mean {mean(finite):.3f}, largest {max(ratios):.3f}."
    )
    return f"{measurements.table(HEADS, found)}\n\n{last}"


def fidelity_table(store: Store) -> str:
    """Plans against their own programs."""
    ours = {key: cell[OURS]["fidelity"] for key, cell in store.items() if "fidelity" in cell[OURS]}
    rows = [(model, target.partition(":")[2], *fidelity.cells(m)) for key, m in ours.items() for model, target in [key.split(" ")]]
    return fidelity.table(rows, list(ours.values()))


def write_page(store: Store) -> None:
    """Puts both tables into docs/measurements.md; ValueError while cells are missing."""
    wanted = {f"{model} {target}": {OURS, *(e.name for e in experts_on(target))} for target in TARGETS for model in zoo.QUALITY}
    if missing := [key for key, layouts in wanted.items() if not layouts <= store.get(key, {}).keys()]:
        raise ValueError(f"the page takes all cells; these are not, or not all, in the store: {', '.join(missing)}")
    whole = {key: store[key] for key in wanted}
    for section, text in (("quality", markdown(whole)), ("fidelity-clusters", fidelity_table(whole))):
        measurements.write(section, "python benchmarks/quality.py --docs", text)


def summary(store: Store) -> str:
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
    parser.add_argument("models", nargs="*", help=f"names or starts of them, of {', '.join(zoo.QUALITY)}")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--by", action="append", help="only these layouts")
    parser.add_argument("--store", type=Path, help="JSON of what was compiled; read and written")
    parser.add_argument("--again", action="append", default=[], help="compile these layouts again, although the store has them")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/measurements.md")
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    store = json.loads(options.store.read_text()) if options.store and options.store.exists() else {}
    models = [
        m
        for m in zoo.QUALITY
        if not options.models or any(m == c or (c not in zoo.QUALITY and m.startswith(c)) for c in options.models)
    ]
    shown = {}
    print(HEAD, flush=True)
    for target in options.target or TARGETS:
        for model in models:
            key = f"{model} {target}"
            cell = store.setdefault(key, {})
            for name in (OURS, *(e.name for e in experts_on(target))):
                if options.by and name not in options.by:
                    continue
                if name not in cell or name in options.again:
                    cell[name] = measure(name, model, target, options.timeout, cell.get(OURS, {}))
                    if options.store:
                        options.store.write_text(json.dumps(store, indent=1))
                print(line(model, target, name, cell[name]), flush=True)
            shown[key] = cell
    print(summary(shown))
    if options.docs:
        write_page(store)


if __name__ == "__main__":
    main()
