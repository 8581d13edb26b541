"""Which readers of a value share one copy of it.

A value with several readers is read through *copies*: one `share` op for the readers of one phase (forward, backward, update)
of one loop. The planner gives each copy a layout of its own; the way to it is paid once, however many readers it has. Readers
in different phases have different copies, so that a parameter gathered for the forward pass may be let go and gathered again.
"""

from __future__ import annotations

from dataclasses import replace

from shardplan.ir.graph import Graph, Op, Value

PASSIVE = frozenset({"out", "loop_const", "loop_slice", "barrier", "branch_in"})
"""Readers that fetch for themselves: each already is a copy."""


def with_shares(graph: Graph) -> Graph:
    """The same graph with a `share` op before every group of at least two readers; numbers of ops and values change."""
    groups: dict[int, list[tuple[tuple, list[tuple[int, int]]]]] = {}
    before: dict[int, list[tuple[int, int]]] = {}
    for v, value in enumerate(graph.values):
        found: dict[tuple, list[tuple[int, int]]] = {}
        for at, k in value.consumers:
            op = graph.ops[at]
            if op.primitive not in PASSIVE:
                found.setdefault((op.phase, op.loop), []).append((at, k))
        many = [(key, readers) for key, readers in found.items() if len({at for at, _ in readers}) > 1]
        if many:
            groups[v] = many
            for g, (_, readers) in enumerate(many):
                before.setdefault(min(at for at, _ in readers), []).append((v, g))

    ops: list[Op] = []
    moved: list[int] = []  # old op number -> new
    values: list[Value] = []
    renamed: dict[int, int] = {}  # old value -> new
    through: dict[tuple[int, int], int] = {}  # (reader, operand) -> new value of its copy
    for at, op in enumerate(graph.ops):
        for v, g in before.get(at, ()):
            value, (_, readers) = graph.values[v], groups[v][g]
            copy = Op(
                "share", (renamed[v],), (len(values),), (aval := graph.ops[value.producer[0]].outs[value.producer[1]],), (aval,),
                {}, (*graph.ops[value.producer[0]].path, "share", value.producer[1], g), source=op.source, phase=op.phase,
                runs=op.runs, reads=op.runs, loop=op.loop,
            )  # fmt: skip
            values.append(replace(value, producer=(len(ops), 0), consumers=()))
            through.update({reader: len(values) - 1 for reader in readers})
            ops.append(copy)
        moved.append(len(ops))
        inputs = tuple(None if v is None else through.get((at, k), renamed.get(v)) for k, v in enumerate(op.inputs))
        outputs = tuple(range(len(values), len(values) + len(op.outputs)))
        renamed.update(zip(op.outputs, outputs, strict=True))
        values += [replace(graph.values[v], producer=(len(ops), k), consumers=()) for k, v in enumerate(op.outputs)]
        ops.append(replace(op, inputs=inputs, outputs=outputs))
    consumers: list[list[tuple[int, int]]] = [[] for _ in values]
    for at, op in enumerate(ops):
        for k, v in enumerate(op.inputs):
            if v is not None:
                consumers[v].append((at, k))
    moved.append(len(ops))
    return Graph(
        tuple(ops),
        tuple(replace(v, consumers=tuple(c)) for v, c in zip(values, consumers, strict=True)),
        tuple(replace(loop, start=moved[loop.start], stop=moved[loop.stop]) for loop in graph.loops),
        tuple((moved[a], moved[b]) for a, b in graph.tied),
        tuple(moved[a] for a in graph.args),
        tuple(moved[o] for o in graph.outs),
        frozenset(moved[d] for d in graph.donated),
    )
