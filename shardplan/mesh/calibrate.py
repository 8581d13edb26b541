"""Measures the machine at hand: matrix products, memory, and every collective over every group of mesh axes.

    >>> cluster = shardplan.calibrate(mesh, "here.json")       # once
    >>> @shardplan.auto(mesh, cluster="here.json")

    python -m shardplan.mesh.calibrate --one-gpu --out gpu.json    the rates of one GPU by shape (`one_device.py`)

All devices work at once, as in a step, so that shared cores and memory buses count. Each op runs in a loop on the devices, so that
dispatch is hardly part of the figure; the fastest of several runs counts. Seconds t of a collective at sizes S are fitted by

    t = latency_s + S · s_per_byte        least squares of relative errors, both from 0

and stored per (kind, members, nodes). The formulas of `shardplan.mesh.collective`, over links fitted to the same
measurements, price the groups that this mesh does not have.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan.mesh import one_device
from shardplan.mesh.cluster import KINDS, AxisLink, Cluster, ClusterError, CollectiveKind, Measured, physical_memory_bytes, resolve
from shardplan.mesh.device import Device, Link, gpu_of_device_kind
from shardplan.mesh.kernel_clock import kernels_s
from shardplan.mesh.layout import MeshShape

DTYPES = ("float32", "bfloat16", "float16")
SIZES_BYTES = {"cpu": (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23), "other": (1 << 14, 1 << 18, 1 << 21, 1 << 24, 1 << 27)}
RUNS = 5
EFFORT_S = 0.02
Key = tuple[Any, ...]


def calibrate(mesh: Mesh, path: str | os.PathLike[str] | None = None, progress: bool = True, effort_s: float = EFFORT_S) -> Cluster:
    """Measures the machine under a mesh.

    Args:
        mesh: a mesh of real devices; emulated CPU devices count.
        path: where to store the cluster as JSON for `cluster=`; None keeps it in memory only.
        progress: show a bar in the terminal, where rich is installed.
        effort_s: seconds of each of the runs behind one figure; more is steadier.

    Returns:
        The cluster: rates as measured (their efficiencies are 1), links fitted to the collectives, and `measured`.

    Raises:
        ClusterError: the mesh has no devices to measure, or the folder of `path` is not there.
    """
    if not isinstance(mesh, Mesh):
        raise ClusterError(f"calibrate needs a mesh of real devices, not {type(mesh).__name__}: nothing can be timed on it")
    _check_folder(path)
    bench = _Bench(mesh, effort_s)
    jobs: dict[Key, Callable[[], float]] = {("matmul", d): partial(bench.matmul, d) for d in DTYPES}
    jobs[("memory",)], jobs[("kernel",)] = bench.memory, bench.kernel
    for link, axes in bench.groups.items():
        for kind, size in itertools.product(KINDS, bench.sizes):
            jobs[kind, link, size] = partial(bench.collective, kind, axes, size)
    with jax.set_mesh(bench.mesh):
        found = {key: jobs[key]() for key in _shown(jobs, progress)}
    cluster = _cluster(bench, found)
    if path is not None and jax.process_index() == 0:
        cluster.save(path)
    return cluster


def fit(sizes: Iterable[float], times: Iterable[float]) -> tuple[float, float]:
    """(constant, slope), neither below 0, of the line with the least squared relative errors.

    Args:
        sizes: bytes, [n].
        times: seconds, [n].
    """
    s, t = np.array(list(sizes), float), np.array(list(times), float)
    (constant, slope), *_ = np.linalg.lstsq(np.stack([1 / t, s / t], axis=1), np.ones(len(t)), rcond=None)
    if slope < 0:
        return float((1 / t).sum() / (1 / t**2).sum()), 0.0
    if constant < 0:
        return 0.0, float((s / t).sum() / ((s / t) ** 2).sum())
    return float(constant), float(slope)


def calibrate_gpu(
    path: str | os.PathLike[str] | None = None, base: str | os.PathLike[str] | Cluster | None = None, progress: bool = True
) -> Cluster:
    """Measures one GPU: products by shape, attention kernels, memory, the optimizer's update, in some minutes.

    Args:
        path: where to store the cluster as JSON for `cluster=`; None keeps it in memory only.
        base: preset or cluster file with the links and peaks of the GPU; None takes the preset of the GPU at hand.
        progress: show a bar in the terminal, where rich is installed.

    Returns:
        The cluster `base`, whose device has the rates that were measured.

    Raises:
        ClusterError: there is no GPU, or no preset of it and no `base`, or the folder of `path` is not there.
    """
    _check_folder(path)
    device = jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda", "rocm"):
        raise ClusterError(f"there is no GPU here: JAX's first device is {device}\n  way out: jax with CUDA, on a machine with a GPU")
    if base is None:
        known = gpu_of_device_kind(device.device_kind)
        if known is None:
            raise ClusterError(
                f"no preset knows the peaks and links of {device.device_kind!r}\n  way out: base=, a cluster file that states them"
            )
        base = known.key
    bench = _Bench(Mesh(np.array([device]), ("x",)), EFFORT_S)
    with jax.set_mesh(bench.mesh):
        launch_s = bench.of_op(jnp.matmul, (np.zeros((16, 16), np.float32),) * 2)
        shown = partial(_shown, progress=progress)
        cluster = one_device.measured(resolve(base), bench.of_op, launch_s, progress=lambda jobs: (x for (x,) in shown(zip(jobs))))
    if path is not None:
        cluster.save(path)
    return cluster


def _check_folder(path: str | os.PathLike[str] | None) -> None:
    """Before minutes of measuring."""
    if path is not None and not os.path.isdir(folder := os.path.dirname(os.path.abspath(path))):
        raise ClusterError(
            f"calibrate cannot write {os.fspath(path)}: there is no folder {folder}.\n  way out: a file in a folder that exists"
        )


class _Bench:
    """Times ops on all devices of a mesh at once."""

    def __init__(self, mesh: Mesh, effort_s: float):
        names = tuple(map(str, mesh.axis_names))
        self.mesh = Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        self.shape = MeshShape(names, tuple(mesh.devices.shape))
        self.effort_s = effort_s
        devices = list(mesh.devices.flat)
        self.device, self.n = devices[0], len(devices)
        self.on_cpu = self.device.platform == "cpu"
        self.sizes = SIZES_BYTES["cpu" if self.on_cpu else "other"]
        first = [d.process_index == self.device.process_index for d in devices]
        self.node_size = first.index(False) if False in first else max(self.n, 1 << 20 if self.on_cpu else 8)
        self.rounds = 1 if self.on_cpu else 8
        machine = Cluster("", Device("", {"float32": 1}, 1, 1, 0), self.node_size, Link(1, 0), Link(1, 0))
        axes = [a for a, n in self.shape if n > 1]
        self.groups: dict[AxisLink, tuple[str, ...]] = {}  # one set of axes for every kind of group on this mesh
        for some in itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(1, len(axes) + 1)):
            self.groups.setdefault(machine.axis(self.shape, some), some)

    def matmul(self, dtype: str) -> float:
        """FLOP/s of one device on the best of several squares."""
        best, m = 0.0, 128
        while True:
            x = np.random.default_rng(0).standard_normal((self.n * m, m), np.float32).astype(jnp.dtype(dtype))
            t = self.loop(lambda i, x, w, out: (x, w, x @ w), (x, x, x))
            best = max(best, 2 * m**3 / t)
            if t > self.effort_s / 10 or m >= 8192:
                return best
            m *= 2

    def memory(self) -> float:
        """Bytes per second that one device reads and writes."""
        bytes_ = 1 << (24 if self.on_cpu else 29)
        x = np.zeros((self.n * bytes_ // 4,), np.float32)
        return 2 * bytes_ / self.loop(lambda i, x: (x * 0.5 + 1.0,), (x,))

    def kernel(self) -> float:
        """Seconds of an op on a few elements."""
        x = np.zeros((self.n * 16, 16), np.float32)
        return self.loop(lambda i, x, w: (x @ w, w), (x, x))

    def collective(self, kind: str, axes: tuple[str, ...], bytes_: int) -> float:
        """Seconds of one collective whose larger buffer has `bytes_` per device."""
        n = self.shape.size(*axes)
        part = max(1, bytes_ // 4 // n)
        body = {
            "all-gather": lambda i, x: lax.dynamic_slice_in_dim(lax.all_gather(x, axes, tiled=True), i % n * part, part),
            "all-reduce": lambda i, x: lax.psum(x, axes),
            "reduce-scatter": lambda i, x: lax.dynamic_update_slice_in_dim(x, lax.psum_scatter(x, axes, tiled=True), i % n * part, 0),
            "all-to-all": lambda i, x: lax.all_to_all(x, axes, 0, 0, tiled=True),
            "collective-permute": lambda i, x: lax.ppermute(x, axes, [(d, (d + (n + 1) // 2) % n) for d in range(n)]),
        }[kind]
        local = part if kind == "all-gather" else part * n
        return self.loop(lambda i, x: (body(i, x),), (np.zeros((self.n * local,), np.float32),))

    def of_op(self, op: Callable, arrays: tuple[Any, ...], effort_s: float | None = None) -> float:
        """Seconds of one run of `op(*arrays)` on one device: of its kernels, if the profiler sees them and it need not run for long."""
        if effort_s is None and (seconds := kernels_s(op, arrays)):
            return seconds
        results = [np.zeros(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(op, *arrays))]

        def body(i, *carry):
            return *carry[: len(arrays)], *jax.tree.leaves(op(*carry[: len(arrays)]))

        return self.loop(body, (*arrays, *results), effort_s)

    def loop(self, body: Callable, arrays: tuple[Any, ...], effort_s: float | None = None) -> float:
        """Seconds of one round of `body(i, *carry) -> carry`, on arrays whose first dim is sharded over all devices."""
        sharded, effort_s = PartitionSpec(self.shape.axes), effort_s or self.effort_s

        looped = rounds_of(body, self.rounds)
        specs = (sharded,) * len(arrays)
        if self.n > 1:
            looped = jax.shard_map(looped, mesh=self.mesh, in_specs=(PartitionSpec(), *specs), out_specs=specs, check_vma=False)
        run = jax.jit(looped, donate_argnums=tuple(range(1, len(arrays) + 1)))  # so that no round pays for fresh memory
        carry = tuple(jax.device_put(x, NamedSharding(self.mesh, sharded)) for x in arrays)

        def timed(n: int) -> float:
            nonlocal carry
            start = time.perf_counter()
            carry = jax.block_until_ready(run(np.int32(n), *carry))
            return _agreed(time.perf_counter() - start)

        timed(1)  # compiles
        idle = min(timed(0) for _ in range(RUNS))
        n = 1
        while (t := min(timed(n), timed(n)) - idle) < effort_s / 4 and n < 1 << 20:  # a pause of the machine is no round
            n *= 4
        n = max(1, round(n * effort_s / max(t, 1e-9)))
        return max(min(timed(n) for _ in range(RUNS)) - idle, 1e-9) / n / self.rounds


def rounds_of(body: Callable, rounds: int) -> Callable:
    """`(n, *carry) -> carry`: a loop of n times `rounds` rounds of `body(i, *carry) -> carry`.

    XLA knows the length of the inner loop, so a GPU asks the host after `rounds` rounds only. Of copies of the body in its place all
    but the last would be dead. The barrier keeps what does not change from being moved out of the loop.
    """

    def times(n, i, carry):
        return lax.fori_loop(0, n, lambda j, carry: lax.optimization_barrier(body(i * rounds + j, *carry)), carry)

    def looped(n, *carry):
        return lax.fori_loop(0, n, lambda i, carry: times(rounds, i, carry), carry)

    return looped if rounds > 1 else lambda n, *carry: times(n, 0, carry)


def _agreed(value: float) -> float:
    """The first process's value, so that all processes run as many rounds."""
    return value if jax.process_count() == 1 else float(multihost_utils.broadcast_one_to_all(np.float32(value)))


