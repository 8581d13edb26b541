"""Every rule on drawn calls of its primitive: shapes, types, values and parameters by hypothesis, four proofs each.

    python benchmarks/rules_fuzz.py                            100 cases per family of primitives, 8 emulated CPU devices
    python benchmarks/rules_fuzz.py --cases 1000 --seed 7      more of them, others
    python benchmarks/rules_fuzz.py --only gather --shrink     families whose name has a word in it; the smallest case that fails

The calls are those of `tests/generated/`, of which the tests run a few. The proofs: every strategy of the primitive on local shards
(`shardplan.testing.check_rule`); the call planned, sharded as far as its rules let it, on the machine of `benchmarks/jax_harness.py`,
against plain `jit`; the primitive as XLA partitions it under some strategies of three mesh axes, and under some of two axes that do not
divide its dims (`--proof unequal`). What plain `jit` does not run on CPU is skipped.
"""

import argparse
import collections
import os
import sys
import time
import traceback
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import jax_harness
import numpy as np
from hypothesis import HealthCheck, Phase

from shardplan.emit.shard_local import forms
from shardplan.mesh import layout
from shardplan.mesh.layout import MOST_PADDING, MeshShape
from shardplan.strategies.enumerate import enumerate_strategies
from shardplan.strategies.rule import RuleError, factor_sizes
from shardplan.strategies.rules import rule_for
from shardplan.strategies.signature import REPLICATED_DTYPES
from shardplan.testing import check_rule, difference
from shardplan.testing.check import run_equations

OUR_ERRORS = (NameError, AttributeError, ImportError)
"""Mistakes of this program or the planner's, never a reason to skip a case."""


def proof(case) -> tuple[str, str]:
    """("sharded" | "replicated" | "skipped" | "failed", why): every strategy of the primitive on local shards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            only = None if case.primitive in ("scan", "while", "cond") else case.primitive
            return "sharded" if check_rule(case.fn, *case.args, primitive=only) else "replicated", ""
        except RuleError as error:
            return "failed", str(error)
        except Exception:
            why, refusal = traceback.format_exc(limit=-3), refused_by_jit(case)
            return ("skipped", refusal) if refusal else ("failed", why)


def refused_by_jit(case) -> str:
    """What plain `jit` raises on CPU; "" where it runs the call."""
    try:
        jax.block_until_ready(jax.jit(case.fn)(*case.args))
    except OUR_ERRORS:
        raise
    except Exception as error:
        return jax_harness.first_line(error)
    return ""


def planned(case, mesh) -> tuple[str, str]:
    """The same of the call as it is planned and run."""
    harness = SimpleNamespace(fullname=case.primitive, dyn_fun=case.fn, dyn_args_maker=lambda _: case.args)
    return jax_harness.run(harness, mesh)[1:]


def partitioned(case, mesh, most: int = 4) -> tuple[str, str]:
    """The same of the primitive alone, compiled under several strategies of all mesh axes, drawn by the case's text."""
    axes, random = MeshShape(mesh.axis_names, mesh.axis_sizes), np.random.default_rng(zlib.crc32(str(case).encode()))
    outcome = "replicated"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if refusal := refused_by_jit(case):
            return "skipped", refusal
        for eqn, operands in of_primitive(case):
            strategies = list(strategies_of(eqn, axes))
            want = jax.jit(lambda *xs, eqn=eqn: forms.bind(eqn, xs))(*operands) if strategies else []
            for n in random.permutation(len(strategies))[:most]:
                factors, *layouts = strategies[n]
                outcome = "sharded"
                try:
                    got = one_strategy(eqn, operands, layouts, mesh)
                except Exception as error:
                    return "failed", f"{eqn}\npartitioned as {factors}: {jax_harness.first_line(error)}"
                for x, y in zip(got, want, strict=True):
                    if (why := difference(x, y)) is not None:
                        return "failed", f"{eqn}\npartitioned as {factors}: {why}"
    return outcome, ""


def of_primitive(case) -> list[tuple]:
    """Equations and operands of the case's primitive."""
    found = []
    run_equations(jax.make_jaxpr(case.fn)(*case.args), list(case.args), lambda *pair: found.append(pair))
    pairs = ((eqn, operands) for eqn, operands in found if eqn.primitive.name == case.primitive and not eqn.effects)
    return [(eqn, [jax.numpy.asarray(x, v.aval.dtype) for x, v in zip(operands, eqn.invars, strict=True)]) for eqn, operands in pairs]


