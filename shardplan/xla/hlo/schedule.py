"""Seconds of a compiled step: a compute stream and a network stream; work between a collective's start and done hides it.

    compute  |--matmul--|--matmul--|        |--norm--|
    network             |--all-gather-------|               exposed where compute has a gap

The order is XLA's. `simulate` takes the seconds of each instruction from the caller; `seconds` are those on a cluster, read from the
emitted HLO alone, one measure for every plan, whoever made it:

    total_s = compute_s + collective_s          nothing overlaps
    compute_s = sum over kernels of their seconds, by the shapes of their products and by their bytes (`mesh/rates.py`), times runs
    collective_s = sum over collectives of the cluster model's seconds for its bytes and its device groups, times runs
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from shardplan.mesh.cluster import KINDS, Cluster, group_link
from shardplan.mesh.collective import seconds_on_link
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.rates import NARROW_UPDATE, Product, elements_computed, kernel_seconds
from shardplan.xla.hlo.collectives import HloCollective, collectives
from shardplan.xla.hlo.products import HloProduct, dims_of, products
from shardplan.xla.hlo.text import HloArray, HloInstruction, HloModule, read
from shardplan.xla_model.timeline import Streams, Timeline

if TYPE_CHECKING:
    from shardplan.xla.compiler.compile import Compiled

_FREE = ("after-all", "bitcast", "constant", "get-tuple-element", "iota", "parameter", "partition-id", "replica-id", "tuple")
_NESTED = ("while", "conditional", "call", "async-start")
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> the operand that is written into operand 0


@dataclass(frozen=True)
class KernelWork:
    """Work of one run of a top-level instruction.

    Attributes:
        products: the products in it.
        bytes: read from and written to memory; a fusion reads its operands once and writes its results once.
        elements: that it computes, in results of elementwise kernels (`mesh/rates.py`).
    """

    products: tuple[Product, ...]
    bytes: int
    elements: float = 0.0

    @property
    def flops(self) -> float:
        """Of all products."""
        return sum(p.flops for p in self.products)


@dataclass(frozen=True)
class Overlap:
    """An asynchronous collective, and the instructions (`steps`) that do work between its start and its done, loops with all runs."""

    collective: HloCollective
    steps: tuple[str, ...]
    flops: float
    bytes: float


@dataclass(frozen=True)
class CompiledSeconds:
    """Seconds of one step on one device.

    Attributes:
        compute_s, collective_s: of all kernels, of all collectives.
        exposed_s: those of `collective_s` in which XLA's own schedule runs no compute.
        step_s: of the step, with what kernels and collectives that run at once slow each other by.
    """

    compute_s: float
    collective_s: float
    exposed_s: float
    step_s: float

    @property
    def total_s(self) -> float:
        """Seconds without overlap."""
        return self.compute_s + self.collective_s


def simulate(
    text: str | HloModule,
    collective_s: Callable[[HloCollective], float],
    work_s: Callable[[KernelWork], float],
    mesh: MeshShape | None = None,
) -> Timeline:
    """Runs the schedule on one compute stream and one network stream.

    Args:
        text: HLO text, or a module already `read`.
        collective_s, work_s: seconds of one run of a collective, of an instruction.
        mesh: names the axes of the collectives.
    """
    walk = _Walk(read(text), mesh)

    @cache
    def run(computation: str) -> Timeline:
        streams = Streams()
        for i in walk.module.computations[computation]:
            collective = walk.collective.get(i.name)
            if collective is not None:
                streams.start(i, collective_s(collective))
                if not collective.asynchronous:
                    streams.wait(i)
            elif i.operands and i.operands[0] in streams.done_at and i.opcode.endswith(("-done", "-update")):
                streams.wait(i.operands[0])
                if i.opcode.endswith("-update"):
                    streams.done_at[i] = streams.done_at[i.operands[0]]
            elif i.opcode in _NESTED:
                # Work inside does not overlap with work outside, but a transfer in flight continues.
                for inner, times in walk.inside(i):
                    streams.nested(run(inner), times)
            elif i.opcode not in _FREE:
                streams.kernel(work_s(walk.work(i)))
        return streams.timeline()

    return run(walk.module.entry)


def overlaps(text: str | HloModule, mesh: MeshShape | None = None) -> tuple[Overlap, ...]:
    """Every asynchronous collective with what runs between its start and its done."""
    walk, out = _Walk(read(text), mesh), []
    for instructions in walk.module.computations.values():
        for n, start in enumerate(instructions):
            collective = walk.collective.get(start.name)
            if collective is None or not collective.asynchronous:
                continue
            done = next((u for u in walk.module.users.get(start, ()) if u.opcode.endswith("-done")), None)
            between = instructions[n + 1 : instructions.index(done, n)] if done else ()
            steps, flops, moved = [i for i in between if walk.works(i) and not i.opcode.endswith("-done")], 0.0, 0.0
            for i in steps:
                inner_flops, inner_bytes = walk.total(i)
                flops, moved = flops + inner_flops, moved + inner_bytes
            out.append(Overlap(collective, tuple(i.name for i in steps), flops, moved))
    return tuple(out)


def seconds(compiled: Compiled, cluster: Cluster) -> CompiledSeconds:
    """Seconds of the compiled step on `cluster`; RuntimeError when the compile failed."""
    return seconds_of(compiled.module, cluster, compiled.mesh)


def seconds_of(text: str | HloModule, cluster: Cluster, mesh: MeshShape | None = None) -> CompiledSeconds:
    """As `seconds`, of any compiled module's HLO."""
    line = simulate(text, lambda c: collective_s(c, cluster), lambda work: work_s(work, cluster), mesh)
    step_s = line.with_interference(cluster.interference).total_s
    return CompiledSeconds(line.compute_s, line.collective_s, line.exposed_s, step_s)


