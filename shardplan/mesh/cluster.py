"""What the machine is: devices, the links inside a node and between nodes, and which of them a mesh axis runs over.

A cluster is data: peaks as the maker states them, and the fraction of each peak that real programs reach. Presets are made of the
figures in `gpus.json`, of what measurements say instead in `gpu_rates.json`, and of `presets/cpu.json`; users write cluster files
(JSON). Devices are numbered row-major over the mesh; `node_size` consecutive devices share a node.

    >>> h100 = Cluster.preset("h100")                          # nodes of 8
    >>> mesh = MeshShape(("data", "model"), (4, 8))
    >>> h100.axis(mesh, "model"), h100.axis(mesh, "data")
    (AxisLink(members=8, local=8, nodes=1), AxisLink(members=4, local=1, nodes=4))
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from shardplan.errors import ShardingError
from shardplan.files import read_limited, write_atomically
from shardplan.mesh.device import (
    FLOPS,
    Count,
    Device,
    FittedRates,
    Link,
    NotNegative,
    ProductRate,
    Text,
    Texts,
    fitted_rates,
    gpu_of_device_kind,
    gpus,
    networks,
)
from shardplan.mesh.layout import MeshShape
from shardplan.units import clean, fit_middle

FORMAT = "shardplan-cluster"
VERSION = 1
MAX_FILE_BYTES = 1_000_000
MAX_TEXT = 400
CPU_PRESET_DEVICES = 8
"""Emulated devices of the machine that `cpu.json` was measured on."""

CollectiveKind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


class ClusterError(ShardingError):
    """A cluster that does not exist or a cluster file that cannot be used; the text names the field and the way out."""


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
    members: Count
    nodes: Count
    latency_s: NotNegative
    s_per_byte: NotNegative


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
        name: for people.
        device: what one device is.
        node_size: consecutive devices that share a node.
        intra: the network inside a node.
        inter: the network between nodes.
        reduce_scatter: whether XLA forms reduce-scatter here (fact: cpu-no-reduce-scatter).
        overlap: of a second in which a kernel and a collective run at once, the fraction that is saved; the rest is lost, because they
            slow each other. 0 if no collective overlaps with kernels (on CPU devices both want the same cores).
        source: where the figures come from.
        launch_s: seconds that starting any collective costs.
        platforms: jax platform names this describes.
        device_kinds: pieces of `jax.Device.device_kind`, lower case, by which `resolve` knows the machine at hand.
        measured: collectives measured on the real machine; they replace the formulas where they match.
        collective_error: 90th percentile of |log(predicted ÷ measured seconds)| of collectives; None if none were measured.
        step_error: the same of whole training steps.
    """

    name: Text
    device: Device
    node_size: Count
    intra: Link
    inter: Link
    reduce_scatter: Annotated[bool, Meta(description="true or false")] = True
    overlap: Annotated[float, Meta(ge=0, lt=1, description="a number from 0, less than 1")] = 0.8
    source: Text = ""
    launch_s: NotNegative = 0.0
    platforms: Texts = ()
    device_kinds: Texts = ()
    measured: Annotated[tuple[Measured, ...], Meta(description="a list")] = ()
    collective_error: Annotated[NotNegative | None, Meta(description="a number from 0, or null")] = None
    step_error: Annotated[NotNegative | None, Meta(description="a number from 0, or null")] = None

    @property
    def interference(self) -> float:
        """Of a second in which a kernel and a collective run at once, the fraction that is lost."""
        return 1.0 - self.overlap

    def axis(self, mesh: MeshShape, axis: str | Sequence[str]) -> AxisLink:
        """How many members of a mesh axis (or of several axes jointly) share a node, and how many nodes a group spans."""
        return _axis_link(mesh, (axis,) if isinstance(axis, str) else tuple(axis), self.node_size)

    def scaled(self, compute: float) -> Cluster:
        """The same cluster with devices on which everything takes `compute` times as long; links stay."""
        d = self.device
        flops = {dtype: rate / compute for dtype, rate in d.flops.items()}
        products = {dtype: replace(rate, latency_s=rate.latency_s * compute) for dtype, rate in d.products.items()}
        latency_s = d.kernel_latency_s * compute
        device = replace(
            d,
            flops=flops,
            bytes_per_s=d.bytes_per_s / compute,
            kernel_latency_s=latency_s,
            products=products,
            elements_per_s=d.elements_per_s / compute,
        )
        return replace(self, name=f"{self.name}, compute x {compute:g}", device=device)

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names of the built-in clusters."""
        return tuple(sorted((*gpus(), "cpu")))

    @staticmethod
    def preset(name: str, nodes: str | None = None) -> Cluster:
        """A built-in cluster, with another network between its nodes if the name or `nodes` says so.

        Args:
            name: one of `presets()`, or one with "@" and the network, as in "h100@1600G-roce".
            nodes: the network: its Gbit/s per node and its kind, as in "400G", "3200G-efa".

        Raises:
            ClusterError: no such preset or network; the text lists them.
        """
        gpu, at, network = f"{name}@{nodes}".partition("@") if nodes is not None else name.partition("@")
        if gpu not in Cluster.presets() or (at and gpu == "cpu"):
            raise ClusterError(
                f"cluster {gpu + at + network!r} is not known.\n  presets: {', '.join(Cluster.presets())}\n"
                '  ways out: one of these, one with a network as in "h100@1600G-roce", the path of a cluster file (.json), or a Cluster'
            )
        return _with_network(_preset(gpu), network) if at else _preset(gpu)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Reads a cluster file.

        Raises:
            ClusterError: missing, too large, not JSON, of another format, or with a field that is wrong; the text names it.
        """
        where = f"cluster file {os.fspath(path)}"
        try:
            raw = read_limited(path, MAX_FILE_BYTES)
        except OSError as e:
            presets = ", ".join(Cluster.presets())
            raise ClusterError(
                f"{where}: cannot be read ({e.strerror}).\n  ways out: a preset ({presets}), or a file by shardplan.calibrate"
            ) from None
        if len(raw) > MAX_FILE_BYTES:
            raise ClusterError(f"{where}: larger than {MAX_FILE_BYTES} bytes, so it is no cluster file")
        try:
            value = json.loads(raw.decode("utf-8"))
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # escapes of half a character are text in no encoding
        except (ValueError, RecursionError) as e:
            raise _wrong(where, f"is not JSON ({e})") from None
        return Cluster.from_json(value, where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a cluster file that `load` reads back equal; a crash leaves the old file whole.

        Raises:
            ClusterError: it cannot be written.
        """
        try:
            write_atomically(path, json.dumps(self.to_json(), indent=2) + "\n")
        except OSError as e:
            raise ClusterError(
                f"cluster file {os.fspath(path)}: cannot be written ({e.strerror or e}).\n  way out: a file in a folder that exists"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """The cluster as plain JSON values."""
        device = replace(self.device, flops=dict(self.device.flops))
        return {"format": FORMAT, "version": VERSION, **asdict(replace(self, device=device))}

    @staticmethod
    def from_json(value: Any, where: str = "cluster") -> Cluster:
        """The cluster in JSON values; `where` opens every error's text."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ClusterError(f'{where}: field "format" must be "{FORMAT}": this is no cluster file')
        if value.get("version") != VERSION:
            raise _wrong(where, f'field "version" is {value.get("version")!r}; this release reads version {VERSION}')
        body = {k: v for k, v in value.items() if k not in ("format", "version")}
        _refuse_unknown_fields(body, where)
        try:
            found = msgspec.convert(body, Cluster)
        except msgspec.ValidationError as error:
            raise _wrong(where, _reason(str(error), body)) from None
        if "float32" not in found.device.flops:
            raise ClusterError(f'{where}: field "device.flops" must be {FLOPS}')
        return found


@functools.cache
def _preset(name: str) -> Cluster:
    if name not in gpus():
        with resources.as_file(resources.files("shardplan.mesh") / "presets" / f"{name}.json") as path:
            return Cluster.load(path)
    gpu = gpus()[name]
    made = Cluster(
        name=name,
        device=Device(*(getattr(gpu, f.name) for f in fields(Device))),
        node_size=gpu.node_size,
        intra=gpu.intra,
        inter=gpu.inter,
        source=". ".join(f"{figures}: {source}" for figures, source in gpu.sources.items()),
        launch_s=gpu.launch_s,
        platforms=("cuda", "gpu"),
        device_kinds=gpu.device_kinds,
    )
    found = fitted_rates().get(name)
    return replace(made, **_fitted(made, found)) if found else made


def _fitted(cluster: Cluster, rates: FittedRates) -> dict[str, Any]:
    """What measurements say of a cluster instead of data sheets."""
    links = rates.links
    return {
        "device": replace(cluster.device, products=rates.products, attention=rates.attention),
        "intra": Link(cluster.intra.bytes_per_s, **links.intra),
        "inter": Link(cluster.inter.bytes_per_s, **links.inter),
        "launch_s": links.launch_s,
        "collective_error": links.p90_error,
        "step_error": rates.steps.p90_error if rates.steps else None,
        "source": ". ".join([cluster.source, *(f"Instead, {figures}: {source}" for figures, source in rates.sources.items())]),
    }


def _with_network(cluster: Cluster, text: str) -> Cluster:
    """The cluster with the network that "1600G-roce" says: Gbit/s of a node's adapters together, and their kind."""
    kinds, found = networks(), re.fullmatch(r"(\d+(?:\.\d+)?)G(?:-(\w+))?", text)
    if not found or float(found[1]) == 0 or (found[2] or "ib") not in kinds:
        raise ClusterError(
            f"cluster {cluster.name + '@' + text!r}: network {text!r} is not known; say a node's Gbit/s and, if need be, a kind\n"
            f"  kinds: {', '.join(kinds)}\n"
            f'  ways out: as in "{cluster.name}@3200G", "{cluster.name}@1600G-roce", or a cluster file (.json)'
        )
    kind = kinds[found[2] or "ib"]
    rate, latency_s = float(found[1]) * 1e9 / 8 / cluster.node_size, cluster.inter.latency_s + kind.latency_s
    source = f"{cluster.source}. Network {text}: {found[1]} Gbit/s per node; {kind.source}"
    return replace(
        cluster, name=f"{cluster.name}@{text}", inter=replace(cluster.inter, bytes_per_s=rate, latency_s=latency_s), source=source
    )


# ---- why a cluster file is refused

_RECORDS: dict[str, type] = {"device": Device, "intra": Link, "inter": Link, "measured": Measured}
_WANTED: dict[str, str] = {
    name: next((m.description for m in getattr(hint, "__metadata__", ())), "an object")
    for cls in (Cluster, *_RECORDS.values(), ProductRate)
    for name, hint in get_type_hints(cls, include_extras=True).items()
}


def _refuse_unknown_fields(body: dict[str, Any], where: str) -> None:
    records = [("", Cluster, body)]
    for name, cls in _RECORDS.items():
        value = body.get(name)
        every = [(f"{name}[{i}].", x) for i, x in enumerate(value)] if isinstance(value, list) else [(f"{name}.", value)]
        records += [(at, cls, x) for at, x in every if isinstance(x, dict)]
    products = device.get("products") if isinstance(device := body.get("device"), dict) else None
    if isinstance(products, dict):
        records += [(f"device.products.{dtype}.", ProductRate, x) for dtype, x in products.items() if isinstance(x, dict)]
    for at, cls, record in records:
        known = [f.name for f in fields(cls)]
        for field in record:
            if field not in known:
                raise _wrong(where, f'field "{at}{fit_middle(field, 60)}" is not known; known: {", ".join(known)}')


def _wrong(where: str, what: str) -> ClusterError:
    """An error whose text a file cannot make long, nor let steer a terminal."""
    return ClusterError(f"{where}: {clean(fit_middle(what, MAX_TEXT))}")


def _reason(error: str, body: dict[str, Any]) -> str:
    """Why a field is refused, from msgspec's text and the path in it: "Expected `float` > 0.0 - at `$.device.bytes_per_s`"."""
    text, _, path = error.partition(" - at `$.")
    steps = re.findall(r"[^.\[\]]+", path.rstrip("`").removesuffix("[...]"))
    if missing := re.search(r"missing required field `(.*)`", text):
        return f'field "{_dotted([*steps, missing[1]])}" is missing'
    if not steps or (steps[-1] not in _WANTED and not steps[-1].isdigit()):
        return text  # a place that the text does not name
    if steps[-1].isdigit() and steps[-2:-1] and steps[-2] not in _RECORDS:
        steps.pop()  # an entry of a list of texts: the field is named, not the entry
    if "[...]." in path:  # in an entry of an object, which the text does not name
        return f'field "{_dotted(steps)}" must be {_WANTED[steps[-1]]}'
    value: Any = body
    for step in steps:
        value = value[int(step) if isinstance(value, list | tuple) else step]
    wanted, text = "an object" if steps[-1].isdigit() else _WANTED[steps[-1]], repr(value)
    return f'field "{_dotted(steps)}" must be {wanted}, not {text if len(text) <= 60 else text[:57] + "..."}'


def _dotted(steps: Sequence[str]) -> str:
    """["measured", "0", "kind"] -> 'measured[0].kind'."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(steps))


# ---- which links a group of axes runs over


@functools.lru_cache(maxsize=4096)
def _axis_link(mesh: MeshShape, axes: tuple[str, ...], node_size: int) -> AxisLink:
    members = mesh.size(*axes)  # KeyError names an unknown axis
    place = [mesh.axes.index(a) for a in dict.fromkeys(axes)]
    rest = [i for i in range(len(mesh.axes)) if i not in place]
    return group_link(np.arange(mesh.n_devices).reshape(mesh.sizes).transpose(rest + place).reshape(-1, members).tolist(), node_size)


def group_link(groups: Sequence[Sequence[int]], node_size: int) -> AxisLink:
    """What collectives of these device groups run over."""
    on_nodes = [Counter(device // node_size for device in group).values() for group in groups if group]
    return AxisLink(max(map(len, groups), default=1), min(map(min, on_nodes), default=1), max(map(len, on_nodes), default=1))


# ---- which cluster a person means


def resolve(
    cluster: str | os.PathLike[str] | Cluster | None = None,
    platform: str = "cpu",
    device_kind: str = "cpu",
    n_devices: int = 8,
) -> Cluster:
    """The cluster that a person means.

    Args:
        cluster: None for the machine at hand, a preset's name, the path of a cluster file, or a Cluster.
        platform: jax platform of the devices at hand ("cuda", "gpu", "cpu", ...).
        device_kind: `jax.Device.device_kind` of the devices at hand, e.g. "NVIDIA H100 80GB HBM3".
        n_devices: devices of the mesh; emulated CPU devices share one machine, so each has its part of it.

    Raises:
        ClusterError: nothing fits; the text lists the presets.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, (str, os.PathLike, type(None))):
        raise ClusterError(
            f"cluster={cluster!r} is no cluster.\n  ways out: a preset's name ({', '.join(Cluster.presets())}), "
            "the path of a cluster file, or a Cluster"
        )
    if cluster is None:
        found = _at_hand(platform, device_kind)
    elif isinstance(cluster, str) and (cluster.partition("@")[0] in Cluster.presets() or not _looks_like_path(cluster)):
        found = Cluster.preset(cluster)
    else:
        return Cluster.load(cluster)
    return _share_of_machine(found, n_devices) if "cpu" in found.platforms else found


