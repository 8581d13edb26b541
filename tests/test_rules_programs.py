"""Programs that nobody wrote for this planner: jax.numpy, jax.nn, jax.random, optax, flax, equinox, and their gradients.

Every primitive has a rule; and one training step of every loss, optimizer and layer gives planned what it gives plain
(`benchmarks/programs.py` runs them all, the test here some).
"""

import fnmatch
import functools
import re
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from functions import KEY, SQUARE, VECTOR, WHOLES, X, functions, jax_functions, left_out, loss_of, names, shapes, sparse_functions
from jax import lax
from layers import SEQUENCE, equinox_layers, linen_layers, missing, nnx_layers

from shardplan._jax import INLINED, equations, inner_jaxpr, without_refs
from shardplan._jax_expanded import EXPANDED
from shardplan.costs.space import StepFacts, make_strategy_space
from shardplan.ir.parse import parse
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.strategies.rule import RULES
from shardplan.strategies.rules import rule_for

LOWERED = """
import functions
from jax._src.interpreters import mlir
print(*{p.name for p in [*mlir._lowerings, *(p for of in mlir._platform_specific_lowerings.values() for p in of)]})
"""

HOLDERS = {*INLINED, "scan", "while", "cond", "optimization_barrier"}
"""Primitives that become border ops, or hold a program of their own, planned through."""


def without_rule(fn, *args) -> set[str]:
    """Primitives of a program that have no rule; a rule that does not fit raises."""
    missing, left = set(), [without_refs(jax.make_jaxpr(fn)(*args)).jaxpr]
    while left:
        for eqn in equations(left.pop()):
            if eqn.primitive.name in EXPANDED and (inner := inner_jaxpr(eqn)):
                left.append(inner.jaxpr)
            elif eqn.primitive.name not in HOLDERS:
                ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
                if not rule_for(eqn.primitive.name, ins, outs, eqn.params, strict=True)[1]:
                    missing.add(eqn.primitive.name)
    return missing


def test_every_primitive_that_jax_lowers_has_a_rule_or_stands_in_the_docs():
    """`*` in the docs stands for any letters. In a process of its own, where no other package has added primitives."""
    run = subprocess.run([sys.executable, "-c", LOWERED], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    lowered = set(run.stdout.split())
    documented = re.findall(r"`([\w*]+)`", (Path(__file__).parent.parent / "docs" / "rules.md").read_text())
    left = lowered - {*RULES, *EXPANDED, *HOLDERS}
    assert len(lowered) > 250
    assert sorted(name for name in left if not any(fnmatch.fnmatchcase(name, x) for x in documented)) == []


def optax_losses():
    optax = pytest.importorskip("optax")
    labels = WHOLES[:, 0] % 6
    sequences = jnp.stack([X] * 4), 0.0 * SEQUENCE[..., 0], WHOLES[:4, :3] % 5 + 1, jnp.zeros((4, 3))
    young = optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)
    for name, fn in [*functions(optax.losses), ("make_fenchel_young_loss", young)]:
        for args in [(X, X), (X, labels), (X,), (VECTOR, VECTOR), (X, X, X), sequences]:
            if shapes(grad := jax.value_and_grad(loss_of(fn)), *args) is not None:
                yield f"optax.losses.{name}", grad, args
                break


