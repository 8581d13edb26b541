"""What the machine is: one device, the links inside a node and between nodes, and which of them a mesh axis runs over.

A cluster is data (JSON): peaks as the maker states them, and beside them the fraction of each peak that real programs
reach. Devices are numbered row-major over the mesh; `node_size` consecutive devices share a node.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from shardplan.files import write_atomically
from shardplan.mesh.layout import MeshShape

FORMAT = "shardplan-cluster"
VERSION = 1
MAX_FILE_BYTES = 1_000_000
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


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

    bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    reduce_bytes_per_s: float | None = None

    @property
    def rate(self) -> float:
        """Bytes per second that large collectives reach."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: for people.
        flops: dtype name to peak FLOP/s of a dense matrix product ("float8" and "int8" stand for their whole families).
        bytes_per_s: peak memory bandwidth.
        memory_bytes: memory of one device.
        kernel_latency_s: least seconds of any kernel: launch, drain, first load.
        flops_efficiency: fraction of `flops` that large matrix products reach.
        bytes_efficiency: fraction of `bytes_per_s` that large elementwise kernels reach.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bytes_per_s: float
    memory_bytes: float
    kernel_latency_s: float
    flops_efficiency: float = 1.0
    bytes_efficiency: float = 1.0

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

    kind: str
    members: int
    nodes: int
    latency_s: float
    s_per_byte: float


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
        reduce_scatter: whether XLA forms reduce-scatter here (its CPU compiler never does).
        overlap: what part of a collective's seconds other work hides, as far as there is any that does not wait for it (XLA's
            schedule for GPUs: nearly all; on CPU devices both want the same cores).
        source: where the figures come from.
        launch_s: seconds that starting any collective costs.
        platforms: jax platform names this describes.
        device_kinds: pieces of `jax.Device.device_kind`, lower case, by which `resolve` knows the machine at hand.
        measured: collectives measured on the real machine; they win over the formulas where they fit.
    """

    name: str
    device: Device
    node_size: int
    intra: Link
    inter: Link
    reduce_scatter: bool = True
    overlap: float = 0.9
    source: str = ""
    launch_s: float = 0.0
    platforms: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()

    def axis(self, mesh: MeshShape, axis: str | Sequence[str]) -> AxisLink:
        """How many members of a mesh axis (or of several axes jointly) share a node, and how many nodes a group spans."""
        return _axis_link(mesh, (axis,) if isinstance(axis, str) else tuple(axis), self.node_size)

    # ---- presets and files

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names of the built-in clusters."""
        folder = resources.files("shardplan.mesh") / "presets"
        return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))

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
        return _read_preset(name)

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
        body = dataclasses.asdict(dataclasses.replace(self, device=dataclasses.replace(self.device, flops={})))
        body["device"]["flops"] = dict(self.device.flops)
        return {"format": FORMAT, "version": VERSION, **body}

    @staticmethod
    def from_json(value: Any, where: str = "cluster") -> Cluster:
        """The cluster in JSON values; `where` opens every error's text."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ClusterError(f'{where}: field "format" must be "{FORMAT}": this is no cluster file')
        if value.get("version") != VERSION:
            raise ClusterError(f'{where}: field "version" is {value.get("version")!r}; this release reads version {VERSION}')
        body = {k: v for k, v in value.items() if k not in ("format", "version")}
        fields = _record(Cluster, body, where, "")
        if not isinstance(fields["device"], dict):
            raise ClusterError(f'{where}: field "device" must be an object')
        fields["device"] = Device(**_record(Device, fields["device"], where, "device."))
        for level in ("intra", "inter"):
            if not isinstance(fields[level], dict):
                raise ClusterError(f'{where}: field "{level}" must be an object')
            fields[level] = Link(**_record(Link, fields[level], where, f"{level}."))
        if not isinstance(fields.get("measured", []), list):
            raise ClusterError(f'{where}: field "measured" must be a list')
        fields["measured"] = tuple(
            Measured(**_record(Measured, entry, where, f"measured[{i}].")) for i, entry in enumerate(fields.get("measured", []))
        )
        return Cluster(**fields)


@functools.cache
def _read_preset(name: str) -> Cluster:
    raw = (resources.files("shardplan.mesh") / "presets" / f"{name}.json").read_bytes()
    return _parse(raw, f"preset {name}")


def _parse(raw: bytes, where: str) -> Cluster:
    try:
        value = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as e:
        raise ClusterError(f"{where}: is not JSON ({e})") from None
    return Cluster.from_json(value, where)


# ---- the schema: one check per field name, the same for every record


def _positive(v) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < 1e300


def _not_negative(v) -> bool:
    return _positive(v) or (isinstance(v, (int, float)) and not isinstance(v, bool) and v == 0)


def _text(v) -> bool:
    return isinstance(v, str) and len(v) <= 10_000


def _texts(v) -> bool:
    return isinstance(v, list) and len(v) <= 1000 and all(_text(x) for x in v)


def _flops(v) -> bool:
    return isinstance(v, dict) and "float32" in v and all(_text(k) and _positive(x) for k, x in v.items())


_NESTED = {"device", "intra", "inter", "measured"}
_CHECKS: dict[str, tuple[Any, str]] = {
    "name": (_text, "text"),
    "source": (_text, "text"),
    "platforms": (_texts, "a list of texts"),
    "device_kinds": (_texts, "a list of texts"),
    "node_size": (lambda v: type(v) is int and 1 <= v <= 1 << 20, "a whole number from 1"),
    "members": (lambda v: type(v) is int and v >= 1, "a whole number from 1"),
    "nodes": (lambda v: type(v) is int and v >= 1, "a whole number from 1"),
    "reduce_scatter": (lambda v: isinstance(v, bool), "true or false"),
    "overlap": (lambda v: _not_negative(v) and v < 1, "a number from 0, less than 1"),
    "flops": (_flops, 'an object of dtype names and positive FLOP/s, "float32" among them'),
    "bytes_per_s": (_positive, "a positive number"),
    "memory_bytes": (_positive, "a positive number"),
    "latency_s": (_not_negative, "a number from 0"),
    "kernel_latency_s": (_not_negative, "a number from 0"),
    "launch_s": (_not_negative, "a number from 0"),
    "s_per_byte": (_not_negative, "a number from 0"),
    "efficiency": (_positive, "a positive number"),
    "flops_efficiency": (_positive, "a positive number"),
    "bytes_efficiency": (_positive, "a positive number"),
    "reduce_bytes_per_s": (lambda v: v is None or _positive(v), "a positive number or null"),
    "kind": (lambda v: v in KINDS, f"one of {', '.join(KINDS)}"),
}


def _record(cls, value: Any, where: str, prefix: str) -> dict[str, Any]:
    """Checks one JSON object against the fields of a dataclass; lists become tuples."""
    if not isinstance(value, dict):
        raise ClusterError(f'{where}: field "{prefix.rstrip(".")}" must be an object')
    known = {f.name: f for f in dataclasses.fields(cls)}
    for name in value:
        if name not in known:
            raise ClusterError(f'{where}: field "{prefix}{name}" is not known; known: {", ".join(known)}')
    for name, f in known.items():
        if name not in value and f.default is dataclasses.MISSING:
            raise ClusterError(f'{where}: field "{prefix}{name}" is missing')
    for name, v in value.items():
        if name not in _NESTED:
            check, wanted = _CHECKS[name]
            if not check(v):
                raise ClusterError(f'{where}: field "{prefix}{name}" must be {wanted}, not {_short(v)}')
    return {k: tuple(v) if isinstance(v, list) and k not in _NESTED else v for k, v in value.items()}


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


# ---- the machine at hand


def resolve(
    cluster: str | os.PathLike[str] | Cluster | None = None,
    platform: str = "cpu",
    device_kind: str = "cpu",
    n_devices: int = 8,
    memory_bytes: float | None = None,
) -> Cluster:
    """The cluster that a person means.

    Args:
        cluster: None for the machine at hand, a preset's name, the path of a cluster file, or a Cluster.
        platform: jax platform of the devices at hand ("cuda", "gpu", "cpu", ...).
        device_kind: `jax.Device.device_kind` of the devices at hand, e.g. "NVIDIA H100 80GB HBM3".
        n_devices: devices of the mesh; emulated CPU devices share one machine, so each has its part of it.
        memory_bytes: memory of one device where it is known better than the preset does.

    Raises:
        ClusterError: nothing fits; the text lists the presets.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        found = _by_kind(platform, device_kind)
    elif isinstance(cluster, str) and (cluster in Cluster.presets() or not _looks_like_path(cluster)):
        found = Cluster.preset(cluster)
    else:
        return Cluster.load(cluster)
    if "cpu" in found.platforms:
        return _share_of_machine(found, n_devices, memory_bytes)
    if memory_bytes is not None:
        return dataclasses.replace(found, device=dataclasses.replace(found.device, memory_bytes=memory_bytes))
    return found


