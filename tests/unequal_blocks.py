"""One op as XLA partitions it with dims in unequal blocks, which are filled up with what the op must not read."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from shardplan.emit.shard_local import forms
from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import AxisFactors, enumerate_strategies
from shardplan.strategies.rule import factor_sizes
from shardplan.strategies.rules import rule_for
from shardplan.strategies.uneven import uneven_factors
from shardplan.testing import difference

FILLING, FILLED = 8, (jnp.float32, jnp.int32, jnp.uint32, bool)


def unequal_strategies(eqn, mesh: MeshShape) -> Iterator[tuple[AxisFactors, list[Layout], list[Layout]]]:
    """Factors per mesh axis, layouts of operands and of results, of every strategy in which some dim does not divide evenly."""
    ins, outs = ([v.aval for v in of] for of in (eqn.invars, eqn.outvars))
    rule, _ = rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)
    sizes = factor_sizes(rule, tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in outs))
    found = enumerate_strategies(rule, sizes, mesh, False, None, uneven_factors(rule, traits_of(eqn.primitive.name)))
    for s, factors in enumerate(found.factors):
        taken, made = [of[s] for of in found.operands], [of[s] for of in found.results]
        if not all(layout.divides(tuple(x.shape), mesh) for layout, x in zip(taken + made, ins + outs, strict=True)):
            yield factors, taken, made


def wrong_strategies(eqn, operands, mesh: jax.sharding.Mesh, strategies) -> Iterator[str]:
    """What differs from the whole op under each of the strategies, all compiled in one program."""
    shape = MeshShape(mesh.axis_names, mesh.axis_sizes)

    def constrained(x, layout: Layout):
        return lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*layout.spec()))) if layout.rank else x

    def filled(x, layout: Layout):
        """The array, in blocks that are filled up with a number: XLA fills a constraint's with zeros."""
        if x.dtype not in FILLED or layout.divides(tuple(x.shape), shape):
            return constrained(x, layout)
        flipped = lax.optimization_barrier(_flipped(lax.optimization_barrier(x)))
        return constrained(_flipped(lax.optimization_barrier(constrained(flipped, layout))), layout)

    def run(*xs):
        out = []
        for _, taken, made in strategies:
            placed = [filled(x, layout) for x, layout in zip(xs, taken, strict=True)]
            ys = forms.run(eqn, placed, taken, [None if x.partial else x for x in made], mesh)
            out.append([constrained(y, layout.reduced()) for y, layout in zip(ys, made, strict=True)])
        return out

    operands = [_flipped(_flipped(x)) for x in operands]
    want = jax.jit(lambda *xs: forms.bind(eqn, xs))(*operands)
    for (factors, *_), got in zip(strategies, jax.jit(run)(*operands), strict=True):
        for x, y in zip(got, want, strict=True):
            if (why := difference(x, y)) is not None:
                yield f"{eqn.primitive.name} {[str(v.aval) for v in eqn.invars]} as {factors}: {why}"


def _flipped(x):
    """Zero becomes `FILLING`; undone by itself, exactly where it was done before."""
    return ~x if x.dtype == bool else jnp.asarray(FILLING, x.dtype) - x if x.dtype in FILLED else x
