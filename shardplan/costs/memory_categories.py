"""What every array in memory is to a person: parameters, optimizer state, activations, gradients, ..."""

from __future__ import annotations

from shardplan.costs.network import CostNetwork
from shardplan.ir.graph import Graph

HELD = frozenset({"parameters", "optimizer", "constants", "batch", "gathered"})


def categories(graph: Graph) -> dict[int, str]:
    """Per op that makes arrays, what they are to a person; "gathered" is what is fetched from inputs for their readers."""
    state = {a for a, _ in graph.same_layout}
    out = {}
    for i, op in enumerate(graph.ops):
        if op.traits.step_input:
            used = {graph.ops[at].phase for at, _ in graph.values[op.outputs[0]].consumers if not graph.ops[at].traits.step_output}
            kind = "parameters" if used & {"forward", "backward"} or not used else "optimizer"
            out[i] = kind if i in state else "batch"
        elif op.traits.constant:
            out[i] = "constants"
        elif (
            (op.traits.alias or op.traits.loop_slice)
            and op.inputs[0] is not None
            and out[graph.values[op.inputs[0]].producer[0]] in HELD
        ):
            out[i] = "gathered"
        else:
            out[i] = {"forward": "activations", "backward": "gradients", "update": "update"}[op.phase]
    return out


def memory_by_category(network: CostNetwork, states, time: int) -> dict[str, float]:
    """Bytes per device alive at one time step, by category."""
    kinds, out = categories(network.space.graph), {}
    for i, lo, hi, held in network.allocations(states):
        if lo <= time < hi and held:
            out[kinds[i]] = out.get(kinds[i], 0.0) + held
    return dict(sorted(out.items(), key=lambda item: -item[1]))
