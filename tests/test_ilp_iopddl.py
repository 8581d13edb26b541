"""The benchmark's files: read as written, counted exactly, forbidden entries taken only when there is no other way."""

import gzip
import json

import numpy as np

from shardplan.ilp.solver import iopddl

FORBIDDEN = 10**18


def write(path, costs, usages, intervals, edges, limit):
    problem = {
        "name": "small",
        "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
        "edges": {"nodes": [[i, j] for i, j, _ in edges], "costs": [table for _, _, table in edges]},
        "usage_limit": limit,
    }
    with gzip.open(path, "wt") as file:
        json.dump({"problem": problem}, file)
    return path


def small(tmp_path, table, limit=10):
    return write(
        tmp_path / "small.json.gz",
        costs=[[1, 5], [2, 3]],
        usages=[[8, 1], [4, 4]],
        intervals=[[0, 3], [2, 5]],
        edges=[(0, 1, table), (1, 0, [0, 0, 0, 1])],
        limit=limit,
    )


def test_solves_a_file_and_counts_exactly(tmp_path):
    instance = iopddl.read(small(tmp_path, [0, 0, 0, 0], limit=12))
    assert instance.problem.memory((0, 0)).tolist() == [8, 8, 12, 4, 4]
    solution = iopddl.solve_instance(instance, 5.0)
    assert solution.status == "optimal" and solution.states == (0, 0) and instance.cost(solution.states) == 3


def test_limit_decides(tmp_path):
    instance = iopddl.read(small(tmp_path, [0, 0, 0, 0], limit=11))
    solution = iopddl.solve_instance(instance, 5.0)
    assert solution.states == (1, 0) and instance.cost(solution.states) == 7


def test_forbidden_entries_are_avoided_where_possible(tmp_path):
    instance = iopddl.read(small(tmp_path, [FORBIDDEN, FORBIDDEN, FORBIDDEN, 7], limit=12))
    solution = iopddl.solve_instance(instance, 5.0)
    assert solution.states == (1, 1) and instance.forbidden(solution.states) == 0
    assert instance.cost(solution.states) == 5 + 3 + 7 + 1


def test_forbidden_entries_are_taken_when_nothing_else_is_left(tmp_path):
    instance = iopddl.read(small(tmp_path, [FORBIDDEN] * 4, limit=12))
    solution = iopddl.solve_instance(instance, 5.0)
    assert solution.states == (0, 0) and instance.forbidden(solution.states) == 1
    assert instance.cost(solution.states) == FORBIDDEN + 3


def test_the_last_line_of_output_is_the_answer(tmp_path, capsys):
    assert iopddl.main([str(small(tmp_path, [0, 0, 0, 0], limit=11)), "--seconds", "5"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == [1, 0]
    assert "cost 7" in err


def test_json_has_the_cost_and_its_bound(tmp_path, capsys):
    assert iopddl.main([str(path := small(tmp_path, [0, 0, 0, 0], limit=11)), "--seconds", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found.pop("bound") - 7) < 1e-6
    assert found == {"instance": iopddl.read(path).name, "status": "optimal", "cost": 7, "states": [1, 0]}


def test_a_file_for_which_nothing_fits_is_an_error_with_numbers(tmp_path, capsys):
    assert iopddl.main([str(small(tmp_path, [0, 0, 0, 0], limit=4)), "--seconds", "5"]) == 2
    out, err = capsys.readouterr()
    assert not out and "small: no states fit the usage limit of 4" in err and "a limit of 5, which some fit" in err


def test_too_little_time_is_an_error_with_a_way_out(tmp_path, capsys):
    layers = range(1000)
    path = write(
        tmp_path / "long.json.gz",
        costs=[[1, 2, 3, 4]] * len(layers),
        usages=[[4, 3, 2, 1]] * len(layers),
        intervals=[[i, i + 3] for i in layers],
        edges=[(i, j, [int(i + x != j) for x in range(16)]) for i in layers for j in (i + 1, i + 5, i + 7) if j in layers],
        limit=9,
    )
    assert iopddl.main([str(path), "--seconds", "0.01"]) == 2
    out, err = capsys.readouterr()
    assert not out and "no states that fit were found in 0.01 s\n  way out: --seconds 60" in err
    assert iopddl.main([str(path), "--seconds", "8"]) == 0


def test_a_loop_is_a_node_cost(tmp_path):
    path = write(tmp_path / "loop.json.gz", [[0, 0]], [[0, 0]], [[0, 1]], [(0, 0, [9, 0, 0, 4])], 10)
    instance = iopddl.read(path)
    assert np.array_equal(instance.problem.costs[0], [9, 4]) and not instance.problem.edges
    assert iopddl.solve_instance(instance, 5.0).states == (1,) and instance.cost((1,)) == 4
