"""Compiles a step for the devices at hand or for an absent GPU cluster: HLO text, memory, warnings, or the error.

The program is lowered here and compiled in a child process with a time limit: a compiler crash is a result, not the end of this
process. Nothing is executed; arguments may be `jax.ShapeDtypeStruct`s, and the mesh an `AbstractMesh` of any size.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardplan import _jax
from shardplan.errors import ShardingError
from shardplan.mesh.device import gpu_of_device_kind
from shardplan.mesh.layout import MeshShape
from shardplan.units import format_memory
from shardplan.xla.compiler import _backend, child, targets
from shardplan.xla.compiler._backend import lower
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import HloCollective, collectives
from shardplan.xla.hlo.diagnostics import Buffer, Rematerialization, buffers, rematerializations
from shardplan.xla.hlo.products import HloProduct, flops, products
from shardplan.xla.hlo.text import HloModule, read

CHILD = _backend.__file__
"""The program of the child process that compiles."""
Options = Mapping[str, bool | int | float | str]
"""Compiler options: XLA flags without the dashes."""

FLAGS: Options = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False,
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""XLA flags for absent GPUs: autotuning runs kernels on the GPU; the other two emit collective kernels that abort without one."""

WITHOUT_TRITON: Options = {"xla_gpu_enable_triton_gemm": False}
"""Flags of a second attempt: untuned, XLA finds no tiles in Triton for some products, which autotuning on a GPU gives to cuBLAS."""
TRITON_ERROR = re.compile(r"output tile sizes|triton", re.IGNORECASE)


class CompilerMissingError(ShardingError, ImportError):
    """The packages that compile for absent GPUs are not installed."""


@dataclass(frozen=True)
class XlaMemory:
    """Bytes per device that XLA's buffer assignment reports; `alias_bytes` of the outputs reuse buffers of donated arguments."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"peak {format_memory(self.peak_bytes)} (arguments {format_memory(self.argument_bytes)}, "
            f"outputs {format_memory(self.output_bytes)} of which {format_memory(self.alias_bytes)} reuse arguments, "
            f"temporaries {format_memory(self.temp_bytes)})"
        )


@dataclass(frozen=True)
class Compiled:
    """A compiled step, or the reason that there is none.

    Attributes:
        ok, error: whether the compiler finished, and its message if not.
        text, memory: HLO after every pass, in schedule order, and bytes per device; '' and None when not ok.
        stderr: of the compiler.
        target: the cluster compiled for; None for emulated CPU devices.
        mesh: names the axes of collectives and warnings; None when the program has no mesh.
        n_devices: number of devices the program runs on.
        seconds: time of the compiler itself.
        before: HLO before any pass, of all devices together.
        live_range, assignment: XLA's live-range and buffer-assignment dumps; '' for CPUs.
        dropped_flags: flags this XLA does not know.
        retried: the error of a first attempt, after which it was compiled with the flags `WITHOUT_TRITON`; '' otherwise.
    """

    ok: bool
    error: str
    text: str
    memory: XlaMemory | None
    stderr: str
    target: Target | None
    mesh: MeshShape | None
    n_devices: int
    seconds: float
    before: str = ""
    live_range: str = ""
    assignment: str = ""
    dropped_flags: tuple[str, ...] = ()
    retried: str = ""

    def __repr__(self) -> str:
        return f"Compiled({self.devices}, {self.memory or self.error}, {self.seconds:.1f} s)"

    @property
    def devices(self) -> str:
        """The target, or how many emulated devices."""
        return str(self.target or f"{self.n_devices} CPU devices")

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the target's memory; None for CPUs. XLA also compiles steps that do not fit."""
        return None if self.target is None or self.memory is None else self.memory.peak_bytes <= self.target.gpu.memory_bytes

    @cached_property
    def module(self) -> HloModule:
        """The parsed text; RuntimeError when the compile failed."""
        if not self.ok:
            raise RuntimeError(f"there is no compiled module: {self.error}")
        return read(self.text)

    @cached_property
    def collectives(self) -> tuple[HloCollective, ...]:
        """Every collective, in schedule order (`hlo.collectives`)."""
        return collectives(self.module, self.mesh)

    @cached_property
    def products(self) -> tuple[HloProduct, ...]:
        """Matrix products and convolutions."""
        return products(self.module)

    @cached_property
    def flops(self) -> float:
        """Of the matrix products and convolutions of one step, on one device."""
        return float(sum(p.total_flops for p in self.products))

    @cached_property
    def recomputed_flops(self) -> float:
        """The part of `flops` that XLA's rematerialization pass repeats to save memory."""
        return float(sum(p.total_flops for p in self.products if p.rematerialised))

    @cached_property
    def balance(self) -> float | None:
        """Flops of all devices over those of the program: 1 where no device repeats another's products; None without products."""
        total = flops(self.before) if self.before else 0.0
        return self.flops * self.n_devices / total if total else None

    @property
    def live_bytes(self) -> int:
        """Bytes of the buffers that XLA's dump lists at its peak; below `memory.peak_bytes` where more is alive at another moment."""
        return sum(b.bytes for b in self.peak)

    @cached_property
    def peak(self) -> tuple[Buffer, ...]:
        """The buffers alive at the memory peak, the largest first; () for CPUs, where XLA writes no dump."""
        return buffers(self.live_range, self.assignment, self.module, self.before)

    @cached_property
    def rematerializations(self) -> tuple[Rematerialization, ...]:
        """XLA's "Involuntary full rematerialization" warnings."""
        return rematerializations(self.stderr, self.mesh, self.before)


