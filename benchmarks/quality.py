"""Plans against expert layouts: every model planned and laid out by hand, compiled by XLA's GPU compiler for absent clusters, and
timed by one roofline.

    python benchmarks/quality.py                              every model on every cluster
    python benchmarks/quality.py gpt2 llama --target h100:8    some of them
    python benchmarks/quality.py --store quality.json          keep the results; with --again shardplan, compile these again
    python benchmarks/quality.py --markdown quality.md         the table as a file
    python benchmarks/quality.py --options both                experts compiled with the options of our plan, too
    python benchmarks/quality.py --layouts 2                   per cell, the two experts that are fastest in docs/measurements.md

Seconds are read from the compiled program alone (`shardplan.xla.seconds`): a roofline over its kernels, and the part of its
collectives, priced by the cluster model, that XLA's schedule leaves exposed. `collect` is all seconds of collectives; the second ratio
is that of steps without overlap. `sent` is bytes that a device sends in one step. A layout that exceeds a GPU's memory counts only
where none fits.
A plan is compiled with the compiler options that are part of it; experts with XLA's own, with those of the plan (`--options plan`), or
with both, of which the faster program counts (`--options both`).
What an expert's layout compiles to does not depend on the planner: with `--layouts`, those that the table has far behind are left out.
Needs "shardplan[gpu-check]", no GPU.
"""

import argparse
import datetime
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
OPTIONS = {"default": lambda own: [{}], "plan": lambda own: [own], "both": lambda own: [{}, own] if own else [{}]}
"""Compiler options that experts' layouts are compiled with, from those of our plan."""


def judge(lowered, target: str, timeout_s: float, options: Mapping | None = None) -> dict:
    """What XLA makes of a lowered step, with these compiler options, in figures."""
    compiled = compile(lowered, target=target, timeout_s=timeout_s, options=as_known(options or {}))
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


def lowered_by(name: str, model: str, target: str):
    """The step of a model as `name` splits it, lowered, with its predicted seconds and compiler options where there are any."""
    step, state, batch = zoo.QUALITY[model]()
    preset, mesh = target.partition(":")[0], mesh_of(target)
    if name == OURS:
        planned = shardplan.auto(mesh, donate_argnums=0, cluster=preset)(step)
        plan = planned.plan(state, batch)
        function, args = plan.context.program(plan)
        return lower_for(target, function, *args), plan.seconds["total"], dict(plan.compiler_options)
    expert = next(e for e in experts_on(target) if e.name == name)
    return lower_for(target, experts.laid_out(expert, step, state, batch, mesh), state, batch), None, {}


def mesh_of(target: str):
    return experts.twin(jax.sharding.AbstractMesh(TARGETS[target], AXES))


def experts_on(target: str) -> list[experts.Expert]:
    return experts.experts(mesh_of(target), shardplan.Cluster.preset(target.partition(":")[0]).node_size)


def names(model: str, target: str, layouts: int | None) -> list[str]:
    """Layouts to compile, ours first: all experts', or those that were fastest when the page's row was made."""
    others = [e.name for e in experts_on(target)]
    row = rows_of_page().get(f"{model} {target}")
    if layouts is None or row is None:
        return [OURS, *others]
    known = {name: row[name].strip("()") for name in others if row.get(name, "–") != "–"}
    return [OURS, *sorted(known, key=lambda name: ("!" in known[name], float(known[name].strip("!"))))[:layouts]]


def measure(name: str, model: str, target: str, timeout_s: float, options: list[dict]) -> dict:
    """Figures of a layout; an expert's is that of the fastest program with any of these `options`, ours has the plan's own."""
    start = time.perf_counter()
    try:
        lowered, predicted, own = lowered_by(name, model, target)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    known = {"predicted": predicted, "planning": time.perf_counter() - start, "day": str(datetime.date.today())}
    found = [known | {"options": o} | judge(lowered, target, timeout_s, o) for o in ([own] if name == OURS else options)]
    return min(found, key=lambda r: (not r.get("fits"), r.get("seconds", math.inf)))


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


COLUMNS = (OURS, *(e.name for e in experts_on("h100:8") if e.written))
OLDER = "older"
HEADS = ("model", "GPUs", *COLUMNS, "ours over the best other", "day")


