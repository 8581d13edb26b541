"""A jaxpr read as a `Graph`: the interpreter's skeleton (env, read, write, for eqn in eqns), recording instead of computing."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.ir.canonical import Identity, identity
from shardplan.ir.graph import CAST, Graph, Loop, Op, Path, Phase, Source, Value

NEUTRAL = {"add": 0, "add_any": 0, "sub": 0, "mul": 1, "div": 1}
"""Number that leaves the other operand as it is; the first one, of a difference or quotient (fact: fusion-neutral-operand)."""
KEEP_NUMBER = "broadcast_in_dim", CAST, "copy", "reshape"
"""What has one number for all elements if its operand has."""

MAX_TRIPS = 1e9
"""Upper limit of an op's runs per step, against overflow of costs where loops with huge trip counts nest."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A step as the planner gets it: a flat jaxpr, and what JAX's pytrees said of its inputs and outputs."""

    jaxpr: Any  # closed
    in_labels: tuple[str, ...]  # pytree paths of the flat inputs
    out_labels: tuple[str, ...]  # pytree paths of the flat outputs
    tied: tuple[tuple[int, int], ...]  # (input, output) numbers of state: the output keeps the input's layout
    donated: tuple[int, ...]  # numbers of donated inputs
    padded: frozenset[int] = frozenset()  # numbers of inputs that may be held padded between steps; outputs tied to them, too

    def identity(self) -> Identity:
        """The same for the same program with the same shapes, on every mesh, in every process; see `ir/canonical.py`."""
        return self._identity

    @cached_property
    def _identity(self) -> Identity:
        return identity(self.graph, repr((self.in_labels, self.out_labels, self.tied)))

    def donated_names(self) -> tuple[str, ...]:
        """Donated arguments by name; by leaf where only some leaves of an argument are donated."""
        given = [(label.split("/")[0], label, n in self.donated) for n, label in enumerate(self.in_labels)]
        in_part = {head for head, _, donated in given if not donated}
        return tuple(dict.fromkeys(label if head in in_part else head for head, label, donated in given if donated))

    @cached_property
    def graph(self) -> Graph:
        """The step as a graph."""
        return parse(self.jaxpr, self.in_labels, self.out_labels, self.tied, self.donated, self.padded)


class _Recorder:
    """Ops and values recorded so far, in one call of `parse`."""

    def __init__(self):
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.consumers: list[list[tuple[int, int]]] = []
        self.loops: list[Loop] = []
        self.same_layout: list[tuple[int, int]] = []
        self.numbers: dict[int, Any] = {}  # value -> the one number that the program writes out for all its elements
        self.computed: dict[Hashable, tuple[list[int], Path]] = {}  # what the body that is read has computed so far, and where
        self.repeats: dict[Path, Path] = {}
        self.source = Source()
        self.phase: Phase = "forward"
        self.runs, self.loop = 1.0, -1
        self.seen_backward = False

    @contextmanager
    def body(self) -> Iterator[None]:
        """While the body of a loop or a branch is read, whose equations compute again what was computed outside."""
        outside, self.computed = self.computed, {}
        yield
        self.computed = outside

    def record(self, primitive, inputs, ins, outs, path, params=None, **more) -> list[int]:
        at = len(self.ops)
        outputs = tuple(range(len(self.values), len(self.values) + len(outs)))
        for k, aval in enumerate(outs):
            shape = tuple(getattr(aval, "shape", ()))
            dtype = getattr(aval, "dtype", None)
            self.values.append(Value(shape, dtype, _jax.itemsize(dtype) if dtype is not None else 0.0, (at, k)))
            self.consumers.append([])
        for k, v in enumerate(inputs):
            if v is not None:
                self.consumers[v].append((at, k))
        first = self.ops[self.values[inputs[0]].producer[0]] if inputs and inputs[0] is not None else None
        more["operand_is_broadcast_scalar"] = first is not None and first.scalar_broadcast
        more.setdefault("operand_is_nonzero", first is not None and first.scalar_broadcast and first.operand_is_nonzero)
        more = {"source": self.source, "phase": self.phase, "runs": self.runs, "reads": self.runs, "loop": self.loop} | more
        self.ops.append(Op(primitive, tuple(inputs), outputs, tuple(ins), tuple(outs), params or {}, path, **more))
        return list(outputs)

    def borders(self, primitive, name, inputs, operands, results, path, **more) -> list[int]:
        """One border op per operand; `operands` and `results` are variables, `name` is its part of the path."""
        variables = enumerate(zip(inputs, operands, results, strict=True))
        return [self.record(primitive, [v], [a.aval], [r.aval], (*path, name, k), **more)[0] for k, (v, a, r) in variables]


def parse(
    closed,
    in_labels: Sequence[str] = (),
    out_labels: Sequence[str] = (),
    tied: Sequence[tuple[int, int]] = (),
    donated: Sequence[int] = (),
    padded: Collection[int] = (),
) -> Graph:
    """The graph of a closed jaxpr, from `jax.make_jaxpr` or `jax.jit(f).trace(...).jaxpr`; the other arguments as in `Traced`."""
    g, jaxpr = _Recorder(), closed.jaxpr
    values: list[int | None] = [g.record("const", [], [], [var.aval], ("const", k))[0] for k, var in enumerate(jaxpr.constvars)]
    args = range(len(g.ops), len(g.ops) + len(jaxpr.invars))
    for k, var in enumerate(jaxpr.invars):
        label = in_labels[k] if in_labels else f"[{k}]"
        values += g.record("arg", [], [], [var.aval], ("arg", k), label=label, padded=k in padded)
    results = _read(g, jaxpr, values, ())
    padded = {o for a, o in tied if a in padded}
    outs, g.phase = range(len(g.ops), len(g.ops) + len(results)), "update"
    for k, (v, var) in enumerate(zip(results, jaxpr.outvars, strict=True)):
        made = Source() if v is None else g.ops[g.values[v].producer[0]].source
        label = out_labels[k] if out_labels else f"[{k}]"
        g.record("out", [v], [var.aval], [var.aval], ("out", k), label=label, source=made, padded=k in padded)
    made = tuple(replace(v, consumers=tuple(c)) for v, c in zip(g.values, g.consumers, strict=True))
    pairs = (*g.same_layout, *((args[a], outs[o]) for a, o in tied))
    given = frozenset(args[d] for d in donated)
    return Graph(tuple(g.ops), made, tuple(g.loops), pairs, tuple(args), tuple(outs), given, repeats=g.repeats)


def _read(g: _Recorder, jaxpr, values: Sequence[int | None], path: Path) -> list[int | None]:
    """Record the equations of a jaxpr, from value numbers of its constants and inputs to those of its outputs; None is a literal."""

    def run(n: int, eqn, inputs) -> Sequence[int | None]:
        outer = g.source, g.phase
        if (source := _jax.source(eqn))[0] and (not g.source.file or _jax.names_user(eqn.source_info.traceback)):
            g.source = Source(*source, eqn.source_info.traceback)
        g.phase = _phase(g, eqn, path)
        outputs = _equation(g, eqn, inputs, (*path, n))
        g.source, g.phase = outer
        return outputs

    return _jax.interpret(jaxpr, values, run, literal=lambda _: None)


def _equation(g: _Recorder, eqn, inputs, where: Path) -> Sequence[int | None]:
    if any(which := _jax.behind_barrier(eqn)):
        inputs = [
            v if v is None or not behind else g.record("barrier", [v], [a.aval], [a.aval], (*where, "barrier", k))[0]
            for k, (v, a, behind) in enumerate(zip(inputs, eqn.invars, which, strict=True))
        ]
    if eqn.primitive is jax.lax.optimization_barrier_p:
        return inputs
    if (inner := _jax.inner_jaxpr(eqn)) is not None:
        return _call(g, inner, inputs, where)
    region = _jax.region(eqn)
    if region == "scan":
        body, n_consts, n_carry = _jax.scan_parts(eqn)
        if not eqn.params["length"]:
            return _no_trip(g, eqn, inputs, where, n_consts, n_carry)
        if eqn.params["length"] == 1:
            return _single_trip(g, eqn, inputs, where, n_consts + n_carry, n_carry, body)
        return _loop(g, eqn, inputs, where, float(eqn.params["length"]), n_consts, n_carry, body)
    if region == "while":
        cond, n_cond, body, n_body = _jax.while_parts(eqn)
        return _loop(g, eqn, inputs, where, _trip_count(eqn), n_cond + n_body, len(eqn.outvars), body, cond, n_cond)
    if region == "cond":
        return _cond(g, eqn, inputs, where)
    numbers = [_number(g, v, x) for v, x in zip(inputs, eqn.invars, strict=True)]
    if (same := _unchanged(g, eqn, inputs, numbers)) is not None:
        return [same]
    if (key := _computation(eqn, inputs)) is not None:
        results, first = g.computed.setdefault(key, ([], where))
        if first != where:
            g.repeats[where] = first
            return results
        results += _op(g, eqn, inputs, numbers, where)
        return results
    return _op(g, eqn, inputs, numbers, where)


def _number(g: _Recorder, v: int | None, operand) -> Any:
    """The one number that the program writes out for all elements of an operand, or None."""
    if isinstance(operand, _jax.Literal):
        return operand.val
    return None if v is None else g.numbers.get(v)


def _op(g: _Recorder, eqn, inputs: Sequence[int | None], numbers: Sequence[Any], where: Path) -> list[int]:
    ins, outs = ([x.aval for x in of] for of in (eqn.invars, eqn.outvars))
    nothing = bool(outs) and all(map(_is_empty, outs))  # XLA reads no operand for results without elements, nor operands without any
    inputs = [None if nothing or _is_empty(x) else v for v, x in zip(inputs, ins, strict=True)]
    more = {"operand_is_nonzero": True} if eqn.invars and _is_nonzero(eqn.invars[0]) else {}
    results = g.record(eqn.primitive.name, inputs, ins, outs, where, eqn.params, **more)
    if eqn.primitive.name in KEEP_NUMBER and (number := numbers[0]) is not None and np.size(number) == 1:
        g.numbers[results[0]] = number
    if eqn.primitive.name == "mul" and _is_zero(numbers):
        g.numbers[results[0]] = 0
    return results


def _computation(eqn, inputs: Sequence[int | None]) -> Hashable:
    """What is equal for equations that compute the same; None for one that is no function of values alone, or calls something.

    XLA computes it once (fact: cse-merges-equal-ops). What is made of numbers of the program alone it makes where it is read. A number
    that the program hands to a function is not known inside: what is made of it may be something else.
    """
    name = eqn.primitive.name
    unknown = any(v is None and not isinstance(x, _jax.Literal) for v, x in zip(inputs, eqn.invars, strict=True))
    if unknown or eqn.effects or all(v is None for v in inputs) or "call" in name or name.startswith("rng_"):
        return None
    literals = tuple(np.asarray(x.val).tobytes() for x in eqn.invars if isinstance(x, _jax.Literal))  # of the dtypes in `types`
    types = tuple(x.aval for x in (*eqn.invars, *eqn.outvars))
    params = tuple((param, _exactly(value)) for param, value in sorted(eqn.params.items()))
    try:
        hash(key := (eqn.primitive, *inputs, literals, types, params, eqn.ctx))
    except TypeError:
        return None
    return key


def _exactly(param: Any) -> Hashable:
    """What is equal for equal parameters of equations: to Python, 0.0 is -0.0, and 1 is True."""
    return tuple(map(_exactly, param)) if type(param) is tuple else (type(param), repr(param) if type(param) is float else param)


def _is_zero(factors: Sequence[Any]) -> bool:
    """Whether a product of numbers is zero: a learning rate times the gradient of what the loss does not depend on."""
    known = [x for x in factors if x is not None]
    return len(known) == len(factors) and any(np.all(np.equal(x, 0)) for x in known) and all(np.all(np.isfinite(x)) for x in known)


def _is_nonzero(operand) -> bool:
    """Whether an operand is a literal other than zero."""
    return isinstance(operand, _jax.Literal) and bool(np.all(operand.val))


def _is_empty(aval) -> bool:
    """Whether an array has no elements (fact: partition-empty-arrays)."""
    return 0 in getattr(aval, "shape", ())


def _unchanged(g: _Recorder, eqn, inputs: list[int | None], numbers: Sequence[Any]) -> int | None:
    """The operand that an equation returns unchanged, so that XLA drops it: x + 0, x * 1 and the like, or another type.

    Python's `sum` starts with 0 + x, and optax adds zeros to frozen parameters. The other type is only weak or not, or has another mesh
    of Auto axes, as where JAX calls a function that it traced without a mesh. Or it is all that a concatenation has of elements. A cast
    back to a dtype whose numbers the wider one holds as they are gives what was cast (fact: cse-casts-back).
    """
    if not eqn.outvars:
        return None
    result = eqn.outvars[0].aval
    if (neutral := NEUTRAL.get(eqn.primitive.name)) is not None:
        sides = zip(inputs, eqn.invars, reversed(numbers), strict=True)
        for v, x, number in [*sides][: 2 if eqn.primitive.name in ("add", "add_any", "mul") else 1]:
            is_neutral = number is not None and bool(np.all(np.equal(number, neutral)))
            if is_neutral and v is not None and (x.aval.shape, x.aval.dtype) == (result.shape, result.dtype):
                return v
    if eqn.primitive.name == "concatenate" and not _is_empty(result):
        some = [v for v, x in zip(inputs, eqn.invars, strict=True) if not _is_empty(x.aval)]
        return some[0] if len(some) == 1 else None
    if eqn.primitive.name == CAST and eqn.invars[0].aval.dtype == result.dtype:
        return inputs[0]
    if eqn.primitive.name == CAST and (v := inputs[0]) is not None and (maker := g.ops[g.values[v].producer[0]]).primitive == CAST:
        back = maker.inputs[0] is not None and maker.ins[0].dtype == result.dtype and _holds(maker.outs[0].dtype, result.dtype)
        return maker.inputs[0] if back else None
    if eqn.primitive.name == "reshard" and _jax.is_auto(result.sharding.mesh):
        return inputs[0]
    return None


def _holds(wide, narrow) -> bool:
    """Whether a dtype has all numbers of another, both floating."""
    if not (jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(narrow, jnp.floating)):
        return False
    of, has = jnp.finfo(narrow), jnp.finfo(wide)
    return has.nmant >= of.nmant and has.maxexp >= of.maxexp and has.minexp - has.nmant <= of.minexp - of.nmant


def _phase(g: _Recorder, eqn, path: Path) -> Phase:
    """The phase of an equation, from JAX's name stack.

    A backward op has `transpose(` there, or stands inside one that has. Behind the first of these, an op that is not differentiated
    belongs to the optimizer's update.
    """
    stack = _jax.name_stack(eqn)
    if _jax.BACKWARD in stack or (g.phase == "backward" and path):
        g.seen_backward = True
        return "backward"
    return "update" if g.seen_backward and _jax.DIFFERENTIATED not in stack else "forward"


def _call(g: _Recorder, closed, inputs, path: Path) -> list[int | None]:
    consts = [g.record("const", [], [], [var.aval], (*path, "const", k))[0] for k, var in enumerate(closed.jaxpr.constvars)]
    return _read(g, closed.jaxpr, [*consts, *inputs], path)


def _loop(g: _Recorder, eqn, inputs, path: Path, trips: float, n_consts: int, n_carry: int, body, cond=None, n_cond=0) -> list[int]:
    """Record a loop; its operands are constants (the first `n_cond` of them for `cond`), carries and rows of `xs`."""
    split, loop = n_consts + n_carry, len(g.loops)
    operands, rows, stacked = eqn.invars, body.jaxpr.invars[split:], body.jaxpr.outvars[n_carry:]
    around, outside, inside = g.loop, g.runs, min(g.runs * trips, MAX_TRIPS)
    held = {"runs": inside, "held_during": loop}
    consts = g.borders("loop_const", "const_in", inputs[:n_consts], operands[:n_consts], operands[:n_consts], path, **held)
    first = operands[n_consts:split]
    carries = g.borders("loop_carry", "carry", inputs[n_consts:split], first, first, path, runs=inside)
    slices = g.borders("loop_slice", "xs", inputs[split:], operands[split:], rows, path, **held)
    g.loops.append(Loop(start := len(g.ops), start, trips, inside))
    g.loop, g.runs = loop, inside
    if cond is not None:
        with g.body():
            _call(g, cond, [*consts[:n_cond], *carries], (*path, "cond"))
    with g.body():
        results = _call(g, body, [*consts[n_cond:], *carries, *slices], (*path, "body"))
    g.same_layout += [(g.values[carry].producer[0], len(g.ops) + k) for k, carry in enumerate(carries)]
    out = g.borders("loop_next", "next", results[:n_carry], first, first, path, runs=outside)
    out += g.borders("loop_stack", "ys", results[n_carry:], stacked, eqn.outvars[n_carry:], path, held_during=loop)
    g.loops[loop] = replace(g.loops[loop], stop=len(g.ops))
    g.loop, g.runs = around, outside
    return out


def _no_trip(g: _Recorder, eqn, inputs, path: Path, n_consts: int, n_carry: int) -> list[int | None]:
    """Record a `scan` of no trip: its carries as they come, and stacks without rows (fact: loop-of-no-trip)."""
    stacks = [g.record("const", [], [], [v.aval], (*path, "ys", k))[0] for k, v in enumerate(eqn.outvars[n_carry:])]
    return [*inputs[n_consts : n_consts + n_carry], *stacks]


def _single_trip(g: _Recorder, eqn, inputs, path: Path, split: int, n_carry: int, body) -> list[int | None]:
    """Record the body of a `scan` of one trip: no loop, rows and stacks are reshaped (fact: loop-of-one-trip)."""

    def reshaped(name: str, some, operands, results) -> list[int]:
        found = enumerate(zip(some, operands, results, strict=True))
        return [
            g.record("reshape", [v], [a.aval], [r.aval], (*path, name, k), {"new_sizes": r.aval.shape, "dimensions": None})[0]
            for k, (v, a, r) in found
        ]

    rows = reshaped("xs", inputs[split:], eqn.invars[split:], body.jaxpr.invars[split:])
    results = _call(g, body, [*inputs[:split], *rows], (*path, "body"))
    return [*results[:n_carry], *reshaped("ys", results[n_carry:], body.jaxpr.outvars[n_carry:], eqn.outvars[n_carry:])]


def _trip_count(eqn) -> float:
    """Trips of a counting `while` whose bounds are literals (`fori_loop`); 1 when they are only known at run time."""
    bounds = counted_bounds(eqn)
    if bounds is None or not all(isinstance(x, _jax.Literal) for x in bounds):
        return 1.0
    start, stop, step = (x.val for x in bounds)
    try:
        trips = (stop - start) / step
        return max(1.0, float(np.ceil(trips))) if np.ndim(trips) == 0 else 1.0
    except (ValueError, TypeError):
        return 1.0


def counted_bounds(eqn) -> tuple[Any, Any, Any] | None:
    """(start, stop, step) of a `while` that counts a carry up to a bound, as literals or operands of the equation; None for others.

    A bound that the condition computes from other values is not known.
    """
    cond, n_cond, body, n_body = _jax.while_parts(eqn)
    cond, before, after = cond.jaxpr, body.jaxpr.invars[n_body:], body.jaxpr.outvars
    reads = [*eqn.invars[:n_cond], *eqn.invars[n_cond + n_body :]]  # of the condition
    try:
        (test,) = [e for e in cond.eqns if e.outvars[0] is cond.outvars[0]]
        start, stop = cond.invars.index(test.invars[0]), test.invars[1]
        counter = before[start - n_cond] if start >= n_cond else None
        (step,) = [e for e in body.jaxpr.eqns if e.outvars and e.outvars[0] is after[start - n_cond]]
        if not isinstance(stop, _jax.Literal):
            at = cond.invars.index(stop)
            if at >= n_cond and after[at - n_cond] is not before[at - n_cond]:
                return None  # the bound moves
            stop = reads[at]
        counts = test.primitive.name == "lt" and step.primitive.name == "add" and step.invars[0] is counter
        return (reads[start], stop, step.invars[1]) if counts and isinstance(step.invars[1], _jax.Literal) else None
    except (AttributeError, ValueError, IndexError, TypeError):
        return None


def _cond(g: _Recorder, eqn, inputs, path: Path) -> list[int]:
    g.record("branch_index", inputs[:1], [eqn.invars[0].aval], [], (*path, "index"))
    ends = []
    for b, branch in enumerate(_jax.branches(eqn)):
        entered = g.borders("branch_in", "in", inputs[1:], eqn.invars[1:], eqn.invars[1:], (*path, b))
        with g.body():
            ends.append(_call(g, branch, entered, (*path, b)))
    return [
        g.record("branch_out", [e[k] for e in ends], [var.aval] * len(ends), [var.aval], (*path, "out", k))[0]
        for k, var in enumerate(eqn.outvars)
    ]
