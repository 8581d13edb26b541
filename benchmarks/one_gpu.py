"""Kernels and whole steps on the clock of one GPU, beside what shardplan says they take.

    python benchmarks/one_gpu.py measure benchmarks/clocked/h200     on a machine with a GPU: needs jax with CUDA and optax, no solver
    python benchmarks/one_gpu.py compare benchmarks/clocked/h200     anywhere: predicted over measured, by step and by kind of kernel
    python benchmarks/one_gpu.py compare benchmarks/clocked/h200 --ops     every op that was measured alone
    python benchmarks/one_gpu.py compare benchmarks/clocked/h200 --docs    the tables into docs/measurements.md

`measure` writes a file per program into the folder: seconds of every instruction of XLA's program, from the profiler, seconds of whole
steps from the host's clock, bytes that were allocated, clocks and watts meanwhile, and the program's HLO as compiled there, with
what XLA's autotuner chose. A second call measures what is missing. `compare` prices that same HLO with the rates of `--cluster`, so
what differs are rates and not programs; and it plans the step for a mesh of one such device, as a user would.

The arrays hold random numbers, but positive ones. These take less power than a trained model's, so products run somewhat faster here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import one_gpu_programs as programs  # noqa: E402

from shardplan.mesh.kernel_clock import NO_GRAPHS, KernelEvent, kernel_events  # noqa: E402

RUNS, TRACED_STEPS, WARM_S = 10, 3, 2.0
TOGETHER = 48
"""Ops in one trace."""
COMPILED = 8
"""Steps that are compiled side by side, before any of them runs."""


# ---- measuring


@partial(jax.jit, static_argnums=(0, 1, 2))
def leaf(shape: tuple[int, ...], dtype, below: int) -> jax.Array:
    """Floats up to 0.02, and integers below a bound; a scalar integer is 0, since it counts steps."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    bits = jax.random.bits(jax.random.key(1, impl="rbg"), shape, jnp.uint32)
    if jnp.issubdtype(dtype, jnp.floating):
        return (0.02 * (bits >> 8).astype(jnp.float32) * 2**-24).astype(dtype)
    return (bits % below).astype(dtype) if shape else jnp.zeros((), dtype)


def drawn(shapes: Any, below: int) -> Any:
    """Arrays of these shapes."""
    return jax.tree.map(lambda x: leaf(x.shape, x.dtype, below), shapes)


def by_instruction(events: list[KernelEvent], runs: int) -> dict[str, list[float]]:
    """Instruction, or '?' and the kernel where the profiler names none -> [seconds of one run, kernels of one run]."""
    out: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for e in events:
        entry = out[e.instruction or "?" + e.kernel[:100]]
        entry[0] += e.ns * 1e-9 / runs
        entry[1] += 1 / runs
    return dict(out)


def busy_s(events: list[KernelEvent]) -> float:
    """Seconds in which any kernel ran."""
    busy, until = 0.0, 0.0
    for start, stop in sorted((e.start_ns, e.start_ns + e.ns) for e in events):
        busy, until = busy + max(0.0, stop - max(start, until)), max(until, stop)
    return busy * 1e-9


