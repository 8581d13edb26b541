"""JAX's own test suite of primitives through the planner: every case, sharded as far as it goes, gives the results of plain `jit`.

    python benchmarks/jax_harness.py                          all of it, 8 emulated CPU devices
    python benchmarks/jax_harness.py --shard 0/2              every second case (by a hash of its name)
    python benchmarks/jax_harness.py --only scatter --show    cases whose name has a word in it, one line each
    python benchmarks/jax_harness.py --mesh 8 --done out.tsv  another mesh; cases in the file are not run again

JAX ships one function per use of a primitive, with its operands (`jax._src.internal_test_util.test_harnesses`, some 5,500 of them). It
is imported here, past `shardplan._jax`, because it is a list of tests and no part of the product. Each case runs twice: as
plain `jax.jit` on one device, and planned for a machine on which moving data costs nothing and work costs much (`EAGER`), so
that the planner shards all dims that its rules let it shard. Results agree up to rounding of their dtype; integers, booleans and NaN
in full.

    sharded    some op of the case was planned with a mesh axis on one of its factors
    replicated no op was: no dim divides, or every dim needs replication
    skipped    plain jit does not run the case on CPU; reasons below the table
    failed     results differ, or planning or running raised. Must be 0
"""

import argparse
import collections
import os
import sys
import time
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np

import shardplan
from shardplan.mesh import Cluster, Device, Link
from shardplan.testing import difference

FREE = Link(bytes_per_s=1e30, latency_s=0.0)
EAGER = Cluster(
    "eager",
    Device("slow", {"float32": 1e6}, bytes_per_s=1e6, memory_bytes=1e15, kernel_latency_s=0.0),
    node_size=8,
    intra=FREE,
    inter=FREE,
)
"""Compute is dear and communication free: the fastest plan of every op is its most sharded one."""

MESHES = {"8": ((8,), ("a",)), "2,4": ((2, 4), ("a", "b")), "2,2,2": ((2, 2, 2), ("a", "b", "c"))}


class Outcome(NamedTuple):
    """The outcome of one case: "sharded", "replicated", "skipped" or "failed"; `why` where there is a reason."""

    name: str
    kind: str
    why: str = ""


def cases(shard: int = 0, shards: int = 1) -> list:
    """The cases of one shard, the same in every process: those whose name hashes to it."""
    from jax._src.internal_test_util import test_harnesses

    return [h for h in test_harnesses.all_harnesses if zlib.crc32(h.fullname.encode()) % shards == shard]


def run(case, mesh: jax.sharding.Mesh) -> Outcome:
    """One case, plain and planned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args = case.dyn_args_maker(np.random.RandomState(zlib.crc32(case.fullname.encode())))
            want = jax.tree.leaves(jax.block_until_ready(jax.jit(lambda *xs: case.dyn_fun(*xs))(*args)))
        except Exception as error:
            return Outcome(case.fullname, "skipped", first_line(error))
        try:
            step = shardplan.auto(mesh, cluster=EAGER)(lambda *xs: case.dyn_fun(*xs))
            got = jax.tree.leaves(step(*args))
            if len(got) != len(want):
                return Outcome(case.fullname, "failed", f"{len(got)} results instead of {len(want)}")
            for n, (x, y) in enumerate(zip(got, want, strict=True)):
                if signature(x) != signature(y):
                    return Outcome(case.fullname, "failed", f"result {n} is {jax.typeof(x)}, not {jax.typeof(y)}")
                if (why := difference(x, y)) is not None:
                    return Outcome(case.fullname, "failed", f"result {n}: {why}")
            return Outcome(case.fullname, "sharded" if is_sharded(step.plan(*args).context.planned) else "replicated")
        except Exception as error:
            return Outcome(case.fullname, "failed", first_line(error))


def signature(x) -> tuple:
    return x.shape, x.dtype, getattr(x, "weak_type", False)


def is_sharded(planned) -> bool:
    """Whether a mesh axis is put on a factor of some op that is no border of the program."""
    space = planned.space
    return any(
        any(space.strategies[i].factors[s])
        for i, (op, s) in enumerate(zip(space.graph.ops, planned.strategies, strict=True))
        if not op.traits.border
    )


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200].replace("\t", " ")


def table(outcomes: Iterable[Outcome], groups: dict[str, str]) -> str:
    """Counts per primitive and in all, then why cases were skipped, then what failed."""
    outcomes = list(outcomes)
    kinds = ("sharded", "replicated", "skipped", "failed")
    count: dict[str, collections.Counter] = {}
    for x in outcomes:
        for row in (groups[x.name], "all"):
            count.setdefault(row, collections.Counter())[x.kind] += 1
    lines = [f"{'primitive':<36}" + "".join(f"{k:>9}" for k in ("cases", *kinds))]
    lines += [
        f"{row:<36}{sum(count[row].values()):>9}" + "".join(f"{count[row][k] or '':>9}" for k in kinds)
        for row in sorted(count, key=lambda row: (row == "all", row))
    ]
    reasons = collections.Counter(x.why for x in outcomes if x.kind == "skipped")
    lines += ["", *(f"skipped {n:>5}  {why}" for why, n in sorted(reasons.items(), key=lambda r: (-r[1], r[0])))]
    lines += [f"FAILED  {x.name}  {x.why}" for x in outcomes if x.kind == "failed"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2,2,2", choices=MESHES)
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--done", type=Path, help="a file of outcomes: read first, and each new one is added")
    parser.add_argument("--show", action="store_true", help="a line per case")
    options = parser.parse_args(argv)
    shard, shards = map(int, options.shard.split("/"))
    mesh = jax.make_mesh(*MESHES[options.mesh], axis_types=(jax.sharding.AxisType.Auto,) * len(MESHES[options.mesh][0]))
    asked = [c for c in cases(shard, shards) if options.only in c.fullname]
    groups = {c.fullname: c.group_name for c in asked}
    done = {}
    if options.done is not None and options.done.exists():
        for line in options.done.read_text().splitlines():
            outcome = Outcome(*line.split("\t"))
            if outcome.name in groups:
                done[outcome.name] = outcome
    start = time.perf_counter()
    for n, case in enumerate(c for c in asked if c.fullname not in done):
        began = time.perf_counter()
        outcome = done[case.fullname] = run(case, mesh)
        if options.done is not None:
            with options.done.open("a") as file:
                file.write("\t".join(outcome) + "\n")
        if options.show or outcome.kind == "failed":
            print(f"{time.perf_counter() - began:6.2f} s  {outcome.kind:<8} {case.fullname}  {outcome.why}", flush=True)
        if n % 100 == 99:  # compiled programs pile up
            jax.clear_caches()
    print(table([done[c.fullname] for c in asked], groups))
    print(f"{len(asked)} cases on mesh {options.mesh}, jax {jax.__version__}, {time.perf_counter() - start:.0f} s")
    return any(x.kind == "failed" for x in done.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
