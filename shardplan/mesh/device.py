"""What one device and its links are, and the GPUs whose published figures, each with its source, are in `gpus.json`.

An entry of `gpus.json` that is `like` another one states only what differs; `node` is what the nodes of all GPUs share. `sources`
names the figures that each source is for. Cluster presets and compile targets are made of these figures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta

# Types of the fields of records in files: what msgspec checks, and how errors say it.
Positive = Annotated[float, Meta(gt=0, lt=1e300, description="a positive number")]
NotNegative = Annotated[float, Meta(ge=0, lt=1e300, description="a number from 0")]
Count = Annotated[int, Meta(ge=1, le=1 << 20, description="a whole number from 1")]
Text = Annotated[str, Meta(max_length=10_000, description="text")]
Texts = Annotated[tuple[Text, ...], Meta(max_length=1000, description="a list of texts")]
FLOPS = 'an object of dtype names and positive FLOP/s, "float32" among them'


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

    bytes_per_s: Positive
    latency_s: NotNegative
    efficiency: Positive = 1.0
    reduce_bytes_per_s: Annotated[Positive | None, Meta(description="a positive number or null")] = None

    @property
    def rate(self) -> float:
        """Bytes per second that large collectives reach."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: for people; of a GPU, the product.
        flops: dtype name to peak FLOP/s of a dense matrix product ("float8" and "int8" are families; "float32" on GPUs is TF32).
        bytes_per_s: peak memory bandwidth.
        memory_bytes: memory of one device that programs may use.
        kernel_latency_s: least seconds of any kernel: launch, drain, first load.
        flops_efficiency: fraction of `flops` that large matrix products reach.
        bytes_efficiency: fraction of `bytes_per_s` that large elementwise kernels reach.
        sms: streaming multiprocessors, over which XLA spreads a product by splitting it (`costs/split_products.py`); 0 for no splits.
    """

    name: Text
    flops: Annotated[Mapping[Text, Positive], Meta(description=FLOPS)] = field(hash=False)
    bytes_per_s: Positive
    memory_bytes: Positive
    kernel_latency_s: NotNegative
    flops_efficiency: Positive = 1.0
    bytes_efficiency: Positive = 1.0
    sms: Annotated[int, Meta(ge=0, le=1 << 20, description="a whole number from 0")] = 0

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype by name: of itself, of the nearest family that is listed, at last of float32."""
        near = next((keys for prefix, keys in NEAREST.items() if dtype.startswith(prefix)), ())
        return self.flops[next((key for key in (dtype, *near) if key in self.flops), "float32")]

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that large matrix products reach."""
        return self.peak(dtype) * self.flops_efficiency

    @property
    def memory_rate(self) -> float:
        """Bytes per second that large elementwise kernels reach."""
        return self.bytes_per_s * self.bytes_efficiency


NEAREST = {
    "float4": ("float8", "float16"),
    "float8": ("float8", "int8", "float16"),
    "float16": ("bfloat16",),
    "bfloat16": ("float16",),
    "complex128": ("float64",),
    "int8": ("float8", "float16"),
    "uint8": ("int8", "float8", "float16"),
    "int4": ("int8", "float8", "float16"),
    "uint4": ("int8", "float8", "float16"),
}
"""Start of a dtype's name -> the dtypes whose rate it has, where its own is not listed."""


@dataclass(frozen=True, kw_only=True)
class Gpu(Device):
    """Published figures of one GPU, and of nodes of it.

    Attributes:
        key: its short name, and that of its cluster preset.
        device_kinds: pieces of `jax.Device.device_kind`, lower case.
        node_size: GPUs per node.
        launch_s: seconds that starting any collective costs.
        intra, inter: links inside a node and between nodes.
        compute_capability: major, minor.
        fp32_lanes_per_sm, boost_ghz, l2_mib, shared_kib_per_sm, nvlinks: the chip.
        sources: names of figures -> the document they are from.
    """

    key: str
    device_kinds: tuple[str, ...]
    node_size: int
    launch_s: float
    intra: Link
    inter: Link
    compute_capability: tuple[int, int]
    fp32_lanes_per_sm: int
    boost_ghz: float
    l2_mib: float
    shared_kib_per_sm: int
    nvlinks: int
    sources: dict[str, str] = field(hash=False)


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """Every GPU by its key."""
    table = msgspec.json.decode((resources.files("shardplan.mesh") / "gpus.json").read_bytes())
    node, entries, found = table["node"], table["gpus"], {}
    known = {f.name for of in (Gpu, Link) for f in fields(of)}
    for key, entry in entries.items():
        like, own = entries.get(entry.get("like"), {}), {name: value for name, value in entry.items() if name != "like"}
        full = {**node, **like, **own, "key": key}
        full |= {level: {**full[level], "latency_s": full.pop(f"{level}_latency_s")} for level in ("intra", "inter")}
        full["sources"] = {**like.get("sources", {}), **own["sources"], **node["sources"]}
        assert known >= {*full, *full["intra"], *full["inter"]}, key
        found[key] = msgspec.convert(full, Gpu)
    return found


def gpu_of_device_kind(device_kind: str) -> Gpu | None:
    """The GPU whose `jax.Device.device_kind` this is, by the longest of its pieces; None for others.

    >>> gpu_of_device_kind("NVIDIA H100 80GB HBM3").key
    'h100'
    """
    kind = device_kind.lower()
    found = [(len(piece), gpu.key) for gpu in gpus().values() for piece in gpu.device_kinds if piece in kind]
    return gpus()[max(found)[1]] if found else None
