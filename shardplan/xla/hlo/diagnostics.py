"""What the compiler reports apart from the program: the buffers alive at its memory peak, and its rematerialization warnings.

Buffers, from its dump `...-live-range.txt`:

    Live ranges at 314 (peak):
      fusion.86{}: 536870912 bytes (cumulative: 536870912 bytes)
      while.32{2}: 524288000 bytes (cumulative: 1061158912 bytes)

Reshards for which it replicates a whole tensor, from stderr, with its own shardings and no source line:

    [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {devices=[2,1,1,4]<=[4,2]T(1,0)} to
    {devices=[1,1,8,1]<=[4,2]T(1,0)} efficiently for HLO operation %copy = f32[16,4,16,2]{3,2,1,0} copy(...), ...
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.mesh.layout import Layout, MeshShape
from shardplan.xla.hlo.groups import layout_of
from shardplan.xla.hlo.text import Frame, HasSource, HloArray, HloInstruction, HloModule, arrays, elements, origin, read

_ENTRY = re.compile(r"\s+(\S+)\{([\d,]*)\}: (\d+) bytes \(cumulative")
_PLACE = re.compile(r" value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?.*?@\d+> \(size=(\d+),offset=(\d+)\)")
_WARNING = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) "
    r"efficiently for HLO operation %?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<opcode>[\w\-]+)\((?P<rest>.*)"
)


@dataclass(frozen=True)
class Buffer(HasSource):
    """One value alive at the peak.

    Attributes:
        array: on one device; None for tuples.
        bytes: on one device.
        kind: 'argument', 'carried' (by a loop), or 'temporary'.
        global_shape: shape of the tensor, where its op was found in the program before any pass.
        copies: how many devices hold the same shard; None where `global_shape` is.
        op_name: JAX's name of the op that makes it.
    """

    name: str
    array: HloArray | None
    bytes: int
    kind: str
    global_shape: tuple[int, ...] | None
    copies: int | None
    op_name: str
    stack: tuple[Frame, ...] = ()


def buffers(live_range: str, assignment: str, module: HloModule, before: str = "") -> tuple[Buffer, ...]:
    """The values alive at the peak, by the live-range dump of `module`, the largest first; () where it has no peak.

    With its buffer-assignment dump, values that share memory count once; with the HLO `before` any pass, global shapes are known.
    """
    _, found, peak = live_range.partition("(peak):\n")
    if not found:
        return ()
    by_name, unnamed = {i.name: i for i in module}, _asynchronous(module)
    loops = {body: i for i in module if i.opcode == "while" for body in i.callees.get("body", ())}
    shapes = _global_shapes(before)
    out = []
    for line in peak.splitlines():
        entry = _ENTRY.match(line)
        if not entry:
            break
        name, index, size = entry[1], tuple(int(n) for n in entry[2].split(",") if n), int(entry[3])
        i, array = by_name.get(name), None
        if i is not None:
            array = _element(i.type, index)
        elif starts := unnamed.get((_stem(name), size, index)):
            i = starts.pop(0)
            array = _element(elements(i.type)[1], index)
        kind, maker = _maker(module, i, index, loops) if i else ("temporary", None)
        op_name, stack = origin(module, _source(module, maker, loops)) if maker else ("", ())
        shape = _global_shape(array, shapes.get(op_name, ())) if array else None
        copies = round(module.n_devices * array.size / math.prod(shape)) if shape and array and array.size else None
        out.append(Buffer(f"{name}{{{entry[2]}}}", array, size, kind, shape, copies, op_name, stack))
    return _once(sorted(out, key=lambda b: (-b.bytes, b.name)), assignment)


def _once(found: list[Buffer], assignment: str) -> tuple[Buffer, ...]:
    """Drops the values that lie inside the memory of another one."""
    places: dict[str, tuple[str, int, int]] = {}
    allocation = ""
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            allocation = line.split(":", 1)[0]
        elif value := _PLACE.match(line):
            places[f"{value[1]}{{{value[2] or ''}}}"] = (allocation, int(value[4]), int(value[4]) + int(value[3]))
    separate, taken = [], []
    for b in found:
        place = places.get(b.name)
        if place and any(place[0] == at and start <= place[1] and place[2] <= end for at, start, end in taken):
            continue
        taken += [place] if place else []
        separate.append(b)
    return tuple(separate)


def _stem(name: str) -> str:
    """'loop_dynamic_update_slice_fusion.8' -> 'dynamic_update_slice'."""
    return re.sub(r"^(loop|input|fused)_|_fusion$", "", re.sub(r"[.\d]+(\.clone)*$", "", name)).removeprefix("fused_")


def _asynchronous(module: HloModule) -> dict[tuple[str, int, tuple[int, ...]], list[HloInstruction]]:
    """(kind, bytes, element) -> asynchronous starts: the dump names the inner instruction, the text only the start."""
    out = defaultdict(list)
    for i in module:
        if i.opcode.endswith("-start") and len(carried := elements(i.type)) > 1:
            stem = _stem(i.callees["calls"][0]) if "calls" in i.callees else i.opcode.removesuffix("-start")
            parts = elements(carried[1]) if carried[1].startswith("(") else ()
            for index, type_ in [*(((n,), t) for n, t in enumerate(parts)), ((), carried[1])]:
                out[stem, sum(a.bytes for a in arrays(type_)), index].append(i)
    return out


def _element(type_: str, index: tuple[int, ...]) -> HloArray | None:
    for n in index:
        parts = elements(type_)
        if n >= len(parts):
            return None
        type_ = parts[n]
    found = () if type_.startswith("(") else arrays(type_)
    return found[0] if found else None


def _maker(
    module: HloModule, i: HloInstruction, index: tuple[int, ...], loops: Mapping[str, HloInstruction], depth: int = 0
) -> tuple[str, HloInstruction]:
    """Kind of a value, and the instruction that writes it: for a loop's carry, the one in the body."""
    if i.opcode == "parameter":
        loop = loops.get(i.computation)
        if loop is None:
            return ("argument" if i.computation == module.entry else "temporary"), i
        i = loop
    if i.opcode != "while" or not index or depth > 8:
        return "temporary", i
    root = module.root((i.callees.get("body") or ("",))[0])
    made = _element_of(root, index[0])
    if made is not None and not (made.opcode == "get-tuple-element" and made.operands and made.operands[0].opcode == "parameter"):
        return "carried", made
    before = _element_of(next(iter(i.operands), None), index[0])
    if before is None:
        return "carried", i
    inner = before.operands[0] if before.opcode == "get-tuple-element" and before.operands else None
    if inner is not None and inner.opcode in ("while", "parameter"):
        return _maker(module, inner, (int(before.attribute("index") or 0),), loops, depth + 1)
    return _maker(module, before, (), loops, depth + 1) if before.opcode == "parameter" else ("carried", before)


