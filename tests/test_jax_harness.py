"""A twentieth of JAX's own test suite of primitives, sharded as far as it goes: `benchmarks/jax_harness.py` runs all of it."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("absl")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import jax_harness

PARTS = 4


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_planned_and_plain_give_the_same(part, mesh):
    found = [jax_harness.run(case, mesh) for case in jax_harness.cases(part, 20 * PARTS)]
    jax.clear_caches()
    assert [x for x in found if x.kind == "failed"] == []
    kinds = [x.kind for x in found]
    assert len(found) > 50 and kinds.count("sharded") > len(found) / 2 and kinds.count("skipped") < len(found) / 10


def case(name, fn, *args):
    return SimpleNamespace(fullname=name, dyn_fun=fn, dyn_args_maker=lambda _: args)


def test_what_differs_fails_and_what_plain_jit_does_not_run_is_skipped(mesh):
    times = itertools.count()
    x = jnp.arange(8.0)
    assert jax_harness.run(case("fine", jnp.sin, x), mesh) == ("fine", "sharded", "")
    assert jax_harness.run(case("odd", jnp.sin, x[:7]), mesh) == ("odd", "replicated", "")
    assert jax_harness.run(case("other", lambda x: x + next(times), x), mesh)[1:] == (
        "failed", "result 0: 8 of 8 elements differ by up to 1 (allowed 0.00021)",
    )  # fmt: skip
    assert jax_harness.run(case("raises", lambda x: x.foo, x), mesh).kind == "skipped"


def test_every_case_is_in_one_shard():
    names = [c.fullname for shard in range(3) for c in jax_harness.cases(shard, 3)]
    assert len(names) == len(set(names)) == len(jax_harness.cases()) > 5000
