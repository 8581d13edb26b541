"""Whether XLA for GPU writes a value for the kernels that read it, or has each of them compute it: the estimate of its fusion pass.

The pass adds up the seconds of kernels; those of reading and writing memory decide. Either each result that needs the value has a
kernel that reads the value's sources in its place, or one kernel more reads the sources and writes the value. What a kernel broadcasts,
or reads in several places, it reads several times: but for the first time from a cache, where the array is small enough.

    x -+-> value -+-> result        3 kernels read x and y            or   1 reads x and y, writes the value; 3 read the value:
    y -+          +-> result        3 (x + y)                          >   x + y + value + 3 value + a launch
                  +-> result

Figures are bytes of all devices together, each of which holds its share of every array; the ops that read a number may be replicated.

Facts: fusion-recompute-cheaper, fusion-rereads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import inf

from shardplan._jax import itemsize
from shardplan.ir.graph import Graph, Op
from shardplan.mesh.device import Device, gpu_of_device_kind
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import seen_through
from shardplan.xla_model.kernel_groups import Kernel, Kernels

LAUNCH_S = 1e-6
"""Seconds that the fusion pass counts for starting a kernel."""
L1_BYTES = 2048
"""Bytes of an array per streaming multiprocessor below which it takes it to be in their caches. XLA's estimates for an H100, of 132,
are of such reads at 154 KiB and no more at 512 KiB."""
L1_SPEEDUP, L2_SPEEDUP = 20.0, 2.5
"""How much faster than memory it takes the caches to be."""
TANH_S = {(9, 0): 2e-12}
"""Compute capability -> seconds an element that XLA counts for a tanh: between 1.7 and 2.4 ps on Hopper. Elsewhere, where it was
written in every program seen, at least 5 ps (A100) and 1 ps (B200). For an erfc, of which XLA makes a hundred ops, it counts 8 ps."""


@dataclass(frozen=True)
class FusionEstimate:
    """What the estimate takes of the devices; without them, kernels start at once, and what is read again is in the first cache.

    Attributes:
        tanh_bytes: bytes an element from which a tanh is computed again by kernels that read its argument anyway: writing and reading
            the result takes longer than the function then.
        launch_bytes: what one of them reads while a kernel starts.
        l1_bytes, l2_bytes: arrays of fewer bytes are read again from this cache.
        devices: how many these are.
    """

    tanh_bytes: float = inf
    launch_bytes: float = 0.0
    l1_bytes: float = inf
    l2_bytes: float = inf
    devices: int = 1

    @classmethod
    def of(cls, device: Device | None, devices: int) -> FusionEstimate:
        """That of so many devices."""
        gpu = gpu_of_device_kind(device.name) if device else None
        if device is None or gpu is None:
            return cls()
        tanh_s = TANH_S.get(gpu.compute_capability, inf)
        launch, l1, l2 = LAUNCH_S * device.bytes_per_s, L1_BYTES * gpu.sms, gpu.l2_mib * 2**20
        return cls(tanh_s * device.bytes_per_s / 2, launch, l1 * devices, l2 * devices, devices)

    def reading(self, size: float, read: float) -> float:
        """Bytes of memory that take as long as `read` bytes of an array of so many: the first time from memory, then from a cache."""
        again = L1_SPEEDUP if size < self.l1_bytes else L2_SPEEDUP if size < self.l2_bytes else 1.0
        once = min(size, read)
        return once + (read - once) / again


ANY_DEVICE = FusionEstimate()
"""Where no device is known."""

Uses = dict[Kernel, dict[Hashable, float]]
"""Result -> the places of its kernel at which a value is read on the way to it -> how many times all its elements are read there."""


@dataclass(frozen=True)
class FusedResults:
    """What is computed on the way to each result that a kernel writes, before kernels of several results are made of these.

    Attributes:
        passes: whether a fusion that reads the result of an op may as well read its operand.
        uses: per value that is not in memory, the results on whose way it is read.
        inside: per op, the results on whose way it is computed.
        rows: the results of kernels that keep rows on chip, which read everything once.
    """

    graph: Graph
    passes: Callable[[int], bool]
    estimate: FusionEstimate
    uses: list[Uses]
    inside: list[Set[Kernel]]
    rows: Set[Kernel]

    @classmethod
    def of(cls, graph: Graph, rules: Sequence[Rule], kernels: Kernels, estimate: FusionEstimate) -> FusedResults:
        """Those of kernels; what a product's kernel computes is on the way to none."""
        uses: list[Uses] = [{} for _ in graph.values]
        inside: list[Set[Kernel]] = [set() for _ in graph.ops]
        rows: set[Kernel] = set()
        passes = partial(seen_through, graph, rules)
        for at in reversed(range(len(graph.ops))):
            op, made = graph.ops[at], Uses()
            for v in () if at in graph.dead else op.outputs:
                if not kernels.written[v]:
                    for result, places in uses[v].items():
                        made.setdefault(result, {}).update(places)
                elif not op.traits.moves_nothing:
                    keeps_rows = kernels.rows.behind[at]
                    made[result := kernels.own[at] if keeps_rows else (*kernels.own[at], v)] = {v: 1.0}
                    if keeps_rows:
                        rows.add(result)
            inside[at] = made.keys()
            for k, v in enumerate(op.inputs if made else ()):
                if v is not None and not kernels.written[v]:
                    times = None if _is_elementwise(op, k) or passes(at) else _times_read(op, k)
                    for result, places in made.items():
                        here = places if times is None else {(at, k): times * sum(places.values())}
                        uses[v].setdefault(result, {}).update(here)
        return cls(graph, passes, estimate, uses, inside, rows)

    def reads_less(self, v: int, sources: Mapping[int, float], numbers: Mapping[Hashable, float]) -> bool:
        """Whether the kernels take less time if value v is written.

        Args:
            sources: array in memory from which it is computed -> how many of its bytes.
            numbers: those that are broadcast on the way -> bytes an element. The pass makes them part of kernels at the end.

        XLA decides op by op, before it knows which kernels the readers become: of one reader there is nothing to compute again.
        """
        value = self.graph.values[v]
        results = [result for result in self.uses[v] if not _is_product(self.graph, result)]
        reached = {*self.graph.reached(v, self.passes)} - self.graph.dead
        if (k := min(len(results), sum(not self.passes(at) for at in reached))) < 2:
            return False
        elements, reading = value.bytes / value.itemsize, self.estimate.reading

        def computing(some: Collection[int], n: float) -> float:
            """The value, n times, where of its sources these are read."""
            read = ((self.graph.values[u], sources[u]) for u in some)
            cached = n * elements * sum(numbers.values()) / L1_SPEEDUP
            return sum((reading(x.bytes, n * max(part, elements * x.itemsize)) for x, part in read), cached)

        times = {result: 1.0 if result in self.rows else sum(self.uses[v][result].values()) for result in results}

        def saved(of: Callable[[Kernel], Collection[int]]) -> float:
            """By reading the value instead of those of its sources, in the k kernels that save most."""
            each = (computing(of(result), n) - reading(value.bytes, n * value.bytes) for result, n in times.items())
            return sum(sorted(each)[-k:])

        launch = self.estimate.launch_bytes * (self.estimate.devices if value.shape else 1)
        written = computing(sources, 1.0) + value.bytes + launch
        if saved(lambda result: sources) <= written:
            return False
        only = read_only_for(self.graph, self.inside, v, sources)
        return saved(lambda result: [u for u, where in only.items() if result in where]) > written


