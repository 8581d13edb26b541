"""Why no plan fits: the least memory found, where its peak is, its categories, and ways out."""

from __future__ import annotations

from shardplan.costs.memory_categories import memory_by_category
from shardplan.costs.network import CostNetwork
from shardplan.units import format_memory


def no_plan_fits(network: CostNetwork, states: tuple[int, ...]) -> str:
    """Why no plan fits a network's memory limit, and ways out; `states` are those of least peak, () if none are allowed together."""
    problem, graph = network.problem, network.space.graph
    if problem.limit is None or not states:
        return "no plan exists: the pins contradict each other.\n  way out: drop one of them"
    memory = problem.memory(states)
    step, peak = int(memory.argmax()), float(memory.max())
    if peak <= problem.limit:
        return (
            f"no plan was found within the search's limit, though {format_memory(problem.limit)} per device are enough.\n"
            f"  ways out: time_limit=600, or memory={peak * 1.1:.3g}"
        )
    op = graph.ops[min(step, len(graph.ops) - 1)]
    shares = memory_by_category(network.space.graph, network.allocations(states), step)
    parts = ", ".join(f"{category} {format_memory(n)}" for category, n in shares.items() if n > 0.005 * peak)
    return (
        f"no plan fits {format_memory(problem.limit)} per device on mesh {network.space.mesh}.\n"
        f"  least possible: {format_memory(peak)}, at {op.source} in {op.source.function or op.primitive}   [{parts}]\n"
        f"  ways out: a larger mesh, donate_argnums for the state, jax.checkpoint around {op.source}, "
        f"or memory={peak * 1.02:.3g}"
    )
