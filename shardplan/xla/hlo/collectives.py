"""What a compiled step moves between devices: its collectives, read out of the HLO text.

    >>> for c in collectives(compiled.as_text(), mesh): print(c)
    all-gather over data, 1.05 MB x 6, f32[256,512] + f32[256,512], train.py:19
    reduce-scatter (sum) over data, 1.05 MB x 6, f32[256,512] + f32[256,512], train.py:19
    all-reduce (sum) over data, 4 B, f32[], train.py:22

Bytes are per device and per run: the larger of the operands and the results. Reading needs no device and no XLA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shardplan.mesh import cluster
from shardplan.mesh.layout import MeshShape
from shardplan.units import format_bytes
from shardplan.xla.hlo.groups import axes_of, groups, linked_groups, pairs
from shardplan.xla.hlo.text import Frame, HasSource, HloArray, HloInstruction, HloModule, arrays, elements, origin, read

KINDS = (*cluster.KINDS, "collective-broadcast", "ragged-all-to-all")
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "prod", "and": "and", "or": "or"}


@dataclass(frozen=True)
class CombinedTensor(HasSource):
    """One of the tensors that a (combined) collective moves.

    Attributes:
        array: the larger of its operand and its result, on one device.
        op_name: JAX's name of the op it comes from, '' when unknown.
        stack: lines of the op that reads a gathered tensor, of the op that makes any other.
    """

    array: HloArray
    op_name: str = ""
    stack: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class HloCollective(HasSource):
    """One collective of the compiled program; an asynchronous start and done are one.

    Attributes:
        kind: one of `KINDS`.
        parts: the tensors it moves, one per collective combined into it.
        bytes: per device and run.
        groups: device numbers of each group.
        axes: mesh axes along which the members of a group differ; () without a mesh.
        runs: how often it runs in one step (`HloModule.runs`).
        guessed: whether it sits in a loop of unknown trip count.
        reduction: 'sum', 'max', ...; '' when nothing is reduced.
        asynchronous: whether other work may run between its start and its done.
        pairs: (source, target) devices of a collective-permute.
    """

    kind: str
    name: str
    parts: tuple[CombinedTensor, ...]
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]
    runs: float
    guessed: bool
    computation: str
    reduction: str
    asynchronous: bool
    op_name: str
    stack: tuple[Frame, ...] = ()
    pairs: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    @property
    def group_size(self) -> int:
        """Devices of the largest group."""
        return max(map(len, self.groups), default=1)

    @property
    def total_bytes(self) -> float:
        """Bytes per device in one step: `bytes` times `runs`."""
        return self.bytes * self.runs

    @property
    def dtype(self) -> str:
        """Of the first tensor, as HLO writes it."""
        return self.parts[0].array.dtype

    def __str__(self) -> str:
        reduction = f" ({self.reduction})" if self.reduction else ""
        where = f" over {', '.join(self.axes)}" if self.axes else f" in groups of {self.group_size}"
        runs = f" x {self.runs:g}" if self.runs != 1 else ""
        shown = " + ".join(str(p.array) for p in self.parts[:3]) + (" + ..." if len(self.parts) > 3 else "")
        source = f", {self.source}" if self.source else ""
        return f"{self.kind}{reduction}{where}, {format_bytes(self.bytes)}{runs}, {shown}{source}"


def collectives(text: str | HloModule, mesh: MeshShape | None = None) -> tuple[HloCollective, ...]:
    """Every collective of `compiled.as_text()`, in schedule order of each computation, callees first; `mesh` names the axes.

    Raises:
        ValueError: the text is no compiled module, or it was compiled for another number of devices than the mesh has.
    """
    module = read(text)
    if mesh is not None and module.n_devices != mesh.n_devices:
        raise ValueError(f"this module is for {module.n_devices} devices and the mesh {mesh} has {mesh.n_devices}")
    return tuple(_collective(module, i, kind, mesh) for i in module if module.runs[i.computation] and (kind := kind_of(i)))


def kind_of(instruction: HloInstruction) -> str | None:
    """Kind of the collective this instruction starts (or is); None for the rest."""
    opcode = instruction.opcode.removesuffix("-start")
    sends = opcode == "send" and "_xla_send_recv_source_target_pairs" in instruction.attributes
    return opcode if opcode in KINDS else "collective-permute" if sends else None


def _collective(module: HloModule, i: HloInstruction, kind: str, mesh: MeshShape | None) -> HloCollective:
    operands = i.operands[:1] if kind == "ragged-all-to-all" or i.opcode == "send" else i.operands
    operand_arrays = tuple(a for o in operands for a in o.arrays)
    result_arrays = _results(i, operand_arrays)
    larger = max(operand_arrays, result_arrays, key=lambda found: sum(a.bytes for a in found))
    links = pairs(i.attribute("source_target_pairs") or i.attribute("_xla_send_recv_source_target_pairs"))
    permutes = kind == "collective-permute"
    members = linked_groups(links) if permutes else groups(_replica_groups(i), module.n_devices)
    parts = _parts(module, i, operands, larger)
    op_name, stack = i.op_name, i.stack
    if parts and (len(parts) == 1 or not stack):
        known = next((p for p in parts if p.stack), parts[0])
        op_name, stack = known.op_name or op_name, known.stack
    return HloCollective(
        kind=kind,
        name=i.name,
        parts=parts,
        bytes=sum(a.bytes for a in larger),
        groups=members,
        axes=axes_of(links if permutes else members, mesh) if mesh else (),
        runs=module.runs[i.computation],
        guessed=i.computation in module.guessed,
        computation=i.computation,
        reduction=_reduction(module, i),
        asynchronous=(i.opcode.endswith("-start") or i.opcode == "send") and '"is_sync":true' not in i.attributes,
        op_name=op_name,
        stack=stack,
        pairs=links,
    )


def _replica_groups(i: HloInstruction) -> str | None:
    """The value of `replica_groups`, whose iota and mesh spellings are not one bracketed group."""
    found = re.search(r"replica_groups=(\{\}|\{\{.*?\}\}|mesh\[.*?\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", i.attributes)
    return found and found[1]


def _results(i: HloInstruction, operand_arrays: tuple[HloArray, ...]) -> tuple[HloArray, ...]:
    """The result arrays: for an asynchronous start, the second half of the tuple that it carries."""
    if not i.opcode.endswith("-start"):
        return operand_arrays if i.opcode == "send" else i.arrays
    carried = elements(i.type)
    if len(carried) < 2 or i.opcode == "all-reduce-start":
        return operand_arrays
    return arrays(carried[1])


def _reduction(module: HloModule, i: HloInstruction) -> str:
    reducer = re.search(r"to_apply=%?([\w.\-]+)", i.attributes)
    root = module.root(reducer[1]) if reducer else None
    while root and root.opcode in ("convert", "bitcast", "copy"):
        root = next(iter(root.operands), None)
    if root and root.opcode == "fusion":
        root = module.root(root.callees["calls"][0])
    return _REDUCTIONS.get(root.opcode, root.opcode) if root else ""


def _parts(
    module: HloModule, i: HloInstruction, operands: tuple[HloInstruction, ...], larger: tuple[HloArray, ...]
) -> tuple[CombinedTensor, ...]:
    """One part per tensor: per operand, or per operand of the concatenation into one flat buffer."""
    if kind_of(i) == "all-to-all" and len(larger) > 1 and i.attribute("dimensions") is None:
        tensor = HloArray(larger[0].dtype, (len(larger), *larger[0].shape))  # one tensor, a slice per member
        return (_part(module, i, tensor, operands[0] if operands else i, None),)
    if len(operands) == 1 and len(larger) == 1:
        pieces = _pieces(module, operands[0])
        if len(pieces) == 1:
            return (_part(module, i, larger[0], operands[0], None),)
        scale = larger[0].size / max(1, operands[0].arrays[0].size)
        scaled = (HloArray(a.dtype, (int(a.size * scale),)) if scale != 1 else a for a in (p.arrays[0] for p in pieces))
        return tuple(_part(module, i, a, p, -1) for a, p in zip(scaled, pieces, strict=True))
    if len(operands) != len(larger):
        return tuple(CombinedTensor(a) for a in larger)
    return tuple(_part(module, i, a, o, n) for n, (a, o) in enumerate(zip(larger, operands, strict=True)))


def _part(module: HloModule, i: HloInstruction, array: HloArray, operand: HloInstruction, element: int | None) -> CombinedTensor:
    """The tensor that is element `element` of the result; None: all of it, -1: a slice of a flat buffer."""
    consumer = _consumer(module, i, element) if element != -1 else ()
    op_name, stack = (i.op_name, i.stack) if element is None and i.stack else origin(module, operand)
    by_hand = "all_gather" in i.op_name.rsplit("/", 1)[-1]
    if consumer and (not stack or (kind_of(i) == "all-gather" and not by_hand)):
        stack = consumer
    return CombinedTensor(array, op_name or i.op_name, stack)


def _consumer(module: HloModule, i: HloInstruction, element: int | None) -> tuple[Frame, ...]:
    """Source lines of the first op that reads element `element` of the result (all of it for None), looking through copies."""
    todo, seen = [(i, element)], 0
    while todo and seen < 30:
        at, element = todo.pop(0)
        for user in module.users.get(at, ()):
            seen += 1
            if user.opcode == "get-tuple-element":
                if element in (None, int(user.attribute("index") or 0)):
                    todo.append((user, None))
            elif user.opcode.endswith("-done"):
                todo.append((user, element))
            elif user.opcode in ("tuple", "while", "conditional"):
                continue
            elif user.stack:
                return user.stack
            else:
                todo.append((user, None))
    return ()


def _pieces(module: HloModule, i: HloInstruction) -> tuple[HloInstruction, ...]:
    """The tensors that XLA concatenated into a flat buffer to reduce or gather them at once."""
    if len(i.arrays) != 1 or len(i.arrays[0].shape) != 1:
        return (i,)
    if i.opcode == "bitcast" and i.operands:
        return _pieces(module, i.operands[0])
    if i.opcode == "concatenate":
        return i.operands
    root = module.root(i.callees["calls"][0]) if i.opcode == "fusion" else None
    if root and root.opcode == "concatenate":
        return tuple(i.operands[int(p.literal)] if p.opcode == "parameter" else p for p in root.operands)
    return (i,)
