"""Programs nobody wrote for this planner, a training step each: planned, sharded as far as they go, with the results of plain jit.

    python benchmarks/programs.py                  all of them, 8 emulated CPU devices
    python benchmarks/programs.py linen nnx        some families
    python benchmarks/programs.py --show           one line each

Every loss and optimizer of optax, the layers of flax (linen and nnx) and equinox, with their gradients: the list is that of
`tests/test_rules_programs.py`, machine and comparison are those of `benchmarks/jax_harness.py`.
"""

import argparse
import collections
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from types import SimpleNamespace

import jax
import jax_harness


def make_mesh():
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def run(name: str, fn, args: tuple, mesh) -> jax_harness.Outcome:
    """One program, plain and planned."""
    return jax_harness.run(SimpleNamespace(fullname=name, dyn_fun=fn, dyn_args_maker=lambda _: args), mesh)


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from test_rules_programs import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=", ".join(FAMILIES))
    parser.add_argument("--show", action="store_true", help="a line per program")
    options = parser.parse_args(argv)
    start, count, mesh = time.perf_counter(), collections.Counter(), make_mesh()
    for family in options.families or FAMILIES:
        for name, fn, args in FAMILIES[family][0]():
            found = run(name, fn, args, mesh)
            count[found.kind] += 1
            if options.show or found.kind in ("failed", "skipped"):
                print(f"{found.kind:<8} {name}  {found.why}", flush=True)
        jax.clear_caches()
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(count.items()))
    print(f"{kinds} in {time.perf_counter() - start:.0f} s, jax {jax.__version__}")
    return int(count["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
