"""Seconds of every kernel and collective of a decided program: by the cluster's rates, and by XLA's estimate, which orders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np

from shardplan._jax import itemsize
from shardplan.costs.kernel_tasks import Tasks
from shardplan.costs.merged_products import saved_seconds
from shardplan.costs.network import CostNetwork
from shardplan.costs.roofline import reduced_twice
from shardplan.costs.split_products import Sizes, local_sizes, merged_sizes, product_parts
from shardplan.ir.graph import Graph
from shardplan.mesh import collective
from shardplan.xla_model.latency_estimate import KernelKind, collective_estimate_s, kernel_estimate_s
from shardplan.xla_model.timeline import Task


@dataclass(frozen=True, eq=False)
class TaskSeconds:
    """Kernels and combined collectives, each named by the first of the tasks that are joined in it.

    Attributes:
        network, states, tasks: of the decided program.
        joined: per task, the first task of the kernel or collective that it is part of; and first transfer -> the transfers that one
            collective combines, in their order.
        profiled: XLA has a profile of the step, so that its estimates are these seconds, too.
    """

    network: CostNetwork
    states: tuple[int, ...]
    tasks: Tasks
    joined: tuple[list[int], dict[int, list[int]]]
    profiled: bool

    @property
    def graph(self) -> Graph:
        """The step."""
        return self.network.space.graph

    # ---- kernels

    def kernel(self, n: int, waits: tuple[int, ...]) -> Task:
        """A kernel with all that is merged into it."""
        if n not in self._kernels:
            self._kernels[n] = self._kernel(n)
        return self._kernels[n]._replace(before=waits)

    @cached_property
    def _kernels(self) -> dict[int, Task]:
        """Those that were asked for, as if each waited for nothing."""
        return {}

    def summing(self, n: int) -> Task | None:
        """The kernel that adds up parts of a split product, or what the blocks of a reduction make; None where there is none."""
        size, device = self.parts_bytes.get(n, 0.0), self.network.space.cluster.device
        if not size and n not in self._reduced_twice:
            return None
        seconds = min(size / device.memory_rate if size else device.kernel_latency_s, self._merged_seconds[n] / 2)
        estimate_s = (
            seconds if self.profiled else kernel_estimate_s("fused", seconds, inf if size else 0.0, self.network.space.cluster, ())
        )
        return Task(seconds, False, (), False, estimate_s, self.tasks.results[n] > 1)

    @cached_property
    def in_second_kernels(self) -> set[int]:
        """Ops whose results the second kernel of their task writes: split products, and reductions of more than a block of threads."""
        of, reductions = self.network.space.strategies, (j for j, op in enumerate(self.graph.ops) if op.traits.reduction)
        twice = {j for j in reductions if reduced_twice(self.graph.ops[j], of[j])[self.states[j] % len(of[j])]}
        return twice | {j for j, held in self.network.space.held_parts if held.result[self.states[j] % len(of[j])]}

    @cached_property
    def _reduced_twice(self) -> set[int]:
        """Kernels with a reduction that is too much for one block of threads."""
        twice = (j for j in self.in_second_kernels if self.graph.ops[j].traits.reduction)
        return {self.joined[0][self.tasks.computed[j]] for j in twice if j in self.tasks.computed}

    @cached_property
    def parts_bytes(self) -> dict[int, float]:
        """Task of products that are split -> bytes of their parts."""
        out: dict[int, float] = {}
        for j, held in self.network.space.held_parts:
            n, s = self.tasks.computed.get(j, -1), self.states[j] % len(of := self.network.space.strategies[j])
            if n >= 0 and held.result[s]:
                size = self.graph.values[self.graph.ops[j].outputs[0]].bytes / of.shards[len(self.graph.ops[j].inputs)][s]
                out[self.joined[0][n]] = out.get(self.joined[0][n], 0.0) + float(held.result[s]) * size
        return out

    def _kernel(self, n: int) -> Task:
        kernels, group, seconds = self.network.space.facts.kernels, self.tasks.group[n], self._merged_seconds[n]
        estimate_s = seconds
        if not self.profiled:
            kind, product = self._kinds.get(n) or ("rows" if group in kernels.rows else "fused", ())
            estimate_s = kernel_estimate_s(kind, seconds, self._latency_bound_bytes.get(n, inf), self.network.space.cluster, product)
        viewed = self.tasks.results[n] > 1 or n in self._rows
        return Task(
            seconds, False, (), False, estimate_s, viewed, kernels.inputs.get(group, 0), self._sizes_and_parts.get(n, (None, 1))[1] > 1
        )

    @cached_property
    def _rows(self) -> set[int]:
        """Tasks that read a row of a stack and nothing else: the row has a dim of one element, which a view leaves out."""
        computed: dict[int, list[int]] = {}
        for j, n in self.tasks.computed.items():
            computed.setdefault(self.joined[0][n], []).append(j)
        return {n for n, (j, *more) in computed.items() if not more and self.graph.ops[j].traits.loop_slice}

    @cached_property
    def _merged_seconds(self) -> dict[int, float]:
        out: dict[int, float] = {}
        for n, first in enumerate(self.joined[0]):
            out[first] = out.get(first, 0.0) + self.tasks.seconds[n]
        for first, merged in self._products.items():
            if len(merged) > 1:
                out[first] -= self._saved_s(merged)
        return out

    def _saved_s(self, merged: Sequence[int]) -> float:
        """Seconds that products take less as one kernel."""
        space = self.network.space
        products = [(space.product(j), self.states[j] % len(space.strategies[j])) for j in merged]
        return saved_seconds(products, self._shared(merged), space.mesh, space.cluster.device)

    def _shared(self, merged: Sequence[int]) -> int:
        """The operand that products which are one kernel share."""
        return int(len({self.graph.original(v) for j in merged if (v := self.graph.ops[j].inputs[0]) is not None}) > 1)

    @cached_property
    def _products(self) -> dict[int, list[int]]:
        """Task -> the products that it computes."""
        out: dict[int, list[int]] = {}
        for j, n in self.tasks.computed.items():
            if self.graph.ops[j].traits.matmul and self.network.space.rules[j].fusion == "none":
                out.setdefault(self.joined[0][n], []).append(j)
        return out

    @cached_property
    def _kinds(self) -> dict[int, tuple[KernelKind, Sequence[int]]]:
        """Task of a convolution, or of products that are one kernel -> which kind it is, and sizes of the product."""
        found: dict[int, tuple[KernelKind, Sequence[int]]] = {}
        for j, n in self.tasks.computed.items():
            if self.graph.ops[j].traits.convolution:
                found[n] = "convolution", ()
        return found | {n: self._product_kind(n) for n in self._products}

    def _product_kind(self, n: int) -> tuple[KernelKind, Sequence[int]]:
        op = self.graph.ops[self._products[n][0]]
        if itemsize(op.ins[0].dtype) >= 4:
            return "float32 product", ()
        sizes, parts = self._sizes_and_parts[n]
        in_float32 = parts > 1 or op.outs[0].dtype == np.float32
        kind = "float32 sums" if in_float32 else "float16 product" if op.ins[0].dtype == np.float16 else "product"
        return kind, (sizes[0] * parts, *sizes[1:3], sizes[3] // parts)

    @cached_property
    def _sizes_and_parts(self) -> dict[int, tuple[Sizes, int]]:
        """Task of products -> sizes of the one product that they are, and in how many parts it is split."""
        space, out = self.network.space, dict[int, tuple[Sizes, int]]()
        for n, merged in self._products.items():
            found = [local_sizes(self.graph.ops[j], (of := space.strategies[j]), self.states[j] % len(of), space.mesh) for j in merged]
            sizes = merged_sizes(found, self._shared(merged))
            out[n] = sizes, product_parts(self.graph.ops[merged[0]], sizes, space.cluster.device)
        return out

    @cached_property
    def _latency_bound_bytes(self) -> dict[int, float]:
        """Kernel that takes a kernel's latency and no longer -> the most bytes that one of its ops reads and writes."""
        latency_s, out = self.network.space.cluster.device.kernel_latency_s, dict[int, float]()
        for j, n in self.tasks.computed.items():
            if self.tasks.seconds[n] <= latency_s:
                out[n] = max(out.get(n, 0.0), op_bytes(self.network, self.states, j))
        return out

    # ---- collectives

    def collective(self, first: int, waits: tuple[int, ...]) -> Task:
        """The task of a combined collective."""
        step, space, sizes = self.tasks.transfers[first].step, self.network.space, self._sizes(first)
        estimate_s = seconds = collective.seconds(step.kind, sum(sizes), step.axes, space.mesh, space.cluster)
        if not self.profiled:
            link, groups = space.cluster.axis(space.mesh, step.axes), space.mesh.n_devices // space.mesh.size(*step.axes)
            estimate_s = collective_estimate_s(step.kind, sum(sizes), link, groups, space.cluster)
        return Task(seconds, True, waits, False, estimate_s, len(sizes) > 1)

    def staging_s(self, first: int) -> float:
        """Seconds of the kernels that fill and empty its buffer."""
        kind, sizes = self.tasks.transfers[first].step.kind, self._sizes(first)
        shared, latency_s, own = collective.staging_kernels(kind, self.network.space.cluster, len(sizes))
        return (max(latency_s, shared * sum(sizes)) if shared else 0.0) + sum(max(latency_s, own * size) for size in sizes)

    def _sizes(self, first: int) -> list[float]:
        return [self.tasks.transfers[n].step.bytes for n in self.joined[1][first]]


def op_bytes(network: CostNetwork, states: Sequence[int], j: int) -> float:
    """Bytes on one device of what an op reads and writes."""
    op, of = network.space.graph.ops[j], network.space.strategies[j]
    s = states[j] % len(of)
    sizes = (float(prod(x.shape)) * itemsize(x.dtype) for x in (*op.ins, *op.outs))
    return sum(size / shards[s] for size, shards in zip(sizes, of.shards, strict=True))