def _element_of(i: HloInstruction | None, number: int) -> HloInstruction | None:
    return i.operands[number] if i is not None and i.opcode == "tuple" and number < len(i.operands) else None


def _source(module: HloModule, i: HloInstruction, loops: Mapping[str, HloInstruction]) -> HloInstruction:
    """The instruction that computes a value, looking through copies, stored residuals and loop carries."""
    start = i
    for _ in range(8):
        i = _written(module, i)
        before = next(iter(i.operands), None)
        if i.opcode == "get-tuple-element" and before and before.opcode in ("parameter", "while"):
            i = _maker(module, before, (int(i.attribute("index") or 0),), loops)[1]
        elif i.opcode in ("copy", "bitcast", "transpose", "convert", "get-tuple-element", "copy-done") and before:
            i = before
        else:
            return i if i.stack or not start.stack else start
    return start


def _written(module: HloModule, i: HloInstruction) -> HloInstruction:
    """The instruction whose result a fusion writes into its buffer (a loop's stacked residuals); for others the instruction itself."""
    inner = module.root(i.callees["calls"][0]) if i.opcode.startswith("fusion") and "calls" in i.callees else None
    updates = False
    while inner is not None and inner.opcode in ("bitcast", "reshape", "copy", "transpose", "convert", "dynamic-update-slice"):
        stored = inner.opcode == "dynamic-update-slice"
        inner, updates = inner.operands[stored], updates or stored
    if inner is None or not updates:
        return i
    if inner.opcode == "parameter":
        return i.operands[int(inner.literal)] if int(inner.literal) < len(i.operands) else i
    return inner if inner.stack else i


