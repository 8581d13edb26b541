"""The program with a plan's sharding constraints: its jaxpr is interpreted again, each op constrained as `decide` says.

Same skeleton and same paths as `ir/parse.py`. Every constraint has the name scope `shardplan`, for profilers and HLO.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax

from shardplan import _jax
from shardplan.emit.shard_local import forms
from shardplan.errors import ShardingError
from shardplan.ir.graph import Path
from shardplan.mesh.layout import Layout


@dataclass(frozen=True)
class EmitDecision:
    """Constraints at one op.

    Attributes:
        reads: per operand, the layouts it is brought to, one after the other; () leaves it as it is.
        results: per result, the layout it is made in, or None to leave it to XLA (partial results, scalars).
        copies: per operand, which copy of the array it reads: 0 the first; n > 0 the one that is regathered after n were freed, of a
            recomputed layer's operand behind its barrier; BARRIER the first, behind an optimization barrier, so that XLA does not fuse
            its readers; () is all 0.
        sum_order: mesh axes over which devices sum what they scatter, in the order in which a reader shards the sum; () where the
            op has them in that order.
    """

    reads: tuple[tuple[Layout, ...], ...] = ()
    results: tuple[Layout | None, ...] = ()
    copies: tuple[int, ...] = ()
    sum_order: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(self.reads) or any(r is not None for r in self.results) or any(self.copies) or bool(self.sum_order)


BARRIER = -1
NOTHING = EmitDecision()
NO_REPEATS: Mapping[Path, Path] = MappingProxyType({})


def emit(closed, decisions: Mapping[Path, EmitDecision], mesh, repeats: Mapping[Path, Path] = NO_REPEATS) -> Callable[..., list]:
    """A function of the flat inputs that computes what `closed` does, constrained as decided.

    Args:
        closed: the closed jaxpr that `parse` read.
        decisions: by path; ops without one are left alone.
        mesh: all axes of type Auto (`_jax.auto_twin`); where several meshes are in play it must be the current one.
        repeats: as of `Graph`; an equation there has the results of the earlier one.
    """
    outputs = [None if isinstance(var, _jax.Literal) else var for var in closed.jaxpr.outvars]
    makers = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}

    def run(*args):
        scope = _Scope(decisions, mesh, repeats)
        consts = [scope.result(("const", k), 0, c) for k, c in enumerate(closed.consts)]
        args = [scope.result(("arg", k), 0, a) for k, a in enumerate(args)]
        results = scope.evaluate(closed.jaxpr, consts, args, ())
        return [scope.output(k, x, makers.get(var)) for k, (x, var) in enumerate(zip(results, outputs, strict=True))]

    return run


class _Scope:
    """One function body being traced, and the copies of arrays made in it; bodies inside share no copies with it."""

    def __init__(self, decisions: Mapping[Path, EmitDecision], mesh, repeats: Mapping[Path, Path]):
        self.decisions, self.mesh, self.repeats = decisions, mesh, repeats
        self.repeated = frozenset(repeats.values())
        self.made: dict[Path, list] = {}  # results of equations that others repeat
        self.copies: dict[tuple[int, Layout | int], tuple] = {}

    def inside(self) -> _Scope:
        """The scope of a body inside this one."""
        return _Scope(self.decisions, self.mesh, self.repeats)

    def constrain(self, x, layout: Layout):
        """The array with a sharding constraint."""
        if not layout.rank:
            return x
        with jax.named_scope("shardplan"):
            return jax.lax.with_sharding_constraint(x, _jax.sharding(self.mesh, layout.spec()))

    def read(self, path: Path, k: int, x):
        """Operand k of the op at `path`, constrained to the layouts that it is read in; equal copies are made once."""
        reads = self.decisions.get(path, NOTHING).reads
        for layout in reads[k] if k < len(reads) else ():
            key = (id(x), layout)
            if key not in self.copies:
                self.copies[key] = (self.constrain(x, layout), x)  # x is kept alive: its id is the key
            x = self.copies[key][0]
        return x

    def output(self, k: int, x, maker):
        """Output k of the step, on the source line of the equation that makes it."""
        with _jax.at_source(maker) if maker is not None else contextlib.nullcontext():
            return self.read(("out", k), 0, x)

    def operands(self, path: Path, xs) -> list:
        """All operands of the op at `path`, constrained to the layouts that they are read in."""
        copies = self.decisions.get(path, NOTHING).copies
        xs = [self.separate_copy(n, x, xs) if n else x for n, x in zip(copies or (0,) * len(xs), xs, strict=True)]
        return [self.read(path, k, x) for k, x in enumerate(xs)]

    def separate_copy(self, n: int, x, operands):
        """Array x as the source of its copy number n (`EmitDecision.copies`).

        The barrier keeps XLA's common subexpression elimination from merging the copy with an earlier one (facts:
        cse-merges-equal-reshards, cse-stops-at-barriers). With the first reader's other operands in it, XLA cannot make a regathered
        copy before these exist.
        """
        if (id(x), n) not in self.copies:
            others = [y for y in operands if y is not x and isinstance(y, jax.Array) and n != BARRIER]
            self.copies[id(x), n] = (jax.lax.optimization_barrier((x, *others))[0], x)
        return self.copies[id(x), n][0]

    def result(self, path: Path, r: int, x):
        """Result r of the op at `path`, constrained to the layout that it is made in."""
        results = self.decisions.get(path, NOTHING).results
        layout = results[r] if r < len(results) else None
        return x if layout is None else self.constrain(x, layout)

    def reads(self, path: Path, name: str, xs):
        return [self.read((*path, name, k), 0, x) for k, x in enumerate(xs)]

    def results(self, path: Path, name: str, xs):
        return [self.result((*path, name, k), 0, x) for k, x in enumerate(xs)]

    def reads_results(self, path: Path, name: str, xs):
        """Values read and written at one border of a body: where no reshard is needed, too, they are constrained."""
        return self.results(path, name, self.reads(path, name, xs))

    def recomputed(self, path: Path, xs, which: Sequence[bool]) -> list:
        """The operands of an op, `which` behind its barrier; what is gathered again there stands before it as it was made."""
        decided = [self.decisions.get((*path, k), NOTHING) for k in range(len(xs))]
        regathered = [any(decision.copies) and any(decision.reads) for decision in decided]
        before = [
            self.constrain(x, decision.reads[0][0]) if again else self.read((*path, k), 0, x)
            for k, (x, decision, again) in enumerate(zip(xs, decided, regathered, strict=True))
        ]
        held = iter(jax.lax.optimization_barrier([x for x, behind in zip(before, which, strict=True) if behind]))
        after = [next(held) if behind else x for x, behind in zip(before, which, strict=True)]
        return [self.read((*path, k), 0, x) if again else x for k, (x, again) in enumerate(zip(after, regathered, strict=True))]

    def evaluate(self, jaxpr, consts, args, path: Path) -> list:
        return _jax.interpret(jaxpr, [*consts, *args], lambda n, eqn, operands: self.equation(eqn, operands, (*path, n)))

    def equation(self, eqn, operands, where: Path) -> list:
        if any(which := _jax.behind_barrier(eqn)):
            with _jax.at_source(eqn):
                operands = self.results(where, "barrier", self.recomputed((*where, "barrier"), operands, which))
        if eqn.primitive is jax.lax.optimization_barrier_p:
            return operands
        inner = _jax.inner_jaxpr(eqn)
        region = _jax.region(eqn) if inner is None else "call"
        if region and not (region == "while" and _jax.while_parts(eqn)[0].out_avals[0].shape):  # a batched condition stays as it is
            evaluate = {"call": partial(self.call, inner), "scan": self.scan, "while": self.while_, "cond": self.cond}[region]
            with _jax.at_source(eqn):
                return evaluate(eqn, operands, where)
        where = self.repeats.get(where, where)
        if where not in self.made:
            results = self.op(eqn, operands, where)
            if where not in self.repeated:
                return results
            self.made[where] = results
        return self.made[where]

    def op(self, eqn, operands, where: Path) -> list:
        """Results of an equation without a body, constrained as decided at this path."""
        if where not in self.decisions:
            return forms.run(eqn, operands, [None] * len(operands), [None] * len(eqn.outvars), self.mesh)
        decision = self.decisions[where]
        _refuse_other_numbers(decision, eqn)
        with _jax.at_source(eqn):  # so that XLA hangs collectives on the user's line
            operands = self.operands(where, operands)
        layouts = [reads[-1] if reads else None for reads in decision.reads or [()] * len(operands)]
        placed = _jax.is_placement(eqn) and decision.results[0] is not None  # the plan says where instead
        results = operands if placed else forms.run(eqn, operands, layouts, decision.results, self.mesh, decision.sum_order)
        with _jax.at_source(eqn):
            return [self.result(where, r, x) for r, x in enumerate(results)]

    def call(self, inner, eqn, operands, path: Path) -> list:
        if _jax.is_custom_vmap(eqn):
            run = _jax.batched_as(eqn, lambda *xs: self.inside().evaluate(inner.jaxpr, inner.consts, xs, path))
            return list(run(*operands))
        return self.evaluate(inner.jaxpr, inner.consts, operands, path)

    def scan(self, eqn, operands, path: Path) -> list:
        p = eqn.params
        inner, n_consts, n_carry = _jax.scan_parts(eqn)
        if not p["length"]:  # as XLA does (fact: loop-of-no-trip)
            stacks = _jax.bind(eqn, operands)[n_carry:]
            carries = zip(operands[n_consts : n_consts + n_carry], eqn.outvars, strict=False)
            return [*(_typed_as(x, v.aval) for x, v in carries), *self.results(path, "ys", stacks)]
        if p["length"] == 1:  # as XLA does (fact: loop-of-one-trip)
            split = n_consts + n_carry
            rows = self.reads(path, "xs", operands[split:])
            rows = [jax.lax.reshape(x, row.shape) for x, row in zip(rows, inner.in_avals[split:], strict=True)]
            out = self.evaluate(inner.jaxpr, inner.consts, [*operands[:split], *self.results(path, "xs", rows)], (*path, "body"))
            stacks = self.reads(path, "ys", out[n_carry:])
            stacks = [jax.lax.reshape(x, (1, *row.shape)) for x, row in zip(stacks, inner.out_avals[n_carry:], strict=True)]
            return [*out[:n_carry], *self.results(path, "ys", stacks)]
        consts = self.reads(path, "const_in", operands[:n_consts])
        carries = self.reads(path, "carry", operands[n_consts : n_consts + n_carry])
        rows = self.reads(path, "xs", operands[n_consts + n_carry :])

        def body(carry, row):
            scope = self.inside()
            args = scope.results(path, "const_in", consts) + scope.results(path, "carry", carry) + scope.results(path, "xs", row)
            out = scope.evaluate(inner.jaxpr, inner.consts, args, (*path, "body"))
            return scope.reads_results(path, "next", out[:n_carry]), scope.reads(path, "ys", out[n_carry:])

        carries, stacks = jax.lax.scan(body, carries, rows, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
        return [*self.results(path, "next", carries), *self.results(path, "ys", stacks)]

    def while_(self, eqn, operands, path: Path) -> list:
        test, n_cond, inner, n_body = _jax.while_parts(eqn)
        consts = self.reads(path, "const_in", operands[: n_cond + n_body])
        carries = self.reads(path, "carry", operands[n_cond + n_body :])

        def enter(carry):
            scope = self.inside()
            return scope, scope.results(path, "const_in", consts), scope.results(path, "carry", carry)

        def cond(carry):
            scope, fixed, carry = enter(carry)
            return scope.evaluate(test.jaxpr, test.consts, [*fixed[:n_cond], *carry], (*path, "cond"))[0]

        def body(carry):
            scope, fixed, carry = enter(carry)
            out = scope.evaluate(inner.jaxpr, inner.consts, [*fixed[n_cond:], *carry], (*path, "body"))
            return scope.reads_results(path, "next", out)

        return self.results(path, "next", jax.lax.while_loop(cond, body, carries))

    def cond(self, eqn, operands, path: Path) -> list:
        index, operands = self.read((*path, "index"), 0, operands[0]), operands[1:]

        def branch(b, inner):
            def run(*args):
                scope = self.inside()
                args = scope.reads_results((*path, b), "in", args)
                out = scope.evaluate(inner.jaxpr, inner.consts, args, (*path, b))
                return [scope.read((*path, "out", k), b, x) for k, x in enumerate(out)]

            return run

        branches = [branch(b, inner) for b, inner in enumerate(_jax.branches(eqn))]
        return self.results(path, "out", jax.lax.switch(index, branches, *operands))


def _refuse_other_numbers(decision: EmitDecision, eqn) -> None:
    """Raises ShardingError if a decision, as from a changed plan file, is about more or fewer operands and results than the op has."""
    n, known = len(eqn.invars), len(decision.results) == len(eqn.outvars)
    if not known or any(len(x) not in (0, n) for x in (decision.reads, decision.copies)):
        file, line, _ = _jax.source(eqn)
        raise ShardingError(
            f"the plan decides {len(decision.reads)} operands and {len(decision.results)} results of {eqn.primitive.name} at "
            f"{file}:{line}, which has {n} and {len(eqn.outvars)}.\n  way out: plan anew without plan="
        )


def _typed_as(x, aval):
    """A value whose dtype is not weak where that of `aval` is not: `0.0` that a loop of no trip hands on is an array of float32."""
    return x if aval.weak_type or not jax.typeof(x).weak_type else jax.lax.convert_element_type(x, aval.dtype)
