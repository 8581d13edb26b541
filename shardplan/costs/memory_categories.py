"""The category of every array in memory, in a user's words: parameters, optimizer state, activations, gradients, ..."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardplan.ir.graph import Graph


def categories(graph: Graph) -> dict[int, str]:
    """Op -> category of what it makes, in a user's words; "gathered" is a copy of an input for its readers."""
    state = {a for a, _ in graph.same_layout}
    stored = {"parameters", "optimizer", "constants", "batch", "gathered"}
    out: dict[int, str] = {}
    for i, op in enumerate(graph.ops):
        source = op.inputs[0] if op.traits.alias or op.traits.loop_slice else None
        if op.traits.step_input:
            readers = (graph.ops[at] for at, _ in graph.values[op.outputs[0]].consumers)
            phases = {reader.phase for reader in readers if not reader.traits.step_output}
            kind = "parameters" if phases & {"forward", "backward"} or not phases else "optimizer"
            out[i] = kind if i in state else "batch"
        elif op.traits.constant:
            out[i] = "constants"
        elif source is not None and out[graph.values[source].producer[0]] in stored:
            out[i] = "gathered"
        else:
            out[i] = {"forward": "activations", "backward": "gradients", "update": "update"}[op.phase]
    return out


def memory_by_category(kinds: Mapping[int, str], allocations: Iterable[tuple[int, int, int, float]], time: int) -> dict[str, float]:
    """Bytes per device that are live at one time step, by category, the largest first; allocations as of `CostNetwork.allocations`."""
    out: dict[str, float] = {}
    for i, lo, hi, held in allocations:
        if lo <= time < hi and held:
            out[kinds[i]] = out.get(kinds[i], 0.0) + held
    return dict(sorted(out.items(), key=lambda item: -item[1]))
