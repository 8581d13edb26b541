"""Resharding: paths are physically right, cheapest, and quickly tabulated."""

import functools
import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardplan import _jax
from shardplan.costs.sliced_sums import SlicedSums
from shardplan.mesh import Cluster, Layout, MeshShape, Resharder, reshard_graph, seconds
from shardplan.mesh.collective import UNCOMBINED, CollectiveKey, CombinedCollectives, staging_kernels
from shardplan.xla_model.combining import COMBINABLE, COMBINE_THRESHOLD_BYTES, byte_factors

CLUSTERS = {name: Cluster.preset(name) for name in ("h100", "cpu")}
MESHES = (
    MeshShape(("x",), (8,)),
    MeshShape(("x", "y"), (2, 4)),
    MeshShape(("x", "y"), (4, 2)),
    MeshShape(("x", "y", "z"), (2, 2, 2)),
    MeshShape(("x", "one", "y"), (2, 1, 4)),
)
SHAPE = (16, 8, 24)


@functools.cache
def resharder(mesh, name="h100"):
    return Resharder(mesh, CLUSTERS[name])


@st.composite
def layouts(draw, mesh, rank, partial=True):
    """Any layout: each axis on a dim, at any place among the axes there, or partial, or nowhere."""
    dims = [()] * rank
    sums = []
    for axis in mesh.axes:
        where = draw(st.integers(-2 if partial else -1, rank - 1))
        if where == -2:
            sums.append((axis, "sum"))
        elif where >= 0:
            at = draw(st.integers(0, len(dims[where])))
            dims[where] = (*dims[where][:at], axis, *dims[where][at:])
    return Layout(tuple(dims), tuple(sorted(sums)))


@st.composite
def questions(draw, n=2, partial=True):
    mesh = draw(st.sampled_from(MESHES))
    rank = draw(st.integers(1, 3))
    shape = draw(st.permutations(SHAPE))[:rank]
    return mesh, tuple(shape), [draw(layouts(mesh, rank, partial and i == 0)) for i in range(n)]


# ---- an interpreter of steps, on plain arrays: one array per device


def place(whole, layout, mesh, rng):
    """One array per device; partial layouts hold random addends that sum to the whole."""
    partial = layout.partial_axes
    n = mesh.size(*partial)
    addends = rng.integers(-9, 9, size=(n, *whole.shape)).astype(float)
    addends[-1] = whole - addends[:-1].sum(axis=0)
    shards = []
    for d in range(mesh.n_devices):
        where = mesh.coordinates(d)
        index = 0
        for a in partial:
            index = index * mesh.size(a) + where[a]
        shards.append(addends[index][layout.slices(whole.shape, mesh, d)])
    return shards


def groups_of(mesh, axes):
    """Devices that differ only along `axes`, keyed by the coordinates they share; ordered row-major over `axes` as given."""
    found = {}
    for d in range(mesh.n_devices):
        where = mesh.coordinates(d)
        rest = tuple(where[a] for a in mesh.axes if a not in axes)
        found.setdefault(rest, []).append((tuple(where[a] for a in axes), d))
    return [[d for _, d in sorted(group)] for group in found.values()]


