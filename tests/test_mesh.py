"""The mesh room: layouts, clusters, and collectives' seconds."""

import ast
import dataclasses
import doctest
import json
import math
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.mesh import Cluster, ClusterError, Device, Layout, Link, Measured, MeshShape, Resharder, resolve, seconds
from shardplan.mesh.device import fitted_rates, gpus
from shardplan.mesh.mindspore import operator
from shardplan.mesh.rates import Attention, Product, attention_rate, kernel_seconds

H100 = Cluster.preset("h100")
MESH = MeshShape(("data", "model"), (2, 4))
MB = 1 << 20


def kinds(path):
    return [s.kind for s in path]


# ---- MindSpore's worked example: MatMul, strategy ((2, 1), (1, 4)), 8 devices


def test_mindspore_strategy_gives_device_matrix_and_tensor_maps():
    op = operator("mk,kn->mn", ((2, 1), (1, 4)), 8)
    x, w = op.inputs
    assert op.mesh.sizes == (2, 1, 4)
    assert x.tensor_map(op.mesh) == (2, 1)
    assert w.tensor_map(op.mesh) == (1, 0)
    assert op.output.tensor_map(op.mesh) == (2, 0)
    assert op.output.partial == ()


def test_mindspore_slices_lie_where_its_documentation_puts_them():
    op = operator("mk,kn->mn", ((2, 1), (1, 4)), 8)
    x, w = op.inputs
    x0, x1 = (slice(0, 8), slice(0, 6)), (slice(8, 16), slice(0, 6))
    assert [x.slices((16, 6), op.mesh, d) for d in range(8)] == [x0] * 4 + [x1] * 4
    w0, w1, w2, w3 = ((slice(0, 6), slice(5 * i, 5 * i + 5)) for i in range(4))
    assert [w.slices((6, 20), op.mesh, d) for d in range(8)] == [w0, w1, w2, w3] * 2


def test_mindspore_sharded_sum_is_partial_and_spare_devices_repeat():
    op = operator("mk,kn->mn", ((1, 4), (4, 1)), 8)
    assert op.mesh == MeshShape(("repeated", "m", "k", "n"), (2, 1, 4, 1))
    assert op.output.partial == (("k", "sum"),)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (((2, 1), (2, 4)), "divides dim k of mk,kn->mn into 1 and into 2"),
        (((2,), (1, 4)), "one number per dim"),
        (((3, 1), (1, 1)), "3 shards, which do not divide 8"),
    ],
)
def test_bad_mindspore_strategy_says_why(strategy, text):
    with pytest.raises(ValueError, match=text):
        operator("mk,kn->mn", strategy, 8)


def test_rows_needed_replicated_are_gathered_and_rows_needed_as_columns_are_exchanged():
    mesh = MeshShape(("d",), (4,))
    rows, columns, whole = Layout((("d",), ())), Layout(((), ("d",))), Layout.replicated(2)
    resharder = Resharder(mesh, H100)
    assert kinds(resharder.path((1024, 1024), 4, rows, whole)) == ["all-gather"]
    assert kinds(resharder.path((1024, 1024), 4, rows, columns)) == ["all-to-all"]
    assert kinds(resharder.path((1024, 1024), 4, whole, columns)) == ["slice"]


# ---- clusters


@pytest.mark.parametrize("name", Cluster.presets())
def test_preset_is_sourced_and_survives_a_file(name, tmp_path):
    preset = Cluster.preset(name)
    assert preset.name == name
    assert len(preset.source) > 100
    assert preset.device.flops_efficiency <= 1 and preset.device.bytes_efficiency <= 1 and preset.intra.efficiency <= 1
    preset.save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == preset
    assert hash(Cluster.load(tmp_path / "c.json")) == hash(preset)


@pytest.mark.parametrize("gpu", gpus().values(), ids=lambda g: g.key)
def test_every_figure_of_a_gpu_has_a_source(gpu):
    sourced = {name for names in gpu.sources for name in names.split(", ")}
    assert sourced | {"key", "name", "device_kinds", "node_size", "sources", "products", "attention"} >= {
        f.name for f in dataclasses.fields(gpu)
    }


@pytest.mark.parametrize("name", Cluster.presets())
def test_preset_prices_every_dtype(name):
    device = Cluster.preset(name).device
    for dtype in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8", "int32", "uint8", "bool", "complex64"):
        assert 0 < device.flops_per_s(dtype) <= device.peak(dtype)


