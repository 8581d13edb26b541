"""In which order XLA runs a decided program: kernels of fused ops, stalls, recomputation behind barriers, XLA's own estimates."""

import re
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.costs.kernel_tasks import Tasks, fused
from shardplan.costs.split_products import contracted_splits, merged_sizes
from shardplan.emit.decide import decide
from shardplan.emit.emit import emit
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.rates import kernel_seconds
from shardplan.xla import available
from shardplan.xla.compiler import compile as compiler
from shardplan.xla.compiler.compile import compile, lower_for
from shardplan.xla.hlo.schedule import kernels, seconds
from shardplan.xla_model.latency_estimate import collective_estimate_s, kernel_estimate_s
from shardplan.xla_model.timeline import Task, latency_hiding_order, program_order, schedule

F32, BF16, S = jnp.float32, jnp.bfloat16, jax.ShapeDtypeStruct
needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')


def order(*tasks: Task) -> str:
    return " ".join(f"{'s' if starts else 'e' if tasks[n].collective else 'k'}{n}" for n, starts in latency_hiding_order(tasks))


GATHER, CAST = Task(3e-4, True, ()), Task(1e-4, False, ())


@pytest.mark.parametrize("several, found", [(False, "s0 k1 k3 e0 k2 k4"), (True, "s0 k1 e0 k2 k3 k4")])
def test_a_kernel_stalls_behind_one_of_several_results(several, found):
    # 0 is gathered for 1 -> 2 -> 4; 3 is a cast for 4. Two results of 2 let the cast be placed next to 4, where it hides nothing.
    tasks = [GATHER, CAST, Task(1e-4, False, (0, 1), viewed=several), CAST, Task(1e-4, False, (2, 3))]
    assert order(*tasks) == found


@pytest.mark.parametrize("views, found", [(False, "k0 s1 k2 k3 e1 k4"), (True, "k0 k2 s1 k3 e1 k4")])
def test_what_a_kernel_reads_through_a_view_stalls(views, found):
    # 3 hides 1, so that the start of 1 may be placed next to it. 2, which 3 reads, is placed before it, unless a view stands between.
    tasks = [CAST, Task(3e-4, True, (0,)), CAST, Task(4e-4, False, (2,), views=views), Task(1e-4, False, (1, 3))]
    assert order(*tasks) == found


@pytest.mark.parametrize("estimate_s, found, exposed_s", [(9e-4, "s0 e0 k1 s2 k3 e2 k4", 5e-4), (1e-6, "s0 k3 e0 k1 s2 e2 k4", 5e-4)])
def test_estimates_order_and_seconds_time(estimate_s, found, exposed_s):
    gather = GATHER._replace(estimate_s=estimate_s)
    tasks = [gather, CAST._replace(before=(0,)), gather._replace(before=(1,)), CAST, CAST._replace(before=(2, 3))]
    assert order(*tasks) == found
    assert schedule(tasks, {}).exposed_s == pytest.approx(exposed_s)


def test_without_latency_hiding_a_collective_ends_before_its_first_reader():
    tasks = [CAST, Task(3e-4, True, (0,)), CAST, Task(1e-4, False, (1,))]
    assert program_order(tasks) == [(0, False), (1, True), (2, False), (1, False), (3, False)]


def test_fused_ops_are_one_kernel_that_waits_for_all_they_read():
    tasks = Tasks()
    decay = tasks.add(-1, (), 1.0, group=0)
    product = tasks.add(-1, (), 2.0)
    update = tasks.add(-1, (decay, product), 3.0, group=0)
    tasks.made = {0: decay, 1: product, 2: update}
    found = fused(tasks)
    assert found.seconds == [2.0, 4.0] and found.before == [(), (0,)] and found.made == {0: 1, 1: 0, 2: 1} and found.results == [1, 2]


def test_fused_ops_that_would_wait_for_themselves_stay_apart():
    tasks = Tasks()
    first = tasks.add(-1, (), 1.0, group=0)
    between = tasks.add(-1, (first,), 2.0, group=1)
    tasks.add(-1, (between,), 3.0, group=0)
    assert fused(tasks).seconds == [1.0, 2.0, 3.0]


