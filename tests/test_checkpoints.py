"""A state keeps every bit on its way to another plan: through a checkpoint, or moved while it runs."""

import ctypes
import functools
import json
import logging
import os
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from msgspec.structs import replace

import shardplan
from shardplan import checkpoints
from shardplan.plan import transfer as module

pytestmark = pytest.mark.usefixtures("first_plan")

AXES = {2: ("a", "b"), 3: ("p", "q", "r"), 1: ("data",)}
PAIRS = [((2, 4), (4, 2)), ((2, 4), (8,)), ((2, 2, 2), (2, 4)), ((8,), (2, 2)), ((2, 2), (3, 2))]
"""Other axes of the same devices, fewer devices, more devices that no power of two counts."""
TX = optax.adam(1e-2)


def mesh_of(shape, kind=AxisType.Auto, backwards=False):
    devices = np.array(jax.devices()[: int(np.prod(shape))][:: -1 if backwards else 1]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES[len(shape)], axis_types=(kind,) * len(shape))


def create(key, width=96):
    params = {"w": jax.random.normal(key, (width, 2 * width)), "half": jnp.arange(96, dtype=jnp.bfloat16)}
    return {"params": params, "opt": TX.init(params), "key": key}


def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["half"].astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


BATCH = jax.ShapeDtypeStruct((24, 96), jnp.float32)


@functools.cache
def planned(shape, kind=AxisType.Auto, spec=None, backwards=False, fun=train_step, make=create):
    names = AXES[len(shape)]
    spec = jax.P(names[-1], None if len(names) == 1 else names[0]) if spec is None else spec
    step = shardplan.auto(mesh_of(shape, kind, backwards), pins={"**/params/w*": spec}, donate_argnums=0)(fun)
    return step, step.plan(jax.eval_shape(make, jax.random.key(0)), BATCH)


def assert_bit_identical(got, want, plan, argument=0):
    shardings = jax.tree.leaves(plan.in_shardings[0][argument])
    for x, y, sharding in zip(jax.tree.leaves(got), jax.tree.leaves(want), shardings, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        else:
            assert x.sharding == sharding
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(scope="module")
def trained():
    """A state, on the host but for its random key."""
    state = jax.jit(create)(jax.random.key(0))
    return {name: x if name == "key" else jax.tree.map(np.asarray, x) for name, x in state.items()}


def held(plan, state):
    """The state as a plan wants it; it shares no buffers."""
    own = {**state, "key": jax.random.wrap_key_data(np.array(jax.random.key_data(state["key"])))} if "key" in state else state
    return jax.device_put(own, plan.in_shardings[0][0])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_moved_state_is_the_same_bit_for_bit(trained, pair):
    (_, a), (_, b) = planned(pair[0]), planned(pair[1], AxisType.Explicit)
    state = held(a, trained)
    moved = shardplan.transfer(state, b)
    assert_bit_identical(moved, trained, b)
    assert state["params"]["w"].is_deleted()
    assert_bit_identical(shardplan.transfer(moved, a), trained, a)


def test_a_moved_state_is_what_the_other_step_takes(trained):
    (_, a), (step, b) = planned((2, 4)), planned((8,))
    step(shardplan.transfer(held(a, trained), b), jnp.ones(BATCH.shape))


def collectives(move):
    """Kinds, in order, of the collectives that XLA made of a move."""
    kinds = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
    return [kind for step in move.steps for kind in kinds if f" {kind}(" in step.as_text() or f" {kind}-start(" in step.as_text()]


def moves_of(state, plan):
    found, of = [], module.Move.of
    programs = module._Programs()
    leaves = module._wanted(plan, jax.tree.structure(state), jax.tree.leaves(state))
    for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True):
        found.append(of(leaf, x, jax.sharding.NamedSharding(plan.context.mesh, jax.P(*leaf.layout.spec())), programs))
    return {move.path: move for move in found}


def test_meshes_of_the_same_devices_are_crossed_by_one_collective_where_one_will_do(trained):
    """P(None, 'data') on data=8 to P('p', ('q', 'r')) on p, q, r = 2: one all-to-all over two of eight, no shard is gathered."""
    _, a = planned((8,), spec=jax.P(None, "data"))
    _, b = planned((2, 2, 2), spec=jax.P("r", ("p", "q")))
    assert collectives(moves_of(held(a, trained), b)["state/params/w"]) == ["all-to-all"]
    _, c = planned((2, 2, 2), spec=jax.P(None, ("p", "q", "r")))
    assert moves_of(held(a, trained), c)["state/params/w"].in_place