def run(step, shards, shape, mesh):
    """What the collective does with the devices' buffers, from its own definition: no look at the whole tensor."""
    before, after, out = step.before, step.after, [None] * mesh.n_devices
    changed = [d for d in range(len(shape)) if before.dims[d] != after.dims[d]]
    real = lambda axes: tuple(a for a in axes if mesh.size(a) > 1)  # noqa: E731
    if step.kind == "all-gather":
        (dim,) = [d for d in changed if real(before.dims[d]) != real(after.dims[d])]
        kept, tail = real(after.dims[dim]), real(before.dims[dim])[len(real(after.dims[dim])) :]
        assert real(before.dims[dim])[: len(kept)] == kept and set(tail) == set(step.axes)
        for group in groups_of(mesh, tail):
            whole = np.concatenate([shards[d] for d in group], axis=dim)
            for d in group:
                out[d] = whole
    elif step.kind == "slice":
        (dim,) = [d for d in changed if real(before.dims[d]) != real(after.dims[d])]
        tail = real(after.dims[dim])[len(real(before.dims[dim])) :]
        assert set(tail) == set(step.axes)
        for group in groups_of(mesh, tail):
            for i, d in enumerate(group):
                out[d] = np.split(shards[d], len(group), axis=dim)[i]
    elif step.kind == "all-to-all":
        lose, gain = sorted(
            (d for d in changed if real(before.dims[d]) != real(after.dims[d])),
            key=lambda d: len(real(after.dims[d])) - len(real(before.dims[d])),
        )
        tail = real(before.dims[lose])[len(real(after.dims[lose])) :]
        assert real(after.dims[gain]) == real(before.dims[gain]) + tail and set(tail) == set(step.axes)
        for group in groups_of(mesh, tail):
            pieces = {d: np.split(shards[d], len(group), axis=gain) for d in group}
            for i, d in enumerate(group):
                out[d] = np.concatenate([pieces[e][i] for e in group], axis=lose)
    elif step.kind in ("all-reduce", "reduce-scatter"):
        order = step.axes
        if step.kind == "reduce-scatter":
            (dim,) = [d for d in changed if real(before.dims[d]) != real(after.dims[d])]
            order = real(after.dims[dim])[len(real(before.dims[dim])) :]
            assert set(order) == set(step.axes)
        assert set(step.axes) <= set(before.partial_axes)
        for group in groups_of(mesh, order):
            total = sum(shards[d] for d in group)
            for i, d in enumerate(group):
                out[d] = total if step.kind == "all-reduce" else np.split(total, len(group), axis=dim)[i]
    elif step.kind == "collective-permute":
        # every device sends its buffer to one device of its group and receives one: buffers move whole
        for group in groups_of(mesh, step.axes):
            free = list(group)
            for d in group:
                wanted = after.slices(shape, mesh, d)
                sender = next(s for s in free if before.slices(shape, mesh, s) == wanted)
                free.remove(sender)
                out[d] = shards[sender]
            assert not free
    else:
        raise AssertionError(step.kind)
    return out


@settings(max_examples=300, deadline=None)
@given(questions(), st.sampled_from(("h100", "cpu")), st.integers(0, 99))
def test_every_step_of_a_path_moves_the_right_numbers(question, name, seed):
    mesh, shape, (src, dst) = question
    dst = replace(dst, partial=())
    rng = np.random.default_rng(seed)
    whole = rng.integers(-99, 99, size=shape).astype(float)
    shards, at = place(whole, src, mesh, rng), src
    for step in resharder(mesh, name).path(shape, 4, src, dst):
        assert step.before == at and step.seconds > 0
        local = [np.prod(x.local_shape(shape, mesh)) * 4 for x in (step.before, step.after)]
        assert step.bytes == max(local)
        shards, at = run(step, shards, shape, mesh), step.after
        assert all(x.shape == at.local_shape(shape, mesh) for x in shards)
    if at != dst:  # only where they differ by axes of size 1
        assert [at.slices(shape, mesh, d) for d in range(8)] == [dst.slices(shape, mesh, d) for d in range(8)]
    for d in range(8):
        np.testing.assert_array_equal(shards[d], whole[dst.slices(shape, mesh, d)])


@settings(max_examples=300, deadline=None)
@given(questions(n=3), st.sampled_from(("h100", "cpu")), st.sampled_from((1, 4, 4096)))
def test_a_detour_is_never_cheaper(question, name, itemsize):
    mesh, shape, (a, b, c) = question
    new = [(axis, d) for d, axes in enumerate(b.dims) for axis in axes if axis not in a.sharded_axes]
    assume(all(axis in c.dims[d] for axis, d in new))  # what was sliced or scattered is not gathered
    assume(
        all(here or there or not passed for here, passed, there in zip(a.dims, b.dims, c.dims, strict=True))
    )  # nor are other dims split
    summed = set(a.partial_axes) - {*b.partial_axes, *b.sharded_axes}
    assume(name == "cpu" or summed.isdisjoint(c.sharded_axes))  # what was summed is not cut up
    t = resharder(mesh, name).table(shape, itemsize, [a, b, c], [a, b, c])
    assert t[0, 2] <= t[0, 1] + t[1, 2] + 1e-15
    assert t[0, 0] == t[1, 1] == t[2, 2] == 0


