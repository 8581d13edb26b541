"""Typical mistakes of users, each with the words that it is answered with: what is wrong, where, numbers, and a way out."""

import functools
import inspect
import re
import warnings

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from plans import transformer

import shardplan
from shardplan import Plan, PlanFileError, ShardingError, ShardingWarning, auto
from shardplan.cli import main
from shardplan.strategies.rule import RuleError

W = jax.ShapeDtypeStruct((64, 64), np.float32)
ODD = jax.ShapeDtypeStruct((6, 6), np.float32)
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def step(w, x):
    return w - 0.1 * jnp.sum(x), jnp.sum(x @ w)


def plain(w):
    return 2 * w


def planned(fun=step, args=(W, W), **options):
    return auto(mesh(), **options)(fun).plan(*args)


@functools.cache
def plan():
    return planned()


def saved(folder) -> str:
    plan().save(folder / "plan.json")
    return str(folder / "plan.json")


def generator(w):
    yield w


async def waiting(w):
    return w


def donated_twice():
    train = auto(mesh(), plan=planned(donate_argnums=0), donate_argnums=0)(step)
    w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    train(w, x)
    return train(w, x)


def sharded_and_donated_twice():
    """XLA for CPU ends the process that donates a shard twice."""
    train = auto(mesh(), donate_argnums=0, in_shardings=(P("data"), None))(step)
    w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    w = jax.device_put(w, train.plan(w, x).in_shardings[0][0])
    train(w, x)
    return train(w, x)


def with_wrong_shard_map(w):
    other = jax.make_mesh((8,), ("q",))
    return jax.shard_map(lambda v: v * 2, mesh=other, in_specs=P("q"), out_specs=P("q"))(w)


def module():
    return eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))


