"""The records of a plan: the one schema of plan files, from which reading, writing and the JSON schema follow."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from shardplan.mesh.cluster import CollectiveKind
from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.xla_model.compiler_options import Flag

VERSION: Literal[4] = 4

Amount = Annotated[float, Meta(ge=0, le=1e300)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(min_length=1)]


def itemsize(dtype: str) -> float:
    """Bytes of one element: by the first number in the type's name; 1 for bool, 8 for a key."""
    bits = re.search(r"\d+", dtype)
    return 8.0 if dtype.startswith("key<") else int(bits[0]) / 8 if bits else 1.0


class Leaf(Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output: its layout between steps.

    Attributes:
        path: pytree path, e.g. "state/params/dense/kernel"; in a file a pattern of several (`plan/leaf_patterns.py`).
        shape, dtype: of the global array.
        layout: never partial.
        kind: "parameters", "optimizer", "batch", "constants" or "output".
    """

    path: str
    shape: tuple[Count, ...]
    dtype: Name
    layout: Layout
    kind: str = ""

    def held_shape(self, mesh: MeshShape) -> tuple[int, ...]:
        """Of the array between steps: `shape`, dims that do not divide filled up (`plan/padded.py`)."""
        return self.layout.filled_shape(self.shape, mesh)

    def device_bytes(self, mesh: MeshShape) -> float:
        """Bytes of a device's shard."""
        return math.prod(self.layout.local_shape(self.shape, mesh)) * itemsize(self.dtype)


class PlannedCollective(Struct, frozen=True, forbid_unknown_fields=True):
    """One collective, or a local slice, of a reshard.

    Attributes:
        kind: of the collective; "slice" sends nothing.
        axes: mesh axes that it runs over.
        bytes: of the larger per-device buffer, in one run.
        seconds: of one run.
    """

    kind: CollectiveKind | Literal["slice"]
    axes: tuple[str, ...]
    bytes: Amount
    seconds: Amount

    def sent_bytes(self, mesh: MeshShape) -> float:
        """Bytes that a device sends in one run, as `plan.check()` counts them."""
        return wire_bytes(self.kind, self.bytes, mesh.size(*self.axes))


class PlannedReshard(Struct, frozen=True, forbid_unknown_fields=True):
    """The collectives that bring one operand into the layout in which an op reads it.

    Attributes:
        operand: its number.
        array: its type, "float32[8,4]".
        collectives: one after the other.
        pins: the two pins, in words, whose regions meet here (`Planned.conflicts`); otherwise ().
        producer_source: "file:line" that computes the operand, where XLA puts the reduction of partial sums; "" if unknown.
    """

    operand: Count
    array: str
    before: Layout
    after: Layout
    collectives: tuple[PlannedCollective, ...]
    pins: Annotated[tuple[str, ...], Meta(max_length=2)] = ()
    producer_source: str = ""

    def sent_bytes(self, mesh: MeshShape) -> float:
        """Bytes that a device sends in one run."""
        return sum(c.sent_bytes(mesh) for c in self.collectives)

    @property
    def seconds(self) -> float:
        """Seconds of one run."""
        return sum(c.seconds for c in self.collectives)


class PlanDecision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One op that the plan constrains or at whose operands it reshards.

    Attributes:
        op: its number among the ops of the program.
        file, line, function: the user's source line; the file by its portable name (`shardplan.files.portable`).
        primitive, occurrence: which op of that line and phase, counted from 0.
        strategy: mesh axis -> the factor of the op's rule that it shards, or "partial sums".
        operand_layouts: per operand, the layouts it is constrained to, one after the other.
        copy_numbers: per operand, which resharded copy of the array it reads: 0 the first one, n the n-th one regathered, -1 the
            first one behind an optimization barrier, so that XLA does not fuse it with its other readers; () is all 0.
        result_layouts: per result, the layout it is constrained to, or None.
        result_type: type of the first result.
        reshards: at its operands.
        seconds: compute on one device, in one run.
        runs: per step.
    """

    op: Count
    file: str
    line: Count
    function: str
    primitive: Name
    occurrence: Count
    phase: str
    strategy: Mapping[str, str]
    operand_layouts: tuple[tuple[Layout, ...], ...]
    copy_numbers: tuple[Annotated[int, Meta(ge=-1, le=2**53)], ...]
    result_layouts: tuple[Layout | None, ...]
    result_type: str
    reshards: tuple[PlannedReshard, ...]
    seconds: Amount
    runs: Amount

    @property
    def key(self) -> tuple:
        """Identifies the op in another plan of the same source."""
        return (self.file, self.line, self.primitive, self.phase, self.occurrence)

    @property
    def comm_seconds(self) -> float:
        """Seconds of its collectives in one step."""
        return self.runs * sum(r.seconds for r in self.reshards)


class SourceLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the program as it was when it was planned.

    Attributes:
        file, line: as in `PlanDecision`; ("", 0) holds the ops without a source line.
        code: its text, "" where it could not be read.
        seconds: compute of all its ops on one device in one step.
        function: that it stands in.
        ops: primitive -> how many ops of it the line makes; {} in older files.
    """

    file: str
    line: Count
    code: str
    seconds: Amount
    function: str = ""
    ops: Mapping[Name, Count] = {}


class MemoryReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per device over the step. `print` it.

    Attributes:
        peak: maximum over the step.
        limit: the budget, or None.
        where: the source line at the peak.
        at_peak: category -> bytes at the peak.
        profile: (category -> bytes) at evenly spaced times of the step and at the peak.
    """

    peak: Amount
    limit: Amount | None
    where: str
    at_peak: Mapping[str, Amount]
    profile: Annotated[tuple[Mapping[str, Amount], ...], Meta(max_length=1000)] = ()

    def __str__(self) -> str:
        return resolve_name("shardplan.view.text:memory_text")(self)


class ClassicalStep(Struct, frozen=True, forbid_unknown_fields=True):
    """The step with its inputs in a classical layout (`plan/baselines.py`).

    Attributes:
        name: of the layout, with its mesh axes where several are mixed.
        seconds, peak_bytes, sent_bytes: of the step; of the plan of lowest peak found where nothing fits.
        fits: whether the peak is within the memory limit.
    """

    name: str
    seconds: Amount
    peak_bytes: Amount
    sent_bytes: Amount
    fits: bool


class ClassicalSteps(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan is compared with.

    Attributes:
        rows: the fastest that fits first.
        unmixed: whether they are the layouts that are no mixes only.
    """

    rows: tuple[ClassicalStep, ...]
    unmixed: bool = False


class JobPart(Struct, frozen=True, forbid_unknown_fields=True):
    """One of several functions that are planned with one layout of the state that they share.

    Attributes:
        name: of the function, with the type of an argument where it is planned for several shapes.
        weight: how often it is called, in proportion to the others.
        seconds: predicted, of one call.
    """

    name: str
    weight: Amount
    seconds: Amount


def seconds_per_call(parts: Sequence[JobPart]) -> float:
    """Seconds of a call on average, by the weights of the functions."""
    weight = math.fsum(part.weight for part in parts)
    return math.fsum(part.weight * part.seconds for part in parts) / (weight or 1.0)


class PlanRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one step is sharded over one mesh: the content of a plan file, in its order.

    Attributes:
        fingerprint: of the program (`ir/canonical.py`); those of files before version 3 depend on the devices, too.
        products: of its products, lookups and loops, which other versions of JAX trace in the same way; "" in older files.
        jax: the version that traced it; "" in older files.
        donated: names of the donated arguments, or of leaves where only some of an argument are.
        compiler_options: options of XLA for GPU that the plan is predicted with, the user's own among them; {} in older files.
        inputs, outputs: leaves in flat pytree order.
        decisions: in program order. What follows is the report, which applying the plan does not need.
        cluster: name of the cluster it was priced for.
        search: as in `auto(search=...)`.
        status: how the search ended.
        gap: proven relative distance from the optimum.
        symmetric_layers: whether repeated layers were given equal strategies; the bound holds for all plans.
        seconds: predicted seconds of a step: "compute", "communication", the part of that which is "hidden" behind compute, the
            "interference" by which the two slow each other meanwhile, "total" (compute + communication - hidden + interference), its
            lower "bound", and the range of the total from "low" to "high", in which it is by the errors of what was measured
            (`plan/seconds_range.py`). Older files lack interference, low and high.
        unknown: (primitive, source) of ops without a rule, computed in full on every device; in parentheses why none was derived.
        unmeasured: what takes a twentieth of the step or more and was not measured on this device, and "whole steps" if they were not.
        job: the functions that share the layout of the state, this one first (`shardplan.together`); () for a plan made alone.
        classical: the step in classical layouts, as it was saved with; None in older files, and for a plan that was not saved.
        lines: the source lines that ops come from, in the order in which they first run; in older files, those that take time.
    """

    version: Literal[4] = VERSION
    mesh: MeshShape
    fingerprint: Name
    products: str = ""
    jax: str = ""
    donated: tuple[str, ...]
    compiler_options: Mapping[Name, Flag] = {}
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    decisions: tuple[PlanDecision, ...]
    cluster: str
    search: Name
    status: Literal["optimal", "feasible", "fallback"]
    gap: Amount
    symmetric_layers: bool
    seconds: Mapping[str, Amount]
    memory_report: MemoryReport = field(name="memory")
    unknown: tuple[tuple[str, str], ...]
    unmeasured: tuple[str, ...] = ()
    job: tuple[JobPart, ...] = ()
    classical: ClassicalSteps | None = field(default=None, name="baselines")
    lines: tuple[SourceLine, ...]

    def __eq__(self, other: object) -> bool:
        """Whether both decide and predict the same, whatever they are compared with (`baselines`)."""
        if not isinstance(other, PlanRecord):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__struct_fields__ if name != "classical")

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.inputs, self.cluster))

    @property
    def pads_state(self) -> bool:
        """Whether some state is held padded between steps (`auto(mesh, pad_state=True)`)."""
        return any(x.held_shape(self.mesh) != x.shape for x in self.inputs)


@dataclass(frozen=True)
class Conflict:
    """Two pins that disagree at one source line."""

    pins: tuple[str, ...]  # in words, in the program's order; equal where a constraint's forward and backward pass disagree
    file: str  # as in `PlanDecision`
    line: int
    bytes: float  # that a device sends per step because of it
    seconds: float  # of these collectives per step, hidden or exposed
