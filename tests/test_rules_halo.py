"""Dims that windows slide over: what neighbours exchange, by hand, in numbers, and as XLA does it."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.mesh.cluster import Cluster, Link
from shardplan.strategies.rule import Halo
from shardplan.testing import check_rule, difference
from shardplan.xla import available


@pytest.mark.parametrize(
    ("halo", "n", "m", "shards", "hops"),
    [
        (Halo((0,), window=3, low=1), 16, 16, 4, {-1: 1, 1: 1}),
        (Halo((0,), window=3, stride=2, low=0), 16, 8, 4, {-1: 1}),
        (Halo((0,), window=2, stride=2), 16, 8, 4, {}),
        (Halo((0,), window=7, low=3), 16, 16, 8, {-2: 1, -1: 2, 1: 2, 2: 1}),
        (Halo((0,), window=3, low=1, dilation=2), 8, 16, 4, {-1: 1}),
        (Halo((0,), window=3), 12, 10, 2, {-1: 1, 1: 1}),
    ],
)
def test_a_shard_needs_what_its_windows_reach(halo, n, m, shards, hops):
    assert halo.hops(n, m, shards) == hops


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_windows_of_any_kind_are_split_rightly(window, stride, low, high, dilation, spread):
    """A convolution and a maximum along one dim, every way the numbers allow; 8 devices."""
    x = jnp.sin(jnp.arange(48.0)).reshape(2, 24, 1)
    w = jnp.cos(jnp.arange(2.0 * window)).reshape(window, 1, 2)
    sizes = {"window_strides": (stride,), "padding": ((low, high),)}
    dims = ("NWC", "WIO", "NWC")
    check_rule(
        lambda x, w: lax.conv_general_dilated(
            x, w, lhs_dilation=(dilation,), rhs_dilation=(spread,), dimension_numbers=dims, **sizes
        ), x, w,
    )  # fmt: skip
    shape = (window,), (stride,), ((low, high),), (dilation,), (spread,)
    check_rule(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *shape), x[0, :, 0])


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step(params, images, smooth=True):
    """One step of a small image model on one image: rows and columns can be split."""

    def loss(params):
        x = jnp.tanh(conv(images, params[0]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jnp.tanh(conv(x, params[1], 2))
        x = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") if smooth else x
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def values(channels=(3, 5, 7)):
    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(0, 0.2, (3, 3, a, b)), "float32") for a, b in itertools.pairwise(channels)]
    return params, jnp.asarray(random.normal(0, 1, (1, 64, 64, channels[0])), "float32")


H100 = Cluster.preset("h100")
IDEAL = Link(1e15, 0.0)
NEAR = replace(H100, intra=IDEAL, inter=IDEAL, launch_s=0.0)
"""Links so fast that small images are split, too."""


@pytest.mark.parametrize("pin", [P(None, "x"), P(None, "x", "y"), P(None, None, ("x", "y"))])
def test_rows_and_columns_of_images_are_split_and_nothing_changes(pin):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    args = values()
    planned = shardplan.auto(mesh, cluster=NEAR, pins={"images": pin})(step)
    for got, want in itertools.zip_longest(jax.tree.leaves(planned(*args)), jax.tree.leaves(jax.jit(step)(*args))):
        assert difference(got, want) is None
    assert any(c.kind == "collective-permute" for d in planned.plan(*args).decisions for m in d.moves for c in m.collectives)


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_xla_exchanges_what_the_plan_says():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    params, _ = values((8, 64, 64))
    images = jax.ShapeDtypeStruct((1, 2048, 2048, 8), "float32")
    planned = shardplan.auto(mesh, cluster="h100", pins={"images": P(None, "x", "y")}, static_argnums=2)(step)
    report = planned.check(params, images, False, target="h100:8")
    permutes = [c for c in report.compiled.collectives if c.kind == "collective-permute"]
    assert permutes and 0.99 < report.collectives_ratio < 1.01, str(report)
