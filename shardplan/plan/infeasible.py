"""Why no plan fits: the least memory that is possible, where its peak is, what is in it, and ways out."""

from __future__ import annotations

from shardplan.costs.memory_categories import memory_by_category
from shardplan.costs.network import CostNetwork
from shardplan.ilp.min_memory import min_peak_memory


def no_plan_fits(network: CostNetwork) -> str:
    """The least memory possible, where its peak is, what is in it, and ways out."""
    problem, graph = network.problem, network.space.graph
    if problem.limit is None:
        return "no plan exists: the pins contradict each other.\n  way out: drop one of them"
    states = min_peak_memory(problem)
    if not states:
        return "no plan exists: the pins contradict each other.\n  way out: drop one of them"
    memory = problem.memory(states)
    step, peak = int(memory.argmax()), float(memory.max())
    if peak <= problem.limit:
        return (
            f"no plan was found within the search's limit, though {gib(problem.limit)} GiB per device are enough.\n"
            f"  ways out: time_limit=600, or memory={peak * 1.1:.3g}"
        )
    op = graph.ops[min(step, len(graph.ops) - 1)]
    parts = ", ".join(f"{k} {gib(b)}" for k, b in memory_by_category(network, states, step).items() if b > 0.005 * peak)
    return (
        f"no plan fits {gib(problem.limit)} GiB per device on mesh {network.space.mesh}.\n"
        f"  least possible: {gib(peak)} GiB, at {op.source} in {op.source.function or op.primitive}   [{parts}]\n"
        f"  ways out: a larger mesh, donate_argnums for the state, jax.checkpoint around {op.source}, "
        f"or memory={peak * 1.02:.3g}"
    )


def gib(n: float) -> str:
    return f"{n / 2**30:.3g}"
