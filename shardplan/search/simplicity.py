"""How far a plan is from one that a person would write: repeated layers unlike, state split unlike its parameter, many layouts."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.costs.network import CostNetwork
from shardplan.ir.graph import Graph
from shardplan.mesh.layout import Layout


def complexity(network: CostNetwork, states: Sequence[int]) -> tuple[float, ...]:
    """Less is simpler: counts in the order in which they matter.

    Returns:
        (layouts beyond the first of what repeated layers keep in one role, stacks whose layers' dim is sharded, state sharded otherwise
        than its parameter, distinct layouts of the state).
    """
    space, graph = network.space, network.space.graph
    chosen = network.strategies(states)
    layouts = {i: space.strategies[i].results[0][chosen[i]] for i in graph.args}
    roles: dict[int, set[Layout]] = {}
    for i in graph.args:
        roles.setdefault(space.layers[i], set()).add(layouts[i])
    unlike = sum(len(found) - 1 for found in roles.values())
    stacked = sum(bool(layouts[i].dims[0]) for i in _stacks(graph) if layouts[i].dims)
    state = [a for a, _ in graph.same_layout if graph.ops[a].traits.step_input]
    others = _unlike_their_parameter(graph, state, layouts)
    kinds = len({(layouts[i].rank, layouts[i]) for i in state})
    return unlike, stacked, others, kinds


def _stacks(graph: Graph) -> list[int]:
    """Inputs whose rows are the layers of a loop."""
    return [i for i in graph.args if any(graph.ops[at].traits.loop_slice for at in graph.readers(graph.ops[i].outputs[0]))]


def _unlike_their_parameter(graph: Graph, state: Sequence[int], layouts: dict[int, Layout]) -> int:
    """How many arrays of the optimizer's state have another layout than the parameter that they are computed with."""
    parameters: dict[tuple, set[Layout]] = {}
    for i in state:
        phases = {graph.ops[at].phase for at in graph.readers(graph.ops[i].outputs[0]) if not graph.ops[at].traits.step_output}
        if phases & {"forward", "backward"}:
            parameters.setdefault(tuple(graph.ops[i].outs[0].shape), set()).add(layouts[i])
    return sum(layouts[i] not in parameters.get(tuple(graph.ops[i].outs[0].shape), {layouts[i]}) for i in state)
