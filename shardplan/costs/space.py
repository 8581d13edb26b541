"""What every op of a graph may do on a mesh, and the compute seconds of each way: the graph x the rules x the mesh.

Compute is a roofline over XLA's kernels (`fusion.py`). An op pays for what the kernels that compute it read and write on its behalf,
and the op that stands for a small kernel for what this is short of the least time of any kernel.

    seconds(s) = max(flops / n_shards / peak(dtype), bytes moved locally / bandwidth)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardplan._jax import itemsize, shard_map_specs
from shardplan.costs.edge_templates import EdgeTemplate, ways
from shardplan.costs.halo_exchange import Exchange, exchanges
from shardplan.ir.graph import Graph, Op, Path
from shardplan.ir.repeated_layers import repeated_layers
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import OpStrategies, enumerate_strategies, given_strategies
from shardplan.strategies.rule import Rule, factor_sizes
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.border import border_rule
from shardplan.xla_model.accumulation import accumulated_operands, accumulated_sums, mark_accumulation
from shardplan.xla_model.combining import CollectiveSite, collective_sites
from shardplan.xla_model.copies import with_copies
from shardplan.xla_model.coupled_state import CoupledState, coupled_state
from shardplan.xla_model.fusion import materialised
from shardplan.xla_model.kernels import KernelTraffic, kernel_traffic


@dataclass(frozen=True, eq=False)
class StrategySpace:
    """The strategies of every op, and what the rooms of `ir/` say of the graph by them.

    Attributes:
        rules, strategies: per op.
        signature: per op, equal numbers for ops that differ in nothing the planner looks at.
        materialised: per value, whether it is ever written to memory.
        seconds: per op, [s] -> seconds of one run on one device.
        unknown: (primitive, source) of ops without a rule, kept whole.
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
        """Per value, where its reshards stand."""
        rules = [self.rules[v.producer[0]] for v in self.graph.values]
        sums = [
            v.bytes < SMALL_SUM_BYTES and (bool(rule.reduce) or (rule.linear and not v.shape))
            for v, rule in zip(self.graph.values, rules, strict=True)
        ]
        return collective_sites(self.graph, sums)

    @cached_property
    def accumulated_operands(self) -> dict[tuple[int, int], int]:
        """(op, operand) that may be partial sums which a loop adds up -> that loop's `loop_carry`."""
        return accumulated_operands(self.graph)

    @cached_property
    def accumulated_sums(self) -> dict[int, int]:
        """Value that a loop made by adding up, which may be partial -> the value in the loop that it is the sum of."""
        return accumulated_sums(self.graph, self.accumulated_operands)

    @cached_property
    def coupled_state(self) -> list[CoupledState | None]:
        """Per value, what the optimizer computes with beside it."""
        return coupled_state(self.graph, [rule.fusion == "loop" for rule in self.rules])

    @cached_property
    def ways(self) -> tuple[tuple[int, int, int, int, EdgeTemplate], ...]:
        """(op that makes an array, op that takes it, as which operand, value, way) of every operand, in program order."""
        return tuple(ways(self.graph, self.rules, self.strategies, self.coupled_state, self.accumulated_sums))


SMALL_SUM_BYTES = 1 << 16
"""Sums below this are merged with those as far down the line."""


