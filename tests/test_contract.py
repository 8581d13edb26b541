"""Plans in programs without shardplan: rules by path, Python source, logical axes, and the contract that a plan file begins with."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import jax
import jsonschema
import pytest
import yaml
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from plans import layout, leaf, transformer

import shardplan
from shardplan.plan.partition_rules import entries, found_in, matching, path_rules, shortest
from shardplan.plan.travel import spec_text

pytestmark = pytest.mark.usefixtures("first_plan")

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
sys.modules["shardplan"] = None  # importing it raises ImportError
import jax, jax.numpy as jnp

jax.config.update("jax_num_cpu_devices", 8)


def create_state(key, width=64):
    up, down = jax.random.split(key)
    return {"up": 0.04 * jax.random.normal(up, (width, 4 * width)), "down": 0.02 * jax.random.normal(down, (4 * width, width))}


def loss_fn(params, batch):
    return jnp.mean((jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


batch = {"x": jnp.ones((64, 64)), "y": jnp.ones((64, 64))}
"""
SAY = """
_, expected = jax.jit(train_step)(create_state(jax.random.key(0)), batch)
assert abs(float(loss) - float(expected)) < 1e-5, (loss, expected)
print({name: str(x.sharding.spec) for name, x in state.items()})
"""


@pytest.fixture(scope="module")
def plan():
    names: dict = {}
    exec(PROGRAM.replace('sys.modules["shardplan"] = None', "").replace('jax.config.update("jax_num_cpu_devices", 8)', ""), names)
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    pins = {"state/up": P(None, "model"), "state/down": P("model"), "batch/*": P("data")}
    step = shardplan.auto(mesh, cluster="h100", donate_argnums=0, pins=pins)
    return step(names["train_step"]).plan(jax.eval_shape(names["create_state"], jax.random.key(0)), names["batch"])


def run_alone(program: str, folder: Path, python: str | Path = sys.executable) -> str:
    """What a program prints in a process that cannot import shardplan, and sees 8 devices."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [python, "program.py"],
        cwd=folder,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---- rules


def test_rules_are_one_per_layout_where_names_say_the_role():
    plan = transformer(12)
    rules = plan.to_rules()
    assert len(rules) == len({entries(x.layout.spec()) for x in plan.inputs}) == 4
    assert {matching(rules, x.path) for x in plan.inputs if x.path.endswith("/up")} == {P(None, "model")}
    assert transformer(3).to_rules() == rules  # numbers of layers do not matter


def test_rules_below_a_path():
    rules = transformer().to_rules("state/params")
    assert matching(rules, "blocks/7/down") == P("model") and matching(rules, "embed") == P()
    assert len(rules) == 3
    with pytest.raises(shardplan.ShardingError, match="no input of the step is below 'params'"):
        transformer().to_rules("params")


SEGMENT = st.sampled_from(["a", "b", "layer_0", "layer_1", "0", "1", "w.x", "(odd)"])
SPECS = st.sampled_from([(), ("data",), (None, "model"), (("data", "model"),)])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.lists(SEGMENT, min_size=1, max_size=4).map("/".join), SPECS, min_size=1, max_size=12))
def test_rules_reproduce_any_layout_of_any_paths(specs):
    rules = path_rules(specs)
    assert {path: matching(rules, path) for path in specs} == specs
    assert len({*specs.values()}) <= len(rules) <= len(specs)
    assert path_rules(dict(sorted(specs.items()))) == path_rules(dict(sorted(specs.items())))


def test_numbered_layers_are_told_apart_one_by_one_only_where_the_plan_does(monkeypatch):
    specs = {f"state/layer_{n}/{name}": ("data",) if name == "w" else () for n in range(1000) for name in ("w", "b")}
    odd = dict([*specs.items()][:200]) | {"state/layer_7/w": ("model",)}
    monkeypatch.setattr("shardplan.plan.partition_rules.MANY_PATHS", 100)
    rules = path_rules(odd)
    assert {path: matching(rules, path) for path in odd} == odd and len(rules) == 3
    monkeypatch.setattr("shardplan.plan.partition_rules.shortest", lambda x, literal: shortest(x, literal) if not literal else 1 / 0)
    assert path_rules(specs) == (("(^|/)b$", ()), (".*", ("data",)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(SEGMENT | st.text("a1.\\\n", max_size=4), min_size=1, max_size=4).map("/".join), max_size=12, unique=True))
def test_every_pattern_is_known_to_be_found_where_a_search_finds_it(paths):
    for literal in (True, False):
        for pattern, bits in found_in(paths, literal).items():
            assert bits == sum(1 << n for n, path in enumerate(paths) if re.search(pattern, path)), pattern


def test_no_rule_can_be_left_out():
    specs = {x.path: entries(x.layout.spec()) for x in transformer(4).inputs} | {"state/params/blocks/2/up": ("data",)}
    rules = path_rules(specs)
    for n in range(len(rules)):
        fewer = rules[:n] + rules[n + 1 :]
        assert any(matching(fewer, path) != spec for path, spec in specs.items())


# ---- Python


def test_the_python_module_needs_jax_alone(plan, tmp_path):
    (tmp_path / "layout.py").write_text(plan.to_python())
    use = """
