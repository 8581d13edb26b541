"""Published training steps are built and predicted, without the published figures."""

import dataclasses
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import published

from shardplan.strategies.rule import RULES

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


def test_layouts_of_one_model_are_compared():
    table = [ROW | {"id": name} for name in ("slow", "fast")]
    rows = [
        published.Row(name, "family", 8, 1e6, seconds, predicted, 0.0, 2.0, 0.0, {})
        for name, seconds, predicted in (("slow", 1.0, 0.8), ("fast", 0.5, 0.9))
    ]
    ((_, gpus, in_order, off),) = published.layouts(rows, table)
    assert (gpus, in_order) == ("8 8", "0 of 1") and float(off.rstrip("%")) == pytest.approx(50, abs=1)
