"""Published training steps are built and predicted, without the published figures."""

import dataclasses
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import published
import published_systems

from shardplan.strategies.rule import RULES
from shardplan.xla_model.compiler_options import XlaOptions

ROW = defaultdict(
    str,
    id="tiny", framework="torchtitan", model="tiny", layers="10", d_model="256", heads="8", kv_heads="2", d_ff="512", gated="swiglu",
    vocab="1024", seq="512", gpu="H100-80GB SXM", gpus="8", fsdp="8", gbs="64", remat="none", step_s="0.01",
)  # fmt: skip
"""A row of steps.csv; what it does not say is empty."""


@pytest.fixture(scope="module", autouse=True)
def own_rules():
    """The rules of published attention kernels are those of this module."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.fixture(scope="module")
def row():
    return published.predicted(ROW)


def test_seconds_are_linear_in_layers(row):
    shape = dataclasses.replace(published.shape_of(ROW), layers=5)
    few, more = (published.planned(ROW, dataclasses.replace(shape, layers=n)) for n in (5, 10))
    assert row.predicted_s == pytest.approx(more.predicted_s, rel=0.05)
    assert few.predicted_s < 0.7 * more.predicted_s


def test_parts_sum_to_the_step(row):
    assert sum(row.parts.values()) == pytest.approx(row.predicted_s)
    assert row.low_s < row.predicted_s < row.high_s and row.parts["attention"] > 0


def test_the_peak_of_deep_models_is_extrapolated(row, monkeypatch):
    """Of a few layers it may be where the gradient of embeddings is: these are MPT-70B's gigabytes on 64 GPUs in 4 microbatches."""
    peaks = {2: 11.303, 3: 11.508, 4: 11.979, 6: 12.919, 8: 13.860, 12: 15.742}
    monkeypatch.setattr(published, "planned", lambda _, shape: dataclasses.replace(row, peak_bytes=peaks[shape.layers]))
    shape = dataclasses.replace(published.shape_of(ROW), layers=12)
    assert published.extrapolated(ROW, shape).peak_bytes == pytest.approx(peaks[12], rel=0.001)


def test_the_state_is_kept_in_32_bits():
    """Also where collectives are of 16: PyTorch's FSDP keeps its shards in full precision (torch.distributed.fsdp.MixedPrecision)."""
    for param_dtype in ("bf16 shards (PURE)", "fp32 shards, bf16 comm (DEFAULT)"):
        shape = published.shape_of(ROW | {"param_dtype": param_dtype, "precision": "bf16"})
        assert shape.compute_dtype == "bfloat16" and state_dtypes(shape) == {"float32", "int32"}


def test_steps_are_grouped_by_the_blocks_that_the_memory_left_holds():
    block = published.models.block_bytes(published.shape_of(ROW))
    rows = [
        published.Row(name, "family", 8, 1e6, 1.0, predicted, 0.0, 2.0, 0.0, {}, 100 * block - left * block, 100.0 * block, 0.0)
        for name, predicted, left in (("short", 0.7, 10), ("near", 0.95, 15), ("roomy", 1.1, 80))
    ]
    table = [ROW | {"id": name} for name in ("short", "near", "roomy")]
    (short, *counts), roomy = published.by_memory_left(rows, table)
    assert short == "0 to below 16" and counts == [2, "-17.5%", "-30.0%", 1]
    assert roomy[0] == "64 and more" and roomy[1:] == (1, "+10.0%", "+10.0%", 0)
    assert not published.by_memory_left(rows, [row | {"framework": "Pax (JAX)"} for row in table])


def test_layouts_of_one_model_are_compared():
    table = [ROW | {"id": "slow", "tp": "1"}, ROW | {"id": "fast", "tp": "2"}]
    rows = [
        published.Row(name, "family", 8, 1e6, seconds, predicted, 0.0, 2.0, 0.0, {}, 1.0, 2.0, 0.0)
        for name, seconds, predicted in (("slow", 1.0, 0.8), ("fast", 0.5, 0.9))
    ]
    ((_, gpus, in_order, off),) = published.layouts(rows, table)
    assert (gpus, in_order) == ("8 8", "0 of 1") and float(off.rstrip("%")) == pytest.approx(50, abs=1)
    assert not published.layouts(rows, table, scales=True)
    once = [row | {"tp": "1"} for row in table]  # one layout, timed twice
    assert not published.layouts(rows, once) and not published.layouts(rows, once, scales=True)
    larger = [rows[0], dataclasses.replace(rows[1], gpus=16)]
    assert not published.layouts(larger, once) and published.layouts(larger, once, scales=True)[0][1:3] == ("8 16", "0 of 1")


FSDP_OF_IBM = {"framework": "PyTorch FSDP (IBM fms-fsdp)", "remat": "selective"}


