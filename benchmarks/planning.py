"""How long planning takes, stage by stage, and what a planned step costs at dispatch.

    python benchmarks/planning.py [--only gpt2,dispatch] [--cluster h100] [--search propagation] [--compile] [--json rows.json]

Every case is planned in a process of its own, without devices, so that its peak memory is its own. `trace` is JAX's tracing, which
jit pays too. `plan` is the call `step.plan(...)`, which traces the step once more; `cpu` its processor seconds over all threads, which
vary less on a busy machine. The columns after these are the stages of `plan`:

    graph       jaxpr to graph                   solve       the integer program
    strategies  strategies of every op           decisions   the constraints to emit
    network     prices of all reshards           rest        fingerprint, and the description of the plan
    propagate   a first plan by propagation

Below a case stand the processor seconds of what is asked of its plan, and their part of `cpu`: `replan` is `plan.what_if`, another
layout of the largest parameters of all layers, the median over its layouts; `click` is `plan.why(row, estimate=True)`, what the widget
answers when a row is opened, the median over all rows, and `slowest` the most; `saves` is `plan.saving`, the line of `print(plan)` that
compares classical layouts. With --compile, `compile` is what XLA takes to compile the planned step for as
many absent GPUs, without the autotuning that it does where they are there. Needs "shardplan[gpu-check]".

The states of full-size models are shapes: nothing is allocated. The last case trains: one planned step against plain jit.
"""

import argparse
import json
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import measurements

STAGES = ("graph", "strategies", "network", "propagation", "solve", "decisions")
ASKED = ("click", "slowest", "replan", "saves")
CALLS = 400  # of each step, in turns


@dataclass(frozen=True)
class Case:
    """One model on one mesh; `limit_s` and `limit_gb` are its requirements, where there are any."""

    name: str
    model: str
    mesh: dict[str, int]
    limit_s: float | None = None
    limit_gb: float | None = None
    options: dict | None = None

    def step(self) -> tuple:
        """(training step, state, batch)."""
        import zoo

        return (getattr(zoo, self.model, None) or zoo.QUALITY[self.model])(**self.options or {})


CASES = (
    Case("gpt2", "gpt2", {"data": 2, "model": 4}, limit_s=10),
    Case("gpt2-scan", "gpt2", {"data": 2, "model": 4}, limit_s=4, options={"scan": True}),
    Case("gpt3-96-remat", "gpt3_96", {"data": 8, "model": 8}, limit_s=60, limit_gb=8, options={"remat": True}),
    Case("gpt2-2x2x2", "gpt2", {"data": 2, "model": 2, "expert": 2}),
    Case("gpt2-4x8x8", "gpt2", {"replica": 4, "data": 8, "model": 8}, options={"batch": 512}),
    Case("llama-1b", "llama", {"data": 2, "model": 4}, options={"size": "1b"}),
    Case("llama-8b", "llama", {"data": 8, "model": 8}, options={"size": "8b"}),
    Case("moe", "moe", {"data": 2, "model": 4}),
    Case("mamba", "mamba", {"data": 2, "model": 4}),
)


def planning(case: Case, cluster: str, search: str, compiles: bool) -> dict:
    """Plans one case in this process, and compiles the planned step."""
    import jax

    import shardplan

    jax.config.update("jax_platforms", "cpu")
    step, state, batch = case.step()
    auto_axes = (jax.sharding.AxisType.Auto,) * len(case.mesh)
    mesh = jax.sharding.AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh), axis_types=auto_axes)
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh):
        closed = jax.jit(step).trace(state, batch).jaxpr
    traced, cpu = time.perf_counter(), time.process_time()
    plan = shardplan.auto(mesh, cluster=cluster, search=search, donate_argnums=0)(step).plan(state, batch)
    trace_s, plan_s, cpu_s = traced - start, time.perf_counter() - traced, time.process_time() - cpu
    stages = {stage: plan.planning_seconds.get(stage, 0.0) for stage in STAGES}
    rss_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    clicks = _clicks_s(plan)
    asked = {"click_s": statistics.median(clicks), "slowest_s": max(clicks), "replan_s": _replan_s(plan)}
    asked["saves_s"] = _processor_s(lambda: plan.saving)
    if compiles:
        asked["compile_s"] = _compile_s(plan, cluster)
    graph = plan.context.planned.graph
    problem = plan.context.planned.network.problem
    return {
        "name": case.name,
        "mesh": "x".join(map(str, case.mesh.values())),
        "equations": _equations(closed),
        "ops": len(graph.ops),
        "classes": len(set(problem.ties)) if problem.ties else len(graph.ops),
        "status": plan.status,
        "gap": plan.gap,
        "step_ms": plan.seconds["total"] * 1e3,
        "peak_gib": plan.memory().peak / 2**30,
        "trace_s": trace_s,
        "plan_s": plan_s,
        "cpu_s": cpu_s,
        **asked,
        **stages,
        "rest": plan_s - sum(stages.values()),
        "rss_gb": rss_gb,
        "limit_s": case.limit_s,
        "limit_gb": case.limit_gb,
    }


