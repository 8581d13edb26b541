"""Parses the text of a compiled HLO module: computations in schedule order, how often each runs, the source line of every op.

    HloModule jit_step, is_scheduled=true, num_partitions=8                         Module.n_devices
    FileNames / FunctionNames / FileLocations / StackFrames                         Module.stack(instruction)
    %body (p: (s32[], f32[16])) -> (s32[], f32[16]) {                               Module.computations["body"]
      %ar = f32[16]{0} all-reduce(%x), replica_groups=[4,2]<=[8], metadata={...}    Instruction
    }
    ENTRY %main ... while(%t), condition=%cond, body=%body, ... known_trip_count    Module.runs["body"]

`read` takes the text of any backend (`compiled.as_text()`); nothing is executed and no XLA library is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardplan.files import is_library

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}


def bits(dtype: str) -> int:
    """Bits of one element: 'bf16' -> 16, 'f8e4m3fn' -> 8, 's4' -> 4."""
    return _BITS[dtype] if dtype in _BITS else int(re.match(r"[a-z]+(\d+)", dtype)[1])  # type: ignore[index]


@dataclass(frozen=True)
class HloArray:
    """Dtype and per-device shape of one buffer."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes, sub-byte dtypes packed."""
        return -(-self.size * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class HloInstruction:
    """One line of HLO.

    Attributes:
        type: result type as printed; `arrays` reads it.
        operands: names of the operand instructions, in the same computation.
        literal: the text between the parentheses (the value of a constant, the number of a parameter).
        attributes: the text after the parentheses.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    computation: str
    root: bool

    @property
    def arrays(self) -> tuple[HloArray, ...]:
        """The arrays of the result, tuples flattened."""
        return arrays(self.type)

    def attribute(self, key: str) -> str | None:
        """Value of `key=...`: a braced group, a string or a plain word; None when absent."""
        found = _attribute(key).search(self.attributes)
        if not found:
            return None
        at = found.end()
        if self.attributes[at : at + 1] not in ("{", '"'):
            return re.match(r"[^,\s]*", self.attributes[at:])[0]  # type: ignore[index]
        return self.attributes[at : _closing(self.attributes, at) + 1]

    @property
    def callees(self) -> dict[str, tuple[str, ...]]:
        """Computations this instruction runs, by attribute: {'body': ('region_0',), 'condition': ('region_1',)}."""
        found = {k: tuple(_NAME.findall(v)) for k, v in _CALLEE.findall(self.attributes)}
        if "to_apply" in found and self.opcode != "call":
            del found["to_apply"]  # a scalar reducer
        if self.opcode.endswith(("-done", "-update")):
            found = {}
        return found

    @property
    def op_name(self) -> str:
        """JAX's name of the op; '' where XLA kept none."""
        found = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


@dataclass(frozen=True)
class Frame:
    """One source location."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def users_line(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame outside installed packages, else the innermost one."""
    return next((f for f in stack if not is_library(f.file)), stack[0] if stack else None)


def source_of(stack: tuple[Frame, ...]) -> str | None:
    """'file:line' of `users_line`; None when XLA kept no trace."""
    frame = users_line(stack)
    return str(frame) if frame else None


@dataclass(frozen=True)
class HloModule:
    """An HLO module; computations in text order, callees before callers, the entry last."""

    name: str
    n_devices: int
    computations: Mapping[str, tuple[HloInstruction, ...]]
    entry: str
    frames: Mapping[int, tuple[Frame, int]]

    @cached_property
    def table(self) -> Mapping[str, Mapping[str, HloInstruction]]:
        """Computation -> instruction name -> instruction."""
        return {c: {i.name: i for i in body} for c, body in self.computations.items()}

    @cached_property
    def users(self) -> Mapping[str, Mapping[str, list[HloInstruction]]]:
        """Computation -> instruction name -> the instructions that read it, in schedule order."""
        out: dict[str, dict[str, list[HloInstruction]]] = {}
        for computation, body in self.computations.items():
            readers = out.setdefault(computation, {})
            for instruction in body:
                for operand in instruction.operands:
                    readers.setdefault(operand, []).append(instruction)
        return out

    def operands(self, instruction: HloInstruction) -> tuple[HloInstruction, ...]:
        """The instructions that it reads, in order."""
        table = self.table[instruction.computation]
        return tuple(table[o] for o in instruction.operands if o in table)

    def root(self, computation: str) -> HloInstruction | None:
        """The root instruction of a computation."""
        return next((i for i in reversed(self.computations.get(computation, ())) if i.root), None)

    def stack(self, instruction: HloInstruction) -> tuple[Frame, ...]:
        """Source lines of an instruction, innermost call first; () where the compiler kept no trace."""
        found = _STACK_FRAME.search(instruction.attributes)
        if found:
            out, frame = [], int(found[1])
            while frame in self.frames:
                place, frame = self.frames[frame]
                out.append(place)
            return tuple(out)
        file, line = (r.search(instruction.attributes) for r in (_SOURCE_FILE, _SOURCE_LINE))
        return (Frame(file[1], int(line[1])),) if file and line else ()

    @cached_property
    def _counts(self) -> tuple[dict[str, float], frozenset[str]]:
        runs, guessed = dict.fromkeys(self.computations, 0.0), set()
        runs[self.entry] = 1.0
        for computation in reversed(list(self.computations)):
            for instruction in self.computations[computation]:
                if "=%" not in instruction.attributes and "={%" not in instruction.attributes:
                    continue
                callees = instruction.callees
                n_branches = sum(map(len, callees.values())) if instruction.opcode == "conditional" else 1
                trips = self.trip_count(instruction) if instruction.opcode == "while" else 1
                for key, names in callees.items():
                    times = (trips or 1) + (key == "condition")
                    for name in names:
                        if name in runs:
                            runs[name] += runs[computation] * times / n_branches
                            if trips is None or computation in guessed:
                                guessed.add(name)
        return runs, frozenset(guessed)

    @property
    def runs(self) -> Mapping[str, float]:
        """How often each computation runs in one step: loops by their trip count, the n branches of a conditional 1/n each.

        A loop whose trip count the compiler does not know counts once; see `guessed`.
        """
        return self._counts[0]

    @property
    def guessed(self) -> frozenset[str]:
        """Computations inside a loop of unknown trip count."""
        return self._counts[1]

    def trip_count(self, loop: HloInstruction) -> int | None:
        """Trips of a `while`: from its backend_config, else from the one constant its condition compares with."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        todo, constants, directions = list(loop.callees.get("condition", ())), [], []
        for computation in todo:
            for i in self.computations.get(computation, ()):
                todo += [c for names in i.callees.values() for c in names]
                if i.opcode == "constant" and re.fullmatch(r"[su]\d+\[\](\{\})?", i.type) and i.literal.isdigit():
                    constants.append(int(i.literal))
                elif i.opcode == "compare":
                    directions.append(i.attribute("direction"))
        if len(constants) == 1 and directions in (["LT"], ["LE"]):
            return constants[0] + (directions == ["LE"])
        return None


def read(text: str | HloModule) -> HloModule:
    """Reads the text of a compiled module; a Module passes through. ValueError when there is no entry computation."""
    return text if isinstance(text, HloModule) else _read(text)


@lru_cache(maxsize=4)
def _read(text: str) -> HloModule:
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith("HloModule")), "")
    tables: dict[str, dict[int, str]] = {}
    computations: dict[str, tuple[HloInstruction, ...]] = {}
    entry, computation, section = None, "", ""
    body: list[HloInstruction] = []
    for line in lines:
        if line.startswith(" "):
            instruction = _instruction(line, computation)
            if instruction:
                body.append(instruction)
        elif line.startswith("}"):
            computations[computation] = tuple(body)
        elif line.endswith("{"):
            start = _COMPUTATION.match(line)
            if start:
                computation, body, section = start[2], [], ""
                entry = computation if start[1] else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section and line:
            number, _, value = line.partition(" ")
            tables.setdefault(section, {})[int(number)] = value
    if entry is None:
        raise ValueError(f"this is not the text of a compiled HLO module: no ENTRY computation in {len(text)} characters")
    count = {k: int(m[1]) if (m := re.search(rf"\b{k}=(\d+)", header)) else 1 for k in ("num_partitions", "replica_count")}
    name = re.match(r"HloModule ([^,\s]+)", header)
    return HloModule(name[1] if name else "", math.prod(count.values()), computations, entry, _frames(tables))


def origin(module: HloModule, i: HloInstruction) -> tuple[str, tuple[Frame, ...]]:
    """Op name and source lines of an instruction, or of the nearest operand chain that has them: `copy(copy(x))` is at x."""
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


def arrays(type_: str) -> tuple[HloArray, ...]:
    """Arrays of a printed type, tuples flattened: '(f32[2,3]{1,0}, token[])' -> f32[2,3] and token[]."""
    return tuple(HloArray(d, tuple(int(n.lstrip("<=")) for n in s.split(",") if n)) for d, s in _ARRAY.findall(type_))


def elements(type_: str) -> tuple[str, ...]:
    """Types of a tuple's elements, one level deep; the type itself for an array."""
    if not type_.startswith("("):
        return (type_,)
    out, depth, start = [], 0, 1
    for at, char in enumerate(type_):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 or (depth == 1 and char == ","):
            out.append(type_[start:at].strip())
            start = at + 1
    return tuple(o for o in out if o)


_NAME = re.compile(r"%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)\s.*\{$")
_CALLEE = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)"
    r"=(\{[^}]*\}|%[\w.\-]+)"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_STACK_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_SOURCE_LINE = re.compile(r"\bsource_line=(\d+)")


