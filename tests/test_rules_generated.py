"""Every rule on drawn calls of its primitive; `benchmarks/rules_fuzz.py` runs thousands of them."""

import sys
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generated import CASES, FAMILIES, Case
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.strategies.rule import RULES
from shardplan.testing import check_rule

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import rules_fuzz

NOT_GENERATED = """
    shard_alike tie xla_metadata_value  (placements, too)
    device_put relayout reshard sharding_constraint layout_constraint with_memory_space_constraint  (placements)
    rng_uniform  (each call draws other numbers)
    threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape geqp3 eq_to le_to lt_to to_edtype from_edtype  (inside others)
    scatter_add scatter_sub scatter_mul scatter_max scatter_min  (other spellings)
    broadcast_to empty empty2 polynomial zeros_like log2 one_minus_square  (not made by every version of jax)
    custom_partitioning ffi_call pallas_call core_map mpmd_map dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd_wrapper  (kernels: test_kernels.py, test_attention.py)
    nonbatchable nontraceable nondifferentiable_backward select_if_vmap unvmap_any unvmap_all unvmap_max debug_print debug_callback
        (of Equinox, and printing: test_libraries.py)
    mulhi select_and_scatter platform_index dce_sink  (not lowered for CPU, not reachable, nothing to split)
"""


def drawn(n: int, cases):
    """Runs a function on the same n cases every time."""
    return lambda each: rules_fuzz.quietly(n, derandomize=True)(hypothesis.given(cases)(each))()


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gradients"])
def test_every_strategy_gives_the_result_of_the_global_op(family):
    @drawn({"regions": 2, "special functions": 3}.get(family, 5), FAMILIES[family])
    def _(case):
        kind, why = rules_fuzz.proof(case)
        assert kind != "failed", f"{case}\n{why}"


@pytest.mark.slow
def test_every_primitive_with_a_rule_is_drawn():
    found = set()
    for cases in CASES.values():
        drawn(4, cases)(lambda case: found.update([case.primitive] if case.is_made else []))
    assert found == set(CASES)
    assert set(RULES) - found <= set(NOT_GENERATED.split())


@pytest.mark.parametrize(
    ("fn", "types"),
    [
        (lambda x: lax.reduce_and(x, (0,)), ["int32"]),  # XLA for GPUs aborts
        (lambda x: lax.reduce_or(x, (0,)), ["uint8"]),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), ((-1, 2),), (3,)), ["float32"]),  # XLA aborts
    ],
)
def test_dims_found_wrong_when_sharded_are_replicated(fn, types):
    """Each was drawn once."""
    assert check_rule(fn, *(jnp.arange(8).astype(t) for t in types)) == []


@pytest.mark.parametrize(
    ("fn", "impl", "shardings"),
    [
        (jax.vmap(lambda k, i: jax.random.bits(k, (4,))), "rbg", ("ka:4",)),
        (jax.vmap(lambda k, i: jax.random.split(k, 2)), "unsafe_rbg", ("ka:4",)),
        (jax.vmap(jax.random.fold_in), "unsafe_rbg", ("a:4", "da:4", "a:2 da:2")),
    ],
)
def test_many_keys_shard_where_only_the_first_is_read(fn, impl, shardings):
    proofs = check_rule(fn, jax.random.split(jax.random.key(0, impl=impl), 8), jnp.arange(8))
    assert next(p for p in proofs if p.primitive.startswith("random")).shardings == shardings


@pytest.mark.parametrize("dtype", ["int8", "uint16"])
def test_a_sharded_table_is_read_at_places_of_few_bits(dtype):
    """XLA's partitioner aborts on them."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    table, at = jnp.arange(32.0).reshape(8, 4), jnp.arange(6).astype(dtype)
    lookup = Case("gather", lambda table, at: table[at], (table, at))
    assert rules_fuzz.partitioned(lookup, mesh) == ("sharded", "")
    step = shardplan.auto(mesh, pins={"table": P("x")})(lookup.fn)
    assert np.array_equal(step(table, at), table[at])


SPREAD = {"lhs_dilation": (2,), "dimension_numbers": lax.ConvDimensionNumbers((1, 2, 0), (2, 0, 1), (0, 2, 1))}
CONVOLUTIONS = {
    "rows and output channels": (((1, 16, 1), (2, 3, 1)), ((1, 1),), {"dimension_numbers": ("NHC", "OHI", "NHC")}),
    "images": (((2, 8, 6, 2), (3, 3, 2, 4)), "SAME", {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}),
    "spread apart, and at another place": (((8, 1, 2), (2, 1, 2)), ((0, 2),), SPREAD),
    "spread apart, the first cut off": (((1, 1, 8), (1, 1, 4)), ((-1, 1),), {"lhs_dilation": (3,)}),
}
"""Shapes, padding and parameters."""


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_that_xla_partitions_wrongly_are_right_under_every_strategy(name):
    """They run on shards. Left to XLA, the first two are summed over the devices of the output channels, the last aborts."""
    shapes, padding, params = CONVOLUTIONS[name]
    x, w = (jnp.arange(1.0, 1 + np.prod(n)).reshape(n) for n in shapes)

    def convolved(x, w):
        return lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), padding, **params)

    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    kind, why = rules_fuzz.partitioned(Case("conv_general_dilated", convolved, (x, w)), mesh, most=100)
    assert (kind, why) == ("sharded", "")


def test_xla_sums_a_convolution_over_devices_that_hold_other_channels():
    """Why convolutions over sharded dims are not left to it."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x, w = jnp.arange(16.0).reshape(1, 16, 1), jnp.ones((2, 3, 1))

    def convolved(x, w):
        return lax.conv_general_dilated(x, w, (1,), ((1, 1),), dimension_numbers=("NHC", "OHI", "NHC"))

    rows, channels, both = (jax.NamedSharding(mesh, P(*s)) for s in ((None, "a"), ("b",), (None, "a", "b")))
    found = jax.jit(convolved, in_shardings=(rows, channels), out_shardings=both)(x, w)
    assert np.array_equal(found, 2 * convolved(x, w))


def test_grouped_convolutions_of_small_integers_compile():
    """XLA's partitioner pads int32 with int8 where windows slide over a sharded dim."""
    dims = lax.ConvDimensionNumbers((3, 0, 1, 2), (1, 0, 3, 2), (0, 3, 2, 1))
    x, w = (np.arange(np.prod(n)).reshape(n).astype(np.int8) for n in ((1, 8, 8, 4), (1, 16, 1, 1)))

    def grouped(x, w):
        kinds = {"dimension_numbers": dims, "batch_group_count": 4, "preferred_element_type": np.int32}
        return lax.conv_general_dilated(x, w, (1, 1), ((2, 0), (1, 3)), lhs_dilation=(1, 2), **kinds)

    case = Case("conv_general_dilated", grouped, (x, w))
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    assert rules_fuzz.planned(case, mesh)[0] == "sharded"


@pytest.mark.parametrize("largest", [jnp.max, lambda x: lax.reduce_min(x, (0,))])
def test_a_maximum_over_devices_loses_nan_in_plain_jit_too(largest):
    """Why no NaN is drawn for these: it is XLA's collectives that drop it."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jnp.arange(8.0).at[3].set(np.nan)
    assert jnp.isnan(largest(x)) and not jnp.isnan(jax.jit(largest, in_shardings=jax.NamedSharding(mesh, P("x")))(x))