def optax_optimizers():
    """Two updates of every optimizer that takes a learning rate or nothing, and of those around another."""
    optax, contrib = pytest.importorskip("optax"), pytest.importorskip("optax.contrib")
    params = {"w": X, "b": VECTOR}
    adam, schedule = optax.adam(1e-3), optax.cosine_decay_schedule(1e-3, 10)
    found = {name: make for module in (optax, contrib) for name, make in functions(module)} | {
        "of a schedule": lambda _: optax.adam(schedule),
        "of hyperparameters": lambda _: optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
        "every second time": lambda _: optax.MultiSteps(adam, 2).gradient_transformation(),
        "if finite": lambda _: optax.apply_if_finite(adam, 2),
        "flat": lambda _: optax.flatten(adam),
        "of some": lambda _: optax.masked(adam, {"w": True, "b": False}),
        "of each its own": lambda _: optax.partition({"a": adam, "s": optax.sgd(1e-3)}, {"w": "a", "b": "s"}),
        "mechanize": lambda _: contrib.mechanize(adam),
        "schedule_free": lambda _: contrib.schedule_free(adam, 1e-3),
        "split_real_and_imaginary": lambda _: contrib.split_real_and_imaginary(adam),
        "add_noise": lambda _: optax.add_noise(0.1, 0.5, KEY),
        "conditionally_mask": lambda _: optax.conditionally_mask(adam, lambda step: step > 0),
        "conditionally_transform": lambda _: optax.conditionally_transform(adam, lambda step: step > 0),
        "selective_transform": lambda _: optax.selective_transform(adam, freeze_mask={"w": False, "b": True}),
        "monitor": lambda _: optax.monitor({"norm": optax.global_norm}),
        "snapshot": lambda _: optax.snapshot("norm", optax.global_norm),
        "measure_with_ema": lambda _: optax.monitor({"norm": optax.measure_with_ema(optax.global_norm, 0.9)}),
        "named_chain": lambda _: optax.named_chain(("adam", adam)),
        "inject_stateful_hyperparams": lambda _: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=1e-3),
        "scale_by_schedule": lambda _: optax.scale_by_schedule(schedule),
        "scale_by_stddev": lambda _: optax.scale_by_stddev(bias_correction=False),  # else roots of differences of equals
    }
    loss = loss_of(lambda params: jax.tree.map(jnp.sin, params))
    for name, make in found.items():
        for rate in (1e-3,), ():
            try:
                optimizer = optax.with_extra_args_support(optax.chain(optax.clip_by_global_norm(1.0), make(*rate)))
                state = optimizer.init(params)
            except Exception:  # takes something else
                continue

            def two_steps(params, state, optimizer=optimizer):
                for _ in range(2):
                    value, grads = jax.value_and_grad(loss)(params)
                    updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=loss)
                    params = optax.apply_updates(params, updates)
                return params, state

            if shapes(two_steps, params, state) is not None:
                yield f"optax.{name}", two_steps, (params, state)
                break


