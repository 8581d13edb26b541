"""Which cluster a person means: a preset, a file, a `Cluster`, or the machine at hand, known by its device kind."""

from __future__ import annotations

import os
from dataclasses import replace

from shardplan.mesh.cluster import CPU_PRESET_DEVICES, Cluster, ClusterError
from shardplan.mesh.gpus import gpu_of_device_kind


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
        found = _at_hand(platform, device_kind)
    elif isinstance(cluster, str) and (cluster in Cluster.presets() or not _looks_like_path(cluster)):
        found = Cluster.preset(cluster)
    else:
        return Cluster.load(cluster)
    if "cpu" in found.platforms:
        return _share_of_machine(found, n_devices, memory_bytes)
    if memory_bytes is not None:
        return replace(found, device=replace(found.device, memory_bytes=memory_bytes))
    return found


def _looks_like_path(text: str) -> bool:
    return text.endswith(".json") or os.sep in text or os.path.exists(text)


def _at_hand(platform: str, device_kind: str) -> Cluster:
    if platform == "cpu" or "cpu" in device_kind.lower():
        return Cluster.preset("cpu")
    gpu = gpu_of_device_kind(device_kind)
    if gpu is None:
        raise ClusterError(
            f"no preset describes {device_kind!r} (platform {platform!r}).\n  presets: {', '.join(Cluster.presets())}\n"
            "  ways out: cluster= one of these, or shardplan.calibrate(mesh) to measure this machine"
        )
    return Cluster.preset(gpu.key)


def _share_of_machine(cluster: Cluster, n_devices: int, memory_bytes: float | None) -> Cluster:
    """One of `n_devices` emulated devices on this machine; the preset states one of `CPU_PRESET_DEVICES`."""
    share = CPU_PRESET_DEVICES / max(1, n_devices)
    device = cluster.device
    if memory_bytes is None:
        memory_bytes = (physical_memory_bytes() or device.memory_bytes * CPU_PRESET_DEVICES) // max(1, n_devices)
    device = replace(
        device,
        flops={k: v * share for k, v in device.flops.items()},
        bytes_per_s=device.bytes_per_s * share,
        memory_bytes=memory_bytes,
    )
    intra = replace(cluster.intra, bytes_per_s=cluster.intra.bytes_per_s * share)
    return replace(cluster, device=device, intra=intra)


def physical_memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
