"""A program in a plan file: the user's lines with the ops they make, by which two versions of a step are compared and matched.

A place is where a line stands whatever is written above it: file, function, code, and which of the function's equal lines it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath

from shardplan.files import portable, source_line
from shardplan.ir.graph import Graph, Op
from shardplan.ir.parse import Traced
from shardplan.plan.data import Leaf, PlanDecision, PlanRecord, SourceLine
from shardplan.units import fit, format_array

At = tuple[str, int]
"""File, by its portable name, and line."""
Place = tuple[str, str, str, int]
MAX_LISTED = 5


def source_lines(graph: Graph, seconds: Mapping[At, float]) -> tuple[SourceLine, ...]:
    """The lines that ops come from, in the order in which they first run; `seconds` of a line are those of one step."""
    ops: dict[At, Counter[str]] = {}
    functions: dict[At, str] = {}
    for op in graph.ops:
        at = op.source.file, op.source.line
        if not op.traits.copy and (not op.traits.border or at in seconds):
            functions.setdefault(at, op.source.function)
            ops.setdefault(at, Counter()).update([op.primitive] if not op.traits.border else ())
    return tuple(
        SourceLine(portable(at[0]), at[1], source_line(*at), seconds.get(at, 0.0), functions[at], dict(sorted(found.items())))
        for at, found in ops.items()
    )


def result_type(op: Op) -> str:
    """Type of an op's first result, "float32[8,4]"; "" if it has none."""
    return format_array(op.outs[0]) if op.outs and hasattr(op.outs[0], "shape") else ""


def places(lines: Iterable[SourceLine]) -> dict[At, Place]:
    """Where each line stands; a line without readable code stands at its number."""
    seen: Counter[tuple[str, str, str]] = Counter()
    found: dict[At, Place] = {}
    for x in sorted(lines, key=lambda x: (x.file, x.line)):
        name = x.file, x.function, x.code.strip() or str(x.line)
        found[x.file, x.line] = (*name, seen[name])
        seen[name] += 1
    return found


def placed(decisions: Iterable[PlanDecision], lines: Iterable[SourceLine]) -> Iterator[tuple[tuple, PlanDecision]]:
    """((place, primitive, phase, occurrence), decision): the key is the same op's in another version of the program."""
    known = places(lines)
    for d in decisions:
        place = known.get((d.file, d.line), (d.file, d.function, str(d.line), 0))
        yield (place, d.primitive, d.phase, d.occurrence), d


def numbered(graph: Graph, lines: Iterable[SourceLine]) -> dict[tuple, int]:
    """The number of every op by the key that `placed` gives a decision."""
    known, seen = places(lines), Counter()
    found = {}
    for n, op in enumerate(op for op in graph.ops if not op.traits.copy):
        file, line = portable(op.source.file), op.source.line
        name = known.get((file, line), (file, op.source.function, str(line), 0)), op.primitive, op.phase
        found[(*name, seen[name])] = n
        seen[name] += 1
    return found


# ---- what differs


def differences(plan: PlanRecord, traced: Traced, jax_version: str) -> list[str]:
    """In words, how a step is not the one that a plan was made for: versions of JAX, inputs, source lines; the first few of each."""
    now = {label: format_array(v.aval) for label, v in zip(traced.in_labels, traced.jaxpr.jaxpr.invars, strict=True)}
    return _differences(plan, jax_version, now, source_lines(traced.graph, {}))


def differences_of_plans(a: PlanRecord, b: PlanRecord) -> list[str]:
    """The same of the programs of two plans."""
    return _differences(a, b.jax, _types(b.inputs), b.lines)


def _differences(plan: PlanRecord, jax_version: str, inputs: Mapping[str, str], lines: Sequence[SourceLine]) -> list[str]:
    known = all(any(x.ops for x in some) for some in (plan.lines, lines))
    other_jax = plan.jax and jax_version and plan.jax != jax_version
    found = [
        *([f"it was traced by jax {plan.jax}, now by jax {jax_version}"] if other_jax else []),
        *_listed(_input_differences(_types(plan.inputs), inputs), "inputs"),
        *_listed(_line_differences(plan.lines, lines) if known else [], "lines"),
    ]
    return found or ["the same ops have other shapes, parameters or operands"]


def _types(leaves: Iterable[Leaf]) -> dict[str, str]:
    return {x.path: format_array(x) for x in leaves}


def _listed(texts: Sequence[str], what: str) -> list[str]:
    left = len(texts) - MAX_LISTED
    return [*texts[:MAX_LISTED], *([f"... and {left} more {what}"] if left > 0 else [])]


def _input_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changed = [f"input {path} is {now[path]}, was {text}" for path, text in then.items() if path in now and now[path] != text]
    new = [f"input {path} {text} is new" for path, text in now.items() if path not in then]
    return [*changed, *new, *(f"input {path} {text} is no longer there" for path, text in then.items() if path not in now)]


def _line_differences(then: Sequence[SourceLine], now: Sequence[SourceLine]) -> list[str]:
    before, after = ({where[x.file, x.line]: x for x in lines} for lines in (then, now) for where in [places(lines)])
    texts = []
    for place, x in after.items():
        old = before.get(place)
        if old is None:
            texts.append(f"{_at(x)} is new: {fit(x.code.strip(), 80)}")
        elif old.ops != x.ops:
            counts = ((name, old.ops.get(name, 0), x.ops.get(name, 0)) for name in sorted({*old.ops, *x.ops}))
            texts.append(f"{_at(x)} makes {', '.join(f'{b} {name}, not {a}' for name, a, b in counts if a != b)}")
    gone = (f"a line is gone, {_at(x)} then: {fit(x.code.strip(), 80)}" for place, x in before.items() if place not in after)
    return [*texts, *gone]


def line_name(x: SourceLine) -> str:
    """A line for people: "model.py:4 in step: hidden = x @ w"."""
    return f"{_at(x)}: {fit(x.code.strip(), 80)}"


def _at(x: SourceLine) -> str:
    return f"{PurePath(x.file).name}:{x.line}{f' in {x.function}' if x.function else ''}" if x.file else "code without a line"
