"""The promise in a minute: two real models planned, run, saved and reloaded; also run on the newest jax."""

import jax
import numpy as np
import pytest
from models import MODELS, loss_of
from sweeps import sweep

import shardplan

LOSS_TOLERANCE = 1e-3


@pytest.mark.parametrize("name", sweep(["gpt", "hybrid_mlp", "moe"], lambda name: name == "gpt"))
def test_plan_run_save_reload(name, tmp_path):
    create, step, batches = MODELS[name]()
    data = list(batches(4))
    want, state = [], jax.jit(create)(jax.random.key(0))
    for batch in data:
        state, out = jax.jit(step)(state, batch)
        want.append(float(loss_of(out)))

    mesh = jax.make_mesh((2, 4), ("data", "model"))
    first = shardplan.auto(mesh, donate_argnums=0)(step)
    plan = first.plan(jax.eval_shape(create, jax.random.key(0)), data[0])
    assert plan.status in ("optimal", "feasible") and plan.gap < 0.6  # tiny steps are latencies, which the bound shares
    plan.save(tmp_path / "plan.json")
    assert "data=2, model=4" in plan.explain()
    assert "<svg" in plan._repr_html_()

    again = shardplan.auto(mesh, donate_argnums=0, plan=tmp_path / "plan.json")(step)
    for planned in (first, again):
        state, got = planned.init(create, jax.random.key(0)), []
        for batch in data:
            state, out = planned(state, batch)
            got.append(float(loss_of(out)))
        np.testing.assert_allclose(got, want, rtol=LOSS_TOLERANCE)
