"""What a compiled step really does on one device: its collectives and its matrix products, read out of the HLO text.

    >>> for c in collectives(compiled.as_text(), mesh): print(c)
    all-gather over data, 1.0 MB x 6, f32[256,512] + f32[256,512], train.py:19
    reduce-scatter (sum) over data, 1.0 MB x 6, f32[256,512] + f32[256,512], train.py:19
    all-reduce (sum) over data, 4 B, f32[], train.py:22
    >>> flops(compiled.as_text())
    805306368.0

Bytes are per device and per run: the larger of what a device puts in and what it gets out. Reading needs no device and no XLA.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field

from shardplan.mesh.layout import MeshShape
from shardplan.strategies.rules.linear import touched
from shardplan.xla.hlo import groups as _groups
from shardplan.xla.hlo.text import Frame, HloArray, HloInstruction, HloModule, arrays, elements, read, users_line

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "prod", "and": "and", "or": "or"}


@dataclass(frozen=True)
class CombinedTensor:
    """One tensor of a collective that XLA combined out of several.

    Attributes:
        array: its larger side, as one device sees it.
        op_name: JAX's name of the op it comes from, '' when unknown.
        stack: the user's places, innermost first: of the op that needs a tensor gathered, of the op that makes any other.
    """

    array: HloArray
    op_name: str = ""
    stack: tuple[Frame, ...] = ()

    @property
    def source(self) -> str | None:
        """'file:line' in the user's own code, innermost; None when XLA kept none."""
        frame = users_line(self.stack)
        return str(frame) if frame else None


@dataclass(frozen=True)
class HloCollective:
    """One collective of the compiled program; an asynchronous start and done are one.

    Attributes:
        kind: one of `KINDS`.
        name: name of the instruction in the HLO.
        parts: the tensors it moves, one per tensor combined into it.
        bytes: per device and run: the larger of all it puts in and all it gets out.
        groups: device numbers that take part together.
        axes: mesh axes along which the members of a group differ; () without a mesh.
        runs: how often it runs in one step (see `Module.runs`).
        guessed: it sits in a loop whose trip count the compiler does not know; `runs` counts that loop once.
        computation: where it sits: the entry, a loop body, a branch.
        reduction: 'sum', 'max', ...; '' when nothing is reduced.
        asynchronous: whether other work may run between its start and its done.
        op_name, stack: as in `CombinedTensor`, of the whole.
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
        return max(map(len, self.groups), default=1)

    @property
    def total_bytes(self) -> float:
        """Bytes per device in one step: `bytes` times `runs`."""
        return self.bytes * self.runs

    @property
    def dtype(self) -> str:
        return self.parts[0].array.dtype

    @property
    def source(self) -> str | None:
        """'file:line' in the user's own code, innermost; None when XLA kept none."""
        frame = users_line(self.stack)
        return str(frame) if frame else None

    def __str__(self) -> str:
        reduction = f" ({self.reduction})" if self.reduction else ""
        where = f" over {', '.join(self.axes)}" if self.axes else f" in groups of {self.group_size}"
        runs = f" x {self.runs:g}" if self.runs != 1 else ""
        shown = " + ".join(str(p.array) for p in self.parts[:3]) + (" + ..." if len(self.parts) > 3 else "")
        source = f", {self.source}" if self.source else ""
        return f"{self.kind}{reduction}{where}, {human_bytes(self.bytes)}{runs}, {shown}{source}"


@dataclass(frozen=True)
class HloProduct:
    """One matrix product or convolution of the compiled program, on one device.

    Attributes:
        kind: 'dot', 'convolution', 'attention' or 'ragged-dot'.
        result: the array it makes.
        dtype: dtype of its left operand, which sets the device's peak.
        flops: of one run, multiply and add counted apart.
        again: whether XLA computes it a second time of its own accord, since what it makes found no room.
    """

    kind: str
    name: str
    result: HloArray
    dtype: str
    flops: float
    runs: float
    computation: str
    op_name: str
    stack: tuple[Frame, ...] = ()
    again: bool = False

    @property
    def total_flops(self) -> float:
        return self.flops * self.runs

    @property
    def source(self) -> str | None:
        frame = users_line(self.stack)
        return str(frame) if frame else None