def _cluster(bench: _Bench, found: dict[Key, float]) -> Cluster:
    """The measurements as a cluster."""
    alpha_beta: dict[tuple[CollectiveKind, AxisLink], tuple[float, float]] = {
        (kind, link): fit(bench.sizes, [found[kind, link, size] for size in bench.sizes])
        for kind, link in itertools.product(KINDS, bench.groups)
    }
    kind, platform = bench.device.device_kind, bench.device.platform
    try:
        base = resolve(None, platform, kind, n_devices=bench.n)
    except ClusterError:
        base = None

    flops = {d: base.device.flops_per_s(d) for d in base.device.flops} if base else {}
    flops |= {d: found["matmul", d] for d in DTYPES}
    launch = min((constant for (kind, _), (constant, _) in alpha_beta.items() if kind == "collective-permute"), default=0.0)
    intra = base.intra if base else Link(found[("memory",)], 0.0)
    for link in (x for x in bench.groups if x.nodes == 1):  # the largest last
        intra = _link(link, alpha_beta["all-gather", link], launch)
    inter = base.inter if base else intra
    for link in (x for x in bench.groups if x.nodes > 1):
        inter = _link(link, alpha_beta["all-gather", link], launch, intra.latency_s)
    if bench.on_cpu:
        memory_bytes = (physical_memory_bytes() or 8e9) // bench.n
    else:
        memory_bytes = float((bench.device.memory_stats() or {}).get("bytes_limit", 16e9))
    return Cluster(
        name=f"measured {kind} x{bench.n}",
        device=Device(kind, flops, found[("memory",)], memory_bytes, found[("kernel",)]),
        node_size=bench.node_size,
        intra=intra,
        inter=inter,
        reduce_scatter=not bench.on_cpu,
        overlap=0.0 if bench.on_cpu else base.overlap if base else Cluster.overlap,
        source=f"measured by shardplan.calibrate on {bench.n} devices ({kind}), mesh {bench.shape}, "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        launch_s=launch,
        platforms=(platform,),
        measured=tuple(Measured(kind, link.members, link.nodes, *line) for (kind, link), line in alpha_beta.items()),
    )