def _processor_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _clicks_s(plan) -> list[float]:
    """Processor seconds of the estimates for every row of the instrument."""
    from shardplan.view.instrument import Instrument

    targets = [x if isinstance(x, str) else list(x) for x in Instrument(plan).targets.values()]
    plan.why(targets[0], estimate=True)  # what is made once per plan
    return [_processor_s(lambda what=what: plan.why(what, estimate=True)) for what in targets]


def _replan_s(plan) -> float:
    """Processor seconds of one more pin, warm: `why` prices the layouts before."""
    from shardplan.view import rows

    parameters = [x for x in rows.leaf_rows(plan.inputs, plan.mesh) if x.leaves[0].kind == "parameters"]
    parameters = [x for x in parameters if "{" not in x.path]  # a row of several names is no path
    largest = max(parameters, key=lambda x: len(x.leaves) * math.prod(x.leaves[0].shape))
    choices = [choice.text for choice in plan.why(largest.path).choices if choice.fits]
    return statistics.median([_processor_s(lambda choice=choice: plan.what_if(largest.path, choice)) for choice in choices])


def _compile_s(plan, cluster: str) -> float:
    """Processor seconds of XLA's compiler for the planned step."""
    from shardplan.xla.compiler.compile import compile_here, lower_for

    n = math.prod(size for _, size in plan.mesh)
    target = f"{cluster}:{n}" if n <= 8 else f"{cluster}:{n // 8}x8"
    function, args = plan.context.program(plan)
    lowered = lower_for(target, function, *args)
    return _processor_s(lambda: compile_here(lowered, target))


def _equations(closed) -> int:
    """Equations of a jaxpr and of those inside it, loop bodies once."""
    from shardplan import _jax

    inner = (j for eqn in closed.jaxpr.eqns for j in _jax.jaxprs_in_params(eqn.params))
    return len(closed.jaxpr.eqns) + sum(_equations(_jax.closed(j)) for j in inner)


