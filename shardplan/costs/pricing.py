"""What a cost network assumes of the whole plan: the price of hidden communication, what is combined, and how much can be hidden.

From what is combined follow the latency that each array pays and, by rules that hold for any plan, how long its collective may be in
flight while kernels run (`xla_model/overlap_windows.py`). Windows that are read off the schedule of a judged plan
(`costs/schedule_windows.py`) take the place of these in prices, and the order of its ops (`costs/decided_memory.py`) in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from shardplan.costs.gradient_products import made_at_once
from shardplan.costs.space import StrategySpace
from shardplan.mesh import collective
from shardplan.mesh.collective import UNCOMBINED, CollectiveKey, CombinedCollectives
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.combining import COMBINABLE, COMBINE_THRESHOLD_BYTES, SUMS
from shardplan.xla_model.compiler_options import DEFAULT
from shardplan.xla_model.live_in_any_order import LiveInAnyOrder
from shardplan.xla_model.liveness import Interval, RunOrder, live_intervals, order_by_rules
from shardplan.xla_model.overlap_windows import OverlapWindows, Transfer, overlap_windows

CombinedGroups = tuple[tuple[tuple[int, CollectiveKey], tuple[tuple[int, float], ...]], ...]
"""Arrays that one collective moves: ((site group, kind and axes), ((op that makes it, bytes of the result per device), ...)), ..."""


@dataclass(frozen=True, eq=False)
class ScheduleWindows:
    """Overlap windows of one schedule: (op, operand) -> seconds of one run that compute can hide of a collective there."""

    seconds: Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Pricing:
    """What a cost network assumes of the whole plan; the pricing loop (`search/slope_scaling.py`) finds it out.

    Attributes:
        background_price: fraction of a background collective's seconds that its edge costs.
        combined: what is combined; None: all arrays of a site group are, however each is moved.
        windows: how long a collective can be in flight in the schedule of a judged plan; None: as the rules say of any plan.
        order: the order of that schedule, for memory; None: by the rules.
    """

    background_price: float = 1.0
    combined: CombinedGroups | None = None
    windows: ScheduleWindows | None = None
    order: RunOrder | None = None


@dataclass(frozen=True, eq=False)
class CombinedPrices:
    """What follows for every array from what a plan combines; each part is found when it is first asked for.

    Attributes:
        space: the step and its strategies.
        resharder: prices redistribution of one array that nothing is combined with.
        combined: as of `Pricing`.
        given: windows by the rules for another plan, to take instead of those that follow.
        schedule: the order in which the ops of a plan run; None: by the rules.
        at_least: what is in memory in any order, for a bound; None: as the order says.
    """

    space: StrategySpace
    resharder: Resharder
    combined: CombinedGroups | None
    given: OverlapWindows | None = None
    schedule: RunOrder | None = None
    at_least: LiveInAnyOrder | None = None

    @cached_property
    def resharders(self) -> tuple[Resharder, ...]:
        """Per value, what prices its reshards."""
        return resharders(self.space, self.resharder, self.combined)

    @cached_property
    def windows(self) -> OverlapWindows:
        """Overlap windows by the rules: for the order of ops, and for prices, where `Pricing` has none."""
        return plan_windows(self.space, self.combined) if self.given is None else self.given

    def in_order(self, order: RunOrder) -> CombinedPrices:
        """The same prices, with what is in memory when ops run in this order."""
        other = replace(self, schedule=order)
        other.__dict__.update({name: found for name, found in vars(self).items() if name in ("resharders", "windows")})
        return other

    @cached_property
    def order(self) -> RunOrder:
        """In which ops run."""
        return order_by_rules(self.space.graph, self.windows) if self.schedule is None else self.schedule

    @cached_property
    def live(self) -> list[Interval | None]:
        """Per value, when it is in memory."""
        return live(self.space, self.order) if self.at_least is None else self.at_least.values


def live(space: StrategySpace, order: RunOrder) -> list[Interval | None]:
    """Per value, when it is in memory."""
    kernels = space.facts.kernels

    def in_place(at: int, v: int) -> bool:
        return space.rules[at].fusion in ("loop", "view") and kernels.overwrites(at, v)

    return live_intervals(space.graph, space.materialised, in_place, order, space.facts.summed_scatters.values(), kernels.products)


def resharders(space: StrategySpace, resharder: Resharder, combined: CombinedGroups | None) -> tuple[Resharder, ...]:
    """Per value, what prices its reshards; one object for values of one price."""
    known: dict[int, tuple[tuple[CollectiveKey, CombinedCollectives], ...]] = {}
    for (group, key), arrays in combined or ():
        above = sum(n for _, n in arrays) > COMBINE_THRESHOLD_BYTES
        if len(arrays) > 1:
            together = CombinedCollectives(len(arrays), COMBINE_THRESHOLD_BYTES if above else inf)
            known[group] = (*known.get(group, ()), (key, together))
    found: dict[int, Resharder] = {}
    for moved in {id(moved): moved for moved in space.facts.moved}.values():
        factors, site, read_once = moved
        others = CombinedCollectives(site.group_size, COMBINE_THRESHOLD_BYTES) if combined is None else UNCOMBINED
        # A gradient that is both reduce-scattered and gathered would be all-reduced: only its reductions count as combined.
        kinds = SUMS if site.collective_class == "gradient" else COMBINABLE
        found[id(moved)] = resharder.sending(factors).combining(others, kinds, known.get(site.group, ()), read_once)
    return tuple(found[id(moved)] for moved in space.facts.moved)


def plan_windows(space: StrategySpace, combined: CombinedGroups | None) -> OverlapWindows:
    """Overlap windows of the collectives of a plan that combines these arrays; None: all arrays of a group move in the same way.

    Nothing is deferred where XLA hides no latency unasked, or has none to hide (fact: schedule-nothing-to-hide).
    """
    mesh, sites = space.mesh, space.collective_sites
    blocking_groups = {site.group for site in sites if site.collective_class == "blocking"}
    overlapping: dict[int, list[tuple[CollectiveKey, float]]] = {}  # op that makes an array -> its collectives, bytes of their results
    blocking: dict[int, list[tuple[CollectiveKey, float]]] = {}
    for (group, key), arrays in combined or ():
        moved = blocking if group in blocking_groups else overlapping
        for at, size in arrays:
            moved.setdefault(at, []).append((key, size))

    def seconds(collectives: tuple[tuple[CollectiveKey, float], ...] | str, size: float) -> float:
        """Of an array's collectives, or of one of this kind over all axes."""
        total = 0.0
        for (kind, axes), part in (((collectives, mesh.axes), 1.0),) if isinstance(collectives, str) else collectives:
            larger = size * part * (mesh.size(*axes) if kind == "reduce-scatter" else 1)
            total += collective.seconds(kind, larger, axes, mesh, space.cluster)
        return total

    def transfer(results: list[tuple[CollectiveKey, float]]) -> Transfer:
        """Collectives of one array, each with its result's share of the largest result, and the bytes of that per device."""
        largest = max(size for _, size in results)
        return tuple((key, size / (largest or 1.0)) for key, size in results), largest

    work = _min_seconds(space, {at: min(size for _, size in results) for at, results in overlapping.items()})
    scattered = {at for at, results in overlapping.items() if any(kind == "reduce-scatter" for (kind, _), _ in results)}
    transfers, blocks = ({at: transfer(results) for at, results in of.items()} for of in (overlapping, blocking))
    shards = 1 if combined is None else mesh.n_devices
    at_once = made_at_once(space, None if combined is None else overlapping)
    found = overlap_windows(space.graph, sites, work, transfers, seconds, shards, scattered, blocks, at_once)
    hides = mesh.n_devices > 1 and DEFAULT.hides_on(space.cluster.device.name)
    return found if hides else replace(found, deferred_until={})


def _min_seconds(space: StrategySpace, arrived: Mapping[int, float]) -> list[float]:
    """Seconds of every op in one run under its fastest strategy; the optimizer's shards are no smaller than those of the gradients.

    `arrived`: op that makes an array that is moved -> bytes of the smallest result per device.
    """
    graph = space.graph
    part = [0.0] * len(graph.ops)  # least part of the op's work that a device does
    for i, op in enumerate(graph.ops):
        makers = [graph.values[v].producer[0] for v in op.inputs if v is not None]
        if i in arrived and space.collective_sites[op.outputs[0]].collective_class == "gradient":
            part[i] = arrived[i] / graph.values[op.outputs[0]].bytes
        elif op.phase != "forward" and makers:
            part[i] = max(part[at] for at in makers)
    known: dict[tuple[int, float], float] = {}
    out = []
    for i, op in enumerate(graph.ops):
        least, seconds = part[i] if op.phase == "update" else 0.0, space.seconds[i]
        if (key := (id(seconds), least)) not in known:
            possible = space.strategies[i].work >= least * (1 - 1e-9)
            known[key] = float(seconds[possible].min() if possible.any() else seconds.max())
        out.append(known[key])
    return out
