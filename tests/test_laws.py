"""Laws that hold of every program: bounds below every plan, one objective, and what a schedule of two streams may do."""

import functools
import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import EVEN, H100
from jax.sharding import PartitionSpec as P
from sweeps import sweep

import shardplan
from shardplan import Plan
from shardplan.costs.bound_network import Weights
from shardplan.costs.decided_memory import DecidedMemory
from shardplan.costs.decided_program import decided_program
from shardplan.costs.pins import untie_pinned_state
from shardplan.costs.pricing import Pricing
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.ilp import integer_program
from shardplan.ilp.integer_program import IntegerProgram
from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Solution
from shardplan.mesh.reshard import Resharder
from shardplan.search import improvement
from shardplan.search.bound import _Ascent
from shardplan.search.classical import classical_inputs, with_inputs
from shardplan.search.objective import NEAR_TIE, Candidates, Judged, judge
from shardplan.searches import SEARCHES
from shardplan.xla_model.compiler_options import thresholds
from shardplan.xla_model.timeline import Task, latency_hiding_order, schedule

F32, BF16 = jnp.float32, jnp.bfloat16
S = jax.ShapeDtypeStruct
ROUNDED = 1e-9


# ---- programs


def updated(loss, state, x):
    grads = jax.grad(loss)(state["p"], x)
    m = jax.tree.map(lambda a, g: 0.9 * a + g, state["m"], grads)
    return {"p": jax.tree.map(lambda p, a: p - 0.1 * a, state["p"], m), "m": m}


def half(w):
    return w.astype(BF16)


def unrolled(state, x):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ half(w))
        return jnp.mean(x.astype(F32) ** 2)

    return updated(loss, state, x)


def scanned(state, x):
    def loss(p, x):
        x, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ half(w["up"])) @ half(w["down"]), None), x, p["layers"])
        return jnp.mean((x @ half(p["last"])).astype(F32) ** 2)

    return updated(loss, state, x)


def tied(state, x):
    def loss(p, x):
        table = half(p["table"])
        h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ half(w)), None)), table[x], p["layers"])
        return -jnp.mean(jax.nn.log_softmax((h @ table.T).astype(F32))[..., 0])

    return updated(loss, state, x)


def accumulated(state, x):
    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ half(p["up"])) @ half(p["down"])).astype(F32) ** 2)

    grads, _ = jax.lax.scan(
        lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(loss)(state["p"], x)), None), jax.tree.map(jnp.zeros_like, state["p"]), x
    )
    return updated(lambda p, _: sum(jnp.vdot(a, g) for a, g in zip(jax.tree.leaves(p), jax.tree.leaves(grads), strict=True)), state, x)


D = 1024
PROGRAMS = {
    "unrolled": (unrolled, [S((D, D), F32)] * 4, S((4096, D), BF16)),
    "scanned": (
        scanned,
        {"layers": {"up": S((4, D, 2 * D), F32), "down": S((4, 2 * D, D), F32)}, "last": S((D, 512), F32)},
        S((4096, D), BF16),
    ),
    "tied": (tied, {"table": S((8192, D), F32), "layers": S((2, D, D), F32)}, S((8, 512), jnp.int32)),
    "accumulated": (accumulated, {"up": S((D, 2 * D), F32), "down": S((2 * D, D), F32)}, S((4, D, D), BF16)),
}
CLUSTERS = {"h100": H100, "even": EVEN}


LARGE = ("scanned", "tied")
NAMES = sweep(PROGRAMS, lambda name: name in LARGE)
CASES = sweep(itertools.product(PROGRAMS, CLUSTERS), lambda case: case[0] in LARGE)


@cache
def plan_of(name, cluster="h100", sizes=(2, 4), axes=("data", "model"), pin=None, **options) -> Plan:
    step, params, x = PROGRAMS[name]
    mesh = jax.sharding.AbstractMesh(sizes, axes)
    options = {"memory": "disable", "pins": {} if pin is None else {"x": pin}} | options
    auto = shardplan.auto(mesh, cluster=CLUSTERS[cluster], donate_argnums=0, **options)
    return auto(step).plan({"p": params, "m": params}, x)


