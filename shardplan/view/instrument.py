"""The data of the instrument: what the widget and the page show of a plan, as JSON values small enough for steps of 10,000 ops.

`instrument/*.js` draws it. Similar inputs, results, reshards and kernels of repeated layers are one row with a count; everything that
can be asked for has an `id`, and `Targets` says what `Plan.why` and `Plan.what_if` call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path, PurePath
from typing import Any

from shardplan.costs.pins import matches
from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import Layout
from shardplan.plan import Plan
from shardplan.plan.asked import reshard_layouts
from shardplan.plan.baselines import known_saving
from shardplan.plan.data import PlanDecision, PlannedReshard, itemsize
from shardplan.plan.schedule import StepSchedule
from shardplan.units import clean
from shardplan.view import rows
from shardplan.view.text import quality, time_parts
from shardplan.view.values import rounded

FOLDER = Path(__file__).parent / "instrument"
PARTS = ("dom", "draw", "timeline", "tables", "what_if", "app")
"""Files of the module, in their order: one scope, so that one file is loaded, and nothing else."""
MAX_RESULTS, MAX_BUFFERS, MAX_ROLES, MAX_INPUTS = 150, 60, 300, 1500
NS = 1e9
What = str | tuple[str, ...]


def module() -> str:
    """The ES module: `export default { render }` for anywidget; on a page it mounts itself."""
    return "\n".join((FOLDER / f"{name}.js").read_text("utf-8") for name in PARTS)


def style() -> str:
    """Its style, for a shadow root."""
    return (FOLDER / "instrument.css").read_text("utf-8")


@dataclass(frozen=True, eq=False)
class Instrument:
    """What is shown of one plan."""

    plan: Plan

    @cached_property
    def schedule(self) -> StepSchedule | None:
        """The schedule; None for a plan from a file."""
        planned = self.plan.context and self.plan.context.planned
        return StepSchedule(planned) if planned else None

    @cached_property
    def targets(self) -> dict[str, What]:
        """Id of a row -> what `Plan.why` calls it."""
        _ = self.arrays, self.collectives
        return self._targets

    @cached_property
    def _targets(self) -> dict[str, What]:
        return {}

    def data(self) -> dict[str, Any]:
        """All of it; `answers` are given apart."""
        return self._data

    @cached_property
    def _data(self) -> dict[str, Any]:
        plan, memory = self.plan, self.plan.memory_report
        figures = {**plan.seconds, "peak": memory.peak, "limit": memory.limit, "sent": plan.comm_bytes}
        return rounded(
            {
                "title": f"Plan for mesh {plan.mesh}" if plan.mesh.axes else "Plan for one device",
                "quality": quality(plan),
                "parts": time_parts(plan),
                "saves": known_saving(plan),  # planning baselines takes seconds
                "mesh": [list(x) for x in plan.mesh],
                "cluster": plan.cluster,
                "options": [f"{k}={str(v).lower()}" for k, v in plan.compiler_options.items()],
                "program": plan.fingerprint[:12],
                "figures": figures,
                "arrays": self.arrays,
                "collectives": self.collectives,
                "timeline": self._timeline() if self.schedule else None,
                "memory": self._memory(),
                "roles": self._roles() if self.schedule else [],
                "lines": {self._place(x.file, x.line): clean(x.code.strip()) for x in plan.lines if x.code},
            }
        )

    def _place(self, file: str, line: int) -> str:
        return f"{self._files.get(file) or clean(PurePath(file).name)}:{line}" if file else ""

    @cached_property
    def _files(self) -> Mapping[str, str]:
        return rows.file_names([*{x.file for x in self.plan.lines} | {x.file for x in self.plan.decisions}])

    # ---- arrays

    @cached_property
    def arrays(self) -> list[dict[str, Any]]:
        """Inputs, then results of ops, folded."""
        return [*map(self._input, self.inputs[:MAX_INPUTS]), *self._results()]

    @cached_property
    def inputs(self) -> list[rows.LeafRow]:
        """Inputs, folded."""
        return rows.leaf_rows(self.plan.inputs, self.plan.mesh)

    def _input(self, row: rows.LeafRow) -> dict[str, Any]:
        leaf = row.leaves[0]
        id_ = f"i{len(self._targets)}"
        self._targets[id_] = self._name(row)
        return {
            **self._array(id_, leaf.kind, row.type, leaf.shape, leaf.layout, len(row.leaves), row.device_bytes),
            "name": row.path,
        }

    def _name(self, row: rows.LeafRow) -> What:
        paths = tuple(x.path for x in row.leaves)
        if len(paths) == 1:
            return paths[0]
        patterns = tuple(_expanded(row.path))
        same = {x.path for x in self.plan.inputs if any(matches(x.path, pattern) for pattern in patterns)} == set(paths)
        return paths if not same else patterns[0] if len(patterns) == 1 else patterns

    def _results(self) -> list[dict[str, Any]]:
        if not self.schedule:
            return []
        planned = self.schedule.planned
        graph, user, addresses = planned.graph, planned.user_ops, planned.addresses
        groups: dict[tuple[str, Layout], list[PlanDecision]] = {}

        def made(i: int) -> Layout:  # as `Plan.why` names it: before it is moved
            return replace(planned.result_layout(i), partial=())

        for d in self.plan.decisions:
            if not traits_of(d.primitive).endpoint and d.result_layouts and d.file and d.result_layouts[0] is not None:
                groups.setdefault((addresses[user[d.op]], made(user[d.op])), []).append(d)
        found = []
        for (name, layout), some in groups.items():
            aval = graph.ops[user[some[0].op]].outs[0]
            each = prod(layout.local_shape(aval.shape, self.plan.mesh)) * itemsize(str(aval.dtype))
            found.append((each * len(some), name, layout, some, aval))
        found.sort(key=lambda x: (-x[0], x[1]))
        out: list[dict[str, Any]] = []
        for size, name, layout, some, aval in found[:MAX_RESULTS]:
            id_, d = f"r{len(self._targets)}", some[0]
            one_layout = len({made(i) for i in planned.addressed[name]}) == 1
            self._targets[id_] = name if one_layout else f"{name} as {layout}"
            text = rows.type_text(str(aval.dtype), aval.shape, layout)
            out.append(
                {
                    **self._array(id_, d.phase, text, aval.shape, layout, len(some), size),
                    "name": clean(d.primitive),
                    "line": self._place(d.file, d.line),
                }
            )
        return out

    def _array(self, id_: str, kind: str, type_: str, shape: Sequence[int], layout: Layout, n: int, size: float) -> dict[str, Any]:
        axes = {a: k for k, a in enumerate(self.plan.mesh.axes)}
        return {
            "id": id_,
            "kind": clean(kind),
            "type": type_,
            "spec": clean(str(layout)) if layout.sharded_axes or layout.partial else "replicated",
            "shape": list(shape),
            "dims": [[axes[a] for a in dim if a in axes] for dim in layout.dims],
            "n": n,
            "bytes": size,
        }

    # ---- collectives

    @cached_property
    def collectives(self) -> list[dict[str, Any]]:
        """Reshards, those of repeated layers together, the most expensive first."""
        groups: dict[tuple, list[tuple[PlanDecision, PlannedReshard]]] = {}
        for d in self.plan.decisions:
            for r in d.reshards:
                kinds = tuple((c.kind, c.axes) for c in r.collectives)
                name = self._reader(d)
                key = (d.file, d.line, d.primitive, d.phase, name, r.operand, r.array, r.before, r.after, kinds)
                groups.setdefault(key, []).append((d, r))
        order = sorted(groups.items(), key=lambda x: -sum(d.runs * r.seconds for d, r in x[1]))
        names = Counter(f"{key[4]} operand {key[5]}" for key in groups)
        for n, (key, some) in enumerate(order):
            name = f"{key[4]} operand {key[5]}"
            if key[4]:
                self._targets[f"c{n}"] = name if names[name] == 1 else f"{name} as {reshard_layouts(some[0][1])}"
        return [self._collective(f"c{n}", some) for n, (_, some) in enumerate(order)]

    def _reader(self, d: PlanDecision) -> str:
        planned = self.schedule and self.schedule.planned
        return planned.addresses[planned.user_ops[d.op]] if planned else ""

    def _collective(self, id_: str, some: Sequence[tuple[PlanDecision, PlannedReshard]]) -> dict[str, Any]:
        d, r = some[0]
        makers = dict.fromkeys(x.producer_source for _, x in some if x.producer_source)
        names = dict.fromkeys(self._moved_name(x) for _, x in some)
        for _, x in some:
            self._rows_of[id(x)] = id_
        return {
            "id": id_,
            "what": ", ".join(f"{c.kind} over {clean(', '.join(c.axes))}" for c in r.collectives),
            "name": self._folded(names),
            "from": rows.array_type(r.array, r.before),
            "to": rows.array_type(r.array, r.after),
            "phase": clean(d.phase),
            "line": self._place(d.file, d.line),
            "reader": clean(d.primitive),
            "maker": ", ".join(self._place(*_split(x)) for x in [*makers][:3]),
            "n": len(some),
            "runs": sum(x.runs for x, _ in some),
            "seconds": sum(x.runs * y.seconds for x, y in some),
            "sent": sum(x.runs * y.sent_bytes(self.plan.mesh) for x, y in some),
            "exposed": sum(self._exposed.get(id(y), 0.0) for _, y in some) if self.schedule else None,
        }

    @staticmethod
    def _folded(names: Sequence[str] | Mapping[str, None]) -> str:
        some = [x for x in names if x]
        return rows.fold([(x, n) for n, x in enumerate(some)], some)[0][0] if some else ""

    @cached_property
    def _rows_of(self) -> dict[int, str]:
        return {}

    @cached_property
    def _reshards(self) -> dict[tuple, PlannedReshard]:
        """(value, layouts of a step) -> the reshard that has this step."""
        if not self.schedule:
            return {}
        planned, out = self.schedule.planned, {}
        for d in self.plan.decisions:
            moves = [*planned.operand_reshards(i := planned.user_ops[d.op])]
            for r, (_, v, _, steps) in zip(d.reshards, moves, strict=False):
                for step in steps:
                    out.setdefault((v, step.before, step.after), r)
            for r in d.reshards[len(moves) :]:  # exchanges
                out.setdefault((planned.graph.ops[i].inputs[r.operand], r.before, r.after), r)
        return out

    @cached_property
    def _values(self) -> dict[int, int]:
        """Reshard -> the value that it moves."""
        return {id(r): v for (v, *_), r in self._reshards.items()}

    def _moved_name(self, r: PlannedReshard) -> str:
        v = self._values.get(id(r))
        if v is None or not self.schedule:
            return ""
        graph = self.schedule.planned.graph
        return clean(self.schedule.name(graph.maker(v)))

    @cached_property
    def _exposed(self) -> dict[int, float]:
        """Reshard -> its part of the exposed seconds of the collectives that it is combined into, by bytes."""
        out: dict[int, float] = {}
        for x in self.schedule.spans if self.schedule else ():
            for part, r in self._moves(x.transfers):
                out[id(r)] = out.get(id(r), 0.0) + part * x.exposed_s
        return out

    def _moves(self, transfers: Sequence[int]) -> Iterator[tuple[float, PlannedReshard]]:
        """(part of the bytes, reshard) of a combined collective."""
        assert self.schedule is not None
        some = [self.schedule.program.tasks.transfers[n] for n in transfers]
        total = sum(x.step.bytes for x in some) or 1.0
        for x in some:
            if found := self._reshards.get((x.value, x.step.before, x.step.after)):
                yield x.step.bytes / total, found

    # ---- over time

    def _timeline(self) -> dict[str, Any]:
        """Bands, and spans [lane, start ns, ns, name, line, phase, exposed ns, parts, row of `collectives` or -1]."""
        assert self.schedule is not None
        _ = self.collectives
        texts: dict[str, int] = {}
        number = {row["id"]: n for n, row in enumerate(self.collectives)}

        def text(x: str) -> int:
            return texts.setdefault(x, len(texts))

        spans = []
        for x in self.schedule.spans:
            row = next((self._rows_of.get(id(r)) for _, r in self._moves(x.transfers)), None)
            numbers = (x.lane == "network", NS * x.start_s, NS * x.seconds)
            place = self._place(*self.schedule.place(x.op))
            spans.append(
                [
                    *map(round, numbers),
                    text(clean(x.name)),
                    text(place),
                    text(x.phase),
                    round(NS * x.exposed_s),
                    x.parts,
                    number.get(row or "", -1),
                ]
            )
        bands = [[phase, round(NS * a), round(NS * b)] for phase, a, b in self.schedule.bands]
        return {"end": round(NS * self.schedule.end_s), "bands": bands, "texts": [*texts], "spans": spans}

    def _memory(self) -> dict[str, Any]:
        """Bytes by category over the step, and the buffers at the peak."""
        memory = self.plan.memory_report
        held = (x.kind for x in self.schedule.buffers) if self.schedule else ()  # some of them between two points of the profile
        kinds = tuple(dict.fromkeys((*rows.categories(memory), *held)))
        found = {
            "kinds": [clean(kind) for kind in kinds],
            "at_peak": [memory.at_peak.get(kind, 0.0) for kind in kinds],
            "where": rows.peak_place(memory).removeprefix(", "),
            "times": None,
            "values": [[round(point.get(kind, 0.0)) for point in memory.profile] for kind in kinds],
            "buffers": [],
        }
        if self.schedule and self.schedule.buffers:
            found["times"], found["values"], found["peak"] = self._profile(kinds)
            found["buffers"] = self._buffers()
        return found

    def _profile(self, kinds: Sequence[str]) -> tuple[list[int], list[list[int]], int]:
        """Times in ns, [kind][time] bytes, and the number of the peak's time."""
        assert self.schedule is not None
        buffers, points = self.schedule.buffers, len(self.plan.memory_report.profile)
        horizon = max(x.last for x in buffers)
        at = sorted({*(round(n * (horizon - 1) / max(1, points - 1)) for n in range(points)), self.schedule.peak_at})
        change = {kind: [0.0] * (horizon + 1) for kind in kinds}
        for x in buffers:
            change[x.kind][x.first] += x.bytes
            change[x.kind][x.last] -= x.bytes
        values = []
        for kind in kinds:
            live, now = [], 0.0
            for step in change[kind]:
                now += step
                live.append(now)
            values.append([round(live[t]) for t in at])
        times = self.schedule.times
        return [round(NS * float(times[min(t, len(times) - 1)])) for t in at], values, at.index(self.schedule.peak_at)

    def _buffers(self) -> list[dict[str, Any]]:
        """Buffers at the peak, those of one name and category together, the largest first."""
        assert self.schedule is not None
        groups: dict[tuple, list] = {}
        for x in self.schedule.at_peak():
            groups.setdefault((x.kind, *self.schedule.place(x.op), self._stem(self.schedule.name(x.op))), []).append(x)
        found = sorted(groups.items(), key=lambda item: -sum(x.bytes for x in item[1]))
        out = [
            {
                "name": self._folded(dict.fromkeys(clean(self.schedule.name(x.op)) for x in some)),
                "kind": kind,
                "line": self._place(file, line),
                "n": len(some),
                "bytes": sum(x.bytes for x in some),
                "start": round(NS * min(x.start_s for x in some)),
                "end": round(NS * max(x.end_s for x in some)),
            }
            for (kind, file, line, _), some in found[:MAX_BUFFERS]
        ]
        if rest := found[MAX_BUFFERS:]:
            size = sum(x.bytes for _, some in rest for x in some)
            out.append({"name": f"{sum(len(some) for _, some in rest)} smaller ones", "kind": "", "line": "", "n": 1, "bytes": size})
        return out

    @staticmethod
    def _stem(name: str) -> str:
        return "/".join("".join(c for c in part if not c.isdigit()) for part in name.split("/"))

    def _roles(self) -> list[dict[str, Any]]:
        """Ops that take time by line, pass and primitive: what repeated layers do is one row."""
        assert self.schedule is not None
        graph, seconds = self.schedule.planned.graph, self.schedule.seconds_of_ops()
        groups: dict[tuple, list[int]] = {}
        for i in self.schedule.planned.user_ops:
            if seconds[i]:
                groups.setdefault((*self.schedule.place(i), graph.ops[i].phase, graph.ops[i].primitive), []).append(i)
        found = [
            {
                "line": self._place(file, line),
                "function": clean(graph.ops[ops[0]].source.function.rpartition("<locals>.")[2]),
                "phase": phase,
                "primitive": clean(primitive),
                "n": len(ops),
                "seconds": float(sum(seconds[ops])),
                "strategy": self._strategy(ops[0]),
            }
            for (file, line, phase, primitive), ops in groups.items()
        ]
        costly = sorted(range(len(found)), key=lambda n: -found[n]["seconds"])[:MAX_ROLES]
        return [found[n] for n in sorted(costly)]

    def _strategy(self, i: int) -> str:
        assert self.schedule is not None
        planned = self.schedule.planned
        sharded = planned.space.strategies[i].sharded(planned.strategies[i], planned.space.mesh)
        return ", ".join(f"{clean(a)}: {x}" for a, x in sharded.items())


def _expanded(pattern: str) -> Iterator[str]:
    """The patterns that one with choices, "{a,b}", stands for."""
    start, _, rest = pattern.partition("{")
    words, closed, end = rest.partition("}")
    if not closed:
        yield pattern
        return
    for word in words.split(","):
        yield from _expanded(start + word + end)


def _split(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line)
