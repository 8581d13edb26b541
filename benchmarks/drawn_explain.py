"""Where a drawn program's prediction and its compiled program differ: compute by source line and phase, and the kernels there.

python benchmarks/drawn_explain.py 3 --small
python benchmarks/drawn_explain.py 3 --small --by data     a layout of `structure.ways` instead of ours: its kernels alone
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import defaultdict
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import drawn_programs  # noqa: E402
import structure  # noqa: E402

import shardplan  # noqa: E402
from shardplan.mesh.rates import kernel_seconds  # noqa: E402
from shardplan.xla.compiler.compile import Compiled, compile, lower_for  # noqa: E402
from shardplan.xla.hlo.schedule import _FREE, _Walk, collective_s, seconds  # noqa: E402
from shardplan.xla.hlo.text import is_library  # noqa: E402

CALLS = ("while", "conditional", "call", "async-start")


def kernels(compiled: Compiled, cluster: shardplan.Cluster) -> list[tuple[tuple[str, str], float, float, str]]:
    """((source line, phase), seconds per step, runs, text) of every kernel and collective of a compiled step."""
    walk, device, found = _Walk(compiled.module, compiled.mesh), cluster.device, []

    def visit(computation: str, runs: float) -> None:
        for i in compiled.module.computations[computation]:
            if i.opcode in CALLS:
                for inner, times in walk.inside(i):
                    visit(inner, runs * times)
                continue
            if (c := walk.collective.get(i.name)) is not None:
                cost, kind = collective_s(c, cluster), f"{c.kind} {c.bytes / 1e6:.3f} MB over {c.axes}"
                found.append((("collectives", line_of(i.stack)), cost * runs, runs, kind))
                continue
            if i.opcode in _FREE or i.opcode.endswith("-done"):
                continue
            work = walk.work(i)
            cost = kernel_seconds(device, work.products, work.bytes) if work.products or work.bytes else 0.0
            phase = "backward" if "transpose(" in i.op_name else "forward" if "jvp" in i.op_name else "update"
            text = f"{i.name} {' '.join(map(str, i.arrays))[:60]} {work.bytes / 1e6:.3f} MB {work.flops / 1e9:.2f} GF"
            found.append(((line_of(i.stack), phase), cost * runs, runs, f"{text} {i.op_name[-60:]}"))

    visit(compiled.module.entry, 1.0)
    return found


def line_of(stack) -> str:
    """The innermost line that is no library's."""
    frame = next((f for f in stack if not is_library(f.file)), None)
    return f"{short(frame.file)}:{frame.line}" if frame else "?"


def short(source: str) -> str:
    return source.rsplit("/", 1)[-1]


def planned(plan) -> dict[tuple[str, str], float]:
    """(source line, phase) -> seconds of compute per step."""
    of, found = plan.context.planned, defaultdict(float)
    for i, op in enumerate(of.graph.ops):
        found[str(op.source), op.phase] += float(of.space.seconds[i][of.strategies[i]]) * op.runs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--by", help="a layout of structure.ways")
    parser.add_argument("--lines", type=int, default=12)
    parser.add_argument("--dump", type=Path, help="write the HLO there")
    options = parser.parse_args()
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    program = drawn_programs.draw(options.seed, "small" if options.small else "full")
    preset = program.target.partition(":")[0]
    cluster, expected = shardplan.Cluster.preset(preset), {}
    print(program.about)
    if options.by:
        read = structure.Structure(program.step, program.state, program.batch, program.mesh)
        laid = read.laid_out(next(w for w in structure.ways(program.mesh, cluster.node_size) if w.name == options.by))
        lowered = lower_for(program.target, laid.jitted(), program.state, program.batch)
    else:
        plan = shardplan.auto(program.mesh, donate_argnums=0, cluster=preset)(program.step).plan(program.state, program.batch)
        print(plan.explain(source=False))
        function, args = plan.context.program(plan)
        lowered, expected = lower_for(program.target, function, *args), planned(plan)
    compiled = compile(lowered, target=program.target, timeout_s=500)
    if not compiled.ok or compiled.memory is None:
        print(compiled.error)
        return
    if options.dump:
        options.dump.write_text(compiled.text)
    found = seconds(compiled, cluster)
    hidden = f"{1e3 * found.exposed_s:.3f} exposed of {1e3 * found.collective_s:.3f}"
    print(f"emitted: {1e3 * found.compute_s:.3f} ms compute, {hidden}, {compiled.memory}")
    emitted, at = defaultdict(float), defaultdict(list)
    for key, cost, runs, text in kernels(compiled, cluster):
        emitted[key] += cost
        at[key].append((cost, runs, text))
    keys = sorted(
        {*expected, *(k for k in emitted if k[0] != "collectives")}, key=lambda k: -abs(expected.get(k, 0.0) - emitted.get(k, 0.0))
    )
    for key in keys[: options.lines]:
        print(f"{key[0]:<28} {key[1]:<9} planned {1e3 * expected.get(key, 0.0):9.4f} ms, emitted {1e3 * emitted.get(key, 0.0):9.4f}")
        for cost, runs, text in sorted(at[key], reverse=True)[:5]:
            print(f"        {1e3 * cost:9.4f} x{runs:g} {text}")
    print("collectives:")
    every = [(x, key) for key, of in at.items() if key[0] == "collectives" for x in of]
    for (cost, runs, text), key in sorted(every, reverse=True)[:12]:
        print(f"        {1e3 * cost:9.4f} x{runs:g} {text} {key[1]}")
    if not options.by:
        print("planned, MB at the peak:", {k: round(v / 1e6, 1) for k, v in plan.memory().at_peak.items()}, plan.memory().where)
    print("buffers at the peak:")
    for b in compiled.peak[:16]:
        print(f"        {b.bytes / 1e6:9.3f} MB {b.array} {b.kind} {b.op_name[-80:]}")


if __name__ == "__main__":
    main()