def _looks_like_path(text: str) -> bool:
    return text.endswith(".json") or os.sep in text or os.path.exists(text)


def _by_kind(platform: str, device_kind: str) -> Cluster:
    kind = device_kind.lower()
    matches = [
        (len(piece), name)
        for name in Cluster.presets()
        for piece in Cluster.preset(name).device_kinds
        if piece in kind or (piece == "cpu" and platform == "cpu")
    ]
    if not matches:
        raise ClusterError(
            f"no preset describes {device_kind!r} (platform {platform!r}).\n  presets: {', '.join(Cluster.presets())}\n"
            "  ways out: cluster= one of these, or shardplan.calibrate(mesh) to measure this machine"
        )
    return Cluster.preset(max(matches)[1])


def _share_of_machine(cluster: Cluster, n_devices: int, memory_bytes: float | None) -> Cluster:
    """One of `n_devices` emulated devices on this machine; the preset states one of eight."""
    share = 8 / max(1, n_devices)
    device = cluster.device
    if memory_bytes is None:
        memory_bytes = (physical_memory_bytes() or device.memory_bytes * 8) // max(1, n_devices)
    device = dataclasses.replace(
        device,
        flops={k: v * share for k, v in device.flops.items()},
        bytes_per_s=device.bytes_per_s * share,
        memory_bytes=memory_bytes,
    )
    intra = dataclasses.replace(cluster.intra, bytes_per_s=cluster.intra.bytes_per_s * share)
    return dataclasses.replace(cluster, device=device, intra=intra)


def physical_memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
