"""What XLA for GPU writes before loops that stack rows: zeros, once for all stacks of one shape, and copies of them.

    zeros f32[L, B, D]    one kernel writes them, before the first loop that stacks such rows
    further stacks        outside of loops the same kernel writes theirs; in a loop's body a kernel of its own copies the zeros

Facts: liveness-stack-zeros, fusion-stack-zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardplan.ir.graph import Graph


class StackZeros(NamedTuple):
    """How a stack begins, once for all rounds of its loop.

    Attributes:
        moves: how many times the bytes of the stack are moved: 1 if they are written, 2 if copied.
        alone: whether a kernel of its own does so.
        rounds: of the loop.
    """

    moves: int
    alone: bool
    rounds: float


def stacks_of_one_shape(graph: Graph) -> Iterator[list[int]]:
    """The ops that make stacks of one shape and dtype, of loops in one computation."""
    stacks: dict[tuple, list[int]] = {}
    for at, op in enumerate(graph.ops):
        if op.traits.loop_stack:
            stacks.setdefault((graph.loop_holders[op.held_during][1], op.outs[0].shape, op.outs[0].dtype), []).append(at)
    yield from stacks.values()


def stack_zeros(graph: Graph) -> dict[int, StackZeros]:
    """Op that makes a stack -> how it begins; a loop of one round is none."""
    out: dict[int, StackZeros] = {}
    for some in stacks_of_one_shape(graph):
        first = True
        for at in some:
            loop = graph.ops[at].held_during
            if graph.loops[loop].trips > 1 and at not in graph.dead:
                copied = not first and graph.loop_holders[loop][1] >= 0
                out[at] = StackZeros(2 if copied else 1, first or copied, graph.loops[loop].trips)
                first = False
    return out