@settings(max_examples=200, deadline=None)
@given(questions(), st.sampled_from(("h100", "cpu")), st.sampled_from((1, 4, 4096)))
def test_table_path_and_collectives_agree(question, name, itemsize):
    mesh, shape, (src, dst) = question
    r = resharder(mesh, name)
    path = r.path(shape, itemsize, src, dst)
    whole, last = (r.table(shape, itemsize, [src], [dst], last=part)[0, 0] for part in (False, True))
    assert sum(s.seconds for s in path) == pytest.approx(whole, rel=1e-12)
    alone = [0.0]
    for s in path:
        first, least, second = staging_kernels(s.kind, CLUSTERS[name])
        sent = seconds(s.kind, s.bytes, s.axes, mesh, CLUSTERS[name])
        assert s.seconds == pytest.approx(sent + first * s.bytes + max(least, second * s.bytes), rel=1e-12)
        alone += [sent] if s.kind != "slice" else []
    assert alone[-1] * (1 - 1e-12) <= last <= whole * (1 + 1e-12)


@pytest.mark.parametrize("arrays", [1, 16])
def test_a_layout_has_one_price_whoever_else_is_asked_for(arrays):
    """Also where a merged all-reduce costs more than a scatter and a gather: those are one all-reduce for XLA, and priced as one."""
    mesh = MeshShape(("x", "y"), (2, 4))
    r = resharder(mesh, "h100").combining(CombinedCollectives(arrays, COMBINE_THRESHOLD_BYTES), COMBINABLE)
    splits = [Layout((a, b), ()) for a in ((), ("x",), ("y",), ("x", "y")) for b in ((), ("x",), ("y",)) if not set(a) & set(b)]
    sums = [Layout(((), ()), tuple((a, "sum") for a in axes)) for axes in (("x",), ("y",), ("x", "y"))]
    table = r.table((64, 64), 4, [*splits, *sums], splits)
    for i, src in enumerate([*splits, *sums]):
        for j, dst in enumerate(splits):
            assert table[i, j] == r.table((64, 64), 4, [src], [dst])[0, 0]
            assert table[i, j] == pytest.approx(sum(s.seconds for s in r.path((64, 64), 4, src, dst)), rel=1e-12)


