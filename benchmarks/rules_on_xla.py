"""Every rule held against XLA: each strategy as a one-op program, compiled for 8 absent GPUs, its collectives against the prediction.

    python benchmarks/rules_on_xla.py                    all of it; prints what deviates, with the reason
    python benchmarks/rules_on_xla.py --only scatter      primitives whose name has a word in it
    python benchmarks/rules_on_xla.py --write             and freezes it in benchmarks/rules_on_xla.txt

For every example of the rule table and one mesh axis, three kinds of programs:

    split a:4       operands and results laid out as the strategy says; partial results are asked for whole, and scattered
    partial +:8     operands of a linear op are sums over devices, and so is its result until it is asked for whole
    whole b:4       a dim that the rule keeps whole, split on both sides; the prediction is the cheapest strategy the rule has,
                    with the reshards before and after it

The prediction is the planner's own (`Resharder.path`, `exchanges`): in the first two nothing moves but where a result is partial
or windows reach over. A deviation without a reason in `REASONS` is an error, and so is a reason that nothing needs any more.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.ir import local
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.strategies.enumerate import PARTIAL, enumerate_choices
from shardplan.strategies.halo import exchanges
from shardplan.strategies.rule import letter_sizes
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.table import DTYPES, EXAMPLES, equations
from shardplan.xla.compare import wire_bytes
from shardplan.xla.compile import compile_here, lower_for
from shardplan.xla.hlo import collectives

GOLDEN = Path(__file__).with_suffix(".txt")
TARGET, AXIS, REST = "h100:8", "x", "rest"


@dataclass(frozen=True)
class Program:
    """One op under one strategy.

    Attributes:
        example: number of its example in the rule table.
        split: "split a:4", "split a:4 scattered", "partial +:8" or "whole b:4".
        operands, results: layouts asked of XLA.
        made: layouts the op itself makes results in, None where partial or not decided.
        planned: collectives predicted, as (kind, bytes of the larger buffer).
    """

    example: int
    split: str
    shards: int
    operands: tuple[Layout, ...]
    made: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    planned: tuple[tuple[str, float], ...]

    @property
    def wire(self) -> float:
        return sum(wire_bytes(kind, n, self.shards) for kind, n in self.planned)


SCALE = 8
"""Examples are small, so that they run; here every dim is this much larger, so that a shard is more than one element."""


@functools.cache
def equation(number: int):
    """The equation of an example that is its primitive, scaled where its function allows; None where this jax makes none."""
    example = EXAMPLES[number]
    scale = 1 if example.primitive == "rng_bit_generator" else SCALE  # its operand is a key
    sizes = [abstract(x, scale) for x in example.operands], [abstract(x, 1) for x in example.operands]
    for operands in sizes:
        try:
            jaxpr = jax.make_jaxpr(example.fn)(*operands).jaxpr
        except Exception:  # a shape stands in the function itself
            continue
        return next((e for e in equations(jaxpr) if e.primitive.name == example.primitive), None)
    return None


def abstract(operand, scale: int):
    """"f32[8,4]" as shapes, scaled; typed keys and arrays as they are."""
    if not isinstance(operand, str):
        return operand
    name, dims = operand.removesuffix("]").split("[")
    shape = tuple(int(n) * scale for n in dims.split(",") if n)
    dtype = jax.eval_shape(jax.random.key, 0).dtype if name == "key" else DTYPES[name]
    return jax.ShapeDtypeStruct(shape, dtype)


def programs(number: int) -> Iterator[Program]:
    """All strategies of one example on one mesh axis: every letter over the most devices that divide it."""
    eqn = equation(number)
    if eqn is None or eqn.effects:
        return
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    rule, _ = rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)
    sizes = letter_sizes(rule, tuple(x.shape for x in ins), tuple(x.shape for x in outs))
    done = set()
    for k in (8, 4, 2):
        mesh = MeshShape((AXIS,), (k,))
        resharder = Resharder(mesh, Cluster.preset("h100"))
        choices = enumerate_choices(rule, sizes, mesh)

        def moved(x, source: Layout, wanted: Layout, resharder=resharder) -> list[tuple[str, float]]:
            steps = resharder.path(tuple(x.shape), _jax.itemsize(x.dtype), source, wanted)
            return [(s.kind, s.bytes) for s in steps if s.kind != "slice"]

        for s, (letter,) in enumerate(choices.letters):
            if letter is None or letter in done:
                continue
            done.add(letter)
            operands = tuple(layouts[s] for layouts in choices.operands)
            made = tuple(layouts[s] for layouts in choices.results)
            kind = "partial" if letter == PARTIAL else "split"
            if kind == "partial":  # each operand is a sum over a further leading dim, which is split
                operands = tuple(Layout(((AXIS,), *x.dims)) for x in operands)
            scattered = tuple(scatter(x, layout, k) if layout.partial else layout for x, layout in zip(outs, made, strict=True))
            for name, wanted in (("", tuple(x.reduced() for x in made)), (" scattered", scattered)):
                if not name or wanted != tuple(x.reduced() for x in made):
                    planned = [c for x, a, b in zip(outs, made, wanted, strict=True) for c in moved(x, a, b)]
                    if kind == "split":
                        found = exchanges(rule, (letter,), ins, outs, operands, mesh, Cluster.preset("h100"))
                        planned += [(x.kind, x.bytes) for x in found]
                    whole = tuple(None if layout.partial else layout for layout in made)
                    yield Program(number, f"{kind} {letter}:{k}{name}", k, operands, whole, wanted, tuple(planned))
        for d, letters in enumerate(rule.operands[0] if ins else ()):
            name = letters[0] if letters else ""
            if name in rule.whole and ins[0].shape[d] % k == 0 and name not in done:
                done.add(name)

                def cut(x, dims, d=d, k=k):
                    same = len(dims) == len(rule.operands[0]) and set(dims[d]) & rule.whole and x.shape[d] % k == 0
                    return Layout(tuple((AXIS,) if same and i == d else () for i in range(len(dims))))

                operands = tuple(cut(x, dims) for x, dims in zip(ins, rule.operands, strict=True))
                results = tuple(cut(x, dims) for x, dims in zip(outs, rule.results, strict=True))
                ways = [
                    [
                        c
                        for xs, asked, layouts, to in ((ins, operands, choices.operands, True), (outs, results, choices.results, False))
                        for x, a, of in zip(xs, asked, layouts, strict=True)
                        for c in moved(x, *((a, of[s]) if to else (of[s], a)))
                    ]
                    for s, (letter,) in enumerate(choices.letters)
                    if letter != PARTIAL
                ]
                planned = min(ways, key=lambda found, k=k: sum(wire_bytes(kind, n, k) for kind, n in found))
                yield Program(number, f"whole {name}:{k}", k, operands, (None,) * len(outs), results, tuple(planned))


def scatter(x, layout: Layout, k: int) -> Layout:
    """A partial layout, reduced and split on the first free dim that divides."""
    free = next((d for d, n in enumerate(x.shape) if n % k == 0 and n and not layout.dims[d]), None)
    return Layout(tuple((AXIS,) if d == free else axes for d, axes in enumerate(layout.dims)))


def emitted(program: Program) -> tuple[tuple[str, float], ...] | str:
    """Collectives that XLA makes, as (kind, bytes of the larger buffer) each; a text where it does not compile."""
    eqn = equation(program.example)
    ins = [v.aval for v in eqn.invars]
    mesh = AbstractMesh((program.shards, 8 // program.shards), (AXIS, REST), axis_types=(AxisType.Auto,) * 2)
    partial = program.split.startswith("partial")
    shapes = [jax.ShapeDtypeStruct((program.shards, *x.shape) if partial else x.shape, x.dtype) for x in ins]

    def one_op(*operands):
        if partial:
            operands = [jax.numpy.tensordot(jax.numpy.ones(len(x), x.dtype), x, 1, preferred_element_type=x.dtype) for x in operands]
            return _jax.bind(eqn, operands)
        return local.run(eqn, operands, program.operands, program.made, mesh)

    def sharding(layout: Layout):
        return NamedSharding(mesh, PartitionSpec(*layout.spec()))

    step = jax.jit(
        one_op,
        in_shardings=tuple(map(sharding, program.operands)),
        out_shardings=list(map(sharding, program.results)),
        keep_unused=True,
    )
    try:
        text = compile_here(lower_for(TARGET, step, *shapes), TARGET)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
    found = collectives(text, MeshShape((AXIS, REST), (program.shards, 8 // program.shards)))
    return tuple(sorted((c.kind, float(p.array.bytes)) for c in found if c.group_size > 1 for p in c.parts for _ in range(int(c.runs))))


REASONS: tuple[tuple[str, str, str, str], ...] = (
    ("add", "dearer", "partial", "a scalar or a stretched operand is reduced apart from the array it is added to"),
    ("reshape", "dearer", "partial", "merged dims are scattered over more devices than the major one has: XLA reduces in full"),
    ("reduce reduce_xor", "uncompiled", "whole", "XLA aborts, since no collective has the function: why these dims are whole"),
    (
        "conv_general_dilated gather",
        "dearer",
        "split",
        "scattered over a small dim that operands have too: XLA reduces a part and swaps it",
    ),
    ("random_gamma", "dearer", "split", "its loop runs until all devices are done: one number per turn is reduced"),
    ("eig", "uncompiled", "", "its GPU library does not load without a GPU"),
    ("hessenberg schur", "uncompiled", "", "not made for GPUs"),
)
"""(primitives, verdict, how the split begins, why)."""


@dataclass(frozen=True)
class Verdict:
    """What XLA made of a program; `emitted` is a text where it does not compile."""

    program: Program
    emitted: tuple[tuple[str, float], ...] | str

    @property
    def kind(self) -> str:
        """"same", "dearer", "cheaper", "uncompiled"; a whole dim is "same" unless XLA does better than to gather."""
        if isinstance(self.emitted, str):
            return "uncompiled"
        planned, wire = self.program.wire, self.wire
        if abs(wire - planned) <= 0.01 * planned or (wire > planned and self.program.split.startswith("whole")):
            return "same"
        return "cheaper" if wire < planned else "dearer"

    @property
    def wire(self) -> float:
        return sum(wire_bytes(kind, n, self.program.shards) for kind, n in self.emitted if not isinstance(self.emitted, str))

    @property
    def primitive(self) -> str:
        return EXAMPLES[self.program.example].primitive

    @property
    def reason(self) -> str:
        """Why it deviates; '' where nobody knows."""
        for primitives, kind, split, why in REASONS:
            if self.primitive in primitives.split() and self.kind == kind and self.program.split.startswith(split):
                return why
        return ""

    @property
    def line(self) -> str:
        """One line of the golden file, without the reason."""
        eqn = equation(self.program.example)
        shapes = " -> ".join(", ".join(str(list(v.aval.shape)).replace(" ", "") for v in side) for side in (eqn.invars, eqn.outvars))
        planned = counted(self.program.planned)
        made = "" if isinstance(self.emitted, str) else counted(self.emitted)
        return f"{self.kind:<10} {self.primitive:<24} {shapes:<44} {self.program.split:<22} {planned:<28} {made}".rstrip()


def counted(found: tuple[tuple[str, float], ...]) -> str:
    """Bytes by kind, the kinds in order."""
    total: dict[str, float] = {}
    for kind, n in sorted(found):
        total[kind] = total.get(kind, 0.0) + n
    return ", ".join(f"{kind} {n:g}" for kind, n in total.items()) or "-"


def measure(asked: list[Program]) -> Iterator[Verdict]:
    """Verdicts in order; a worker process compiles, and one that crashes is told and replaced."""
    context, left = multiprocessing.get_context("spawn"), list(asked)
    while left:
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            for program in list(left):
                try:
                    found = pool.submit(emitted, program).result()
                except BrokenProcessPool:
                    found = "the compiler crashed"
                left.pop(0)
                yield Verdict(program, found)
                if found == "the compiler crashed":
                    break


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="primitives whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"freeze what deviates in {GOLDEN.name}")
    parser.add_argument("--all", action="store_true", help="print what is as planned, too")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    asked = [p for n, e in enumerate(EXAMPLES) if options.only in e.primitive for p in programs(n)]
    count: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    for verdict in measure(asked):
        count[verdict.kind] = count.get(verdict.kind, 0) + 1
        if verdict.kind != "same":
            found.setdefault(verdict.reason, []).append(verdict.line)
        if options.all or (verdict.kind != "same" and not verdict.reason):
            print(verdict.line, verdict.emitted if isinstance(verdict.emitted, str) else "", flush=True)
    text = "".join(f"{why}\n" + "".join(f"    {line}\n" for line in lines) + "\n" for why, lines in found.items())
    print(text)
    print(", ".join(f"{n} {kind}" for kind, n in sorted(count.items())), f"of {len(asked)}, {time.perf_counter() - start:.0f} s")
    if options.write:
        GOLDEN.write_text(text)
    unused = [why for *_, why in REASONS if why not in found]
    if not options.only and unused:
        print("reasons that nothing needs any more:", *unused, sep="\n    ")
    return int("" in found or bool(unused and not options.only))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