@lru_cache
def _attribute(key: str) -> re.Pattern:
    return re.compile(rf"(?:^|[\s,{{]){re.escape(key)}=")


def _closing(text: str, at: int) -> int:
    """Position that closes the bracket or string at `at`; brackets inside strings do not count."""
    depth, in_string, skip = 0, False, False
    for i in range(at, len(text)):
        char = text[i]
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif char == '"':
            in_string = not in_string
            if not in_string and depth == 0:
                return i
        elif not in_string:
            depth += (char in "([{") - (char in ")]}")
            if depth == 0:
                return i
    return len(text) - 1


def _instruction(line: str, computation: str) -> HloInstruction | None:
    left, equals, right = line.partition(" = ")
    if not equals:
        return None
    left = left.strip()
    root = left.startswith("ROOT ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.find(" ")
    opening = right.find("(", end)
    if opening < 0:
        return None
    closing = right.find(")", opening)
    if right.find("(", opening + 1, closing) >= 0 or right.find('"', opening + 1, closing) >= 0:
        closing = _closing(right, opening)
    inside = right[opening + 1 : closing]
    return HloInstruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=right[end:opening].strip(),
        type=right[:end],
        operands=tuple(_OPERAND.findall(inside)),
        literal=inside,
        attributes=right[closing + 1 :],
        computation=computation,
        root=root,
    )


def _frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[Frame, int]]:
    """Frame number -> (place, number of the calling frame); 0 where there is none."""

    def numbers(value: str) -> dict[str, int]:
        return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", value)}

    places = {}
    for n, value in tables.get("FileLocations", {}).items():
        at = numbers(value)
        file = tables["FileNames"].get(at.get("file_name_id", 0), "").strip('"')
        function = tables["FunctionNames"].get(at.get("function_name_id", 0), "").strip('"')
        places[n] = Frame(file, at.get("line", 0), function)
    frames = {n: numbers(v) for n, v in tables.get("StackFrames", {}).items()}
    # Frame 1 has no caller; it is written as its own parent where parents are counted from one.
    shift = 1 if frames.get(1, {}).get("parent_frame_id") == 1 else 0
    return {
        n: (places[f["file_location_id"]], f.get("parent_frame_id", 0) - shift)
        for n, f in frames.items()
        if f.get("file_location_id") in places
    }
