"""Seconds that kernels take on a GPU, by JAX's profiler: what launches and the host take does not count."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

NO_GRAPHS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
"""Compiler options: inside CUDA graphs kernels lose the names of their instructions."""
RUNS = 10


class KernelEvent(NamedTuple):
    """A run of a kernel: its instruction and module in XLA's program, '' where the profiler names none, its own name, nanoseconds."""

    instruction: str
    module: str
    kernel: str
    start_ns: float
    ns: float


def kernel_events(run: Callable[[], Any]) -> list[KernelEvent]:
    """Runs a function under the profiler: what it ran on GPUs. None where there is no GPU, or no profiler for it."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        events = []
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    for e in line.events if line.name.startswith("Stream") else ():
                        stats = {str(name): value for name, value in e.stats}
                        of = str(stats.get("hlo_op", "")), str(stats.get("hlo_module", ""))
                        events.append(KernelEvent(*of, e.name, e.start_ns, e.duration_ns))
        return events


def kernels_s(op: Callable, arrays: tuple[Any, ...]) -> float:
    """Seconds of all kernels of one run of `op(*arrays)`, each run waited for; 0 where the profiler sees none."""
    program = jax.jit(op).lower(*arrays).compile(NO_GRAPHS if jax.default_backend() == "gpu" else None)
    arrays = jax.device_put(arrays)
    jax.block_until_ready(program(*arrays))

    def run():
        for _ in range(RUNS):
            jax.block_until_ready(program(*arrays))

    return sum(e.ns for e in kernel_events(run)) * 1e-9 / RUNS
