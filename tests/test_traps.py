"""Mistakes that would otherwise pass without a word, or surface late: each with what a user reads."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import ShardingError, ShardingWarning, _jax
from shardplan.cli import main
from shardplan.mesh import ClusterError
from shardplan.xla import CompilerMissingError

W = jax.ShapeDtypeStruct((64, 64), np.float32)
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"))


def step(w, x):
    return w - 0.1 * jnp.sum(x), jnp.sum(x @ w)


def any_number(*arrays):
    return step(*arrays)


def example():
    return step, (W, W)


def warned(run) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in said if w.category is ShardingWarning]


REFUSED = [
    (dict(memroy="8GB"), "auto() has no option 'memroy'; did you mean 'memory'?\n  options: in_shardings, out_shardings, pins,"),
    (dict(donate_argnum=0), "auto() has no option 'donate_argnum'; did you mean 'donate_argnums'?"),
    (dict(backend="gpu"), "auto() has no option 'backend'"),
    (dict(time_limit="30s"), "time_limit='30s' is no number of seconds above 0.\n  way out: time_limit=30"),
    (dict(time_limit=0), "time_limit=0 is no number of seconds above 0"),
    (dict(time_limit=float("nan")), "time_limit=nan is no number of seconds above 0"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=lambda x: str(x)[:30])
def test_options_are_refused_at_once(mesh, options, text):
    with pytest.raises(ShardingError, match=re.escape(text)):
        shardplan.auto(mesh, **options)
    with pytest.raises(ShardingError, match=re.escape(text)):
        shardplan.auto(mesh)(step).with_options(**options)


def test_with_options_knows_every_option_of_auto(mesh):
    changed = shardplan.auto(mesh, static_argnums=2)(lambda w, x, n: step(w, x)).with_options(donate_argnums=0, inline=True)
    assert changed.plan(W, W, 3).donated == ("w",)


@pytest.mark.parametrize(
    ("fun", "text"), [(step, "but only accepts 2 positional"), (any_number, "the step is called with 2 arguments")]
)
def test_a_donated_argument_that_is_not_there_is_refused(mesh, fun, text):
    with pytest.raises(ShardingError, match=rf"donate_argnums.*7.*{text}(.|\n)*way out: numbers"):
        shardplan.auto(mesh, donate_argnums=7)(fun).plan(W, W)


def test_the_command_line_refuses_it_too(capsys):
    words = f"plan {__file__}:example --mesh data=2,model=4 --cluster h100 --brief --donate"
    assert main([*words.split(), "7"]) == 2
    assert "donate_argnums=(7,): Jitted function has donate_argnums=(7,), but only accepts 2" in capsys.readouterr().err
    assert main([*words.split(), "0"]) == 0


def test_an_abstract_mesh_without_a_cluster_is_said_to_be_priced_as_this_machine(capsys):
    (text,) = warned(lambda: shardplan.auto(AbstractMesh((512,), ("data",)))(step).plan(W, W))
    assert re.match(
        r"an AbstractMesh does not say what its devices are: without cluster= they are priced as 512 emulated devices of this "
        r"machine's CPU, [\d.]+ [MG]iB each\.\n  way out: cluster=, the name of a preset \(a100, .*h200\) or a cluster file",
        text,
    )
    for cluster in ("cpu", "h100"):
        assert warned(lambda: shardplan.auto(ABSTRACT, cluster=cluster)(step).plan(W, W)) == []  # noqa: B023
    assert main(f"plan {__file__}:example --mesh data=2,model=4 --brief".split()) == 0
    assert "shardplan: warning: an AbstractMesh does not say what its devices are" in capsys.readouterr().err


def test_a_plan_says_what_its_devices_are():
    plan = shardplan.auto(ABSTRACT, cluster="h200")(step).plan(W, W)
    assert warned(lambda: shardplan.auto(ABSTRACT, plan=plan)(step).plan(W, W)) == []
    other = shardplan.auto(ABSTRACT, plan=plan)(lambda w, x: (w - 0.1 * jnp.sum(x), jnp.sum((x @ w) @ w)))
    planned = []
    (text,) = warned(lambda: planned.append(other.plan(W, W)))
    assert planned[0].cluster == "h200" and "another version of this step" in text


def test_another_mesh_without_devices_is_of_the_devices_that_a_plan_has(mesh):
    plan = shardplan.auto(mesh)(step).plan(W, W)
    other = []
    assert warned(lambda: other.append(plan.replan(mesh={"data": 4, "model": 2}))) == []
    assert other[0].cluster == plan.cluster and other[0].mesh.sizes == (4, 2)
    gpus = _jax.abstract_mesh(
        {"data": 8}, AbstractMesh((8,), ("data",), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "cuda"))
    )
    planned = shardplan.auto(gpus)(step).plan(W, W)
    assert planned.cluster == planned.replan(mesh={"data": 2, "model": 4}).cluster == "h100"


def test_prices_of_a_plan_that_cannot_be_found_again_are_said(mesh):
    plan = shardplan.auto(ABSTRACT, cluster="h200", compute_scale=2)(step).plan(W, W)
    other = shardplan.auto(mesh, plan=plan)(lambda w, x: (w - 0.1 * jnp.sum(x), jnp.sum((x @ w) @ w)))
    assert (
        "plan= is priced as h200, compute x 2, what is planned again as cpu.\n  way out: cluster="
        in warned(lambda: other.plan(W, W))[-1]
    )


def test_errors_of_machines_and_compilers_are_sharding_errors(mesh):
    assert issubclass(ClusterError, ShardingError) and issubclass(CompilerMissingError, ShardingError)
    with pytest.raises(ShardingError, match="cluster 'h1000' is not known"):
        shardplan.auto(mesh, cluster="h1000")(step).plan(W, W)
    with pytest.raises(ShardingError, match="target 'hh100:8' is not known"):
        shardplan.auto(mesh, cluster="h100", verify="hh100:8")(step).plan(W, W)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_pmap_around_a_planned_step_and_in_it_is_refused_in_words(kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    with pytest.raises(ShardingError, match=r"called on arrays of another mesh, as inside jax\.pmap(.|\n)*ways out: call it outside"):
        jax.pmap(shardplan.auto(mesh)(lambda x: x @ x))(jnp.ones((8, 8, 8)))
    with pytest.raises(ShardingError, match=r"a jax\.shard_map or jax\.pmap in the step(.|\n)*in place of jax\.pmap.*jax\.vmap"):
        shardplan.auto(mesh)(lambda x: jax.pmap(lambda x: x * 2)(x)).plan(jnp.ones((8, 8)))


def test_a_call_that_moves_the_state_says_how_much(mesh):
    train = shardplan.auto(mesh, in_shardings=(P("data"), None), cluster="h100")(step)
    other = shardplan.auto(mesh, in_shardings=(P(None, "model"), None), cluster="h100")(step)
    w = jax.device_put(jnp.ones((64, 64)), train.plan(W, W).in_shardings[0][0])
    x = np.ones((64, 64), np.float32)
    assert warned(lambda: train(w, x)) == []
    (text,) = warned(lambda: other(w, x))
    assert text.startswith(
        "the call moved 1 of 2 arrays, 16 KiB in all, which are not where its plan wants them: w was P('data', None), planned is "
        "P(None, 'model').\n  ways out: state from step.init after step.plan; for a second function of one state"
    )
    same = shardplan.auto(mesh, in_shardings=(train.plan(W, W).in_shardings[0][0], None))(lambda w, x: jnp.sum(x @ w))
    assert warned(lambda: same(w, x)) == []


def test_a_call_that_moves_the_state_names_its_largest_array_and_the_devices(mesh):
    few = NamedSharding(jax.make_mesh((4,), ("q",), devices=jax.devices()[4:]), P())
    state = jax.device_put({"step": jnp.zeros(()), "w": jnp.ones((64, 64))}, few)
    planned = shardplan.auto(mesh, in_shardings=P())(lambda state: jax.tree.map(lambda x: x + 1, state))
    (text,) = warned(lambda: planned(state))
    assert "the call moved 2 of 2 arrays" in text and "state/w was P() on 4 devices, planned is P(None, None) on 8.\n" in text


def test_a_state_made_before_the_plan_is_moved_once_without_a_warning(mesh):
    train = shardplan.auto(mesh, in_shardings=(P(), None))(step)
    w = train.init(lambda: jnp.ones((64, 64)))
    assert warned(lambda: train(w, np.ones((64, 64), np.float32))) == []
    assert "the call moved 1 of 2 arrays" in warned(lambda: train(w, np.ones((64, 64), np.float32)))[0]


def test_the_repr_of_a_plan_is_one_line(mesh):
    text = repr(shardplan.auto(mesh, cluster="h100")(step).plan(W, W))
    assert re.fullmatch(
        r"<Plan for data=2, model=4: [\d.]+ µs a step, [\d.]+ KiB per device, (optimal|feasible), priced as h100>", text
    )


def test_a_decorated_step_is_planned_for_another_mesh_with_its_own_options(mesh):
    train = shardplan.auto(mesh, donate_argnums=0, pins={"w": P("data", None)})(step)
    wide = shardplan.auto(AbstractMesh((4, 8), ("data", "model")), cluster="h100")(train)
    plan = wide.plan(W, W)
    assert (str(plan.mesh), plan.cluster, plan.donated) == ("data=4, model=8", "h100", ("w",))
    assert plan.inputs[0].layout.spec() == ("data", None)
    free = shardplan.auto(mesh, pins={"w": P(None, "model")}, cluster="h100")(wide)
    assert free.plan(W, W).inputs[0].layout.spec() == (None, "model")


def test_a_saved_plan_stays_with_its_mesh(mesh):
    saved = shardplan.auto(mesh, cluster="h100")(step).plan(W, W)
    train = shardplan.auto(mesh, plan=saved)(step)
    assert train.with_options(memory="1GB").options.plan is saved
    wide = shardplan.auto(AbstractMesh((4, 8), ("data", "model")), cluster="h100")(train)
    assert wide.options.plan is None and wide.plan(W, W).mesh.n_devices == 32