def test_measured_cluster_survives_a_file_and_wins_over_the_formulas(tmp_path):
    measured = dataclasses.replace(H100, measured=(Measured("all-reduce", 4, 1, 1e-3, 1e-9),))
    measured.save(tmp_path / "c.json")
    back = Cluster.load(tmp_path / "c.json")
    assert back == measured
    assert seconds("all-reduce", 1e6, ("model",), MESH, back) == pytest.approx(2e-3)
    assert seconds("all-gather", 1e6, ("model",), MESH, back) == seconds("all-gather", 1e6, ("model",), MESH, H100)


RATE = {"efficiency": 0.8, "fill": 100, "edge": 20, "latency_s": 5e-6}


def body(**changes):
    value = json.loads(json.dumps(H100.to_json()))
    for path, new in changes.items():
        *outer, last = path.split("__")
        inner = value
        for name in outer:
            inner = inner[name]
        if new is None:
            del inner[last]
        else:
            inner[last] = new
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", 'field "format"'),
        (json.dumps({"format": "shardplan-plan"}), "no cluster file"),
        (body(version=99), 'field "version" is 99'),
        (body(device__bytes_per_s=None), 'field "device.bytes_per_s" is missing'),
        (body(device__memory_bytes="80GB"), "field \"device.memory_bytes\" must be a positive number, not '80GB'"),
        (body(device__flops={"bfloat16": 1e15}), 'field "device.flops" must be'),
        (body(device=7), 'field "device" must be an object'),
        (body(intra__latency_s=-1), 'field "intra.latency_s" must be a number from 0'),
        (body(intra__bytes_per_s=float("inf")), 'field "intra.bytes_per_s" must be a positive number'),
        (body(inter=[]), 'field "inter" must be an object'),
        (body(node_size=0), 'field "node_size" must be a whole number from 1'),
        (body(node_size=True), 'field "node_size"'),
        (body(reduce_scatter="no"), 'field "reduce_scatter" must be true or false'),
        (body(overlap=2), 'field "overlap" must be a number from 0, less than 1'),
        (body(colour="red"), 'field "colour" is not known'),
        (body(measured=[{"kind": "gossip"}]), 'field "measured\\[0\\]'),
        (body(measured=[7]), 'field "measured\\[0\\]" must be an object, not 7'),
        (body(measured=7), 'field "measured" must be a list, not 7'),
        (body(intra__colour="red"), 'field "intra.colour" is not known; known: bytes_per_s, latency_s'),
        (body(device__flops={"float32": -1}), 'field "device.flops" must be an object of dtype names and positive FLOP/s'),
        (body(device__products={"bfloat16": {"fill": 1}}), 'field "device.products.(efficiency|edge)" is missing'),
        (body(device__products={"bfloat16": {"speed": 1}}), 'field "device.products.bfloat16.speed" is not known'),
        (
            body(device__products={"bfloat16": RATE | {"efficiency": -1}}),
            'field "device.products.efficiency" must be a positive number',
        ),
        (body(platforms=["cuda", 7]), 'field "platforms" must be a list of texts'),
        (" " * 1_000_001, "larger than 1000000 bytes"),
    ],
)
def test_bad_cluster_file_names_the_field(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        Cluster.load(path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(("flops", "name", "kind", "float32")), x, max_size=3),
)
FIELDS = [f.name for f in dataclasses.fields(Cluster)]
INNER = [f"{top}.{f.name}" for top, cls in (("device", Device), ("intra", Link)) for f in dataclasses.fields(cls)]


@given(st.sampled_from(FIELDS + INNER), JUNK)
def test_junk_in_any_field_is_refused_by_name_or_is_no_harm(field, junk):
    value = json.loads(body())
    *outer, last = field.split(".")
    inner = value[outer[0]] if outer else value
    inner[last] = junk
    try:
        cluster = Cluster.from_json(value)
    except ClusterError as e:
        assert last in str(e)
    else:
        assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_missing_cluster_file_says_so(tmp_path):
    with pytest.raises(ClusterError, match=r"nowhere\.json: cannot be read"):
        Cluster.load(tmp_path / "nowhere.json")


def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    H100.save(path)

    def crash(*_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(ClusterError, match=r"cannot be written \(power cut\)"):
        Cluster.preset("a100").save(path)
    assert Cluster.load(path) == H100
    assert os.listdir(tmp_path) == ["c.json"]


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA B200", "b200"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100"),
        ("cuda", "NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("cpu", "cpu", "cpu"),
    ],
)
def test_machine_at_hand_is_known_by_its_device_kind(platform, kind, name):
    assert resolve(None, platform, kind).name == name