from layout import DONATED, make_mesh, shardings, spec
mesh, state = make_mesh(), create_state(jax.random.key(0))
ins = shardings("state", state, mesh), shardings("batch", batch, mesh)
step = jax.jit(train_step, in_shardings=ins, out_shardings=(ins[0], None), donate_argnums=0)
state, loss = step(*jax.device_put((state, batch), ins))
assert DONATED == ("state",) and spec("state/up") == jax.sharding.PartitionSpec(None, "model")
"""
    said = run_alone(PROGRAM + use + SAY, tmp_path)
    assert "'up': \"P(None, 'model')\"" in said.replace("PartitionSpec", "P")


def test_odd_names_stay_what_they_are_in_python():
    odd = leaf('state/a"b\\c', (8, 8), "data", "")
    names: dict = {}
    plan = shardplan.Plan(**{f: getattr(transformer(), f) for f in transformer().__struct_fields__} | {"inputs": (odd,)})
    exec(plan.to_python(), names)
    assert names["spec"](odd.path) == P("data")
    assert spec_text((None, ("x", "y"), "z")) == 'P(None, ("x", "y"), "z")'


# ---- logical axes


AXES = {"state/up": ("embed", "mlp"), "state/down": ("mlp", "embed"), "batch/*": ("batch", None)}


def test_flax_shards_by_the_logical_rules_as_planned(plan):
    rules = plan.to_logical_rules(AXES)
    for path, names in {"state/up": ("embed", "mlp"), "state/down": ("mlp", "embed"), "batch/x": ("batch", None)}.items():
        planned = next(x.layout for x in plan.inputs if x.path == path)
        assert entries(linen.logical_to_mesh_axes(names, rules)) == entries(planned.spec())


def test_nnx_makes_parameters_by_the_logical_rules_as_planned(plan):
    made = nnx.with_partitioning(nnx.initializers.normal(), AXES["state/up"], sharding_rules=plan.to_logical_rules(AXES))
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        up = nnx.Linear(512, 2048, kernel_init=made, rngs=nnx.Rngs(0)).kernel
    planned = next(x.layout for x in plan.inputs if x.path == "state/up")
    assert entries(up.get_value().sharding.spec) == entries(planned.spec()) != ()


def test_maxtext_reads_the_same_rules(plan):
    found = yaml.safe_load(plan.to_maxtext(AXES))
    assert found["mesh_axes"] == ["data", "model"] and found["ici_data_parallelism"] == 2 and found["ici_model_parallelism"] == 4
    rules = {name: axes for name, axes in plan.to_logical_rules(AXES)}
    assert {name: axes[0] if axes else None for name, axes in found["logical_axis_rules"]} == rules


def test_names_that_cannot_say_the_plan_are_refused_with_both_arrays():
    plan = transformer()
    one_name = {"state/params/blocks/*/up": ("a", "b"), "state/params/blocks/*/down": ("a", "c")}
    with pytest.raises(shardplan.ShardingError, match=r"logical axis 'a' cannot say what the plan does: .* in state/params/blocks/0/"):
        plan.to_logical_rules(one_name)
    with pytest.raises(shardplan.ShardingError, match="names 1 dims, state/params/embed has 2"):
        plan.to_logical_rules({"state/params/embed": ("a",)})
    with pytest.raises(shardplan.ShardingError, match="match no input"):
        plan.to_logical_rules({"nothing": ()})
    with pytest.raises(shardplan.ShardingError, match="two dims of one array the same"):
        plan.to_logical_rules({"state/params/embed": ("a", "a")})


# ---- the file


def test_a_file_begins_with_its_contract(plan):
    text = plan.dumps()
    lines = text.splitlines()
    assert lines[3].startswith('  "contract": {"mesh": {"data": 2, "model": 4}, "rules": [')
    found = json.loads(text)["contract"]
    assert found["donated"] == ["state"] and found["cluster"] == "h100"
    assert found["versions"] == {"jax": jax.__version__, "shardplan": shardplan.__version__}
    jsonschema.Draft202012Validator(shardplan.Plan.schema()).validate(json.loads(text))


@pytest.fixture(scope="module")
def twelve_lines():
    """The lines of the docs, as they stand there."""
    page = (ROOT / "docs" / "travel.md").read_text()
    lines = re.search(r"twelve lines\n.*?```python\n(.*?)```", page, re.DOTALL)[1]
    assert len([line for line in lines.splitlines() if line.strip()]) == 12
    return lines


START, RUN = "state = create_state(jax.random.key(0))\n", "state, loss = step(*jax.device_put((state, batch), ins))\n"


def test_twelve_lines_use_a_file_without_shardplan(plan, twelve_lines, tmp_path):
    plan.save(tmp_path / "plan.json")
    said = run_alone(PROGRAM + START + twelve_lines + RUN + SAY, tmp_path)
    assert "'up': \"P(None, 'model')\"" in said.replace("PartitionSpec", "P")


FRESH = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("shardplan") is None
placed = jax.device_put((state, batch), ins)
arrays = {"state": placed[0], "batch": placed[1]}
state, loss = step(*placed)
"""
SAY_ALL = """
leaves = jax.tree_util.tree_flatten_with_path
flat = lambda trees: {"/".join(x.key for x in path): list(x.sharding.spec) for path, x in leaves(trees)[0]}
installed = [x.metadata["Name"] for x in importlib.metadata.distributions()]
print(json.dumps({"mesh": dict(mesh.shape), "installed": installed, "given": flat(arrays), "returned": flat({"0": state})}))
"""


