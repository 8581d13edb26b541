"""The strategy space of a step: graph x rules x mesh, with copies for readers of several layouts put in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.costs.array_edges import ArrayEdge, ArrayFacts, EdgeEnds, LayoutLists, array_edges, array_facts, in_a_row
from shardplan.costs.halo_exchange import Exchange, exchange_seconds, exchanges
from shardplan.costs.merged_products import PricedProduct, most_saved
from shardplan.costs.roofline import compute_seconds
from shardplan.costs.split_products import HeldParts, held_parts
from shardplan.ir.graph import Graph, Path
from shardplan.ir.repeated_layers import repeated_layers
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.device import Device
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.strategies.enumerate import AxisFactors, OpStrategies
from shardplan.strategies.rule import Rule
from shardplan.strategies.signature import Signature, Signatures
from shardplan.xla_model.accumulation import accumulated_operands, accumulated_sums, mark_accumulation
from shardplan.xla_model.bytes_moved import kernel_traffic
from shardplan.xla_model.cast_first import Factors, cast_first_operands, widened_fraction
from shardplan.xla_model.combining import CollectiveSite, byte_factors, collective_sites, summed_values
from shardplan.xla_model.convolutions import HeldCopy, call_orders, with_convolutions
from shardplan.xla_model.copies import with_copies
from shardplan.xla_model.fusion import FusedKernels, fused_kernels
from shardplan.xla_model.fusion_estimate import FusionEstimate
from shardplan.xla_model.kernel_groups import kernels_of
from shardplan.xla_model.materialised import materialised
from shardplan.xla_model.merged_products import sharing_products
from shardplan.xla_model.physical_order import physical_orders
from shardplan.xla_model.row_kernels import row_kernels, with_small_reductions
from shardplan.xla_model.summed_scatters import SummedScatter, summed_scatters, with_summed_scatters
from shardplan.xla_model.traffic import KernelTraffic
from shardplan.xla_model.wide_elementwise import kept_wide

IN_PART = "in part: "
"""Start of why an op is split over some mesh axes only."""
SMALL_SUM_BYTES = 1 << 16
"""Blocking sums smaller than this are combined with those at their depth."""


class MovedArray(NamedTuple):
    """What the price of an array's reshards depends on beyond its shape."""

    byte_factors: Factors
    site: CollectiveSite
    read_once: bool


