"""The GPUs that clusters and compile targets are made of: their published figures, each with its source, in `gpus.json`.

An entry that is `like` another one states only what differs. `sources` names the figures that each source is for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import msgspec


class GpuLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line rate of one GPU in one direction, the fraction that collectives reach, all-reduce bytes per second in the switch."""

    bytes_per_s: float
    efficiency: float
    reduce_bytes_per_s: float | None = None


class GpuNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the nodes of all GPUs share: GPUs per node, and latencies (see `shardplan.mesh.cluster`)."""

    size: int
    launch_s: float
    kernel_latency_s: float
    intra_latency_s: float
    inter_latency_s: float
    sources: dict[str, str]


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published figures of one GPU.

    Attributes:
        key: its short name, and that of its cluster preset.
        name: the product.
        device_kinds: pieces of `jax.Device.device_kind`, lower case.
        flops: dtype to peak FLOP/s of a dense product on the tensor cores; "float32" is TF32, "float8" and "int8" are families.
        flops_efficiency: fraction of `flops` that large products reach.
        bytes_per_s: peak memory bandwidth.
        bytes_efficiency: fraction of `bytes_per_s` that large elementwise kernels reach.
        memory_bytes: memory that the driver lets programs use.
        intra, inter: links inside a node and between nodes.
        compute_capability: major, minor.
        sms, fp32_lanes_per_sm, boost_ghz, l2_mib, shared_kib_per_sm, nvlinks: the chip.
        sources: names of figures -> the document they are from.
    """

    key: str
    name: str
    device_kinds: tuple[str, ...]
    flops: dict[str, float]
    flops_efficiency: float
    bytes_per_s: float
    bytes_efficiency: float
    memory_bytes: int
    intra: GpuLink
    inter: GpuLink
    compute_capability: tuple[int, int]
    sms: int
    fp32_lanes_per_sm: int
    boost_ghz: float
    l2_mib: float
    shared_kib_per_sm: int
    nvlinks: int
    sources: dict[str, str]


@functools.cache
def gpus() -> Mapping[str, Gpu]:
    """Every GPU by its key."""
    table = _table()["gpus"]
    full = {key: {**table.get(entry.get("like"), {}), **entry} for key, entry in table.items()}
    for key, entry in full.items():
        inherited = table[entry.pop("like")]["sources"] if "like" in entry else {}
        entry |= {"key": key, "sources": {**inherited, **entry["sources"]}}
    return MappingProxyType({key: msgspec.convert(entry, Gpu) for key, entry in full.items()})


@functools.cache
def node() -> GpuNode:
    """What the nodes of all GPUs share."""
    return msgspec.convert(_table()["node"], GpuNode)


def gpu_of_device_kind(device_kind: str) -> Gpu | None:
    """The GPU whose `jax.Device.device_kind` this is, by the longest of its pieces; None for others.

    >>> gpu_of_device_kind("NVIDIA H100 80GB HBM3").key
    'h100'
    """
    kind = device_kind.lower()
    found = [(len(piece), gpu.key) for gpu in gpus().values() for piece in gpu.device_kinds if piece in kind]
    return gpus()[max(found)[1]] if found else None


@functools.cache
def _table() -> dict[str, Any]:
    return msgspec.json.decode((resources.files("shardplan.mesh") / "gpus.json").read_bytes())
