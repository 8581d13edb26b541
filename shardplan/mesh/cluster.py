"""What the machine is: one device, the links inside a node and between nodes, and which of them a mesh axis runs over.

A cluster is data: peaks as the maker states them, and the fraction of each peak that real programs reach. Presets are made of the
figures in `gpus.json` and of `presets/cpu.json`; users write cluster files (JSON). Devices are numbered row-major over the mesh;
`node_size` consecutive devices share a node.

    >>> h100 = Cluster.preset("h100")                          # nodes of 8
    >>> mesh = MeshShape(("data", "model"), (4, 8))
    >>> h100.axis(mesh, "model"), h100.axis(mesh, "data")
    (AxisLink(members=8, local=8, nodes=1), AxisLink(members=4, local=1, nodes=4))
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from shardplan.files import write_atomically
from shardplan.mesh.gpus import gpus, node
from shardplan.mesh.layout import MeshShape

FORMAT = "shardplan-cluster"
VERSION = 1
MAX_FILE_BYTES = 1_000_000
CPU_PRESET_DEVICES = 8
"""Emulated devices of the machine that `cpu.json` was measured on."""

CollectiveKind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

# Types of a cluster file's fields: what msgspec checks, and how errors say it.
_Positive = Annotated[float, Meta(gt=0, lt=1e300, description="a positive number")]
_NotNegative = Annotated[float, Meta(ge=0, lt=1e300, description="a number from 0")]
_Count = Annotated[int, Meta(ge=1, le=1 << 20, description="a whole number from 1")]
_Text = Annotated[str, Meta(max_length=10_000, description="text")]
_Texts = Annotated[tuple[_Text, ...], Meta(max_length=1000, description="a list of texts")]
_FLOPS = 'an object of dtype names and positive FLOP/s, "float32" among them'
_Flag = Annotated[bool, Meta(description="true or false")]


class ClusterError(ValueError):
    """A cluster that does not exist or a cluster file that cannot be used; the text names the field and the way out."""


@dataclass(frozen=True)
class Link:
    """One level of the network, as one device sees it while every device talks at once.

    Attributes:
        bytes_per_s: line rate of one device in one direction. Between nodes: one device's share of its node's adapters.
        latency_s: seconds one hop adds, however small the message.
        efficiency: fraction of the line rate that large collectives reach (bus bandwidth ÷ line rate).
        reduce_bytes_per_s: bytes of buffer per second of an all-reduce that the switch itself adds up (NVLink SHARP),
            as measured; None where switches only forward.
    """

    bytes_per_s: _Positive
    latency_s: _NotNegative
    efficiency: _Positive = 1.0
    reduce_bytes_per_s: Annotated[_Positive | None, Meta(description="a positive number or null")] = None

    @property
    def rate(self) -> float:
        """Bytes per second that large collectives reach."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: for people.
        flops: dtype name to peak FLOP/s of a dense matrix product ("float8" and "int8" are families).
        bytes_per_s: peak memory bandwidth.
        memory_bytes: memory of one device.
        kernel_latency_s: least seconds of any kernel: launch, drain, first load.
        flops_efficiency: fraction of `flops` that large matrix products reach.
        bytes_efficiency: fraction of `bytes_per_s` that large elementwise kernels reach.
    """

    name: _Text
    flops: Annotated[Mapping[_Text, _Positive], Meta(description=_FLOPS)] = field(hash=False)
    bytes_per_s: _Positive
    memory_bytes: _Positive
    kernel_latency_s: _NotNegative
    flops_efficiency: _Positive = 1.0
    bytes_efficiency: _Positive = 1.0

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype by name; the nearest family where the exact one is not listed."""
        return self.flops[_family(dtype, self.flops)]

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that large matrix products reach."""
        return self.peak(dtype) * self.flops_efficiency

    @property
    def memory_rate(self) -> float:
        """Bytes per second that large elementwise kernels reach."""
        return self.bytes_per_s * self.bytes_efficiency


def _family(dtype: str, table: Mapping[str, float]) -> str:
    """The key of `table` that prices `dtype`: itself, its family, a like-sized float, at last float32."""
    if dtype in table:
        return dtype
    for prefix, keys in (
        ("float4", ("float8", "float16")),
        ("float8", ("float8", "int8", "float16")),
        ("float16", ("bfloat16",)),
        ("bfloat16", ("float16",)),
        ("complex128", ("float64",)),
        ("int8", ("float8", "float16")),
        ("uint8", ("int8", "float8", "float16")),
        ("int4", ("int8", "float8", "float16")),
        ("uint4", ("int8", "float8", "float16")),
    ):
        if dtype.startswith(prefix):
            for key in keys:
                if key in table:
                    return key
    return "float32"


@dataclass(frozen=True)
class Measured:
    """A collective measured on the real machine: seconds = latency_s + bytes × s_per_byte (bytes as in `collective`).

    Attributes:
        kind: one of `KINDS`.
        members: devices in one group.
        nodes: nodes that one group spans.
        latency_s: the fitted constant.
        s_per_byte: the fitted slope.
    """

    kind: Annotated[CollectiveKind, Meta(description=f"one of {', '.join(KINDS)}")]
    members: _Count
    nodes: _Count
    latency_s: _NotNegative
    s_per_byte: _NotNegative


@dataclass(frozen=True)
class AxisLink:
    """What a collective over some mesh axes runs over.

    Attributes:
        members: devices in one group.
        local: members of one group that share a node (the fewest of any of its nodes).
        nodes: nodes that one group spans (the most of any group).
    """

    members: int
    local: int
    nodes: int


@dataclass(frozen=True)
class Cluster:
    """A machine: how fast a device computes and how fast devices talk.

    Attributes:
        name: for people, and the preset's name.
        device: what one device is.
        node_size: consecutive devices that share a node.
        intra: the network inside a node.
        inter: the network between nodes.
        reduce_scatter: whether XLA forms reduce-scatter here (fact: cpu-no-reduce-scatter).
        overlap: fraction of a collective's seconds that independent compute hides, as far as there is any (nearly all in XLA's
            schedules for GPUs; none on CPU devices, where both want the same cores).
        source: where the figures come from.
        launch_s: seconds that starting any collective costs.
        platforms: jax platform names this describes.
        device_kinds: pieces of `jax.Device.device_kind`, lower case, by which `resolve` knows the machine at hand.
        measured: collectives measured on the real machine; they replace the formulas where they match.
    """

    name: _Text
    device: Device
    node_size: _Count
    intra: Link
    inter: Link
    reduce_scatter: _Flag = True
    overlap: Annotated[float, Meta(ge=0, lt=1, description="a number from 0, less than 1")] = 0.9
    source: _Text = ""
    launch_s: _NotNegative = 0.0
    platforms: _Texts = ()
    device_kinds: _Texts = ()
    measured: Annotated[tuple[Measured, ...], Meta(description="a list")] = ()

    def axis(self, mesh: MeshShape, axis: str | Sequence[str]) -> AxisLink:
        """How many members of a mesh axis (or of several axes jointly) share a node, and how many nodes a group spans."""
        return _axis_link(mesh, (axis,) if isinstance(axis, str) else tuple(axis), self.node_size)

    # ---- presets and files

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names of the built-in clusters."""
        return tuple(sorted((*gpus(), "cpu")))

    @staticmethod
    def preset(name: str) -> Cluster:
        """A built-in cluster.

        Raises:
            ClusterError: no such preset; the text lists them.
        """
        if name not in Cluster.presets():
            raise ClusterError(
                f"cluster {name!r} is not known.\n  presets: {', '.join(Cluster.presets())}\n"
                "  ways out: one of these, the path of a cluster file (.json), or a Cluster"
            )
        return _preset(name)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Reads a cluster file.

        Raises:
            ClusterError: missing, too large, not JSON, of another format, or with a field that is wrong; the text names it.
        """
        where = os.fspath(path)
        try:
            with open(where, "rb") as f:
                raw = f.read(MAX_FILE_BYTES + 1)
        except OSError as e:
            raise ClusterError(f"cluster file {where}: cannot be read ({e.strerror})") from None
        if len(raw) > MAX_FILE_BYTES:
            raise ClusterError(f"cluster file {where}: larger than {MAX_FILE_BYTES} bytes, so it is no cluster file")
        return _parse(raw, f"cluster file {where}")

    def scaled(self, compute: float) -> Cluster:
        """The same cluster with devices on which everything takes `compute` times as long; links stay."""
        d = self.device
        flops = {dtype: rate / compute for dtype, rate in d.flops.items()}
        device = dataclasses.replace(d, flops=flops, bytes_per_s=d.bytes_per_s / compute, kernel_latency_s=d.kernel_latency_s * compute)
        return dataclasses.replace(self, name=f"{self.name}, compute x {compute:g}", device=device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a cluster file that `load` reads back equal; a crash leaves the old file whole."""
        write_atomically(path, json.dumps(self.to_json(), indent=2) + "\n")

    def to_json(self) -> dict[str, Any]:
        """The cluster as plain JSON values."""
        device = dataclasses.replace(self.device, flops=dict(self.device.flops))
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(dataclasses.replace(self, device=device))}

    @staticmethod
    def from_json(value: Any, where: str = "cluster") -> Cluster:
        """The cluster in JSON values; `where` opens every error's text."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ClusterError(f'{where}: field "format" must be "{FORMAT}": this is no cluster file')
        if value.get("version") != VERSION:
            raise ClusterError(f'{where}: field "version" is {value.get("version")!r}; this release reads version {VERSION}')
        body = {k: v for k, v in value.items() if k not in ("format", "version")}
        if unknown := _unknown_field(Cluster, body):
            name, known = unknown
            raise ClusterError(f'{where}: field "{name}" is not known; known: {", ".join(known)}')
        try:
            found = msgspec.convert(body, Cluster)
        except msgspec.ValidationError as error:
            raise ClusterError(f"{where}: {_reason(str(error), body)}") from None
        if "float32" not in found.device.flops:
            raise ClusterError(f'{where}: field "device.flops" must be {_FLOPS}')
        return found


@functools.cache
def _preset(name: str) -> Cluster:
    if name not in gpus():
        return _parse((resources.files("shardplan.mesh") / "presets" / f"{name}.json").read_bytes(), f"preset {name}")
    gpu, of = gpus()[name], node()
    intra, inter = (
        Link(link.bytes_per_s, latency_s, link.efficiency, link.reduce_bytes_per_s)
        for link, latency_s in ((gpu.intra, of.intra_latency_s), (gpu.inter, of.inter_latency_s))
    )
    return Cluster(
        name=name,
        device=Device(
            gpu.name, gpu.flops, gpu.bytes_per_s, gpu.memory_bytes, of.kernel_latency_s, gpu.flops_efficiency, gpu.bytes_efficiency
        ),
        node_size=of.size,
        intra=intra,
        inter=inter,
        source=". ".join(f"{figures}: {source}" for figures, source in {**gpu.sources, **of.sources}.items()),
        launch_s=of.launch_s,
        platforms=("cuda", "gpu"),
        device_kinds=gpu.device_kinds,
    )


def _parse(raw: bytes, where: str) -> Cluster:
    try:
        value = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as e:
        raise ClusterError(f"{where}: is not JSON ({e})") from None
    return Cluster.from_json(value, where)


def _unknown_field(cls: type, value: Any, prefix: str = "") -> tuple[str, tuple[str, ...]] | None:
    """(path of a field that a record of the file has and `cls` lacks, the fields of `cls`); None where all are known."""
    if isinstance(value, list):
        found = (_unknown_field(cls, x, f"{prefix.rstrip('.')}[{i}].") for i, x in enumerate(value))
        return next((x for x in found if x), None)
    if not isinstance(value, dict):
        return None
    known = tuple(f.name for f in dataclasses.fields(cls))
    if extra := [name for name in value if name not in known]:
        return f"{prefix}{extra[0]}", known
    inner = (_unknown_field(_RECORDS[name], value[name], f"{prefix}{name}.") for name in known if name in _RECORDS and name in value)
    return next((x for x in inner if x), None)


_RECORDS: dict[str, type] = {"device": Device, "intra": Link, "inter": Link, "measured": Measured}
_WANTED: dict[str, str] = {
    name: next((m.description for m in getattr(hint, "__metadata__", ())), "an object")
    for cls in (Cluster, Device, Link, Measured)
    for name, hint in get_type_hints(cls, include_extras=True).items()
}


def _reason(error: str, body: dict[str, Any]) -> str:
    """Why a field is refused, from msgspec's text and the path in it: "Expected `float` > 0.0 - at `$.device.bytes_per_s`"."""
    text, _, path = error.partition(" - at `$.")
    steps = re.findall(r"[^.\[\]]+", path.rstrip("`").removesuffix("[...]"))
    if missing := re.search(r"missing required field `(.*)`", text):
        return f'field "{_dotted([*steps, missing[1]])}" is missing'
    if steps[-1].isdigit() and steps[-2] not in _RECORDS:
        steps.pop()  # an entry of a list of texts: the field is named, not the entry
    value: Any = body
    for step in steps:
        value = value[int(step) if isinstance(value, list | tuple) else step]
    wanted = "an object" if steps[-1].isdigit() else _WANTED[steps[-1]]
    return f'field "{_dotted(steps)}" must be {wanted}, not {_short(value)}'


def _dotted(steps: Sequence[str]) -> str:
    """["measured", "0", "kind"] -> 'measured[0].kind'."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(steps))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- which links a group of axes runs over


@functools.lru_cache(maxsize=4096)
def _axis_link(mesh: MeshShape, axes: tuple[str, ...], node_size: int) -> AxisLink:
    members = mesh.size(*axes)  # KeyError names an unknown axis
    place = [mesh.axes.index(a) for a in dict.fromkeys(axes)]
    rest = [i for i in range(len(mesh.axes)) if i not in place]
    node = np.arange(mesh.n_devices).reshape(mesh.sizes) // node_size
    groups = np.sort(node.transpose(rest + place).reshape(-1, members), axis=1)
    starts = np.ones(groups.shape, bool)
    starts[:, 1:] = groups[:, 1:] != groups[:, :-1]
    nodes = int(starts.sum(axis=1).max(initial=1))
    runs = np.diff(np.append(np.flatnonzero(starts), groups.size))  # members of a group on each of its nodes
    return AxisLink(members, int(runs.min(initial=members)), nodes)
