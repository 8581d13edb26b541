"""Effect of halving and doubling every setting of the solver, on the planner's problems and on IOPDDL instances.

    python benchmarks/solver_settings.py                       all settings, planner problems
    python benchmarks/solver_settings.py core_share first_target --iopddl FOLDER --letters A,B

Planner problems are those of `budgets.py`, with the tightest two budgets of each model. Printed are, for half and for twice the value:
the problems that are no longer proven, the sum of objectives, the counted work and the processor seconds after presolve, the last three
relative to the default. IOPDDL instances are solved without a clock, with a limit of work.
"""

import argparse
import dataclasses
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

from shardplan.ilp.solver import Problem, solve
from shardplan.ilp.solver.deadline import ENTRIES_PER_WORK, Deadline
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.settings import DEFAULT, Settings

MODELS = (("dlrm (example)", "8"), ("dlrm (example)", "2,4"), ("moe (example)", "2,4"), ("gpt (example)", "2,4"), ("lstm", "2,2,2"))
UNMEASURED = ("large_states",)
"""Read under a time limit only."""

WORK = 8.0
"""Limit of work of an IOPDDL instance."""


def planner_problems(cache: Path | None) -> list[Problem]:
    """The tight problems of `MODELS`; from the cache if it is there."""
    if cache and cache.exists():
        return pickle.loads(cache.read_bytes())
    import budgets

    found = [problem for model, mesh in MODELS for budget, problem in budgets.problems(model, mesh) if budget in ("1.2", "1.05")]
    if cache:
        cache.write_bytes(pickle.dumps(found))
    return found


def iopddl_problems(folder: Path, letters: str) -> list[Problem]:
    """Instances of the benchmark, by letter."""
    from shardplan.ilp.solver import iopddl

    return [iopddl.read(next(folder.glob(f"*-{letter}.json*"))).problem for letter in letters.split(",")]


def measure(problems: list[Problem], settings: Settings, work_limit: float | None) -> tuple[int, float, float, float]:
    """(problems without a proof, sum of objectives, work, processor seconds)."""
    spent, spend = [0.0], Deadline.spend

    def counted(deadline: Deadline, entries: float) -> None:
        spent[0] += entries / ENTRIES_PER_WORK
        spend(deadline, entries)

    Deadline.spend = counted
    seconds, answers = 0.0, []
    for problem in problems:
        small = presolve(problem, tie=True)
        start = time.process_time()
        answers.append(solve(problem, work_limit=work_limit, settings=settings, presolved=small))
        seconds += time.process_time() - start
    Deadline.spend = spend
    unproven = sum(answer.status not in ("optimal", "infeasible") for answer in answers)
    return unproven, sum(answer.objective for answer in answers), spent[0], seconds


def variants(name: str) -> Iterator[tuple[str, Settings]]:
    """Half and twice a setting; shares stay below 1."""
    value = getattr(DEFAULT, name)
    for label, factor in (("half", 0.5), ("twice", 2.0)):
        if isinstance(value, tuple):
            changed = tuple(max(1, int(factor * part)) for part in value)
        elif isinstance(value, int):
            changed = max(1, int(factor * value))
        else:
            changed = factor * value if value > 1 or factor * value < 1 else 1 - (1 - value) / 2
        yield label, dataclasses.replace(DEFAULT, **{name: changed})


def main(argv: list[str] | None = None) -> None:
    """Prints one row per setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="settings; all by default")
    parser.add_argument("--iopddl", type=Path, help="folder of IOPDDL instances, solved in place of the planner's")
    parser.add_argument("--letters", default="A,B,G")
    parser.add_argument("--cache", type=Path, help="file that keeps the planner's problems")
    options = parser.parse_args(argv)
    problems = iopddl_problems(options.iopddl, options.letters) if options.iopddl else planner_problems(options.cache)
    limit = WORK if options.iopddl else None
    base = measure(problems, DEFAULT, limit)
    print(f"{len(problems)} problems, {base[0]} unproven, work {base[2]:.2f}, {base[3]:.1f} s", flush=True)
    for name in options.names or [f.name for f in dataclasses.fields(Settings) if f.name not in UNMEASURED]:
        cells = []
        for label, settings in variants(name):
            unproven, objective, work, seconds = measure(problems, settings, limit)
            cells.append(
                f"{label} {getattr(settings, name)}: unproven {unproven}, objective {objective / base[1]:.5f}, "
                f"work {work / base[2]:.2f}, s {seconds / base[3]:.2f}"
            )
        print(f"{name:<26} {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