def task_of(plan: Plan) -> PlanningTask:
    found = plan.context.planned
    space = found.space
    graph = untie_pinned_state(found.traced.graph, found.options)  # before copies are put in
    return PlanningTask(graph, Resharder(space.mesh, space.cluster), found.options, Stopwatch())


# ---- the bound


def neighbours(problem):
    near = [[] for _ in problem.costs]
    for e in problem.edges:
        near[e.i].append((e.j, e.cost.T))
        near[e.j].append((e.i, e.cost))
    return near


def drawn_states(problem, near, states, share, rng) -> tuple[int, ...]:
    """A share of the nodes take, one after the other, any state that costs a finite amount beside the others' states."""
    out = list(states)
    for i in rng.permutation(len(out)):
        if rng.random() < share:
            allowed = np.isfinite(problem.costs[i])
            for j, cost in near[i]:
                allowed = allowed & np.isfinite(cost[out[j]])
            out[i] = int(rng.choice(np.flatnonzero(allowed)))
    return tuple(out)


def some_weights(ascent: _Ascent, plane: Weights, rng) -> list[Weights]:
    """Weights that are best for one plane, for others of noisy seconds, and for compute alone; and a mean of two of them."""
    noisy = [Weights(*(x * rng.exponential(size=x.shape) ** power for x in plane)) for power in (1, 4)]
    found = [ascent.weights.best(x) for x in (plane, *noisy)] + [ascent.weights.compute(plane)]
    share = float(rng.random())
    return [*found, Weights.mean([found[n] for n in rng.choice(4, 2)], (1 - share, share)).rounded()]


def least_ps(task: PlanningTask, judged: Judged) -> float:
    """Picoseconds under whatever compiler options a plan may set."""
    program = decided_program(judged.network, judged.states)
    options = (y for x in task.options.xla for y in thresholds(x))
    return PS * min(replace(program, options=o).step_timeline(task.interference).total_s for o in options)


@pytest.mark.parametrize(("name", "cluster"), CASES)
def test_the_bounds_problem_is_below_the_objective_of_any_states(name, cluster):
    """Whatever plan its sets of collectives were chosen for."""
    plan, rng = plan_of(name, cluster), np.random.default_rng(0)
    task = task_of(plan)
    network = task.network(Pricing(), None)
    problem, near = network.problem, neighbours(network.problem)
    states, ratios = plan.context.planned.solution.states, []
    best = _Ascent(task, judge(task, Candidate(network, plan.context.planned.solution), None))
    for n in range(16):
        states = drawn_states(problem, near, states, (0.02, 0.2, 1.0)[n % 3], rng)
        judged = judge(task, Candidate(network, Solution("feasible", states, problem.objective(states), 0.0)), None)
        own, seconds = _Ascent(task, judged), least_ps(task, judged)
        weights = [(x, w) for x in (best, own) for w in some_weights(x, x.planes[0], rng)]
        ratios += [x.tables.problem(w).objective(own.states(judged)) / seconds for x, w in weights]
    assert max(ratios) <= 1 + ROUNDED and max(ratios) > 0.5