def test_resolve_takes_presets_files_and_clusters(tmp_path):
    H100.save(tmp_path / "mine.json")
    assert resolve("h100") == resolve(str(tmp_path / "mine.json")) == resolve(tmp_path / "mine.json") == resolve(H100) == H100


def test_unknown_cluster_lists_presets():
    with pytest.raises(ClusterError, match=r"'h1000' is not known(.|\n)*a100, a100-40gb, b200, cpu, h100, h100-500w, h200"):
        resolve("h1000")
    with pytest.raises(ClusterError, match=r"no preset describes 'Radeon'(.|\n)*h200(.|\n)*calibrate"):
        resolve(None, "rocm", "Radeon")


def test_emulated_devices_share_the_machine(monkeypatch):
    monkeypatch.setattr("shardplan.mesh.cluster.physical_memory_bytes", lambda: 16e9)
    eight, four = resolve("cpu", n_devices=8), resolve("cpu", n_devices=4)
    assert (eight.device.memory_bytes, four.device.memory_bytes) == (2e9, 4e9)
    assert four.device.peak("float32") == 2 * eight.device.peak("float32")
    assert four.axis(MeshShape(("x",), (4,)), "x").nodes == 1


def test_the_mesh_room_imports_no_other_room_and_only_what_measures_imports_jax():
    folder = Path(__file__).parent.parent / "shardplan" / "mesh"
    for file in folder.glob("*.py"):
        for statement in ast.parse(file.read_text()).body:  # what runs at import
            names = [a.name for a in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module] if isinstance(statement, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                below = name.startswith(("shardplan.mesh", "shardplan.files", "shardplan.errors", "shardplan.units"))
                jax = root == "jax" and file.name in ("calibrate.py", "kernel_clock.py", "one_device.py")
                assert root in sys.stdlib_module_names or root in ("numpy", "msgspec") or below or jax, (file, name)


# ---- axes and seconds


def test_an_axis_knows_how_many_of_its_members_share_a_node():
    mesh = MeshShape(("pod", "data", "model"), (2, 4, 4))  # 32 devices, 4 nodes of 8
    found = {axes: dataclasses.astuple(H100.axis(mesh, axes)) for axes in ("model", "data", "pod")}
    assert found == {"model": (4, 4, 1), "data": (4, 2, 2), "pod": (2, 1, 2)}
    assert dataclasses.astuple(H100.axis(mesh, ("data", "model"))) == (16, 8, 2)
    assert dataclasses.astuple(H100.axis(mesh, ("pod", "data"))) == (8, 2, 4)
    assert H100.axis(mesh, ("data", "pod")) == H100.axis(mesh, ("pod", "data"))
    assert dataclasses.astuple(H100.axis(MeshShape(("x",), (12,)), "x")) == (12, 4, 2)
    with pytest.raises(KeyError, match="nowhere"):
        H100.axis(mesh, "nowhere")


ALL = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.mark.parametrize("kind", ALL)
def test_crossing_nodes_is_slower(kind):
    inside = seconds(kind, 64 * MB, ("x",), MeshShape(("x", "y"), (8, 8)), dataclasses.replace(H100, node_size=64))
    across = seconds(kind, 64 * MB, ("x",), MeshShape(("x", "y"), (8, 8)), H100)
    assert across > inside


@pytest.mark.parametrize("kind", ALL)
def test_seconds_grow_with_bytes_and_vanish_on_one_device(kind):
    times = [seconds(kind, n, ("model",), MESH, H100) for n in (0, 1, MB, 64 * MB, 1024 * MB)]
    assert times == sorted(times) and times[0] > 0
    assert seconds(kind, MB, ("x",), MeshShape(("x",), (1,)), H100) == 0


def test_published_bus_bandwidths_come_out():
    mesh, size = MeshShape(("x",), (8,)), 8e9

    def bus(kind, factor, cluster):
        return size / seconds(kind, size, ("x",), mesh, cluster) * factor / 1e9

    assert 398 < bus("all-reduce", 2 * 7 / 8, H100) < 480  # of XLA's tables, and of NCCL's tests
    assert bus("all-gather", 7 / 8, H100) == pytest.approx(345, rel=0.03)
    assert bus("reduce-scatter", 7 / 8, H100) == pytest.approx(345, rel=0.03)
    assert bus("all-reduce", 2 * 7 / 8, Cluster.preset("a100")) == pytest.approx(230, rel=0.1)


@pytest.mark.parametrize(("mib", "measured"), [(1, 44), (16, 234), (256, 423), (4096, 476)])
def test_small_all_reduces_of_eight_h100_are_as_slow_as_measured(mib, measured):
    bytes_ = mib * 2.0**20
    bus = bytes_ * 2 * 7 / 8 / seconds("all-reduce", bytes_, ("x",), MeshShape(("x",), (8,)), H100) / 1e9
    assert bus == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("gpu", "dtype", "sizes", "measured"),
    [
        ("h100", "bfloat16", (1, 256, 256, 256), 6.72e12),
        ("h100", "bfloat16", (1, 1024, 1024, 1024), 253e12),
        ("h100", "bfloat16", (1, 4096, 4096, 4096), 780e12),
        ("h100", "bfloat16", (1, 4096, 256, 4096), 399e12),
        ("h100", "float8_e4m3fn", (1, 8192, 8192, 8192), 1290e12),
        ("a100", "float16", (1, 4096, 4096, 4096), 228e12),
        ("b200", "bfloat16", (1, 4096, 4096, 4096), 1532e12),
    ],
)
def test_products_run_at_the_measured_rate_of_their_shape(gpu, dtype, sizes, measured):
    device = Cluster.preset(gpu).device
    short_run = dataclasses.replace(device, products={k: dataclasses.replace(r, sustained=1.0) for k, r in device.products.items()})
    found = kernel_seconds(short_run, [Product(dtype, 2.0 * math.prod(sizes), sizes)], 0.0)
    assert 2 * math.prod(sizes) / found == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "of", "measured"),
    [
        ("h100", Attention(64, 512, True, False), 225e12),
        ("h100", Attention(128, 16384, False, False), 595e12),
        ("h100", Attention(256, 2048, True, False), 450e12),
        ("a100", Attention(128, 16384, False, False), 226e12),
        ("b200", Attention(128, 4096, True, False), 1090e12),
        ("b200", Attention(64, 1024, False, False), 702e12),
    ],
)
def test_attention_kernels_run_at_the_measured_rate_of_their_shape(gpu, of, measured):
    device = Cluster.preset(gpu).device
    short_run = dataclasses.replace(device, attention={k: dataclasses.replace(r, sustained=1.0) for k, r in device.attention.items()})
    found = kernel_seconds(short_run, [Product("bfloat16", 1e12, attention=of)], 0.0)
    assert 1e12 / found == pytest.approx(measured, rel=0.15)