def collectives(text: str | HloModule, mesh: MeshShape | None = None) -> tuple[HloCollective, ...]:
    """Every collective of a compiled module, in schedule order of each computation, callees first.

    Args:
        text: `compiled.as_text()`, of any backend, or a module already `read`.
        mesh: names the axes; devices numbered row-major, as `jit` numbers them.

    Raises:
        ValueError: the text is no compiled module, or it was compiled for another number of devices than the mesh has.
    """
    module = read(text)
    if mesh is not None and module.n_devices != mesh.n_devices:
        raise ValueError(f"this module is for {module.n_devices} devices and the mesh {mesh} has {mesh.n_devices}")
    return tuple(
        _collective(module, i, kind, mesh)
        for computation, body in module.computations.items()
        if module.runs[computation]
        for i in body
        if (kind := kind_of(i))
    )


def kind_of(instruction: HloInstruction) -> str | None:
    """Kind of the collective this instruction starts (or is); None for the rest."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return opcode
    if opcode == "send" and "_xla_send_recv_source_target_pairs" in instruction.attributes:
        return "collective-permute"
    return None


AGAIN = ".remat"
"""In the names of instructions that XLA's rematerialization made."""


def products(text: str | HloModule) -> tuple[HloProduct, ...]:
    """Every matrix product and convolution, those inside fusions and library calls too."""
    module = read(text)
    again = {c for body in module.computations.values() for i in body if AGAIN in i.name for of in i.callees.values() for c in of}
    out = []
    for computation, body in module.computations.items():
        if not module.runs[computation]:
            continue
        for i in body:
            if i.opcode in ("dot", "convolution", "ragged-dot") or (i.opcode == "custom-call" and "__cu" in i.attributes):
                found = _flops(module, i)
                if found:
                    kind, n, dtype = found
                    op_name, stack = origin(module, i)
                    twice, runs = AGAIN in i.name or computation in again, module.runs[computation]
                    out.append(HloProduct(kind, i.name, i.arrays[0], dtype, n, runs, computation, op_name, stack, twice))
    return tuple(out)


def flops(text: str | HloModule) -> float:
    """Floating-point operations of one step on one device, in matrix products and convolutions (2mnk for m,k x k,n)."""
    return float(sum(p.total_flops for p in products(text)))


