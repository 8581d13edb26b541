"""The options of `auto`, checked: the mesh, the cluster, the memory limit and the saved plan that they stand for."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax

from shardplan.costs.options import Options
from shardplan.errors import ShardingError, warn
from shardplan.ir.parse import Traced
from shardplan.mesh.cluster import Cluster, resolve
from shardplan.mesh.layout import MeshShape
from shardplan.plan import Plan
from shardplan.plan.reuse import padded_inputs
from shardplan.processes import process_numbers
from shardplan.searches import SEARCHES
from shardplan.strategies.register import registered_text
from shardplan.units import format_memory, parse_bytes
from shardplan.xla_model.compiler_options import Flag, Flags, XlaOptions, candidates, hides_unasked, merged

MEMORY_SAVING = {"slight": 0.25, "moderate": 0.5, "heavy": 0.75}
"""Words for memory: how far from the peak of the fastest plan (0) to the least possible peak (1)."""

RESERVE = 0.05
"""Fraction of a device's memory that is left free where a plan fits in the rest: for the driver and NCCL, and because XLA's memory is
predicted (docs/measurements.md)."""

LEAST_BYTES = 1000
"""A smaller limit is gigabytes that were meant and not said."""

GPU_PLATFORMS = ("gpu", "cuda", "rocm")
"""Names of jax for the platform of GPUs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AutoOptions:
    """The options of `auto`, checked."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    in_shardings: Any
    out_shardings: Any
    pins: Mapping[str, Any] | None
    memory: float | str | None
    search: str
    time_limit: float | None
    cluster: str | Cluster | None
    compute_scale: float
    overlap: bool
    user_shardings: Literal["keep", "hint", "ignore"]
    plan: str | os.PathLike[str] | Plan | None
    state_like: str | os.PathLike[str] | Plan | None
    pad_state: bool
    cache: str | os.PathLike[str] | None
    verify: str | bool | None
    process_timeout: float
    compiler_options: Mapping[str, Flag] | Literal["auto"] | None
    keep_unused: bool
    jit_arguments: Mapping[str, Any]
    jit_options: Mapping[str, Any]

    def __post_init__(self):
        if not isinstance(self.mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
            raise ShardingError(
                f"auto() takes a mesh first, not {type(self.mesh).__name__}.\n  way out: auto(jax.make_mesh((8,), ('data',), "
                "axis_types=(jax.sharding.AxisType.Auto,)))(step)"
            )
        if odd := [axis for axis in self.mesh.axis_names if not str(axis).isascii()]:
            raise ShardingError(
                f"mesh axis {odd[0]!r}: XLA ends the process at names outside ASCII.\n  way out: another name, such as 'data'"
            )
        _refuse_unknown(self)
        known = {"search": tuple(SEARCHES), "user_shardings": ("keep", "hint", "ignore"), "overlap": (True, False)}
        for name, words in {**known, "pad_state": (False, True)}.items():
            if (given := getattr(self, name)) not in words:
                raise ShardingError(f"{name}={given!r} is none of {', '.join(map(repr, words))}.\n  way out: {name}={words[0]!r}")
        if not (isinstance(self.compute_scale, (int, float)) and 0 < self.compute_scale < float("inf")):
            raise ShardingError(f"compute_scale={self.compute_scale!r} is no positive number.\n  way out: compute_scale=1.0")
        if self.pins is not None and not (isinstance(self.pins, Mapping) and all(isinstance(pattern, str) for pattern in self.pins)):
            raise ShardingError(
                f"pins={self.pins!r} is no mapping of path patterns to PartitionSpecs.\n"
                '  way out: pins={"params/**/kernel": P(None, "model")}, or in_shardings by position'
            )
        for name in ("time_limit", "process_timeout"):
            seconds = getattr(self, name)
            number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0
            if not number and not (seconds is None and name == "time_limit"):
                raise ShardingError(f"{name}={seconds!r} is no number of seconds above 0.\n  way out: {name}=30")
        if self.memory_saving and self.search == "recursive":
            raise ShardingError(
                f"memory={self.memory!r} needs to know the fastest plan first.\n  ways out: search='ilp', or a number of bytes"
            )
        _ = self.given_bytes, self.saved_plan, self.state_plan, self.own_flags  # a wrong one is refused at once
        if self.cache is not None and not isinstance(self.cache, (str, os.PathLike)):
            raise ShardingError(f'cache={self.cache!r} is no folder.\n  way out: cache="~/.cache/shardplan"')

    @functools.cached_property
    def shape(self) -> MeshShape:
        """Names and sizes of the mesh axes."""
        return MeshShape(tuple(map(str, self.mesh.axis_names)), tuple(int(n) for n in self.mesh.axis_sizes))

    @functools.cached_property
    def saved_plan(self) -> Plan | None:
        """The plan to reuse; None also for a file that this process lacks, where the mesh has other processes, which may have it."""
        return None if self._others_may_have_it else _plan_of("plan", self.plan)

    @property
    def _others_may_have_it(self) -> bool:
        missing = isinstance(self.plan, (str, os.PathLike)) and not os.path.exists(self.plan)
        return missing and len(process_numbers(self.mesh)) > 1

    def plan_of_processes(self, text: str | None) -> Plan | None:
        """The plan to reuse: this process's own, else one that another process has the text of.

        Raises:
            PlanFileError: there is to be one, and no process has it.
        """
        if self.saved_plan is not None or self.plan is None:
            return self.saved_plan
        return Plan.load(self.plan) if text is None else Plan.loads(text)  # pyright: ignore

    @functools.cached_property
    def state_plan(self) -> Plan | None:
        """The plan whose state's layouts are kept."""
        found = _plan_of("state_like", self.state_like)
        if found is not None and found.mesh != self.shape:
            raise ShardingError(f"state_like is a plan for mesh {found.mesh}, the step is for mesh {self.shape}.\n  way out: that mesh")
        return found

    def depends_on(self, program: str, asked: Options, donated: tuple[str, ...]) -> dict[str, Any]:
        """All that the plan of a program depends on, for the cache."""
        values = {f.name: getattr(asked, f.name) for f in fields(asked) if f.name not in ("progress", "xla", "corrections")}
        pins = {name: sorted(map(repr, (values.pop(name) or {}).items())) for name in ("in_pins", "out_pins", "pins")}
        flags = self.compiler_options if self.compiler_options is None else sorted(self.own_flags.items()) or "auto"
        return {
            **values,
            **pins,
            "program": program,
            "donated": donated,
            "flags": flags,
            "pad_state": self.pads_state,
            "mesh": list(self.shape),
            "cluster": repr(self.machine),
            "rules": registered_text(),
        }

    @property
    def pads_state(self) -> bool:
        """Whether state may be held padded: where that is asked for, and where the plan to reuse does."""
        return self.pad_state or (self.saved_plan is not None and self.saved_plan.pads_state)

    def padded_inputs(self, traced: Traced) -> frozenset[int]:
        """Numbers of the inputs of a step that may be held padded."""
        return padded_inputs(traced, self.pads_state, self.state_plan)

    @functools.cached_property
    def machine(self) -> Cluster:
        """The cluster that is planned for, its compute scaled."""
        if isinstance(self.mesh, jax.sharding.Mesh):
            device = self.mesh.devices.flat[0]
            platform, kind = device.platform, device.device_kind
        else:
            kind = self._abstract_kind or "cpu"
            platform = "cpu" if kind == "cpu" else "gpu"
        found = resolve(self.cluster or self._cluster_of_plan, platform, kind, n_devices=self.mesh.size)
        return found if self.compute_scale == 1 else found.scaled(float(self.compute_scale))

    @property
    def _abstract_kind(self) -> str | None:
        """The kind of devices that an AbstractMesh has, where it says one."""
        return getattr(getattr(self.mesh, "abstract_device", None), "device_kind", None)

    @property
    def _cluster_of_plan(self) -> str | None:
        """The preset of GPUs that the plan to reuse is priced for."""
        name = self.saved_plan and self.saved_plan.cluster
        return name if name and name.partition("@")[0] in Cluster.presets() and name != "cpu" else None

    def warn_of_prices(self) -> None:
        """Warns where the prices of what is planned now are not those that the user may think."""
        if self.cluster is not None:
            return
        named = "cluster=, the name of a preset (" + ", ".join(Cluster.presets()) + ") or a cluster file"
        if self.saved_plan is not None:
            if self.saved_plan.cluster != self.machine.name:
                warn(f"plan= is priced as {self.saved_plan.cluster}, what is planned again as {self.machine.name}.\n  way out: {named}")
        elif isinstance(self.mesh, jax.sharding.AbstractMesh) and self._abstract_kind is None and "cpu" in self.machine.platforms:
            memory = format_memory(self.machine.device.memory_bytes)
            warn(
                f"an AbstractMesh does not say what its devices are: without cluster= they are priced as {self.mesh.size} emulated "
                f"devices of this machine's CPU, {memory} each.\n  way out: {named}"
            )

    def warn_of_other_prices(self) -> None:
        """Warns where a plan that is reused has other prices than the user names."""
        if self.cluster is not None and self.saved_plan is not None and self.saved_plan.cluster != self.machine.name:
            warn(
                f"plan= is priced as {self.saved_plan.cluster}, not as {self.machine.name}, which cluster= names; it is reused as "
                "it is.\n"
                "  way out: without plan=, which plans anew"
            )

    @functools.cached_property
    def own_flags(self) -> Flags:
        """The user's own compiler options; {} for "auto" and None."""
        given = self.compiler_options
        if given is None or given == "auto":
            return {}
        if isinstance(given, Mapping) and all(isinstance(k, str) and isinstance(v, (bool, int, float, str)) for k, v in given.items()):
            return dict(given)
        raise ShardingError(
            f'compiler_options={given!r} is none of "auto", None and a mapping of names to numbers, booleans and text.\n'
            '  way out: compiler_options={"xla_gpu_enable_pipelined_all_gather": True}'
        )

    def flags(self, planned: Flags) -> dict[str, Flag]:
        """The compiler options of a plan: what was planned unless None was asked for, and the user's own."""
        return merged({} if self.compiler_options is None else planned, self.own_flags)

    @functools.cached_property
    def xla(self) -> tuple[XlaOptions, ...]:
        """What the plan may choose among: nothing for CPUs and for None, and never against the user's own options."""
        if self.compiler_options is None or "cpu" in self.machine.platforms:
            return (XlaOptions.of(self.own_flags),)
        some = candidates(hides_unasked(self.machine.device.name))
        return tuple(dict.fromkeys(XlaOptions.of(merged(x.flags(), self.own_flags)) for x in some))

    @property
    def on_gpus(self) -> bool:
        """Whether the step is for GPUs: those of the mesh, or on an AbstractMesh those of the cluster."""
        if isinstance(self.mesh, jax.sharding.Mesh):
            return self.mesh.devices.flat[0].platform in GPU_PLATFORMS
        return bool({*self.machine.platforms} & {*GPU_PLATFORMS})

    @property
    def memory_saving(self) -> float:
        """How far the peak has to go from the fastest plan's (0) towards the least possible one (1)."""
        return MEMORY_SAVING.get(self.memory, 0.0) if isinstance(self.memory, str) else 0.0

    @functools.cached_property
    def given_bytes(self) -> float | None:
        """The memory in bytes per device that the user gave, if it is an amount."""
        if self.memory is None or self.memory == "adaptive" or self.memory_saving:
            return None
        try:
            found = float("inf") if self.memory == "disable" else parse_bytes(self.memory)
        except ValueError:
            words = ", ".join(("adaptive", "disable", *MEMORY_SAVING))
            raise ShardingError(
                f"memory={self.memory!r} is no amount of memory.\n  ways out: bytes, text like '80GB' or '74.5GiB', or one of {words}"
            ) from None
        if found < LEAST_BYTES:
            raise ShardingError(f"memory={self.memory!r} is {found:g} bytes per device.\n  way out: text with a unit, such as '80GB'")
        return found

    @property
    def reserve(self) -> float:
        """The fraction of the memory that is left free where a plan fits in the rest; none where the user says what to take."""
        return RESERVE if self.given_bytes is None and not self.memory_saving else 0.0

    @property
    def memory_limit(self) -> float | None:
        """Bytes per device, or None for no limit."""
        limit = self.machine.device.memory_bytes if self.given_bytes is None else self.given_bytes
        return None if limit == float("inf") else float(limit)


def _plan_of(name: str, given: Any) -> Plan | None:
    """The plan that an option gives itself or by its file."""
    if given is None or isinstance(given, Plan):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Plan.load(given)
    raise ShardingError(
        f"{name}={type(given).__name__} is neither a plan nor the path of a plan file.\n"
        f"  ways out: {name}=step.plan(state, batch), or {name}='plan.json' as plan.save() wrote it"
    )


JIT_ARGUMENTS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
"""Options of `auto` that say which arguments are static or donated, as `jax.jit` takes them."""


def _refuse_unknown(options: AutoOptions) -> None:
    """Refuses options that neither `auto` nor `jax.jit` has, before anything is planned."""
    of_jit = [name for name in inspect.signature(jax.jit).parameters if name not in ("fun", "device", "backend")]
    own = [f.name for f in fields(AutoOptions) if not f.name.startswith("jit_")]
    known = [*dict.fromkeys([*own, *JIT_ARGUMENTS, *of_jit])]
    for name in {**options.jit_options, **options.jit_arguments}:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise ShardingError(f"auto() has no option {name!r}{meant}\n  options: {', '.join(known[1:])}")