def dispatch() -> dict:
    """Seconds from call to return, planned and plain, in turns in one process: everything before the devices set to work."""
    import jax
    import jax.numpy as jnp

    import shardplan

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((2, 4), ("data", "model"))

    def train_step(state, batch):
        return jax.tree.map(lambda w: w + batch.sum(), state), batch.sum()

    shapes = {f"layer{i}": {"kernel": jnp.zeros((8, 8)), "bias": jnp.zeros(8)} for i in range(20)}
    planned = shardplan.auto(mesh, donate_argnums=0)(train_step)
    plan = planned.plan(shapes, jnp.zeros(8))
    (in_shardings, _), out_shardings = plan.in_shardings, plan.out_shardings
    plain = jax.jit(train_step, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=0)
    steps = {"plain": plain, "planned": planned}
    states = {name: jax.device_put(jax.tree.map(jnp.copy, shapes), in_shardings[0]) for name in steps}  # both are donated
    batch = jax.device_put(jnp.zeros(8), in_shardings[1])
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for call in range(CALLS):
        for name in sorted(steps, reverse=bool(call % 2)):
            state = jax.block_until_ready(states[name])
            start = time.perf_counter()
            states[name], loss = steps[name](state, batch)
            seconds[name].append(time.perf_counter() - start)
            loss.block_until_ready()
    median = {name: statistics.median(values[CALLS // 10 :]) * 1e6 for name, values in seconds.items()}
    return {
        "name": "dispatch", "leaves": len(jax.tree.leaves(shapes)) + 1, "plain_us": median["plain"],
        "planned_us": median["planned"], "overhead_us": median["planned"] - median["plain"],
    }  # fmt: skip


def _child(work: Callable[[], dict], queue) -> None:
    try:
        queue.put(work())
    except BaseException as error:
        queue.put({"error": f"{type(error).__name__}: {error}"})
        raise


def apart(work: Callable[[], dict]) -> dict:
    """What `work` returns in a fresh process, or {"error": why}."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_child, args=(work, queue))
    process.start()
    while process.is_alive() and queue.empty():
        process.join(0.1)
    row = {"error": f"died with exit status {process.exitcode}"} if queue.empty() else queue.get()
    process.join()
    return row


def said(row: dict) -> str:
    """One case in one line."""
    if "overhead_us" in row:
        return (
            f"dispatch of a step with {row['leaves']} arguments: planned {row['planned_us']:.0f} µs, jit {row['plain_us']:.0f} µs, "
            f"overhead {row['overhead_us']:+.1f} µs (at most 20)"
        )
    missed = [f"MISSED {row['limit_s']} s" for _ in (1,) if row["limit_s"] and row["plan_s"] > row["limit_s"]]
    missed += [f"MISSED {row['limit_gb']} GB" for _ in (1,) if row["limit_gb"] and row["rss_gb"] > row["limit_gb"]]
    stages = "".join(f"{row[stage]:>8.2f}" for stage in (*STAGES, "rest"))
    size = f"{row['mesh']:>6}{row['equations']:>8}{row['ops']:>8}{row['classes']:>8}"
    asked = "\n".join(
        f"{'':<14}{name:<8}{row[f'{name}_s']:>6.2f}  {row[f'{name}_s'] / row['cpu_s']:.1%} of planning"
        for name in (*ASKED, "compile")
        if f"{name}_s" in row
    )
    seconds = f"{row['trace_s']:>7.1f}{row['plan_s']:>7.1f}{row['cpu_s']:>7.1f}{stages}"
    return (
        f"{row['name']:<14}{size}  {row['status']:<9}{row['gap']:>7.2%}{seconds}{row['rss_gb']:>7.2f} GB  {' '.join(missed)}\n{asked}"
    )


def page(rows: list[dict]) -> str:
    """All cases as markdown."""
    head = ("training step", "mesh", "equations", "tracing, s", "planning, processor s", "status", "planner's peak memory, GB",
            "XLA's compiler, processor s", "planning over XLA's compiler")  # fmt: skip
    plans = [row for row in rows if "plan_s" in row]
    plans = [row | {"ratio": f"{row['cpu_s'] / row['compile_s']:.2f}"} if "compile_s" in row else row for row in plans]
    keys = ("name", "mesh", "equations", "trace_s", "cpu_s", "status", "rss_gb", "compile_s", "ratio")
    cells = ([f"{row[k]:.1f}" if isinstance(row.get(k), float) else row.get(k, "") for k in keys] for row in plans)
    return "\n\n".join([measurements.table(head, cells), *(said(row) for row in rows if "overhead_us" in row)])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(case.name for case in CASES), "dispatch"]
    parser.add_argument("--only", help=f"names, separated by commas: {', '.join(names)}")
    parser.add_argument("--cluster", default="h100", help="a preset or a cluster file")
    parser.add_argument("--search", default="ilp", help="as in auto(search=...)")
    parser.add_argument("--compile", action="store_true", help="compile the planned steps, too")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/measurements.md")
    options = parser.parse_args(argv)
    wanted = options.only.split(",") if options.only else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(names)}")
    asked = options.cluster, options.search, options.compile
    works = {case.name: partial(planning, case, *asked) for case in CASES} | {"dispatch": dispatch}
    if wanted != ["dispatch"]:
        stages = "".join(f"{stage:>8.8}" for stage in ("graph", "strateg.", "network", "propag.", "solve", "decide", "rest"))
        size = f"{'mesh':>6}{'eqns':>8}{'ops':>8}{'classes':>8}  {'status':<9}{'gap':>7}"
        print(f"{'':<14}{size}{'trace':>7}{'plan':>7}{'cpu':>7}{stages}  memory")
    rows = []
    for name in wanted:
        row = apart(works[name])
        rows.append(row)
        print(f"{name}: {row['error']}" if "error" in row else said(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.docs:
        command = "python benchmarks/planning.py" + f" --only {options.only}" * bool(options.only) + " --compile" * options.compile
        measurements.write("planning", f"{command} --docs", page(rows))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
