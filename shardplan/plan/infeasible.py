"""Why no plan fits: the lowest peak found, where it is, its categories, what is proven, and ways out."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.costs.decided_memory import DecidedMemory
from shardplan.costs.memory_categories import categories, memory_by_category
from shardplan.ir.graph import Graph
from shardplan.mesh.layout import MeshShape, splits_unevenly
from shardplan.search.min_memory import ENOUGH
from shardplan.units import format_memory, listed

RECOMPUTED = 0.1
"""Part of the peak from which activations are worth computing again."""


def pins_contradict() -> str:
    """No plan exists whatever its memory."""
    return "no plan exists: the pins contradict each other.\n  way out: drop one of them"


def no_plan_fits(lowest: DecidedMemory, limit: float, least_bytes: float, pinned: Sequence[str] = ()) -> str:
    """Why no plan fits a memory limit, and ways out.

    Args:
        lowest: what the plan of the lowest peak that any search found has in memory.
        limit: bytes per device.
        least_bytes: a lower bound of the peak of every plan.
        pinned: what the user pins, in words.
    """
    graph, mesh, peak = lowest.graph, lowest.program.network.space.mesh, lowest.peak_bytes()
    op = graph.ops[lowest.op_at_peak]
    shares = memory_by_category(categories(graph), lowest.allocations(), lowest.place_of_peak)
    parts = ", ".join(f"{category} {format_memory(n)}" for category, n in shares.items() if n > 0.005 * peak)
    proven = least_bytes > limit
    bound = "" if abs(peak - least_bytes) < 0.005 * peak else f"; no plan takes less than {format_memory(least_bytes)}"
    ways = ["pad_state=True"] if has_state_to_pad(graph, mesh) else []
    ways += [f"no pin on {listed(pinned, 3)}"] if pinned else []
    ways += ["a larger mesh"]
    ways += ["donate_argnums for the state"] if any(start not in graph.donated for start, _ in _state(graph)) else []
    ways += [f"jax.checkpoint around {op.source}"] if shares.get("activations", 0.0) > RECOMPUTED * peak else []
    what = "no plan fits" if proven else "no plan found fits"
    return (
        f"{what} {format_memory(limit)} per device on mesh {mesh}.\n"
        f"  lowest peak found: {format_memory(peak)}, at {op.source} in {op.source.function or op.primitive}   [{parts}]{bound}\n"
        f"  ways out: {', '.join(ways)}, or memory={ENOUGH * peak:.4g}"
    )


def has_state_to_pad(graph: Graph, mesh: MeshShape) -> bool:
    """Whether a mesh axis could shard state that it does not divide if the state were held padded, and it may not be."""
    held = (graph.ops[i] for i, _ in _state(graph) if not graph.ops[i].padded)
    return any(splits_unevenly(n, k) for arg in held for n in arg.outs[0].shape for k in mesh.sizes)


def _state(graph: Graph) -> list[tuple[int, int]]:
    """Inputs of the step that it returns anew, each with that output."""
    return [(i, j) for i, j in graph.same_layout if graph.ops[i].traits.step_input and graph.ops[j].traits.step_output]
