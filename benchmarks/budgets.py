"""How long the solver takes to prove plans optimal, with room and under tight memory, on one, two and three mesh axes.

    python benchmarks/budgets.py                 19 models, 3 meshes, 4 budgets
    python benchmarks/budgets.py gpt moe          models whose names begin so

Every problem is one that the planner builds: a step's cost network at its first prices. Budgets are multiples of the least peak that
any plan could have. `shrink` and `solve` are processor seconds; what takes longer than a second after shrinking, or is not proven, is
listed, and a table of all stands at the end.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import fidelity  # noqa: E402
import jax  # noqa: E402
import zoo  # noqa: E402

import shardplan  # noqa: E402
from shardplan.ilp import Problem, Solution, solve  # noqa: E402
from shardplan.ilp.build import build  # noqa: E402
from shardplan.ilp.shrink import shrink  # noqa: E402
from shardplan.mesh import Resharder  # noqa: E402
from shardplan.planner import leanest  # noqa: E402
from shardplan.propagation import propagate  # noqa: E402

EXAMPLES = ("digits_cnn", "dlrm", "face_softmax", "gpt", "hybrid_mlp", "llama", "moe")
OF_THE_ZOO = (
    "gpt2", "gpt2-scan", "llama-1b", "classes", "resnet-50", "unet", "vit-l", "lstm", "mamba", "long", "gpt3", "gpt2-wide",
)  # fmt: skip
MODELS = {f"{name} (example)": (lambda name=name: zoo.example(name)) for name in EXAMPLES} | {
    name: fidelity.CASES[name] for name in OF_THE_ZOO
}
BUDGETS = ("free", 1.5, 1.2, 1.05)


def problems(model: str, mesh: str) -> Iterator[tuple[str, Problem]]:
    """(budget, problem) of a model on a mesh."""
    step, state, batch = MODELS[model]()
    sizes, axes = fidelity.MESHES[mesh]
    step = shardplan.auto(jax.sharding.AbstractMesh(sizes, axes), cluster="h100", donate_argnums=0, search="propagation")(step)
    plan = step.plan(state, batch)
    found = plan.context.planned
    resharder = Resharder(found.space.mesh, found.space.cluster)

    def problem(limit: float | None) -> Problem:
        return build(found.space, resharder, limit, waiting=found.beside).problem

    told = problem(plan.memory().peak)
    least = told.peak(leanest(told))
    for budget in BUDGETS:
        yield str(budget), problem(None if budget == "free" else budget * least)


def measure(problem: Problem) -> tuple[float, float, Solution]:
    """Seconds of shrinking and of what comes after, and the answer."""
    start = time.process_time()
    small = shrink(problem, tie=True)
    shrunk = time.process_time()
    hint = propagate(problem, small)
    ready = time.process_time()
    answer = solve(problem, hint=hint.states or None, small=small)
    return shrunk - start, time.process_time() - ready, answer


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"starts of names, of {', '.join(MODELS)}")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    rows: dict[tuple[str, str], list[tuple[float, float, bool]]] = {}
    for model in MODELS:
        for mesh in fidelity.MESHES if not options.models or model.startswith(tuple(options.models)) else ():
            for budget, problem in problems(model, mesh):
                shrinking, after, answer = measure(problem)
                rows.setdefault((mesh, budget), []).append((shrinking, after, answer.status == "optimal"))
                if after > 1 or answer.status != "optimal":
                    print(f"{model:<20} {mesh:<6} {budget:<5} shrink {shrinking:5.2f} solve {after:6.2f} {answer.status} "
                          f"gap {answer.gap:.2%}", flush=True)  # fmt: skip
    print("\n| mesh | budget | problems | proven | shrinking, median | after it, median | after it, most | over a second |")
    print("|---|---|---|---|---|---|---|---|")
    for (mesh, budget), found in rows.items():
        shrinking, after, proven = zip(*found, strict=True)
        medians = f"{statistics.median(shrinking):.2f} | {statistics.median(after):.2f}"
        print(f"| {mesh} | {budget} | {len(after)} | {sum(proven)} | {medians} | {max(after):.1f} | {sum(s > 1 for s in after)} |")


if __name__ == "__main__":
    main()
