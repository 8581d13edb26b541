"""One op under every strategy of its rule, each a program of its own: XLA's collectives against the predicted ones.

Three kinds of programs on one mesh axis:

    sharded a:4       operands and results laid out as the strategy says; partial results are requested replicated, and scattered
    partial +:8       operands of a linear op are partial sums, and so is its result until it is requested replicated
    replicated b:4    a dim that needs replication, sharded on both sides; the prediction is the cheapest strategy of the rule with
                      the reshards before and after it

The prediction is the planner's own (`Resharder.path`, `exchanges`): in the first two kinds only partial results and halos move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, AxisType

from shardplan import _jax
from shardplan.costs.halo_exchange import exchanges
from shardplan.emit.shard_local import forms
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.strategies.enumerate import PARTIAL, OpStrategies, enumerate_strategies
from shardplan.strategies.rule import Rule, factor_sizes
from shardplan.strategies.rules import rule_for
from shardplan.xla.compiler.compile import lower_for
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import collectives
from shardplan.xla_model.combining import byte_factors

AXIS, REST = "x", "rest"

Moved = tuple[tuple[str, float], ...]
"""Collectives as (kind, bytes of the larger buffer)."""


@dataclass(frozen=True)
class OneOpProgram:
    """One op under one strategy.

    Attributes:
        strategy: "sharded a:4", "sharded a:4 scattered", "partial +:8" or "replicated b:4"; the axis has `shards` devices.
        operands, results: layouts requested of XLA.
        constrained: layouts that emission constrains the results to; None where partial or left to XLA.
        planned: the predicted collectives.
    """

    strategy: str
    shards: int
    operands: tuple[Layout, ...]
    constrained: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    planned: Moved

    @property
    def partial(self) -> bool:
        """Whether its operands are partial sums."""
        return self.strategy.startswith("partial")


def programs(eqn, target: Target) -> Iterator[OneOpProgram]:
    """All strategies of one equation on one mesh axis: every factor over as many devices of the target as divide it."""
    if eqn.effects:
        return
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    rule, _ = rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)
    sizes = factor_sizes(rule, tuple(x.shape for x in ins), tuple(x.shape for x in outs))
    cluster, done = Cluster.preset(target.gpu.key), set()
    for k in (k for k in range(target.n_devices, 1, -1) if target.n_devices % k == 0):
        mesh = MeshShape((AXIS,), (k,))
        op = _OneOp(rule, ins, outs, enumerate_strategies(rule, sizes, mesh), Resharder(mesh, cluster), k)
        for s, (factor,) in enumerate(op.strategies.factors):
            if factor is not None and factor not in done:
                done.add(factor)
                yield from op.sharded(s, factor)
        for d, factors in enumerate(rule.operands[0] if ins else ()):
            if factors and factors[0] in rule.replicated - done and ins[0].shape[d] % k == 0:
                done.add(factors[0])
                yield op.replicated(d, factors[0])


@dataclass(frozen=True)
class _OneOp:
    """An equation and the strategies of its rule on an axis of k devices."""

    rule: Rule
    ins: list
    outs: list
    strategies: OpStrategies
    resharder: Resharder
    k: int

    def reshard(self, tensors: Iterable, before: Sequence[Layout], after: Sequence[Layout]) -> list[tuple[str, float]]:
        """(kind, bytes) of the collectives between two layouts of each tensor."""
        found = []
        for x, source, target in zip(tensors, before, after, strict=True):
            steps = self.resharder.sending(byte_factors(x.dtype)).path(tuple(x.shape), _jax.itemsize(x.dtype), source, target)
            found += [(s.kind, s.bytes) for s in steps if s.kind != "slice"]
        return found

    def sharded(self, s: int, factor: str) -> Iterator[OneOpProgram]:
        """Strategy s: partial results requested replicated, and scattered."""
        operands = tuple(layouts[s] for layouts in self.strategies.operands)
        made = tuple(layouts[s] for layouts in self.strategies.results)
        kind, exchanged = "sharded", []
        if factor == PARTIAL:  # each operand is a sum over one more leading dim, which is sharded
            kind, operands = "partial", tuple(Layout(((AXIS,), *x.dims)) for x in operands)
        else:
            found = exchanges(self.rule, (factor,), self.ins, self.outs, operands, self.resharder.mesh, self.resharder.cluster)
            exchanged = [(x.kind, x.bytes) for x in found]
        complete = tuple(x.reduced() for x in made)
        scattered = tuple(_scatter(x, layout, self.k) if layout.partial else layout for x, layout in zip(self.outs, made, strict=True))
        constrained = tuple(None if layout.partial else layout for layout in made)
        for name, requested in {"": complete, " scattered": scattered}.items():
            if not name or requested != complete:
                planned = (*self.reshard(self.outs, made, requested), *exchanged)
                yield OneOpProgram(f"{kind} {factor}:{self.k}{name}", self.k, operands, constrained, requested, planned)

    def replicated(self, d: int, factor: str) -> OneOpProgram:
        """Dim d, which needs replication, sharded in operands and results: the reshards of the cheapest strategy."""

        def layout(x, dims) -> Layout:
            same = len(dims) == len(self.rule.operands[0]) and set(dims[d]) & self.rule.replicated and x.shape[d] % self.k == 0
            return Layout(tuple((AXIS,) if same and i == d else () for i in range(len(dims))))

        operands = tuple(map(layout, self.ins, self.rule.operands))
        results = tuple(map(layout, self.outs, self.rule.results))

        def planned(s: int) -> Moved:
            before = self.reshard(self.ins, operands, [of[s] for of in self.strategies.operands])
            return (*before, *self.reshard(self.outs, [of[s] for of in self.strategies.results], results))

        every = (planned(s) for s, factors in enumerate(self.strategies.factors) if factors != (PARTIAL,))
        cheapest = min(every, key=lambda found: _wire(found, self.k))
        return OneOpProgram(f"replicated {factor}:{self.k}", self.k, operands, (None,) * len(self.outs), results, cheapest)


def _scatter(x, layout: Layout, k: int) -> Layout:
    """A partial layout, reduced and sharded along the first replicated dim that divides evenly."""
    free = next((d for d, n in enumerate(x.shape) if n % k == 0 and n and not layout.dims[d]), None)
    return Layout(tuple((AXIS,) if d == free else axes for d, axes in enumerate(layout.dims)))


def lowered(eqn, program: OneOpProgram, target: Target):
    """The program lowered for the target's devices; the strategy's axis may be smaller."""
    shape = _mesh(program, target)
    mesh = AbstractMesh(shape.sizes, shape.axes, axis_types=(AxisType.Auto,) * 2)
    ins = [v.aval for v in eqn.invars]
    shapes = [jax.ShapeDtypeStruct((program.shards, *x.shape) if program.partial else x.shape, x.dtype) for x in ins]

    def one_op(*operands):
        if program.partial:
            operands = [jax.numpy.tensordot(jax.numpy.ones(len(x), x.dtype), x, 1, preferred_element_type=x.dtype) for x in operands]
            return _jax.bind(eqn, operands)
        return forms.run(eqn, operands, program.operands, program.constrained, mesh)

    operands, results = ([_jax.sharding(mesh, x.spec()) for x in side] for side in (program.operands, program.results))
    return lower_for(target, jax.jit(one_op, in_shardings=tuple(operands), out_shardings=results, keep_unused=True), *shapes)


def _mesh(program: OneOpProgram, target: Target) -> MeshShape:
    return MeshShape((AXIS, REST), (program.shards, target.n_devices // program.shards))


def moved(text: str, program: OneOpProgram, target: Target) -> Moved:
    """The collectives in a compiled program, sorted."""
    found = collectives(text, _mesh(program, target))
    return tuple(sorted((c.kind, float(p.array.bytes)) for c in found if c.group_size > 1 for p in c.parts for _ in range(int(c.runs))))


@dataclass(frozen=True)
class OneOpVerdict:
    """A program and the collectives that XLA emitted for it, or the error text where it does not compile."""

    program: OneOpProgram
    emitted: Moved | str

    @property
    def kind(self) -> str:
        """One of "same", "dearer", "cheaper", "uncompiled"; a replicated dim is "same" unless XLA does better than gather it."""
        if isinstance(self.emitted, str):
            return "uncompiled"
        planned, wire = _wire(self.program.planned, self.program.shards), _wire(self.emitted, self.program.shards)
        if abs(wire - planned) <= 0.01 * planned or (wire > planned and self.program.strategy.startswith("replicated")):
            return "same"
        return "cheaper" if wire < planned else "dearer"

    def __str__(self) -> str:
        """Strategy, planned collectives, emitted collectives."""
        made = "" if isinstance(self.emitted, str) else _counted(self.emitted)
        return f"{self.program.strategy:<22} {_counted(self.program.planned):<28} {made}".rstrip()


def _wire(found: Moved, k: int) -> float:
    return sum(wire_bytes(kind, n, k) for kind, n in found)


def _counted(found: Moved) -> str:
    """Bytes by kind, the kinds in order."""
    total: dict[str, float] = defaultdict(float)
    for kind, n in sorted(found):
        total[kind] += n
    return ", ".join(f"{kind} {n:g}" for kind, n in total.items()) or "-"