def _link(group: AxisLink, line: tuple[float, float], launch_s: float, intra_latency_s: float = 0.0) -> Link:
    """The link whose ring all-gather over a group takes `line` (see `shardplan.mesh.collective`)."""
    (constant, slope), n, k = line, group.members, group.nodes
    rate, rest = (n - 1) / n / max(slope, 1e-15), constant - launch_s
    if k == 1:
        return Link(rate, max(0.0, rest / (n - 1)))
    return Link(rate / group.local, max(0.0, (rest - (n - k) * intra_latency_s) / (k - 1)))


def _shown(jobs: Iterable[Key], progress: bool) -> Iterator[Key]:
    """The jobs' keys one by one, with a bar that says which runs."""
    keys = list(jobs)
    if not progress or importlib.util.find_spec("rich") is None:
        yield from keys
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("", total=len(keys))
        for key in keys:
            name = " ".join(key) if len(key) < 3 else f"{key[0]}, {key[1].members} devices, {key[2]} bytes"
            bar.update(task, description=name)
            yield key
            bar.advance(task)


def main(argv=None) -> None:
    """`python -m shardplan.mesh.calibrate`."""
    parser = argparse.ArgumentParser(prog="python -m shardplan.mesh.calibrate", description="Measures one GPU for cluster=.")
    parser.add_argument("--one-gpu", action="store_true", required=True, help="the first GPU; whole meshes: shardplan.calibrate(mesh)")
    parser.add_argument("--out", default="gpu.json", help="the cluster file (default: gpu.json)")
    parser.add_argument("--base", help="preset or cluster file of the GPU's peaks and links (default: the preset of the GPU at hand)")
    options = parser.parse_args(argv)
    try:
        cluster = calibrate_gpu(options.out, options.base)
    except ClusterError as error:
        sys.exit(str(error))
    device = cluster.device
    for dtype, rate in device.products.items():
        print(f"products in {dtype:9} {device.flops_per_s(dtype) / 1e12:.0f} TFLOP/s in steps, median error {rate.median_error:.0%}")
    print(f"memory                {device.memory_rate / 1e9:.0f} GB/s")
    print(f"stored: {options.out}")


if __name__ == "__main__":
    main()
