"""What it costs to plan repeated layers alike: every plan again without that, started from the folded one.

    python benchmarks/folding.py                 all models, with room and under budgets
    python benchmarks/folding.py gpt moe          some of them

`folded` and `unfolded` are seconds of the two plans by the planner's own objective, `worse` what folding adds, `gap` what is unproven
of the unfolded plan, `s` seconds of solving it. Budgets are shares of what the free plan needs, as long as a plan fits.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import jax  # noqa: E402
import zoo  # noqa: E402

import shardplan  # noqa: E402
from shardplan.ilp import solve  # noqa: E402
from shardplan.ilp.tables import PS  # noqa: E402

MODELS = {name: (lambda name=name: zoo.example(name)) for name in ("gpt", "moe", "digits_cnn", "dlrm", "hybrid_mlp")} | {
    name: zoo.QUALITY[name] for name in ("gpt2", "resnet-50", "unet", "vit-l", "lstm", "mamba")
}
BUDGETS = (None, 0.95, 0.9, 0.8, 0.7)


def plans(model: str, mesh) -> Iterator[tuple[str, shardplan.Plan]]:
    """(budget, plan) of a model, the free plan first."""
    step, state, batch = MODELS[model]()
    peak = None
    for share in BUDGETS:
        memory = float("inf") if share is None else share * peak
        try:
            plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0, memory=memory)(step).plan(state, batch)
        except shardplan.ShardingError:
            return
        peak = peak or plan.memory().peak
        yield "free" if share is None else f"{share:.0%}", plan


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    print(f"{'model':<12} {'budget':>6} {'folded':>10} {'unfolded':>10} {'worse':>7} {'gap':>7} {'s':>5}", flush=True)
    worst = 0.0
    for model in options.models or MODELS:
        for budget, plan in plans(model, mesh):
            planned = plan.context.planned
            problem, states = planned.network.problem, planned.solution.states
            start = time.process_time()
            found = solve(replace(problem, ties=()), hint=states)
            worse = problem.objective(states) / found.objective - 1
            worst = max(worst, worse)
            print(f"{model:<12} {budget:>6} {problem.objective(states) / PS * 1e3:>7.4g} ms {found.objective / PS * 1e3:>7.4g} ms "
                  f"{worse:>7.2%} {found.gap:>7.2%} {time.process_time() - start:>5.1f}", flush=True)  # fmt: skip
    print(f"folding adds {worst:.2%} at most")


if __name__ == "__main__":
    main()
