"""Whether a plan loses to itself: laws of planning, checked on drawn training steps and examples. Plans only, nothing is compiled.

    python benchmarks/laws.py --seeds 0:20              twenty small drawn steps; `--tiny` for smaller ones
    python benchmarks/laws.py --examples                the examples, at the size of their demo and larger
    python benchmarks/laws.py --seeds 0:4 --pins 8      more pins of one input

    searches     no other search, and no classical layout (`plan.baselines()`), is faster than "ilp"
    pins         no pin is: the inputs of another search's plan or of a classical layout, and single inputs in other layouts
    what-if      nor is the plan with one array moved that `plan.why` prices
    mesh         a mesh is no slower than one that merges two of its axes
    memory       more memory is no slower: none, and 0.9, 0.7, 0.5 of the peak of the free plan
    bound        no plan of any kind is below the bound of the free one
    least        no plan takes less memory than an error calls the lowest peak found

A plan may be behind by the half percent within which the simplest is taken (`NEAR_TIE`); what exceeds it is a violation, printed with
its size. The last lines sum up, with the median and the worst gap.
"""

import argparse
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import drawn_programs  # noqa: E402
import jax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardplan  # noqa: E402
from shardplan import ShardingError  # noqa: E402
from shardplan.plan.plan import Plan  # noqa: E402
from shardplan.search.objective import NEAR_TIE  # noqa: E402

LAWS = ("searches", "pins", "what-if", "mesh", "memory", "bound", "least")
BUDGETS = (0.9, 0.7, 0.5)


@dataclass(frozen=True)
class Case:
    """A training step on a mesh."""

    name: str
    step: Callable
    state: Any
    batch: Any
    cluster: str
    sizes: tuple[int, ...]

    def plan(self, sizes: tuple[int, ...] | None = None, **options) -> Plan:
        sizes = sizes or self.sizes
        axes = ("x", "y", "z")[: len(sizes)]
        mesh = jax.sharding.AbstractMesh(sizes, axes)
        options = {"memory": "disable"} | options
        return shardplan.auto(mesh, cluster=self.cluster, donate_argnums=0, **options)(self.step).plan(self.state, self.batch)


@dataclass
class Laws:
    """What was found of one case: the free plan, and others by law."""

    case: Case
    pins: int
    free: Plan
    others: list[tuple[str, str, float]] = field(default_factory=list)  # law, what, seconds
    least: list[str] = field(default_factory=list)

    def note(self, law: str, what: str, seconds: float) -> None:
        self.others.append((law, what, seconds))

    def violations(self) -> Iterator[tuple[str, str, float]]:
        """(law, what, by which part of the free plan's seconds)."""
        seconds, bound = (self.free.seconds[x] for x in ("total", "bound"))
        for law, what, other in self.others:
            if other < (1 - NEAR_TIE) * seconds:
                yield law, what, 1 - other / seconds
            if other < (1 - 1e-6) * bound:
                yield "bound", what, 1 - other / bound
        yield from (("least", what, 0.0) for what in self.least)

    def check(self) -> None:
        free, draw = self.free, random.Random(self.case.name)
        found = {search: self.case.plan(search=search) for search in ("recursive", "propagation")}
        for search, plan in found.items():
            self.note("searches", search, plan.seconds["total"])
        rows = free.baselines().rows
        for row in rows:
            self.note("searches", row.name, row.seconds)
        for name, plan in (("ilp", free), *found.items()):
            (specs, _) = jax.tree.map(lambda s: s.spec, plan.in_shardings)
            self.pinned(f"inputs of {name}", in_shardings=specs)
        if rows:
            self.pinned(f"inputs of {rows[0].name}", pins={path: P(*spec) for path, spec in rows[0].layouts.items()})
        for path, spec in self.single(draw):
            self.pinned(f"{path}={spec}", pins={path: spec})
        for path in draw.sample([x.path for x in free.inputs], k=min(self.pins, len(free.inputs))):
            for choice in free.why(path).choices:
                self.note("what-if", f"{path} {choice.text}", choice.seconds)
        self.meshes()
        self.budgets()

    def pinned(self, what: str, **options) -> None:
        with suppress(ShardingError):  # it cannot hold
            self.note("pins", what, self.case.plan(**options).seconds["total"])

    def single(self, draw: random.Random) -> Iterator[tuple[str, P]]:
        """Pins of one input each, of the layouts that divide."""
        shapes = [(x.path, x.shape) for x in self.free.inputs if x.shape]
        axes = ("x", "y", "z")[: len(self.case.sizes)]
        some = [(), *((a,) for a in axes), *([axes] if len(axes) > 1 else [])]
        for path, shape in draw.sample(shapes, k=min(self.pins, len(shapes))):
            entry, d = draw.choice(some), draw.randrange(len(shape))
            yield path, P(*(None,) * d, entry or None)

    def meshes(self) -> None:
        sizes = self.case.sizes
        for n in range(len(sizes) - 1):
            coarse = (*sizes[:n], sizes[n] * sizes[n + 1], *sizes[n + 2 :])
            self.note("mesh", "x".join(map(str, coarse)), self.case.plan(coarse).seconds["total"])

    def budgets(self) -> None:
        peak, tightest = self.free.memory().peak, ""
        for share in BUDGETS:
            try:
                plan = self.case.plan(memory=share * peak)
            except ShardingError as error:
                tightest = str(error)
                break
            self.note("memory", f"{share} of the peak", plan.seconds["total"])
        if "memory=" in tightest and "lowest peak found" in tightest:
            lowest = float(tightest.split("memory=")[1].split()[0])
            for search in ("ilp", "recursive"):
                with suppress(ShardingError):  # as it should be
                    plan = self.case.plan(memory=lowest / 1.01, search=search)
                    self.least.append(f"{search} takes {plan.memory().peak:.4g} of {lowest:.4g} bytes")


