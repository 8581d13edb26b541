"""Proof in numbers that a rule is right: the split op, its partial results finished, equals the whole one.

    >>> check_rule(jnp.dot, x, w)                  # every op the function traces to, by every letter of its rule
    [Proof(primitive='dot_general', rule='a b, b yb -> a yb  reduce b', splits=('a:8', 'b:4', 'yb:2', ...), how='local', ...)]

For a letter put on a mesh axis, every device gets its shard of the operands and runs the same primitive on it (`LOCAL` holds
the few whose params name a size or a position); shards of the result are put together, partial ones with their collective.
An op with no local form (random bits of one position in the stream) is proven by dependence: what the other devices hold is
replaced, and the device's own shard of the result must stay the same. With a target every strategy is compiled for absent GPUs, too,
and what XLA moves compared with the prediction (`xla/report/one_op.py`).

The devices are real ones; on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count=8 before importing jax.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.emit.shard_local import dynamic_index
from shardplan.emit.shard_local.forms import FORMS, run_form
from shardplan.emit.shard_local.halo import HaloDim, halo_dims
from shardplan.emit.shard_local.window import convolution, windows
from shardplan.strategies.rule import Dims, Rule, RuleError, factor_sizes
from shardplan.strategies.rules import rule_for
from shardplan.xla.compiler import targets
from shardplan.xla.compiler.compile import compile_lowered
from shardplan.xla.report import one_op
from shardplan.xla.report.one_op import OneOpVerdict

AXES = ("s", "t", "u")


@dataclass(frozen=True)
class Proof:
    """One op whose rule held.

    Attributes:
        primitive: its name.
        rule: the rule as text.
        splits: the letters split, each "letter:shards"; several letters at once are separated by a space.
        how: "local" when shards ran on their own, "dependence" when only what a shard depends on was proven.
        types: of operands and results.
        deviations: where XLA moves other bytes than predicted, or does not compile; () without a target.
    """

    primitive: str
    rule: str
    splits: tuple[str, ...]
    how: str
    types: str
    deviations: tuple[OneOpVerdict, ...] = ()

    def __str__(self) -> str:
        """The op's line of the rule table, and one for every deviation."""
        return "\n".join((f"{self.primitive}  {self.types}  {self.rule}", *(f"    {x.kind:<10} {x}" for x in self.deviations)))


def check_rule(
    fn: Callable,
    *args,
    primitive: str | None = None,
    target: str | None = None,
    golden: str | Path | None = None,
    seen: set | None = None,
    pairs: int = 2,
) -> list[Proof]:
    """Prove the rule of every op that `fn(*args)` runs, on the values it meets there.

    Args:
        fn: any traceable function; for one primitive, a function that binds it. Loop bodies are proven on their first turn,
            branches of a conditional on the operands of the one taken.
        *args: concrete arguments.
        primitive: prove only this one.
        target: GPUs that need not be there, like "h100:8": every strategy is compiled for them, and what XLA moves is compared with
            what a plan would say.
        golden: a file of the proofs as text; written where there is none, else they have to be the same.
        seen: signatures already proven, to skip and to add to.
        pairs: how many pairs of letters to split together, beside every single letter.

    Returns:
        One proof per distinct op with a letter to split.

    Raises:
        RuleError: when the split op differs from the whole one, with the rule, the shapes, the split and the largest error; when
            the proofs are not as in `golden`.
        CompilerMissingError: when the target's compiler is not installed.
    """
    seen = set() if seen is None else seen
    closed, leaves = _jax.without_refs(jax.make_jaxpr(fn)(*args)), jax.tree.leaves(args)
    proofs = [
        replace(proof, deviations=_deviations(eqn, target)) if target else proof
        for eqn, operands in equations_run(closed, leaves)
        if primitive in (None, eqn.primitive.name)
        for proof in _prove(eqn, operands, seen, pairs)
    ]
    if golden is not None:
        _hold(Path(golden), "".join(f"{proof}\n" for proof in proofs))
    return proofs


def _hold(golden: Path, text: str) -> None:
    if not golden.exists():
        golden.write_text(text)
    elif (frozen := golden.read_text()) != text:
        changed = difflib.unified_diff(frozen.splitlines(), text.splitlines(), "frozen", "now", lineterm="", n=0)
        raise RuleError(
            f"the rules are not as frozen in {golden}:\n" + "\n".join(changed) + "\n  way out: if they are better now, delete the file"
        )


