"""The buffers alive at XLA's memory peak, each with its source line.

XLA dumps the list (`...-live-range.txt`):

    Live ranges at 314 (peak):
      fusion.86{}: 536870912 bytes (cumulative: 536870912 bytes)
      while.32{2}: 524288000 bytes (cumulative: 1061158912 bytes)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.xla.hlo.text import Frame, HloArray, HloInstruction, HloModule, arrays, elements, origin, source_of

_ENTRY = re.compile(r"\s+(\S+)\{([\d,]*)\}: (\d+) bytes \(cumulative")
_PLACE = re.compile(r" value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?.*?@\d+> \(size=(\d+),offset=(\d+)\)")


@dataclass(frozen=True)
class Buffer:
    """One value alive at the peak.

    Attributes:
        array: on one device; None for tuples.
        bytes: on one device.
        kind: 'argument', 'carried' (by a loop), or 'temporary'.
        global_shape: shape of the tensor, where its op was found in the program before any pass.
        copies: how many devices hold the same shard; None where `global_shape` is.
        op_name, stack: JAX's name of the op that makes it, and its source lines, innermost first.
    """

    name: str
    array: HloArray | None
    bytes: int
    kind: str
    global_shape: tuple[int, ...] | None
    copies: int | None
    op_name: str
    stack: tuple[Frame, ...] = ()

    @property
    def source(self) -> str | None:
        """'file:line' in the user's own code, innermost; None when XLA kept none."""
        return source_of(self.stack)


def buffers(live_range: str, assignment: str, module: HloModule, before: HloModule | None = None) -> tuple[Buffer, ...]:
    """The values alive at the peak, the largest first; () where the dump has no peak.

    Args:
        live_range: XLA's live-range dump of `module`.
        assignment: its buffer-assignment dump; values that share memory are then counted once.
        module: the compiled program.
        before: the program before any pass; it has the global shapes.
    """
    _, found, peak = live_range.partition("(peak):\n")
    if not found:
        return ()
    by_name = {i.name: i for body in module.computations.values() for i in body}
    loops, unnamed = _loops(module), _asynchronous(module)
    shapes = _global_shapes(before) if before else {}
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
    out: dict[tuple[str, int, tuple[int, ...]], list[HloInstruction]] = {}
    for body in module.computations.values():
        for i in body:
            carried = elements(i.type)
            if not i.opcode.endswith("-start") or len(carried) < 2:
                continue
            stem = _stem(i.callees["calls"][0]) if "calls" in i.callees else i.opcode.removesuffix("-start")
            parts = elements(carried[1]) if carried[1].startswith("(") else ()
            for index, type_ in [((n,), t) for n, t in enumerate(parts)] or [((), carried[1])]:
                out.setdefault((stem, sum(a.bytes for a in arrays(type_)), index), []).append(i)
    return out


def _loops(module: HloModule) -> Mapping[str, HloInstruction]:
    """Loop body -> its `while`."""
    return {name: i for body in module.computations.values() for i in body if i.opcode == "while" for name in i.callees.get("body", ())}


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
    body = (i.callees.get("body") or ("",))[0]
    made = _operand(module, module.root(body), index[0])
    if made is not None and not _passes_through(module, made):
        return "carried", made
    before = _operand(module, next(iter(module.operands(i)), None), index[0])
    if before is None:
        return "carried", i
    if before.opcode == "get-tuple-element":
        inner = next(iter(module.operands(before)), None)
        if inner is not None and inner.opcode in ("while", "parameter"):
            return _maker(module, inner, (int(before.attribute("index") or 0),), loops, depth + 1)
    kind, maker = _maker(module, before, (), loops, depth + 1) if before.opcode == "parameter" else ("carried", before)
    return kind, maker


def _source(module: HloModule, i: HloInstruction, loops: Mapping[str, HloInstruction]) -> HloInstruction:
    """The instruction that computes a value, looking through copies, stored residuals and loop carries."""
    start = i
    for _ in range(8):
        i = _written(module, i)
        before = module.operands(i)
        if i.opcode == "get-tuple-element" and before and before[0].opcode in ("parameter", "while"):
            i = _maker(module, before[0], (int(i.attribute("index") or 0),), loops)[1]
        elif i.opcode in ("copy", "bitcast", "transpose", "convert", "get-tuple-element", "copy-done") and before:
            i = before[0]
        else:
            return i if module.stack(i) or not module.stack(start) else start
    return start


def _written(module: HloModule, i: HloInstruction) -> HloInstruction:
    """The instruction whose result a fusion writes into its buffer (a loop's stacked residuals); for others the instruction itself."""
    if not i.opcode.startswith("fusion") or "calls" not in i.callees:
        return i
    fused = i.callees["calls"][0]
    inner, table = module.root(fused), module.table.get(fused, {})
    at = 1
    while inner is not None and inner.opcode in ("bitcast", "reshape", "copy", "transpose", "convert", "dynamic-update-slice"):
        if inner.opcode == "dynamic-update-slice":
            name, at = inner.operands[1], 0
        else:
            name = inner.operands[0]
        inner = table.get(name)
    if at or inner is None:
        return i
    if inner.opcode != "parameter":
        return inner if module.stack(inner) else i
    outer = module.operands(i)
    return outer[int(inner.literal)] if int(inner.literal) < len(outer) else i


def _operand(module: HloModule, i: HloInstruction | None, number: int) -> HloInstruction | None:
    if i is None or i.opcode != "tuple" or number >= len(i.operands):
        return None
    return module.table[i.computation].get(i.operands[number])


def _passes_through(module: HloModule, i: HloInstruction) -> bool:
    operands = module.operands(i)
    return i.opcode == "get-tuple-element" and bool(operands) and operands[0].opcode == "parameter"


def _global_shapes(before: HloModule) -> Mapping[str, frozenset[tuple[int, ...]]]:
    """op_name -> result shapes of the ops of that name."""
    out: dict[str, set[tuple[int, ...]]] = {}
    for body in before.computations.values():
        for i in body:
            if i.op_name and not i.type.startswith("("):
                out.setdefault(i.op_name, set()).update(a.shape for a in i.arrays)
    return {k: frozenset(v) for k, v in out.items()}


def _global_shape(array: HloArray, shapes) -> tuple[int, ...] | None:
    """The one shape that `array` can be a shard of; None where there is none or several."""
    fits = [s for s in shapes if len(s) == len(array.shape) and all(w % n == 0 for w, n in zip(s, array.shape, strict=True) if n)]
    return fits[0] if len(fits) == 1 else None
