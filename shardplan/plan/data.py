"""The plan: what was decided, as an object that people read, question, pin, save and reuse.

A `Plan` is plain data that survives a round trip through JSON: the mesh once, inputs and outputs by pytree path, and what happens
inside the step by source line, primitive and occurrence. A plan fresh from the planner also remembers what it was planned from,
so that `fix` can ask "what if".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from shardplan import _jax
from shardplan.errors import ShardingError
from shardplan.files import write_atomically
from shardplan.mesh.layout import Layout, MeshShape

if TYPE_CHECKING:
    from shardplan.feedback import Verified
    from shardplan.xla.report.plan_report import PlanReport

FORMAT = "shardplan-plan"
VERSION = 1
SEARCHES = ("ilp", "propagation", "recursive")
MAX_FILE_BYTES = 256_000_000


@dataclass(frozen=True)
class Leaf:
    """One input or output: where it lives between steps.

    Attributes:
        path: pytree path, e.g. "state/params/dense/kernel".
        shape, dtype: of the whole array.
        layout: its placement.
        kind: "parameters", "optimizer", "batch", "constants" or "output".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    kind: str = ""


@dataclass(frozen=True)
class PlannedCollective:
    """One planned redistribution step.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute" or "slice".
        axes: mesh axes it runs over.
        bytes: of the larger per-device buffer, one run.
        seconds: one run.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float


@dataclass(frozen=True)
class PlannedReshard:
    """What brings one operand into the layout in which an op takes it.

    Attributes:
        operand: its number.
        array: its type, "float32[8,4]".
        before, after: the layouts.
        collectives: one after the other.
        pins: where regions meet that grew from different pins (propagation/conflicts.py), these two in words; otherwise ().
        producer_source: the 'file:line' that makes the operand, where XLA hangs the reduction of partial sums; '' in a plan from a file.
    """

    operand: int
    array: str
    before: Layout
    after: Layout
    collectives: tuple[PlannedCollective, ...]
    pins: tuple[str, ...] = ()
    producer_source: str = field(default="", compare=False)


@dataclass(frozen=True)
class PlanDecision:
    """One op on which the plan says something.

    Attributes:
        file, line, function: the user's source line; the file by its portable name (`shardplan.files.portable`).
        primitive, occurrence: which op of that line and phase, counted from 0.
        strategy: mesh axis -> what it splits, in the rule's letters.
        operand_layouts: per operand, the layouts it is constrained to.
        result_layouts: per result, the layout it is constrained to, or None.
        reshards: collectives at its operands.
        seconds: compute on one device, per run.
        runs: how often per step.
        result_type: type of the first result, for people.
        op: its number among the ops of the program, which tells it from all others.
        copy_numbers: per operand, which resharded copy of the array it reads: 0 the first one, n the n-th one regathered, -1 the
            first one behind an optimization barrier, so that XLA does not fuse it with its other readers; () is all 0.
    """

    file: str
    line: int
    function: str
    primitive: str
    occurrence: int
    phase: str
    strategy: Mapping[str, str]
    operand_layouts: tuple[tuple[Layout, ...], ...]
    result_layouts: tuple[Layout | None, ...]
    reshards: tuple[PlannedReshard, ...]
    seconds: float
    runs: float
    result_type: str
    op: int
    copy_numbers: tuple[int, ...] = ()

    @property
    def key(self) -> tuple:
        """What a person would call the op."""
        return (self.file, self.line, self.primitive, self.phase, self.occurrence)

    @property
    def comm_seconds(self) -> float:
        return self.runs * sum(c.seconds for m in self.reshards for c in m.collectives)


@dataclass(frozen=True)
class Conflict:
    """Two pins that disagree at one source line.

    Attributes:
        pins: in words, in the program's order; equal where a constraint's forward and backward pass disagree.
        file, line: as in `PlanDecision`.
        bytes: that a device sends per step because of it.
        seconds: of these collectives per step, hidden or not.
    """

    pins: tuple[str, ...]
    file: str
    line: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class SourceLine:
    """A line of the program as it was when it was planned.

    Attributes:
        file, line: as in `PlanDecision`; ("", 0) gathers the ops of no line.
        code: its text, "" where it could not be read.
        seconds: compute of all its ops on one device in one step.
    """

    file: str
    line: int
    code: str
    seconds: float


@dataclass(frozen=True)
class MemoryReport:
    """Bytes per device over the step.

    Attributes:
        peak: the most at any time.
        limit: the budget, or None.
        where: the user's line at the peak.
        at_peak: category -> bytes at the peak.
        profile: (category -> bytes) at up to 200 even points of the step, for drawing.
    """

    peak: float
    limit: float | None
    where: str
    at_peak: Mapping[str, float]
    profile: tuple[Mapping[str, float], ...] = ()

    def __str__(self) -> str:
        from shardplan.view.text import memory_text

        return memory_text(self)


@dataclass(frozen=True)
class Plan:
    """How one step is split over one mesh.

    Attributes:
        mesh: axis names and sizes.
        cluster: name of the cluster it was priced for.
        inputs, outputs: leaves in flat pytree order.
        decisions: what happens inside the step, in program order.
        seconds: predicted seconds of a step: "compute", "communication", what of that is "hidden" behind compute,
            "total" (the first two less the third), and its lower "bound".
        status: "optimal", "feasible", "fallback"; gap: proven relative distance from the optimum.
        symmetric_layers: whether repeated layers were given equal strategies (the bound then holds for such plans).
        memory_report: see `memory()`.
        search: one of `SEARCHES`.
        fingerprint: of the program.
        donated: names of the donated arguments, or of leaves where only some of an argument are.
        lines: the program's lines that compute something, in the order in which they first run.
        unknown: (primitive, source) of ops without a rule, kept whole.
    """

    mesh: MeshShape
    cluster: str
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    decisions: tuple[PlanDecision, ...]
    seconds: Mapping[str, float]
    status: str
    gap: float
    symmetric_layers: bool
    memory_report: MemoryReport
    search: str
    fingerprint: str
    donated: tuple[str, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()
    planning_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    context: Any = field(default=None, compare=False, repr=False)

    # ---- as pytrees

    def _tree(self, leaves: tuple[Leaf, ...], tree, make: Callable[[Leaf], Any]):
        if tree is None:
            return {leaf.path: make(leaf) for leaf in leaves}
        return jax.tree.unflatten(tree, [make(leaf) for leaf in leaves])

    def _sharding(self, leaf: Leaf):
        if self.context is None or self.context.mesh is None:
            return jax.sharding.PartitionSpec(*leaf.layout.spec())
        return _jax.sharding(self.context.mesh, leaf.layout.spec())

    @property
    def in_shardings(self):
        """Shardings of the arguments: a pytree (args, kwargs) of NamedSharding; a dict by path for a plan read from a file."""
        return self._tree(self.inputs, self.context and self.context.in_tree, self._sharding)

    @property
    def out_shardings(self):
        """Shardings of the result, as a pytree of NamedSharding; a dict by path for a plan read from a file."""
        return self._tree(self.outputs, self.context and self.context.out_tree, self._sharding)

    def abstract(self):
        """The arguments as `jax.ShapeDtypeStruct`s with their shardings, for checkpoint restoring: a pytree (args, kwargs)."""

        def make(leaf: Leaf):
            sharding = self._sharding(leaf)
            named = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
            dtype = self.context.in_dtypes[leaf.path] if self.context else leaf.dtype
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=named)

        return self._tree(self.inputs, self.context and self.context.in_tree, make)

    # ---- for people

    def explain(self, source: bool = True) -> str:
        """The plan as text: costs, shardings of inputs, collectives by source line, and the annotated source lines."""
        from shardplan.view.text import explain

        return explain(self, source=source)

    def memory(self) -> MemoryReport:
        """Predicted bytes per device: the peak, where it is, and what it is made of."""
        return self.memory_report

    def __str__(self) -> str:
        from shardplan.view.text import summary

        return summary(self)

    def _repr_html_(self) -> str:
        from shardplan.view.html import to_html

        return to_html(self, page=False)

    def html(self) -> str:
        """A page of its own."""
        from shardplan.view.html import to_html

        return to_html(self, page=True)

    def diff(self, other: Plan) -> PlanDiff:
        """What `other` does differently."""
        return PlanDiff(self, other)

    def fix(self, path: str, spec) -> Plan:
        """What if: the best plan in which inputs matching `path` have the PartitionSpec `spec`.

        Args:
            path: a path or pattern as in `pins`.
            spec: a PartitionSpec; UNCONSTRAINED dims stay free.

        Raises:
            ShardingError: when this plan was read from a file, or the pin cannot hold.
        """
        if self.context is None:
            raise ShardingError(
                "fix() needs a plan that remembers its program; this one was read from a file.\n"
                "  way out: step.plan(...) with pins={...}"
            )
        return self.context.replan({path: spec})

    @property
    def verified(self) -> Verified | None:
        """How `auto(mesh, verify=target)` came to this plan, round by round; None for a plan made without, or read from a file."""
        return self.context and self.context.verified

    def compare(self, search: Sequence[str] = SEARCHES) -> PlanComparison:
        """The same step planned by each search, judged by the one objective; `print` it.

        Args:
            search: names out of `SEARCHES`.

        Raises:
            ShardingError: when this plan was read from a file, or a search does not exist.
        """
        if unknown := [name for name in search if name not in SEARCHES]:
            raise ShardingError(f"search={unknown[0]!r} is none of {', '.join(map(repr, SEARCHES))}")
        if self.context is None:
            raise ShardingError(
                "compare() needs a plan that remembers its program; this one was read from a file.\n  way out: step.plan(...).compare()"
            )
        mine = self.search if self.context.verified is None else None  # this plan itself, unless it learned from XLA
        return PlanComparison({name: self if name == mine else self.context.replan({}, search=name) for name in search})

    def check(self, target: str | None = None, **options) -> PlanReport:
        """Compile the planned step, run nothing, and compare what XLA emitted with what was planned.

        Args:
            target: a GPU cluster that need not be here, "h200:8" or "h100:8x8"; None for the devices at hand (a known GPU, else
                emulated CPU devices).
            options: thresholds and compiler options, as for `shardplan.check`.

        Raises:
            ShardingError: when this plan was read from a file.
            CompilerMissing: the target needs packages that are not installed.
        """
        from shardplan.xla.report.plan_report import check_plan

        return check_plan(self, target, **options)

    @cached_property
    def comm_bytes(self) -> float:
        """Bytes a device sends through collectives in one step (buffer sizes, times runs)."""
        return sum(d.runs * c.bytes for d in self.decisions for m in d.reshards for c in m.collectives if c.kind != "slice")

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Pins that disagree: between what grew from one and from the other, arrays are sent. Line by line, dear pairs first."""
        sent: dict[tuple, list[float]] = {}
        pairs: dict[tuple[str, ...], float] = {}
        for d, m in ((decision, m) for decision in self.decisions for m in decision.reshards if m.pins):
            at = sent.setdefault((m.pins, d.file, d.line), [0.0, 0.0])
            seconds = d.runs * sum(c.seconds for c in m.collectives)
            at[0] += d.runs * sum(c.bytes for c in m.collectives)
            at[1] += seconds
            pairs[m.pins] = pairs.get(m.pins, 0.0) + seconds
        found = (Conflict(*at, *costs) for at, costs in sent.items())
        return tuple(sorted(found, key=lambda c: (-pairs[c.pins], c.pins, -c.seconds)))

    # ---- files

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, in a stable order."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "mesh": {"axes": list(self.mesh.axes), "sizes": list(self.mesh.sizes)},
            "cluster": self.cluster,
            "search": self.search,
            "status": self.status,
            "gap": self.gap,
            "tied": self.symmetric_layers,
            "seconds": dict(self.seconds),
            "memory": {
                "peak": self.memory_report.peak,
                "limit": self.memory_report.limit,
                "where": self.memory_report.where,
                "at_peak": dict(self.memory_report.at_peak),
                "profile": [dict(p) for p in self.memory_report.profile],
            },
            "fingerprint": self.fingerprint,
            "donated": list(self.donated),
            "inputs": {x.path: _leaf_json(x) for x in self.inputs},
            "outputs": {x.path: _leaf_json(x) for x in self.outputs},
            "unknown": [list(u) for u in self.unknown],
            "lines": [{"file": x.file, "line": x.line, "code": x.code, "seconds": x.seconds} for x in self.lines],
            "decisions": [_decision_json(d) for d in self.decisions],
        }

    def dumps(self) -> str:
        """The JSON text: one line per input, output, source line and decision, so that files diff well."""
        body = self.to_json()
        lines = []
        for name, value in body.items():
            if name in ("inputs", "outputs"):
                rows = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
                text = "{\n" + rows + "\n  }" if rows else "{}"
            elif name in ("lines", "decisions"):
                rows = ",\n".join(f"    {json.dumps(v)}" for v in value)
                text = "[\n" + rows + "\n  ]" if rows else "[]"
            else:
                text = json.dumps(value)
            lines.append(f"  {json.dumps(name)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a crash leaves the old file whole."""
        write_atomically(path, self.dumps())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            PlanFileError: naming the file and the field that is wrong.
        """
        from shardplan.plan.io import read

        return read(path)


@dataclass(frozen=True)
class PlanDiff:
    """Two plans side by side; `print` it."""

    a: Plan
    b: Plan

    @cached_property
    def leaves(self) -> tuple[tuple[str, Layout | None, Layout | None], ...]:
        """(path, layout in a, layout in b) of inputs and outputs that differ."""
        return _changed({x.path: x.layout for x in self.a.inputs}, {x.path: x.layout for x in self.b.inputs})

    @cached_property
    def decisions(self) -> tuple[tuple[tuple, PlanDecision | None, PlanDecision | None], ...]:
        """(key, decision in a, decision in b) of ops that differ in strategy or reshards."""

        def body(d: PlanDecision):
            return (d.strategy, d.operand_layouts, d.result_layouts)

        a, b = ({d.key: d for d in p.decisions} for p in (self.a, self.b))
        keys = dict.fromkeys([*a, *b])
        return tuple((k, a.get(k), b.get(k)) for k in keys if (k in a) != (k in b) or (k in a and body(a[k]) != body(b[k])))

    def __bool__(self) -> bool:
        return bool(self.a.mesh != self.b.mesh or self.leaves or self.decisions)

    def __str__(self) -> str:
        from shardplan.view.text import diff_text

        return diff_text(self)


@dataclass(frozen=True)
class PlanComparison:
    """Plans of one step by several searches; `print` it.

    Attributes:
        plans: by the name of the search.
    """

    plans: Mapping[str, Plan]

    @cached_property
    def bound(self) -> float:
        """Seconds per step below which no plan is, as far as any of the searches proved."""
        return max((p.seconds["bound"] for p in self.plans.values()), default=0.0)

    def gap(self, search: str) -> float:
        """How far a search's plan is from the bound, relative to the plan."""
        total = self.plans[search].seconds["total"]
        return (total - self.bound) / total if total else 0.0

    def __str__(self) -> str:
        from shardplan.view.text import comparison_text

        return comparison_text(self)


def _changed(a: Mapping, b: Mapping) -> tuple:
    return tuple((k, a.get(k), b.get(k)) for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k))