def work_s(work: KernelWork, cluster: Cluster) -> float:
    """Seconds of one run of a kernel on `cluster`."""
    if not work.products and not work.bytes:
        return 0.0
    return kernel_seconds(cluster.device, work.products, work.bytes, work.elements)


def kernels(text: str | HloModule, mesh: MeshShape | None = None) -> dict[HloInstruction, tuple[KernelWork, float]]:
    """Every instruction that is a kernel -> its work in one run, and how often it runs in a step."""
    walk, out = _Walk(read(text), mesh), {}

    def visit(computation: str, runs: float) -> None:
        for i in walk.module.computations[computation]:
            if i.opcode in _NESTED:
                for inner, times in walk.inside(i):
                    visit(inner, runs * times)
            elif walk.works(i):
                out[i] = walk.work(i), runs

    visit(walk.module.entry, 1.0)
    return out


SAME_PRICE = {"collective-broadcast": "collective-permute", "ragged-all-to-all": "all-to-all"}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f64": "float64", "s8": "int8", "u8": "uint8", "c128": "complex128"}
"""HLO's names of the dtypes that clusters list; all others count as float32, but for those of 8 bits."""


def _dtype(name: str) -> str:
    return "float8" if name.startswith("f8") else DTYPES.get(name, "float32")


def collective_s(c: HloCollective, cluster: Cluster) -> float:
    """Seconds of one run of an emitted collective, by its device groups."""
    kind = SAME_PRICE.get(c.kind, c.kind)
    assert kind in KINDS, kind
    return seconds_on_link(kind, c.bytes, group_link(c.groups, cluster.node_size), cluster)


def _written_arrays(i: HloInstruction) -> tuple[HloArray, ...]:
    """The arrays of the result, but for a library call's workspace, bytes at the end (fact: product-workspace)."""
    *results, last = i.arrays or (None,)
    call = i.opcode == "custom-call" and "__cu" in i.attributes and bool(results)
    return tuple(results) if call and last and last.dtype in ("s8", "u8") and len(last.shape) == 1 else i.arrays