def strategies_of(eqn, mesh: MeshShape):
    """Factors per mesh axis and layouts of operands and results, of every strategy that shards something."""
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    rule, _ = rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)
    if any(str(x.dtype) in REPLICATED_DTYPES or 0 in x.shape for x in (*ins, *outs)):
        return
    sizes = factor_sizes(rule, tuple(x.shape for x in ins), tuple(x.shape for x in outs))
    choices = enumerate_strategies(rule, sizes, mesh, linear=False)
    for s, factors in enumerate(choices.factors):
        if any(factors):
            yield factors, [of[s] for of in choices.operands], [of[s] for of in choices.results]


def one_strategy(eqn, operands, layouts, mesh):
    """The results of one op whose operands and results are laid out so; partial ones are reduced."""

    def shardings(of):
        return [jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*x.spec())) for x in of]

    taken, made = layouts
    step = jax.jit(
        lambda *xs: forms.run(eqn, xs, taken, [None if x.partial else x for x in made], mesh),
        in_shardings=tuple(shardings(taken)),
        out_shardings=shardings([x.reduced() for x in made]),
        keep_unused=True,
    )
    return step(*operands)


def unequal(case, mesh, most: int = 4) -> tuple[str, str]:
    """The same of the primitive alone on a mesh of 2 x 3, compiled under several strategies in which some dim does not divide."""
    from unequal_blocks import unequal_strategies, wrong_strategies

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes, outcome = MeshShape(mesh.axis_names, mesh.axis_sizes), "replicated"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if refusal := refused_by_jit(case):
            return "skipped", refusal
        random = np.random.default_rng(zlib.crc32(str(case).encode()))
        try:
            layout.MOST_PADDING = 1.0  # also blocks that hold nothing
            for eqn, operands in of_primitive(case):
                strategies = list(unequal_strategies(eqn, axes))
                if strategies:
                    outcome, some = "sharded", [strategies[n] for n in random.permutation(len(strategies))[:most]]
                    if why := "\n".join(wrong_strategies(eqn, operands, mesh, some)):
                        return "failed", why
        except Exception as error:
            return "failed", f"{case}: {jax_harness.first_line(error)}"
        finally:
            layout.MOST_PADDING = MOST_PADDING
    return outcome, ""


PROOFS = {"local": lambda case, mesh: proof(case), "planned": planned, "partitioned": partitioned, "unequal": unequal}


def quietly(cases: int, phases=(Phase.generate,), **more) -> hypothesis.settings:
    """That many examples; none is remembered, timed or found unhealthy."""
    return hypothesis.settings(
        max_examples=cases, phases=phases, database=None, deadline=None, suppress_health_check=list(HealthCheck), **more
    )


def run(cases, options, mesh) -> collections.Counter:
    """How many cases of one family came out how; failures are printed."""
    count: collections.Counter = collections.Counter()
    reasons: collections.Counter = collections.Counter()

    @hypothesis.seed(options.seed)
    @quietly(options.cases, [Phase.generate, Phase.shrink] if options.shrink else [Phase.generate])
    @hypothesis.given(cases)
    def each(case):
        if options.show:
            print(case, flush=True)
        found = []
        for name, prove in PROOFS.items():
            if options.proof in (name, "all"):
                found.append(prove(case, mesh))
        count["cases"] += 1
        count[max((kind for kind, _ in found), key=("replicated", "sharded", "skipped", "failed").index)] += 1
        if count["cases"] % 50 == 0:  # compiled programs pile up
            jax.clear_caches()
        for kind, why in found:
            if kind == "skipped":
                reasons[case.primitive, why] += 1
            if kind == "failed":
                print(f"FAILED  {case}\n{why}\n", flush=True)
                assert not options.shrink, why

    try:
        each()
    except AssertionError:
        print("the last one is the smallest")
    for (primitive, why), n in reasons.items():
        print(f"skipped {n:>4}  {primitive}: {why}")
    return count


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from generated import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--proof", choices=(*PROOFS, "all"), default="all")
    parser.add_argument("--show", action="store_true", help="every case before it runs, to see which one XLA crashes on")
    parser.add_argument("--shrink", action="store_true", help="stop at a family's first failure, and make it small")
    options = parser.parse_args(argv)
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    kinds = ("sharded", "replicated", "skipped", "failed")
    print(f"{'family':<32}" + "".join(f"{k:>9}" for k in ("cases", *kinds)) + "  seconds")
    total: collections.Counter = collections.Counter()
    for family in (f for f in FAMILIES if options.only in f):
        start, count = time.perf_counter(), run(FAMILIES[family], options, mesh)
        total += count
        row = "".join(f"{count[k] or '':>9}" for k in ("cases", *kinds))
        print(f"{family:<32}{row}{time.perf_counter() - start:9.0f}", flush=True)
        jax.clear_caches()
    print(f"{'all':<32}" + "".join(f"{total[k] or '':>9}" for k in ("cases", *kinds)) + f"  jax {jax.__version__}, seed {options.seed}")
    return int(total["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