# ---- a plan read from its strategies, and from the tables that the solver sees


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_costs_and_holds_without_tables_what_the_tables_say(name, limited):
    plan, rng = plan_of(name), np.random.default_rng(0)
    task, limit = task_of(plan), 1.2 * plan.memory().peak if limited else None
    network = task.network(Pricing(), limit)
    problem, near = network.problem, neighbours(network.problem)
    found = IntegerProgram(task).search(network, (), Deadline(None, work=np.inf))
    for n in range(8):
        states = drawn_states(problem, near, found.states, (0.0, 0.02, 0.2, 1.0)[n % 4], rng)
        paid = sum(network.kernel_ps(states)) + sum(ps for _, ps in network.edge_kernels(states)) + network.sent_ps(states)
        assert paid == pytest.approx(problem.objective(states), rel=1e-6)
        explicit = [(u.node, u.lo, u.hi, float(u.bytes[states[u.node]])) for u in problem.usages]
        assert {x for x in explicit if x[3]} <= {*network.allocations(states)}


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_network_allows_the_states_of_finite_cost(name, limited):
    plan, rng, seen = plan_of(name), np.random.default_rng(0), set()
    task, limit = task_of(plan), 1.2 * plan.memory().peak if limited else None
    network = task.network(Pricing(), limit)
    problem, near = network.problem, neighbours(network.problem)
    found = IntegerProgram(task).search(network, (), Deadline(None, work=np.inf))
    for n in range(60):
        states = list(drawn_states(problem, near, found.states, (0.02, 0.3)[n % 2], rng))
        for i in rng.choice(len(states), n % 3, replace=False):
            states[i] = int(rng.integers(len(problem.costs[i])))
        finite = bool(np.isfinite(problem.objective(states)))
        assert network.allows(states) == finite
        seen.add(finite)
    assert seen == {True, False}


# ---- searches


OTHERS = (
    {"search": "recursive"},
    {"search": "propagation"},
    {"pin": P(None, "model")},
    {"overlap": False},
    {"compiler_options": None},
    {"sizes": (4, 2), "axes": ("model", "data")},
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cluster"), [("unrolled", "even"), ("scanned", "h100"), ("tied", "h100"), ("accumulated", "even")])
def test_no_plan_is_below_the_bound_of_the_free_one(name, cluster):
    free = plan_of(name, cluster)
    plans = [plan_of(name, cluster, **options) for options in OTHERS]
    plans += [plan_of(name, cluster, memory=share * free.memory().peak) for share in (0.9, 0.7)]
    assert all(p.seconds["total"] >= (1 - ROUNDED) * free.seconds["bound"] for p in (free, *plans))
    assert all(p.seconds["bound"] <= p.seconds["total"] for p in plans)


# ---- one objective


@pytest.mark.parametrize(("name", "cluster"), CASES)
def test_the_best_plan_of_the_integer_program_is_never_slower_than_that_of_another_search(name, cluster):
    """The plan that is taken may be: it is the simplest of those within NEAR_TIE of the best."""
    plans = {search: plan_of(name, cluster, search=search, compiler_options=None) for search in SEARCHES}
    best = IntegerProgram(task_of(plans["ilp"])).plan(None).best
    assert best is not None
    for search, plan in plans.items():  # that of "ilp" may be one to which the bound led
        assert search == "ilp" or best.timeline.total_s <= (1 + ROUNDED) * plan.seconds["total"]
        assert plans["ilp"].seconds["total"] <= (1 + NEAR_TIE) * plan.seconds["total"]


def test_small_steps_are_improved_by_what_an_op_makes_in_another_layout(monkeypatch):
    """With most inputs pinned, no change of an input is left to try."""

    def momentum(state, x):
        def loss(w):
            return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["down"] - x) ** 2)

        value, grads = jax.value_and_grad(loss)(state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m - 0.1 * g, state["m"], grads)
        return {"w": jax.tree.map(jnp.add, state["w"], m), "m": m}, value

    weights = {"up": jax.ShapeDtypeStruct((2048, 4096), jnp.float32), "down": jax.ShapeDtypeStruct((4096, 2048), jnp.float32)}
    pins = {"x": jax.P("data"), "state/m/*": jax.P("data"), "state/w/up": jax.P("data")}
    auto = functools.partial(shardplan.auto, jax.sharding.AbstractMesh((8,), ("data",)), donate_argnums=0, cluster="a100", pins=pins)
    inputs = {"w": weights, "m": weights}, jax.ShapeDtypeStruct((4096, 2048), jnp.float32)
    improved = auto()(momentum).plan(*inputs).seconds["total"]
    monkeypatch.setattr(improvement._Improvement, "results", lambda *_: iter(()))
    assert improved < 0.97 * auto()(momentum).plan(*inputs).seconds["total"]


