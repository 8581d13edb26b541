"""Compiles a step for the devices at hand or for an absent GPU cluster: HLO text, memory, warnings, or the error.

    >>> done = compile(jax.jit(step, in_shardings=...), *args, target="h100:8x8")
    >>> done.ok, done.memory.peak_bytes, len(done.text), done.rematerializations
    (True, 5914664, 70897, ())

The program is lowered here and compiled in a child process with a time limit: a compiler crash is a result, not the end of this
process. Nothing is executed; arguments may be `jax.ShapeDtypeStruct`s, and the mesh an `AbstractMesh` of any size.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shardplan.mesh.gpus import gpu_of_device_kind
from shardplan.mesh.layout import MeshShape
from shardplan.units import format_memory
from shardplan.xla.compiler import _backend, targets
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import HloCollective, collectives
from shardplan.xla.hlo.peak import Buffer, buffers
from shardplan.xla.hlo.products import HloProduct, flops, products
from shardplan.xla.hlo.remat import Rematerialization, rematerializations
from shardplan.xla.hlo.text import HloModule, read

FLAGS: Mapping[str, bool | int | float | str] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False,
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""XLA flags for absent GPUs: autotuning runs kernels on the GPU; the other two emit collective kernels that abort without one."""


class CompilerMissingError(ImportError):
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
        ok: whether the compiler finished.
        error: its message, '' when ok.
        text: HLO after every pass, in schedule order; '' when not ok.
        memory: bytes per device; None when not ok.
        stderr: of the compiler.
        target: the cluster compiled for; None for emulated CPU devices.
        mesh: names the axes of collectives and warnings; None when the program has no mesh.
        n_devices: number of devices the program runs on.
        before: HLO before any pass, of all devices together.
        live_range, assignment: XLA's live-range and buffer-assignment dumps; '' for CPUs.
        seconds: time of the compiler itself.
        dropped_flags: flags this XLA does not know.
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

    def __repr__(self) -> str:
        where = self.target or f"{self.n_devices} CPU devices"
        return f"Compiled({where}, {self.memory or self.error}, {self.seconds:.1f} s)"

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the target's memory; None for CPUs. XLA also compiles steps that do not fit."""
        return None if self.target is None or self.memory is None else self.memory.peak_bytes <= self.target.gpu.memory_bytes

    @cached_property
    def module(self) -> HloModule:
        """The parsed text.

        Raises:
            RuntimeError: the compile failed.
        """
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
        """Bytes of the buffers alive at the peak; `memory.peak_bytes` is larger where XLA's buffer assignment leaves gaps."""
        return sum(b.bytes for b in self.peak)

    @cached_property
    def peak(self) -> tuple[Buffer, ...]:
        """The buffers alive at the memory peak, the largest first; () for CPUs, where XLA writes no dump."""
        return buffers(self.live_range, self.assignment, self.module, read(self.before) if self.before else None)

    @cached_property
    def rematerializations(self) -> tuple[Rematerialization, ...]:
        """XLA's "Involuntary full rematerialization" warnings."""
        return rematerializations(self.stderr, self.mesh, read(self.before) if self.before else None)


def available() -> bool:
    """Whether the packages for absent GPUs are installed."""
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{v}") for v in (13, 12)) if _has("jax_plugins") else False


def compile(
    function,
    *args: Any,
    target: str | Target | None = None,
    mesh: MeshShape | None = None,
    options: Mapping[str, bool | int | float | str] | None = None,
    timeout_s: float = 900,
    **kwargs: Any,
) -> Compiled:
    """Compiles `function(*args, **kwargs)` without running it.

    Args:
        function: a `jax.jit`ed function, a plain one, or a `jax.stages.Lowered` (then without arguments, and lowered
            for the target's platform, 'cuda' or 'cpu').
        *args: positional arguments; arrays or shapes.
        target: 'h200:8', 'h100:8x8', ...; None for the devices at hand (a known GPU, else emulated CPU devices).
        mesh: names the axes; by default the mesh found in the program's shardings.
        options: compiler options (XLA flags without the dashes).
        timeout_s: time limit of the compiler.
        **kwargs: keyword arguments; arrays or shapes.

    Raises:
        ValueError: the target is unknown or has another number of devices than the program.
        CompilerMissing: the target needs packages that are not installed.
    """
    given = not args and not kwargs and hasattr(function, "compiler_ir")
    lowered = function if given else lower_for(target, function, *args, **kwargs)
    return compile_lowered(lowered, target, mesh=mesh, options=options, timeout_s=timeout_s)


def lower_for(target: str | Target | None, function, *args: Any, **kwargs: Any):
    """Traces and lowers `function` for the target's platform; raises what `compile` raises about targets."""
    target = _target_at_hand() if target is None else target
    if isinstance(target, str):
        targets.parse(target)  # a misspelt target is refused before a long trace
    if target is not None and not available():
        raise CompilerMissingError(
            f'compiling for target {str(target)!r} needs XLA\'s GPU compiler: pip install "shardplan[gpu-check]" '
            "(no GPU, driver or CUDA toolkit is needed)"
        )
    return lower(function, *args, platform="cuda" if target is not None else "cpu", **kwargs)