def rows(store: dict[str, dict[str, dict]]) -> dict[str, dict[str, str]]:
    """Cell -> its row of the table: milliseconds of each layout, ours over the best other, and when that was measured."""
    found = {}
    for key, cell in store.items():
        model, target = key.split(" ")
        shown = {c: f"{1e3 * r['seconds']:.4g}{'' if r['fits'] else '!'}" for c, r in cell.items() if "seconds" in r}
        ratio = verdict(cell)[1]
        values = (shown.get(c, "–") for c in COLUMNS)
        last = "–" if math.isnan(ratio) else f"{ratio:.3f}"
        found[key] = dict(zip(HEADS, (model, target.partition(":")[2], *values, last, cell.get(OURS, {}).get("day", "")), strict=True))
    return found


def rows_of_page() -> dict[str, dict[str, str]]:
    """The rows that docs/measurements.md has."""
    section = next(m["text"] for m in measurements.SECTION.finditer(measurements.PAGE.read_text()) if m["name"] == "quality")
    table = [[x.strip() for x in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")]
    found = [dict(zip(table[0], row, strict=True)) for row in table[1:] if not row[0].startswith("---")]
    return {f"{row['model']} h100:{row['GPUs']}": row for row in found}


def over(old: dict[str, str] | None, new: dict[str, str]) -> dict[str, str]:
    """A new row; what it does not have keeps its old figure, in parentheses."""
    kept = {name: f"({old[name].strip('()')})" for name in COLUMNS[1:] if new[name] == "–" and old[name] != "–"} if old else {}
    return new | kept


def markdown(rows: dict[str, dict[str, str]]) -> str:
    return measurements.table(HEADS, (tuple(row.get(h, OLDER) for h in HEADS) for row in rows.values()))


def by_day(rows: dict[str, dict[str, str]]) -> str:
    """Cells, those behind and the mean ratio, of the rows of each day and of all."""
    found: dict[str, list[float]] = {}
    for row in rows.values():
        if (ratio := row["ours over the best other"]) != "–":
            found.setdefault(row.get("day") or OLDER, []).append(float(ratio))
    lines = []
    for day, ratios in {**found, "all": [r for some in found.values() for r in some]}.items():
        behind, finite = sum(r > 1.01 for r in ratios), [r for r in ratios if math.isfinite(r)]
        lines.append(f"{day:<10} {len(ratios):>2} cells, behind by more than 1 % in {behind}, geometric mean {mean(finite):.3f}")
    return "\n".join(lines)


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
    parser.add_argument("models", nargs="*", help=f"names or starts of them, of {', '.join(zoo.QUALITY)}")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--by", action="append", help="only these layouts")
    parser.add_argument("--store", type=Path, help="JSON of what was compiled; read and written")
    parser.add_argument("--again", action="append", default=[], help="compile these layouts again, although the store has them")
    parser.add_argument("--layouts", type=int, metavar="N", help="compile only the N experts that the page's table has as fastest")
    which = "what experts' layouts are compiled with: XLA's defaults, or the options of our plan (compiled before, or in the store)"
    parser.add_argument("--options", choices=list(OPTIONS), default="default", help=which)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/measurements.md")
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
            for name in names(model, target, options.layouts):
                if options.by and name not in options.by:
                    continue
                if name not in cell or name in options.again:
                    own = cell.get(OURS, {}).get("options") or {}
                    cell[name] = measure(name, model, target, options.timeout, OPTIONS[options.options](own))
                    if options.store:
                        options.store.write_text(json.dumps(store, indent=1))
                print(line(model, target, name, cell[name]), flush=True)
            shown[key] = cell
    print(summary(shown))
    measured = rows(shown)
    if options.markdown:
        options.markdown.write_text(markdown(measured))
    if options.docs:
        page = rows_of_page()
        table = page | {key: over(page.get(key), row) for key, row in measured.items()}
        text = f"{markdown(table)}\n\n```text\n{by_day(table)}\n```"
        asked = f"{f' --layouts {options.layouts}' if options.layouts else ''} --options {options.options}"
        measurements.write("quality", f"python benchmarks/quality.py{asked} --docs", text)


if __name__ == "__main__":
    main()