def optax_others():
    """Optimizers that are given more than gradients; schedules, projections, second derivatives."""
    optax, contrib = pytest.importorskip("optax"), pytest.importorskip("optax.contrib")
    params = {"w": X, "b": VECTOR}
    each = jax.tree.map(lambda x: jnp.stack([x] * 4), params)

    def made(optimizer, params=params, grads=params, **extra):
        def step(params, state):
            updates, state = optimizer.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        optimizer = optax.with_extra_args_support(optimizer)
        return step, params, optimizer.init(params)

    def loss(w, x, y):
        return ((x @ w - y) ** 2).sum()

    def curve(schedule):
        return lambda x: jax.vmap(schedule)(x), WHOLES[:, 0]

    square = loss_of(lambda params: jax.tree.map(jnp.sin, params))
    programs = {
        "lookahead": made(optax.lookahead(optax.adam(1e-3), 2, 0.5), optax.LookaheadParams.init_synced(params), params),
        "dpsgd": made(contrib.dpsgd(1e-3, 1.0, 0.1, 0), grads=each),
        "differentially_private_aggregate": made(contrib.differentially_private_aggregate(1.0, 0.1, KEY), grads=each),
        "hutchinson_estimator_diag_hessian": made(contrib.hutchinson_estimator_diag_hessian(KEY), obj_fn=square),
        "sam": made(
            contrib.sam(optax.adam(1e-3), optax.sgd(1e-2), opaque_mode=True), grad_fn=lambda params, _: jax.grad(square)(params)
        ),
        "sophia": made(contrib.sophia(1e-3), obj_fn=square),
        "constant_schedule": curve(optax.constant_schedule(0.1)),
        "cosine_decay_schedule": curve(optax.cosine_decay_schedule(0.1, 10)),
        "cosine_onecycle_schedule": curve(optax.cosine_onecycle_schedule(10, 0.1)),
        "exponential_decay": curve(optax.exponential_decay(0.1, 2, 0.5)),
        "join_schedules": curve(optax.join_schedules([optax.constant_schedule(0.1), optax.linear_schedule(0.1, 0.0, 5)], [3])),
        "linear_onecycle_schedule": curve(optax.linear_onecycle_schedule(10, 0.1)),
        "linear_schedule": curve(optax.linear_schedule(0.1, 0.0, 10)),
        "piecewise_constant_schedule": curve(optax.piecewise_constant_schedule(0.1, {3: 0.5, 6: 0.1})),
        "piecewise_interpolate_schedule": curve(optax.piecewise_interpolate_schedule("cosine", 0.1, {3: 0.5, 6: 0.1})),
        "polynomial_schedule": curve(optax.polynomial_schedule(0.1, 0.0, 2, 10)),
        "sgdr_schedule": curve(optax.sgdr_schedule([dict(init_value=0.0, peak_value=0.1, warmup_steps=2, decay_steps=5)] * 2)),
        "warmup_constant_schedule": curve(optax.warmup_constant_schedule(0.0, 0.1, 3)),
        "warmup_cosine_decay_schedule": curve(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 10)),
        "warmup_exponential_decay_schedule": curve(optax.warmup_exponential_decay_schedule(0.0, 0.1, 3, 2, 0.5)),
        "projection_box": (lambda x: optax.projections.projection_box(x, 0.2, 0.5), X),
        "projection_halfspace": (lambda x, a: optax.projections.projection_halfspace(x, a, 0.5), X, X * 2),
        "projection_hyperplane": (lambda x, a: optax.projections.projection_hyperplane(x, a, 0.5), X, X * 2),
        "projection_vector": (optax.projections.projection_vector, X, X * 2),
        **{
            f"projection_{name}": (getattr(optax.projections, f"projection_{name}"), VECTOR)
            for name in ("hypercube", "l1_ball", "l1_sphere", "l2_ball", "l2_sphere", "linf_ball", "non_negative", "simplex")
        },
        "hvp": (lambda v, w, x, y: optax.second_order.hvp(loss, v, w, x, y), VECTOR, VECTOR, X, X[:, 0]),
        "hessian_diag": (lambda w, x, y: optax.second_order.hessian_diag(loss, w, x, y), VECTOR, X, X[:, 0]),
        "fisher_diag": (lambda w, x, y: optax.second_order.fisher_diag(loss, w, x, y), VECTOR, X, X[:, 0]),
        "make_perturbed_fun": (
            lambda x: jax.grad(lambda x: (optax.perturbations.make_perturbed_fun(jnp.sin, 8, 0.1)(KEY, x) ** 2).sum())(x), X,
        ),
        "hungarian_algorithm": (optax.assignment.hungarian_algorithm, X),
        "base_hungarian_algorithm": (optax.assignment.base_hungarian_algorithm, X),
        "nnls": (lambda a, b: optax.nnls(a, b, 5), X, X[:, 0]),
        "power_iteration": (lambda a: optax.power_iteration(a)[0], SQUARE @ SQUARE.T),
        "matrix_inverse_pth_root": (lambda a: optax.matrix_inverse_pth_root(a + jnp.eye(6), 4), SQUARE @ SQUARE.T),
        "per_example_global_norm_clip": (lambda x: optax.per_example_global_norm_clip(x, 1.0), each),
        "per_example_layer_norm_clip": (lambda x: optax.per_example_layer_norm_clip(x, 1.0), each),
        "incremental_update": (lambda x: optax.incremental_update(x, jax.tree.map(jnp.sin, x), 0.1), params),
        "periodic_update": (lambda x, n: optax.periodic_update(x, jax.tree.map(jnp.sin, x), n[0, 0], 2), params, WHOLES),
        "safe_norm": (lambda x: optax.safe_norm(x, 0.1, axis=1), X),
        "safe_root_mean_squares": (lambda x: optax.safe_root_mean_squares(x, 0.1), X),
        "scale_gradient": (lambda x: jax.grad(lambda x: jnp.sin(optax.scale_gradient(x, 0.5)).sum())(x), X),
        "multi_normal": (lambda x: optax.multi_normal(x[0], x[1]).log_prob(x[2]), X),
        "microbatch": (lambda w, x: optax.microbatch(lambda w, x: jnp.sin(x @ w).sum(), 1, 2)(w, x), VECTOR, X),
        "value_and_grad_from_state": made(optax.lbfgs(), value=square(params), grad=params, value_fn=square),
    }  # fmt: skip
    for name, (fn, *args) in programs.items():
        yield f"optax.{name}", fn, tuple(args)


