"""What the reader makes of real compiles: golden text of every stored module, then the claims one by one."""

import gzip
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.mesh.layout import MeshShape
from shardplan.xla.hlo.collectives import collectives
from shardplan.xla.hlo.groups import axes_of, groups, linked_groups, pairs
from shardplan.xla.hlo.products import flops, products
from shardplan.xla.hlo.schedule import kernels
from shardplan.xla.hlo.text import HloArray, arrays, elements, read

DATA = pathlib.Path(__file__).parent / "data" / "hlo"
MESH = MeshShape(("data", "model"), (4, 2))
STORED = sorted(p.name.removesuffix(".hlo.gz") for p in DATA.glob("*.hlo.gz"))


def stored(name: str) -> str:
    return gzip.decompress((DATA / f"{name}.hlo.gz").read_bytes()).decode()


def describe(name: str) -> str:
    text = stored(name)
    lines = [f"{name}: {flops(text):.6g} flops"]
    for c in collectives(text, MESH):
        marks = ["async"] * c.asynchronous + ["trips unknown"] * c.guessed
        lines.append(f"  {c}" + (f"   [{', '.join(marks)}]" if marks else ""))
    lines += [f"  {p.kind} {p.result} {p.flops:.6g} flops x {p.runs:g}, {p.source}" for p in products(text)]
    return "\n".join(lines)


def test_golden_text_of_stored_modules():
    assert "\n\n".join(map(describe, STORED)) + "\n" == (DATA / "golden.txt").read_text()


@pytest.mark.parametrize("name", [n for n in STORED if n.startswith("fsdp")])
def test_scanned_fsdp_layer_counts_every_layer_and_its_recomputation(name):
    # forward, recomputation and backward each do two products of 2mnk per layer; dW two more; the second is not recomputed
    m, k, n, layers = 64 // 4, 256, 1024 // 2, 6
    assert flops(stored(name)) == layers * 7 * 2 * m * k * n
    gathered = sum(c.total_bytes for c in collectives(stored(name), MESH) if c.kind == "all-gather")
    assert gathered == layers * (2 + 3) * k * n * 4
    assert {c.axes for c in collectives(stored(name), MESH) if c.kind == "all-gather"} == {("data",)}


@pytest.mark.parametrize(("backend", "kind"), [("cpu", "all-reduce"), ("gpu", "reduce-scatter")])
def test_gpu_scatters_the_gradients_that_cpu_all_reduces(backend, kind):
    for name in (n for n in STORED if n.startswith(f"fsdp_{backend}")):
        found = [c for c in collectives(stored(name), MESH) if c.reduction == "sum" and len(c.parts) == 2]
        assert [(c.kind, c.bytes, c.runs, c.axes) for c in found] == [(kind, 2 * 256 * 512 * 4, 6, ("data",))]
        assert sorted(p.source for p in found[0].parts) == ["programs.py:19", "programs.py:20"]


@pytest.mark.parametrize("name", [n for n in STORED if n.startswith("nested")])
def test_loops_branches_and_unknown_trip_counts(name):
    found = {(c.kind, c.reduction): c for c in collectives(stored(name), MESH)}
    assert found["collective-permute", ""].runs == 5 * 3
    assert found["collective-permute", ""].axes == ("data",)
    assert found["all-to-all", ""].runs == found["all-reduce", "max"].runs == 0.5
    assert [c.runs for c in collectives(stored(name), MESH) if c.guessed] == [1]
    assert found["all-gather", ""].bytes == found["reduce-scatter", "sum"].bytes == 128 * 16 * 4
    assert found["all-gather", ""].group_size == 8


def test_cpu_reduces_bf16_in_f32_and_gpu_does_not():
    def width(backend):
        return {c.dtype for n in STORED if n.startswith(f"nested_{backend}") for c in collectives(stored(n)) if c.guessed}

    assert (width("cpu"), width("gpu")) == ({"f32"}, {"bf16"})


@pytest.mark.parametrize("name", [n for n in STORED if n.startswith("rare")])
def test_rare_kinds_and_library_products(name):
    found = {c.kind: c for c in collectives(stored(name), MESH)}
    assert found["ragged-all-to-all"].bytes == 16 * 8 * 4
    assert found["collective-broadcast"].axes == ("data",)
    assert (found["all-gather"].dtype, found["all-gather"].bytes, found["all-gather"].axes) == ("s8", 64, ("model",))
    (product,) = products(stored(name))
    assert (product.kind, product.dtype, product.flops) == ("dot", "c64", 2 * 32 * 32 * 32)


def test_convolution_flops_leave_out_the_padding_where_xla_pads_inside():
    # 16x16, kernel 3, stride 2, SAME pads one at the end: 8 positions a dim, one of their 24 taps on the padding
    per_image = 2 * (8 * 3 - 1) ** 2 * 16 * 32
    found = [p for p in products(stored("conv_cpu_0.12")) if p.kind == "convolution"]
    assert [p.flops for p in found] == [8 * per_image] * 2


