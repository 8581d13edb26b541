"""Which plans a change of the code changes: the decisions, predicted seconds and peak memory of every program of `benchmarks/` and
`examples/` on all its meshes, against a stored run.

    python benchmarks/frozen_plans.py --check                       plan everything again and list what differs
    python benchmarks/frozen_plans.py --write plans.json            store a run; run it on the code before the change
    python benchmarks/frozen_plans.py --check stored.json gpt2 moe  only these, or those whose names contain one of these
    python benchmarks/frozen_plans.py --quick --check               small programs only, about two minutes

Every program is planned in a process of its own, without devices. A program's record holds a digest of the strategy of every op, one of
every layout that is emitted, the predicted seconds and the bytes at the peak, all to the last bit, and, not compared, its planning
seconds and the process's peak memory. Records depend on the versions of jax, numpy and OR-Tools, which are stored too.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

EXAMPLES = ("digits_cnn", "dlrm", "face_softmax", "gpt", "hybrid_mlp", "llama", "moe")
OPTIONS = {
    "": {},
    "propagation": {"search": "propagation"},
    "recursive": {"search": "recursive"},
    "no-overlap": {"overlap": False},
    "hint": {"user_shardings": "hint"},
    "tight": {"memory": 0.75},
    "moderate": {"memory": "moderate"},
}
"""Options of `auto` by name; a number as `memory` is a fraction of the free plan's peak."""


def cases() -> dict[str, tuple]:
    """Name of a case -> (function that returns step, state and batch; mesh sizes; axis names; cluster; name of options; pins)."""
    import fidelity
    import planning
    import quality
    import schedules
    import zoo

    found: dict[str, tuple] = {}
    for name in EXAMPLES:
        for mesh in ("8", "2,4", "2,2,2"):
            for option in OPTIONS if mesh != "2,2,2" else ("",):
                found[f"example {name} {mesh} {option}".strip()] = (
                    lambda name=name: zoo.example(name), *fidelity.MESHES[mesh], "cpu" if not option else "h100", option, None,
                )  # fmt: skip
    for net in schedules.NETS:
        for axes in (("data",), ("data", "model")):
            mesh = "8" if len(axes) == 1 else "2,4"
            for way, wanted in schedules.pins(axes).items():
                found[f"schedules {net} {mesh} {way}"] = (
                    lambda net=net: schedules.net(*net), *fidelity.MESHES[mesh], "h100", "", wanted,
                )  # fmt: skip
    for name, make in fidelity.CASES.items():
        for mesh, place in fidelity.MESHES.items():
            found[f"fidelity {name} {mesh}"] = (make, *place, "h100", "", None)
    for name, make in zoo.QUALITY.items():
        for target, sizes in quality.TARGETS.items():
            found[f"quality {name} {target}"] = (make, sizes, quality.AXES, "h100", "", None)
    for case in planning.CASES:
        found[f"planning {case.name}"] = (case.step, tuple(case.mesh.values()), tuple(case.mesh), "h100", "", None)
    return found


def record(name: str) -> dict:
    """Plans one case in this process."""
    import jax

    import shardplan

    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    make, sizes, axes, cluster, option, pins = cases()[name]
    step, state, batch = make()
    mesh = jax.sharding.AbstractMesh(sizes, axes)
    options = dict(OPTIONS[option])
    if isinstance(options.get("memory"), float):
        free = shardplan.auto(mesh, cluster=cluster, donate_argnums=0)(step).plan(state, batch)
        options["memory"] = options["memory"] * free.memory().peak
    start = time.process_time()
    try:
        plan = shardplan.auto(mesh, cluster=cluster, donate_argnums=0, pins=pins, **options)(step).plan(state, batch)
    except shardplan.ShardingError as error:
        return {"error": str(error).splitlines()[0]}
    cpu_s = time.process_time() - start
    planned = plan.context.planned
    emitted = [
        [d.op, [[face(x) for x in read] for read in d.operand_layouts], [face(x) for x in d.result_layouts], list(d.copy_numbers)]
        for d in plan.decisions
    ]
    memory = plan.memory()
    return {
        "ops": len(planned.graph.ops),
        "strategies": digest([int(s) for s in planned.strategies]),
        "emitted": digest(emitted),
        "shardings": digest([face(leaf.layout) for leaf in (*plan.inputs, *plan.outputs)]),
        "seconds": {k: repr(float(v)) for k, v in plan.seconds.items()},
        "peak": repr(float(memory.peak)),
        "at_peak": sorted(repr(float(b)) for b in memory.at_peak.values()),
        "status": plan.status,
        "cpu_s": round(cpu_s, 2),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def face(layout) -> list | None:
    return layout and [[list(axes) for axes in layout.dims], [list(pair) for pair in layout.partial]]


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {package: version(package) for package in ("jax", "jaxlib", "numpy", "ortools")}


def same(before: dict, now: dict) -> list[str]:
    """Names of the figures that differ; not those of the machine."""
    return [k for k in {**before, **now} if k not in ("cpu_s", "peak_memory_mb") and before.get(k) != now.get(k)]


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of cases")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path, nargs="?", const=Path(__file__).with_suffix(".json"), help="default: the run stored here")
    parser.add_argument("--quick", action="store_true", help="the examples only")
    parser.add_argument("--processes", type=int, default=1, help="how many at once; 0: all in this process, quicker")
    options = parser.parse_args(argv)
    stored = json.loads(options.check.read_text()) if options.check else {"plans": {}}
    if options.check and stored["versions"] != versions():
        print(f"versions differ, plans may too: stored {stored['versions']}, here {versions()}")
    every = list(cases())
    names = [n for n in every if not options.names or any(n == part or (part in n and part not in every) for part in options.names)]
    names = [n for n in names if not options.quick or n.startswith("example ")]
    found: dict[str, dict] = {}
    differing = 0
    pool = multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) if options.processes else None
    with pool or contextlib.nullcontext():
        for name, now in zip(names, (pool.imap if pool else map)(record, names), strict=True):
            found[name] = now
            before = stored["plans"].get(name)
            changed = same(before, now) if before else []
            differing += bool(changed)
            what = ("differs in " + ", ".join(changed)) if changed else "" if not options.check else "same" if before else "not stored"
            print(f"{name:<48} {now.get('error') or now['status']:<12} {now.get('cpu_s', 0):>7} s  {what}", flush=True)
            if options.write:
                options.write.write_text(json.dumps({"versions": versions(), "plans": found}, indent=1) + "\n")
    if options.check:
        pairs = [(stored["plans"][n], now) for n, now in found.items() if "cpu_s" in now and "cpu_s" in stored["plans"].get(n, {})]
        for figure, what in (("cpu_s", "planning seconds"), ("peak_memory_mb", "peak memory")):
            if ratios := [now[figure] / before[figure] for before, now in pairs if before[figure]]:
                print(f"{what} over the stored run's: geometric mean {statistics.geometric_mean(ratios):.3f}, most {max(ratios):.2f}")
        print(f"{len(found)} plans, {differing} differ")
        sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
