"""Processor seconds in which the solver proves plans optimal, with room and under tight memory, on one, two and three mesh axes.

    python benchmarks/budgets.py                 19 models, 3 meshes, 4 budgets
    python benchmarks/budgets.py gpt moe          models whose names begin so
    python benchmarks/budgets.py --planning       all problems on the way to a plan, also of the models of quality.py

A problem is a step's cost network at its first prices. Budgets are multiples of the peak of the plan of least average memory. With
`--planning` all problems on the way to a plan are solved, with the memory of an H100; "untied" are those without symmetric layers,
which have a work limit. Problems that take more than a second after presolve, or are not proven, are listed; a table of all follows.
"""

import argparse
import contextlib
import functools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import fidelity  # noqa: E402
import jax  # noqa: E402
import quality  # noqa: E402
import zoo  # noqa: E402

import shardplan  # noqa: E402
from shardplan.costs.build import build_network  # noqa: E402
from shardplan.costs.pricing import Pricing  # noqa: E402
from shardplan.ilp import Problem, Solution  # noqa: E402
from shardplan.ilp.solver import solve  # noqa: E402
from shardplan.ilp.solver.presolve.presolve import Presolved, presolve  # noqa: E402
from shardplan.mesh import Resharder  # noqa: E402
from shardplan.propagation.search import propagate  # noqa: E402
from shardplan.search.min_memory import min_average_memory  # noqa: E402

EXAMPLES = ("digits_cnn", "dlrm", "face_softmax", "gpt", "hybrid_mlp", "llama", "moe")
OF_THE_ZOO = (
    "gpt2", "gpt2-scan", "llama-1b", "classes", "resnet-50", "unet", "vit-l", "lstm", "mamba", "long", "gpt3", "gpt2-wide",
)  # fmt: skip
MODELS = {f"{name} (example)": (lambda name=name: zoo.example(name)) for name in EXAMPLES} | {
    name: fidelity.CASES[name] for name in OF_THE_ZOO
}
BUDGETS = ("free", 1.5, 1.2, 1.05)

Found = tuple[str, str, str, float, float, Solution]
"""Model, mesh, budget, processor seconds of presolve and of the rest, and the answer."""


def problems(model: str, mesh: str) -> Iterator[tuple[str, Problem]]:
    """(budget, problem) of a model on a mesh."""
    step, state, batch = MODELS[model]()
    sizes, axes = fidelity.MESHES[mesh]
    step = shardplan.auto(jax.sharding.AbstractMesh(sizes, axes), cluster="h100", donate_argnums=0, search="propagation")(step)
    plan = step.plan(state, batch)
    found = plan.context.planned
    resharder = Resharder(found.space.mesh, found.space.cluster)
    interference = found.options.interference(found.space.cluster)

    def problem(limit: float | None) -> Problem:
        return build_network(found.space, resharder, limit, pricing=Pricing(interference)).problem

    limited = problem(plan.memory().peak)
    least = limited.peak(min_average_memory(limited))
    for budget in BUDGETS:
        yield str(budget), problem(None if budget == "free" else budget * least)


def measure(problem: Problem) -> tuple[float, float, Solution]:
    """Processor seconds of presolve and of search, and the answer."""
    start = time.process_time()
    presolved = presolve(problem, tie=True)
    presolved_at = time.process_time()
    hint = propagate(problem, presolved)
    ready = time.process_time()
    answer = solve(problem, hint=hint.states or None, presolved=presolved)
    return presolved_at - start, time.process_time() - ready, answer


def under_budgets(chosen: Callable[[str], bool]) -> Iterator[Found]:
    """First problems, with room and under budgets."""
    for model in filter(chosen, MODELS):
        for mesh in fidelity.MESHES:
            for budget, problem in problems(model, mesh):
                yield model, mesh, budget, *measure(problem)


def planning(chosen: Callable[[str], bool]) -> Iterator[Found]:
    """All problems on the way to a plan."""
    places = [(mesh, sizes, axes, fidelity.CASES | MODELS) for mesh, (sizes, axes) in fidelity.MESHES.items()]
    places += [(target, sizes, quality.AXES, zoo.QUALITY) for target, sizes in quality.TARGETS.items()]
    for mesh, sizes, axes, models in places:
        for model in filter(chosen, models):
            step, state, batch = models[model]()
            planned = shardplan.auto(jax.sharding.AbstractMesh(sizes, axes), donate_argnums=0, cluster="h100")(step)
            for solved in solves(functools.partial(planned.plan, state, batch)):
                yield model, mesh, *solved


def solves(plan: Callable[[], object]) -> list[tuple[str, float, float, Solution]]:
    """The problems that a call of `plan` solves, whether or not a plan fits."""
    found = []

    def timed(problem: Problem, *, presolved: Presolved | None = None, **arguments) -> Solution:
        start = time.process_time()
        presolved = presolved or presolve(problem, tie=True)
        presolved_at = time.process_time()
        answer = solve(problem, presolved=presolved, **arguments)
        kind = "untied" if "work_limit" in arguments else "free"
        found.append((kind, presolved_at - start, time.process_time() - presolved_at, answer))
        return answer

    with mock.patch("shardplan.ilp.integer_program.solve", timed), contextlib.suppress(shardplan.ShardingError):
        plan()
    return found


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"starts of names, of {', '.join(MODELS)}")
    parser.add_argument("--planning", action="store_true", help="all problems on the way to a plan")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    rows: dict[tuple[str, str], list[tuple[float, float, bool]]] = {}
    every = planning if options.planning else under_budgets
    for model, mesh, budget, before, after, answer in every(lambda name: name.startswith(tuple(options.models or [""]))):
        proven = answer.status in ("optimal", "infeasible")
        rows.setdefault((mesh, budget), []).append((before, after, proven))
        if after > 1 or not proven:
            print(f"{model:<20} {mesh:<6} {budget:<5} presolve {before:5.2f} search {after:6.2f} {answer.status} "
                  f"gap {answer.gap:.2%}", flush=True)  # fmt: skip
    print("\n| mesh | budget | problems | proven | presolve, median | search, median | search, most | over a second |")
    print("|---|---|---|---|---|---|---|---|")
    for (mesh, budget), found in rows.items():
        before, after, proven = zip(*found, strict=True)
        medians = f"{statistics.median(before):.2f} | {statistics.median(after):.2f}"
        print(f"| {mesh} | {budget} | {len(after)} | {sum(proven)} | {medians} | {max(after):.1f} | {sum(s > 1 for s in after)} |")


if __name__ == "__main__":
    main()