def layout_json(layout: Layout | None):
    """[[axes of dim 0], ...], with {"dims", "partial"} only where something is partial."""
    if layout is None:
        return None
    dims = [list(d) for d in layout.dims]
    return {"dims": dims, "partial": [list(p) for p in layout.partial]} if layout.partial else dims


def _leaf_json(x: Leaf) -> dict:
    return {"shape": list(x.shape), "dtype": x.dtype, "layout": layout_json(x.layout), "kind": x.kind}


def _decision_json(d: PlanDecision) -> dict:
    out = {
        "op": d.op, "file": d.file, "line": d.line, "function": d.function, "primitive": d.primitive, "occurrence": d.occurrence,
        "phase": d.phase, "result": d.result_type, "runs": d.runs, "seconds": d.seconds, "strategy": dict(d.strategy),
        "reads": [[layout_json(x) for x in chain] for chain in d.operand_layouts],
        "copies": list(d.copy_numbers),
        "results": [layout_json(x) for x in d.result_layouts],
        "moves": [
            {
                "operand": m.operand, "value": m.array, "before": layout_json(m.before), "after": layout_json(m.after),
                "collectives": [{"kind": c.kind, "axes": list(c.axes), "bytes": c.bytes, "seconds": c.seconds} for c in m.collectives],
                "pins": list(m.pins),
            }
            for m in d.reshards
        ],
    }  # fmt: skip
    return out