@pytest.mark.parametrize("size", [64, 4096])
def test_no_price_is_that_of_a_detour_through_another_dim(size):
    """Links of which sends are slow make detours cheap: P(None, None) + sum over b is no quicker brought to P(('a', 'b'), None)."""
    mesh = MeshShape(("a", "b", "c"), (2, 2, 2))
    r, every = Resharder(mesh, CLUSTERS["h100"]), every_layout(mesh, 2, partial=True)
    whole = [x for x in every if not x.partial]
    table = r.table((size, size), 4, every, whole)
    for (i, src), (j, dst) in itertools.product(enumerate(every[::3]), enumerate(whole[::3])):
        assert sum(s.seconds for s in r.path((size, size), 4, src, dst)) == pytest.approx(table[3 * i, 3 * j], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(questions(partial=False))
def test_there_and_back_is_identity(question):
    mesh, shape, (a, b) = question
    whole = np.arange(np.prod(shape), dtype=float).reshape(shape)
    start = [whole[a.slices(shape, mesh, d)] for d in range(8)]
    shards = start
    for x, y in ((a, b), (b, a)):
        for step in resharder(mesh).path(shape, 4, x, y):
            shards = run(step, shards, shape, mesh)
    for got, wanted in zip(shards, start, strict=True):
        np.testing.assert_array_equal(got, wanted)


def every_layout(mesh, rank, partial=False):
    """All layouts of a rank, by brute force."""
    found = set()
    for where in itertools.product(range(-2 if partial else -1, rank), repeat=len(mesh.axes)):
        sums = tuple(sorted((a, "sum") for a, d in zip(mesh.axes, where, strict=True) if d == -2))
        on = [[a for a, w in zip(mesh.axes, where, strict=True) if w == d] for d in range(rank)]
        found.update(Layout(tuple(dims), sums) for dims in itertools.product(*map(itertools.permutations, on)))
    return sorted(found, key=str)


@pytest.mark.parametrize("shape", [(16, 16, 16), (16, 12, 6), (2, 8, 7)])
def test_asking_for_many_layouts_at_once_changes_no_answer(shape):
    mesh = MeshShape(("x", "y"), (2, 4))
    even = [x for x in every_layout(mesh, 3, partial=True) if x.divides(shape, mesh)]
    table = resharder(mesh).table(shape, 4, even, even)
    for i, j in itertools.product(range(0, len(even), 7), range(0, len(even), 5)):
        alone = Resharder(mesh, CLUSTERS["h100"]).table(shape, 4, [even[i]], [even[j]])[0, 0]
        assert alone == pytest.approx(table[i, j], rel=1e-12)


def test_paths_pass_only_through_layouts_that_divide_evenly():
    mesh = MeshShape(("x", "y"), (4, 8))
    shape = (8, 8)
    path = resharder(mesh).path(shape, 4, Layout((("x",), ("y",))), Layout((("y",), ("x",))))
    assert path and all(s.after.divides(shape, mesh) for s in path)


P = Layout
CASES = [  # what an expert would write, on mesh x=2, y=4
    ((("x",), ()), (), ((), ()), (), "all-gather"),
    (((), ()), (), (("x",), ()), (), "slice"),
    ((("x",), ()), (), ((), ("x",)), (), "all-to-all"),
    ((("x", "y"), ()), (), ((), ()), (), "all-gather"),
    ((("x", "y"), ()), (), (("y", "x"), ()), (), "collective-permute"),
    ((("x", "y"), ()), (), ((), ("x", "y")), (), "all-to-all"),
    (((), ()), ("x",), ((), ()), (), "all-reduce"),
    (((), ()), ("x", "y"), ((), ()), (), "all-reduce"),
    (((), ()), ("x",), (("x",), ()), (), "reduce-scatter"),
    (((), ()), ("x", "y"), (("x", "y"), ()), (), "reduce-scatter"),
    ((("y",), ()), ("x",), (("y", "x"), ()), (), "reduce-scatter"),
    (((), ("y",)), ("x",), ((), ("y",)), ("x",), ""),
]


def case(dims, sums):
    return Layout(dims, tuple((a, "sum") for a in sums))


@pytest.mark.parametrize(("src", "src_sums", "dst", "dst_sums", "expected"), CASES)
def test_the_obvious_collective_is_chosen(src, src_sums, dst, dst_sums, expected):
    mesh = MeshShape(("x", "y"), (2, 4))
    path = resharder(mesh).path((4096, 4096), 4, case(src, src_sums), case(dst, dst_sums))
    assert "+".join(s.kind for s in path) == expected


def test_cpu_has_no_reduce_scatter():
    mesh = MeshShape(("x", "y"), (2, 4))
    path = resharder(mesh, "cpu").path((64, 64), 4, case(((), ()), ("x",)), case((("x",), ()), ()))
    assert [s.kind for s in path] == ["all-reduce", "slice"]


def test_nothing_is_moved_and_stays_partial():
    mesh = MeshShape(("x", "y"), (2, 4))
    whole, some, both = Layout.replicated(1), case(((),), ("x",)), case(((),), ("x", "y"))
    largest = Layout(((),), (("x", "max"),))
    table = resharder(mesh).table((8,), 4, [whole, some, both, largest], [whole, some, largest])
    assert np.isinf(table).tolist() == [[False, True, True], [False, False, True], [False, True, True], [False, True, False]]
    for src in (whole, both):
        with pytest.raises(ValueError, match="stays partial \\(sum over x\\)"):
            resharder(mesh).path((8,), 4, src, some)


NODES = MeshShape(("node", "gpu"), (8, 8))


def test_arrays_moved_together_pay_one_latency_between_them():
    """As many reduce-scatters as XLA makes into one cost what one of all their bytes does; alone each pays its own latency."""
    n, bytes_ = 64, 1e5
    src, dst = case(((),), ("node", "gpu")), Layout((("node", "gpu"),))
    h100 = CLUSTERS["h100"]
    one = seconds("reduce-scatter", n * bytes_, ("node", "gpu"), NODES, h100)
    shape = (int(bytes_) // 4 // 64 * 64,)
    alone, few, all_ = (
        r.table(shape, 4, [src], [dst])[0, 0]
        for r in (
            Resharder(NODES, h100),
            Resharder(NODES, h100, CombinedCollectives(4), COMBINABLE),
            Resharder(NODES, h100, CombinedCollectives(n), COMBINABLE),
        )
    )
    assert n * all_ == pytest.approx(one, rel=0.01) and n * all_ < n * few < n * alone


def test_a_scatters_results_fill_what_is_combined_not_its_operands():
    """64 arrays that are scattered over 64 devices are one collective as long as the shards are no more than XLA combines."""
    src, dst = case(((),), ("node", "gpu")), Layout((("node", "gpu"),))
    combined = Resharder(NODES, CLUSTERS["h100"], CombinedCollectives(64, COMBINE_THRESHOLD_BYTES), COMBINABLE)
    shape = (COMBINE_THRESHOLD_BYTES // 4,)
    scatter, reduce = (combined.table(shape, 4, [src], [to])[0, 0] for to in (dst, Layout(((),))))
    latency = [seconds(kind, 0, ("node", "gpu"), NODES, CLUSTERS["h100"]) for kind in ("reduce-scatter", "all-reduce")]
    bytes_ = [seconds(kind, 4 * shape[0], ("node", "gpu"), NODES, CLUSTERS["h100"]) for kind in ("reduce-scatter", "all-reduce")]
    assert scatter - bytes_[0] < -0.9 * latency[0] and reduce >= bytes_[1]


def test_a_slice_over_several_axes_is_one_and_costs_what_it_does_on_an_axis_of_their_size():
    """XLA cuts a device's part out of an array by one dynamic slice."""
    cluster = Cluster.preset("h100")
    found = []
    for mesh in (MeshShape(("x",), (8,)), MeshShape(("x", "y"), (2, 4)), MeshShape(("x", "y", "z"), (2, 2, 2))):
        whole, part = Layout(((), ())), Layout(((), mesh.axes))
        path = Resharder(mesh, cluster).path((1024, 1024), 4, whole, part)
        assert [(s.kind, s.axes) for s in path] == [("slice", mesh.axes)]
        found.append(path[0].seconds)
    assert found == pytest.approx([found[0]] * 3)


def test_a_sum_is_not_scattered_twice_on_one_dim_and_what_was_sliced_is_not_gathered():
    known = (("reduce-scatter", ("gpu",)), CombinedCollectives(99)), (("reduce-scatter", ("node",)), CombinedCollectives(99))
    r = Resharder(NODES, CLUSTERS["h100"], UNCOMBINED, COMBINABLE, known=known)
    path = r.path((64, 64), 4, case(((), ()), ("node", "gpu")), Layout((("node", "gpu"), ())))
    assert [s.kind for s in path].count("reduce-scatter") == 1
    known = ((("all-gather", ("node", "gpu")), CombinedCollectives(99)),)
    r = Resharder(NODES, CLUSTERS["h100"], UNCOMBINED, COMBINABLE, known=known)
    path = r.path((64, 64), 4, Layout((("node",), ())), Layout(((), ())))
    assert [(s.kind, s.axes) for s in path] == [("all-gather", ("node",))]


def test_a_sum_is_completed_and_sliced_only_where_it_is_combined_with_others():
    """The whole goes faster than its parts, but alone XLA may make the parts of it."""
    r, (src, dst) = Resharder(NODES, CLUSTERS["h100"]), (case(((), ()), ("node", "gpu")), Layout((("gpu",), ())))
    alone, merged = (
        x.path((32768, 1024), 4, src, dst) for x in (r, r.combining(CombinedCollectives(2, COMBINE_THRESHOLD_BYTES), COMBINABLE))
    )
    assert [(s.kind, s.axes) for s in alone] == [("reduce-scatter", ("gpu",)), ("all-reduce", ("node",))]
    assert [(s.kind, s.axes) for s in merged] == [("all-reduce", ("node", "gpu")), ("slice", ("gpu",))]


@pytest.mark.parametrize("axes", ["x", "xy"])
def test_a_sum_of_one_reader_is_not_sliced_whole_though_all_reduces_share_their_latency(axes):
    summed, whole, part = Layout(((), ()), tuple((a, "sum") for a in axes)), Layout(((), ())), Layout((tuple(axes), ()))
    crowd = CombinedCollectives(1000, COMBINE_THRESHOLD_BYTES)
    known = ((CollectiveKey("all-reduce", tuple(axes)), crowd),)
    found = {
        once: [s.kind for s in resharder(MESHES[1]).combining(UNCOMBINED, COMBINABLE, known, once).path((256, 8), 4, summed, part)]
        for once in (False, True)
    }
    # XLA completes a sum that is sliced over one axis after the other, so that is a path, too.
    assert found == {False: ["all-reduce", "slice"], True: ["reduce-scatter"] if axes == "x" else ["all-reduce", "slice", "slice"]}
    # Prices leave the path to several readers of an array: what all of them do decides what XLA emits.
    steps = resharder(MESHES[1]).combining(UNCOMBINED, COMBINABLE, known).path((256, 8), 4, summed, part)
    for shape, every, cluster, kinds in (
        ((256, 8), [steps, steps], "h100", ["reduce-scatter"]),
        ((256, 8), [steps, steps[:1]], "h100", ["all-reduce", "slice"]),
        ((250, 8) if axes == "xy" else (255, 8), [steps], "h100", ["all-reduce", "slice"]),
        ((256, 8), [steps], "cpu", ["all-reduce", "slice"]),
    ):
        edges = [SimpleNamespace(value=0, consumer=n) for n in range(len(every))]
        graph = SimpleNamespace(values=[SimpleNamespace(shape=shape)])
        space = SimpleNamespace(edges_of={0: edges}, graph=graph, mesh=MESHES[1], cluster=CLUSTERS[cluster])
        emitted = SlicedSums(space, lambda edge, every=every: every[edge.consumer]).emitted(edges[every.index(steps)], steps)
        assert [step.kind for step in emitted] == kinds and emitted[0].before == summed and emitted[-1].after == part
    assert steps[0].after == whole


def test_different_reductions_are_not_done_jointly():
    mesh = MeshShape(("x", "y"), (2, 4))
    path = resharder(mesh).path((8,), 4, Layout(((),), (("x", "max"), ("y", "sum"))), Layout(((),)))
    assert [(s.kind, len(s.axes)) for s in path] == [("all-reduce", 1), ("all-reduce", 1)]


def test_axes_of_size_one_cost_nothing():
    mesh = MeshShape(("x", "one"), (8, 1))
    a, b = Layout((("one", "x"), ())), Layout((("x",), ("one",)))
    assert resharder(mesh).table((8, 8), 4, [a], [b])[0, 0] == 0
    assert resharder(mesh).path((8, 8), 4, a, b) == ()


def test_uneven_ends_are_still_priced():
    mesh = MeshShape(("x", "y"), (2, 4))
    some = [Layout((("x",), ())), Layout(((), ("y",))), Layout((("x", "y"), ())), Layout(((), ("y", "x"))), Layout(((), ()))]
    assert np.isfinite(resharder(mesh).table((7, 5), 4, some, some)).all()
    assert resharder(mesh).path((7, 5), 4, some[3], some[2])


def test_a_partial_array_whose_dims_do_not_divide_has_no_path_to_shards():
    src, dst = Layout(((), ()), (("y", "sum"),)), Layout((("x", "y"), ()))
    with pytest.raises(ValueError, match=r"shape \(3, 12\) does not divide evenly on mesh x=2, y=4"):
        resharder(MeshShape(("x", "y"), (2, 4))).path((3, 12), 4, src, dst)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout((("w",),)), "names axis 'w', which mesh x=2, y=4 does not have"),
        (Layout((("x",),), (("x", "sum"),)), "uses a mesh axis twice"),
        (Layout(((), ())), "has 2 dims, the tensor of shape"),
    ],
)
def test_impossible_layouts_are_named(layout, text):
    with pytest.raises(ValueError, match=text):
        resharder(MeshShape(("x", "y"), (2, 4))).path((8,), 4, layout, layout)