@pytest.mark.parametrize(
    ("plans", "taken"),
    [
        ([(1.0, 4.0), (1.001, 3.0)], 1),  # a quarter of the memory for a tenth of a percent of the seconds
        ([(1.0, 4.0), (1.004, 3.0)], 0),  # for four tenths of a percent
        ([(1.0, 4.0), (1.001, 3.9)], 0),
        ([(1.0, 4.0), (1.006, 0.1)], 0),  # no near tie
        ([(1.0, 4.0, 2), (1.004, 8.0, 1)], 1),  # simpler
    ],
)
def test_of_equally_simple_near_ties_one_that_saves_memory_is_taken(plans, taken):
    judged = [
        SimpleNamespace(timeline=SimpleNamespace(total_s=s), peak_bytes=gb * 1e9, excess_bytes=0, complexity=(*more,))
        for s, gb, *more in plans
    ]
    found: Any = SimpleNamespace(best=judged[0], judged=dict(enumerate(judged)))
    assert Candidates.simplest(found) is judged[taken]


def test_every_classical_layout_of_one_kind_is_tried(monkeypatch):
    """Also where prices rank it behind others."""
    tried = []

    def spied(network, choices):
        tried.append(choices)
        return with_inputs(network, choices)

    monkeypatch.setattr(integer_program, "with_inputs", spied)
    free = plan_of("unrolled", "even", compiler_options=None)
    search = IntegerProgram(task := task_of(free))
    found = search.candidates(None, UNLIMITED)
    tried.clear()
    search._classical(found, UNLIMITED)
    kinds = list(classical_inputs(task.space))
    assert tried == [[of for _, of in kinds], *([of] for kind, of in kinds if kind.pure)] and len(tried) > 3


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_has_one_objective_wherever_it_comes_from(name, search, tmp_path):
    plan = plan_of(name, "even", search=search, compiler_options=None)
    found = plan.context.planned
    assert judge(task_of(plan), Candidate(found.network, found.solution), None).timeline == found.timeline
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").seconds == plan.seconds
    program = decided_program(found.network, found.solution.states)
    assert program.step_timeline() == found.timeline and DecidedMemory(program).peak_bytes() == plan.memory().peak


@pytest.mark.parametrize(("name", "cluster"), CASES)
def test_pins_of_a_plans_own_inputs_lead_to_its_seconds(name, cluster):
    plan = plan_of(name, cluster, compiler_options=None)
    step, params, x = PROGRAMS[name]
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    (specs, _), options = jax.tree.map(lambda s: s.spec, plan.in_shardings), {"memory": "disable", "compiler_options": None}
    again = shardplan.auto(mesh, cluster=CLUSTERS[cluster], donate_argnums=0, in_shardings=specs, **options)
    seconds = again(step).plan({"p": params, "m": params}, x).seconds["total"]
    assert plan.seconds["bound"] <= seconds <= (1 + NEAR_TIE) * plan.seconds["total"]


# ---- memory

MEMORY = sweep(
    [("unrolled", "h100"), ("scanned", "h100"), ("scanned", "even"), ("tied", "h100"), ("accumulated", "even")],
    lambda case: case[0] in LARGE,
)


