"""The strategy space of a step: graph x rules x mesh, with copies for readers of several layouts put in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardplan.costs.edge_templates import ArrayEdge, array_edges
from shardplan.costs.layout_lists import LayoutLists
from shardplan.costs.roofline import compute_seconds
from shardplan.ir.graph import Graph, Path
from shardplan.ir.repeated_layers import repeated_layers
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.strategies.enumerate import AxisFactors, OpStrategies
from shardplan.strategies.rule import Rule
from shardplan.strategies.signature import Signatures
from shardplan.xla_model.accumulation import accumulated_operands, accumulated_sums, mark_accumulation
from shardplan.xla_model.combining import CollectiveSite, collective_sites
from shardplan.xla_model.copies import with_copies
from shardplan.xla_model.coupled_state import CoupledState, coupled_state
from shardplan.xla_model.fusion import materialised
from shardplan.xla_model.kernels import kernel_traffic

SMALL_SUM_BYTES = 1 << 16
"""Blocking sums smaller than this are combined with those at their depth."""


@dataclass(frozen=True, eq=False)
class StrategySpace:
    """The strategies of every op on a mesh of a cluster, and what the XLA model says of the graph.

    Attributes:
        graph: the step, copies included.
        rules, strategies: per op.
        signature: per op, equal numbers for ops between which the planner sees no difference.
        materialised: per value, whether it is ever written to memory.
        seconds: per op, seconds [s] of one run on one device.
        unknown: (primitive, source) of ops without a rule, which are replicated.
    """

    graph: Graph
    mesh: MeshShape
    cluster: Cluster
    rules: tuple[Rule, ...]
    strategies: tuple[OpStrategies, ...]
    signature: tuple[int, ...]
    materialised: tuple[bool, ...]
    seconds: tuple[np.ndarray, ...]
    unknown: tuple[tuple[str, str], ...]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Per op, its class among repeated layers."""
        return repeated_layers(self.graph, self.signature)

    @cached_property
    def collective_sites(self) -> tuple[CollectiveSite, ...]:
        """Per value, which collectives its reshards may be combined with."""
        makers = (self.rules[v.producer[0]] for v in self.graph.values)
        small_sums = [
            v.bytes < SMALL_SUM_BYTES and (bool(rule.reduce) or (rule.linear and not v.shape))
            for v, rule in zip(self.graph.values, makers, strict=True)
        ]
        return collective_sites(self.graph, small_sums)

    @cached_property
    def accumulated_operands(self) -> dict[tuple[int, int], int]:
        """(op, operand) that may be partial sums that a loop accumulates -> that loop's `loop_carry`."""
        return accumulated_operands(self.graph)

    @cached_property
    def accumulated_sums(self) -> dict[int, int]:
        """Sum that a loop accumulates, which may be partial -> the value in the loop that is summed."""
        return accumulated_sums(self.graph, self.accumulated_operands)

    @cached_property
    def layout_lists(self) -> LayoutLists:
        """The lists of all layouts of operands and results."""
        return LayoutLists(self.mesh)

    @cached_property
    def array_edges(self) -> tuple[ArrayEdge, ...]:
        """Every operand of every op, in program order."""
        state: Sequence[CoupledState | None] = coupled_state(self.graph, [rule.fusion == "loop" for rule in self.rules])
        return tuple(array_edges(self.graph, self.rules, self.strategies, state, self.accumulated_sums, self.layout_lists))


def make_strategy_space(
    graph: Graph,
    mesh: MeshShape,
    cluster: Cluster,
    within: Mapping[Path, AxisFactors] | None = None,
    others: AxisFactors | None = None,
) -> StrategySpace:
    """Rules, strategies and compute seconds of every op of a step.

    Args:
        graph: the step, before copies are put in.
        mesh, cluster: the machine.
        within: by path of an op, what is decided on each axis (`enumerate_strategies`).
        others: the same for all ops that are not in `within`.
    """
    table = Signatures(mesh)
    first = table.read(graph := mark_accumulation(graph), {}, (None,) * len(mesh.axes))
    lookups = frozenset(at for at, found in enumerate(first) if found.rule.is_lookup)
    graph = mark_accumulation(with_copies(graph, [found.rule.is_follower for found in first], [found.sums for found in first], lookups))
    signatures = table.read(graph, within or {}, others)
    rules, sums = tuple(found.rule for found in signatures), [found.sums for found in signatures]
    written = materialised(graph, rules, sums)
    unknown = dict.fromkeys((op.primitive, str(op.source)) for op, found in zip(graph.ops, signatures, strict=True) if not found.known)
    seconds = compute_seconds(graph, mesh, cluster, signatures, kernel_traffic(graph, rules, written, sums))
    strategies, numbers = tuple(found.strategies for found in signatures), tuple(found.number for found in signatures)
    return StrategySpace(graph, mesh, cluster, rules, strategies, numbers, written, seconds, tuple(unknown))
