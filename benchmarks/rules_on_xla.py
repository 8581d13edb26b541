"""Every rule held against XLA: each strategy as a one-op program, compiled for 8 absent GPUs, its collectives against the prediction.

    python benchmarks/rules_on_xla.py                    all of it; prints what deviates, with the reason
    python benchmarks/rules_on_xla.py --only scatter      primitives whose name has a word in it
    python benchmarks/rules_on_xla.py --write             and freezes it in benchmarks/rules_on_xla.txt

`shardplan/xla/report/one_op.py` builds the programs. A deviation without a reason in `REASONS` is an error, and so is a reason that
nothing needs any more.
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
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jax
from rule_examples import DTYPES, EXAMPLES

from shardplan._jax import equations
from shardplan.xla.compiler import targets
from shardplan.xla.compiler.compile import compile_here
from shardplan.xla.report import one_op

GOLDEN = Path(__file__).with_suffix(".txt")
TARGET = targets.parse("h100:8")

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
    """ "f32[8,4]" as shapes, scaled; typed keys and arrays as they are."""
    if not isinstance(operand, str):
        return operand
    name, dims = operand.removesuffix("]").split("[")
    shape = tuple(int(n) * scale for n in dims.split(",") if n)
    dtype = jax.eval_shape(jax.random.key, 0).dtype if name == "key" else DTYPES[name]
    return jax.ShapeDtypeStruct(shape, dtype)


def programs(number: int) -> Iterator[one_op.OneOpProgram]:
    """All strategies of one example on one mesh axis."""
    eqn = equation(number)
    return iter(()) if eqn is None else one_op.programs(eqn, TARGET)


def emitted(number: int, program: one_op.OneOpProgram) -> one_op.Moved | str:
    """What XLA makes of one strategy of an example; a text where it does not compile."""
    try:
        text = compile_here(one_op.lowered(equation(number), program, TARGET), str(TARGET))
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
    return one_op.moved(text, program, TARGET)


REASONS: tuple[tuple[str, str, str, str], ...] = (
    ("add", "dearer", "partial", "a scalar or a stretched operand is reduced apart from the array it is added to"),
    ("reshape", "dearer", "partial", "merged dims are scattered over more devices than the major one has: XLA reduces in full"),
    (
        "reduce reduce_and reduce_or reduce_xor",
        "uncompiled",
        "replicated",
        "XLA aborts, since no collective has the function: why these dims need replication",
    ),
    (
        "conv_general_dilated gather",
        "dearer",
        "sharded",
        "scattered over a small dim that operands have too: XLA reduces a part and swaps it",
    ),
    ("random_fold_in", "dearer", "sharded d", "of what is folded in a key is made where it lies, and sent"),
    ("random_gamma", "dearer", "sharded", "its loop runs until all devices are done: one number per turn is reduced"),
    ("eig", "uncompiled", "", "its GPU library does not load without a GPU"),
    ("hessenberg schur", "uncompiled", "", "not made for GPUs"),
)
"""(primitives, verdict, prefix of the strategy, why)."""


@dataclass(frozen=True)
class Found(one_op.OneOpVerdict):
    """What XLA made of one strategy of an example."""

    example: int

    @property
    def primitive(self) -> str:
        return EXAMPLES[self.example].primitive

    @property
    def reason(self) -> str:
        """Why it deviates; '' where nobody knows."""
        for primitives, kind, strategy, why in REASONS:
            if self.primitive in primitives.split() and self.kind == kind and self.program.strategy.startswith(strategy):
                return why
        return ""

    @property
    def line(self) -> str:
        """One line of the golden file, without the reason."""
        eqn = equation(self.example)
        shapes = " -> ".join(", ".join(v.aval.str_short(short_dtypes=True) for v in side) for side in (eqn.invars, eqn.outvars))
        return f"{self.kind:<10} {self.primitive:<24} {shapes:<44} {self}"


def measure(asked: list[tuple[int, one_op.OneOpProgram]]) -> Iterator[Found]:
    """Verdicts in order; a worker process compiles, and one that crashes is reported and replaced."""
    context, left = multiprocessing.get_context("spawn"), list(asked)
    while left:
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            for number, program in list(left):
                try:
                    found = pool.submit(emitted, number, program).result()
                except BrokenProcessPool:
                    found = "the compiler crashed"
                left.pop(0)
                yield Found(program, found, number)
                if found == "the compiler crashed":
                    break


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="primitives whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"freeze what deviates in {GOLDEN.name}")
    parser.add_argument("--all", action="store_true", help="print what is as planned, too")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    asked = [(n, p) for n, e in enumerate(EXAMPLES) if options.only in e.primitive for p in programs(n)]
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
