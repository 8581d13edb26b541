"""`import shardplan` is quick, each room loads what it needs, and the planned step keeps the types of the step."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = "{'jax', 'jaxlib', 'ortools', 'scipy', 'numba'}"
ROOT = Path(__file__).parent.parent


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_neither_jax_nor_a_solver():
    run(f"import sys, shardplan; found = {HEAVY} & set(sys.modules); assert not found, found")


def test_or_tools_are_loaded_by_the_first_bound_or_core_and_cp_sat_by_the_first_core():
    run(
        f"""import sys, jax, shardplan, shardplan.cli
alone = {HEAVY} & set(sys.modules) - {{'jax', 'jaxlib'}}
step = shardplan.auto(jax.sharding.AbstractMesh((8,), ('x',)))(lambda x: x * 2)
assert not {{'ortools', 'numba'}} & set(sys.modules)
step.plan(jax.ShapeDtypeStruct((8,), 'float32'))
assert not {{'ortools', 'pandas'}} & set(sys.modules)
import numpy as np
from shardplan.ilp.solver.search.cpsat import Problem, solve_core
assert solve_core(Problem((np.array([1.0, 2.0]),)), work=1.0).status == 'optimal'
assert 'ortools.sat.python.cp_model' in sys.modules"""
    )


def test_every_public_name_is_there_and_no_other():
    run(
        """import shardplan
for name in shardplan.__all__:
    assert getattr(shardplan, name).__name__ == name and name in dir(shardplan)
assert set(shardplan.HOME) == set(shardplan.__all__)
try:
    shardplan.chek
except AttributeError as error:
    assert "no attribute 'chek'" in str(error)
else:
    assert False"""
    )


def test_the_solver_needs_no_jax():
    run(
        """import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.partition('.')[0] in ('jax', 'jaxlib'):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import numpy as np
from shardplan.ilp.solver import Edge, Problem, solve
costs = (np.array([1.0, 2.0]), np.array([3.0, 1.0]))
assert solve(Problem(costs, (Edge(0, 1, np.array([[0.0, 5.0], [5.0, 0.0]])),), (), None)).objective == 3.0"""
    )


TYPED = """\
from typing import assert_type

import jax

import shardplan
from shardplan import Auto, Plan

mesh = jax.make_mesh((8,), ("x",))


@shardplan.auto(mesh, donate_argnums=0)
def step(state: dict[str, jax.Array], batch: int, *, rate: float = 0.1) -> tuple[dict[str, jax.Array], float]:
    return state, rate * batch


assert_type(step({}, 1, rate=0.5), tuple[dict[str, jax.Array], float])
assert_type(step.plan({}, 1), Plan)
assert_type(step.with_options(search="propagation")({}, 2), tuple[dict[str, jax.Array], float])
other: Auto[[int], str] = shardplan.auto(mesh)(lambda n: str(n))
"""
WRONG = 'step({}, "one")\n'


def check(checker: str, file: Path) -> str:
    arguments = ["--pythonpath", sys.executable] if checker == "pyright" else ["--follow-imports=silent", f"--cache-dir={file.parent}"]
    command = [sys.executable, "-m", checker, *arguments, str(file)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300).stdout


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["pyright", "mypy"])
def test_a_planned_step_keeps_its_signature_and_result(checker, tmp_path):
    pytest.importorskip(checker)
    assert (ROOT / "shardplan" / "py.typed").is_file()
    file = tmp_path / "train.py"
    file.write_text(TYPED)
    said = check(checker, file)
    assert "0 errors" in said or "no issues found" in said, said
    file.write_text(TYPED + WRONG)
    said = check(checker, file)
    assert "Literal['one']" in said or 'incompatible type "str"' in said, said
