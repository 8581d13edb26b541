"""The solver of cost networks stands alone: it imports neither jax nor a room of shardplan, and solves where jax cannot be imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
from shardplan.ilp.solver import Edge, Problem, Usage, minimize_peak, solve

rng, n, k = np.random.default_rng(0), 30, 4
costs = tuple(rng.integers(0, 100, k).astype(float) for _ in range(n))
edges = tuple(Edge(i, j, rng.integers(0, 100, (k, k)).astype(float)) for i in range(n) for j in (i + 1, i + 6) if j < n)
usages = tuple(Usage(i, i, i + 8, rng.integers(1, 50, k).astype(float)) for i in range(n))
peak = minimize_peak(Problem(costs, edges, usages))
solution = solve(Problem(costs, edges, usages, limit=1.3 * peak.bytes))
assert solution.status == "optimal", solution
rooms = {m for m in sys.modules if m.startswith("shardplan.") and not m.startswith("shardplan.ilp.solver") and m != "shardplan.ilp"}
assert not rooms, rooms
"""


def test_the_solver_solves_where_jax_cannot_be_imported():
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, check=True, timeout=300)


def test_importing_the_solver_does_not_load_numba():
    command = "import sys, shardplan.ilp.solver; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True, timeout=300)


LOADS = """
import sys, types
sys.modules[sys.argv[1]] = types.ModuleType(sys.argv[1])
from shardplan.ilp.solver.or_tools import or_tools
seen, load = [], sys.setdlopenflags
sys.setdlopenflags = lambda flags: (seen.append(flags), load(flags))
before = sys.getdlopenflags()
or_tools("sat.python.cp_model")
or_tools("graph.python.max_flow")
assert sys.getdlopenflags() == before
print([flags & ~before for flags in seen])
"""


def test_or_tools_are_bound_to_their_own_libraries_where_tensorflow_is_loaded():
    """The module stands for TensorFlow, which is not installed here; with it CP-SAT ended the process."""
    for module, flags in (("tensorflow", [getattr(os, "RTLD_DEEPBIND", 0), 0]), ("tensorfloat", [])):
        done = subprocess.run([sys.executable, "-c", LOADS, module], cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
        assert done.stdout.split("\n")[0] == str(flags)