def human_bytes(n: float) -> str:
    """'1.5 MB' (1 MB = 1e6 bytes)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}" if n < 999.5 * size else f"{n / size:.0f} {unit}"
    return f"{n:.0f} B"


# ---- collectives


def _collective(module: HloModule, i: HloInstruction, kind: str, mesh: MeshShape | None) -> HloCollective:
    operands = module.operands(i)
    if kind == "ragged-all-to-all":
        operands = operands[:1]
    if i.opcode == "send":
        operands = operands[:1]
    put_in = tuple(a for o in operands for a in o.arrays)
    got_out = _results(i, put_in)
    larger = got_out if sum(a.bytes for a in got_out) > sum(a.bytes for a in put_in) else put_in
    links = _groups.pairs(i.attribute("source_target_pairs") or i.attribute("_xla_send_recv_source_target_pairs"))
    if kind == "collective-permute":
        members = _groups.components(links)
        axes = _groups.axes_of_pairs(links, mesh) if mesh else ()
    else:
        members = _groups.groups(_replica_groups(i), module.n_devices)
        axes = _groups.axes_of(members, mesh) if mesh else ()
    parts = _parts(module, i, operands, larger)
    op_name, stack = i.op_name, module.stack(i)
    if parts and (len(parts) == 1 or not stack):
        known = next((p for p in parts if p.stack), parts[0])
        op_name, stack = known.op_name or op_name, known.stack
    return HloCollective(
        kind=kind,
        name=i.name,
        parts=parts,
        bytes=sum(a.bytes for a in larger),
        groups=members,
        axes=axes,
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
    return found[1] if found else None


def _results(i: HloInstruction, put_in: tuple[HloArray, ...]) -> tuple[HloArray, ...]:
    """What a device gets out: the result, or the second half of what an asynchronous start carries."""
    if not i.opcode.endswith("-start"):
        return put_in if i.opcode == "send" else i.arrays
    carried = elements(i.type)
    if len(carried) < 2 or i.opcode == "all-reduce-start":
        return put_in
    return arrays(carried[1])


def _reduction(module: HloModule, i: HloInstruction) -> str:
    reducer = re.search(r"to_apply=%?([\w.\-]+)", i.attributes)
    root = module.root(reducer[1]) if reducer else None
    while root and root.opcode in ("convert", "bitcast", "copy"):
        operands = module.operands(root)
        root = operands[0] if operands else None
    if root and root.opcode == "fusion":
        root = module.root(root.callees["calls"][0])
    return _REDUCTIONS.get(root.opcode, root.opcode) if root else ""


def _parts(
    module: HloModule, i: HloInstruction, operands: tuple[HloInstruction, ...], larger: tuple[HloArray, ...]
) -> tuple[CombinedTensor, ...]:
    """One part per tensor: an operand each, or each piece of the one flat buffer they were copied into."""
    if kind_of(i) == "all-to-all" and len(larger) > 1 and i.attribute("dimensions") is None:
        whole = HloArray(larger[0].dtype, (len(larger), *larger[0].shape))  # one tensor, a piece for each member
        return (_part(module, i, whole, operands[0] if operands else i, None),)
    if len(operands) == 1 and len(larger) == 1:
        pieces = _pieces(module, operands[0])
        if len(pieces) == 1:
            return (_part(module, i, larger[0], operands[0], None),)
        scale = larger[0].size / max(1, operands[0].arrays[0].size)
        return tuple(_part(module, i, _scaled(p.arrays[0], scale), p, -1) for p in pieces)
    if len(operands) != len(larger):
        return tuple(CombinedTensor(a) for a in larger)
    return tuple(_part(module, i, a, o, n) for n, (a, o) in enumerate(zip(larger, operands, strict=True)))


def _part(module: HloModule, i: HloInstruction, array: HloArray, operand: HloInstruction, element: int | None) -> CombinedTensor:
    """The part that is element `element` of the result; None: the whole of it, -1: a piece of a flat buffer."""
    consumer = _consumer(module, i, element) if element != -1 else ()
    op_name, stack = origin(module, operand) if element is not None else (i.op_name, module.stack(i))
    if not stack:
        op_name, stack = origin(module, operand)
    by_hand = "all_gather" in i.op_name.rsplit("/", 1)[-1]
    if consumer and (not stack or (kind_of(i) == "all-gather" and not by_hand)):
        stack = consumer
    return CombinedTensor(array, op_name or i.op_name, stack)


def _consumer(module: HloModule, i: HloInstruction, element: int | None) -> tuple[Frame, ...]:
    """Place of the first op that reads element `element` of the result (the whole for None), copies looked through."""
    users = module.users[i.computation]
    todo, seen = [(i, element)], 0
    while todo and seen < 30:
        at, element = todo.pop(0)
        for user in users.get(at.name, ()):
            seen += 1
            if user.opcode == "get-tuple-element":
                if element in (None, int(user.attribute("index") or 0)):
                    todo.append((user, None))
            elif user.opcode.endswith("-done"):
                todo.append((user, element))
            elif user.opcode in ("tuple", "while", "conditional"):
                continue
            elif stack := module.stack(user):
                return stack
            else:
                todo.append((user, None))
    return ()


def _pieces(module: HloModule, i: HloInstruction) -> tuple[HloInstruction, ...]:
    """The tensors behind a flat buffer that XLA concatenated to reduce or gather them at once."""
    if len(i.arrays) != 1 or len(i.arrays[0].shape) != 1:
        return (i,)
    if i.opcode == "bitcast":
        return _pieces(module, module.operands(i)[0]) if module.operands(i) else (i,)
    if i.opcode == "concatenate":
        return module.operands(i)
    if i.opcode == "fusion":
        root = module.root(i.callees["calls"][0])
        if root and root.opcode == "concatenate":
            outer = module.operands(i)
            inner = module.operands(root)
            return tuple(outer[int(p.literal)] if p.opcode == "parameter" else p for p in inner)
    return (i,)


def _scaled(a: HloArray, scale: float) -> HloArray:
    return a if scale == 1 else HloArray(a.dtype, (int(a.size * scale),))


def origin(module: HloModule, i: HloInstruction) -> tuple[str, tuple[Frame, ...]]:
    """Name and place of an instruction, or of the nearest one it is only a copy of that has them."""
    seen = i
    for _ in range(12):
        stack = module.stack(seen)
        if stack:
            return seen.op_name, stack
        if seen.opcode == "fusion":
            inner = module.root(seen.callees["calls"][0])
            if inner and module.stack(inner):
                return inner.op_name, module.stack(inner)
        before = module.operands(seen)
        if not before or seen.opcode in ("while", "conditional", "call"):
            break
        seen = before[0]
    return i.op_name, ()


# ---- flops


def _flops(module: HloModule, i: HloInstruction) -> tuple[str, float, str] | None:
    """(kind, flops of one run, dtype of the left operand); None for a library call that is no product."""
    operands = [o.arrays[0] for o in module.operands(i) if o.arrays]
    out = i.arrays[0]
    if len(operands) < 2:
        return None
    left, right = operands[:2]
    if i.opcode == "dot":
        contracted = [left.shape[int(d)] for d in re.findall(r"\d+", i.attribute("lhs_contracting_dims") or "")]
        return "dot", 2.0 * out.size * math.prod(contracted), left.dtype
    if i.opcode == "convolution":
        return "convolution", _conv_flops(i, left, right, out), left.dtype
    if i.opcode == "ragged-dot":
        group = {int(d) for d in re.findall(r"\d+", i.attribute("rhs_group_dims") or "")}
        contracted = {int(d) for d in re.findall(r"\d+", i.attribute("rhs_contracting_dims") or "")}
        batch = {int(d) for d in re.findall(r"\d+", i.attribute("rhs_batch_dims") or "")}
        free = [n for d, n in enumerate(right.shape) if d not in group | contracted | batch]
        return "ragged-dot", 2.0 * left.size * math.prod(free), left.dtype
    target = (i.attribute("custom_call_target") or "").strip('"')
    config = _config(i)
    if target.startswith("__cublas"):
        gemm = config.get("gemm_backend_config", config.get("grouped_gemm_backend_config", config))
        dims = gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
        return "dot", 2.0 * out.size * math.prod(left.shape[int(d)] for d in dims), left.dtype
    if target.startswith("__cudnn$conv"):
        if "BackwardInput" in target:
            image, kernel, result = out, right, left
        elif "BackwardFilter" in target:
            image, kernel, result = left, out, right
        else:
            image, kernel, result = left, right, out
        return "convolution", _conv_flops(i, image, kernel, result), left.dtype
    if target.startswith("__cudnn$fmha"):
        scores = config.get("cudnn_fmha_backend_config", config).get("intermediate_tensor_shape", {}).get("dimensions", ())
        width = min(left.shape[-1], right.shape[-1])
        n_products = 5 if "Backward" in target else 2
        return "attention", 2.0 * n_products * math.prod(map(int, scores)) * width, left.dtype
    return None


def _config(i: HloInstruction) -> dict:
    try:
        return json.loads(i.attribute("backend_config") or "{}")
    except ValueError:
        return {}


def _conv_flops(i: HloInstruction, image: HloArray, kernel: HloArray, result: HloArray) -> float:
    """2 x (multiplications that touch no padding), counted dim by dim, as XLA's own cost analysis counts them.

    `window={size=3x3 stride=2x2 pad=0_1x0_1 lhs_dilate=1x1 rhs_dilate=1x1}`, `dim_labels=b01f_01io->b01f`.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attribute("dim_labels") or "")
    if not labels:
        return 0.0
    image_of, kernel_of, result_of = labels.groups()
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", i.attribute("window") or ""))

    def per_dim(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * len(spatial)

    spatial = [c for c in image_of if c.isdigit()]
    spatial.sort()
    strides = [int(s) for s in per_dim("stride", "1")]
    pads = [int(p.split("_")[0]) for p in per_dim("pad", "0_0")]
    spread, gaps = [int(d) for d in per_dim("lhs_dilate", "1")], [int(d) for d in per_dim("rhs_dilate", "1")]
    met = 1
    for d, label in enumerate(spatial):
        n, taps, made = (x.shape[of.index(label)] for x, of in ((image, image_of), (kernel, kernel_of), (result, result_of)))
        met *= touched(n, taps, made, strides[d], pads[d], spread[d], gaps[d])
    groups = int(i.attribute("batch_group_count") or 1)
    features = kernel.shape[kernel_of.index("i")] * result.shape[result_of.index("f")]
    return 2.0 * met * features * image.shape[image_of.index("b")] / groups