def available() -> bool:
    """Whether the packages for absent GPUs are installed."""
    found = importlib.util.find_spec
    return found("jax_plugins") is not None and any(found(f"jax_plugins.xla_cuda{v}") for v in (13, 12))


def compile(
    function,
    *args: Any,
    target: str | Target | None = None,
    mesh: MeshShape | None = None,
    options: Options | None = None,
    timeout_s: float = 900,
    **kwargs: Any,
) -> Compiled:
    """Compiles `function(*args, **kwargs)` without running it; the same program is compiled once per process.

    Args:
        function: a `jax.jit`ed function, a plain one, or a `jax.stages.Lowered` (then without arguments, and lowered
            for the target's platform, 'cuda' or 'cpu').
        *args, **kwargs: its arguments; arrays or shapes.
        target: 'h200:8', 'h100:8x8', ...; None for the devices at hand (a known GPU, else emulated CPU devices).
        mesh: names the axes; by default the mesh found in the program's shardings.
        options: compiler options; they win over those that `jit` was given.
        timeout_s: time limit of the compiler.

    Raises:
        ValueError: the target is unknown or has another number of devices than the program.
        CompilerMissing: the target needs packages that are not installed.
    """
    target = target_at_hand() if target is None else target
    lowered = lower_for(target, function, *args, **kwargs)
    module, request = _backend.payload(lowered)
    options = {**_jax.compiler_options(lowered), **(options or {})}
    cluster = None if target is None else targets.parse(target, request["n_devices"])
    request = _complete(request, cluster, options)
    environment = _environment(request)
    key = hashlib.sha256(module + json.dumps([request, environment["XLA_FLAGS"]], sort_keys=True).encode()).hexdigest()
    done = _DONE.get(key) or _attempts(module, request, environment, cluster, timeout_s)
    if done.ok:
        _DONE[key] = done
        if len(_DONE) > _KEEP:
            del _DONE[next(iter(_DONE))]
    meshes = (MeshShape(tuple(names), tuple(sizes)) for names, sizes in request["meshes"])
    return replace(done, mesh=mesh or next(meshes, None))


_KEEP = 16
_DONE: dict[str, Compiled] = {}
"""The last compiled steps, by program and request."""


def lower_for(target: str | Target | None, function, *args: Any, **kwargs: Any):
    """Traces and lowers `function` for the target's platform; a step that is lowered stays. Raises what `compile` raises."""
    if hasattr(function, "compiler_ir"):
        if args or kwargs:
            raise TypeError(f"a lowered step takes no arguments; it got {len(args)} positional ones and {list(kwargs)}")
        return function
    target = target_at_hand() if target is None else target
    if isinstance(target, str):
        targets.parse(target)  # a misspelt target is refused before a long trace
    if target is not None and not available():
        raise CompilerMissingError(
            f'compiling for target {str(target)!r} needs XLA\'s GPU compiler: pip install "shardplan[gpu-check]" '
            "(no GPU, driver or CUDA toolkit is needed)"
        )
    return lower(function, *args, platform="cuda" if target is not None else "cpu", **kwargs)