@pytest.mark.parametrize(
    ("given", "saved", "one_of"),
    [
        ({"remat": "none"}, None, 1),
        ({"remat": "every block"}, (), 1),
        ({"remat": "recipe default (selective)"}, published_systems.TORCHTITAN_SAVES, 1),
        ({"remat": "selective", "framework": "Megatron-Core"}, None, 1),
        ({"remat": "selective", "framework": "Megatron-LM 2022"}, published.models.NAMES, 1),
        ({"remat": "minimal_flash (save dots and attention out)", "framework": "MaxText"}, published.models.NAMES, 1),
        ({**FSDP_OF_IBM, "gpu": "A100-80GB"}, (), 3),
        (FSDP_OF_IBM, (), 5),
        ({**FSDP_OF_IBM, "remat": "none"}, None, 1),
    ],
)
def test_a_layer_saves_what_its_system_does(given, saved, one_of):
    shape = published.shape_of(ROW | given)
    assert (shape.saved, shape.recompute_one_of) == (saved, one_of)


def test_one_layer_of_several_is_computed_again():
    shape = dataclasses.replace(published.shape_of(ROW), layers=6)
    every, third, none = (
        published.planned(ROW, dataclasses.replace(shape, saved=saved, recompute_one_of=n)).parts["products"]
        for saved, n in (((), 1), ((), 3), (None, 1))
    )
    assert third - none == pytest.approx((every - none) / 3, rel=0.01) and every > 1.1 * none


def test_kernels_of_unfused_attention_are_those_of_its_system():
    pax, megatron = {"framework": "Pax (JAX)"}, {"framework": "Megatron-LM 2021"}
    found = [
        set(re.findall(r"published_(exponentials|row_products|dropout|dropped)", str(jaxpr_of(dataclasses.replace(shape, layers=1)))))
        for shape in (published.shape_of(ROW | given | {"kv_heads": "8"}) for given in (pax, pax | {"precision": "bf16 TE"}, megatron))
    ]
    assert found == [{"exponentials", "row_products"}, set(), {"dropout", "dropped"}]


def test_only_systems_on_jax_are_ordered_by_estimates():
    shape, sizes = published.shape_of(ROW), published.mesh_of(ROW)
    profiled = [
        XlaOptions.of(published.compiler_options(ROW | {"framework": name}, shape, sizes)).profiled
        for name in ("torchtitan", "PyTorch FSDP (llm-foundry, Mosaic)", "MaxText", "Pax (JAX) CI", "another (JAX)")
    ]
    assert profiled == [True, True, False, False, False]


def test_a_layer_that_saves_less_is_computed_again():
    shape = dataclasses.replace(published.shape_of(ROW), layers=2)
    names = published.models.NAMES
    seconds = [published.planned(ROW, dataclasses.replace(shape, saved=saved)).parts for saved in (names, names[:3], ())]
    products, attention = ([parts[kind] for parts in seconds] for kind in ("products", "attention"))
    assert products[0] < products[1] < products[2] and attention[0] < attention[1] == attention[2]


def built(shape):
    mesh = jax.sharding.AbstractMesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    return published.models.build(shape, mesh, {"data": 1, "fsdp": 8, "tensor": 1}, 3)


def jaxpr_of(shape):
    step, state, batch, _ = built(shape)
    return jax.make_jaxpr(step)(state, batch)


def state_dtypes(shape):
    return {str(x.dtype) for x in jax.tree.leaves(built(shape)[1])}


def test_each_microbatch_gathers_the_weights_that_the_state_holds_in_shards():
    shape = dataclasses.replace(published.shape_of(ROW), layers=2, width=2048, hidden=8192, seq=64)
    one, four = (published.planned(ROW, dataclasses.replace(shape, accum=n, batch=8 * n)) for n in (1, 4))
    whole = 4 * four.params  # bytes of float32
    assert four.peak_bytes < one.peak_bytes + 0.25 * whole  # the totals, and a gather at a time
    assert four.parts["exposed"] > 2 * one.parts["exposed"]


def test_products_of_8_bits_read_transposed_copies():
    shape = dataclasses.replace(published.shape_of(ROW), layers=1, float8="delayed")
    kernels = Counter(re.findall(r"published_transposed\w*", str(jaxpr_of(shape))))
    assert kernels == {
        "published_transposed": 14,
        "published_transposed_matrix": 7,
    }  # of 7 products: operand and gradient, and the weight


def test_steps_that_ran_are_compared_with_the_memory(row):
    assert 0 < row.peak_bytes < row.gpu_bytes and row.fits
    large = dataclasses.replace(row, peak_bytes=1.5 * row.gpu_bytes, published_bytes=row.gpu_bytes)
    needed = dataclasses.replace(row, kept_peak_bytes=1.1 * row.gpu_bytes)
    ((_, rows, fitting, _, largest, of_published, *again),) = published.fitting({"some": [row, large, needed]})
    assert (rows, fitting, largest, of_published, again) == (3, 2, "1.50", "1.50", [1, 1]) and not large.fits


def test_what_blocks_that_are_computed_again_would_hold_is_known(row):
    again = published.predicted(ROW | {"remat": "every block"})
    assert again.peak_bytes < again.kept_peak_bytes == row.peak_bytes and row.kept_peak_bytes == 0


def test_peaks_of_systems_on_jax_are_those_of_the_schedule():
    on_jax = published.predicted(ROW | {"framework": "MaxText", "layers": "4"})
    assert 0 < on_jax.peak_bytes < on_jax.gpu_bytes