# ---- spellings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        (None, ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(1,2,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['data'=4,'model'=2] {'model'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['data'=4,'model'=2] {'data'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=8] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh[x=8] {x:(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_every_spelling_of_replica_groups(text, expected):
    assert groups(text, 8) == expected


def test_unknown_spelling_names_what_is_known():
    with pytest.raises(ValueError, match="lists, iota and mesh-named"):
        groups("everyone", 8)


@given(st.permutations(range(3)), st.integers(0, 3), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_axes_of_finds_the_axes_that_made_the_groups(order, n_grouped, sizes):
    mesh = MeshShape(("a", "b", "c"), tuple(sizes))
    ids = np.arange(mesh.n_devices).reshape(sizes).transpose(order)
    together = order[3 - n_grouped :]
    members = ids.reshape(-1, int(np.prod([sizes[i] for i in together])))
    expected = tuple(mesh.axes[i] for i in sorted(together) if sizes[i] > 1)
    assert axes_of(tuple(map(tuple, members.tolist())), mesh) == expected


def test_permutes_join_devices_into_rings():
    links = pairs("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}")
    assert linked_groups(links) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert axes_of(links, MESH) == ("data",)


def test_types_are_read_through_tuples_layouts_and_comments():
    text = "((f32[16,8]{1,0:T(8,128)}, /*index=1*/s4[6]{0}), bf16[2,3]{1,0:S(7)}, u32[], token[])"
    assert arrays(text) == (
        HloArray("f32", (16, 8)),
        HloArray("s4", (6,)),
        HloArray("bf16", (2, 3)),
        HloArray("u32", ()),
        HloArray("token", ()),
    )
    assert [a.bytes for a in arrays(text)] == [512, 3, 12, 4, 0]
    assert len(elements(text)) == 4
    assert elements("f32[2]{0}") == ("f32[2]{0}",)


OLD = """HloModule jit_old, is_scheduled=true, replica_count=1, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(f32[] %a, f32[] %b)
}

%wrapped (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %ar = f32[4]{0} all-reduce(f32[4]{0} %x), replica_groups={}, to_apply=%sum, metadata=META
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element((s32[], f32[4]{0}) %p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(s32[] %i, s32[] %one)
  %v = f32[4]{0} get-tuple-element((s32[], f32[4]{0}) %p), index=1
  %start = ((f32[4]{0}), f32[4]{0}, s32[]) async-start(f32[4]{0} %v), calls=%wrapped
  %done = f32[4]{0} async-done(((f32[4]{0}), f32[4]{0}, s32[]) %start), calls=%wrapped
  ROOT %t = (s32[], f32[4]{0}) tuple(s32[] %next, f32[4]{0} %done)
}

%cond (p.1: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element((s32[], f32[4]{0}) %p.1), index=0
  %n = s32[] constant(9)
  ROOT %lt = pred[] compare(s32[] %i.1, s32[] %n), direction=LT
}

ENTRY %main (q: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = (s32[], f32[4]{0}) parameter(0)
  ROOT %w = (s32[], f32[4]{0}) while((s32[], f32[4]{0}) %q), condition=%cond, body=%body
}
""".replace("META", '{op_name="a/b" source_file="m.py" source_line=7}')


def test_long_form_text_with_wrapped_async_and_a_constant_trip_count():
    (c,) = collectives(OLD, MeshShape(("x",), (4,)))
    assert (c.kind, c.runs, c.guessed, c.axes, c.bytes, c.reduction) == ("all-reduce", 9, False, ("x",), 16, "sum")
    assert (c.source, c.op_name) == ("m.py:7", "a/b")


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="for 4 devices and the mesh x=8 has 8"):
        collectives(OLD, MeshShape(("x",), (8,)))


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read("hello")


def test_stack_runs_from_the_inside_out():
    module = read(stored("fsdp_gpu_0.12"))
    lines = {tuple(f.line for f in i.stack[:2]) for i in module if i.opcode == "dot"}
    assert (19, 22) in lines and (20, 22) in lines


def test_a_library_calls_workspace_is_not_written():
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: s8[512], w: bf16[64,64]) -> (bf16[64,64], s8[512]) {
  %x = s8[512]{0} parameter(0)
  %w = bf16[64,64]{1,0} parameter(1)
  %product = (bf16[64,64]{1,0}, s8[33554432]{0}) custom-call(%w, %w), custom_call_target="__cublas$lt$matmul"
  %own = (bf16[64,64]{1,0}, s8[512]{0}) custom-call(%w, %x), custom_call_target="my_kernel"
  ROOT %out = (bf16[64,64]{1,0}, s8[512]{0}) tuple(%w, %x)
}
"""
    moved = {i.name: work.bytes for i, (work, _) in kernels(text).items()}
    assert moved == {"product": 3 * 64 * 64 * 2, "own": 2 * 64 * 64 * 2 + 2 * 512}