def test_fused_ops_that_have_nothing_in_common_behind_different_collectives_stay_apart():
    for shared, found in ((False, [1.0, 1.0, 2.0]), (True, [1.0, 3.0])):
        tasks = Tasks()
        product = tasks.add(-1, (), 1.0)
        sums = [tasks.add(-1, (product,), transfer=object()) for _ in range(2)]  # pyright: ignore[reportArgumentType]
        tasks.add(-1, (sums[0], product), 1.0, group=0)
        tasks.add(-1, (sums[1], *[product] * shared), 2.0, group=0)
        assert [seconds for n, seconds in enumerate(fused(tasks).seconds) if n not in fused(tasks).transfers] == found


def test_fused_ops_that_read_one_array_behind_different_collectives_are_one_kernel():
    for waits, found in ((False, [1.0, 3.0]), (True, [1.0, 1.0, 2.0])):
        tasks = Tasks()
        product = tasks.add(-1, (), 1.0)
        sums = [tasks.add(-1, (product,), transfer=object())]  # pyright: ignore[reportArgumentType]
        first = tasks.add(-1, (sums[0], product), 1.0, group=0)
        for _ in range(2):  # one collective more stands before the second op, which may wait for the first by way of them
            sums.append(tasks.add(-1, (sums[-1], *[first] * waits), transfer=object()))  # pyright: ignore[reportArgumentType]
        tasks.add(-1, (sums[-1], product), 2.0, group=0)
        assert [seconds for n, seconds in enumerate(fused(tasks).seconds) if n not in fused(tasks).transfers] == found


def test_a_kernel_reads_first_what_is_fused_last():
    """The sum ((a + b) + c) + d of four products is one kernel: taking in a sum puts its own operands behind those that are there."""
    tasks = Tasks()
    a, b, c, d = (tasks.add(-1, (), 1.0) for _ in range(4))
    total = a
    for term in (b, c, d):
        total = tasks.add(-1, (total, term), 1.0, group=0)
    tasks.made = {0: total}
    found = fused(tasks)
    assert found.before[found.made[0]] == (d, c, a, b)


def test_a_kernel_writes_a_row_for_others_that_it_reads_itself_behind_a_gather():
    tasks = Tasks()
    row = tasks.add(-1, (), 1.0, group=0)
    gather = tasks.add(-1, (), transfer=object())  # pyright: ignore[reportArgumentType]
    product = tasks.add(-1, (gather,), 4.0)
    kernel = tasks.add(-1, (product, row), 2.0, group=0)
    tasks.made = dict(enumerate((row, gather, product, kernel, tasks.add(-1, (row,), 8.0))))  # the last one: another product
    found = fused(tasks)
    assert found.made[0] == found.made[3] and found.seconds[found.made[0]] == 3.0
    assert found.before[found.made[4]] == (found.made[0],)


def test_a_row_stays_apart_from_a_kernel_that_waits_for_another_reader_of_it():
    tasks = Tasks()
    row = tasks.add(-1, (), 1.0, group=0)
    gather = tasks.add(-1, (row,), transfer=object())  # pyright: ignore[reportArgumentType]
    tasks.add(-1, (gather, row), 2.0, group=0)
    assert fused(tasks).seconds == [1.0, 0.0, 2.0]


def test_fused_ops_on_both_sides_of_a_loop_stay_apart():
    """The loop reads what one of them makes, and the other one what the loop makes of something else."""
    tasks, holders = Tasks(), ((0, -1), (-1,))
    product = tasks.add(-1, (), 1.0)
    gather = tasks.add(-1, (), transfer=object())  # pyright: ignore[reportArgumentType]
    before = tasks.add(-1, (product, gather), 2.0, group=0)
    tasks.add(0, (before,), 4.0)
    inside = tasks.add(0, (), 8.0)
    after = tasks.add(-1, (product, inside), 16.0, group=0)
    tasks.made = {0: before, 1: after}
    found = fused(tasks, holders)
    assert [found.seconds[found.made[op]] for op in (0, 1)] == [2.0, 16.0]