@given(st.integers(8, 512), st.integers(1, 1 << 17), st.booleans(), st.booleans())
def test_attention_is_faster_per_flop_the_larger_it_is_and_slower_backward(head, keys, causal, backward):
    def rate(head=head, keys=keys, causal=causal, backward=backward):
        return attention_rate(H100.device, "bfloat16", Attention(head, keys, causal, backward))

    assert rate() <= rate(keys=2 * keys) and rate(causal=True) <= rate(causal=False) and rate(backward=True) <= rate(backward=False)
    assert rate(head=16) == pytest.approx(rate(head=64) / 4)  # as long per pair of a query and a key
    assert rate() < H100.device.peak("bfloat16")


def test_a_device_without_rates_of_attention_runs_it_as_large_products():
    plain = dataclasses.replace(H100.device, attention={})
    assert attention_rate(plain, "bfloat16", Attention(64, 512, True, False)) == plain.flops_per_s("bfloat16")


def test_rates_of_attention_name_an_efficiency_for_every_head_size(tmp_path):
    text = json.loads(json.dumps(H100.to_json()))
    text["device"]["attention"]["forward"]["efficiency"] = [0.5]
    (tmp_path / "c.json").write_text(json.dumps(text))
    with pytest.raises(ClusterError, match="with an efficiency for every one of the ascending head sizes"):
        Cluster.load(tmp_path / "c.json")


