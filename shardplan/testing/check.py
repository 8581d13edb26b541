"""Which equations of a program are proven, and in which shardings: `check_rule`."""

from __future__ import annotations

import difflib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from shardplan import _jax, _jax_kernels
from shardplan.strategies.rule import Rule, RuleError, factor_sizes, flat_factors
from shardplan.strategies.rules import rule_for
from shardplan.testing.prove import ShardedOp, prove_dependence, prove_linear, prove_local
from shardplan.xla.compiler import targets
from shardplan.xla.compiler.compile import compile
from shardplan.xla.report import one_op
from shardplan.xla.report.one_op import OneOpVerdict


@dataclass(frozen=True)
class Proof:
    """One op whose rule held.

    Attributes:
        primitive, rule, types: its name, rule, and types of operands and results, as text.
        shardings: proven shardings, each "factor:shards"; several factors at once are separated by a space.
        how: "local" when shards ran on their own, "dependence" when only the dependences of a shard were proven.
        deviations: where XLA moves other bytes than predicted, or does not compile; () without a target.
    """

    primitive: str
    rule: str
    shardings: tuple[str, ...]
    how: str
    types: str
    deviations: tuple[OneOpVerdict, ...] = ()

    def __str__(self) -> str:
        """The op's line of the rule table, and one for every deviation."""
        return "\n".join((f"{self.primitive}  {self.types}  {self.rule}", *(f"    {x.kind:<10} {x}" for x in self.deviations)))


def check_rule(
    fn: Callable, *args, primitive: str | None = None, target: str | None = None, golden: str | Path | None = None, pairs: int = 2
) -> list[Proof]:
    """Prove the rule of every op that `fn(*args)` runs, on the values it meets there; one proof per op with a factor to shard.

    Args:
        fn: any traceable function; for one primitive, a function that binds it. Loop bodies are proven in their first iteration,
            branches of a conditional on the operands of the one taken.
        *args: concrete arguments.
        primitive: prove only this one.
        target: GPUs that need not be there, like "h100:8": every strategy is compiled for them, and the bytes XLA moves are
            compared with those a plan would name.
        golden: a file of the proofs as text; written where there is none, else they have to be the same.
        pairs: number of pairs of factors to shard together, in addition to every single factor.

    Raises:
        RuleError: when the sharded op differs from the global one, with the rule, the shapes, the sharding and the largest error;
            when the proofs are not as in `golden`.
        CompilerMissingError: when the target's compiler is not installed.
    """
    seen: set = set()
    proofs: list[Proof] = []

    def visit(eqn, operands) -> None:
        if primitive in (None, eqn.primitive.name) and (proof := _prove(eqn, operands, seen, pairs)):
            proofs.append(replace(proof, deviations=_deviations(eqn, target)) if target else proof)

    run_equations(_jax.without_refs(jax.make_jaxpr(fn)(*args)), jax.tree.leaves(args), visit)
    if golden is not None:
        _compare_with_golden(Path(golden), "".join(f"{proof}\n" for proof in proofs))
    return proofs


def run_equations(closed, args, visit: Callable) -> list:
    """Results of a jaxpr; `visit(eqn, operands)` also sees equations inside calls, branches taken and first iterations of loops."""

    def run(_, eqn, operands) -> list:
        if (inner := _jax.inner_jaxpr(eqn)) is not None:
            return run_equations(inner, operands, visit)
        match _jax.region(eqn):
            case "scan" if eqn.params["length"]:
                body, n_consts, n_carry = _jax.scan_parts(eqn)
                first_rows = (x[0] for x in operands[n_consts + n_carry :])
                run_equations(body, [*operands[: n_consts + n_carry], *first_rows], visit)
            case "while":
                _, n_cond, body, _ = _jax.while_parts(eqn)
                run_equations(body, operands[n_cond:], visit)
            case "cond":
                run_equations(_jax.branches(eqn)[int(operands[0])], operands[1:], visit)
            case "":
                visit(eqn, operands)
        return _jax.bind(eqn, operands)

    return _jax.interpret(closed.jaxpr, [*closed.consts, *args], run)