@pytest.mark.parametrize(("name", "cluster"), MEMORY)
def test_more_memory_is_never_worse_and_every_budget_is_kept(name, cluster):
    free = plan_of(name, cluster)
    plans = [free]
    for share in (0.9, 0.7):
        plans.append(plan_of(name, cluster, memory=share * free.memory().peak))
        assert plans[-1].memory().peak <= share * free.memory().peak
    seconds = [p.seconds["total"] for p in plans]
    near = (1 + NEAR_TIE) ** 2  # the best plan that was found, and the simplest that is so near to it
    assert all(more <= near * less for more, less in itertools.combinations(seconds, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unrolled"])
def test_no_plan_found_takes_less_memory_than_the_error_says(name):
    with pytest.raises(shardplan.ShardingError, match="lowest peak found") as refused:
        plan_of(name, "even", memory=1e6)
    enough = float(str(refused.value).split("memory=")[1].split()[0])
    plans = [plan_of(name, "even", search=search) for search in SEARCHES] + [plan_of(name, "even", memory=enough)]
    assert plans[-1].memory().peak <= enough and all(p.memory().peak >= enough / 1.002 for p in plans)


# ---- the schedule of two streams


def drawn_tasks(rng, collectives: float) -> list[Task]:
    tasks: list[Task] = []
    for n in range(rng.integers(1, 12)):
        before = tuple(m for m in range(n) if rng.random() < 0.3)
        collective = bool(rng.random() < collectives)
        tasks.append(Task(float(rng.integers(1, 9) if collective or rng.random() < 0.8 else 0), collective, before))
    return tasks


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_keeps_dependencies_and_one_collective_in_flight(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        tasks, in_flight, started, done = drawn_tasks(rng, 0.4), [], set(), set()
        for n, start in latency_hiding_order(tasks):
            if start or not tasks[n].collective:
                assert done.issuperset(tasks[n].before) and n not in started
                started.add(n)
            if not tasks[n].collective:
                done.add(n)
            elif start:
                in_flight.append(n)
            else:
                assert in_flight == [n]
                in_flight.clear()
                done.add(n)
        assert done == set(range(len(tasks)))


def longest_chain(tasks: list[Task]) -> float:
    ends: list[float] = []
    for task in tasks:
        ends.append(task.seconds + max((ends[m] for m in task.before), default=0.0))
    return max(ends)


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_takes_at_least_either_stream_and_any_chain_and_at_most_both_streams(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        tasks = drawn_tasks(rng, 0.4)
        line = schedule(tasks, {})
        assert line.compute_s == sum(t.seconds for t in tasks if not t.collective)
        assert line.collective_s == sum(t.seconds for t in tasks if t.collective)
        assert max(line.compute_s, line.collective_s, longest_chain(tasks)) <= line.total_s <= line.compute_s + line.collective_s
        assert line.exposed_s == line.total_s - line.compute_s


def related(tasks: list[Task], n: int) -> set[int]:
    """Tasks that wait for task n, or that it waits for."""
    before, after = {n}, {n}
    for m in reversed(range(n)):
        before |= {m} if any(m in tasks[k].before for k in before) else set()
    for m in range(n + 1, len(tasks)):
        after |= {m} if not after.isdisjoint(tasks[m].before) else set()
    return before | after


@pytest.mark.parametrize("seed", range(5))
def test_one_collective_is_hidden_by_nothing_that_depends_on_it_and_mostly_by_all_else(seed):
    """No order of two streams undercuts that; XLA's list scheduling misses it at times."""
    rng, missed = np.random.default_rng(seed), 0
    for _ in range(200):
        tasks = drawn_tasks(rng, 0.0)
        n = int(rng.integers(len(tasks)))
        tasks[n] = Task(float(rng.integers(1, 20)), True, tasks[n].before)
        hiding = sum(task.seconds for m, task in enumerate(tasks) if m not in related(tasks, n))
        line, least = schedule(tasks, {}), max(0.0, tasks[n].seconds - hiding)
        assert least <= line.exposed_s <= tasks[n].seconds
        missed += line.exposed_s > least
    assert missed <= 6


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_hides_nothing(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        tasks = [Task(float(rng.integers(1, 9)), bool(rng.random() < 0.5), (n - 1,) if n else ()) for n in range(6)]
        line = schedule(tasks, {})
        assert line.total_s == line.compute_s + line.collective_s