def checked(case: Case, pins: int) -> Laws:
    """All laws on one case."""
    warnings.simplefilter("ignore")
    found = Laws(case, pins, case.plan())
    found.check()
    return found


def drawn(seeds: range, size: str) -> Iterator[Case]:
    for seed in seeds:
        d = drawn_programs.draw(seed, size)
        yield Case(f"{seed} {d.family} {d.place}", d.step, d.state, d.batch, d.target.split(":")[0], d.mesh_shape)


def examples() -> Iterator[Case]:
    import zoo

    larger = {"gpt": {"width": 512, "batch": 32}, "hybrid_mlp": {"hidden": 4096}, "moe": {"width": 512, "hidden": 2048}}
    for name in ("hybrid_mlp", "gpt", "moe", "llama", "dlrm", "digits_cnn", "face_softmax"):
        for sizes in ((2, 4), (2, 2, 2)):
            step, state, batch = zoo.example(name)
            yield Case(f"{name} {'x'.join(map(str, sizes))}", step, state, batch, "h100", sizes)
    for name, more in larger.items():
        step, state, batch = zoo.example(name, **more)
        yield Case(f"{name} larger 2x4", step, state, batch, "h100", (2, 4))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="", help="of drawn steps, FIRST:LAST")
    parser.add_argument("--tiny", action="store_true", help="drawn steps of a size that a CPU runs")
    parser.add_argument("--examples", action="store_true", help="the examples")
    parser.add_argument("--only", default="", help="only cases whose names contain this")
    parser.add_argument("--pins", type=int, default=3, help="inputs that are pinned, and asked about, one by one")
    options = parser.parse_args(argv)
    cases: list[Case] = []
    if options.seeds:
        first, _, last = options.seeds.partition(":")
        cases += drawn(range(int(first), int(last or int(first) + 1)), "tiny" if options.tiny else "small")
    cases += examples() if options.examples else ()
    counts, gaps, worst = dict.fromkeys(LAWS, 0), [], dict.fromkeys(LAWS, 0.0)
    for case in cases:
        if options.only not in case.name:
            continue
        start = time.process_time()
        found = checked(case, options.pins)
        gaps.append(found.free.gap)
        head = f"{case.name}: {found.free.seconds['total'] * 1e6:.1f} µs, gap {found.free.gap:.1%}, {len(found.others)} others"
        print(f"{head}, {time.process_time() - start:.0f} s", flush=True)
        for law, what, size in found.violations():
            counts[law] += 1
            worst[law] = max(worst[law], size)
            print(f"    {law:<9} {size:6.2%}  {what}", flush=True)
    if gaps:
        print(f"{len(gaps)} cases, gaps: median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}")
        print("violations: " + ", ".join(f"{law} {n} (worst {worst[law]:.1%})" for law, n in counts.items()))
    return int(any(counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