def _deviations(eqn, target: str) -> tuple[OneOpVerdict, ...]:
    """What XLA makes of every strategy otherwise than predicted."""
    cluster = targets.parse(target)
    verdicts = []
    for program in one_op.programs(eqn, cluster):
        try:
            done = compile_lowered(one_op.lowered(eqn, program, cluster), cluster)
        except NotImplementedError as error:  # the primitive has no lowering for GPUs
            verdicts.append(OneOpVerdict(program, str(error)))
        else:
            verdicts.append(OneOpVerdict(program, one_op.moved(done.text, program, cluster) if done.ok else done.error))
    return tuple(v for v in verdicts if v.kind != "same")


def equations_run(closed, args) -> Iterator[tuple]:
    """Every equation with its operands, in order, through calls and into the first turn of loops; returns the results."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | dict(zip(closed.jaxpr.invars, args, strict=True))
    for eqn in closed.jaxpr.eqns:
        operands = [v.val if isinstance(v, _jax.Literal) else env[v] for v in eqn.invars]
        name, params = eqn.primitive.name, eqn.params
        if (inner := _jax.inner_jaxpr(eqn)) is not None:
            results = yield from equations_run(inner, operands)
        else:
            if name == "scan":
                body = params["jaxpr"]
                if params["length"]:  # an operand of one rank more than the body's is scanned over
                    rows = [x[0] if jnp.ndim(x) > v.aval.ndim else x for x, v in zip(operands, body.jaxpr.invars, strict=True)]
                    yield from equations_run(body, rows)
            elif name == "while":
                n = params["cond_nconsts"]
                yield from equations_run(params["body_jaxpr"], operands[n:])
            elif name == "cond":
                yield from equations_run(params["branches"][int(operands[0])], operands[1:])
            else:
                yield eqn, operands
            results = _jax.bind(eqn, operands)
        env |= dict(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, _jax.Literal) else env[v] for v in closed.jaxpr.outvars]


@dataclass(frozen=True)
class _Op:
    """One equation with the values it ran on and one way to split it."""

    eqn: Any
    rule: Rule
    sizes: dict[str, int]
    operands: tuple
    results: tuple
    shards: dict[str, int]

    @property
    def text(self) -> str:
        return " ".join(f"{a}:{k}" for a, k in self.shards.items())

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(self.shards.values())

    def loops(self, dims: Dims) -> list[str]:
        return [a for d in dims for a in d]

    def part(self, dims: Dims, shape) -> tuple[int, ...]:
        """Shape of one device's shard of a tensor."""
        return tuple(n // math.prod(self.shards.get(a, 1) for a in d) for d, n in zip(dims, shape, strict=True))

    def loop_sizes(self, dims: Dims, shape) -> list[int]:
        """Size of every loop of a tensor; a windowed one differs from tensor to tensor."""
        return [n if len(d) == 1 else self.sizes[a] for d, n in zip(dims, shape, strict=True) for a in d]

    @property
    def local_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one device's shards of all results."""
        return [self.part(d, x.shape) for d, x in zip(self.rule.results, self.results, strict=True)]

    def spec(self, dims: Dims) -> PartitionSpec:
        axes = dict(zip(self.shards, AXES, strict=False))
        return PartitionSpec(*(axes.get(a) for a in self.loops(dims)))

    def where(self, letter: str):
        """This device's number along a letter."""
        return lax.axis_index(AXES[list(self.shards).index(letter)]) if letter in self.shards else 0

    def halo_dims(self, k: int) -> list[HaloDim]:
        """Dims of operand k that are split and slid over."""
        axes = {a: (axis,) for a, axis in zip(self.shards, AXES, strict=False)}
        return halo_dims(self.rule, k, axes, self.shards, self.operands, self.results)

    def everywhere(self, k: int) -> list[HaloDim]:
        """All dims of operand k that are split."""
        return replace(self, rule=replace(self.rule, shard_local=frozenset(self.shards))).halo_dims(k)

    def first(self, dim: tuple[str, ...]):
        """Position along a dim of one letter at which this device's shard begins."""
        return self.where(dim[0]) * (self.sizes[dim[0]] // self.shards.get(dim[0], 1)) if dim else 0

    @property
    def types(self) -> str:
        return " -> ".join(", ".join(str(jax.typeof(x)) for x in side) for side in (self.operands, self.results))

    def fail(self, why: str):
        raise RuleError(
            f"rule '{self.rule}' of {self.eqn.primitive.name} on {self.types} is wrong when split as {self.text}: {why}\n"
            f"  ways out: make a letter whole that needs its neighbours, or name its kind in reduce="
        )


def _prove(eqn, operands, seen: set, pairs: int) -> list[Proof]:
    ins, outs = [jax.typeof(x) for x in operands], [v.aval for v in eqn.outvars]
    rule, known = rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)
    signature = (eqn.primitive.name, *map(str, ins), str({k: v for k, v in eqn.params.items() if k != "jaxpr"}))
    if not known or eqn.effects or signature in seen:
        return []
    seen.add(signature)
    sizes = factor_sizes(rule, tuple(x.shape for x in ins), tuple(x.shape for x in outs))
    operands = [x if hasattr(x, "shape") else jnp.asarray(x, a.dtype) for x, a in zip(operands, ins, strict=True)]
    op = _Op(eqn, rule, sizes, tuple(operands), tuple(_jax.bind(eqn, operands)), {})
    for dims in rule.operands + rule.results:
        if len(op.loops(dims)) != len(set(op.loops(dims))):
            op.fail("a letter stands twice in one tensor")
    if missing := set(rule.reduce) & {a for dims in rule.results for a in op.loops(dims)}:
        op.fail(f"reduced letters {sorted(missing)} stand in a result")
    if rule.linear:
        _prove_linear(op)
    splits = list(_splits(rule, sizes, pairs))
    if not splits:
        return []
    how = "local"
    for n in sorted({_n_devices(s) for s in splits}):
        group = [replace(op, shards=s) for s in splits if _n_devices(s) == n]
        if not _prove_local(group, n):
            how = "dependence"
            for split in group:
                _prove_dependence(split)
    return [Proof(eqn.primitive.name, str(rule), tuple(replace(op, shards=s).text for s in splits), how, op.types)]


def _n_devices(shards: dict[str, int]) -> int:
    k = math.prod(shards.values())
    return 8 if 8 % k == 0 else k


def _splits(rule: Rule, sizes: dict[str, int], pairs: int) -> Iterator[dict[str, int]]:
    """Every letter alone, then `pairs` of them together."""
    found = [a for dims in rule.operands + rule.results for d in dims for a in d]
    free = [a for a in dict.fromkeys(found) if a not in rule.replicated and sizes[a] > 1]
    for a in free:
        counts = [k for k in (8, 4, 2, 3, 5, 7) if sizes[a] % k == 0 and k <= jax.device_count()]
        if counts:
            yield {a: next((k for k in counts if k < sizes[a]), counts[0])}
    even = [a for a in free if sizes[a] % 2 == 0]
    if jax.device_count() >= 4:
        yield from ({a: 2, b: 2} for a, b in list(itertools.pairwise(even))[:pairs])


# ---- the local op on local shards


def _prove_local(group: list[_Op], n_devices: int) -> bool:
    """Whether the op has a local form; raises RuleError when it has one and differs from the whole."""
    op = group[0]

    def split_and_join(operands):
        return [one(split, operands) for split in group]

    def one(split: _Op, operands):
        k = split.devices + ((n_devices // math.prod(split.devices),) if n_devices % math.prod(split.devices) == 0 else ())
        mesh = Mesh(np.asarray(jax.devices()[:n_devices]).reshape(k), AXES[: len(k)])

        def local(*shards):
            # The barrier keeps XLA from reading past a shard's end into the whole operand it was cut from.
            shards = lax.optimization_barrier(shards)
            shards = [
                x.reshape(split.part(dims, whole.shape))
                for x, dims, whole in zip(shards, split.rule.operands, split.operands, strict=True)
            ]
            if split.rule.head:
                raise _NoLocalFormError
            if op.eqn.primitive.name not in LOCAL or (split.rule.shard_local and op.eqn.primitive.name in FORMS):
                results = run_form(op.eqn, shards, [split.halo_dims(k) for k in range(len(shards))])
            else:
                form = LOCAL[op.eqn.primitive.name]
                results = form(split, shards) if form else []
            if [x.shape for x in results] != split.local_shapes:
                raise _NoLocalFormError
            parts = [_finish(split, x) for x in results]
            return [
                x.reshape([n // split.shards.get(a, 1) for a, n in zip(split.loops(d), split.loop_sizes(d, y.shape), strict=True)])
                for x, d, y in zip(parts, split.rule.results, split.results, strict=True)
            ]

        specs = [split.spec(d) for d in split.rule.operands]
        loops = [x.reshape(split.loop_sizes(d, x.shape)) for x, d in zip(operands, split.rule.operands, strict=True)]
        results = jax.shard_map(
            local, mesh=mesh, in_specs=tuple(specs), out_specs=[split.spec(d) for d in split.rule.results], check_vma=False
        )(*loops)
        return [x.reshape(y.shape) for x, y in zip(results, split.results, strict=True)]

    try:
        everywhere = NamedSharding(Mesh(np.asarray(jax.devices()[:n_devices]), AXES[:1]), PartitionSpec())
        joined = jax.jit(split_and_join, out_shardings=everywhere)(jax.device_put([jnp.asarray(x) for x in op.operands], everywhere))
    except _NoLocalFormError:
        return False
    for split, results in zip(group, joined, strict=True):
        for got, want in zip(results, split.results, strict=True):
            if (error := difference(got, want)) is not None:
                split.fail(error)
    return True


class _NoLocalFormError(Exception):
    """The primitive on local shards does not give a local shard of the result."""


def _finish(op: _Op, x):
    """A partial result, finished with the collective of its kind."""
    for letter, axis in zip(op.shards, AXES, strict=False):
        match op.rule.reduce.get(letter):
            case "sum":
                x = lax.psum(x, axis)
            case "max":
                x = lax.pmax(x, axis)
            case "min":
                x = lax.pmin(x, axis)
            case "prod":
                x = lax.reduce_prod(lax.all_gather(x, axis), (0,))
            case "and":
                x = lax.all_gather(x, axis).all(0) if x.dtype == bool else _bitwise(lax.bitwise_and, x, axis, op.shards[letter])
            case "or":
                x = lax.all_gather(x, axis).any(0) if x.dtype == bool else _bitwise(lax.bitwise_or, x, axis, op.shards[letter])
    return x


def _bitwise(join, x, axis, n):
    every = lax.all_gather(x, axis)
    out = every[0]
    for i in range(1, n):
        out = join(out, every[i])
    return out


def as_is(op: _Op, shards, **params):
    """The primitive itself on local shards."""
    return _jax.bind(op.eqn, shards, params)


def sized(param: str):
    """A param that names the shape of the result names the local one."""
    return lambda op, shards: as_is(op, shards, **{param: op.local_shapes[0]})


def _iota(op: _Op, shards):
    shape, dimension = op.local_shapes[0], op.eqn.params["dimension"]
    (x,) = as_is(op, shards, shape=shape)
    return [x + jnp.asarray(op.first(op.rule.results[0][dimension]), x.dtype)]


def _gather(op: _Op, shards):
    return dynamic_index.gather(op.eqn, shards, [op.everywhere(0)])


IDENTITY = {"sum": lambda t: 0, "prod": lambda t: 1, "max": lambda t: _limit(t, -1), "min": lambda t: _limit(t, 1)}


def _limit(dtype, sign: int):
    if jnp.issubdtype(dtype, jnp.floating):
        return sign * jnp.inf
    return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min


def _scatter(op: _Op, shards):
    x, *rest = shards
    for letter, kind in op.rule.reduce.items():
        if letter in op.shards:
            x = jnp.where(op.where(letter) == 0, x, jnp.asarray(IDENTITY[kind](x.dtype), x.dtype))
    return dynamic_index.scatter(op.eqn, [x, *rest], [op.everywhere(0)])


def _conv(op: _Op, shards):
    k, p = op.shards.get("g", 1), op.eqn.params
    groups = {name: max(1, p[name] // k) for name in ("feature_group_count", "batch_group_count")}
    return convolution(op.eqn, shards, [op.halo_dims(0)], groups)


def _windows(op: _Op, shards):
    kind = op.eqn.primitive.name.removeprefix("reduce_window").removeprefix("_")
    fill = IDENTITY[kind](shards[0].dtype) if kind else shards[1]
    return windows(op.eqn, shards, [op.halo_dims(0)], [fill])


def _tile(op: _Op, shards):
    return as_is(op, shards, reps=tuple(n // m for n, m in zip(op.local_shapes[0], shards[0].shape, strict=True)))


LOCAL: dict[str, Callable | None] = {
    "reshape": sized("new_sizes"),
    "broadcast_in_dim": sized("shape"),
    "broadcast_to": sized("shape"),
    "empty": sized("shape"),
    "iota": _iota,
    "gather": _gather,
    "conv_general_dilated": _conv,
    "tile": _tile,
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows),
    **dict.fromkeys(("random_bits", "random_split", "random_gamma")),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"), _scatter),
}
"""Primitives whose params name a size or a position: how they run on local shards; None where an element's position matters."""


# ---- what a shard of the result depends on


def _prove_dependence(op: _Op) -> None:
    """Other devices' elements are exchanged for others; a device's own shard of the result must not notice."""
    if set(op.shards) & set(op.rule.reduce):
        op.fail("the op on local shards does not give a result of the local shape, so a partial result cannot be formed")
    for device in np.ndindex(*op.devices):
        mine = dict(zip(op.shards, device, strict=True))
        operands = [_disturbed(op, x, d, mine) for x, d in zip(op.operands, op.rule.operands, strict=True)]
        for got, want, dims in zip(_jax.bind(op.eqn, operands), op.results, op.rule.results, strict=True):
            own = np.flatnonzero(_own(op, dims, want.shape, mine))
            if (error := difference(got.reshape(-1)[own], want.reshape(-1)[own])) is not None:
                op.fail(f"a shard depends on what other devices hold; {error}")


def _own(op: _Op, dims: Dims, shape, mine: dict[str, int]) -> np.ndarray:
    """Which elements of a tensor the device at `mine` holds, or is sent."""
    own = np.ones([op.sizes[a] for a in op.loops(dims)], bool)
    for axis, a in enumerate(op.loops(dims)):
        if a in mine:
            at = np.arange(op.sizes[a])
            block = at == 0 if a in op.rule.head else at // (op.sizes[a] // op.shards[a]) == mine[a]
            own &= block.reshape([-1 if i == axis else 1 for i in range(own.ndim)])
    return own.reshape(shape)


def _disturbed(op: _Op, x, dims: Dims, mine: dict[str, int]):
    x = jnp.asarray(x)
    own = _own(op, dims, x.shape, mine).reshape(-1)
    index = np.where(own, np.arange(own.size), np.roll(np.arange(own.size), own.size // 2 + 1))
    return x.reshape(-1)[index].reshape(x.shape)


def _prove_linear(op: _Op) -> None:
    """f(x) = f(x - y) + f(y): numbers only, each operand in two parts."""
    if not all(jnp.issubdtype(jax.typeof(x).dtype, jnp.number) for x in op.operands + op.results):
        return
    half = [jnp.roll(jnp.asarray(x).reshape(-1), 1).reshape(jnp.shape(x)) for x in op.operands]
    rest = [jnp.asarray(x) - h for x, h in zip(op.operands, half, strict=True)]
    for a, b, want in zip(_jax.bind(op.eqn, half), _jax.bind(op.eqn, rest), op.results, strict=True):
        if (error := difference(a + b, want)) is not None:
            replace(op, shards={}).fail(f"it is marked linear, but f(x) + f(y) is not f(x + y); {error}")


def difference(got, want) -> str | None:
    """None when equal up to rounding of the dtype (NaN equals NaN), else where and by how much they differ."""
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    got, want = jax.device_get((got, want))
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = got != want
        bound = 0.0
        gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
    else:
        wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
        digits = {8: 1e-11, 4: 3e-5, 2: 4e-2}.get(want.dtype.itemsize // (2 if wide is np.complex128 else 1), 0.6)
        got, want = got.astype(wide), want.astype(wide)
        finite = np.isfinite(want)
        bound = digits * max(1.0, np.abs(want[finite]).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            gap = np.where(finite, np.abs(got - want), np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.inf))
        wrong = ~(gap <= bound)
    if not wrong.any():
        return None
    return f"{wrong.sum()} of {wrong.size} elements differ by up to {np.where(wrong, gap, 0).max():.3g} (allowed {bound:.3g})"
