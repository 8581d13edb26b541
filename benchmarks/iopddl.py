"""Scores of the solver on the public IOPDDL benchmark, at the contest's own time limits.

    python benchmarks/iopddl.py FOLDER [--only A,B] [--seconds-scale 0.1]
    python benchmarks/iopddl.py --drawn [--only hub-3axes] [--seconds-scale 0.1] [--processor-time]

With `--drawn`, drawn problems of the same form (`iopddl_drawn.py`), after the folder's if there is one; the score is their optimum over
this cost. With `--processor-time`, limits count processor seconds, so that other processes on the machine do not shorten them.

One line per instance: cost, lower bound, gap, peak memory of the answer over the limit, seconds, and the score: the contest's best
cost over this cost. Every instance has a process of its own. Reading the file is not counted, as in the contest, nor is compiling
the kernels.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

import iopddl_drawn
import measurements

from shardplan.ilp.solver import iopddl

# letter: (limit in seconds, the contest's best cost)
CONTEST: dict[str, tuple[float, float | None]] = {
    "A": (60, 6548641531), "B": (60, 532843), "C": (60, 84102445260), "G": (120, 217039),
    "K": (180, 2274276676), "M": (180, 49928460991), "S": (240, 1534613444), "U": (300, 2569342178),
}  # fmt: skip
DEFAULT = (60.0, None)
WIDTH = 20  # of names


def load(source: Path | str) -> tuple[str, iopddl.Instance, float, float | None]:
    """(name, instance, time limit in seconds, best known cost) of a file, or of the drawn problem of that name."""
    if isinstance(source, Path):
        letter = source.name.split(".")[0].split("-")[-1]
        limit, best = CONTEST.get(letter, DEFAULT)
        return letter, iopddl.read(source), limit, best
    family, seed = iopddl_drawn.FAMILIES[source]
    planted = iopddl_drawn.plant(iopddl_drawn.train_step(family, seed), seed)
    problem = planted.problem
    exact = [c.tolist() for c in problem.costs], [(e.i, e.j, e.cost.ravel()) for e in problem.edges]
    return source, iopddl.Instance(source, problem, exact), family.seconds, planted.optimum


def run(source: Path | str, scale: float, processor_time: bool) -> dict:
    """Solves one file or drawn problem."""
    name, instance, limit, best = load(source)
    iopddl.compile_ahead()
    if processor_time:
        time.monotonic = time.process_time
    start = time.monotonic()
    solution = iopddl.solve_instance(instance, limit * scale)
    seconds = time.monotonic() - start
    found = bool(solution.states)
    cost = instance.cost(solution.states) if found else float("inf")
    cost = int(cost) if cost < float("inf") else cost
    peak = instance.problem.peak(solution.states) if found else 0.0
    return {
        "instance": name,
        "status": solution.status,
        "cost": cost,
        "bound": solution.bound,
        "gap": (cost - solution.bound) / cost if found and cost else float(not found),
        "forbidden": instance.forbidden(solution.states) if found else 0,
        "memory": peak / instance.problem.limit if instance.problem.limit else 0.0,
        "seconds": seconds,
        "limit_s": limit * scale,
        "process_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "score": best / cost if best else None,
        "stats": solution.stats,
    }


def _worker(queue, *arguments) -> None:
    queue.put(run(*arguments))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--drawn", action="store_true", help="drawn problems, too")
    parser.add_argument("--processor-time", action="store_true", help="limits count processor seconds")
    parser.add_argument("--only", help="letters, or names of drawn problems, separated by commas")
    parser.add_argument("--seconds-scale", type=float, default=1.0, help="multiplies every time limit")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/measurements.md")
    options = parser.parse_args(argv)
    sources: list = sorted(options.folder.glob("*.json*")) if options.folder else []
    sources += list(iopddl_drawn.FAMILIES) if options.drawn else []
    if options.only:
        wanted = set(options.only.split(","))
        sources = [s for s in sources if (s.name.split(".")[0].split("-")[-1] if isinstance(s, Path) else s) in wanted]
    print(f"{'':<{WIDTH}}  status            cost           bound     gap  memory  seconds   limit  process   score")
    rows, context = [], multiprocessing.get_context("spawn")
    for source in sources:
        queue = context.Queue()
        process = context.Process(target=_worker, args=(queue, source, options.seconds_scale, options.processor_time))
        process.start()
        row = queue.get()
        process.join()
        rows.append(row)
        score = "     –" if row["score"] is None else f"{row['score']:.4f}"
        forbidden = f"   {row['forbidden']} forbidden" if row["forbidden"] else ""
        print(
            f"{row['instance']:<{WIDTH}}  {row['status']:<9} {row['cost']:>14} {row['bound']:>15.0f}  {row['gap']:>6.2%}"
            f"  {row['memory']:>6.4f}  {row['seconds']:>7.2f}  {row['limit_s']:>6.1f}  {row['process_gb']:>4.1f} GB"
            f"  {score}{forbidden}",
            flush=True,
        )
    scores = [row["score"] for row in rows if row["score"] is not None]
    print(f"sum of {len(scores)} scores: {sum(scores):.3f}   worst: {min(scores, default=0):.4f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.docs:
        head = ("instance", "status", "cost", "bound", "gap", "seconds of limit", "process, GB", "contest's best / cost")
        cells = (
            (r["instance"], r["status"], r["cost"], f"{r['bound']:.0f}", f"{r['gap']:.2%}", f"{r['seconds']:.1f} of {r['limit_s']:.0f}",
             f"{r['process_gb']:.1f}", "–" if r["score"] is None else f"{r['score']:.4f}")
            for r in rows
        )  # fmt: skip
        text = f"{measurements.table(head, cells)}\n\nSum of scores: {sum(scores):.3f}."
        measurements.write("iopddl", f"python benchmarks/iopddl.py FOLDER --seconds-scale {options.seconds_scale:g} --docs", text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