NOT_TRAINED = names("""
    MaskOrFn OptState Params ScalarOrSchedule Schedule Updates  (types)
    apply_updates chain flatten init_empty_state masked multi_transform partition stateless stateless_with_tree_map
    with_extra_args_support inject_hyperparams apply_if_finite tree_map_params  (in the programs, under another name)
    global_norm safe_increment safe_int32_increment bias_correction update_infinity_moment update_moment
    update_moment_per_elem_norm skip_large_updates skip_not_finite schedule_free_eval_params scale_by_muon  (in optimizers)
""")
"""Public functions of optax without a program of their own."""


@functools.cache
def programs_of(family: str) -> tuple:
    """(name, function, operands) of each; making them traces most of them."""
    return tuple(FAMILIES[family][0]())


@pytest.mark.slow
def test_every_public_function_of_optax_is_trained():
    optax, contrib = pytest.importorskip("optax"), pytest.importorskip("optax.contrib")
    found = {name.split(".")[-1] for family in FAMILIES if "optax" in family for name, *_ in programs_of(family)}
    others = optax.losses, optax.schedules, optax.projections, optax.second_order, optax.perturbations, optax.assignment
    modules = optax, contrib, *others
    public = {name for module in modules for name, _ in functions(module)}
    assert sorted(public - found - NOT_TRAINED) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "module"), [("linen", "flax.linen"), ("nnx", "flax.nnx"), ("equinox", "equinox.nn")], ids=["linen", "nnx", "equinox"]
)
def test_every_public_layer_and_transformation_is_trained(family, module):
    assert missing(family, pytest.importorskip(module), {name for name, *_ in programs_of(family)}) == []