def layers(params, x, checkpoint):
    def layer(x, p):
        return x + jax.nn.gelu(x @ p["up"].astype(BF16)) @ p["down"].astype(BF16)

    run = jax.checkpoint(layer) if checkpoint else layer
    for p in params:
        x = run(x, p)
    return (x.astype(F32) ** 2).mean()


@cache
def steps(checkpoint: bool):
    """Predicted and compiled seconds of a step of three layers with momentum, weights and tokens sharded over 8 GPUs."""

    def step(state, x):
        params, momentum = state
        grads = jax.grad(layers)(params, x, checkpoint)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum

    params = [{"up": S((2048, 8192), F32), "down": S((8192, 2048), F32)}] * 3
    pins = {"**/up": P(None, "data"), "**/down": P("data")} if not checkpoint else {"state/**": P("data")}
    args = (params, params), S((16384 if checkpoint else 4096, 2048), BF16)
    made = shardplan.auto(AbstractMesh((8,), ("data",)), donate_argnums=0, cluster="h200", compiler_options=None, pins=pins)(step)
    plan = made.plan(*args)
    function, args = plan.context.program(plan)
    compiled = compile(lower_for("h200:8", function, *args), target="h200:8", timeout_s=300)
    return plan.seconds, seconds(compiled, shardplan.Cluster.preset("h200"))


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("checkpoint", [False, True])
def test_exposed_seconds_are_those_of_the_compiled_program(checkpoint):
    planned, emitted = steps(checkpoint)
    total = emitted.step_s
    exposed = planned["communication"] - planned["hidden"]
    assert planned["total"] == pytest.approx(total, rel=0.03 if not checkpoint else 0.06)  # casts of weights are transposed apart
    assert exposed == pytest.approx(emitted.exposed_s, abs=0.05 * total)
    assert emitted.exposed_s > 0.05 * total  # there is something to predict


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("spec", [P(None, "data"), P(None, None, "data"), P()], ids=str)
def test_rows_of_activations_hide_no_gather_of_the_kernel_that_writes_them(spec):
    """Of a loop's layers without norms: the gradient of `down` reads what tanh's gradient reads, too."""

    def step(w, x):
        def loss(w):
            y = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, w)[0]
            return (y.astype(F32) ** 2).mean()

        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))

    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w = {"up": S((8, 2048, 8192), BF16), "down": S((8, 8192, 2048), BF16)}
    made = shardplan.auto(mesh, donate_argnums=0, cluster="h100", compiler_options=None, in_shardings=(spec, P("data")))(step)
    plan = made.plan(w, S((8192, 2048), BF16))
    function, args = plan.context.program(plan)
    emitted = seconds(compile(lower_for("h100:8", function, *args), target="h100:8", timeout_s=300), shardplan.Cluster.preset("h100"))
    assert plan.seconds["total"] == pytest.approx(emitted.step_s, rel=0.05)


