"""A history of what-ifs, each a plan with a name and the code that gives it: what the widget does when it is asked, without a widget.

0 as planned
1 up by rows        0.what_if("params/blocks/*/up", P("model", None))
2 anew              0.replan({"params/blocks/*/up": P("model", None)})
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from shardplan.errors import ShardingError
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout
from shardplan.plan import Plan
from shardplan.plan.asked import asked
from shardplan.units import format_memory
from shardplan.view.answers import Answers, argument
from shardplan.view.instrument import Instrument, What

SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Limits of the curve, of the peak of the first plan."""
MAX_MESHES = 60
SLIDER = 0.4, 1.3
"""Ends of the memory slider, of the largest peak of the plans for the same mesh and cluster."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One plan of the history.

    Attributes:
        parent: the entry that it was made from; None for the first.
        calls: methods that give it from the first plan, as code.
        pins: input pins chosen so far, of `calls`: path or pattern -> layout.
        unpinned: choices of results and collectives, which pins cannot say: plans anew are without them.
    """

    plan: Plan
    name: str
    parent: int | None = None
    calls: tuple[str, ...] = ()
    pins: Mapping[str, Layout] = field(default_factory=dict)
    unpinned: tuple[str, ...] = ()
    instrument: Instrument = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "instrument", Instrument(self.plan))

    @property
    def solved(self) -> bool:
        """Whether its plan was solved here, so that other layouts have prices."""
        return self.plan.context is not None and self.plan.context.planned is not None

    def solved_again(self, number: int) -> Entry:
        """The same plan, solved here; another one if the step is planned otherwise now, as a new entry."""
        plan = self.plan.replan()
        if plan == self.plan:
            return replace(self, plan=plan)
        return Entry(plan, "planned again", number, (*self.calls, "replan()"), self.pins, self.unpinned)

    @cached_property
    def answers(self) -> Answers:
        """Of `Plan.why`, by id of the instrument's rows."""
        return Answers(self.plan, self.instrument)

    @property
    def code(self) -> str:
        """Python that gives this plan, from the first plan `plan`."""
        lines = [f"changed = {'changed' if n else 'plan'}.{call}" for n, call in enumerate(self.calls)]
        return "\n".join(["from jax.sharding import PartitionSpec as P", "", *(lines or ["changed = plan"])]) + "\n"

    @property
    def _specs(self) -> dict[str, PartitionSpec]:
        return {path: PartitionSpec(*layout.spec()) for path, layout in self.pins.items()}

    @property
    def _pins_text(self) -> str:
        return f"{{{', '.join(f'{path!r}: {layout}' for path, layout in self.pins.items())}}}"

    @property
    def pins_code(self) -> str:
        """The pins chosen so far as `auto(pins=...)` takes them; of a plan without any, the layouts of all its inputs."""
        pins = self.pins or {row.path: row.leaves[0].layout for row in self.instrument.inputs}
        left = "".join(f"# pins cannot say {choice}; the copied code does\n" for choice in self.unpinned)
        return left + "pins = {\n" + "".join(f"    {path!r}: {layout},\n" for path, layout in pins.items()) + "}\n"

    @property
    def loss(self) -> str:
        """What a plan made anew from this one is without; "" if nothing is lost."""
        return f"planned without {' and '.join(self.unpinned)}: no pin says it" if self.unpinned else ""

    def taken(self, number: int, id_: str, choice: str) -> Entry:
        """The plan with a choice of a row."""
        what = self.instrument.targets[id_]
        found = asked(self.plan, argument(what))
        layout = found.wanted[choice][0] if choice in found.wanted else None
        is_input = found.kind == "inputs" and layout is not None
        given = str(layout) if is_input else repr(choice)
        plan = self.plan.what_if(argument(what), layout.spec() if is_input and layout else choice)
        pins = {**self.pins, **({path: layout for path in _patterns(what)} if is_input and layout else {})}
        row = next(x for x in (*self.instrument.arrays, *self.instrument.collectives) if x["id"] == id_)
        call, name = f"what_if({_code(what)}, {given})", f"{row['name'].removeprefix('state/')}: {choice}"
        return Entry(plan, name, number, (*self.calls, call), pins, self.unpinned if is_input else (*self.unpinned, name))

    def anew(self, number: int) -> Entry:
        """The whole step planned again with the pins of this entry."""
        plan = self.plan.replan(self._specs)
        return Entry(plan, f"anew: {', '.join(self.pins)}", number, (*self.calls, f"replan({self._pins_text})"), self.pins)

    def retargeted(self, number: int, **target: Any) -> Entry:
        """The step planned again for other memory, mesh or cluster, with the pins of this entry."""
        plan = self.plan.replan(self._specs, **target)
        name = ", ".join(
            format_memory(x) if k == "memory" else _mesh_text(x) if k == "mesh" else str(x) for k, x in target.items() if x is not None
        )
        given = ", ".join([*([self._pins_text] if self.pins else []), *_arguments(target)])
        return Entry(plan, name or plan.cluster, number, (*self.calls, f"replan({given})"), self.pins)

    def row(self) -> dict[str, Any]:
        """What the history shows of it."""
        plan = self.plan
        return {
            "name": self.name,
            "parent": self.parent,
            "seconds": plan.seconds["total"],
            "peak": plan.memory_report.peak,
            "sent": plan.comm_bytes,
            "mesh": f"{plan.mesh} · {plan.cluster}",
            "pins": len(self.pins),
        }

    def point(self) -> dict[str, float]:
        """Its point of the curve."""
        return {"seconds": self.plan.seconds["total"], "peak": self.plan.memory_report.peak}

    def renamed(self, name: str) -> Entry:
        """The same under another name."""
        found = replace(self, name=name)
        object.__setattr__(found, "instrument", self.instrument)  # is drawn already
        object.__setattr__(found, "answers", self.answers)
        return found

    @property
    def target(self) -> tuple[Any, ...]:
        """What it was planned for, memory apart: plans of one target stand on one curve."""
        pins = sorted((path, str(layout)) for path, layout in self.pins.items())
        return self.plan.mesh, self.plan.cluster, tuple(pins), self.unpinned


