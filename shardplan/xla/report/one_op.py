"""One op under every strategy of its rule, as programs of its own: the collectives that XLA makes of them against the prediction.

For one mesh axis, three kinds of programs:

    split a:4       operands and results laid out as the strategy says; partial results are asked for whole, and scattered
    partial +:8     operands of a linear op are sums over devices, and so is its result until it is asked for whole
    whole b:4       a dim that the rule keeps whole, split on both sides; the prediction is the cheapest strategy the rule has,
                    with the reshards before and after it

The prediction is the planner's own (`Resharder.path`, `exchanges`): in the first two nothing moves but where a result is partial
or windows reach over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.costs.halo_exchange import exchanges
from shardplan.emit import shard_local as local
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.strategies.enumerate import PARTIAL, OpStrategies, enumerate_strategies
from shardplan.strategies.rule import Rule, factor_sizes
from shardplan.strategies.rules import rule_for
from shardplan.xla.compiler.compile import lower_for
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import collectives
from shardplan.xla.report.compare import wire_bytes
from shardplan.xla_model.promotion import byte_factors

AXIS, REST = "x", "rest"

Moved = tuple[tuple[str, float], ...]
"""Collectives as (kind, bytes of the larger buffer)."""


@dataclass(frozen=True)
class OneOpProgram:
    """One op under one strategy.

    Attributes:
        split: "split a:4", "split a:4 scattered", "partial +:8" or "whole b:4".
        shards: how many devices the axis has.
        operands, results: layouts asked of XLA.
        made: layouts the op itself makes results in, None where partial or not decided.
        planned: collectives predicted.
    """

    split: str
    shards: int
    operands: tuple[Layout, ...]
    made: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    planned: Moved

    @property
    def partial(self) -> bool:
        return self.split.startswith("partial")


def programs(eqn, target: Target) -> Iterator[OneOpProgram]:
    """All strategies of one equation on one mesh axis: every letter over the most devices of the target that divide it."""
    if eqn.effects:
        return
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    rule, _ = rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)
    sizes = factor_sizes(rule, tuple(x.shape for x in ins), tuple(x.shape for x in outs))
    cluster, done = Cluster.preset(target.gpu.key), set()
    for k in (k for k in range(target.n_devices, 1, -1) if target.n_devices % k == 0):
        mesh = MeshShape((AXIS,), (k,))
        op = _Op(rule, ins, outs, enumerate_strategies(rule, sizes, mesh), Resharder(mesh, cluster), k)
        for s, (letter,) in enumerate(op.choices.factors):
            if letter is not None and letter not in done:
                done.add(letter)
                yield from op.split(s, letter)
        for d, factors in enumerate(rule.operands[0] if ins else ()):
            if factors and factors[0] in rule.replicated - done and ins[0].shape[d] % k == 0:
                done.add(factors[0])
                yield op.whole(d, factors[0])


@dataclass(frozen=True)
class _Op:
    """An equation, and what its rule allows on an axis of k devices."""

    rule: Rule
    ins: list
    outs: list
    choices: OpStrategies
    resharder: Resharder
    k: int

    def way(self, x, source: Layout, wanted: Layout) -> list[tuple[str, float]]:
        steps = self.resharder.sending(byte_factors(x.dtype)).path(tuple(x.shape), _jax.itemsize(x.dtype), source, wanted)
        return [(s.kind, s.bytes) for s in steps if s.kind != "slice"]

    def split(self, s: int, letter: str) -> Iterator[OneOpProgram]:
        """Strategy s: partial results asked for whole, and scattered."""
        operands = tuple(layouts[s] for layouts in self.choices.operands)
        made = tuple(layouts[s] for layouts in self.choices.results)
        kind, exchanged = "split", []
        if letter == PARTIAL:  # each operand is a sum over a further leading dim, which is split
            kind, operands = "partial", tuple(Layout(((AXIS,), *x.dims)) for x in operands)
        else:
            found = exchanges(self.rule, (letter,), self.ins, self.outs, operands, self.resharder.mesh, self.resharder.cluster)
            exchanged = [(x.kind, x.bytes) for x in found]
        whole = tuple(x.reduced() for x in made)
        scattered = tuple(scatter(x, layout, self.k) if layout.partial else layout for x, layout in zip(self.outs, made, strict=True))
        decided = tuple(None if layout.partial else layout for layout in made)
        for name, wanted in {"": whole, " scattered": scattered}.items():
            if not name or wanted != whole:
                planned = [c for x, a, b in zip(self.outs, made, wanted, strict=True) for c in self.way(x, a, b)]
                yield OneOpProgram(f"{kind} {letter}:{self.k}{name}", self.k, operands, decided, wanted, (*planned, *exchanged))

    def whole(self, d: int, letter: str) -> OneOpProgram:
        """Dim d, which the rule keeps whole, split wherever it stands: the cheapest strategy has the reshards it takes."""

        def cut(x, dims) -> Layout:
            same = len(dims) == len(self.rule.operands[0]) and set(dims[d]) & self.rule.replicated and x.shape[d] % self.k == 0
            return Layout(tuple((AXIS,) if same and i == d else () for i in range(len(dims))))

        operands = tuple(map(cut, self.ins, self.rule.operands))
        results = tuple(map(cut, self.outs, self.rule.results))

        def reshards(s: int) -> list[tuple[str, float]]:
            before = [self.way(x, a, of[s]) for x, a, of in zip(self.ins, operands, self.choices.operands, strict=True)]
            after = [self.way(x, of[s], a) for x, a, of in zip(self.outs, results, self.choices.results, strict=True)]
            return [c for found in (*before, *after) for c in found]

        ways = [reshards(s) for s, factors in enumerate(self.choices.factors) if factors != (PARTIAL,)]
        planned = min(ways, key=lambda found: sum(wire_bytes(kind, n, self.k) for kind, n in found))
        return OneOpProgram(f"whole {letter}:{self.k}", self.k, operands, (None,) * len(self.outs), results, tuple(planned))


def scatter(x, layout: Layout, k: int) -> Layout:
    """A partial layout, reduced and split on the first free dim that divides."""
    free = next((d for d, n in enumerate(x.shape) if n % k == 0 and n and not layout.dims[d]), None)
    return Layout(tuple((AXIS,) if d == free else axes for d, axes in enumerate(layout.dims)))


def lowered(eqn, program: OneOpProgram, target: Target):
    """The program for the target's devices, of which the strategy's axis may take a part."""
    found = _mesh(program, target)
    mesh = AbstractMesh(found.sizes, found.axes, axis_types=(AxisType.Auto,) * 2)
    ins = [v.aval for v in eqn.invars]
    shapes = [jax.ShapeDtypeStruct((program.shards, *x.shape) if program.partial else x.shape, x.dtype) for x in ins]

    def one_op(*operands):
        if program.partial:
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
    return lower_for(target, step, *shapes)


def _mesh(program: OneOpProgram, target: Target) -> MeshShape:
    return MeshShape((AXIS, REST), (program.shards, target.n_devices // program.shards))


def moved(text: str, program: OneOpProgram, target: Target) -> Moved:
    """The collectives in a compiled program, sorted."""
    found = collectives(text, _mesh(program, target))
    return tuple(sorted((c.kind, float(p.array.bytes)) for c in found if c.group_size > 1 for p in c.parts for _ in range(int(c.runs))))


@dataclass(frozen=True)
class OneOpVerdict:
    """What XLA made of a program; `emitted` is a text where it does not compile."""

    program: OneOpProgram
    emitted: Moved | str

    @property
    def kind(self) -> str:
        """ "same", "dearer", "cheaper", "uncompiled"; a whole dim is "same" unless XLA does better than to gather."""
        if isinstance(self.emitted, str):
            return "uncompiled"
        planned, wire = self._wire(self.program.planned), self._wire(self.emitted)
        if abs(wire - planned) <= 0.01 * planned or (wire > planned and self.program.split.startswith("whole")):
            return "same"
        return "cheaper" if wire < planned else "dearer"

    def _wire(self, found: Moved) -> float:
        return sum(wire_bytes(kind, n, self.program.shards) for kind, n in found)

    def __str__(self) -> str:
        """The split, what was planned, what XLA made."""
        made = "" if isinstance(self.emitted, str) else counted(self.emitted)
        return f"{self.program.split:<22} {counted(self.program.planned):<28} {made}".rstrip()


def counted(found: Moved) -> str:
    """Bytes by kind, the kinds in order."""
    total: dict[str, float] = {}
    for kind, n in sorted(found):
        total[kind] = total.get(kind, 0.0) + n
    return ", ".join(f"{kind} {n:g}" for kind, n in total.items()) or "-"
