"""What one drawn program comes to: its plan, the layouts that the objective ranks first, and what XLA makes of each."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import quality
import structure
from drawn import OURS, WITH_OPTIONS
from drawn_programs import Drawn

import shardplan
from shardplan.xla.compiler.compile import lower_for
from shardplan.xla.report.check import PlanReport, check

HAS_OPTIONS = "compiler_options" in inspect.signature(shardplan.auto).parameters


def events(program: Drawn, layouts: int, timeout_s: float) -> Iterator[dict]:
    """Parts of the program's record, each as soon as it is known; the key "stage" names the stage that begins."""
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    yield {"about": program.about, "family": program.family, "made": program.made, "where": program.place,
           "parameters": f"{program.parameters:.3g}", "stage": "planning"}  # fmt: skip
    for name in (OURS, WITH_OPTIONS) if HAS_OPTIONS and layouts else (OURS,):
        yield from _tried(f"planning {name}", lambda name=name: _ours(program, name, timeout_s))
    if not layouts:
        return
    yield {"stage": "ranking"}
    yield from _tried("ranking", lambda: _others(program, layouts, timeout_s))


def _tried(stage: str, run) -> Iterator[dict]:
    """The events of a stage; an exception is one, too."""
    try:
        yield from run()
    except Exception as error:
        yield {"errors": [f"{stage}: {type(error).__name__}: {error}".splitlines()[0][:300]]}


def _ours(program: Drawn, name: str, timeout_s: float) -> Iterator[dict]:
    """The plan, and its program compiled with XLA's default options or with its own."""
    preset, start = program.target.partition(":")[0], time.process_time()
    asked: dict[str, Any] = {"compiler_options": "auto" if name == WITH_OPTIONS else None} if HAS_OPTIONS else {}
    plan = shardplan.auto(program.mesh, donate_argnums=0, cluster=preset, **asked)(program.step).plan(program.state, program.batch)
    s = plan.seconds
    figures = {"compute": s["compute"], "exposed": s["communication"] - s["hidden"], "total": s["total"], "peak": plan.memory().peak}
    yield {"plan" if name == OURS else "plan with options": figures | {
        "planning": time.process_time() - start, "status": plan.status, "gap": plan.gap, "decisions": len(plan.decisions),
        "unknown": [f"{primitive} at {where}" for primitive, where in plan.unknown]}}  # fmt: skip
    yield {"stage": f"compiling {name}"}
    function, args = plan.context.program(plan)
    lowered = lower_for(program.target, function, *args)
    options = dict(getattr(plan, "compiler_options", None) or {}) if name == WITH_OPTIONS else {}
    figures = quality.judge_lowered(lowered, program.target, timeout_s, options)
    if "error" not in figures and name == OURS:
        figures |= _compared(PlanReport(plan, check(lowered, target=program.target, mesh=plan.mesh, timeout_s=timeout_s)))
    yield from _compiled(name, figures | {"options": options})


def _compared(report: PlanReport) -> dict:
    """Bytes on the wire and flops of products, planned over emitted, and where they differ."""
    found = report.comparison
    lines = str(found).splitlines()[1:]
    remat = [str(r) for r in report.report.rematerializations]
    return {"bytes": found.ratio, "products": report.flops_ratio, "findings": lines[:12], "remat": remat[:4]}


def _compiled(name: str, figures: dict) -> Iterator[dict]:
    yield {"layouts": {name: figures}}
    if "error" in figures:
        yield {"errors": [f"compiling {name}: {figures['error'][:300]}"]}


def _others(program: Drawn, layouts: int, timeout_s: float) -> Iterator[dict]:
    """The other layouts that the objective ranks first, compiled with XLA's default options.

    The objective takes for granted that what a layout leaves open is done well, and XLA may do it badly; so the first that replicates
    parameters is among them, which leaves little open.
    """
    preset = program.target.partition(":")[0]
    found, seen = [], set()
    read = structure.Structure(program.step, program.state, program.batch, program.mesh)
    for way in structure.ways(program.mesh, shardplan.Cluster.preset(preset).node_size):
        laid = read.laid_out(way)
        if (key := str(jax.tree.leaves(laid.specs, is_leaf=lambda x: isinstance(x, jax.P)))) in seen:
            continue
        seen.add(key)
        try:
            found.append((*_predicted(program, laid, preset), way.name, laid))
        except shardplan.ShardingError as error:
            yield {"errors": [f"ranking {way.name}: {error}".splitlines()[0][:300]]}
    found.sort(key=lambda x: x[:2])
    yield {"ranked": [(name, seconds, excess) for excess, seconds, name, _ in found]}
    compiled, replicated = 0, False
    for _, _, name, laid in found:
        whole = not laid.way.params and "tensor" not in laid.way.name
        if compiled >= layouts and (replicated or not whole):
            continue
        yield {"stage": f"compiling {name}"}
        for event in _tried(f"lowering {name}", lambda name=name, laid=laid: _laid_out(program, name, laid, timeout_s)):
            done = any("seconds" in figures for figures in event.get("layouts", {}).values())
            compiled, replicated = compiled + done, replicated or (done and whole)
            yield event


def _laid_out(program: Drawn, name: str, laid: structure.Laid, timeout_s: float) -> Iterator[dict]:
    lowered = lower_for(program.target, laid.jitted(), program.state, program.batch)
    yield from _compiled(name, quality.judge_lowered(lowered, program.target, timeout_s))


def _predicted(program: Drawn, laid: structure.Laid, preset: str) -> tuple[float, float]:
    """(bytes beyond the memory, seconds) that the planner's objective gives the best step with this layout."""
    step = shardplan.auto(program.mesh, donate_argnums=0, cluster=preset, in_shardings=laid.specs, memory="disable")(program.step)
    plan = step.plan(program.state, program.batch)
    return max(0.0, plan.memory().peak - shardplan.Cluster.preset(preset).device.memory_bytes), plan.seconds["total"]