@dataclass(frozen=True, eq=False)
class StepFacts:
    """What holds of a step whatever is sharded: shared by the strategy spaces of all searches.

    Attributes:
        graph: the step, copies included.
        signatures: of ops, made once each.
        rules, sums: per op, its rule and whether its result may be partial.
        numbers: per op, equal ones for ops between which the planner sees no difference.
        materialised: per value, whether it is ever written to memory.
        traffic: per op, what its kernels move.
        kernels: which kernels run which ops.
        copies: of operands of convolutions.
        summed_scatters: scatters that write into what their results are added to.
        wide: value that is written in more bits than its dtype has -> bytes written over its own.
    """

    graph: Graph
    signatures: Signatures
    rules: tuple[Rule, ...]
    sums: tuple[bool, ...]
    numbers: tuple[int, ...]
    materialised: tuple[bool, ...]
    traffic: tuple[KernelTraffic, ...]
    kernels: FusedKernels
    copies: tuple[HeldCopy, ...]
    summed_scatters: Mapping[int, SummedScatter]
    wide: Mapping[int, float]

    @classmethod
    def of(cls, graph: Graph, mesh: MeshShape, device: Device | None = None) -> StepFacts:
        """The facts of a step, before copies are put in, on a mesh of such devices."""
        table, whole = Signatures(mesh), (None,) * len(mesh.axes)
        first = table.read(graph := mark_accumulation(graph), {}, whole)
        lookups = frozenset(at for at, found in enumerate(first) if found.rule.is_lookup)
        follows, sums = [found.rule.is_follower for found in first], [found.sums for found in first]
        graph = mark_accumulation(with_copies(graph, follows, sums, lookups))
        found = table.read(graph, {}, whole)
        rules, sums = tuple(x.rule for x in found), tuple(x.sums for x in found)
        orders = physical_orders(graph, rules, call_orders(graph, device))
        seen = with_summed_scatters(orders.rules, summed := summed_scatters(graph))
        seen = with_small_reductions(graph, seen, rows := row_kernels(graph, seen, orders))
        estimate = FusionEstimate.of(device, mesh.size(*mesh.axes))
        written = materialised(graph, seen, sums, rows, estimate)
        kernels = kernels_of(graph, seen, written, sums, rows, estimate.tanh_bytes)
        fused = fused_kernels(graph, seen, kernels_of(graph, seen, written, sums, rows, merged=False))
        wide = kept_wide(graph, seen, kernels, device)
        around = with_convolutions(graph, seen, kernel_traffic(graph, seen, kernels, wide), device)
        return cls(
            graph, table, rules, sums, tuple(x.number for x in found), written, around.traffic, fused, around.copies, summed, wide
        )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Per op, its class among repeated layers."""
        return repeated_layers(self.graph, self.numbers)

    @cached_property
    def collective_sites(self) -> tuple[CollectiveSite, ...]:
        """Per value, which collectives its reshards may be combined with."""
        pairs = ((v, self.rules[v.producer[0]]) for v in self.graph.values)
        small_sums = [v.bytes < SMALL_SUM_BYTES and (bool(rule.reduce) or (rule.linear and not v.shape)) for v, rule in pairs]
        return collective_sites(self.graph, small_sums)

    @cached_property
    def arrays(self) -> tuple[ArrayFacts, ...]:
        """Every operand of every op, in program order."""
        ratios = {v: self.partial_bytes_ratio(v) for v in self.accumulated_sums}
        return tuple(array_facts(self.graph, self.rules, self.materialised, ratios, self.accumulated_operands))

    @cached_property
    def moved(self) -> tuple[MovedArray, ...]:
        """Per value, what the price of its reshards depends on beyond its shape; one object for equal ones."""
        known: dict[MovedArray, MovedArray] = {}
        values = enumerate(zip(self.graph.values, self.collective_sites, strict=True))
        found = (
            MovedArray(byte_factors(x.dtype, self.partial_bytes_ratio(v), widened_fraction(self.graph, v)), site, len(x.consumers) == 1)
            for v, (x, site) in values
        )
        return tuple(known.setdefault(x, x) for x in found)

    @cached_property
    def cast_first(self) -> dict[tuple[int, int], Factors]:
        """(op, operand) that a collective may bring narrower than its array -> what it then sends."""
        return cast_first_operands(self.graph, self.rules)

    def resharder(self, resharders: Sequence[Resharder], j: int, k: int, v: int) -> Resharder:
        """What prices the reshards of value v on its way to operand k of op j, of what does so per value.

        XLA casts an array first before a path's last collective only: an all-to-all before that sends more than is counted here.
        """
        if (j, k) not in self.cast_first:
            return resharders[v]
        factors = dict(self.moved[v].byte_factors)
        factors |= {kind: min(fraction, factors.get(kind, fraction)) for kind, fraction in self.cast_first[j, k]}
        return resharders[v].sending(tuple(factors.items()))

    def partial_bytes_ratio(self, v: int) -> float:
        """Bytes of a value's partial sums over its own: they are added in the dtype in which they are made."""
        values = self.graph.values
        return values[self.summed_values[v]].itemsize / (values[v].itemsize or 1)

    @cached_property
    def summed_values(self) -> list[int]:
        """Per value, the one whose partial sums XLA adds."""
        return summed_values(self.graph)

    @cached_property
    def sharing_products(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Groups of products that share an operand, each as (op, operand)."""
        return sharing_products(self.graph, self.rules)

    @cached_property
    def accumulated_operands(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(op, operand) that may be partial sums that a loop accumulates -> that carry's (loop_carry, loop_next)."""
        return accumulated_operands(self.graph)

    @cached_property
    def accumulated_sums(self) -> dict[int, int]:
        """Sum that a loop accumulates, which may be partial -> the value in the loop that is summed."""
        return accumulated_sums(self.graph, self.accumulated_operands)


@dataclass(frozen=True, eq=False, repr=False)
class StrategySpace:
    """The strategies of every op on a mesh of a cluster, and what the XLA model says of the graph.

    Attributes:
        facts: what holds whatever is sharded.
        strategies: per op.
        signature: per op, equal numbers for ops between which the planner sees no difference.
        kernel_seconds: per op, seconds [s] of its kernels in one run on one device.
        exchange_seconds: per op, seconds [s] of the collectives in one run that bring shards what they need of each other, or None.
        unknown: (primitive, source) of ops without a rule, which are replicated; in parentheses why none could be derived.
        edge_layouts, tables, priced: caches of `costs/tables.py` and `costs/build.py`: by template; of the last network's tables; and
            of what the last network's combined collectives say.
        exchanged: the same of `exchanges`.
    """

    facts: StepFacts
    mesh: MeshShape
    cluster: Cluster
    strategies: tuple[OpStrategies, ...]
    signature: tuple[int, ...]
    kernel_seconds: tuple[np.ndarray, ...]
    exchange_seconds: tuple[np.ndarray | None, ...]
    unknown: tuple[tuple[str, str], ...]
    edge_layouts: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)
    priced: dict = field(default_factory=dict)
    exchanged: dict = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Per op, its class among repeated layers with the same strategies."""
        first: dict[tuple[int, int], int] = {}
        return tuple(first.setdefault(both, i) for i, both in enumerate(zip(self.facts.layers, self.signature, strict=True)))

    @property
    def graph(self) -> Graph:
        """The step, copies included."""
        return self.facts.graph

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Per op."""
        return self.facts.rules

    @property
    def materialised(self) -> tuple[bool, ...]:
        """Per value, whether it is ever written to memory."""
        return self.facts.materialised

    @property
    def collective_sites(self) -> tuple[CollectiveSite, ...]:
        """Per value, which collectives its reshards may be combined with."""
        return self.facts.collective_sites

    @property
    def accumulated_sums(self) -> dict[int, int]:
        """Sum that a loop accumulates, which may be partial -> the value in the loop that is summed."""
        return self.facts.accumulated_sums

    @property
    def accumulated_operands(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(op, operand) that may be partial sums that a loop accumulates -> that carry's (loop_carry, loop_next)."""
        return self.facts.accumulated_operands

    @cached_property
    def seconds(self) -> tuple[np.ndarray, ...]:
        """Per op, seconds [s] of one run: of its kernels and exchanges."""
        known: dict[tuple[int, int], np.ndarray] = {}
        out = []
        for kernels, exchanged in zip(self.kernel_seconds, self.exchange_seconds, strict=True):
            if exchanged is not None and (key := (id(kernels), id(exchanged))) not in known:
                known[key] = kernels + exchanged
            out.append(kernels if exchanged is None else known[id(kernels), id(exchanged)])
        return tuple(out)

    @cached_property
    def least_seconds(self) -> tuple[np.ndarray, ...]:
        """Per op, `kernel_seconds`, or less where it is a product that may be merged: no kernel that holds it takes less for it."""
        saved: dict[int, np.ndarray] = {}
        for group in self.facts.sharing_products:
            most = most_saved([self.product(j) for j, _ in group], self.mesh, self.cluster.device)
            for (j, _), seconds in zip(group, most, strict=True):
                saved[j] = np.maximum(saved.get(j, 0.0), seconds)
        return tuple(seconds - saved[j] if j in saved else seconds for j, seconds in enumerate(self.kernel_seconds))

    def product(self, j: int) -> PricedProduct:
        """Op j, a product."""
        return PricedProduct(self.graph.ops[j], self.strategies[j], self.facts.traffic[j])

    @cached_property
    def halo_copies(self) -> tuple[tuple[int, int, np.ndarray], ...]:
        """(convolution, last op that reads it, bytes [s] over those of the input) of inputs that are copied with their halo.

        A filter's gradient slides over the copy, too; where no other op reads the input, the copy is held in its place.
        """
        graph, out = self.graph, []
        gradients = {i for i in self.exchanging if not self.rules[i].halo.keys().isdisjoint(self.rules[i].reduce)}
        slides_over = {j: graph.original(v) for j in gradients if (v := graph.ops[j].inputs[0]) is not None}
        for i in self.exchanging:
            (op, of), v = (graph.ops[i], self.strategies[i]), graph.ops[i].inputs[0]
            if not op.traits.convolution or i in gradients or self.exchange_seconds[i] is None or v is None:
                continue
            root, size = graph.original(v), graph.values[v].bytes / of.shards[0]
            halo = np.array([sum(x.bytes for x in self.exchanges(i, s)) for s in range(len(of))]) / size
            windows = {i, *(j for j, u in slides_over.items() if u == root)}
            instead = windows.issuperset(graph.readers(root)) and not graph.ops[graph.maker(v)].traits.persistent
            out.append((i, max(windows), np.where(halo > 0, 1 + halo - instead, 0.0)))
        return tuple(out)

    @cached_property
    def held_parts(self) -> tuple[tuple[int, HeldParts], ...]:
        """(product, what it holds while it runs) of those that XLA splits."""
        known: dict[int, HeldParts] = {}
        products = (i for i, op in enumerate(self.graph.ops) if op.traits.matmul and self.rules[i].fusion == "none")
        for i in (products := [i for i in products if i not in self.graph.dead]):
            if (key := self.signature[i]) not in known:
                known[key] = held_parts(self.graph.ops[i], self.strategies[i], self.mesh, self.cluster.device)
        return tuple((i, found) for i in products if (found := known[self.signature[i]]).result.any())

    @cached_property
    def layout_lists(self) -> LayoutLists:
        """The lists of all layouts of operands and results."""
        return LayoutLists(self.mesh)

    @cached_property
    def array_edges(self) -> tuple[ArrayEdge, ...]:
        """Every operand of every op, in program order."""
        return tuple(array_edges(self.graph, self.facts.arrays, self.strategies, self.layout_lists))

    @cached_property
    def edges_of(self) -> Mapping[int, Sequence[ArrayEdge]]:
        """Value -> its array edges, in program order."""
        found: dict[int, list[ArrayEdge]] = {}
        for edge in self.array_edges:
            found.setdefault(edge.value, []).append(edge)
        return found

    @cached_property
    def exchanging(self) -> tuple[int, ...]:
        """The ops of which shards may need something of each other, such as halos."""
        return tuple(i for i, rule in enumerate(self.rules) if rule.exchanged)

    def exchanges(self, i: int, s: int) -> list[Exchange]:
        """The exchanges of op i under its strategy s."""
        if (key := (self.signature[i], s)) not in self.exchanged:
            op, of = self.graph.ops[i], self.strategies[i]
            layouts = [each[s] for each in of.operands]
            found = exchanges(self.rules[i], of.factors[s], op.ins, op.outs, layouts, self.mesh, self.cluster)
            self.exchanged[key] = found
        return self.exchanged[key]

    @cached_property
    def edge_ends(self) -> EdgeEnds:
        """The layouts of all array edges."""
        return EdgeEnds.of(self.array_edges, self.layout_lists)

    def chosen_seconds(self, strategies: Sequence[int]) -> np.ndarray:
        """Per op, seconds of its kernels in one step under its strategy."""
        seconds, begins, runs = self._seconds
        return seconds[begins + np.array(strategies, np.int64)] * runs

    @cached_property
    def _seconds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`kernel_seconds` in a row, each array once; per op where its own begin; per op its runs."""
        distinct, begins = in_a_row(self.kernel_seconds)
        runs = np.array([op.runs for op in self.graph.ops], np.float64)
        return np.concatenate([np.zeros(0), *distinct]), np.array([begins[id(x)] for x in self.kernel_seconds], np.int64), runs


def make_strategy_space(
    facts: StepFacts,
    mesh: MeshShape,
    cluster: Cluster,
    within: Mapping[Path, AxisFactors] | None = None,
    others: AxisFactors | None = None,
) -> StrategySpace:
    """Strategies and compute seconds of every op of a step.

    Args:
        facts: of the step on this mesh.
        mesh, cluster: the machine.
        within: by path of an op, what is decided on each axis (`enumerate_strategies`).
        others: the same for all ops that are not in `within`.
    """
    signatures = facts.signatures.read(facts.graph, within or {}, others)
    pairs = zip(facts.graph.ops, signatures, strict=True)
    named = ((op, _without_factors(found, whole=not within and others is None)) for op, found in pairs)
    unknown = dict.fromkeys((op.primitive + why, str(op.source)) for op, why in named if why is not None)
    exchanged = exchange_seconds(facts.graph, mesh, cluster, signatures)
    seconds = compute_seconds(facts.graph, mesh, cluster, signatures, facts.traffic, exchanged)
    strategies, numbers = tuple(found.strategies for found in signatures), tuple(found.number for found in signatures)
    return StrategySpace(facts, mesh, cluster, strategies, numbers, seconds, exchanged, tuple(unknown))


def _without_factors(found: Signature, whole: bool) -> str | None:
    """Why a signature has no rule, or none that splits it over all mesh axes, in brackets; "" for no reason, None if it has one.

    Only the `whole` space has all strategies.
    """
    if not found.known:
        return f" ({found.rule.unsharded})" if found.rule.unsharded else ""
    in_part = whole and found.rule.stopped and all(None in factors for factors in found.strategies.factors)
    return f" ({IN_PART}{found.rule.stopped})" if in_part else None


def with_merged_axes(space: StrategySpace, groups: Sequence[Sequence[str]]) -> StrategySpace:
    """The strategies that put the mesh axes of a group on the same factor: those of a mesh on which each group is one axis."""
    of = [[n for n, axis in enumerate(space.mesh.axes) if axis in group] for group in groups]
    kept: dict[int, tuple[OpStrategies, list[int]]] = {}
    timed: dict[int, np.ndarray] = {}
    strategies, seconds, exchanged = [], [], []
    for some, *times in zip(space.strategies, space.kernel_seconds, space.exchange_seconds, strict=True):
        if id(some) not in kept:
            pairs = enumerate(some.keys)
            in_order = (s for s, (_, order) in pairs if order == space.mesh.axes)
            numbers = [s for s in in_order if all(len({some.factors[s][n] for n in group}) == 1 for group in of)]
            kept[id(some)] = some.only(numbers), numbers
        found, numbers = kept[id(some)]
        for of_some in times:
            if of_some is not None and id(of_some) not in timed:
                timed[id(of_some)] = of_some[numbers]
        strategies.append(found)
        seconds.append(timed[id(times[0])])
        exchanged.append(timed.get(id(times[1])))
    kinds = tuple(strategies), space.signature, tuple(seconds), tuple(exchanged)
    return StrategySpace(space.facts, space.mesh, space.cluster, *kinds, space.unknown)