@pytest.mark.slow
def test_twelve_lines_shard_as_planned_where_nothing_but_jax_is_installed(plan, twelve_lines, tmp_path):
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"jax=={jax.__version__}"], check=True)
    plan.save(tmp_path / "plan.json")
    program = PROGRAM.replace('sys.modules["shardplan"] = None', "") + START + twelve_lines + FRESH + SAY_ALL
    said = json.loads(run_alone(program, tmp_path, python))
    assert {*said["installed"]} <= {"jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy", "pip", "setuptools"}
    assert said["mesh"] == dict(plan.mesh)
    given, returned = ({path: spec_list(x) for path, x in said[kind].items()} for kind in ("given", "returned"))
    assert given == {x.path: spec_list(x.layout.spec()) for x in plan.inputs}
    assert returned == {x.path: spec_list(x.layout.spec()) for x in plan.outputs if x.path != "1"}


def spec_list(spec) -> list:
    """A PartitionSpec, or what JSON has of it, without trailing dims that are whole."""
    out = [list(x) if isinstance(x, (list, tuple)) else x for x in spec]
    while out and out[-1] is None:
        out.pop()
    return out


def test_the_version_is_stated_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "shardplan.__version__"
    }


def test_a_scalar_and_a_vector_that_are_replicated_have_one_rule():
    assert path_rules({"step": entries(layout().spec()), "bias": entries(layout("").spec())}) == ((".*", ()),)
