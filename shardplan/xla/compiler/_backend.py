"""Compiles one lowered module for devices that need not exist: the parent's request, and the child process that compiles it.

The parent writes `module.mlirbc` (StableHLO with its shardings, no user code) and `request.json` into a folder; the child,
started as `python -P _backend.py FOLDER`, writes `module.hlo`, `before.hlo`, `dump/` and `result.json`.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path

import jax
from jax.experimental import topologies

from shardplan import _jax, _jax_kernels


def lower(function, *args, platform: str = "cpu", **kwargs):
    """Traces and lowers for `platform` ('cpu', 'cuda'), whose devices need not exist; source lines leave out this package's frames."""
    _jax.hide_frames(str(Path(__file__).parents[2]))
    if not hasattr(function, "trace"):
        function = jax.jit(function)
    with _jax_kernels.devices_not_needed():
        return function.trace(*args, **kwargs).lower(lowering_platforms=(platform,))


def payload(lowered) -> tuple[bytes, dict]:
    """A `jax.stages.Lowered` as (StableHLO bytecode, the compile options that `jit` would set)."""
    args = _jax.compile_args(lowered)
    module = lowered.compiler_ir("stablehlo")
    meshes = _meshes(lowered)
    n_devices = args["num_devices"]
    if n_devices == 1 and meshes:
        # Only constraints or shard_maps on an abstract mesh: jit cannot tell the number of devices, the meshes can.
        n_devices = max(math.prod(sizes) for _, sizes in meshes)
        module = _jax.partitioned(module, n_devices)
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    request = {
        "n_devices": n_devices,
        "meshes": [m for m in meshes if math.prod(m[1]) == n_devices],
        "tuple_args": bool(args["tuple_args"]),
        "propagate": _jax.propagated(lowered),
        "shardy": _jax.uses_shardy(),
    }
    return bytecode.getvalue(), request


def arguments(lowered) -> list[tuple[str, str, tuple[int, ...]]]:
    """(path, dtype, global shape) of every argument the compiled program takes, in its order."""
    args, named = lowered.args_info
    compile_args = _jax.compile_args(lowered)
    names = compile_args["all_args_info"].debug_info.arg_names
    paths = jax.tree_util.tree_flatten_with_path((args, named))[0]
    kept = sorted(compile_args["kept_var_idx"])
    shown = names if names and len(names) == len(paths) else [jax.tree_util.keystr(path) for path, _ in paths]
    return [(shown[i], str(paths[i][1].dtype), tuple(paths[i][1].shape)) for i in kept if i < len(paths)]


def _meshes(lowered) -> list[tuple[list[str], list[int]]]:
    """(axis names, sizes) of the meshes the program is sharded on, the most used first."""
    args = _jax.compile_args(lowered)
    shardings = (*args["in_shardings"], *args["out_shardings"], *args["intermediate_shardings"])
    meshes = [s.mesh for s in shardings if getattr(s, "mesh", None) is not None] + [args["context_mesh"]]
    found = Counter((tuple(map(str, m.axis_names)), tuple(m.axis_sizes)) for m in meshes if m.size > 1)
    for op in lowered.compiler_ir("stablehlo").body.operations:
        if op.operation.name == "sdy.mesh":
            axes = re.findall(r'"([^"]+)"=(\d+)', str(op).split("]")[0])
            found[tuple(a for a, _ in axes), tuple(int(n) for _, n in axes)] += 1
    return [(list(names), list(sizes)) for (names, sizes), _ in found.most_common() if math.prod(sizes) > 1]


def compiled(module: bytes, request: dict, folder: Path):
    """Compiles a module in this process; returns (executable, flags that this XLA does not know)."""
    jax.config.update("jax_use_shardy_partitioner", request["shardy"])
    flags, dropped = dict(request["flags"]), []
    if request["cluster"]:
        devices = topologies.get_topology_desc(platform="cuda", **request["cluster"]).devices
        flags["xla_dump_to"] = str(folder / "dump")
    else:
        devices = jax.devices("cpu")
    while True:
        try:
            overrides = {**flags, **request["options"]}
            return _jax.compile_module(
                module, devices[: request["n_devices"]], overrides, request["tuple_args"], request["propagate"]
            ), dropped
        except Exception as error:  # one of our flags that this version of XLA does not know
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if not unknown or unknown[1] not in flags:
                raise
            dropped.append(unknown[1])
            del flags[unknown[1]]


def main(folder: Path) -> None:
    """The child process: reads the request in `folder`, writes the result there."""
    request = json.loads((folder / "request.json").read_text())
    started = time.perf_counter()
    try:
        executable, dropped = compiled((folder / "module.mlirbc").read_bytes(), request, folder)
        text = executable.hlo_modules()[0].to_string()
        stats = executable.get_compiled_memory_stats()
    except Exception as error:
        (folder / "result.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    (folder / "module.hlo").write_text(text)
    (folder / "before.hlo").write_text(_jax.unoptimized_hlo((folder / "module.mlirbc").read_bytes()))
    memory = {name: getattr(stats, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")}
    memory["peak_memory"] = getattr(stats, "peak_memory_in_bytes", 0)
    seconds = time.perf_counter() - started
    (folder / "result.json").write_text(json.dumps({"memory": memory, "seconds": seconds, "dropped": dropped}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
