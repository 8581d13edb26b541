"""Calibration: what is fitted, stored, and how well it predicts this machine."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.mesh import Cluster, ClusterError, Layout, MeshShape, Resharder, seconds
from shardplan.mesh.calibrate import _Bench, calibrate, fit
from shardplan.mesh.cluster import KINDS

positive = st.floats(1e-9, 1e-3)


@given(positive, st.floats(1e-12, 1e-8))
def test_fit_finds_the_line_it_was_given(constant, slope):
    sizes = (4096, 65536, 1 << 20, 1 << 24)
    assert fit(sizes, [constant + slope * s for s in sizes]) == pytest.approx((constant, slope), rel=1e-3)


@given(st.lists(positive, min_size=3, max_size=6))
def test_fit_is_never_negative(times):
    constant, slope = fit([4**i for i in range(len(times))], times)
    assert constant >= 0 and slope >= 0 and constant + slope > 0


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate") / "here.json"
    mesh = jax.make_mesh((8,), ("x",))
    return calibrate(mesh, path, progress=True, effort_s=0.005), path


def test_calibration_is_stored_completely(measured):
    cluster, path = measured
    assert Cluster.load(path) == cluster
    assert {(m.kind, m.members, m.nodes) for m in cluster.measured} == {(k, 8, 1) for k in KINDS}
    assert cluster.device.flops_per_s("float32") > 1e8
    assert 1e8 < cluster.device.memory_rate < 1e13
    assert not cluster.reduce_scatter
    assert "measured by shardplan.calibrate on 8 devices" in cluster.source


def test_calibration_prices_reshards(measured):
    cluster, _ = measured
    mesh = MeshShape(("x",), (8,))
    (step,) = Resharder(mesh, cluster).path((1024, 1024), 4, Layout((("x",), ())), Layout(((), ())))
    assert step.seconds == seconds("all-gather", 1 << 22, ("x",), mesh, cluster) > 0


def test_calibration_predicts_what_is_measured_next(measured):
    cluster, _ = measured
    bench = _Bench(jax.make_mesh((8,), ("x",)), effort_s=0.005)
    ratios = []
    with jax.set_mesh(bench.mesh):
        for kind in KINDS:
            for bytes_ in (1 << 14, 1 << 20):
                predicted = seconds(kind, bytes_, ("x",), bench.shape, cluster)
                ratios.append(bench.collective(kind, ("x",), bytes_) / predicted)
    assert 1 / 3 < np.median(ratios) < 3  # other work on this machine comes and goes


def test_every_sort_of_group_is_measured_once():
    bench = _Bench(jax.make_mesh((2, 2, 2), ("a", "b", "c")), effort_s=0.005)
    assert [(link.members, axes) for link, axes in bench.groups.items()] == [(2, ("a",)), (4, ("a", "b")), (8, ("a", "b", "c"))]


def test_calibration_needs_devices():
    with pytest.raises(ClusterError, match="not AbstractMesh: nothing can be timed"):
        calibrate(jax.sharding.AbstractMesh((8,), ("x",)))