def make_strategy_space(
    graph: Graph,
    mesh: MeshShape,
    cluster: Cluster,
    within: Mapping[Path, Sequence[str | None]] | None = None,
    others: Sequence[str | None] | None = None,
) -> StrategySpace:
    """Rules, strategies and compute seconds of every op of a step, copies for shared readers put in between.

    Ops of one signature share rule and strategies.

    Args:
        graph, mesh, cluster: the step, and what it runs on.
        within: by path of an op, what is settled on each axis (`enumerate_strategies`), and the same for all `others`.
    """
    table = _Table(mesh)
    nothing = (None,) * len(mesh.axes)
    first = table.read(graph := mark_accumulation(graph), {}, nothing)
    lookups = frozenset(at for at, e in enumerate(first) if e.rule.is_lookup)
    graph = mark_accumulation(with_copies(graph, [e.rule.is_follower for e in first], [e.sums for e in first], lookups))
    entries = table.read(graph, within or {}, others)
    rules = tuple(e.rule for e in entries)
    choices = tuple(e.choices for e in entries)
    signature = tuple(e.number for e in entries)
    sums = [e.sums for e in entries]
    written = materialised(graph, rules, sums)
    unknown = dict.fromkeys((op.primitive, str(op.source)) for op, e in zip(graph.ops, entries, strict=True) if not e.known)
    moves = kernel_traffic(graph, rules, written, sums)
    seconds = _seconds(graph, mesh, cluster, rules, choices, signature, moves)
    return StrategySpace(graph, mesh, cluster, rules, choices, signature, written, seconds, tuple(unknown))


UNSPLIT = ("int2", "uint2")
"""Types of which XLA has no sums over devices, and whose gathers write past their buffers (jax 0.10.2)."""


@dataclass(frozen=True, eq=False)
class _Entry:
    """What ops of one signature share; `sums` tells whether the result may be partial."""

    number: int
    rule: Rule
    known: bool
    sums: bool
    choices: OpStrategies


@dataclass(frozen=True, eq=False)
class _Ruled:
    """The rule of ops of one signature, whether it is one for their primitive, and the sizes of its letters."""

    rule: Rule
    known: bool
    sizes: dict[str, int]


class _Table:
    """One entry per op signature."""

    def __init__(self, mesh: MeshShape):
        self.mesh = mesh
        self.rules: dict[tuple, _Ruled] = {}
        self.entries: dict[tuple, _Entry] = {}

    def read(self, graph: Graph, within: Mapping[Path, Sequence[str | None]], others: Sequence[str | None] | None) -> list[_Entry]:
        """The entries of all ops, in order."""
        out: list[_Entry] = []
        for op in graph.ops:
            handed = bool(op.inputs) and all(v is not None and out[graph.values[v].producer[0]].sums for v in op.inputs)
            out.append(self._entry(op, handed, within.get(op.path, others)))
        return out

    def _entry(self, op: Op, handed: bool, within: Sequence[str | None] | None) -> _Entry:
        """`handed`: every operand may be a partial sum."""
        key = _key(op)
        if (ruled := self.rules.get(key)) is None:
            ruled = self.rules[key] = self._ruled(op)
        rule = ruled.rule
        linear = (rule.linear or op.accumulates) and (handed or rule.accumulator_init)
        asked = ruled, linear, within
        if (entry := self.entries.get(asked)) is None:
            given = _given(op, self.mesh)
            choices = given or enumerate_strategies(rule, ruled.sizes, self.mesh, linear, within)
            sums = linear or (not op.traits.border and bool(rule.reduce))
            entry = self.entries[asked] = _Entry(len(self.entries), rule, ruled.known or given is not None, sums, choices)
        return entry

    def _ruled(self, op: Op) -> _Ruled:
        border = border_rule(op)
        rule, known = (border, True) if border else rule_for(op.primitive, op.ins, op.outs, op.params)
        ins, outs = (tuple(tuple(getattr(x, "shape", ())) for x in xs) for xs in (op.ins, op.outs))
        sizes = factor_sizes(rule, ins, outs, op.primitive)
        nothing = not op.traits.step_input and any(0 in shape for shape in (*ins, *outs))  # XLA does not split it
        if nothing or any(str(getattr(x, "dtype", "")) in UNSPLIT for x in (*op.ins, *op.outs)):
            rule = replace(rule, replicated=frozenset(sizes), linear=False)
        return _Ruled(rule, known, sizes)


def _given(op: Op, mesh: MeshShape) -> OpStrategies | None:
    """What a `shard_map` says of its operands and results: its specs are pins."""
    specs = shard_map_specs(op.params) if op.traits.layouts_in_params else None
    if specs is None:
        return None

    def layouts(specs, avals):
        return [Layout.from_spec(spec, len(aval.shape)) for spec, aval in zip(specs, avals, strict=True)]

    return given_strategies(layouts(specs[0], op.ins), layouts(specs[1], op.outs), mesh)


