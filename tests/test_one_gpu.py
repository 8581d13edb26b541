"""Kernels clocked on a GPU take what its preset says.

Fitted to them were `elements_per_s`, `COLUMN_READ`, `ROW_READ`, `MASKED_BYTE`, `UNTILED_BYTE`, `NARROW_UPDATE`, `DEPTHWISE_MULTIPLY`,
`NOT_SQUARE` and `CHANNEL_BYTES`, and that convolutions keep the rate of short runs.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import one_gpu  # noqa: E402

from shardplan.mesh.cluster import resolve  # noqa: E402

H200 = ROOT / "benchmarks" / "clocked" / "h200"
LONG_S = 2e-5
"""Shorter kernels are latencies."""


@pytest.fixture(scope="module")
def alone():
    """Op measured alone -> (seconds measured, seconds predicted) of its kernels."""
    return one_gpu.ops_of(H200, resolve("h200"))


@pytest.mark.parametrize(
    ("kinds", "median", "p90"),
    [
        (("add ", "cast", "fill", "row-bias", "column-scale", "broadcast", "adam"), 0.03, 0.05),
        (("map ",), 0.03, 0.60),  # `erf` and powers take longer than the memory does
        (("reduce", "argmax", "norm-squares"), 0.05, 0.30),
        (("softmax", "layer-norm", "rms-norm"), 0.12, 0.30),
        (("gather", "scatter-add", "scatter-set", "one-hot"), 0.10, 0.25),  # rows of a few elements take longer
        (("slice", "split", "pad", "reverse", "repeat", "concatenate"), 0.03, 0.07),
        (("transpose", "heads", "images"), 0.12, 0.16),
    ],
)
def test_an_op_alone_takes_what_the_preset_says(alone, kinds, median, p90):
    rows = [pair for name, pair in alone.items() if name.startswith(kinds) and pair[0] > LONG_S]
    errors = np.abs([np.log(predicted / measured) for measured, predicted in rows])
    assert len(rows) >= 5
    assert np.median(errors) <= median
    assert np.quantile(errors, 0.9) <= p90


@pytest.mark.parametrize("kind", ["elementwise", "rows"])
def test_kernels_of_whole_steps_take_together_what_the_preset_says(kind):
    cluster, found = resolve("h200"), np.zeros(2)
    for file in H200.glob("step-*.json.gz"):
        found += np.sum([row[2:] for row in one_gpu.kernels_of(one_gpu.load(file), cluster) if row[1] == kind and row[2]], axis=0)
    assert found[1] == pytest.approx(found[0], rel=0.05)


@pytest.mark.parametrize(("step", "median"), [("resnet-50", 0.11), ("unet", 0.07)])
def test_convolutions_take_what_their_products_do_at_the_rate_of_short_runs(step, median):
    rows = one_gpu.kernels_of(one_gpu.load(H200 / f"step-{step}.json.gz"), resolve("h200"))
    measured, predicted = np.array([row[2:] for row in rows if row[1] == "convolutions"]).T
    errors = np.abs(np.log(predicted / measured))
    assert predicted.sum() == pytest.approx(measured.sum(), rel=0.05)
    assert np.median(errors) <= median
    assert np.quantile(errors, 0.9) <= 0.31