def compile_lowered(
    lowered,
    target: str | Target | None = None,
    *,
    mesh: MeshShape | None = None,
    options: Mapping[str, bool | int | float | str] | None = None,
    timeout_s: float = 900,
) -> Compiled:
    """As `compile`, for a step that `lower_for` lowered for the same target."""
    target = _target_at_hand() if target is None else target
    module, request = _backend.payload(lowered)
    cluster = targets.parse(target, request["n_devices"]) if target is not None else None
    meshes = [MeshShape(tuple(names), tuple(sizes)) for names, sizes in request["meshes"]]
    done = compile_module(module, request, cluster, options=options, timeout_s=timeout_s)
    return replace(done, mesh=mesh or next(iter(meshes), None))


def lower(function, *args: Any, platform: str = "cpu", **kwargs: Any):
    """Traces and lowers for `platform` ('cpu', 'cuda') in this process; the platform's devices need not exist."""
    return _backend.lower(function, args, kwargs, platform)


def compile_module(
    module: bytes,
    request: dict,
    target: Target | None,
    *,
    options: Mapping[str, bool | int | float | str] | None = None,
    timeout_s: float = 900,
) -> Compiled:
    """Compiles StableHLO bytecode in a child process, with the request of `_backend.payload`.

    The same module, target and options are compiled once per process.
    """
    request = _complete(request, target, options)
    environment = _environment(request)
    key = hashlib.sha256(module + json.dumps([request, environment["XLA_FLAGS"]], sort_keys=True).encode()).hexdigest()
    if key not in _DONE:
        result = _in_child(module, request, environment, target, timeout_s)
        if not result.ok:
            return result
        while len(_DONE) >= _KEEP:
            del _DONE[next(iter(_DONE))]
        _DONE[key] = result
    return _DONE[key]


def compile_here(lowered, target: str) -> str:
    """The HLO text of a step that `lower_for` lowered for the same target, compiled in this process: a compiler crash ends it.

    For a worker process that compiles many small programs and starts once.
    """
    module, request = _backend.payload(lowered)
    request = _complete(request, targets.parse(target, request["n_devices"]), None)
    with tempfile.TemporaryDirectory(prefix="shardplan-") as folder:
        return _backend.compiled(module, request, Path(folder))[0].hlo_modules()[0].to_string()


def _complete(request: dict, target: Target | None, options: Mapping[str, bool | int | float | str] | None) -> dict:
    """The request with flags, options and devices."""
    request = {**request, "options": dict(options or {}), "flags": dict(FLAGS) if target else {}, "platform": "cpu"}
    if target is not None:
        request |= {
            "platform": "cuda",
            "name": target.gpu.key,
            "topology": f"1x{target.nodes}x{target.per_node}",
            "target_config": targets.config(target.gpu),
        }
    return request


_KEEP = 16
_DONE: dict[str, Compiled] = {}


def _in_child(module: bytes, request: dict, environment: dict, target: Target | None, timeout_s: float) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="shardplan-") as name:
        folder = Path(name)
        (folder / "module.mlirbc").write_bytes(module)
        (folder / "request.json").write_text(json.dumps(request))
        command = [sys.executable, "-P", _backend.__file__, str(folder)]
        started = time.perf_counter()
        with (folder / "stderr").open("wb") as stderr:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=environment, start_new_session=True
            )
            try:
                code = child.wait(timeout_s)
            except BaseException as stopped:
                _kill(child)
                if not isinstance(stopped, subprocess.TimeoutExpired):
                    raise
                code = None
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
    if request["platform"] == "cpu":
        flags += f" --xla_force_host_platform_device_count={request['n_devices']}"
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _text(folder: Path, pattern: str) -> str:
    return next((p.read_text(errors="replace") for p in sorted(folder.glob(pattern))), "")


def _memory(sizes: Mapping[str, int], target: Target | None) -> XlaMemory:
    total = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]
    peak = (target and sizes.get("peak_memory")) or total  # XLA for CPU leaves the temporaries out of its peak
    return XlaMemory(sizes["argument"], sizes["output"], sizes["temp"], sizes["alias"], peak)


def _kill(child: subprocess.Popen) -> None:
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
    except ValueError:
        return f"exit status {code}"


def _tail(stderr: str) -> str:
    """The end of stderr: the fatal line, else the last error and the lines after it, else the last lines."""
    stderr = re.sub(r"(F\d{4} [^\n]*)?\*\*\* Begin stack trace \*\*\*.*?(\*\*\* End stack trace \*\*\*|$)", "", stderr, flags=re.DOTALL)
    lines = [line for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    errors = [n for n, line in enumerate(lines) if re.match(r"E\d{4} ", line)]
    return "\n".join(fatal[-1:] or lines[errors[-1] if errors else -8 :][:8]) or "it said nothing"


def _target_at_hand() -> str | None:
    """Key of the GPU that this process runs on; None for others."""
    import jax

    if jax.default_backend() != "gpu":
        return None
    gpu = gpu_of_device_kind(jax.devices()[0].device_kind)
    return gpu.key if gpu else None


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
