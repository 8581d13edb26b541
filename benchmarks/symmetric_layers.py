"""What symmetric repeated layers cost: every plan is searched once more without ties.

    python benchmarks/symmetric_layers.py                 all models, with room and under budgets
    python benchmarks/symmetric_layers.py gpt moe         some of them

`tied` and `untied` are the milliseconds of the two plans at the first one's prices, `gap` is that of the second, `s` the seconds of its
search. The second combines other collectives, which changes latencies and overlap windows: `repriced` are the simulated milliseconds of
its program at its own prices if it then fits, `loss` is what the first takes more. Budgets are shares of the free plan's peak, down to
the last that fits.
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
from shardplan.costs.build import build_network  # noqa: E402
from shardplan.costs.decided_program import decided_program  # noqa: E402
from shardplan.costs.pins import allowed_strategies  # noqa: E402
from shardplan.costs.states import PS  # noqa: E402
from shardplan.ilp.solver import solve  # noqa: E402
from shardplan.mesh.reshard import Resharder  # noqa: E402
from shardplan.search.objective import reprice  # noqa: E402

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


def repriced(planned, states) -> float | None:
    """Picoseconds of the program that states decide, at the prices of what they combine; None if they do not fit then."""
    space, options = planned.space, planned.options
    allowed, resharder = allowed_strategies(space, options=options), Resharder(space.mesh, space.cluster)

    def network(pricing):
        return build_network(space, resharder, options.memory, allowed, pricing=pricing)

    found = decided_program(reprice(network, planned.network, states), states, planned.xla)
    fits = options.memory is None or found.peak_bytes() <= options.memory
    return found.step_timeline().total_s * PS if fits else None


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    print(f"{'model':<12} {'budget':>6} {'tied':>10} {'untied':>10} {'repriced':>10} {'loss':>7} {'gap':>7} {'s':>5}", flush=True)
    greatest = 0.0
    for model in options.models or MODELS:
        for budget, plan in plans(model, mesh):
            planned = plan.context.planned
            problem, states = planned.network.problem, planned.solution.states
            start = time.process_time()
            found = solve(replace(problem, ties=()), hint=states)
            seconds = time.process_time() - start
            before, after = repriced(planned, states), repriced(planned, found.states)
            assert before is not None
            loss = 0.0 if after is None else before / after - 1
            greatest = max(greatest, loss)
            ms = [f"{x / PS * 1e3:>10.4g}" for x in (problem.objective(states), found.objective)]
            own = f"{'no fit':>10}" if after is None else f"{after / PS * 1e3:>10.4g}"
            print(f"{model:<12} {budget:>6} {' '.join(ms)} {own} {loss:>7.2%} {found.gap:>7.2%} {seconds:>5.1f}", flush=True)
    print(f"symmetric layers cost {greatest:.2%} at most")


if __name__ == "__main__":
    main()