def _is_product(graph: Graph, kernel: Kernel) -> bool:
    """Whether a kernel is a product's, which is made before others and computes whatever it can for itself."""
    return kernel[0] < 0 and graph.ops[-1 - kernel[0]].traits.matmul


def _is_elementwise(op: Op, k: int) -> bool:
    """Whether an op reads its operand k at the place of its result."""
    moves = op.traits.gather or op.traits.reads_part or op.traits.concatenates or op.traits.reversal or op.traits.transpose
    return op.ins[k].shape == op.outs[0].shape and not moves


def _times_read(op: Op, k: int) -> float:
    """How many times an op reads the elements of its operand k."""
    some = not op.ins[k].shape or op.traits.broadcast or op.traits.gather or op.traits.reads_part
    return max(1, op.outs[0].size) / max(1, op.ins[k].size) if some else 1.0


def read_only_for(graph: Graph, inside: Sequence[Set[Kernel]], v: int, sources: Collection[int]) -> dict[int, set[Kernel]]:
    """Source of a value -> the kernels that compute the value and read this source for nothing else.

    A product's kernel is one: it would compute the value in every tile.
    """
    maker = graph.values[v].producer[0]
    products = {kernel for kernel in inside[maker] if _is_product(graph, kernel)}
    chain, todo = {maker}, [maker]
    for at in todo:
        made = {graph.values[u].producer[0] for u in graph.ops[at].inputs if u is not None and u not in sources}
        todo += made - chain
        chain |= made
    others: dict[int, set[Kernel]] = {}  # op of the chain -> the kernels that compute it for something else

    def reading(u: int) -> set[Kernel]:
        return set().union(*(others.get(at, inside[at]) for at, _ in graph.values[u].consumers))

    for at in sorted(chain, reverse=True):
        others[at] = set() if at == maker else set().union(*map(reading, graph.ops[at].outputs))
    return {u: {*inside[maker]} - (reading(u) - products) for u in sources}


def repeats(op: Op, k: int) -> bool:
    """Whether an op broadcasts its operand k, an array, or looks it up as an index: a kernel reads each of its elements many times.

    The pass takes what is made of few elements to be in memory, as it makes it part of a kernel that is one by then, or of none.
    """
    repeated = (op.traits.broadcast and not op.scalar_broadcast) or (op.traits.gather and k > 0)
    return repeated and 1 < op.ins[k].size < op.outs[0].size


def broadcast_numbers(op: Op, made: Sequence[Mapping[Hashable, float]]) -> dict[Hashable, float]:
    """The numbers that an op broadcasts, and those that are broadcast on the way to its operands -> bytes an element."""
    out: dict[Hashable, float] = {}
    for k, x in enumerate(op.ins if op.outs[0].shape else ()):
        out.update(made[k] if x.shape else {(op.path, k): float(itemsize(x.dtype))})
    return out
