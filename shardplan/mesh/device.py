"""What one device and its links are, and the GPUs whose published figures, each with its source, are in `gpus.json`.

An entry of `gpus.json` that is `like` another one states only what differs; `node` is what the nodes of all GPUs share. `sources`
names the figures that each source is for. Cluster presets and compile targets are made of these figures. `gpu_rates.json` has what
benchmarks/fit_rates.py fitted to published measurements; a preset has these rates where its GPU has an entry there.
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
ATTENTION = 'an object of "forward" and "backward", with an efficiency for every one of the ascending head sizes'
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
        small_rate: fraction of `rate` that a protocol for small messages reaches, at `latency_s` a hop.
        bulk_start_s: seconds that a collective takes besides at the full rate, before anything moves.
        bulk_latency_s: seconds that a hop adds beyond `latency_s` at the full rate.
        ring_loss: a ring of n members reaches `rate` / (1 + ring_loss / n).
        sum_loss: as `ring_loss`, of rings that add up what they pass on.
        send_bytes_per_s: bytes per second of a message from one device to another, until it is so large that
            `send_latency_s` more bring the full rate; None where that is reached at once.
        send_latency_s: see above.
    """

    bytes_per_s: Positive
    latency_s: NotNegative
    efficiency: Positive = 1.0
    reduce_bytes_per_s: Annotated[Positive | None, Meta(description="a positive number or null")] = None
    small_rate: Annotated[float, Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    bulk_start_s: NotNegative = 0.0
    bulk_latency_s: NotNegative = 0.0
    ring_loss: NotNegative = 0.0
    sum_loss: NotNegative = 0.0
    send_bytes_per_s: Annotated[Positive | None, Meta(description="a positive number or null")] = None
    send_latency_s: NotNegative = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that large collectives reach."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """What any rate of kernels says of the measurements it was fitted to.

    Attributes:
        sustained: fraction of the rate of short runs that is left in a step that keeps the GPU at its power limit.
        rows: measured kernels that were fitted.
        median_error: median of |log(predicted seconds ÷ measured seconds)| over them.
        p90_error: its 90th percentile.
        source: whose measurements.
    """

    sustained: Positive = 1.0
    rows: Annotated[int, Meta(ge=0, le=1 << 20, description="a whole number from 0")] = 0
    median_error: NotNegative = 0.0
    p90_error: NotNegative = 0.0
    source: Text = ""


@dataclass(frozen=True)
class ProductRate(MeasuredRate):
    """How fast a GPU multiplies matrices of one dtype, by their shape: fitted to measured products (`rates.product_seconds`).

    Attributes:
        efficiency: fraction of the peak that large products reach in a short run.
        fill: contracted elements whose seconds each tile of the result takes besides its own: filling the pipeline, writing the tile.
        edge: elements by which small tiles are slower: a tile of r x c takes 1 + edge (1/r + 1/c) times as long per element.
        latency_s: seconds that any product takes besides.
    """

    efficiency: Positive
    fill: NotNegative
    edge: NotNegative
    latency_s: NotNegative


@dataclass(frozen=True)
class AttentionRate(MeasuredRate):
    """How fast a GPU computes attention in one kernel, forward or backward: fitted to measured kernels (`rates.attention_rate`).

    Attributes:
        head_sizes: elements of a head, ascending, of which kernels were measured.
        efficiency: for each of them, the fraction of the peak of products that long sequences reach in a short run.
        short, short_causal: 1 / (1 + short / length) of that is left with so many keys per query; `short_causal` under a causal mask.
    """

    head_sizes: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=100, description="a list of positive numbers")]
    efficiency: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=100, description="a list of positive numbers")]
    short: NotNegative
    short_causal: NotNegative

    def __post_init__(self):
        if len(self.head_sizes) != len(self.efficiency) or sorted(set(self.head_sizes)) != list(self.head_sizes):
            raise ValueError("head_sizes ascend, and efficiency has a number for each of them")


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: for people; of a GPU, the product.
        flops: dtype name to peak FLOP/s of a dense matrix product ("float8" and "int8" are families; "float32" on GPUs is TF32).
        bytes_per_s: peak memory bandwidth.
        memory_bytes: memory of one device that programs may use.
        kernel_latency_s: least seconds of any kernel: launch, drain, first load.
        flops_efficiency: fraction of `flops` that large matrix products reach, of dtypes that `products` does not have.
        bytes_efficiency: fraction of `bytes_per_s` that large elementwise kernels reach.
        sms: streaming multiprocessors, over which XLA spreads a product by splitting it (`costs/split_products.py`); 0 for no splits.
        products: dtype name to the rates of its matrix products by shape; where there are none, every shape is as fast.
        attention: "forward" and "backward" to the rates of fused attention kernels; without them these run as large products do.
        elements_per_s: results that elementwise kernels compute, however few bytes these have; 0 for no limit.
    """

    name: Text
    flops: Annotated[Mapping[Text, Positive], Meta(description=FLOPS)] = field(hash=False)
    bytes_per_s: Positive
    memory_bytes: Positive
    kernel_latency_s: NotNegative
    flops_efficiency: Positive = 1.0
    bytes_efficiency: Positive = 1.0
    sms: Annotated[int, Meta(ge=0, le=1 << 20, description="a whole number from 0")] = 0
    products: Annotated[Mapping[Text, ProductRate], Meta(description="an object of dtype names and product rates")] = field(
        default_factory=dict, hash=False
    )
    attention: Annotated[Mapping[Text, AttentionRate], Meta(description=ATTENTION)] = field(default_factory=dict, hash=False)
    elements_per_s: NotNegative = 0.0

    def family(self, dtype: str) -> str:
        """The dtype of `flops` by whose rate a dtype is priced: itself, the nearest that is listed, at last float32."""
        near = next((keys for prefix, keys in NEAREST.items() if dtype.startswith(prefix)), ())
        return next((key for key in (dtype, *near) if key in self.flops), "float32")

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s for a dtype by name."""
        return self.flops[self.family(dtype)]

    def product_rate(self, dtype: str) -> ProductRate | None:
        """Rates of products by shape; None if none were measured for the dtype or one of the same peak."""
        if not self.sms:
            return None
        family = self.family(dtype)
        same = (key for key, peak in self.flops.items() if peak == self.flops[family] and key in self.products)
        return self.products.get(family) or next((self.products[key] for key in same), None)

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that large matrix products reach in a step."""
        rate = self.product_rate(dtype)
        return self.peak(dtype) * (rate.efficiency * rate.sustained if rate else self.flops_efficiency)

    @property
    def memory_rate(self) -> float:
        """Bytes per second that large elementwise kernels reach."""
        return self.bytes_per_s * self.bytes_efficiency

    def computed_s(self, elements):
        """Least seconds of results of elementwise kernels, or of what takes as long (`rates.py`); of a number or an array of them."""
        return elements / self.elements_per_s if self.elements_per_s else 0.0


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
        full["sources"] = {**node["sources"], **like.get("sources", {}), **own["sources"]}
        assert known >= {*full, *full["intra"], *full["inter"]}, key
        found[key] = msgspec.convert(full, Gpu)
    return found


@dataclass(frozen=True)
class NetworkKind:
    """A kind of network between nodes.

    Attributes:
        latency_s: seconds that a hop takes beyond those of the GPU's own network.
        source: of the figure.
    """

    latency_s: NotNegative
    source: str


@functools.cache
def networks() -> Mapping[str, NetworkKind]:
    """Kinds of networks by the names that clusters call them."""
    table = msgspec.json.decode((resources.files("shardplan.mesh") / "gpus.json").read_bytes())
    return msgspec.convert(table["networks"], dict[str, NetworkKind])


@dataclass(frozen=True)
class FittedLinks:
    """What was fitted to measured collectives of a GPU: constants of links by name, how many rows, and the errors of their logs."""

    launch_s: NotNegative
    intra: dict[str, float]
    inter: dict[str, float]
    rows: int
    median_error: NotNegative
    p90_error: NotNegative
    source: str


@dataclass(frozen=True)
class PredictedSteps:
    """How well published training steps on a GPU are predicted: how many, and the 90th percentile of |log(predicted ÷ published)|."""

    rows: int
    p90_error: NotNegative


@dataclass(frozen=True)
class FittedRates:
    """An entry of `gpu_rates.json`."""

    sources: dict[str, str]
    products: dict[str, ProductRate]
    attention: dict[str, AttentionRate]
    links: FittedLinks
    steps: PredictedSteps | None


@functools.cache
def fitted_rates() -> Mapping[str, FittedRates]:
    """What was fitted to measurements, by the GPU's key."""
    return msgspec.json.decode((resources.files("shardplan.mesh") / "gpu_rates.json").read_bytes(), type=dict[str, FittedRates])


def gpu_of_device_kind(device_kind: str) -> Gpu | None:
    """The GPU whose `jax.Device.device_kind` this is, by the longest of its pieces; None for others.

    >>> gpu_of_device_kind("NVIDIA H100 80GB HBM3").key
    'h100'
    """
    kind = device_kind.lower()
    found = [(len(piece), gpu.key) for gpu in gpus().values() for piece in gpu.device_kinds if piece in kind]
    return gpus()[max(found)[1]] if found else None