@pytest.mark.slow
@needs_gpu_compiler
def test_xlas_own_estimates_of_collectives_and_kernels(monkeypatch):
    """A gather within a node, an all-to-all and a sum between nodes, and a kernel, as XLA's scheduler logs them."""
    mesh = AbstractMesh((2, 8), ("nodes", "node"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    environment = compiler._environment
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "sol_latency_estimator=10"}
    monkeypatch.setattr(compiler, "_environment", lambda request: environment(request) | log)

    def f(x, y):
        whole = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, P("nodes")))
        return jnp.sin(whole) + whole[::-1].T, y.sum(), (y * 2).sum(0)

    shardings = tuple(jax.sharding.NamedSharding(mesh, p) for p in (P(("nodes", "node")), P(("nodes", "node"))))
    args = S((4096, 4096), F32), S((1 << 14, 1 << 10), F32)
    compiled = compile(lower_for("h100:2x8", jax.jit(f, in_shardings=shardings), *args), target="h100:2x8", timeout_s=300)
    assert compiled.ok, compiled.error
    found = dict(re.findall(r"Computed collective time for ([\w.-]+): ([\d.e+-]+) us", compiled.stderr))
    cluster, shape = shardplan.Cluster.preset("h100"), MeshShape(mesh.axis_names, mesh.axis_sizes)
    assert {(c.kind, c.axes) for c in compiled.collectives} == {
        ("all-gather", ("node",)), ("all-to-all", ("nodes",)), ("all-reduce", ("nodes", "node"))
    }  # fmt: skip
    for c in compiled.collectives:
        link = cluster.axis(shape, c.axes)
        expected = collective_estimate_s(c.kind, c.bytes, link, len(c.groups), cluster)
        assert 1e-6 * float(found[c.name]) == pytest.approx(expected, rel=0.01)
    kernel = re.findall(r"calculated cost for: loop_transpose_fusion[\d.]*\. Cost: ([\d.e+-]+)", compiled.stderr)
    assert 1e-6 * float(kernel[0]) == pytest.approx(
        kernel_estimate_s("fused", 2 * (32 << 20) / cluster.device.memory_rate, 0.0, cluster), rel=0.05
    )


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(("target", "sizes"), [("h100:8", (8,)), ("h200:8", (2, 4)), ("b200:8", (4, 2)), ("b200:8", (8,))])
def test_xlas_own_estimates_of_collectives_within_a_node(target, sizes, monkeypatch):
    """Each has the bytes per second of the nearest size in XLA's table."""
    names = ("x", "y")[-len(sizes) :]
    mesh, n, members = AbstractMesh(sizes, names), prod(sizes), sizes[-1]
    environment = compiler._environment
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "sol_latency_estimator=10"}
    monkeypatch.setattr(compiler, "_environment", lambda request: environment(request) | log)
    kinds = [
        lambda x: jax.lax.psum(x, "y"),
        lambda x: jax.lax.all_gather(x, "y", tiled=True),
        lambda x: jax.lax.psum_scatter(x, "y", tiled=True),
        lambda x: jax.lax.all_to_all(x, "y", 0, 0, tiled=True),
    ]

    def move(*xs):
        return [kind(x) for kind, x in zip(kinds * (len(xs) // 4), xs, strict=True)]

    args = [S((n * size // (members if k == 1 else 1),), F32) for size in (136, 8192, 90112, 3 << 20, 200 << 20) for k in range(4)]
    move = jax.shard_map(move, mesh=mesh, in_specs=(P(names),) * len(args), out_specs=P(names), check_vma=False)
    apart = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_gather", "all_reduce", "reduce_scatter")}
    compiled = compile(lower_for(target, jax.jit(move), *args), target=target, options=apart, timeout_s=300)
    assert compiled.ok, compiled.error
    found = dict(re.findall(r"Computed collective time for ([\w.-]+): ([\d.e+-]+) us", compiled.stderr))
    cluster = shardplan.Cluster.preset(target.partition(":")[0])
    link = cluster.axis(MeshShape(mesh.axis_names, mesh.axis_sizes), ("y",))
    assert len(compiled.collectives) == len(args)
    for c in compiled.collectives:
        expected = collective_estimate_s(c.kind, c.bytes, link, len(c.groups), cluster)
        assert 1e-6 * float(found[c.name]) == pytest.approx(expected, rel=0.01), c


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("target", ["h100:8", "b200:8"])
def test_xlas_own_estimates_of_products(target, monkeypatch):
    """Batches, which XLA goes by single products for, sums in float32 of narrower operands, and float16, as its scheduler logs them."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    environment = compiler._environment
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "sol_latency_estimator=10"}
    monkeypatch.setattr(compiler, "_environment", lambda request: environment(request) | log)
    shapes = [(128, 256, 256, 64), (64, 512, 512, 128), (256, 1024, 64, 1024), (16, 2048, 128, 2048)]
    sums = [(2, 2048, 512, 8192), (8, 1024, 1024, 256), (32, 2048, 256, 512), (1, 2048, 4096, 8192)]
    float16 = [(1, 8192, 1024, 4096), (1, 4096, 4096, 1024), (64, 1024, 512, 128)]
    every = [(x, BF16) for x in shapes + sums] + [(x, jnp.float16) for x in float16]

    def f(x, *operands):
        pairs = zip(operands[::2], operands[1::2], shapes + sums + float16, strict=True)
        products = [jnp.einsum("bmk,bkn->bmn", a, b, preferred_element_type=F32 if s in sums else a.dtype) for a, b, s in pairs]
        return x.sum(), products

    args = [S((8, 1 << 20), F32), *(S(a, dtype) for (b, m, n, k), dtype in every for a in ((b, m, k), (b, k, n)))]
    shardings = tuple(jax.sharding.NamedSharding(mesh, P("data") if x is args[0] else P()) for x in args)
    compiled = compile(lower_for(target, jax.jit(f, in_shardings=shardings), *args), target=target, timeout_s=300)
    assert compiled.ok, compiled.error
    cluster, unit = shardplan.Cluster.preset(target.partition(":")[0]), {"us": 1e-6, "ms": 1e-3}
    logged = re.findall(r"Matmul cost from matmul_interpolator for ([\w.-]+): ([\d.e+-]+) (us|ms)", compiled.stderr)
    expected_s = {name: float(number) * unit[u] for name, number, u in logged}
    ratios = []
    for i, (work, _) in kernels(compiled.module).items():
        for p in work.products:
            kind = {"f32": "float32 sums", "bf16": "product", "f16": "float16 product"}[i.arrays[0].dtype]
            alone_s = kernel_seconds(cluster.device, work.products, 0.0)
            ratios.append(kernel_estimate_s(kind, alone_s, 0.0, cluster, p.sizes) / expected_s[i.name])
    assert len(ratios) == len(every) and all(0.6 < ratio < 1.6 for ratio in ratios), ratios


def test_products_that_are_one_kernel_are_split_as_that_kernel():
    # Three products of 2048 rows that share an operand: 64 tiles each would leave multiprocessors idle, 192 do not.
    one = (1, 1024, 1024, 2048)
    assert contracted_splits(*one, 2, 132)[0] > 1
    assert merged_sizes([one] * 3, 1) == (1, 3072, 1024, 2048) and contracted_splits(*merged_sizes([one] * 3, 1), 2, 132)[0] == 1
    assert merged_sizes([one, (1, 1024, 512, 2048)], 0) == (1, 1024, 1536, 2048)


def momentum(checkpoint: bool, scan: bool):
    """Plans of a step of four layers under several searches and pins."""

    def step(state, x):
        params, m = state

        def loss(params):
            def layer(x, p):
                return x * jnp.tanh(x @ p["up"].astype(BF16)) @ p["down"].astype(BF16) * p["scale"].astype(BF16), None

            run = jax.checkpoint(layer) if checkpoint else layer
            if scan:
                y, _ = jax.lax.scan(run, x, params)
            else:
                y = x
                for n in range(4):
                    y, _ = run(y, jax.tree.map(lambda p, n=n: p[n], params))
            return (y.astype(F32) ** 2).mean()

        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(loss)(params))
        return jax.tree.map(lambda p, m: p * 0.999 - 0.01 * m, params, m), m

    params = {"up": S((4, 1024, 1024), F32), "down": S((4, 1024, 1024), F32), "scale": S((4, 1024), F32)}
    mesh = AbstractMesh((2, 4), ("data", "model"))
    for options in ({"search": "propagation"}, {"search": "recursive"}, {"pins": {"state/*/up": P(None, "data", "model")}}):
        make = shardplan.auto(mesh, donate_argnums=0, cluster="h100", compiler_options=None, **options)
        yield make(step).plan((params, params), S((2048, 1024), BF16)).context.planned


def test_tasks_apart_wait_for_none_that_is_taken():
    tasks = Tasks(before=[(), (0,), (), (1, 2), (2,), ()])
    assert tasks.apart([0, 1, 2, 3, 5]) == [0, 2, 5] and tasks.apart([1, 4, 5]) == [1, 4, 5]
    assert tasks.apart([2, 3, 4]) == [2] and tasks.apart([]) == []


@pytest.mark.parametrize(("checkpoint", "scan"), [(False, False), (True, False), (False, True), (True, True)])
def test_whatever_an_op_reads_is_computed_before_it_in_its_loop_and_no_second_is_lost(checkpoint, scan):
    for planned in momentum(checkpoint, scan):
        graph, tasks = planned.graph, planned.program(planned.xla).tasks

        def computed(i, graph=graph, tasks=tasks) -> set[int]:
            """The tasks after which what op i makes is there: of ops that take no time those of what they read."""
            if i in tasks.computed:
                return {tasks.computed[i]}
            return set().union(*(computed(graph.values[v].producer[0]) for v in graph.ops[i].inputs if v is not None))

        for j, n in tasks.computed.items():
            for v in filter(None, graph.ops[j].inputs):
                assert all(m == n or tasks.apart([m, n]) == [m] for m in computed(graph.values[v].producer[0])), graph.ops[j]
        for n, transfer in tasks.transfers.items():
            assert all(tasks.apart([m, n]) == [m] for m in computed(graph.values[transfer.value].producer[0]))
        trips = {n: prod(graph.loops[m].trips for m in holders if m >= 0) for n, holders in enumerate(graph.loop_holders[:-1])} | {
            -1: 1
        }
        ops_s = sum(planned.kernel_seconds) + sum(seconds for *_, seconds in planned.edge_seconds)
        slices_s = planned.network.sent_ps(planned.solution.states) / 1e12 - sum(
            t.step.seconds * trips[tasks.home[n]] for n, t in tasks.transfers.items()
        )
        all_s = sum(seconds * trips[home] for seconds, home in zip(tasks.seconds, tasks.home, strict=True))
        assert ops_s - 1e-9 <= all_s <= ops_s + max(0.0, slices_s) + 1e-9


def recomputed(memory):
    """A plan of three checkpointed layers whose weights are sharded over 8 GPUs."""

    def step(params, x):
        grads = jax.grad(layers)(params, x, checkpoint=True)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    params, pins = [{"up": S((4096, 4096), BF16), "down": S((4096, 4096), BF16)}] * 3, {"params/**": P("data"), "x": P("data")}
    asked = {"cluster": "h100", "compiler_options": None, "pins": pins, "memory": memory}
    return shardplan.auto(AbstractMesh((8,), ("data",)), donate_argnums=0, **asked)(step).plan(params, S((16384, 4096), BF16))


def gathers(plan) -> list[str]:
    """The pass of each gather."""
    moves = ((d.phase, c.kind) for d in plan.decisions for m in d.reshards for c in m.collectives)
    return [phase for phase, kind in moves if kind == "all-gather"]


def test_a_recomputed_layer_reads_what_the_forward_pass_gathered_where_there_is_memory(tmp_path):
    plan = recomputed("disable")
    planned = plan.context.planned
    barriers = [j for j in planned.retained if planned.graph.ops[j].traits.recompute_barrier]
    assert barriers
    assert gathers(plan).count("forward") == 6
    assert gathers(plan).count("backward") < 6
    tight = recomputed(0.92 * plan.memory().peak)
    assert tight.memory().peak < plan.memory().peak
    assert tight.seconds["total"] > plan.seconds["total"]
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("retains", [True, False])
def test_what_is_gathered_behind_a_barrier_is_gathered_again(retains):
    """Of one plan with what it retains, and with all of that gathered again."""
    plan = recomputed("disable")
    planned, mesh = plan.context.planned, AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    again = [] if retains else planned.retained
    decisions = decide(planned.network, planned.strategies, () if again else planned.retained)
    leaves = ([NamedSharding(mesh, P(*x.layout.spec())) for x in of] for of in (plan.inputs, plan.outputs))
    step = jax.jit(emit(planned.traced.jaxpr, decisions, mesh), **dict(zip(("in_shardings", "out_shardings"), leaves, strict=True)))
    done = compile(step, *jax.tree.leaves(plan.context.program(plan)[1]), target="h100:8")
    assert done.ok, done.error
    emitted = [part for c in done.collectives if c.kind == "all-gather" for part in c.parts]
    assert len(emitted) == len(gathers(plan)) + len(again)