AMOUNTS = "ways out: bytes, text like '80GB' or '74.5GiB', or one of adaptive, disable, slight, moderate, heavy"
PRESETS = "a100, a100-40gb, b200, cpu, h100, h100-500w, h200"
MISTAKES = {  # what a person does -> how, and what is said; … stands for anything
    # ---- auto
    "auto without a mesh": (
        lambda: auto(step),
        "auto() takes a mesh first, not function.…way out: auto(jax.make_mesh((8,), ('data',), axis_types=",
    ),
    "an axis outside ASCII": (
        lambda: auto(jax.sharding.AbstractMesh((8,), ("größe",))),
        "mesh axis 'größe': XLA ends the process at names outside ASCII.…way out: another name",
    ),
    "a mesh as text": (lambda: auto("data=8"), "auto() takes a mesh first, not str.…way out: auto(jax.make_mesh"),
    "no step": (lambda: auto(mesh())(3), "auto(mesh) takes a step, not int.…way out: auto(mesh)(train_step)"),
    "a generator as a step": (
        lambda: auto(mesh())(generator),
        "the step generator is a generator, which cannot be traced.…way out: a function that returns arrays",
    ),
    "an async step": (lambda: auto(mesh())(waiting), "the step waiting is an async function, which cannot be traced.…way out"),
    "axes of one name": (
        lambda: auto(AbstractMesh((2, 4), ("d", "d")), cluster="h100")(step).plan(W, W),
        "mesh axes ('d', 'd') and sizes (2, 4) must have equal length and unique names.…way out: a mesh such as",
    ),
    "an option with a typo": (lambda: auto(mesh(), memroy="8GB"), "auto() has no option 'memroy'; did you mean 'memory'?…options: "),
    "with_options with a typo": (
        lambda: auto(mesh())(step).with_options(pin={}),
        "auto() has no option 'pin'; did you mean 'pins'?…options: ",
    ),
    "a search with a typo": (
        lambda: auto(mesh(), search="lip"),
        "search='lip' is none of 'ilp', 'propagation', 'recursive'.…way out: search='ilp'",
    ),
    "searches in a list": (lambda: auto(mesh(), search=["ilp"]), "search=['ilp'] is none of 'ilp'"),
    "overlap as text": (lambda: auto(mesh(), overlap="no"), "overlap='no' is none of True, False.…way out: overlap=True"),
    "user_shardings with a typo": (
        lambda: auto(mesh(), user_shardings="kep"),
        "user_shardings='kep' is none of 'keep', 'hint', 'ignore'",
    ),
    "a time limit as text": (
        lambda: auto(mesh(), time_limit="30s"),
        "time_limit='30s' is no number of seconds above 0.…way out: time_limit=30",
    ),
    "compute_scale of nothing": (
        lambda: auto(mesh(), compute_scale=0),
        "compute_scale=0 is no positive number.…way out: compute_scale=1.0",
    ),
    "compiler options in a list": (
        lambda: auto(mesh(), compiler_options=["xla_gpu_enable_pipelined_all_gather"]),
        "compiler_options=['xla_gpu_enable_pipelined_all_gather'] is none of…way out: compiler_options={",
    ),
    "a compiler option that XLA lacks": (
        lambda: planned(compiler_options={"xla_gpu_no_such": True}),
        "compiler_options: XLA of jax … refuses them: No such compile option: 'xla_gpu_no_such'…ways out: drop that option",
    ),
    "verify for no GPU": (lambda: planned(cluster="h100", verify="z:8"), "target 'z:8' is not known.…way out: GPU:count"),
    "a cache that is no folder": (lambda: auto(mesh(), cache=1), "cache=1 is no folder.…way out: cache="),
    # ---- arguments
    "text as an argument": (
        lambda: planned(lambda w, mode: w, (W, "train")),
        "argument mode is str 'train', not an array.…ways out: auto(mesh, static_argnums=1)",
    ),
    "an object as an argument": (
        lambda: planned(lambda w, o: w, (W, object())),
        "argument o is object '<object object …', not an array.…ways out",
    ),
    "an equinox module as an argument": (
        lambda: planned(lambda m, x: jax.vmap(m)(x), (module(), jnp.ones((8, 8)))),
        "argument m/activation is …, not an array.…arrays, rest = eqx.partition(module, eqx.is_array), and join "
        "them inside: eqx.combine(arrays, rest)",
    ),
    "eqx.filter_jit around the step": (
        lambda: planned(eqx.filter_jit(lambda m, x: jax.vmap(m)(x)), (module(), jnp.ones((8, 8)))),
        "argument m/activation is …, not an array.…eqx.partition",
    ),
    "an array of objects": (
        lambda: planned(plain, (np.array([None]),)),
        "argument w is an array of dtype object, which JAX has no arrays of.…way out",
    ),
    "a static argument that is no key": (
        lambda: planned(lambda w, c: w, (W, {"a": 1}), static_argnums=1),
        "static argument 1 of type dict is not hashable.…way out: make it hashable",
    ),
    "a static argument that is not there": (
        lambda: planned(static_argnames="train"),
        "static_argnames='train': …Function does not take these args.…way out: numbers or names of arguments",
    ),
    "a mutable array from outside": (
        lambda: planned(plain, (jax.new_ref(jnp.ones(8)),)),
        "the step takes a mutable array, Ref{float32[8]}, which a plan cannot place.…ways out: take the array",
    ),
    "an array of text": (
        lambda: planned(plain, (np.array(["a", "b"]),)),
        "argument w is an array of dtype <U1, which JAX has no arrays of.…way out: an array of numbers",
    ),
    "a symbolic size": (
        lambda: planned(plain, (jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 8"), np.float32),)),
        "argument w has a symbolic size, ('rows', '8'); a plan is for known sizes.…way out: plan with the largest",
    ),
    "shapes in place of arrays": (
        lambda: auto(mesh(), plan=plan())(step)(W, W),
        "w is a shape, which can be planned with but not run.…ways out: step.plan(…) plans from shapes",
    ),
    # ---- donation
    "a donated name that is not there": (
        lambda: planned(donate_argnames="state"),
        "donate_argnames='state': …Function does not take these args.…way out: numbers or names",
    ),
    "a name among donated numbers": (
        lambda: planned(donate_argnums="w"),
        "donate_argnums='w': …way out: numbers or names of arguments",
    ),
    "a donated number that is not there": (
        lambda: planned(donate_argnums=7),
        "donate_argnums=7: …only accepts 2 positional arguments.…way out: numbers",
    ),
    "donated and static": (
        lambda: planned(lambda w, n: w * n, (W, 2), donate_argnums=1, static_argnums=1),
        "static_argnums=1, donate_argnums=1: …cannot intersect…way out",
    ),
    "a donated state used again": (
        donated_twice,
        "w was donated to an earlier call, or deleted; an array that was donated cannot be used again.…ways out: go on with "
        "what the step returns",
    ),
    "shards of a donated state used again": (
        sharded_and_donated_twice,
        "w was donated to an earlier call, or deleted; an array that was donated cannot be used again.…ways out: go on with "
        "what the step returns",
    ),
    # ---- pins
    "pins in a list": (
        lambda: auto(mesh(), pins=[("w", P("data"))]),
        "pins=[('w', P('data'…))] is no mapping of path patterns…way out: pins={",
    ),
    "pins by number": (
        lambda: auto(mesh(), pins={0: P("data")}),
        "pins={0: P('data'…)} is no mapping of path patterns…or in_shardings by position",
    ),
    "a pin on no input": (
        lambda: planned(pins={"ww": P("data")}),
        "pin 'ww' matches no input of the step.…inputs: w, x…ways out: '**' matches",
    ),
    "a regular expression as a pin": (lambda: planned(pins={"w.*": P("data")}), "pin 'w.*' matches no input of the step.…inputs: w, x"),
    "an axis with a typo": (
        lambda: planned(pins={"w": P("modle")}),
        "pin 'w' on w float32[64,64]: P('modle', None) names mesh axis 'modle', the mesh has data=2, model=4.…way out",
    ),
    "an axis twice": (
        lambda: planned(pins={"w": P("data", "data")}),
        "pin 'w' on w float32[64,64]: P('data', 'data') uses mesh axis 'data' twice.…way out",
    ),
    "a spec longer than the array": (
        lambda: planned(pins={"w": P("data", None, None)}),
        "has 3 entries, the array 2 dims.…way out: one entry per dim",
    ),
    "a dim that does not divide": (
        lambda: planned(plain, (ODD,), pins={"w": P("model")}),
        "pin 'w' on w float32[6,6]: P('model', None) shards dim 0 of size 6 over 4 devices, which does not divide.…way out: "
        "pad dim 0 to 8",
    ),
    "text as a spec": (lambda: planned(pins={"w": "data"}), "pin 'w': 'data' is no PartitionSpec or NamedSharding.…way out: P('data')"),
    "a list as a spec": (
        lambda: planned(pins={"w": ["data", None]}),
        "pin 'w': ['data', None] is no PartitionSpec or NamedSharding.…way out: P('data', None)",
    ),
    "a spec in quotes": (
        lambda: planned(pins={"w": "P('data', None)"}),
        "pin 'w': \"P('data', None)\" is no PartitionSpec or NamedSharding.…way out: P('data', None), without quotes",
    ),
    "a number as a mesh axis": (
        lambda: planned(pins={"w": P(1)}),
        "pin 'w': 1 in …(1,) is no mesh axis.…way out: per dim the name of an axis, a tuple of names, or None",
    ),
    "a number as a mesh axis by position": (
        lambda: planned(in_shardings=(P(("data", 1)), None)),
        "in_shardings: 1 in …is no mesh axis.…way out: per dim the name of an axis",
    ),
    "None as a pin": (
        lambda: planned(pins={"w": None}),
        "pin 'w': None is no PartitionSpec or NamedSharding.…way out: P() for replicated, or leave it out",
    ),
    "a number in in_shardings": (
        lambda: planned(in_shardings=(1, None)),
        "in_shardings: 1 is no PartitionSpec or NamedSharding.…way out: P() for replicated, None to have it planned",
    ),
    "two pins that disagree": (
        lambda: planned(pins={"w": P("data"), "*": P("model")}),
        "conflicting pins on w float32[64,64]: pin 'w' = P('data', None) and pin '*' = P('model', None).…way out",
    ),
    "a pin against in_shardings": (
        lambda: planned(pins={"w": P("data")}, in_shardings=(P("model"), None)),
        "conflicting pins on w float32[64,64]: in_shardings = … and pin 'w' = …way out: keep one",
    ),
    "in_shardings for another number of arguments": (
        lambda: planned(in_shardings=(P("data"), None, None)),
        "in_shardings is no tree prefix of what the step takes: …tuple of length 3, …of length 2.…way out: one entry per "
        "argument, each None",
    ),
    "in_shardings by name": (
        lambda: planned(in_shardings={"w": P("data")}),
        "in_shardings is no tree prefix…way out: one entry per argument",
    ),
    "out_shardings for another number of results": (
        lambda: planned(out_shardings=(P(), None, None)),
        "out_shardings is no tree prefix of what the step returns: …way out: one entry per result",
    ),
    "a sharded number": (
        lambda: planned(out_shardings=P("data")),
        "out_shardings on 1 float32[]: P('data') has 1 entries, the array 0 dims.…way out",
    ),
    "the sharding of one device": (
        lambda: planned(in_shardings=(jax.sharding.SingleDeviceSharding(jax.devices()[0]), None)),
        "is no PartitionSpec or NamedSharding.…way out",
    ),
    # ---- memory
    "memory in words": (lambda: auto(mesh(), memory="80 gigs"), f"memory='80 gigs' is no amount of memory.…{AMOUNTS}"),
    "memory below nothing": (lambda: auto(mesh(), memory=-1), f"memory=-1 is no amount of memory.…{AMOUNTS}"),
    "gigabytes without a unit": (
        lambda: auto(mesh(), memory=80),
        "memory=80 is 80 bytes per device.…way out: text with a unit, such as '80GB'",
    ),
    "too little memory": (
        lambda: planned(memory="4KB"),
        "no plan fits 3.91 KiB per device on mesh data=2, model=4.…lowest peak found: 6.01 KiB, at test_mistakes.py:… in step   "
        "[…]…ways out: a larger mesh",
    ),
    "too little memory for what is pinned": (
        lambda: planned(memory="8KB", pins={"x": P()}, donate_argnums=0),
        "no plan fits 7.81 KiB per device on mesh data=2, model=4.…ways out: no pin on x, a larger mesh, jax.checkpoint around",
    ),
    "less memory than a plan takes that is reused": (
        lambda: planned(plan=plan(), memory="4KB"),
        "plan= takes … per device, memory= allows 3.91 KiB.…ways out: plan= alone; or without plan=, which plans anew",
    ),
    "a pin that is not met by a plan that is reused": (
        lambda: planned(plan=planned(pins={"w": P("data")}), pins={"w": P("model")}),
        "pin 'w' on w float32[64,64] asks for P('model', None), plan= has it as P('data', None).…ways out: plan= alone",
    ),
    "an output that a plan that is reused has elsewhere": (
        lambda: planned(plan=planned(out_shardings=(P("data"), None)), out_shardings=(P("model"), None)),
        "out_shardings on 0 float32[64,64] asks for P('model', None), plan= has it as P('data', None)",
    ),
    "a pin on no input, beside a plan that is reused": (
        lambda: planned(plan=plan(), pins={"ww": P("data")}),
        "pin 'ww' matches no input of the step",
    ),
    # ---- machines
    "a cluster with a typo": (
        lambda: planned(cluster="h1000"),
        f"cluster 'h1000' is not known.…presets: {PRESETS}…ways out: one of these",
    ),
    "a cluster file that is not there": (
        lambda: planned(cluster="no.json"),
        f"cluster file no.json: cannot be read (No such file or directory).…ways out: a preset ({PRESETS})",
    ),
    "a number as a cluster": (lambda: planned(cluster=8), f"cluster=8 is no cluster.…ways out: a preset's name ({PRESETS})"),
    "calibrating without devices": (
        lambda: shardplan.calibrate(ABSTRACT, "x.json"),
        "calibrate needs a mesh of real devices, not AbstractMesh: nothing can be timed on it",
    ),
    "calibrating into a folder that is not there": (
        lambda: shardplan.calibrate(mesh(), "no/here.json"),
        "calibrate cannot write no/here.json: there is no folder …/no.…way out: a file in a folder that exists",
    ),
    "a cluster into a folder that is not there": (
        lambda: shardplan.Cluster.preset("h100").save("no/here.json"),
        "cluster file no/here.json: cannot be written (No such file or directory).…way out: a file in a folder that exists",
    ),
    "running without devices": (
        lambda: auto(ABSTRACT, cluster="h100")(step)(jnp.ones((64, 64)), jnp.ones((64, 64))),
        "planned on an AbstractMesh, which has no devices to run on.…way out",
    ),
    "a state in place of the function that creates it": (
        lambda: auto(mesh())(step).init(jnp.ones(8)),
        "init takes a function that creates the state, not ArrayImpl.…ways out: step.init(create_state, key)…jax.device_put(state",
    ),
    "a state moved to a file": (
        lambda: shardplan.transfer(jnp.ones((64, 64)), "plan.json"),
        "transfer needs a plan with its devices.…way out: step.plan(...)",
    ),
    "a state without devices": (
        lambda: auto(ABSTRACT, cluster="h100")(step).init(lambda: jnp.ones(8)),
        "init needs devices, and AbstractMesh… has none.…ways out: .plan() works without",
    ),
    # ---- steps that know of devices
    "lax.pmean left from pmap": (
        lambda: planned(lambda w: jax.lax.pmean(w, "data"), (W,)),
        "the step calls a collective by hand: Found an unbound axis name: data. A planned step sees whole arrays…ways out: "
        "leave out lax.pmean and lax.psum",
    ),
    "pmap in the step": (
        lambda: planned(lambda x: jax.pmap(plain)(x), (jnp.ones((8, 8)),)),
        "a jax.shard_map or jax.pmap in the step…in place of jax.pmap, plan what it maps with jax.vmap",
    ),
    "pmap around the step": (
        lambda: jax.pmap(auto(jax.make_mesh((8,), ("d",)))(plain))(jnp.ones((8, 8, 8))),
        "called on arrays of another mesh, as inside jax.pmap…ways out: call it outside",
    ),
    "a shard_map with a mesh of its own": (
        lambda: planned(with_wrong_shard_map, (W,)),
        "is given a mesh of its own…ways out: leave mesh= out of that jax.shard_map",
    ),
    "a constraint on an axis that is not there": (
        lambda: planned(lambda w: jax.lax.with_sharding_constraint(w, P("zz")), (W,)),
        "the step asks for layouts that the mesh has no axis for: …zz…way out: name axes of data=2, model=4",
    ),
    "out_sharding in the step": (
        lambda: planned(lambda w: jnp.zeros((8, 8), out_sharding=P("data")) + w[:8, :8], (W,)),
        "the step shards its own arrays as Explicit axes do…jnp.zeros…ways out: leave out out_sharding=",
    ),
    # ---- state and plans
    "a step in place of its plan": (
        lambda: auto(mesh(), state_like=auto(mesh())(step)),
        "state_like=Auto is neither a plan nor the path of a plan file.…ways out: state_like=step.plan(",
    ),
    "a number as a plan": (
        lambda: auto(mesh(), plan=3),
        "plan=int is neither a plan nor the path of a plan file.…ways out: plan=step.plan(",
    ),
    "state of another model": (
        lambda: planned(plain, (ODD,), state_like=plan()),
        "state_like: no input of the step is state of that plan.…state: …step: w…way out: the plan of a step with the same parameters",
    ),
    "state of another mesh": (
        lambda: auto(jax.make_mesh((8,), ("data",)), state_like=plan()),
        "state_like is a plan for mesh data=2, model=4, the step is for mesh data=8.…way out: that mesh",
    ),
    "a plan of another mesh": (
        lambda: auto(jax.make_mesh((8,), ("data",)), plan=plan())(step).plan(W, W),
        "the plan is for mesh data=2, model=4, the step runs on mesh data=8.…ways out: that mesh",
    ),
    "a plan of another model": (
        lambda: planned(lambda q: q * 2, (W,), plan=plan()),
        "the plan is for another model: none of its inputs is one of this step.…plan: w float32[64,64], x float32[64,64]…"
        "step: q float32[64,64]…way out: plan anew",
    ),
    "a plan of a model of other sizes": (
        lambda: planned(plain, (ODD,), plan=plan()),
        "none of its inputs is one of this step.…plan: w float32[64,64], x float32[64,64]…step: w float32[6,6]…way out: plan anew",
    ),
    "a plan file that is not there": (
        lambda: auto(mesh(), plan="no.json"),
        "no.json: cannot be read: No such file or directory.…way out: the path that plan.save() wrote",
    ),
    "the text of a plan in place of its path": (
        lambda: auto(mesh(), plan=plan().dumps()),
        "this is the text of a plan file, not its path.…way out: Plan.loads(text)",
    ),
    "the text of a plan to load": (lambda: Plan.load(plan().dumps()), "this is the text of a plan file, not its path.…way out"),
    "values in place of a plan's text": (
        lambda: Plan.loads({"mesh": {}}),
        "a plan is read from the text of its file, not from dict.…way out: Plan.load(path)",
    ),
    "a program as a plan file": (lambda: Plan.load(__file__), "test_mistakes.py: this is no plan file: it is not JSON"),
    "a folder that is not there": (
        lambda: plan().save("no/such/plan.json"),
        "no/such/plan.json: cannot be written: No such file or directory.…way out: a file in a folder that exists",
    ),
    # ---- questions to a plan
    "why of no input": (
        lambda: plan().why("ww"),
        "why('ww'): no input of the step has this path, and no collective is on such a line.…inputs: w, x…ways out",
    ),
    "why of another line": (
        lambda: plan().why("test_mistakes.py:1"),
        "no collective is on such a line.…inputs: w, x…lines with collectives: none…ways out",
    ),
    "why of nothing": (lambda: plan().why(None), "why() takes no NoneType.…ways out: the path of an input, a line such as"),
    "why of a plan from a file": (
        lambda: transformer().why("state"),
        "why() needs a plan that remembers its program; this one was read from a file.…way out: step.plan(…).why()",
    ),
    "fix of no input": (lambda: plan().fix("ww", P("data")), "pin 'ww' matches no input of the step.…inputs: w, x"),
    "fix with text": (lambda: plan().fix("w", "data"), "pin 'w': 'data' is no PartitionSpec or NamedSharding.…way out: P('data')"),
    "diff with a file's name": (lambda: plan().diff("plan.json"), "diff() takes a plan, not str.…way out: plan.diff(Plan.load(file))"),
    "a check for other devices": (
        lambda: plan().check("h100:16"),
        'the program is for 8 devices and target h100:2x8 has 16.…way out: name target "h100:8"',
    ),
    "a check for no GPU": (
        lambda: plan().check("h1000:8"),
        "target 'h1000:8' is not known.…way out: GPU:count or GPU:nodesxcount with one of a100",
    ),
    "a check of nothing known": (
        lambda: plan().check(fail_on=("memroy",)),
        "fail_on has 'memroy', which it does not know.…way out: some of 'guess', 'memory'",
    ),
    "what if it lay as nothing": (
        lambda: plan().what_if("w", None),
        "what_if('w', ...): None is none of its layouts.…choices: …P(",
    ),
    "pins in a list, planned anew": (
        lambda: plan().replan([("w", P("data"))]),
        "pins=[('w', P('data'…))] is no mapping of path patterns…way out: pins={",
    ),
    "a mesh in words, planned anew": (
        lambda: plan().replan(mesh={"data": "8"}),
        "mesh={'data': '8'}: {'data': '8'} is no number of devices.…way out: such as {'data': 2, 'model': 4}",
    ),
    "a mesh as text, planned anew": (
        lambda: plan().replan(mesh="data=8"),
        "mesh='data=8': 'data=8' is no number of devices.…way out: such as {'data': 2, 'model': 4}",
    ),
    "rules below a number": (
        lambda: plan().to_rules(3),
        "rules are of the inputs below a path, not int.…way out: such as 'state/params'",
    ),
    "a number as a plan file": (
        lambda: Plan.load(3),
        "a plan file is named by its path, not by int.…way out: the path that plan.save() wrote",
    ),
    "logical axes in a list": (
        lambda: plan().to_logical_rules([("w", ("embed", "mlp"))]),
        "logical axes are a mapping of path patterns to names, not list.…way out: {",
    ),
    "rules below no path": (lambda: plan().to_rules("stat"), "no input of the step is below 'stat'.…inputs: w, x…way out: to_rules()"),
    "logical axes as text": (lambda: plan().to_logical_rules({"w": "embed"}), "'w' has the text 'embed', not a name per dim.…way out"),
    "numbers as logical axes": (
        lambda: plan().to_logical_rules({"w": (0, 1)}),
        "'w' has 0 among its names, which is no text.…way out: ('embed', 'mlp')",
    ),
    "logical axes for other dims": (
        lambda: plan().to_logical_rules({"w": ("embed",)}),
        "'w' names 1 dims, w has 2.…way out: a name, or None, per dim",
    ),
    # ---- rules
    "a rule for a function": (
        lambda: shardplan.register_rule(jnp.sin, "a -> a"),
        "register_rule() takes a primitive or its name, not <…way out: such as jax.lax.sin_p or 'sin'",
    ),
    "a rule that leaves a sum open": (
        lambda: shardplan.register_rule("sin", "a b -> a"),
        "rule 'a b -> a' for sin: ['b'] are in operands only…way out: name them in reduce= or replicated=",
    ),
}


def said_by(text: str) -> re.Pattern:
    return re.compile(".*?".join(map(re.escape, text.split("…"))), re.DOTALL)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_what_where_and_a_way_out(name):
    run, text = MISTAKES[name]
    with pytest.raises((ShardingError, PlanFileError, RuleError)) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    assert said_by(text).search(str(error.value)), str(error.value)


# ---- what works, but hardly as it was meant


def test_objects_that_the_step_changes_without_returning_them_are_named():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: m(x).sum())(model)
        optimizer.update(model, grads)
        return loss

    with pytest.warns(
        ShardingWarning, match=r"the step changes argument 0/bias/value and \d+ more in place and does not return it(.|\n)*nnx.split"
    ):
        planned(train, (model, optimizer, jnp.ones((8, 8))))


def test_what_is_changed_and_returned_or_in_a_dict_is_no_mistake():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def normalised(model, batch):
        batch["x"] = batch["x"] / 255
        model.bias[...] = model.bias[...] + 1
        return nnx.state(model), model(batch["x"]).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        planned(normalised, (model, {"x": jnp.ones((8, 8))}))


def test_recomputation_is_no_way_out_where_no_activations_are_in_memory():
    w = jax.ShapeDtypeStruct((512, 512), np.float32)
    with pytest.raises(ShardingError, match=r"no plan fits(.|\n)*ways out: a larger mesh, (?!jax.checkpoint)"):
        planned(lambda w: w - 0.1, (w,), memory="4KB")


def test_parameters_that_the_step_closes_over_are_named():
    params = jnp.ones((512, 512))
    said = r"over a large array, float32\[512,512\], 1 MiB: every device holds it whole(.|\n)*way out: make it an argument of"
    with pytest.warns(ShardingWarning, match=said):
        planned(lambda x: x @ params, (jax.ShapeDtypeStruct((8, 512), np.float32),))


# ---- the command line

PROGRAM = f"""
import jax
import jax.numpy as jnp

{inspect.getsource(step)}

def example():
    s = jax.ShapeDtypeStruct((64, 64), "float32")
    return step, (s, s)

def one_argument():
    return step, jax.ShapeDtypeStruct((64, 64), "float32")

def wrong_shapes():
    return step, (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((63, 3), "float32"))
"""
PLAN = "plan job.py:example --mesh data=8 --cluster h100"
COMMANDS = {
    "plan job.py:example": "the following arguments are required: --mesh…see: shardplan plan --help",
    "plan job.py:example --mesh 2,4": "--mesh 2,4: '2' is no axis with a size.…way out: --mesh data=2,model=4",
    "plan job.py:example --mesh d=2,d=4": "--mesh d=2,d=4: axis 'd' stands twice.…way out: a name of its own for each axis",
    "plan job.py --mesh data=8": "'job.py' names no function.…way out: module:function or path/to/file.py:function",
    "plan nojob.py:example --mesh data=8": "nojob.py: no such file.…way out: a path from here, ",
    "plan nojob:example --mesh data=8": "no module 'nojob' here or among the installed ones.…way out: path/to/file.py:function",
    "plan job.py:exampel --mesh data=8": "job.py has no function 'exampel'.…it has: step, example",
    "plan job.py:step --mesh data=8": "job.py:step takes w, x.…way out: name a function that takes nothing",
    "plan job.py:wrong_shapes --mesh data=8": "planning failed at job.py:6: TypeError: dot_general requires…--traceback shows more",
    "plan job.py:one_argument --mesh data=8": (
        "job.py:one_argument returned a step that takes w, x and 1 argument for it: missing a required argument: 'x'.…way out: return "
        "train_step, (state, batch)"
    ),
    f"{PLAN} --pin w=data --pin w=None,data": "--pin w: stands twice.…way out: one spec for each path",
    f"{PLAN} --cluster h1000": "cluster 'h1000' is not known.…presets: ",
    f"{PLAN} --memory lots": "memory='lots' is no amount of memory.…ways out",
    f"{PLAN} --pin w": "--pin w: has no path and spec.…way out: --pin 'params/**/kernel=None,model'",
    f"{PLAN} --pin w=model": "pin 'w' on w float32[64,64]: …names mesh axis 'model', the mesh has data=8.…way out: one of ('data',)",
    f"{PLAN} --search ip": "argument --search: invalid choice: 'ip' (choose from …see: shardplan plan --help",
    f"{PLAN} --time-limit soon": "argument --time-limit: 'soon' is no number above 0, such as 0.1…see: ",
    f"{PLAN} --donate w": "argument --donate: 'w' is no list of argument numbers, such as 0,1",
    f"{PLAN} --donate 9": "donate_argnums=(9,): …only accepts 2 positional arguments.…way out",
    f"{PLAN} -o no/such/plan.json": "no/such/plan.json: cannot be written: No such file or directory.…way out",
    f"{PLAN} --state-like no.json": "no.json: cannot be read: No such file or directory.…way out",
    f"{PLAN} --compiler-options pipelined": "argument --compiler-options: 'pipelined' is none of auto, none and NAME=VALUE,…",
    "show job.py": "job.py: this is no plan file: it is not JSON",
    "diff plan.json": "the following arguments are required: b…see: shardplan diff --help",
    "check plan.json": "'plan.json' names no function.…way out: the step as well: plan.json job.py:example",
    "check job.py:example --tolerance 0.1": (
        "--tolerance and --max-seconds compare with a plan.…way out: shardplan check plan.json job.py:example"
    ),
    "check plan.json job.py:example --target z:8": "target 'z:8' is not known.…way out: GPU:count",
    "check plan.json job.py:example --fail-on all": "fail_on has 'all', which it does not know.…way out",
    "facts combine": "there is no fact 'combine'.…facts: ",
    "paln job.py:example": "argument command: invalid choice: 'paln' (choose from…see: shardplan --help",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_on_the_command_line_is_one_message_and_status_2(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(PROGRAM)
    saved(tmp_path)
    assert main(command.split()) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "warning:" not in line and "AbstractMesh" not in line]
    assert said_by(f"shardplan: {COMMANDS[command]}").search("\n".join(said)), said


def test_a_plan_that_is_reused_may_have_the_pins_that_it_was_made_with():
    pins = {"w": P("data"), "x": P(None, "model")}
    made = planned(pins=pins)
    assert planned(plan=made, pins=pins, memory="1GB").in_shardings == made.in_shardings


def test_prices_that_a_plan_that_is_reused_does_not_have_are_warned_of():
    with pytest.warns(ShardingWarning, match=r"plan= is priced as .*, not as h100, which cluster= names; it is reused as it is\."):
        planned(plan=plan(), cluster="h100")
    with pytest.warns(ShardingWarning, match=r"memory= asks for a plan that saves memory, and plan= is reused as it is\."):
        planned(plan=plan(), memory="heavy")
