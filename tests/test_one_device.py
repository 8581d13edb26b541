"""The rates of one device by shape: fits find the constants they were made of, and measuring runs on what is there."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan.mesh import Cluster, ClusterError, kernel_clock, one_device
from shardplan.mesh import calibrate as calibration
from shardplan.mesh.kernel_clock import KernelEvent
from shardplan.mesh.one_device import SHAPES, Shapes, measured
from shardplan.mesh.rates import Attention, Product, kernel_seconds
from shardplan.xla import available, compile

H100 = Cluster.preset("h100")
SMALL = Shapes(((1, 64, 64, 64), (1, 128, 128, 128), (2, 64, 64, 32)), (16,), (32,), 64, 32, 1 << 12)


class FakeGpu:
    """An H100 whose kernels take what the preset says, on whatever it is asked to time."""

    device = dataclasses.replace(
        H100.device,
        products={dtype: dataclasses.replace(rate, sustained=1.0) for dtype, rate in H100.device.products.items()},
        attention={way: dataclasses.replace(rate, sustained=1.0) for way, rate in H100.device.attention.items()},
    )

    def product_s(self, clock, dtype, sizes, effort_s=None):
        moved = one_device._itemsize(dtype) * sizes[0] * sum(math.prod(sizes[1:]) / n for n in sizes[1:])
        took = kernel_seconds(self.device, [Product(dtype, 2.0 * math.prod(sizes), sizes)], moved)
        return took if effort_s is None else took / 0.7

    def attention_s(self, clock, of, shapes):
        ways = (of._replace(backward=False), of) if of.backward else (of,)
        return sum(one_device._flops(x, shapes) / one_device.attention_rate(self.device, "bfloat16", x) for x in ways)

    def update_rate(self, clock, elements):
        return self.device.memory_rate


def test_a_measured_gpu_has_the_rates_that_it_has(monkeypatch, tmp_path):
    gpu = FakeGpu()
    for name in ("product_s", "attention_s", "update_rate"):
        monkeypatch.setattr(one_device, name, getattr(gpu, name))
    found = measured(H100, lambda *_: 0.0, launch_s=2e-6)
    for sizes in (*SHAPES.products, (1, 3000, 1000, 2000), (8, 4096, 512, 64)):  # those that were measured, and others
        for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
            work = [Product(dtype, 2.0 * math.prod(sizes), sizes)]
            ratio = kernel_seconds(found.device, work, 0.0) / kernel_seconds(gpu.device, work, 0.0)
            assert 0.85 < ratio < 1.15 / 0.7
    for of in (Attention(64, 4096, True, False), Attention(128, 1024, False, True)):
        work = [Product("bfloat16", 1e12, attention=of)]
        assert kernel_seconds(found.device, work, 0.0) == pytest.approx(kernel_seconds(gpu.device, work, 0.0) / 0.7, rel=0.05)
    assert {rate.sustained for rate in found.device.products.values()} == {0.7}
    assert found.device.memory_rate == pytest.approx(gpu.device.memory_rate) and found.device.kernel_latency_s == 2e-6
    assert (found.intra, found.inter) == (H100.intra, H100.inter) and "measured by" in found.source
    found.save(tmp_path / "gpu.json")
    assert Cluster.load(tmp_path / "gpu.json") == found


def test_everything_is_measured_on_the_device_that_is_there(monkeypatch):
    monkeypatch.setattr(one_device, "SUSTAINED_S", 0.01)
    bench = calibration._Bench(Mesh(np.array(jax.devices()[:1]), ("x",)), 0.002)
    with jax.set_mesh(bench.mesh):
        found = measured(H100, bench.of_op, 1e-6, SMALL)
    assert {*found.device.products} == {"bfloat16", "float32", "float8"}
    assert all(rate.rows == len(SMALL.products) for rate in found.device.products.values())
    assert found.device.attention == H100.device.attention  # no cuDNN here: the preset's
    assert 0 < found.device.memory_rate <= H100.device.bytes_per_s


def test_a_machine_without_a_gpu_gets_an_error(tmp_path):
    with pytest.raises(ClusterError, match="there is no GPU here"):
        calibration.calibrate_gpu(tmp_path / "gpu.json")
    with pytest.raises(SystemExit, match="way out: jax with CUDA"):
        calibration.main(["--one-gpu", "--out", str(tmp_path / "gpu.json")])
    assert not (tmp_path / "gpu.json").exists()


def test_kernels_are_timed_by_the_profiler_where_it_sees_them(monkeypatch):
    def two_per_run(run):
        run()
        return [
            KernelEvent("dot", "jit_op", "gemm", 0.0, 3000.0),
            KernelEvent("", "jit_op", "copy", 3000.0, 1000.0),
        ] * kernel_clock.RUNS

    monkeypatch.setattr(kernel_clock, "kernel_events", two_per_run)
    bench = calibration._Bench(Mesh(np.array(jax.devices()[:1]), ("x",)), 0.002)
    x = np.ones((16, 16), np.float32)
    assert bench.of_op(jnp.matmul, (x, x)) == pytest.approx(4e-6)
    monkeypatch.setattr(kernel_clock, "kernel_events", lambda run: [])
    assert bench.of_op(jnp.matmul, (x, x)) < 1e-3  # in a loop


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize("rounds", [1, 8])
def test_every_round_of_a_loop_multiplies(rounds):
    everywhere = NamedSharding(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec())
    loop = jax.jit(calibration.rounds_of(lambda i, x, w, out: (x, w, x @ w), rounds), in_shardings=(everywhere,) * 4)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    done = compile(loop, jax.ShapeDtypeStruct((), jnp.int32), x, x, x, target="h100:1")
    assert done.flops == rounds * 2 * 256**3  # in one iteration of the outer loop, whose length XLA does not know
