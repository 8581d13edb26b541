"""Whether a planned step gives the numbers of the plain one, in every way it can be run: the full product of options.

    python benchmarks/same_numbers.py [--only gpt,moe] [--mesh 2x4] [--kind explicit] [--how reloaded] [--inside yes]

Every example x meshes (8,), (2, 4), (4, 2), (2, 2, 2) x Auto and Explicit axes x outside and inside `jax.set_mesh` x planned by the
integer program, by propagation, from a saved file: 20 steps each on 8 emulated devices, against 20 steps of plain `jax.jit`. One
line per case; `off` is the largest difference of any state array after the last step, as a share of what is allowed. The tests
(`tests/test_same_numbers.py`, which holds tolerances and the comparison) run a part of the product.
"""

import argparse
import contextlib
import gc
import itertools
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import shardplan

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import test_same_numbers as claim
from models import MODELS

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
KINDS, INSIDE, HOWS = (tuple(dict.fromkeys(values)) for values in zip(*claim.WAYS, strict=True))


def off(got, want) -> float:
    """The largest difference of two states, 1 being all that is allowed; `inf` where something is no number."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        allowed = claim.TOLERANCE.get(str(a.dtype), 0.0) * max(1e-3, float(np.abs(y).max(initial=0.0)))
        difference = float(np.abs(x - y).max(initial=0.0))
        if difference or not np.isfinite(difference):
            worst = max(worst, difference / allowed if allowed and np.isfinite(difference) else np.inf)
    return worst


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    meshes = ["x".join(map(str, shape)) for shape in claim.MESHES]
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--mesh", default=",".join(meshes), help="e.g. 2x4,2x2x2")
    parser.add_argument("--kind", default=",".join(KINDS))
    parser.add_argument("--inside", default="no,yes", help="whether jax.set_mesh is on")
    parser.add_argument("--how", default=",".join(HOWS))
    options = parser.parse_args(argv)
    choices = {"only": tuple(MODELS), "mesh": meshes, "kind": KINDS, "inside": ("no", "yes"), "how": HOWS}
    asked = []
    for name, known in choices.items():
        asked.append(getattr(options, name).split(","))
        if unknown := set(asked[-1]) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    passed = failed = 0
    plains: dict[str, tuple] = {}
    for name, mesh, kind, inside, how in itertools.product(*asked):
        if name not in plains:
            plains.clear()
            plains[name] = claim.plain_run(name)
        start, error = time.perf_counter(), ""
        try:
            worst = run(plains[name], tuple(map(int, mesh.split("x"))), kind, inside == "yes", how)
            if not worst <= 1:
                error = f"off by {worst:.3g} of what is allowed"
        except Exception as raised:
            worst, error = np.inf, f"{type(raised).__name__}: {(str(raised).strip().splitlines() or [''])[0]}"
        passed, failed = passed + (not error), failed + bool(error)
        place = "in set_mesh" if inside == "yes" else ""
        print(
            f"{name:<13}{mesh:<7}{kind:<9} {place:<12}{how:<12}{time.perf_counter() - start:>6.1f} s  "
            + (f"FAILED  {error}" if error else f"same  off {worst:.1e}"),
            flush=True,
        )
        jax.clear_caches()
        gc.collect()
    print(f"{passed} the same, {failed} not, of {passed + failed}: {claim.STEPS} steps each")
    return 1 if failed else 0


def run(plain: tuple, shape: tuple[int, ...], kind: str, inside: bool, how: str) -> float:
    """How far off one case is; the losses of every step have to agree too."""
    create, step, data, (want, want_losses) = plain
    mesh = claim.make_mesh(shape, kind)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext(), tempfile.TemporaryDirectory() as folder:
        planned = shardplan.auto(mesh, donate_argnums=0, search="propagation" if how == "propagation" else "ilp")(step)
        if how == "reloaded":
            file = Path(folder) / "plan.json"
            planned.plan(jax.eval_shape(create, jax.random.key(0)), data[0]).save(file)
            planned = shardplan.auto(mesh, donate_argnums=0, plan=file)(step)
        got, losses = claim.run(planned, planned.init(create, jax.random.key(0)), data)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-3, atol=1e-4)
    return off(got, want)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
