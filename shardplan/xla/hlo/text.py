"""Parses the text of a compiled HLO module: computations in schedule order, how often each runs, the source line of every op.

    HloModule jit_step, is_scheduled=true, num_partitions=8                         HloModule.n_devices
    FileNames / FunctionNames / FileLocations / StackFrames                         HloInstruction.stack
    %body (p: (s32[], f32[16])) -> (s32[], f32[16]) {                               HloModule.computations["body"]
      %ar = f32[16]{0} all-reduce(%x), replica_groups=[4,2]<=[8], metadata={...}    HloInstruction
    }
    ENTRY %main ... while(%t), condition=%cond, body=%body, ... known_trip_count    HloModule.runs["body"]

`read` takes the text of any backend (`compiled.as_text()`); nothing is executed and no XLA library is needed.
"""

from __future__ import annotations

import linecache
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from shardplan.files import is_library

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
"""Of the element types whose name does not state them, as those of f8e4m3fn and s4 do."""


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
        bits = _BITS[self.dtype] if self.dtype in _BITS else int(re.findall(r"\d+", self.dtype)[0])
        return -(-self.size * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Frame:
    """One source location."""

    file: str
    line: int
    function: str = ""

    @property
    def short(self) -> str:
        """The location without its folder: 'train.py:41'."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def code(self) -> str:
        """Text of the line; '' where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class HasSource:
    """What has a `stack`: source lines, innermost call first; () where XLA kept no trace."""

    stack: tuple[Frame, ...]

    @property
    def frame(self) -> Frame | None:
        """The innermost frame outside installed packages, else the innermost one."""
        return next((f for f in self.stack if not is_library(f.file)), next(iter(self.stack), None))

    @property
    def source(self) -> str | None:
        """'file:line' of `frame`; None when XLA kept no trace."""
        return str(self.frame) if self.frame else None


@dataclass(frozen=True, slots=True, eq=False)
class HloInstruction:
    """One line of HLO.

    Attributes:
        type: result type as printed; `arrays` reads it.
        operands: the instructions that it reads, in order.
        literal: the text between the parentheses (the value of a constant, the number of a parameter).
        attributes: the text after the parentheses.
        stack: as in `HasSource`.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[HloInstruction, ...]
    literal: str
    attributes: str
    computation: str
    root: bool
    stack: tuple[Frame, ...]

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
class HloModule:
    """An HLO module; computations in text order, callees before callers, the entry last."""

    n_devices: int
    computations: Mapping[str, tuple[HloInstruction, ...]]
    entry: str

    def __iter__(self) -> Iterator[HloInstruction]:
        return (i for body in self.computations.values() for i in body)

    @cached_property
    def users(self) -> Mapping[HloInstruction, list[HloInstruction]]:
        """The instructions that read an instruction, in schedule order."""
        out: dict[HloInstruction, list[HloInstruction]] = defaultdict(list)
        for instruction in self:
            for operand in instruction.operands:
                out[operand].append(instruction)
        return out

    def root(self, computation: str) -> HloInstruction | None:
        """The root instruction of a computation."""
        return next((i for i in reversed(self.computations.get(computation, ())) if i.root), None)

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
        """How often each computation runs in one step: loops by their trip count (1 if unknown), n branches 1/n each."""
        return self._counts[0]

    @property
    def guessed(self) -> frozenset[str]:
        """Computations inside a loop of unknown trip count."""
        return self._counts[1]

    def trip_count(self, loop: HloInstruction) -> int | None:
        """Trips of a `while`: from its backend_config, else from the one constant its condition compares with."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
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
    tables: dict[str, dict[int, str]] = defaultdict(dict)
    computations: dict[str, tuple[HloInstruction, ...]] = {}
    entry, computation, section = None, "", ""
    body: dict[str, HloInstruction] = {}
    stacks: dict[int, tuple[Frame, ...]] = {}
    for line in lines:
        if line.startswith(" "):
            if instruction := _instruction(line, computation, body, stacks):
                body[instruction.name] = instruction
        elif line.startswith("}"):
            computations[computation] = tuple(body.values())
        elif line.endswith("{"):
            if start := _COMPUTATION.match(line):
                stacks = stacks or _stacks(tables)
                computation, body, section = start[2], {}, ""
                entry = computation if start[1] else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section and line:
            number, _, value = line.partition(" ")
            tables[section][int(number)] = value
    if entry is None:
        raise ValueError(f"this is not the text of a compiled HLO module: no ENTRY computation in {len(text)} characters")
    count = {k: int(m[1]) if (m := re.search(rf"\b{k}=(\d+)", header)) else 1 for k in ("num_partitions", "replica_count")}
    return HloModule(math.prod(count.values()), computations, entry)


def origin(module: HloModule, i: HloInstruction) -> tuple[str, tuple[Frame, ...]]:
    """Op name and source lines of an instruction, or of the nearest operand chain that has them: `copy(copy(x))` is at x."""
    seen = i
    for _ in range(12):
        inner = module.root(seen.callees["calls"][0]) if seen.opcode == "fusion" else None
        if found := next((x for x in (seen, inner) if x and x.stack), None):
            return found.op_name, found.stack
        if not seen.operands or seen.opcode in ("while", "conditional", "call"):
            break
        seen = seen.operands[0]
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
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]', re.DOTALL)
_STACK_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_SOURCE_LINE = re.compile(r"\bsource_line=(\d+)")