def _looks_like_path(text: str) -> bool:
    return text.endswith(".json") or os.sep in text or os.path.exists(text)


def _at_hand(platform: str, device_kind: str) -> Cluster:
    if platform == "cpu" or "cpu" in device_kind.lower():
        return Cluster.preset("cpu")
    if gpu := gpu_of_device_kind(device_kind):
        return Cluster.preset(gpu.key)
    raise ClusterError(
        f"no preset describes {device_kind!r} (platform {platform!r}).\n  presets: {', '.join(Cluster.presets())}\n"
        "  ways out: cluster= one of these, or shardplan.calibrate(mesh) to measure this machine"
    )


def _share_of_machine(cluster: Cluster, n_devices: int) -> Cluster:
    """One of `n_devices` emulated devices on this machine; the preset states one of `CPU_PRESET_DEVICES`."""
    share, device, intra = CPU_PRESET_DEVICES / max(1, n_devices), cluster.device, cluster.intra
    device = replace(
        device,
        flops={dtype: rate * share for dtype, rate in device.flops.items()},
        bytes_per_s=device.bytes_per_s * share,
        memory_bytes=(physical_memory_bytes() or device.memory_bytes * CPU_PRESET_DEVICES) // max(1, n_devices),
    )
    return replace(cluster, device=device, intra=replace(intra, bytes_per_s=intra.bytes_per_s * share))


def physical_memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