def test_tables_are_remembered_and_read_only():
    mesh = MeshShape(("x", "y"), (2, 4))
    layouts_ = [Layout(((), ())), Layout((("x",), ()))]
    r = resharder(mesh)
    one = r.table((8, 8), 4, layouts_, layouts_)
    assert r.table((8, 8), 4, list(layouts_), tuple(layouts_)) is one
    assert r.table((16, 4), 4, layouts_, layouts_) is one  # as many bytes, as even
    with pytest.raises(ValueError, match="read-only"):
        one[0, 0] = 1


def test_a_step_says_what_it_does():
    mesh = MeshShape(("data", "model"), (2, 4))
    r = Resharder(mesh, CLUSTERS["h100"])
    (step,) = r.path((1024, 3072), 4, Layout((("model",), ())), Layout(((), ())))
    assert (step.kind, step.axes, step.bytes) == ("all-gather", ("model",), 1024 * 3072 * 4)
    assert f"{step.seconds * 1e6:.3g} µs: {step.before} -> {step.after}" == "74.9 µs: P('model', None) -> P(None, None)"


@pytest.mark.parametrize("limit", [reshard_graph.MAX_STATES, 1000, 10])
def test_meshes_of_many_axes_are_priced(monkeypatch, limit):
    monkeypatch.setattr(reshard_graph, "MAX_STATES", limit)
    mesh = MeshShape(("a", "b", "c", "d"), (2, 2, 2, 2))
    r = Resharder(mesh, CLUSTERS["h100"])
    src = case((("a",), ("b",), ()), ("c",))
    dst = case(((), ("a", "b"), ("d", "c")), ())
    path = r.path((16,) * 3, 4, src, dst)
    assert (path[0].before, path[-1].after) == (src, dst)
    assert sum(s.seconds for s in path) == pytest.approx(r.table((16,) * 3, 4, [src], [dst])[0, 0])


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 8, 8)])
def test_a_thousand_tables_take_about_two_seconds(sizes):
    mesh = MeshShape(("x", "y", "z"), sizes)
    rng = np.random.default_rng(0)
    every = {rank: every_layout(mesh, rank, partial=True) for rank in (1, 2, 3, 4)}
    lengths, asked = (64, 768, 1024, 3072, 4096, 50304), []
    for _ in range(200):
        shape = tuple(int(n) for n in rng.choice(lengths, size=rng.choice((1, 2, 2, 3, 3, 4))))
        even = [x for x in every[len(shape)] if x.divides(shape, mesh)]
        picked = [even[i] for i in sorted(rng.choice(len(even), size=min(len(even), 200), replace=False))]
        whole = [x for x in picked if not x.partial]
        asked += [(shape, itemsize, srcs, whole) for itemsize in (2, 4) for srcs in (picked, whole, picked[::2])][:5]
    r = Resharder(mesh, CLUSTERS["h100"])
    start = time.process_time()
    for question in asked:
        r.table(*question)
    assert len(asked) == 1000
    assert time.process_time() - start < 8  # about 2 on an idle core; the rest is for busy machines


