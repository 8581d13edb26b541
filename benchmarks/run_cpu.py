"""Plans against expert layouts, run: small models on 8 emulated CPU devices, all layouts of one model in turns.

    python benchmarks/run_cpu.py                              every model; measures the machine first (about 20 s)
    python benchmarks/run_cpu.py dlrm moe --cluster here.json  some of them, with the prices of an earlier run (`--save here.json`)

`predicted` is `shardplan.xla.seconds` of the program that XLA emitted, at the prices measured here; `planned` is the plan's own
seconds. The last lines are rank correlations (Spearman) of predicted and measured seconds. Devices share the machine's cores, so an
idle device leaves its core to others: the figures show the order of the layouts, not the seconds of a cluster.
As on an accelerator, a device keeps the memory that it once allocated (`harness.emulate_devices`).
"""

import argparse
import importlib
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import experts  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from harness import emulate_devices  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

import shardplan  # noqa: E402
from shardplan.mesh.layout import MeshShape  # noqa: E402
from shardplan.xla.hlo.schedule import seconds_of  # noqa: E402

OURS = "shardplan"
MODELS = ("hybrid_mlp", "dlrm", "face_softmax", "digits_cnn", "gpt", "llama", "moe")


def programs(name: str, mesh, cluster, only=None):
    """(layout, jitted step, planned seconds, fresh state, batch) of every layout of an example at its demo size."""
    module = importlib.import_module(name)
    create_state, train_step, batches = module.build(module.DEMO)
    key, batch = jax.random.key(0), jax.tree.map(jax.numpy.asarray, next(iter(batches(1))))
    shapes, batch_shapes = (  # of numpy arrays: no weak types
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), of) for of in (jax.eval_shape(create_state, key), batch)
    )
    create = jax.jit(create_state)

    def fresh():
        return jax.tree.map(np.asarray, create(key))

    for layout in [OURS, *(e.name for e in experts.experts(mesh, mesh.size))]:
        if only and layout not in only:
            continue
        if layout == OURS:
            step = shardplan.auto(mesh, donate_argnums=0, cluster=cluster)(train_step)
            plan = step.plan(shapes, batch_shapes)
            yield layout, plan.context.program(plan)[0], plan.seconds["total"], fresh, batch
        else:
            expert = next(e for e in experts.experts(mesh, mesh.size) if e.name == layout)
            yield layout, experts.laid_out(expert, train_step, shapes, batch_shapes, mesh), None, fresh, batch


def run(name: str, mesh, cluster, rounds: int, only=None) -> list[dict]:
    """Seconds of every layout: planned, predicted and measured (the median of `rounds` turns)."""
    shape = MeshShape(tuple(mesh.axis_names), tuple(mesh.devices.shape))
    found, running = [], []
    for layout, step, planned, fresh, batch in programs(name, mesh, cluster, only):
        state = fresh()
        text = step.lower(state, batch).compile().as_text()
        row = {"model": name, "layout": layout, "planned": planned, "predicted": seconds_of(text, cluster, shape).total_s, "times": []}
        for _ in range(2):  # the second call may compile once more, for the layouts that XLA chose
            state = step(state, batch)[0]
        running.append([row, step, jax.block_until_ready(state), batch])
        found.append(row)
    for _ in range(rounds):
        for turn in running:
            row, step, state, batch = turn
            start = time.perf_counter()
            turn[2] = jax.block_until_ready(step(state, batch))[0]
            row["times"].append(time.perf_counter() - start)
    for row in found:
        row["measured"] = float(np.median(row["times"]))
    return found


def rank_correlation(rows) -> float:
    """Of predicted and measured seconds (Spearman's); NaN for fewer than two rows."""
    return float(spearmanr([r["predicted"] for r in rows], [r["measured"] for r in rows])[0]) if len(rows) > 1 else float("nan")


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--by", action="append", help="only these layouts")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cluster", help="a cluster file instead of measuring")
    parser.add_argument("--save", help="where to keep what was measured")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    emulate_devices()
    mesh = experts.twin(jax.make_mesh((2, 4), ("data", "model")))
    cluster = shardplan.Cluster.load(options.cluster) if options.cluster else shardplan.calibrate(mesh, options.save)
    print(f"{'model':<13} {'by':<12} {'measured':>9} {'predicted':>9} {'planned':>9}  ms per step, mesh 2x4")
    rows: list[dict] = []
    for name in options.models or MODELS:
        here = run(name, mesh, cluster, options.rounds, options.by)
        for row in here:
            planned = f"{1e3 * row['planned']:>9.2f}" if row["planned"] else ""
            print(f"{name:<13} {row['layout']:<12} {1e3 * row['measured']:>9.2f} {1e3 * row['predicted']:>9.2f} {planned}", flush=True)
        rows += here
    inside = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        inside[name] = rank_correlation([row for row in rows if row["model"] == name])
    print("rank correlation of predicted and measured seconds: " + ", ".join(f"{n} {x:.2f}" for n, x in inside.items()))
    print(f"mean within a model {np.mean(list(inside.values())):.2f}; over all {len(rows)} programs {rank_correlation(rows):.2f}")
    for name in inside:
        of = {row["layout"]: row["measured"] for row in rows if row["model"] == name}
        others = {layout: s for layout, s in of.items() if layout != OURS}
        if OURS in of and others:
            best = min(others, key=lambda layout: others[layout])
            print(f"{name:<13} ours over the best other ({best}): {of[OURS] / others[best]:.2f}")


if __name__ == "__main__":
    main()