@given(st.integers(1, 4), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_larger_products_take_no_less_time(b, m, n, k):
    def took(*sizes):
        return kernel_seconds(H100.device, [Product("bfloat16", 2.0 * math.prod(sizes), sizes)], 0.0)

    least = took(b, m, n, k)
    assert all(took(*more) >= least for more in ((b + 1, m, n, k), (b, m + 1, n, k), (b, m, n + 1, k), (b, m, n, 2 * k)))
    assert least > 2.0 * b * m * n * k / H100.device.flops_per_s("bfloat16")


def test_presets_survive_a_file_and_have_their_residuals(tmp_path):
    for name in fitted_rates():
        cluster = Cluster.preset(name)
        cluster.save(tmp_path / "c.json")
        assert Cluster.load(tmp_path / "c.json") == cluster and cluster.intra.bytes_per_s == Cluster.preset(name).intra.bytes_per_s
        assert all(rate.source and rate.median_error < 0.15 for rate in cluster.device.products.values())


def test_a_network_is_a_word_after_the_preset():
    assert resolve("h100@1600G-roce").inter.bytes_per_s == 25e9 and Cluster.preset("a100@400G").inter.bytes_per_s == 6.25e9
    assert Cluster.preset("h100@3200G") == dataclasses.replace(H100, name="h100@3200G", source=Cluster.preset("h100@3200G").source)
    assert Cluster.preset("h100@800G").inter.latency_s == H100.inter.latency_s
    for network in ("400G", "3200G-efa", "1600G-roce", "200G"):
        assert Cluster.preset("h100", nodes=network) == Cluster.preset(f"h100@{network}")
    with pytest.raises(ClusterError, match="network '400G@200G' is not known"):
        Cluster.preset("h100@400G", nodes="200G")
    for wrong in ("h100@fast", "h100@0G", "h100@200G-string", "h100@"):
        with pytest.raises(ClusterError, match="is not known"):
            Cluster.preset(wrong)
    with pytest.raises(ClusterError, match="kinds: ib, roce, efa, tcpx"):
        Cluster.preset("h100@200G-string")


def test_a_lone_member_per_node_drives_one_adapter_and_a_full_node_all_of_them():
    mesh = MeshShape(("x", "y"), (8, 8))
    alone = seconds("all-gather", 1e9, ("x",), mesh, H100)
    assert alone == pytest.approx(7 / 8 * 1e9 / H100.inter.rate, rel=0.01)
    together = seconds("all-gather", 1e9, ("x", "y"), mesh, H100)
    hops = 56 * H100.intra.latency_s + 7 * H100.inter.latency_s + H100.launch_s
    assert 0 < together - hops - 63 / 64 * 1e9 / min(H100.intra.rate, 8 * H100.inter.rate) < H100.inter.bulk_start_s + 63 * 2e-6


def test_all_reduce_is_no_dearer_than_scatter_and_gather():
    for axes in (("data",), ("model",), ("data", "model")):
        for cluster in (c for c in map(Cluster.preset, Cluster.presets()) if not c.measured):
            for n in (1e3, 1e6, 1e9):
                whole = seconds("all-reduce", n, axes, MESH, cluster)
                assert whole <= seconds("reduce-scatter", n, axes, MESH, cluster) + seconds("all-gather", n, axes, MESH, cluster)


def test_unknown_collective_lists_those_there_are():
    with pytest.raises(ValueError, match="'gossip' is none of all-gather"):
        seconds("gossip", 1.0, ("model",), MESH, H100)


def test_documentation_states_the_presets_as_they_are():
    text = (Path(__file__).parent.parent / "docs" / "clusters.md").read_text()
    for name in Cluster.presets():
        c = Cluster.preset(name)
        d, switch = c.device, c.intra.reduce_bytes_per_s
        cells = (
            name,
            f"{d.peak('bfloat16') / 1e12:g}",
            f"{d.flops_per_s('bfloat16') / d.peak('bfloat16'):.2f}",
            f"{d.bytes_per_s / 1e9:.0f}",
            d.bytes_efficiency,
            f"{d.memory_bytes / 2**30:.1f}",
            f"{c.intra.bytes_per_s / 1e9:g}",
            f"{c.intra.efficiency:.2f}",
            f"{switch / 1e9:.0f}" if switch else "–",
            f"{c.inter.bytes_per_s / 1e9:g}",
            f"{c.inter.efficiency:.2f}",
        )
        assert f"| {' | '.join(map(str, cells))} |" in text


def test_the_documented_file_is_a_cluster():
    text = (Path(__file__).parent.parent / "docs" / "clusters.md").read_text()
    example = json.loads(text.split("```json")[1].split("```")[0])
    assert Cluster.from_json(example).name == "mine"
    for optional in ("reduce_scatter", "overlap", "source", "launch_s", "platforms", "device_kinds", "measured"):
        del example[optional]
    assert Cluster.from_json(example).reduce_scatter


@pytest.mark.parametrize("page", ["coming_from_oneflow.md", "coming_from_mindspore.md"])
def test_the_pages_for_newcomers_say_what_happens(page):
    failed, tried = doctest.testfile(str(Path(__file__).parent.parent / "docs" / page), module_relative=False)
    assert tried and not failed
