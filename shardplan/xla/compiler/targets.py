"""Machines to compile for that need not be here: `"h200:8"` is one node of 8 H200s, `"h100:8x8"` eight nodes of 8 H100s."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardplan.errors import ShardingError
from shardplan.mesh.device import Gpu, gpus

_XLA_TYPES = {
    "int8": (2, 6),
    "float16": (10,),
    "bfloat16": (16,),
    "float32": (11,),
    "float64": (12,),
    "float8": (19, 20, 23, 24, 25, 28, 29, 33),
}
"""XLA's numbers of element types (xla_data.proto), by the names that `Gpu.flops` uses."""


@dataclass(frozen=True)
class Target:
    """A cluster: `nodes` nodes of `per_node` GPUs; devices are numbered node by node."""

    gpu: Gpu
    nodes: int
    per_node: int

    @property
    def n_devices(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.gpu.key}:{self.nodes}x{self.per_node}" if self.nodes > 1 else f"{self.gpu.key}:{self.per_node}"


def parse(text: str | Target, n_devices: int | None = None) -> Target:
    """Reads 'h200:8' (one node of up to 8; more are nodes of 8), 'h100:8x8' (nodes x GPUs per node), or 'h100' (`n_devices`).

    Raises:
        ShardingError: an unknown GPU, a malformed count, or another number of devices than the program's `n_devices`.
    """
    if isinstance(text, Target):
        target = text
    else:
        found = re.fullmatch(r"\s*([\w-]+)(?::(\d+)(?:x(\d+))?)?\s*", text.lower())
        if not found or found[1] not in gpus():
            raise ShardingError(
                f"target {text!r} is not known.\n  way out: GPU:count or GPU:nodesxcount with one of {', '.join(gpus())}, "
                'as in "h200:8" or "h100:8x8"'
            )
        gpu = gpus()[found[1]]
        count = int(found[2] or n_devices or gpu.node_size)
        per_node = int(found[3] or min(count, gpu.node_size))
        nodes = count if found[3] else count // max(per_node, 1)
        if not found[3] and count != nodes * per_node:
            raise ShardingError(
                f"target {text!r}: {count} devices do not fill nodes of {gpu.node_size}.\n  way out: the nodes, as in GPU:nodesxcount"
            )
        if nodes * per_node < 1:
            raise ShardingError(f"target {text!r} has no devices.\n  way out: a count of at least 1, as in {gpu.key}:8")
        target = Target(gpu, nodes, per_node)
    if n_devices is not None and n_devices != target.n_devices:
        way_out = (
            "nothing in it is sharded: give it arguments or in_shardings on a mesh"
            if n_devices == 1
            else f'name target "{target.gpu.key}:{n_devices}", or shard it over an AbstractMesh of {target.n_devices} devices '
            "(no devices are needed for that)"
        )
        raise ShardingError(f"the program is for {n_devices} devices and target {target} has {target.n_devices}.\n  way out: {way_out}")
    return target


SCHEDULER_MEMORY_FRACTION = 0.8
"""Fraction of a GPU's memory that XLA's compiler schedules for where no allocator states a limit (`GetSchedulerMemoryLimit` in XLA's
gpu_hlo_schedule.cc); it rematerialises what does not fit there."""


def config(gpu: Gpu) -> str:
    """The GPU in the text form of XLA's GpuTargetConfigProto, with so much memory that XLA schedules for `memory_bytes`."""
    major, minor = gpu.compute_capability
    accelerated = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    rates = "\n".join(_rate(gpu, dtype, number) for dtype in gpu.flops for number in _XLA_TYPES[dtype])
    return f"""\
gpu_device_info {{
  name: "{gpu.name}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {accelerated} }}
  core_count: {gpu.sms}
  fpus_per_core: {gpu.fp32_lanes_per_sm}
  clock_rate_ghz: {gpu.boost_ghz}
  device_memory_size: {int(gpu.memory_bytes / SCHEDULER_MEMORY_FRACTION)}
  memory_bandwidth: {int(gpu.bytes_per_s)}
  l2_cache_size: {int(gpu.l2_mib * 2**20)}
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_kib_per_sm * 1024}
  shared_memory_per_block_optin: {(gpu.shared_kib_per_sm - 1) * 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.nvlinks} }}
  matrix_unit_description {{
{rates}
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""


def _rate(gpu: Gpu, dtype: str, number: int) -> str:
    """One rate of the tensor cores: 4 units per SM and a power of two of multiply-adds per clock, at the clock that gives the peak."""
    per_clock = gpu.flops[dtype] / (gpu.sms * 4 * 2 * gpu.boost_ghz * 1e9)
    ops = 2 ** round(math.log2(per_clock))
    clock = gpu.boost_ghz * per_clock / ops
    value = f"clock_rate_ghz: {clock:.4f} units_per_core: 4 ops_per_clock: {ops}"
    return f"    rate_infos {{ key: {number} value {{ {value} }} }}"