def test_a_device_fetches_only_what_it_lacks(trained, monkeypatch):
    """Of four devices to two: each of the two lacks half of its new shard."""
    _, a = planned((2, 2), spec=jax.P("a", "b"))
    _, b = planned((3, 2), spec=jax.P(None, "b"))
    sent, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, to, **k: sent.append((x, to)) or put(x, to, **k))
    w = held(a, trained)["params"]["w"]
    sent.clear()
    parts = [*module._fetched(w, b.in_shardings[0][0]["params"]["w"])]
    crossed = {d.id: sum(x.nbytes for x, to in sent if to is d and x.devices() != {d}) for d in b.context.mesh.devices.flat}
    assert crossed == {0: w.nbytes // 4, 1: w.nbytes // 4, 2: w.nbytes // 4, 3: w.nbytes // 4, 4: w.nbytes // 2, 5: w.nbytes // 2}
    assert len(parts) == 6


@contextmanager
def exact_memory():
    """Large arrays have mappings of their own, which go back to the system when they are freed: what is resident is what is held."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    try:
        yield
    finally:
        libc.mallopt(-3, 1 << 25)  # where it ends by itself in a process of large arrays


def peak_kib(run):
    """By how much the most memory that this process held grew meanwhile."""

    def status(name):
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    found = run()
    return found, status("VmHWM") - before


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux says how much memory a process held at most")
def test_a_large_state_is_moved_array_by_array():
    """Twelve arrays of 24 MiB: the process takes about three of them more than the state, not twelve."""

    def wide(key):
        return {"params": {f"w{n}": jnp.full((2048, 3072), 1.0 + n) for n in range(12)}}

    def step(state, batch):
        return state, batch.sum()

    plans = [planned((2, 4), spec=spec, fun=step, make=wide)[1] for spec in (jax.P("a", "b"), jax.P("b", "a"))]
    with exact_memory():
        shardplan.transfer(held(plans[0], jax.jit(wide)(jax.random.key(0))), plans[1])  # what compiling takes
        state = held(plans[0], jax.jit(wide)(jax.random.key(0)))
        moved, grew = peak_kib(lambda: jax.block_until_ready(shardplan.transfer(state, plans[1])))
    assert grew < 5 * 24 * 1024, f"{grew / 1024:.0f} MiB"
    assert all(moved["params"][f"w{n}"].addressable_shards[0].data[0, 0] == 1.0 + n for n in range(12))


def budget(plan, limit):
    """The plan with another memory limit."""
    return replace(plan, memory_report=replace(plan.memory_report, limit=limit)).with_context(plan.context)


def test_what_does_not_fit_goes_over_the_host_and_what_cannot_is_refused_before_anything_moves(trained):
    _, a = planned((2, 4), spec=jax.P("a", "b"))
    _, b = planned((2, 4), spec=jax.P("b", "a"))
    state = held(a, trained)
    now = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    w = state["params"]["w"].addressable_shards[0].data.nbytes
    with pytest.raises(shardplan.ShardingError, match=r"the state cannot be moved within .* with state/.*w on its way"):
        shardplan.transfer(state, budget(b, float(now - 1)))
    with pytest.raises(shardplan.ShardingError, match="donate=True"):
        shardplan.transfer(state, budget(b, float(now + w // 2)), donate=False)
    assert not state["params"]["w"].is_deleted()
    tight = budget(b, float(now))
    assert [over_host for _, over_host in module._schedule([*moves_of(state, tight).values()], float(now), True)].count(True) == 3
    assert_bit_identical(shardplan.transfer(state, tight), trained, b)


def test_an_array_that_a_state_holds_twice_is_moved_twice_and_a_state_moved_over_the_host_may_be_donated(trained):
    (step, a), (other, b) = planned((2, 4)), planned((2, 4), spec=jax.P("b", "a"))
    want, _ = step(held(a, trained), jnp.ones(BATCH.shape))
    state = held(a, trained)
    now = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    got, _ = other(shardplan.transfer(state, budget(b, float(now))), jnp.ones(BATCH.shape))
    np.testing.assert_allclose(got["params"]["w"], want["params"]["w"], rtol=1e-5, atol=1e-6)
    state = held(a, trained)
    moments = state["opt"][0]
    tied = {**state, "opt": (moments._replace(mu=state["params"], nu=state["params"]), *state["opt"][1:])}
    for plan in (b, planned((2, 2))[1]):
        tied = shardplan.transfer(tied, plan)
        for part in (tied["params"], tied["opt"][0].mu, tied["opt"][0].nu):
            np.testing.assert_array_equal(part["w"], trained["params"]["w"])


def test_a_state_that_is_no_argument_of_the_step_is_refused(trained):
    _, a = planned((2, 4))
    with pytest.raises(shardplan.ShardingError, match="no argument of the plan's step is a pytree like this state"):
        shardplan.transfer({"other": trained}, a)
    with pytest.raises(shardplan.ShardingError, match=r"state/params/w is float32\[96,192\] in the plan's step, float32\[2\]"):
        shardplan.transfer({**trained, "params": {**trained["params"], "w": jnp.ones(2)}}, a)
    with pytest.raises(shardplan.ShardingError, match="transfer needs a plan with its devices"):
        shardplan.transfer(trained, shardplan.Plan.loads(a.dumps()))


def test_devices_in_another_order_and_host_arrays_are_moved_too(trained):
    _, a = planned((2, 4))
    _, b = planned((2, 4), backwards=True)
    assert_bit_identical(shardplan.transfer(held(a, trained), b), trained, b)
    assert_bit_identical(shardplan.transfer(trained, b), trained, b)


# ---- checkpoints


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_checkpoint_is_restored_by_another_plan_bit_for_bit(trained, pair, tmp_path):
    (_, a), (_, b) = planned(pair[0]), planned(pair[1], AxisType.Explicit)
    with ocp.CheckpointManager(tmp_path) as manager:
        checkpoints.save(manager, 7, held(a, trained), a, {"rows": 40})
        manager.wait_until_finished()
        found = checkpoints.restore(manager, b)
    assert (found.step, found.notes) == (7, {"rows": 40})
    assert found.plan == shardplan.Plan.loads(a.dumps())
    assert_bit_identical(found.state, trained, b)


def test_a_state_may_be_donated_while_it_is_saved(trained, tmp_path):
    step, plan = planned((2, 4))
    state = shardplan.transfer(held(plan, trained), plan)
    with ocp.CheckpointManager(tmp_path) as manager:
        for n in range(3):
            copy = {**jax.tree.map(np.array, {**state, "key": 0}), "key": jax.random.clone(trained["key"])}
            checkpoints.save(manager, n, state, plan)
            for _ in range(4):  # its buffers are written again before the files are
                state, _ = step(state, jnp.full(BATCH.shape, 1.0 + n))
            manager.wait_until_finished()
            assert_bit_identical(checkpoints.restore(manager, plan, step=n).state, copy, plan)


def test_what_differs_is_said_and_a_changed_optimizer_begins_anew(trained, tmp_path, caplog):
    _, a = planned((2, 4))

    def momentum_state(key):
        params = create(key)["params"]
        return {"params": params, "opt": optax.sgd(1e-2, momentum=0.9).init(params), "key": key}

    def momentum_step(state, batch):
        return {**state, "opt": jax.tree.map(lambda m: 0.9 * m, state["opt"])}, jnp.mean((batch @ state["params"]["w"]) ** 2)

    step, b = planned((4, 2), fun=momentum_step, make=momentum_state)
    with ocp.CheckpointManager(tmp_path) as manager, caplog.at_level(logging.INFO, "shardplan"):
        with pytest.raises(shardplan.ShardingError, match=r"has no complete checkpoint.\n  way out: step.init"):
            checkpoints.restore(manager, a)
        checkpoints.save(manager, 3, held(a, trained), a)
        manager.wait_until_finished()
        with pytest.raises(
            shardplan.ShardingError, match=r"another state than(.|\n)*opt/0/trace/half is bfloat16\[96\], the checkpoint has none"
        ):
            checkpoints.restore(manager, b)
        with pytest.raises(shardplan.ShardingError, match="argument=5: the plan's step has 2 positional"):
            checkpoints.restore(manager, a, argument=5)
        caplog.clear()
        fresh = step.init(momentum_state, jax.random.key(0))
        found = checkpoints.restore(manager, b, initial=fresh)
    assert fresh["params"]["w"].is_deleted() and found.state["opt"][0].trace["w"] is fresh["opt"][0].trace["w"]
    np.testing.assert_array_equal(found.state["params"]["w"], trained["params"]["w"])
    said = caplog.text
    assert "saved under a plan for mesh a=2, b=4; restored for mesh a=4, b=2" in said
    assert "checkpoint 3 was saved by another program:\n  input state/opt/0/trace/half" in said
    assert "2 of 5 arrays are not in checkpoint 3 and begin anew" in said


def test_a_damaged_plan_or_note_of_a_checkpoint_is_refused(trained, tmp_path):
    _, a = planned((2, 4))
    with ocp.CheckpointManager(tmp_path) as manager:
        checkpoints.save(manager, 1, held(a, trained), a, {"rows": 1})
    plan, notes = (next(tmp_path.glob(f"1/{name}/metadata")) for name in ("plan", "notes"))
    assert shardplan.Plan.load(plan).fingerprint == a.fingerprint  # as `shardplan show` reads it
    for text in ("[" * 100_000, "1" * 9999, "{"):
        notes.write_text(text)
        with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(shardplan.ShardingError, match="no notes of a checkpoint"):
            checkpoints.restore(manager, a)
    notes.unlink()
    good = plan.read_text()
    for text in (good[:-100], json.dumps({**json.loads(good), "mesh": [[], []]})):
        plan.write_text(text)
        with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(shardplan.PlanFileError, match="1/plan/metadata"):
            checkpoints.restore(manager, a)
    plan.unlink()
    plan.symlink_to("/dev/zero")
    with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(shardplan.PlanFileError, match="a pipe or a device"):
        checkpoints.restore(manager, a)
