"""The plan of a step: its record, and methods to read, question, pin, compare, save and reuse it.

    plan = step.plan(state, batch)
    print(plan.explain())
    plan.fix("state/params/**/kernel", P(None, "model")).diff(plan)
    plan.save("plan.json")

A plan fresh from the planner has a `context`, what it was planned from; one read from a file has none. Methods that rooms above
this one carry out are resolved by name when they are called: a plan imports neither views nor compilers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, ClassVar

import jax
from msgspec import structs

from shardplan import _jax
from shardplan.errors import ShardingError
from shardplan.plan import io, travel
from shardplan.plan.arguments import arguments
from shardplan.plan.batches import data_shard, global_batch
from shardplan.plan.comparison import PlanComparison, PlanDiff
from shardplan.plan.data import Conflict, Leaf, MemoryReport, PlannedReshard, PlanRecord
from shardplan.plan.padded import held

QUICK_OPS = 600
"""Ops of a step up to which all its baselines are planned to print a plan, and questions are answered on its page."""
TARGET = ("memory", "mesh", "cluster")
"""What `Plan.replan` plans for."""


class Plan(PlanRecord, frozen=True, dict=True, tag_field="format", tag=io.FORMAT):
    """How one step is sharded over one mesh; its attributes are those of `PlanRecord`, which its file has too."""

    context: ClassVar[Any] = None
    """What the plan was planned from (`step.PlanContext`); None for a plan read from a file."""

    def with_context(self, context: Any) -> Plan:
        """This plan with another context."""
        plan = structs.replace(self)
        structs.force_setattr(plan, "context", context)
        return plan

    def with_job_of(self, other: Plan) -> Plan:
        """This plan of the same step as one of the job of `other`, if it has the first argument, the state, where that has it."""
        state = next((part.num_leaves for part in arguments(self.context.in_tree)), 0) if other.job else 0
        if [x.layout for x in self.inputs[:state]] != [x.layout for x in other.inputs[:state]]:
            return self
        own = tuple(structs.replace(part, seconds=self.seconds["total"]) for part in other.job[:1])
        return structs.replace(self, job=(*own, *other.job[1:])).with_context(self.context)

    def _planned_from(self, method: str, way_out: str) -> Any:
        if self.context is None:
            raise ShardingError(
                f"{method} needs a plan that remembers its program; this one was read from a file.\n  way out: {way_out}"
            )
        return self.context

    # ---- as pytrees

    def _tree(self, leaves: tuple[Leaf, ...], tree, make: Callable[[Leaf], Any]):
        if tree is None:
            return {leaf.path: make(leaf) for leaf in leaves}
        return jax.tree.unflatten(tree, [make(leaf) for leaf in leaves])

    def _sharding(self, leaf: Leaf):
        spec = leaf.layout.spec()
        return _jax.sharding(self.context.mesh, spec) if self.context else jax.sharding.PartitionSpec(*spec)

    @property
    def in_shardings(self):
        """Shardings of the arguments: a pytree (args, kwargs) of NamedSharding; a dict by path for a plan read from a file."""
        return self._tree(self.inputs, self.context and self.context.in_tree, self._sharding)

    @property
    def out_shardings(self):
        """Shardings of the result, as a pytree of NamedSharding; a dict by path for a plan read from a file."""
        return self._tree(self.outputs, self.context and self.context.out_tree, self._sharding)

    def abstract(self):
        """The arguments as `jax.ShapeDtypeStruct`s with their shardings, as they are held between steps: a pytree (args, kwargs)."""

        def make(leaf: Leaf):
            dtype = self.context.in_dtypes[leaf.path] if self.context else leaf.dtype
            sharding = self._sharding(leaf) if self.context else None
            return held(jax.ShapeDtypeStruct(leaf.held_shape(self.mesh), dtype, sharding=sharding), leaf, self.mesh)

        return self._tree(self.inputs, self.context and self.context.in_tree, make)

    # ---- data

    def data_shard(self, dim: int = 0) -> tuple[int, int]:
        """(number, count) of the part of every batch that this process reads, as data loaders take them (`ShardOptions` of grain).

        Args:
            dim: of the batch's arrays that counts rows; 1 where the first one counts microbatches.
        """
        context = self._planned_from("data_shard", "plan of a step on its mesh: step.plan(...)")
        _refuse_abstract(context.mesh, "data_shard")
        batch = [x for x in self.inputs if x.kind == "batch"]
        return data_shard(batch, context.mesh, jax.process_index(), dim)

    def global_batch(self, batch: Any, dim: int = 0) -> Any:
        """An argument of the step made of what each process has read of it; on one process, the argument where the plan wants it.

        Args:
            batch: a pytree like one argument, or a tuple of several, of this process's part of the rows (`data_shard`) or of all rows.
            dim: as in `data_shard`.

        Raises:
            ShardingError: the step has no such argument, or an array has other rows.
        """
        context = self._planned_from("global_batch", "plan of a step on its mesh: step.plan(...)")
        _refuse_abstract(context.mesh, "global_batch")
        return global_batch(self.inputs, context.in_tree, batch, context.mesh, self.data_shard(dim), dim)

    # ---- to read

    def explain(self, source: bool = True) -> str:
        """The plan as text: costs, shardings of inputs, collectives by source line and, with `source`, the annotated source lines."""
        return resolve_name("shardplan.view.text:explain")(self, source=source)

    def memory(self) -> MemoryReport:
        """Predicted bytes per device: the peak, its source line, and its categories."""
        return self.memory_report

    def __str__(self) -> str:
        return resolve_name("shardplan.view.text:summary")(self)

    def __repr__(self) -> str:
        return resolve_name("shardplan.view.text:brief")(self)

    def _repr_html_(self) -> str:
        return resolve_name("shardplan.view.html:to_html")(self, page=False)

    def _display_(self) -> Any:
        return resolve_name("shardplan.view.explore:displayed")(self)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        return resolve_name("shardplan.view.explore:mimebundle")(self)

    def html(self) -> str:
        """The plan as an HTML page: the instrument of `explore`, with the prices that are known already."""
        return resolve_name("shardplan.view.html:to_html")(self, page=True)

    @cached_property
    def comm_bytes(self) -> float:
        """Bytes that a device sends in one step, by the ring algorithm, as `check()` counts them."""
        return sum(d.runs * r.sent_bytes(self.mesh) for d in self.decisions for r in d.reshards)

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Pins that disagree: arrays are resharded between their regions. One entry per line, the most expensive pair first."""
        sent: dict[tuple, list[float]] = {}
        pairs: dict[tuple[str, ...], float] = {}
        for d, r in ((decision, reshard) for decision in self.decisions for reshard in decision.reshards if reshard.pins):
            at = sent.setdefault((r.pins, d.file, d.line), [0.0, 0.0])
            at[0] += d.runs * r.sent_bytes(self.mesh)
            at[1] += d.runs * r.seconds
            pairs[r.pins] = pairs.get(r.pins, 0.0) + d.runs * r.seconds
        found = (Conflict(*at, *costs) for at, costs in sent.items())
        return tuple(sorted(found, key=lambda c: (-pairs[c.pins], c.pins, -c.seconds)))

    # ---- to question

    def diff(self, other: Plan) -> PlanDiff:
        """What `other`, another plan, does differently."""
        if not isinstance(other, PlanRecord):
            raise ShardingError(f"diff() takes a plan, not {type(other).__name__}.\n  way out: plan.diff(Plan.load(file))")
        return PlanDiff(self, other)

    def why(self, what: str | Sequence[str] | PlannedReshard, *, estimate: bool = False) -> Any:
        """Why an array lies as it does: who makes and reads it, the next best choices and what they would cost, which constraint binds.

        Args:
            what: inputs by a path, a pattern as in `pins` or several, all of one shape; a line "train.py:41", for its most expensive
                reshard; a reshard of `decisions`; or results of ops, "train.py:41 dot_general forward float32[8,4]", and with
                " operand 1" after it their reshards there.
            estimate: whether the plan's cost network alone prices other choices; otherwise the steps of the best six are scheduled.

        Returns:
            A `Why`; `print` it. Seconds and bytes of other choices are of plans in which nearby ops adapt: `fix` may find faster ones.

        Raises:
            ShardingError: when this plan was read from a file, or nothing in it is so called.
        """
        return resolve_name("shardplan.plan.why:why")(self._solved("why()"), what, estimate)

    def baselines(self) -> Any:
        """This plan compared with data parallelism, ZeRO-1, FSDP, tensor parallelism and mixes, found by the step's structure.

        Returns:
            A `shardplan.plan.baselines.Baselines`; `print` it. The inputs of a baseline are pinned, all else is planned for them, by
            the same objective. No rows for a step that keeps no state. A file has those of `saving`, without their layouts.

        Raises:
            ShardingError: when this plan was read from an older file, or taken over from one.
        """
        return resolve_name("shardplan.plan.baselines:recorded")(self) or self._solved("baselines()")._baselines

    @cached_property
    def _baselines(self) -> Any:
        return resolve_name("shardplan.plan.baselines:baselines")(self)

    def advice(self) -> tuple[Any, ...]:
        """What a fused kernel would make faster: attention and cross-entropies that take more than a tenth of the step.

        Returns:
            `shardplan.plan.advice.Advice`s, the largest share first: line, share, seconds now and fused, and which function gives it.
            () where there is nothing, on a CPU, and for a plan that was not solved here.
        """
        return self._advice

    @cached_property
    def _advice(self) -> tuple[Any, ...]:
        planned = self.context and self.context.planned
        return () if planned is None else resolve_name("shardplan.plan.advice:advice")(planned)

    @cached_property
    def _fastest_pure(self) -> Any:
        return resolve_name("shardplan.plan.baselines:fastest_pure")(self)

    @property
    def saving(self) -> str:
        """In words, what the plan saves of the fastest baseline's step, as it is printed; "" for a plan read from an older file.

        Of a step of more than 600 ops the baselines are data parallelism, ZeRO-1, FSDP and tensor parallelism over all axes, until
        `baselines()` was called; to plan these when it is first asked for takes about a quarter of the seconds of the plan.
        """
        return resolve_name("shardplan.plan.baselines:saving")(self)

    @property
    def answers_quickly(self) -> bool:
        """Whether `why` and `baselines` take about a second: the plan was solved here, for a step of at most 600 ops."""
        planned = self.context and self.context.planned
        return planned is not None and len(planned.graph.ops) <= QUICK_OPS

    def _solved(self, method: str) -> Plan:
        if self._planned_from(method, f"step.plan(...).{method}").planned is None:
            raise ShardingError(
                f"{method} needs a plan that was solved here; this one was taken over from a file or the cache.\n"
                f"  ways out: plan.replan().{method}, which plans the step again; auto() without plan= and cache="
            )
        return self

    def what_if(self, what: str | Sequence[str] | PlannedReshard, choice: str | Sequence) -> Plan:
        """The plan in which some arrays lie otherwise and the ops around them adapt: the warm replan, quicker than `fix`, a bit worse.

        Args:
            what: as for `why`; of repeated layers, all that it names.
            choice: a PartitionSpec; or the text of one of the choices of `why`, such as "read as P('data', None)".

        Returns:
            A plan that runs as any other, with the seconds and bytes that `why` states of the choice. What was chosen before stays
            chosen in further calls; `fix` plans all anew.

        Raises:
            ShardingError: when this plan was read from a file, or nothing in it is so called, or can lie so, or it does not fit.
        """
        return resolve_name("shardplan.plan.what_if:what_if")(self._solved("what_if()"), what, choice)

    def fix(self, path: str, spec) -> Plan:
        """The best plan that is found in which inputs matching `path` have `spec`; not slower than that of `what_if`.

        It plans the whole step again, which takes as long as the first plan; the warm replan is `what_if`.

        Args:
            path: a path or pattern as in `pins`.
            spec: a PartitionSpec; UNCONSTRAINED dims stay free.

        Raises:
            ShardingError: when this plan was read from a file, or the pin cannot hold.
        """
        return self._anew("fix()", "step.plan(...) with pins={...}", {path: spec})

    def _anew(self, method: str, way_out: str, pins: Mapping[str, Any], **target: Any) -> Plan:
        context = self._planned_from(method, way_out)
        found = context.replan(pins, near=resolve_name("shardplan.plan.what_if:near")(self, pins), **target)
        return found if target else found.with_job_of(self)

    def replan(self, pins: Mapping[str, Any] | None = None, **target: Any) -> Plan:
        """The same step planned anew: with more pins, with other memory, for another mesh or cluster. As long as the first plan takes.

        Args:
            pins: as in `auto`; those that this plan was made with stay.
            **target: `memory`, `cluster` as in `auto`; `mesh`, a mesh or a dict of axes and sizes.

        Raises:
            ShardingError: when this plan was read from a file, or no plan can be so.
        """
        if unknown := [name for name in target if name not in TARGET]:
            raise ShardingError(f"replan() takes pins, {', '.join(TARGET)}; not {unknown[0]}.\n  way out: auto(mesh, {unknown[0]}=...)")
        return self._anew("replan()", "step.plan(...).replan()", pins or {}, **target)

    def explore(self) -> Any:
        """The plan as a widget for notebooks: what its arrays and collectives could be instead, and what that would cost.

        Returns:
            An anywidget; the last line of a cell shows it. `explore().plan` is the plan that it shows now.

        Raises:
            ShardingError: anywidget is not installed.
        """
        return resolve_name("shardplan.view.explore:explore")(self)

    def compare(self, search: Sequence[str] | None = None) -> PlanComparison:
        """The same step planned by each search, judged by the one objective; `print` it.

        Args:
            search: their names, or one, as in `auto(search=...)`; None for all.

        Raises:
            ShardingError: when this plan was read from a file, or a search does not exist.
        """
        context = self._planned_from("compare()", "step.plan(...).compare()")
        mine = self.search if context.verified is None else None  # this plan itself, unless it learned from XLA
        names = [search] if isinstance(search, str) else search or context.searches
        return PlanComparison({name: self if name == mine else context.replan({}, search=name) for name in names})

    def check(self, target: str | None = None, **options) -> Any:
        """Compile the planned step, run nothing, and compare what XLA emitted with what was planned.

        Args:
            target: a GPU cluster that need not be here, "h200:8" or "h100:8x8"; None for the devices at hand (a known GPU, else
                emulated CPU devices).
            **options: thresholds and compiler options, as for `shardplan.check`, and `tolerance`: the part by which XLA's program may
                send or hold more than planned. The plan's own compiler options are set where a GPU is compiled for.

        Returns:
            A `shardplan.xla.report.check.PlanReport`; `print` it.

        Raises:
            ShardingError: when this plan was read from a file.
            CompilerMissing: the target needs packages that are not installed.
        """
        return resolve_name("shardplan.xla.report.check:check_plan")(self, target, **options)

    @property
    def verified(self) -> Any:
        """The rounds by which `auto(mesh, verify=target)` came to this plan, a `shardplan.feedback.Verified`; otherwise None."""
        return self.context and self.context.verified

    @property
    def planning_seconds(self) -> Mapping[str, float]:
        """Stage of planning -> seconds it took; {} for a plan read from a file."""
        planned = self.context and self.context.planned
        return dict(planned.seconds) if planned else {}

    # ---- to programs without shardplan

    def to_rules(self, under: str = "") -> tuple[tuple[str, jax.sharding.PartitionSpec], ...]:
        """Layouts of the inputs as (regular expression, PartitionSpec): the first that `re.search` finds in a path holds.

        The list is as short as was found, and gives every input the plan's layout (`plan/partition_rules.py`).

        Args:
            under: only inputs below this path, whose paths then begin behind it, e.g. "state/params".

        Raises:
            ShardingError: no input is there.
        """
        found = travel.rules(self, under)
        return tuple((pattern, jax.sharding.PartitionSpec(*spec)) for pattern, spec in found)

    def to_python(self) -> str:
        """A Python module with the mesh, the rules and `shardings(argument, tree, mesh)`; it imports jax and nothing of shardplan."""
        return travel.python_source(self)

    def to_logical_rules(self, axes: Mapping[str, Sequence[str | None]]) -> tuple[travel.LogicalRule, ...]:
        """Logical axis rules, as `flax.linen.logical_to_mesh_sharding` and `nnx` metadata take them.

        Args:
            axes: names of the dims by path pattern as in `pins`, such as {"**/up": ("embed", "mlp")}; others are left out.

        Raises:
            ShardingError: one name cannot say what the plan does with two arrays, or names do not fit an array.
        """
        return travel.logical_rules(self, axes)

    def to_maxtext(self, axes: Mapping[str, Sequence[str | None]]) -> str:
        """`to_logical_rules` as MaxText's YAML, for a mesh whose axes are named as MaxText's (data, fsdp, tensor, ...)."""
        return travel.maxtext(self, axes)

    # ---- to other viewers

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted schedule as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

        Raises:
            ShardingError: when this plan was read from a file: a file has no schedule; or the trace cannot be written.
        """
        io.write_text(path, resolve_name("shardplan.view.exports:perfetto")(self._solved("to_perfetto()")))

    def to_model_explorer(self, path: str | os.PathLike[str]) -> None:
        """Write the program with the plan's strategies and reshards as JSON for Google's Model Explorer.

        Raises:
            ShardingError: when this plan was read from a file: a file has no program; or the graph cannot be written.
        """
        io.write_text(path, resolve_name("shardplan.view.exports:model_explorer")(self._solved("to_model_explorer()")))

    # ---- files

    def dumps(self) -> str:
        """The JSON text: a contract, to use the layouts without shardplan, then a line per kind of leaf, decision and source line.

        It is that of `save` without `baselines`: of equal plans the same.
        """
        return io.dumps(structs.replace(self, classical=None))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, with what it is compared with (`saving`); a crash leaves the old file intact.

        Raises:
            PlanFileError: the file cannot be written.
        """
        io.write(path, self.with_baselines())

    def with_baselines(self) -> Plan:
        """This plan as it is saved: with the baselines of `saving`, planned if it was not asked for."""
        return resolve_name("shardplan.plan.baselines:with_baselines")(self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan of a file; a PlanFileError names the file and the field that is wrong."""
        return io.read(path, Plan)

    @staticmethod
    def loads(text: str | bytes) -> Plan:
        """The plan of a JSON text; a PlanFileError names the field that is wrong."""
        return io.loads(text, Plan)

    @staticmethod
    def schema() -> dict[str, Any]:
        """The JSON schema (draft 2020-12) of plan files. A reader also checks layouts against the mesh and the shapes."""
        return io.schema(Plan)


def _refuse_abstract(mesh: Any, method: str) -> None:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ShardingError(f"{method} needs devices, and {mesh} has none.\n  way out: plan on a mesh of jax.devices()")