class Curve:
    """Plans of one entry under ever less memory, the entry itself the first; `entries` grows as they are found."""

    def __init__(self, number: int, entry: Entry):
        self._number, self._first = number, entry
        self.entries, self.more = [entry], True

    def continued(self) -> Iterator[Entry]:
        """The next points, until no plan fits; `more` says whether there may be others."""
        for share in SHARES[len(self.entries) - 1 :]:
            limit = float(f"{share * self._first.plan.memory_report.peak:.4g}")
            try:
                self.entries.append(self._first.retargeted(self._number, memory=limit))
            except ShardingError:
                break  # less does not fit either
            yield self.entries[-1]
        self.more = False


def _arguments(target: Mapping[str, Any]) -> Iterator[str]:
    for name, value in target.items():
        if value is not None:
            yield f"{name}={value!r}"


def _mesh_text(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={n}" for name, n in axes.items())


def _patterns(what: What) -> tuple[str, ...]:
    return (what,) if isinstance(what, str) else what


def _code(what: What) -> str:
    return repr(argument(what))


def pickers(entries: Sequence[Entry], shown: Entry) -> dict[str, Any]:
    """What can be chosen: meshes of as many devices, clusters, and the ends of the memory slider."""
    first, plan = entries[0].plan, shown.plan
    peak = max(x.plan.memory_report.peak for x in (*entries, shown) if (x.plan.mesh, x.plan.cluster) == (plan.mesh, plan.cluster))
    others = map(dict, meshes(first.mesh.n_devices, first.mesh.axes))
    return {
        "meshes": [*dict.fromkeys(_mesh_text(dict(x)) for x in (plan.mesh, first.mesh, *others))],
        "clusters": [*dict.fromkeys((first.cluster, *Cluster.presets()))],
        "least": SLIDER[0] * peak,
        "most": SLIDER[1] * peak,
    }


def meshes(devices: int, axes: Sequence[str]) -> list[tuple[tuple[str, int], ...]]:
    """Meshes of a number of devices on some of these axes, in their order; no axis has size one unless it is the only one.

    Where there is one axis only, a second one joins it.
    """
    found = []
    if len(axes) == 1:
        axes = (*axes, "model" if "model" not in axes else "data")
    for k in range(1, len(axes) + 1):
        for names in itertools.combinations(axes, k):
            found += [tuple(zip(names, sizes, strict=True)) for sizes in _factorizations(devices, k)]
    return found[:MAX_MESHES]


def _factorizations(n: int, k: int) -> Iterator[tuple[int, ...]]:
    divisors = [d for d in range(2, n + 1) if n % d == 0] or [1]
    yield from (sizes for sizes in itertools.product(divisors, repeat=k) if prod(sizes) == n)
