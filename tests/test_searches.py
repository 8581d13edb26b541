"""Searches: one registry, and one class for a new one (docs/searches.md)."""

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.ilp.solver import Solution
from shardplan.propagation.search import propagate
from shardplan.search.protocol import Search
from shardplan.searches import SEARCHES

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
ARGS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 4096), (4096, 1024))]


class Replicated(Search):
    """Every op on every device, where pins allow it."""

    def search(self, network, hint, deadline):
        states = tuple(
            next((s for s, factors in enumerate(of.factors) if not any(factors) and c[s] < float("inf")), int(c.argmin()))
            for of, c in zip(network.space.strategies, network.problem.costs, strict=True)
        )
        return Solution("feasible", states, network.problem.objective(states), 0.0)


class Nothing(Search):
    def plan(self, memory):
        return None


def planned(search):
    return shardplan.auto(MESH, cluster="h100", search=search)(jnp.dot).plan(*ARGS)


def test_a_fourth_search_is_one_class_and_one_name(monkeypatch):
    monkeypatch.setitem(SEARCHES, "replicated", f"{__name__}:Replicated")
    plan = planned("replicated")
    assert plan.search == "replicated" and plan.status == "feasible"
    assert all(leaf.layout.shards(plan.mesh) == 1 for leaf in plan.inputs)
    assert plan.seconds["total"] > planned("ilp").seconds["total"]


def test_a_comparison_has_the_searches_of_now(monkeypatch):
    plan = planned("propagation")
    monkeypatch.setitem(SEARCHES, "replicated", f"{__name__}:Replicated")
    assert [*plan.compare().plans] == [*SEARCHES] and "replicated" in str(plan.compare(["replicated"]))
    assert [*plan.compare("replicated").plans] == ["replicated"]
    monkeypatch.delitem(SEARCHES, "replicated")
    assert "replicated" not in plan.compare().plans


def test_a_search_that_finds_nothing_leaves_the_task_to_the_integer_program(monkeypatch):
    monkeypatch.setitem(SEARCHES, "nothing", f"{__name__}:Nothing")
    plan = planned("nothing")
    own = planned("ilp")
    assert (plan.status, plan.gap, plan.seconds, plan.inputs) == (own.status, own.gap, own.seconds, own.inputs)


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_ends_in_a_plan_no_worse_than_plain_propagation(name):
    plan = planned(name)
    network = plan.context.planned.network
    assert network.problem.objective(plan.context.planned.solution.states) <= propagate(network.problem).objective


def test_propagation_makes_one_plan_without_a_solver_or_another_search(monkeypatch):
    for name in (
        "shardplan.propagation.search.solve",
        "shardplan.ilp.integer_program.lower_bound",
        "shardplan.ilp.integer_program.solve",
    ):
        monkeypatch.setattr(name, lambda *a, name=name, **k: pytest.fail(f"{name} was called"))
    plan = planned("propagation")
    assert plan.search == "propagation" and not {"solve", "other searches"} & plan.planning_seconds.keys()