def _global_shapes(before: str) -> Mapping[str, set[tuple[int, ...]]]:
    """op_name -> result shapes of the ops of that name."""
    out = defaultdict(set)
    for i in read(before) if before else ():
        if i.op_name and not i.type.startswith("("):
            out[i.op_name].update(a.shape for a in i.arrays)
    return out


def _global_shape(array: HloArray, shapes) -> tuple[int, ...] | None:
    """The one shape that `array` can be a shard of; None where there is none or several."""
    fits = [s for s in shapes if len(s) == len(array.shape) and all(w % n == 0 for w, n in zip(s, array.shape, strict=True) if n)]
    return fits[0] if len(fits) == 1 else None


@dataclass(frozen=True)
class Rematerialization(HasSource):
    """One tensor that XLA replicates in full on every device to change its layout.

    Attributes:
        array: the global array, where `before` could be read; else one device's shard.
        before, after: layouts; None where XLA's sharding is not made of axes of the mesh.
        sharding_before, sharding_after: as XLA wrote them.
    """

    array: HloArray
    before: Layout | None
    after: Layout | None
    sharding_before: str
    sharding_after: str
    instruction: str
    op_name: str
    stack: tuple[Frame, ...] = ()

    @property
    def source(self) -> str | None:
        """'file:line' of the innermost frame; None where XLA kept none."""
        return str(self.stack[0]) if self.stack else None

    def __str__(self) -> str:
        before, after = self.before or self.sharding_before, self.after or self.sharding_after
        source = f", {self.source}" if self.source else ""
        return f"full rematerialization of {self.array}, {before} -> {after}{source}"


def rematerializations(stderr: str, mesh: MeshShape | None = None, before: str = "") -> tuple[Rematerialization, ...]:
    """The warnings in a compiler's stderr, each once, in order; `mesh` reads XLA's shardings as layouts.

    Source lines are looked up by op name in the HLO `before` any pass.
    """
    out = []
    for found in _WARNING.finditer(stderr):
        array = arrays(found["type"])[0]
        was, is_ = (layout_of(found[k], mesh, len(array.shape)) if mesh else None for k in ("before", "after"))
        if mesh and was:
            shape = tuple(n * mesh.size(*axes) for n, axes in zip(array.shape, was.dims, strict=True))
            array = HloArray(array.dtype, shape)
        op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', found["rest"])
        name = op_name[1] if op_name else ""
        file, line = (re.search(rf"{k}=\"?([^\"\s}}]+)", found["rest"]) for k in ("source_file", "source_line"))
        stack = (Frame(file[1], int(line[1])),) if file and line else _place(before, name, array)
        out.append(Rematerialization(array, was, is_, found["before"], found["after"], found["name"], name, stack))
    return tuple(dict.fromkeys(out))


def _place(before: str, op_name: str, array: HloArray) -> tuple[Frame, ...]:
    """Source lines of the op of this name that makes this array; frame numbers differ from pass to pass, names stay."""
    named = [i for i in read(before) if i.op_name == op_name] if before and op_name else []
    return next((i.stack for i in sorted(named, key=lambda i: i.arrays[:1] != (array,)) if i.stack), ())