def _prove(eqn, operands, seen: set, pairs: int) -> Proof | None:
    """The proof of one equation; None where there is nothing to prove."""
    ins, outs = [jax.typeof(x) for x in operands], [v.aval for v in eqn.outvars]
    rule, known = rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)
    signature = (eqn.primitive.name, *map(str, ins), str({k: v for k, v in eqn.params.items() if k != "jaxpr"}))
    if not known or eqn.effects or signature in seen:
        return None
    seen.add(signature)
    sizes = factor_sizes(rule, tuple(x.shape for x in ins), tuple(x.shape for x in outs))
    operands = [x if hasattr(x, "shape") else jnp.asarray(x, a.dtype) for x, a in zip(operands, ins, strict=True)]
    op = ShardedOp(eqn, rule, sizes, tuple(operands), tuple(_jax.bind(eqn, operands)), {})
    for dims in rule.operands + rule.results:
        if len(flat_factors(dims)) != len(set(flat_factors(dims))):
            op.fail("a factor stands twice in one tensor")
    in_all = (a for a in rule.reduce if all(a in flat_factors(dims) for dims in rule.results))
    if misplaced := set(in_all):
        op.fail(f"reduction factors {sorted(misplaced)} stand in a result")
    if rule.linear:
        prove_linear(op)
    ops = [replace(op, shards=shards) for shards in _shardings(rule, sizes, pairs)]
    if not ops:
        return None
    how = "local"
    groups = defaultdict(list)  # by number of devices; of calls that ask for the mesh when lowered, one each
    for x in ops:
        k = math.prod(x.shards.values())
        groups[8 if 8 % k == 0 else k, x.text if _jax_kernels.asks_for_mesh(eqn) else ""].append(x)
    for (n, _), group in sorted(groups.items()):
        if not prove_local(group, n):
            how = "dependence"
            for x in group:
                prove_dependence(x)
    return Proof(op.name, str(rule), tuple(x.text for x in ops), how, op.types)


def _shardings(rule: Rule, sizes: dict[str, int], pairs: int) -> Iterator[dict[str, int]]:
    """Every factor alone, then `pairs` of them together."""
    found = dict.fromkeys(flat_factors(*rule.operands, *rule.results))
    free = [a for a in found if a not in rule.replicated and sizes[a] > 1]
    for a in free:
        if counts := [k for k in (8, 4, 2, 3, 5, 7) if sizes[a] % k == 0 and k <= jax.device_count()]:
            yield {a: next((k for k in counts if k < sizes[a]), counts[0])}
    even = [a for a in free if sizes[a] % 2 == 0]
    if jax.device_count() >= 4:
        yield from ({a: 2, b: 2} for a, b in itertools.islice(itertools.pairwise(even), pairs))


def _deviations(eqn, target: str) -> tuple[OneOpVerdict, ...]:
    """Strategies of which XLA moves other bytes than predicted."""
    cluster = targets.parse(target)
    verdicts = []
    for program in one_op.programs(eqn, cluster):
        try:
            done = compile(one_op.lowered(eqn, program, cluster), target=cluster)
            found = one_op.moved(done.text, program, cluster) if done.ok else done.error
        except NotImplementedError as error:  # the primitive has no lowering for GPUs
            found = str(error)
        verdicts.append(OneOpVerdict(program, found))
    return tuple(v for v in verdicts if v.kind != "same")


def _compare_with_golden(golden: Path, text: str) -> None:
    if not golden.exists():
        golden.write_text(text)
    elif (frozen := golden.read_text()) != text:
        changed = "\n".join(difflib.unified_diff(frozen.splitlines(), text.splitlines(), "frozen", "now", lineterm="", n=0))
        raise RuleError(f"the rules are not as frozen in {golden}:\n{changed}\n  way out: if they are better now, delete the file")
