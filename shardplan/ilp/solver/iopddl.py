"""Reads problems from, and writes answers to, the files of the public IOPDDL benchmark (ASPLOS 2025 contest).

    {"problem": {"name": ..., "usage_limit": M,
                 "nodes": {"intervals": [[lo, hi), ...], "costs": [[c_i ...] ...], "usages": [[u_i ...] ...]},
                 "edges": {"nodes": [[i, j] ...], "costs": [[e_ij, row-major ...] ...]}}}

The benchmark marks forbidden entries by 10**18, which is still a cost; here it becomes `inf`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardplan.ilp.solver.min_peak import minimize_peak
from shardplan.ilp.solver.problem import Edge, Problem, Solution, Usage
from shardplan.ilp.solver.settings import DEFAULT
from shardplan.ilp.solver.solve import solve

FORBIDDEN = 10**18

FAILED = 2  # exit code where there is no answer

PATIENCE, PATIENCE_S = 0.6, 10.0
"""Share of the time limit for an answer without forbidden entries, and seconds for it at least; then they are allowed."""


@dataclass(frozen=True)
class Instance:
    """A benchmark file: the problem, where forbidden entries are inf and equal tables are one array, and the exact costs.

    `exact` are the costs of nodes and edges as Python integers in object arrays, forbidden entries as 10**18.
    """

    name: str
    problem: Problem
    exact: tuple[list, list]

    def entries(self, states) -> list[int]:
        """The entries that the states take."""
        nodes, edges = self.exact
        entries = [c[s] for c, s in zip(nodes, states, strict=True)]
        return entries + [cost[states[i] * len(nodes[j]) + states[j]] for i, j, cost in edges]

    def cost(self, states) -> int:
        """The benchmark's objective, in integers of any size."""
        return sum(self.entries(states))

    def forbidden(self, states) -> int:
        """Number of forbidden entries that the states take."""
        return sum(entry >= FORBIDDEN for entry in self.entries(states))


def read(path) -> Instance:
    """An instance from `.json` or `.json.gz`."""
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        data = json.loads(file.read())["problem"]
    nodes, edges = data["nodes"], data["edges"]
    sizes = [len(c) for c in nodes["costs"]]

    pool: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def shared(values: list, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        key = (shape, tuple(values))
        if key not in pool:
            array = np.array(values, dtype=float).reshape(shape)
            array[array >= FORBIDDEN] = np.inf
            pool[key] = np.array(values, dtype=object), array
        return pool[key]

    costs = [shared(c, (k,)) for c, k in zip(nodes["costs"], sizes, strict=True)]
    pairs = [(i, j, *shared(c, (sizes[i], sizes[j]))) for (i, j), c in zip(edges["nodes"], edges["costs"], strict=True)]
    exact = [values for values, _ in costs]
    arrays = [array for _, array in costs]
    for i, j, _, array in pairs:  # a self-loop is a node cost
        if i == j:
            arrays[i] = arrays[i] + np.diag(array)
    problem = Problem(
        costs=tuple(arrays),
        edges=tuple(Edge(i, j, array) for i, j, _, array in pairs if i != j),
        usages=tuple(
            Usage(i, lo, hi, np.array(u, dtype=float))
            for i, ((lo, hi), u) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True))
            if hi > lo and any(u)
        ),
        limit=data.get("usage_limit"),
    )
    return Instance(data["name"], problem, (exact, [(i, j, values) for i, j, values, _ in pairs]))


def solve_instance(instance: Instance, seconds: float, progress=None) -> Solution:
    """Solves a benchmark file within `seconds`, `progress` as for `solve`; forbidden entries only where no answer avoids them."""
    start, problem = time.monotonic(), instance.problem
    patience = max(PATIENCE, PATIENCE_S / max(seconds, PATIENCE_S))
    solution = solve(problem, time_limit=seconds, progress=progress, patience=patience)
    if solution.states or (patience == 1.0 and solution.status != "infeasible"):
        return solution
    return solve(with_big_m(problem), time_limit=max(0.0, seconds - (time.monotonic() - start)), progress=progress)


def with_big_m(problem: Problem) -> Problem:
    """The problem with forbidden entries at a cost above every difference of objectives."""
    return problem.map_costs(lambda table: np.where(np.isinf(table), problem.big_m, table))


def compile_ahead() -> None:
    """Compiles the kernels of primal search, once per installation, outside any time limit."""
    with contextlib.suppress(ImportError, RuntimeError):  # no numba, or no writable cache directory
        from shardplan.ilp.solver.primal.iterated_search import compile_kernels

        compile_kernels()


def main(argv: list[str]) -> int:
    """`instance.json.gz [--seconds S] [--json]`: progress on standard error, the states as the last line of standard output."""
    parser = argparse.ArgumentParser(
        prog="shardplan solve",
        description="Solve a file of the IOPDDL benchmark.",
        epilog="examples:\n  shardplan solve example.json.gz --seconds 60\n  shardplan solve example.json.gz --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("instance", type=Path)
    help_text = "wall-clock limit, apart from reading and, once per installation, compiling (default 60)"
    parser.add_argument("--seconds", type=float, default=60.0, help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON: status, cost, lower bound of it, states")
    options = parser.parse_args(argv)
    instance = read(options.instance)
    if instance.problem.n_states > DEFAULT.large_states:
        compile_ahead()
    start = time.monotonic()

    def progress(states, bound, gap):
        seconds = time.monotonic() - start
        print(f"{seconds:8.1f} s   cost {instance.cost(states)}   bound {bound:.0f}   gap {gap:.2%}", file=sys.stderr)

    solution = solve_instance(instance, options.seconds, progress)
    if solution.status == "infeasible":
        least = minimize_peak(with_big_m(instance.problem)).bytes
        failure = f"no states fit the usage limit of {instance.problem.limit:.0f}\n  way out: a limit of {least:.0f}, which some fit"
    else:
        longer = max(60.0, 10 * options.seconds)
        failure = f"no states that fit were found in {options.seconds:g} s\n  way out: --seconds {longer:g}"
    if not solution.states:
        print(f"shardplan: {instance.name}: {failure}", file=sys.stderr)
        return FAILED
    cost, states = instance.cost(solution.states), list(solution.states)
    print(f"{instance.name}: {solution.status}, cost {cost}", file=sys.stderr)
    bound = float(solution.bound) if np.isfinite(solution.bound) else None
    found = {"instance": instance.name, "status": solution.status, "cost": cost, "bound": bound, "states": states}
    print(json.dumps(found) if options.json else states)
    return 0