@pytest.mark.parametrize(
    ("dtype", "bytes_"), [("int16", 2 * 2), ("uint16", 2 * 2), ("int4", 2 * 0.5), ("int8", 1), ("bfloat16", 2), ("float16", 2)]
)
def test_sums_of_narrow_integers_are_sent_as_twice_as_wide_ones(dtype, bytes_):
    """As XLA for GPUs does: `benchmarks/rules_on_xla.py` holds it against what is emitted."""
    mesh = MeshShape(("x",), (8,))
    ways, partial = Resharder(mesh, Cluster.preset("h100")).sending(byte_factors(dtype)), Layout(((),), (("x", "sum"),))
    (summed,) = ways.path((1 << 20,), _jax.itemsize(jnp.dtype(dtype)), partial, Layout(((),)))
    assert (summed.kind, summed.bytes) == ("all-reduce", bytes_ * (1 << 20))
    plain = Resharder(mesh, Cluster.preset("h100")).path((1 << 20,), bytes_, partial, Layout(((),)))
    assert summed.seconds == pytest.approx(plain[0].seconds)
    (gathered,) = ways.path((1 << 20,), _jax.itemsize(jnp.dtype(dtype)), Layout((("x",),)), Layout(((),)))
    assert (gathered.kind, gathered.bytes) == ("all-gather", _jax.itemsize(jnp.dtype(dtype)) * (1 << 20))
