"""A step in which every call of one primitive runs on shards, with the numbers of the plain step and no warning."""

import warnings

import jax
from clusters import NEAR

import shardplan
from shardplan import ShardingWarning
from shardplan.testing import difference


def on_shards(primitive, fn, *args, mesh, **options):
    """(planned step, how many of its ops are such calls), after its results are compared with the plain ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        step = shardplan.auto(mesh, cluster=NEAR, **options)(fn)
        got = step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert difference(a, b) is None
    planned = step.plan(*args).context.planned
    calls = [i for i, op in enumerate(planned.graph.ops) if op.primitive == primitive]
    assert calls and all(any(planned.space.strategies[i].factors[planned.strategies[i]]) for i in calls)
    return step, len(calls)