class Watched:
    """MHz, watts and degrees of the first GPU while a block runs; what went wrong where they can't be read."""

    def __enter__(self):
        self.seen, self.ended = [], threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self):
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self.ended.wait(0.05):
                clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
                self.seen.append((clock, pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3, pynvml.nvmlDeviceGetTemperature(gpu, 0)))
        except Exception as error:  # no such package, no right to ask: the rest is measured all the same
            self.seen = [repr(error)]

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    @property
    def last(self) -> list:
        """Medians of the second half."""
        rows = [row for row in self.seen[len(self.seen) // 2 :] if not isinstance(row, str)]
        return [statistics.median(column) for column in zip(*rows, strict=True)] or self.seen[:1]


def hlo_of(program) -> str:
    """The program's text, without what says where it came from."""
    text = re.sub(r", metadata=\{[^{}]*\}", "", program.as_text())
    return re.sub(r"(?m)^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)+", "", text)


def save(folder: Path, name: str, record: dict) -> None:
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    with gzip.open(folder / f"{name}.json.gz", "wt") as f:
        json.dump(about | record, f)


def compiled_alone(at: int, op: programs.OneOp, options: dict | None):
    """The program, whose module is named after the op's number; or what went wrong."""

    def run(*args):
        return op.run(*args)

    run.__name__ = f"op{at}"
    try:
        return jax.jit(run).lower(*op.shapes).compile(options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def timed(program, op: programs.OneOp, wait: bool) -> float:
    """Seconds of one run on the host's clock; the first of `RUNS` + 1 is not counted."""
    args, last = drawn(op.shapes, op.below), None
    jax.block_until_ready(program(*args))
    start = time.perf_counter()
    for _ in range(RUNS):
        last = program(*args)
        if wait:
            jax.block_until_ready(last)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / RUNS


def all_timed(ops: list[tuple[Any, programs.OneOp]]) -> None:
    """Runs ops one after the other, each run waited for."""
    for program, op in ops:
        timed(program, op, wait=True)


def measure_ops(folder: Path, end: float, only: str) -> None:
    """The kernels of every op, in groups that are traced together."""
    todo, out = [o for o in programs.ops() if only in o.name], []
    options = NO_GRAPHS if jax.default_backend() == "gpu" else None
    for first in range(0, len(todo), TOGETHER):
        if time.time() > end:
            return
        group = dict(enumerate(todo[first : first + TOGETHER], first))
        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(group, pool.map(compiled_alone, group.keys(), group.values(), [options] * len(group)), strict=True))
        ready: dict[int, float] = {}
        for at, program in found.items():
            try:
                if not isinstance(program, str):
                    ready[at] = timed(program, group[at], wait=False)
            except Exception as error:
                found[at] = f"{type(error).__name__}: {error}"[:300]
        modules: dict[str, list[KernelEvent]] = defaultdict(list)
        for e in kernel_events(partial(all_timed, [(found[at], group[at]) for at in ready])):
            modules[e.module.split("(")[0]].append(e)
        for at, program in found.items():
            record: dict = {"name": group[at].name}
            if isinstance(program, str):
                out.append(record | {"error": program})
                print("failed:", group[at].name, program)
            else:
                seconds = by_instruction(modules[f"jit_op{at}"], RUNS + 1)
                out.append(record | {"host_s": ready[at], "ops": seconds, "hlo": hlo_of(program)})
        save(folder, "ops", {"ops": out})
        print(f"{len(out)} of {len(todo)} ops, {end - time.time():.0f} s left", flush=True)


class Ready(NamedTuple):
    """A step whose two programs are compiled: as users run it, and without CUDA graphs, so that kernels keep their names."""

    state: Any
    batch: Any
    program: Any
    plain: Any
    compile_s: float


def compiled(one: programs.OneStep) -> Ready | str:
    """The step, compiled; or what went wrong."""
    try:
        step, state, batch = one.make()
        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
        began = time.time()
        program = lowered.compile()
        took = time.time() - began
        return Ready(state, batch, program, lowered.compile(NO_GRAPHS) if jax.default_backend() == "gpu" else program, took)
    except Exception:
        return traceback.format_exc(limit=3)


def measure_step(folder: Path, name: str, below: int, step: Ready) -> str:
    """One whole step: host's clock with XLA's default options, kernels without CUDA graphs."""
    state_shapes, batch_shapes, program, plain, compile_s = step
    record: dict = {"name": name, "compile_s": compile_s, "hlo": hlo_of(plain)}
    memory = program.memory_analysis()
    record["memory"] = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
    state, batch = drawn(state_shapes, below), drawn(batch_shapes, below)

    def rounds(run, n: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(n):
            state, _ = run(state, batch)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / n

    rounds(program, 1)
    n = max(1, min(200, round(WARM_S / 4 / rounds(program, 1))))
    with Watched() as watched:
        record["step_s"] = [rounds(program, n) for _ in range(4)]
    record["clocks"] = watched.last
    rounds(plain, 1)
    record["no_graphs_s"] = [rounds(plain, max(1, n // 4)) for _ in range(2)]
    events = kernel_events(lambda: rounds(plain, TRACED_STEPS))
    record |= {"ops": by_instruction(events, TRACED_STEPS), "busy_s": busy_s(events) / TRACED_STEPS}
    record["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    save(folder, f"step-{name}", record)
    return f"{name}: {min(record['step_s']) * 1e3:.2f} ms, kernels {record['busy_s'] * 1e3:.2f} ms, at {record['clocks']}"


def measure(folder: Path, what: str, limit_s: float, only: str) -> None:
    """Measures what the folder does not have yet."""
    end = time.time() + limit_s
    folder.mkdir(parents=True, exist_ok=True)
    print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
    if what != "steps" and not (folder / "ops.json.gz").exists():
        measure_ops(folder, end, only)
    wanted = [one for one in programs.steps() if only in one.name and not (folder / f"step-{one.name}.json.gz").exists()]
    for first in range(0, len(wanted) if what != "ops" else 0, COMPILED):
        group = wanted[first : first + COMPILED]
        with ThreadPoolExecutor(COMPILED) as pool:
            ready = list(pool.map(compiled, group))
        print(f"{len(group)} compiled, {end - time.time():.0f} s left", flush=True)
        for one, step in zip(group, ready, strict=True):
            if time.time() > end:
                return
            try:
                done = f"failed: {one.name} {step}" if isinstance(step, str) else measure_step(folder, one.name, one.below, step)
            except Exception:  # out of memory: the next step
                done = f"failed: {one.name} {traceback.format_exc(limit=3)}"
            print(done, f"{end - time.time():.0f} s left", flush=True)


# ---- comparing


def load(file: Path) -> dict:
    with gzip.open(file, "rt") as f:
        return json.load(f)


KINDS = ("products", "convolutions", "rows", "reductions", "transposes", "lookups", "elementwise", "others")


def kind_of(instruction, body: tuple, work) -> str:
    """Which of `KINDS` a kernel is."""
    codes, attributes = {i.opcode for i in body}, instruction.attributes
    if "__cudnn$conv" in attributes or "convolution" in codes:
        return "convolutions"
    if work.products:
        return "products"
    if codes & {"gather", "scatter", "dynamic-update-slice"}:
        return "lookups"
    if "reduce" in codes:
        return "rows" if "__triton" in attributes and re.match(r"fusion", instruction.name) else "reductions"
    if "transpose" in codes:
        return "transposes"
    return "others" if codes & {"custom-call", "sort", "reduce-window", "fft"} else "elementwise"


def kernels_of(record: dict, cluster) -> Iterator[tuple[str, str, float, float]]:
    """(name, kind, seconds measured, seconds predicted) of every kernel of a program, all its runs."""
    from shardplan.xla.hlo.schedule import kernels, work_s
    from shardplan.xla.hlo.text import read

    module = read(record["hlo"])
    for i, (work, runs) in kernels(module).items():
        inner = [module.computations[name] for names in i.callees.values() for name in names]
        body = tuple(x for some in inner for x in some) if i.opcode == "fusion" else (i,)
        yield i.name, kind_of(i, body, work), record["ops"].get(i.name, (0.0, 0.0))[0], runs * work_s(work, cluster)


def planned_s(one: programs.OneStep, cluster) -> float:
    """Seconds that a plan for one device predicts."""
    import shardplan

    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step, state, batch = one.make()
    return shardplan.auto(mesh, donate_argnums=0, cluster=cluster)(step).plan(state, batch).seconds["total"]


def ops_of(folder: Path, cluster) -> dict[str, tuple[float, float]]:
    """Op that was measured alone -> (seconds measured, seconds predicted) of its kernels."""
    ran = [record for record in load(folder / "ops.json.gz")["ops"] if "error" not in record]
    rows = {record["name"]: list(kernels_of(record, cluster)) for record in ran}
    return {name: (sum(row[2] for row in some), sum(row[3] for row in some)) for name, some in rows.items()}


def compare_ops(folder: Path, cluster) -> None:
    """A line per op that was measured alone."""
    for name, (measured, predicted) in ops_of(folder, cluster).items():
        ratio = predicted / measured if measured else math.nan
        print(f"{name:52} measured {measured * 1e6:9.1f} us  predicted {predicted * 1e6:9.1f} us  {ratio:.2f}")


def compare(folder: Path, cluster) -> str:
    """Two tables: by step, and by kind of kernel."""
    import measurements

    known = {one.name: one for one in programs.steps()}
    steps, kinds = [], {kind: [0, 0.0, 0.0] for kind in KINDS}
    for file in sorted(folder.glob("step-*.json.gz")):
        record = load(file)
        step, priced, planned = min(record["step_s"]), 0.0, planned_s(known[record["name"]], cluster)
        for _, kind, measured, predicted in kernels_of(record, cluster):
            priced += predicted
            if measured:  # the profiler does not name asynchronous fusions
                kinds[kind] = [a + b for a, b in zip(kinds[kind], (1, measured, predicted), strict=True)]
        mhz, watts, *_ = (*record["clocks"], math.nan, math.nan)
        steps.append((record["name"], f"{step * 1e3:.2f}", f"{record['busy_s'] * 1e3:.2f}", f"{mhz:.0f}", f"{watts:.0f}",
                      f"{priced / record['busy_s']:.2f}", f"{planned / step:.2f}"))  # fmt: skip
        print(*steps[-1], flush=True)
    heads = ("step", "clock, ms", "kernels, ms", "MHz", "W", "priced ÷ kernels", "planned ÷ clock")
    by_kind = ((kind, n, f"{t * 1e3:.1f}", f"{p / t:.2f}") for kind, (n, t, p) in kinds.items() if t)
    return (
        f"{measurements.table(heads, steps)}\n\n"
        f"{measurements.table(('kernels of all steps', 'how many', 'ms', 'predicted ÷ measured'), by_kind)}"
    )


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("do", choices=("measure", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--what", choices=("ops", "steps", "all"), default="all", help="what is measured")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which no measurement begins")
    parser.add_argument("--only", default="", help="part of the names of what is measured")
    parser.add_argument("--cluster", help="preset or cluster file that prices (default: the folder's name)")
    parser.add_argument("--ops", action="store_true", help="compare ops that were measured alone")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/measurements.md")
    options = parser.parse_args(argv)
    if options.do == "measure":
        measure(options.folder, options.what, options.limit, options.only)
        return
    from shardplan.mesh.cluster import resolve

    cluster = resolve(options.cluster or options.folder.name)
    if options.ops:
        compare_ops(options.folder, cluster)
        return
    text = compare(options.folder, cluster)
    print(text)
    if options.docs:
        import measurements

        measurements.write("one-gpu", f"python benchmarks/one_gpu.py compare {options.folder} --docs", text)


if __name__ == "__main__":
    main()