def _key(op: Op):
    def aval(x):
        return tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)

    literal = tuple(v is None for v in op.inputs)
    flags = op.is_follower, op.accumulates
    return op.primitive, _freeze(op.params), flags, tuple(map(aval, op.ins)), tuple(map(aval, op.outs)), literal


def _freeze(params: Mapping):
    out = []
    for name, value in sorted(params.items()):
        try:
            hash(value)
            out.append((name, value))
        except TypeError:
            out.append((name, repr(value)))
    return tuple(out)


def _seconds(graph, mesh, cluster, rules, choices, signature, moves: Sequence[KernelTraffic]) -> tuple[np.ndarray, ...]:
    cache: dict = {}
    out = []
    for at, op in enumerate(graph.ops):
        key = signature[at], moves[at]
        if key not in cache:
            cache[key] = _op_seconds(op, rules[at], choices[at], mesh, cluster, moves[at])
        out.append(cache[key])
    for loop in graph.loops:
        if loop.trips > 1 and loop.start < loop.stop:  # a kernel counts the rounds
            out[loop.start] = out[loop.start] + cluster.device.kernel_latency_s
    return tuple(out)


def exchanged(op: Op, rule: Rule, choices: OpStrategies, s: int, mesh: MeshShape, cluster: Cluster) -> list[Exchange]:
    """What an op exchanges with its neighbours under strategy s."""
    layouts = [of[s] for of in choices.operands]
    return exchanges(rule, choices.factors[s], op.ins, op.outs, layouts, mesh, cluster) if rule.exchanged else []


def _op_seconds(op: Op, rule: Rule, choices: OpStrategies, mesh: MeshShape, cluster: Cluster, moves: KernelTraffic) -> np.ndarray:
    moved = np.zeros(len(choices))
    for x, shards, times in zip(op.ins + op.outs, choices.shards, moves.operand_reads + moves.result_writes, strict=True):
        if times:
            moved += times * (float(math.prod(x.shape)) * itemsize(x.dtype)) / shards
    if rule.scan:  # one more pass joins what is made with the totals of the shards before
        moved *= [1 if rule.scan.isdisjoint(factors) else 2 for factors in choices.factors]
    device = cluster.device
    seconds = moved / device.memory_rate
    if rule.flops and op.ins:
        dtype = str(op.ins[0].dtype) if hasattr(op.ins[0], "dtype") else "float32"
        seconds = np.maximum(rule.flops * choices.work / device.flops_per_s(dtype), seconds)
    if rule.fusion == "none" and moved.any():
        seconds = np.maximum(seconds, device.kernel_latency_s)
    elif moves.kernel_bytes is not None:
        seconds = seconds + np.maximum(0.0, device.kernel_latency_s - moves.kernel_bytes * choices.work / device.memory_rate)
    if any(moves.result_writes):
        seconds = seconds + device.kernel_latency_s * _in_two(op, choices)
    if rule.exchanged:
        found = (exchanged(op, rule, choices, s, mesh, cluster) for s in range(len(choices)))
        seconds = seconds + np.array([sum(x.seconds for x in exchange) for exchange in found])
    return seconds


def _in_two(op: Op, choices: OpStrategies) -> np.ndarray:
    """[s] -> whether XLA sums up in two kernels, one after the other: what is too much for one block of threads.

    The first may be shared by several sums, the second is each one's own.

    The bounds are those of `ReductionDimensionRaceFreeBound` (fact: reduction-two-kernels).
    """
    axes = op.params.get("axes")
    if not axes or not op.traits.reduction:
        return np.zeros(len(choices))
    (x, *_), (y, *_) = op.ins, op.outs
    most = 1 << (14 if len(x.shape) - 1 in axes else 12)
    return x.size / choices.shards[0] > most * y.size / choices.shards[len(op.ins)]
