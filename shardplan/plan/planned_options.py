"""Which of XLA's compiler options a plan sets, and the bytes per device that they cost.

    loop      row of a stack --gather--> weight --> ops --> partial gradient --reduce--> row of a stack
    pipelined the weight of the next iteration and the partial gradient of the last one are in memory during the whole body

Facts: options-pipelined-gather, options-pipelined-gather-memory, options-pipelined-reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shardplan.costs.network import CostNetwork
from shardplan.ilp.solver.problem import sum_over_intervals
from shardplan.mesh.cluster import CollectiveKind
from shardplan.mesh.device import gpu_of_device_kind
from shardplan.plan.planned import Planned
from shardplan.xla_model.combining import SUMS
from shardplan.xla_model.compiler_options import DEFAULT, XlaOptions

HOPPER = (9, 0)
"""Compute capability from which on XLA hides latency unasked (fact: options-latency-hiding)."""


class Carried(NamedTuple):
    """An array that pipelining carries from one iteration of a loop to the next: bytes per device, and the collective it is for."""

    kind: CollectiveKind  # "all-gather", or "all-reduce" for a gradient's reduction of either form
    op: int  # that makes it
    loop: int
    bytes: float


def planned_options(planned: Planned) -> XlaOptions:
    """The options that a plan is compiled with on GPUs: loops are pipelined as far as the memory allows.

    On Ampere XLA is asked to hide latency instead: measured, that hides more without pipelining than with it. An option is left out
    where it would find nothing to do.
    """
    cluster, limit = planned.space.cluster, planned.network.problem.limit
    if "cpu" in cluster.platforms:
        return DEFAULT
    gpu = gpu_of_device_kind(cluster.device.name)
    if gpu is not None and gpu.compute_capability < HOPPER:
        return replace(DEFAULT, latency_hiding=bool(_in_loops(planned)))
    kinds = frozenset(x.kind for x in _pipelinable(planned))
    for some in (kinds, kinds - {"all-reduce"}, kinds - {"all-gather"}):
        options = replace(DEFAULT, pipelined=some, double_buffering=True)
        if some and (limit is None or _peak(planned.network, planned.solution.states, list(carried(planned, options))) <= limit):
            return options
    return DEFAULT


def carried(planned: Planned, options: XlaOptions) -> Iterator[tuple[int, int, int, float]]:
    """What pipelining adds to `CostNetwork.allocations`: the carried arrays, during their loops."""
    for x in _pipelinable(planned) if options.pipelined else ():
        if x.kind in options.pipelined:
            loop = planned.graph.loops[x.loop]
            yield x.op, loop.start, loop.stop, x.bytes


def _peak(network: CostNetwork, states, more: list[tuple[int, int, int, float]]) -> float:
    found = [*network.allocations(states), *more]
    return float(sum_over_intervals((lo, hi, n) for _, lo, hi, n in found).max(initial=0.0))


def _in_loops(planned: Planned) -> list[int]:
    """Ops in loops that run more than once, with a collective at an operand."""
    graph, network, of = planned.graph, planned.network, planned.strategies
    ops = (j for j, op in enumerate(graph.ops) if op.loop >= 0 and graph.loops[op.loop].trips > 1)
    return [j for j in ops if any(s.kind != "slice" for _, steps in network.reshards(j, of, planned.retained) for s in steps)]


def _pipelinable(planned: Planned) -> Iterator[Carried]:
    """The arrays that pipelining would carry, each once.

    A gather qualifies if it is of a row that its loop slices off a stack, unless an optimization barrier of `jax.checkpoint` stands
    between; a reduction, if it is of a gradient that nothing in the loop reads.
    """
    graph, mesh, seen = planned.graph, planned.space.mesh, set()
    for j in _in_loops(planned):
        op = graph.ops[j]
        for k, steps in planned.network.reshards(j, planned.strategies, planned.retained):
            v = op.inputs[k]
            assert v is not None
            site, kinds = planned.space.collective_sites[v], [s.kind for s in steps]
            if site.collective_class == "prefetch" and "all-gather" in kinds and _is_free_row(planned, v):
                kind, layout = "all-gather", steps[-1].after
            elif site.collective_class == "gradient" and (sums := [s for s in steps if s.kind in SUMS]):
                kind, layout = "all-reduce", sums[0].before
            else:
                continue
            found = Carried(kind, graph.values[v].producer[0], op.loop, graph.values[v].bytes / layout.shards(mesh))
            if (key := (found.kind, site.origin, op.loop)) not in seen:
                seen.add(key)
                yield found


def _is_free_row(planned: Planned, v: int) -> bool:
    """Whether v is a loop's row of a stack, cast or copied, with no optimization barrier between."""
    ops = planned.graph.ops
    row = planned.graph.origin(v, lambda at: ops[at].primitive != "barrier" and (ops[at].traits.same_array or ops[at].forwards_value))
    return ops[planned.graph.values[row].producer[0]].traits.loop_slice
