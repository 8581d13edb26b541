"""Files as nobody saved them: each is read, or refused with a ShardingError, in bounded time, memory and words.

    python benchmarks/fuzz_files.py [--count 100000] [--seed 1]

Plan files, cache entries and cluster files (`tests/mutations.py`: junk in any place, deep nesting, huge numbers, wrong types, foreign
formats; bytes cut, turned, repeated, inserted). What is read is printed, drawn and compared; plans of a real step are taken over and
lowered. `tests/test_hostile_files.py` runs 2,000. Printed are the failures, and per kind of file the processor seconds of the slowest;
at the end the most memory that the process held.
"""

import argparse
import logging
import os
import resource
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import jax

jax.config.update("jax_num_cpu_devices", 8)
from file_claims import KINDS, claims  # noqa: E402

PARTS = {"plan file": 0.45, "cache entry": 0.1, "cluster file": 0.35, "plan to take over": 0.1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    assert PARTS.keys() == KINDS.keys()
    logging.getLogger("shardplan").setLevel(logging.ERROR)  # a cache says of every entry why it is planned anew
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind, part in PARTS.items():
            *found, summary = claims(kind, int(part * options.count), Path(folder), options.seed)
            wrong += len(found)
            print(*found, f"{kind:20}{summary}", sep="\n", flush=True)
    print(f"{wrong} failures; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