FAMILIES = {
    "jax": (jax_functions, 700), "sparse": (sparse_functions, 15),
    "optax losses": (optax_losses, 20), "optax optimizers": (optax_optimizers, 90),
    "optax others": (optax_others, 50), "linen": (linen_layers, 50),
    "nnx": (nnx_layers, 45), "equinox": (equinox_layers, 40),
}  # fmt: skip
"""Programs as (name, function, operands), and how many there are at least."""


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f == "jax" else f for f in FAMILIES])
def test_every_program_has_rules(family):
    found = {name: without_rule(fn, *args) for name, fn, args in programs_of(family)}
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert len(found) >= FAMILIES[family][1]
    if family == "jax":
        assert left_out({*found}) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_and_plain_give_the_same(family):
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    import programs

    mesh = programs.make_mesh()
    least = FAMILIES[family][1]
    some = [p for p in programs_of(family) if zlib.crc32(p[0].encode()) % max(10, least // 15) == 0]
    assert some
    assert {name: found.why for name, *p in some if (found := programs.run(name, *p, mesh)).kind == "failed"} == {}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [1, 200])
def test_strategies_of_ten_thousand_equations_are_those_of_a_hundred(sizes):
    """Ops of one signature share theirs, and so do those whose sizes divide alike, on a mesh of three axes."""

    def step(ws, x):
        for n in range(1200):
            h = lax.exp(lax.neg(lax.dot(x, ws[n % sizes])))
            x = lax.dot(lax.div(h, lax.broadcast_in_dim(lax.reduce_sum(h, (1,)), h.shape, (0,))), lax.transpose(ws[n % sizes], (1, 0)))
            x = lax.add(lax.tanh(x), x)
        return x

    ws = [jax.ShapeDtypeStruct((64, 64 * (n + 1)), jnp.float32) for n in range(sizes)]
    graph = parse(jax.make_jaxpr(step)(ws, jax.ShapeDtypeStruct((64, 64), jnp.float32)))
    assert len(graph.ops) > 10_000
    space = make_strategy_space(StepFacts.of(graph, mesh := MeshShape(("a", "b", "c"), (2, 4, 8))), mesh, Cluster.preset("h100"))
    assert len({id(c) for c in space.strategies}) < 100 and max(map(len, space.strategies)) > 20


@pytest.mark.parametrize("scores", ["btgrk,bsgk->bgrts", "btgrk,bsgk->bgtrs"])
def test_scores_that_xla_transposes_are_written_before_the_other_product_is_read(scores):
    """Softmax's gradient reads the scores beside a product whose rows go the other way: in float32, where the two meet."""

    def attention(q, k):
        s = jnp.einsum(scores, q, k).astype(jnp.float32)
        y = jnp.einsum(scores.partition("->")[2] + ",bsgk->btgrk", jax.nn.softmax(s).astype(q.dtype), k)
        return (y.astype(jnp.float32) ** 2).sum()

    q, k = jax.ShapeDtypeStruct((2, 16, 3, 5, 8), jnp.bfloat16), jax.ShapeDtypeStruct((2, 16, 3, 8), jnp.bfloat16)
    graph = parse(jax.make_jaxpr(jax.grad(attention, argnums=(0, 1)))(q, k))
    space = make_strategy_space(StepFacts.of(graph, mesh := MeshShape(("a",), (2,))), mesh, Cluster.preset("h100"))
    converts = [op for op in space.graph.ops if op.primitive == "convert_element_type" and op.outs[0].dtype == jnp.float32]
    written = [op for op in converts if op.outs[0].size == 2 * 3 * 5 * 16 * 16 and space.materialised[op.outputs[0]]]
    assert len(written) == ("bgrts" in scores)


@pytest.mark.parametrize(
    ("between", "stored"),
    [
        (lambda h, b: jax.nn.relu(h + b), 0),
        (lambda h, b: jnp.tanh(h * 2), 0),
        (lambda h, b: jnp.sin(jnp.clip(h, -1, 1) / 3), 0),
        (lambda h, b: jax.nn.silu(h), 1),
        (lambda h, b: jax.nn.relu(h.astype(jnp.bfloat16)), 1),
        (lambda h, b: h + jnp.tanh(h), 1),
    ],
)
def test_elementwise_work_on_one_array_is_done_again_in_the_product_that_reads_it(between, stored):
    def net(x, w, b):
        h = between(x @ w, b)
        return h @ w.astype(h.dtype)

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 64), (64, 64), (64,))]
    space = make_strategy_space(
        StepFacts.of(parse(jax.make_jaxpr(net)(*args)), mesh := MeshShape(("a",), (2,))), mesh, Cluster.preset("h100")
    )
    written = [op for i, op in enumerate(space.graph.ops) if space.rules[i].fusion == "loop" and space.materialised[op.outputs[0]]]
    assert len([op for op in written if op.outs[0].shape == (256, 64)]) == stored
