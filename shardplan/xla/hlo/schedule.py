"""Seconds of a compiled schedule: a compute stream and a network stream; work between a collective's start and done hides it.

    compute  |--matmul--|--matmul--|        |--norm--|
    network             |--all-gather-------|               exposed where compute has a gap

The order is XLA's; `simulate` takes the seconds of each instruction from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardplan.mesh.layout import MeshShape
from shardplan.xla.hlo.collectives import HloCollective, collectives
from shardplan.xla.hlo.products import HloProduct, products
from shardplan.xla.hlo.text import HloInstruction, HloModule, read

_FREE = ("after-all", "bitcast", "constant", "get-tuple-element", "iota", "parameter", "partition-id", "replica-id", "tuple")
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> the operand that is written into operand 0


@dataclass(frozen=True)
class KernelWork:
    """Flops and bytes of one top-level instruction, per run.

    Attributes:
        flops: of the products in it, by dtype of their left operand.
        bytes: read from and written to memory; a fusion reads its operands once and writes its results once.
    """

    flops: tuple[tuple[str, float], ...]
    bytes: int


@dataclass(frozen=True)
class Overlap:
    """An asynchronous collective and the work that the schedule runs between its start and its done.

    Attributes:
        steps: names of the instructions in between that do work.
        flops, bytes: their work, loops in between counted with all their runs.
    """

    collective: HloCollective
    steps: tuple[str, ...]
    flops: float
    bytes: float


@dataclass(frozen=True)
class Timeline:
    """Seconds of one step.

    Attributes:
        total_s: from start to end.
        compute_s: busy time of the compute stream.
        collective_s: busy time of the network stream.
        exposed_s: idle time of the compute stream.
    """

    total_s: float
    compute_s: float
    collective_s: float
    exposed_s: float


def simulate(
    text: str | HloModule,
    collective_s: Callable[[HloCollective], float],
    work_s: Callable[[KernelWork], float],
    mesh: MeshShape | None = None,
) -> Timeline:
    """Runs the schedule on one compute stream and one network stream.

    Args:
        text: HLO text, or a module already `read`.
        collective_s: seconds of one run of a collective.
        work_s: seconds of one run of an instruction.
        mesh: names the axes of the collectives.
    """
    walk = _Walk(read(text), mesh)
    memo: dict[str, Timeline] = {}

    def run(computation: str) -> Timeline:
        if computation not in memo:
            memo[computation] = body(computation)
        return memo[computation]

    def body(computation: str) -> Timeline:
        now = free = busy = network = 0.0
        done_at: dict[str, float] = {}
        for i in walk.module.computations[computation]:
            collective = walk.collective.get(i.name)
            if collective is not None:
                cost = collective_s(collective)
                network += cost
                free = max(now, free) + cost
                if collective.asynchronous:
                    done_at[i.name] = free
                else:
                    now = free
            elif i.operands and i.operands[0] in done_at and i.opcode.endswith(("-done", "-update")):
                now = max(now, done_at[i.operands[0]])
                if i.opcode.endswith("-update"):
                    done_at[i.name] = done_at[i.operands[0]]
            elif i.opcode in ("while", "conditional", "call", "async-start"):
                # Work inside does not overlap with work outside, but a transfer in flight continues.
                for inner, times in walk.inside(i):
                    part = run(inner)
                    now += part.total_s * times
                    busy += part.compute_s * times
                    network += part.collective_s * times
            elif i.opcode not in _FREE:
                cost = work_s(walk.work(i))
                now += cost
                busy += cost
        total = max([now, *done_at.values()])
        return Timeline(total, busy, network, total - busy)

    return run(walk.module.entry)


def overlaps(text: str | HloModule, mesh: MeshShape | None = None) -> tuple[Overlap, ...]:
    """Every asynchronous collective with what runs between its start and its done."""
    walk, out = _Walk(read(text), mesh), []
    for computation, instructions in walk.module.computations.items():
        at = {i.name: n for n, i in enumerate(instructions)}
        for start in instructions:
            collective = walk.collective.get(start.name)
            if collective is None or not collective.asynchronous:
                continue
            done = next((u for u in walk.module.users[computation].get(start.name, ()) if u.opcode.endswith("-done")), None)
            between = instructions[at[start.name] + 1 : at[done.name]] if done else ()
            steps, flops, moved = [], 0.0, 0.0
            for i in between:
                if i.opcode in _FREE or i.name in walk.collective or i.opcode.endswith("-done"):
                    continue
                steps.append(i.name)
                inner_flops, inner_bytes = walk.total(i)
                flops, moved = flops + inner_flops, moved + inner_bytes
            out.append(Overlap(collective, tuple(steps), flops, moved))
    return tuple(out)


@dataclass(frozen=True)
class _Walk:
    module: HloModule
    mesh: MeshShape | None

    @cached_property
    def collective(self) -> dict[str, HloCollective]:
        return {c.name: c for c in collectives(self.module, self.mesh)}

    @cached_property
    def products(self) -> dict[str, list[HloProduct]]:
        out: dict[str, list[HloProduct]] = {}
        for p in products(self.module):
            out.setdefault(p.computation, []).append(p)
        return out

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
        flops: dict[str, float] = {}
        for p in found:
            flops[p.dtype] = flops.get(p.dtype, 0.0) + p.flops
        return KernelWork(tuple(sorted(flops.items())), self._bytes(i, inner[0] if inner else None))

    def total(self, i: HloInstruction) -> tuple[float, float]:
        """Flops and bytes of an instruction, loops with all their runs."""
        if i.opcode in ("while", "conditional", "call"):
            flops = moved = 0.0
            for inner, times in self.inside(i):
                for step in self.module.computations[inner]:
                    if step.opcode not in _FREE and step.name not in self.collective:
                        more_flops, more_bytes = self.total(step)
                        flops, moved = flops + times * more_flops, moved + times * more_bytes
            return flops, moved
        work = self.work(i)
        return sum(n for _, n in work.flops), work.bytes

    def _bytes(self, i: HloInstruction, fused: str | None) -> int:
        if i.opcode.endswith("-done"):
            return 0
        operands = [sum(a.bytes for a in o.arrays) for o in self.module.operands(i)]
        results = sum(a.bytes for a in i.arrays)
        if i.opcode.endswith("-start"):
            results = 0  # a start carries operands and results in one tuple: count the bytes read, and as many written
            return 2 * max(operands, default=0) if fused is None else self._fused(i, fused, operands, results)
        if fused is not None:
            return self._fused(i, fused, operands, results)
        if i.opcode in _SLICES:
            return 2 * results
        if (at := _IN_PLACE.get(i.opcode)) is not None:
            return 2 * sum(operands[at : at + 1])
        return sum(operands) + results

    def _fused(self, i: HloInstruction, fused: str, operands: list[int], results: int) -> int:
        """Bytes of a fusion: an operand that is only sliced counts as the slices, a buffer updated in place as the update."""
        inner, table = self.module.users.get(fused, {}), self.module.table[fused]
        parameters = {p.name: int(p.literal) for p in self.module.computations[fused] if p.opcode == "parameter"}

        def uses(name: str) -> Iterator[tuple[HloInstruction, bool]]:
            """(reader, whether as its operand 0) of an array, looking through bitcasts."""
            for u in inner.get(name, ()):
                if u.opcode == "bitcast":
                    yield from uses(u.name)
                else:
                    yield u, u.operands[0] == name

        read_ = list(operands)
        for name, number in parameters.items():
            found = list(uses(name)) if number < len(read_) else []
            if found and all(first and u.opcode in _SLICES for u, first in found):
                read_[number] = min(read_[number], sum(a.bytes for u, _ in found for a in u.arrays))
            elif found and all(first and u.opcode in _IN_PLACE for u, first in found):
                read_[number] = 0
        root = self.module.root(fused)
        while root and root.opcode in ("bitcast", "convert", "copy") and root.operands and root.operands[0] in table:
            root = table[root.operands[0]]
        if root and len(root.operands) > (at := _IN_PLACE.get(root.opcode, len(root.operands))):
            update = table.get(root.operands[at])
            results = sum(a.bytes for a in update.arrays) if update else results
        elif not results and root:
            results = sum(a.bytes for a in root.arrays)
        return sum(read_) + results