@lru_cache
def _attribute(key: str) -> re.Pattern:
    return re.compile(rf"(?:^|[\s,{{]){re.escape(key)}=")


def _closing(text: str, at: int) -> int:
    """Position that closes the bracket or string at `at`; brackets inside strings do not count."""
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text, at):
        depth += (token[0] in ("(", "[", "{")) - (token[0] in (")", "]", "}"))
        if depth == 0:
            return token.end() - 1
    return len(text) - 1


def _instruction(
    line: str, computation: str, before: Mapping[str, HloInstruction], stacks: Mapping[int, tuple[Frame, ...]]
) -> HloInstruction | None:
    left, equals, right = line.partition(" = ")
    if not equals:
        return None
    left = left.strip()
    end = _closing(right, 0) + 1 if right.startswith("(") else right.find(" ")
    opening = right.find("(", end)
    if opening < 0:
        return None
    closing = right.find(")", opening)
    if right.find("(", opening + 1, closing) >= 0 or right.find('"', opening + 1, closing) >= 0:
        closing = _closing(right, opening)
    inside, attributes = right[opening + 1 : closing], right[closing + 1 :]
    frame, file, number = (found.search(attributes) for found in (_STACK_FRAME, _SOURCE_FILE, _SOURCE_LINE))
    return HloInstruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=right[end:opening].strip(),
        type=right[:end],
        operands=tuple(before[o] for o in _OPERAND.findall(inside) if o in before),
        literal=inside,
        attributes=attributes,
        computation=computation,
        root=left.startswith("ROOT "),
        stack=stacks.get(int(frame[1]), ()) if frame else (Frame(file[1], int(number[1])),) if file and number else (),
    )


def _stacks(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[Frame, ...]]:
    """Frame number -> its source line and those of its callers."""

    def numbers(table: str) -> dict[int, dict[str, int]]:
        return {n: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", text)} for n, text in tables[table].items()}

    def name(table: str, number: int) -> str:
        return tables[table].get(number, "").strip('"')

    places = {
        n: Frame(name("FileNames", x.get("file_name_id", 0)), x.get("line", 0), name("FunctionNames", x.get("function_name_id", 0)))
        for n, x in numbers("FileLocations").items()
    }
    frames = numbers("StackFrames")
    # Frame 1 has no caller; it is written as its own parent where parents are counted from one.
    shift = 1 if frames.get(1, {}).get("parent_frame_id") == 1 else 0

    def stack(frame: int) -> tuple[Frame, ...]:
        out = []
        while (found := frames.get(frame, {})).get("file_location_id") in places:
            out.append(places[found["file_location_id"]])
            frame = found.get("parent_frame_id", 0) - shift
        return tuple(out)

    return {frame: stack(frame) for frame in frames}