@dataclass(frozen=True)
class _Walk:
    module: HloModule
    mesh: MeshShape | None

    @cached_property
    def collective(self) -> dict[str, HloCollective]:
        return {c.name: c for c in collectives(self.module, self.mesh)}

    @cached_property
    def products(self) -> dict[str, list[HloProduct]]:
        out = defaultdict(list)
        for p in products(self.module):
            out[p.computation].append(p)
        return out

    def works(self, i: HloInstruction) -> bool:
        """Whether it occupies the compute stream."""
        return i.opcode not in _FREE and i.name not in self.collective

    def inside(self, i: HloInstruction) -> list[tuple[str, float]]:
        """(computation, times it runs when `i` runs once) of a loop, conditional or call."""
        callees = i.callees
        if i.opcode == "while":
            return [(name, self.module.trip_count(i) or 1) for name in callees.get("body", ())]
        names = [n for group in callees.values() for n in group]
        return [(n, 1 / len(names) if i.opcode == "conditional" else 1) for n in names]

    def work(self, i: HloInstruction) -> KernelWork:
        inner = [n for group in i.callees.values() for n in group] if i.opcode.startswith("fusion") else []
        found = [p for n in inner for p in self.products.get(n, ())]
        found += [p for p in self.products.get(i.computation, ()) if p.name == i.name]
        products = (Product(_dtype(p.dtype), p.flops, p.sizes, p.attention, p.kind == "convolution") for p in found)
        fused = inner[0] if inner else None
        moved = self._bytes(i, fused)
        return KernelWork(tuple(products), moved, 0.0 if found else self._elements(i, fused, moved))

    def total(self, i: HloInstruction) -> tuple[float, float]:
        """Flops and bytes of an instruction, loops with all their runs."""
        if i.opcode not in ("while", "conditional", "call"):
            work = self.work(i)
            return work.flops, work.bytes
        flops = moved = 0.0
        for inner, times in self.inside(i):
            for step in filter(self.works, self.module.computations[inner]):
                more_flops, more_bytes = self.total(step)
                flops, moved = flops + times * more_flops, moved + times * more_bytes
        return flops, moved

    def _elements(self, i: HloInstruction, fused: str | None, moved: float) -> float:
        """What a kernel without products computes one by one; `moved` are its bytes."""
        body = self.module.computations[fused] if fused else (i,)
        results = max((float(a.size) for a in self._results(i, fused)), default=0.0)
        for x in body:
            if x.opcode in _IN_PLACE and len(x.operands) > _IN_PLACE[x.opcode]:  # the rest of the buffer stays as it is
                updates = x.operands[_IN_PLACE[x.opcode]].arrays[0]
                narrow = x.opcode == "scatter" and updates.bytes < 4 * updates.size and x.attribute("indices_are_sorted") != "true"
                results = updates.size * (NARROW_UPDATE if narrow else 1.0)
                break
        columns = rows = masked = untiled = 0.0
        if i.attribute("kind") == "kLoop":
            moved_last = (x for x in body if x.opcode == "transpose" and dims_of(x, "dimensions")[-1:] != [len(x.arrays[0].shape) - 1])
            untiled = max((x.arrays[0].bytes for x in moved_last), default=0)
        reduced = [x for x in body if x.opcode == "reduce"]
        if any(len(x.operands[0].arrays[0].shape) - 1 not in dims_of(x, "dimensions") for x in reduced):
            columns = sum(self._read(i, fused, lambda a: a.size))
        elif len(reduced) > 1 and "__triton" in i.attributes:
            rows = sum(x.operands[0].arrays[0].size for x in reduced)
            masked = moved * any(x.opcode == "select" and x.operands[0].opcode == "broadcast" for x in body)
        return elements_computed(results, columns, rows, masked, untiled)

    def _bytes(self, i: HloInstruction, fused: str | None) -> int:
        if i.opcode.endswith("-done"):
            return 0
        operands = self._read(i, fused, lambda a: a.bytes)
        results = sum(a.bytes for a in self._results(i, fused))
        if fused is not None:
            return sum(operands) + self._written(fused, results)
        if i.opcode.endswith("-start"):  # it carries operands and results in one tuple: count the bytes read, and as many written
            return 2 * max(operands, default=0)
        if i.opcode in _SLICES:
            return 2 * results
        if (at := _IN_PLACE.get(i.opcode)) is not None:
            return (2 + self._adds(i)) * sum(operands[at : at + 1])
        return sum(operands) + results

    def _results(self, i: HloInstruction, fused: str | None) -> tuple[HloArray, ...]:
        """What a kernel makes; the start of an asynchronous fusion also hands its operands on."""
        root = self.module.root(fused) if fused is not None and i.opcode.endswith("-start") else None
        return _written_arrays(i) if root is None else root.arrays

    def _adds(self, i: HloInstruction) -> bool:
        """Whether a scatter reads what it writes, to add to it or the like."""
        root = self.module.root((i.attribute("to_apply") or "").removeprefix("%")) if i.opcode == "scatter" else None
        return root is not None and root.opcode != "parameter"

    def _read(self, i: HloInstruction, fused: str | None, amount: Callable[[HloArray], int]) -> list[int]:
        """What a kernel reads of each operand: of one that a fusion only slices, the slices; none of a buffer updated in place."""

        def uses(x: HloInstruction) -> Iterator[tuple[HloInstruction, bool]]:
            """(reader, whether as its operand 0) of an array, looking through bitcasts and casts."""
            for u in self.module.users.get(x, ()):
                yield from uses(u) if u.opcode in ("bitcast", "convert") else [(u, u.operands[0] is x)]

        out = [sum(map(amount, o.arrays)) for o in i.operands]
        wanted = self._wanted(fused) if fused is not None else {}
        for p in self.module.computations[fused] if fused is not None else ():
            if p.opcode != "parameter" or int(p.literal) >= len(out):
                continue
            number, found = int(p.literal), list(uses(p))
            if found and all(first and u.opcode in _IN_PLACE for u, first in found):
                out[number] = 0
            else:
                out[number] = min(out[number], math.ceil(wanted[p] * sum(map(amount, p.arrays))))
        return out

    def _wanted(self, fused: str) -> dict[HloInstruction, float]:
        """Instruction of a fusion -> the part of its elements that is computed, or read: not what slices leave out."""
        out: dict[HloInstruction, float] = {}
        for x in reversed(self.module.computations[fused]):
            users = [(u, k) for u in self.module.users.get(x, ()) for k, o in enumerate(u.operands) if o is x]
            size = float(sum(a.size for a in x.arrays))
            sliced = sum(out[u] * u.arrays[0].size for u, k in users if k == 0 and u.opcode in _SLICES)
            whole = max((out[u] for u, k in users if k or u.opcode not in _SLICES), default=0.0 if users else 1.0)
            out[x] = min(1.0, whole + sliced / max(1.0, size))
        return out

    def _written(self, fused: str, results: int) -> int:
        """Bytes that a fusion writes: of a buffer updated in place, the update."""
        root = self.module.root(fused)
        while root and root.opcode in ("bitcast", "convert", "copy") and root.operands:
            root = root.operands[0]
        if root and len(root.operands) > (at := _IN_PLACE.get(root.opcode, len(root.operands))):
            return (1 + self._adds(root)) * sum(a.bytes for a in root.operands[at].arrays)
        return results if results or not root else sum(a.bytes for a in root.arrays)