def compile_here(lowered, target: str) -> str:
    """The HLO text of a step that `lower_for` lowered for the same target, compiled in this process, which a crash ends."""
    module, request = _backend.payload(lowered)
    request = _complete(request, targets.parse(target, request["n_devices"]), _jax.compiler_options(lowered))
    with tempfile.TemporaryDirectory(prefix="shardplan-") as folder:
        return _backend.compiled(module, request, Path(folder))[0].hlo_modules()[0].to_string()


def _complete(request: dict, target: Target | None, options: Options | None) -> dict:
    """The request with flags, options and devices."""
    cluster = target and {
        "topology_name": target.gpu.key,
        "topology": f"1x{target.nodes}x{target.per_node}",
        "target_config": targets.config(target.gpu),
    }
    asked = {name: value for name, value in (options or {}).items() if target or not name.startswith("xla_gpu_")}
    return {**request, "options": asked, "flags": dict(FLAGS) if target else {}, "cluster": cluster}


def _attempts(module: bytes, request: dict, environment: dict, target: Target | None, timeout_s: float) -> Compiled:
    """The compiled program; where XLA failed at a Triton product of an absent GPU, compiled without these."""
    done = _in_child(module, request, environment, target, timeout_s)
    if done.ok or target is None or not TRITON_ERROR.search(done.error) or WITHOUT_TRITON.keys() & request["options"].keys():
        return done
    again = _in_child(module, {**request, "flags": {**request["flags"], **WITHOUT_TRITON}}, environment, target, timeout_s)
    return replace(again, retried=done.error, seconds=done.seconds + again.seconds) if again.ok else done


def _in_child(module: bytes, request: dict, environment: dict, target: Target | None, timeout_s: float) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="shardplan-") as name:
        folder = Path(name)
        (folder / "module.mlirbc").write_bytes(module)
        (folder / "request.json").write_text(json.dumps(request))
        started = time.perf_counter()
        code = child.run(CHILD, folder, environment, timeout_s)
        seconds = time.perf_counter() - started
        stderr_text = (folder / "stderr").read_text(errors="replace")
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        memory = result.get("memory")
        if code is None:
            error = f"the compiler was still running after {timeout_s:g} s; raise timeout_s"
        elif "error" in result:
            error = result["error"]
        elif code or memory is None:
            error = f"the compiler crashed ({_signal(code)}): {_tail(stderr_text)}"
        else:
            error = ""
        return Compiled(
            ok=not error,
            error=error,
            text=(folder / "module.hlo").read_text() if not error else "",
            memory=_memory(memory, target) if memory and not error else None,
            stderr=stderr_text,
            target=target,
            mesh=None,
            n_devices=request["n_devices"],
            seconds=result.get("seconds", seconds),
            before=_text(folder, "before.hlo"),
            live_range=_text(folder / "dump", "*live-range.txt"),
            assignment=_text(folder / "dump", "*buffer-assignment.txt"),
            dropped_flags=tuple(result.get("dropped", ())),
        )


def _environment(request: dict) -> dict[str, str]:
    """The parent's environment with CPU as the only platform, warnings enabled and no visible GPU."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    if not request["cluster"]:
        flags += f" --xla_force_host_platform_device_count={request['n_devices']}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parents[3])]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _text(folder: Path, pattern: str) -> str:
    return next((p.read_text(errors="replace") for p in sorted(folder.glob(pattern))), "")


def _memory(sizes: Mapping[str, int], target: Target | None) -> XlaMemory:
    total = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]
    peak = (target and sizes.get("peak_memory")) or total  # XLA for CPU leaves the temporaries out of its peak
    return XlaMemory(sizes["argument"], sizes["output"], sizes["temp"], sizes["alias"], peak)


def _signal(code: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit status {code}"


def _tail(stderr: str) -> str:
    """The end of stderr: the fatal line, else the last error and the lines after it, else the last lines."""
    stderr = re.sub(r"(F\d{4} [^\n]*)?\*\*\* Begin stack trace \*\*\*.*?(\*\*\* End stack trace \*\*\*|$)", "", stderr, flags=re.DOTALL)
    lines = [line for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    errors = [n for n, line in enumerate(lines) if re.match(r"E\d{4} ", line)]
    return "\n".join(fatal[-1:] or lines[errors[-1] if errors else -8 :][:8]) or "it said nothing"


def target_at_hand() -> str | None:
    """Key of the GPU that this process runs on; None for others."""
    import jax

    if jax.default_backend() != "gpu":
        return None
    gpu = gpu_of_device_kind(jax.devices()[0].device_kind)
    return gpu.key if gpu else None
