"""The program that one strategy per op decides, as XLA runs it: kernels, combined collectives, merged products, loops; and its seconds.

This is the objective of planning: the seconds of a plan are those of the schedule of its program (`xla_model/timeline.py`), whichever
search found it.

The tasks are those of `decided_tasks.py`. A loop is a computation of its own, which runs `trips` times; no collective of another one
is in flight during a loop that has collectives. Collectives of one group, kind, operator, axes and loop are combined (rule 2), as far
as none waits for another. Products that share an operand are one kernel, which waits for all that they read, unless each is large. A
collective that is pipelined in its loop runs with the kernels of the iteration before or after (`pipelining.py`).

Facts: fusion-merges-products, options-pipelined-gather-memory, options-last-iteration, options-double-buffering,
combine-sums-in-loops, combine-same-operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardplan.costs.combined_transfers import Combiner
from shardplan.costs.decided_buffers import Buffers, computations, decided_buffers
from shardplan.costs.decided_seconds import TaskSeconds, op_bytes
from shardplan.costs.decided_tasks import decided_tasks
from shardplan.costs.kernel_tasks import OUTSIDE, Tasks, topological_order, waiting_for_each_other
from shardplan.costs.network import CostNetwork
from shardplan.costs.pipelining import NOTHING, Member, Pipelined, Pipelining
from shardplan.ir.graph import Graph
from shardplan.mesh.layout import Layout
from shardplan.xla_model.combining import COMBINABLE, SUMS
from shardplan.xla_model.compiler_options import DEFAULT, XlaOptions
from shardplan.xla_model.memory_order import memory_orders
from shardplan.xla_model.merged_products import MERGED_PRODUCT_BYTES
from shardplan.xla_model.timeline import Order, Task, Timeline, scheduled, timeline_of

LOOP_S = 1e-8
"""Seconds that XLA's scheduler takes a loop for."""

JOINED_LAST = (*reversed(COMBINABLE), None)
"""Kinds of collectives, those first that XLA combines last; None: all, and products, which it merges before."""

WHATEVER_THE_OPTIONS = "_merged", "_places", "_buffers", "_inner_loops"
"""Cached properties that no option changes."""

OF_EQUAL_THRESHOLDS = "joined", "task_seconds", "_members", "_orders", "_pipelining", "_timed"
"""Cached properties that two programs share if their options have the same combine thresholds, and both a profile or none."""


def decided_program(
    network: CostNetwork, states: Sequence[int], options: XlaOptions = DEFAULT, tasks: Tasks | None = None
) -> DecidedProgram:
    """The program of these states of a cost network, as it is compiled with these options; `tasks` are its own if they are known."""
    return DecidedProgram(network, tuple(states), tasks or decided_tasks(network, states), options)


class Listing(NamedTuple):
    """The tasks of a computation, those of them that are loops, which member each is of, and what runs for another round."""

    tasks: list[Task]
    nested: dict[int, tuple[Timeline, float]]  # one run, number of runs
    members: dict[int, Member]
    of_another_round: set[int]

    def collective(self, first: int, task: Task) -> None:
        """Adds a combined collective."""
        self.members[len(self.tasks)] = "task", first
        self.tasks.append(task)

    def loop(self, n: int, line: Timeline, runs: float, task: Task) -> None:
        """Adds a loop, of which `line` is one run."""
        self.nested[len(self.tasks)], self.members[len(self.tasks)] = (line, runs), ("loop", n)
        self.tasks.append(task)


class Timed(NamedTuple):
    """A computation in the order in which it runs.

    Attributes:
        line: of one run.
        has_collectives: in itself or in a loop in it.
        order: (task, whether it is the start of a collective).
        members: by task, of what it is a part; what runs for another round is left out.
    """

    line: Timeline
    has_collectives: bool
    order: Order
    members: dict[int, Member]


class _CycleError(Exception):
    """Tasks wait for each other."""


@dataclass(frozen=True, eq=False)
class DecidedProgram:
    """The program of one strategy per op.

    Attributes:
        network: its prices are not used, but for the reshard paths that they make cheapest and what edges cost beyond collectives.
        states: of all nodes.
        tasks: `decided_tasks` of these.
        options: XLA's compiler options.
        apart: tasks that are joined with no others: collectives that are not combined, products not merged.
    """

    network: CostNetwork
    states: tuple[int, ...]
    tasks: Tasks
    options: XlaOptions = DEFAULT
    apart: frozenset[int] = frozenset()

    @property
    def graph(self) -> Graph:
        """The step."""
        return self.network.space.graph

    def step_timeline(self, interference: float | None = None) -> Timeline:
        """Seconds of one step. `interference` is by default the cluster's; by 1 nothing overlaps."""
        line = self.acyclic.timed(OUTSIDE).line
        lost = self.network.space.cluster.interference if interference is None else interference
        if lost == 1:
            return Timeline(line.compute_s + line.collective_s, line.compute_s, line.collective_s, line.collective_s)
        return line.with_interference(lost)

    def with_options(self, options: XlaOptions) -> DecidedProgram:
        """The same program, compiled with other options; what they do not change is not found again."""
        same = (options.thresholds, options.profiled) == (self.options.thresholds, self.options.profiled)
        return self._sharing(replace(self, options=options), (*WHATEVER_THE_OPTIONS, *(OF_EQUAL_THRESHOLDS if same else ())))

    def _sharing(self, other: DecidedProgram, names: Collection[str]) -> DecidedProgram:
        vars(other).update((name, found) for name, found in vars(self).items() if name in names)
        return other

    @cached_property
    def hides(self) -> bool:
        """Whether XLA's latency-hiding scheduler orders it."""
        return self.options.hides_on(self.network.space.cluster.device.name)

    @cached_property
    def acyclic(self) -> DecidedProgram:
        """This program; if tasks that are joined would wait for each other, those of them that XLA joins later are apart."""
        found = self
        for kind in JOINED_LAST:
            try:
                _ = found._orders
            except _CycleError:
                cyclic = (n for waits in found._members.values() for of, n in waiting_for_each_other(waits) if of == "task")
                apart = found.apart.union(n for n in cyclic if kind in (None, self.tasks.kind(n)))
                found = found._sharing(replace(found, apart=apart), WHATEVER_THE_OPTIONS)
            else:
                break
        return found

    # ---- what XLA joins

    @cached_property
    def joined(self) -> tuple[list[int], dict[int, list[int]]]:
        """Per task, the task that it is one with; and by the first of them, combined transfers in their order."""
        one = list(range(len(self.tasks.home)))
        combined: dict[int, list[int]] = {}
        for some in self._combined():
            combined |= {n: [n] for n in some} if some[0] in self.apart else {some[0]: some}
        for some in (*combined.values(), *self._merged):
            for n in some if some[0] not in self.apart else ():
                one[n] = some[0]
        return one, combined

    def standing_for(self, n: int) -> int:
        """The task that task n is one with; -1, which stands for none, as it is."""
        return self.joined[0][n] if n >= 0 else n

    def _combined(self) -> Iterator[list[int]]:
        """Transfers that one collective makes: of one group, kind, operator, axes, loop, none of which waits for another (rule 2)."""
        tasks = self.tasks
        groups: dict[tuple, list[int]] = {}
        for n, (step, site, *_) in tasks.transfers.items():
            alone = site.joint_size == 1 or step.kind not in COMBINABLE
            operators = tuple(operator for axis, operator in step.before.partial if axis in step.axes)
            key = (site.joint, step.kind, step.axes, operators, tasks.home[n], site.sum_dtype if step.kind in SUMS else "")
            groups.setdefault(n if alone else key, []).append(n)  # pyright: ignore[reportArgumentType]
        merged = [some for some in self._merged if some[0] not in self.apart]
        combiner, turns = Combiner(tasks, merged), {kind: turn for turn, kind in enumerate(COMBINABLE)}
        for some in sorted(groups.values(), key=lambda some: turns.get(tasks.transfers[some[0]].step.kind, 0)):
            threshold = self.options.threshold_bytes(tasks.transfers[some[0]].step.kind)
            in_order = sorted(some, key=self._places[tasks.home[some[0]]].__getitem__)
            yield from combiner.combined(in_order, lambda n: tasks.transfers[n].result_bytes, threshold)

    @cached_property
    def _places(self) -> dict[int, dict[int, tuple[int, ...]]]:
        """By computation, where its tasks stand in its HLO before any are joined."""
        one = range(len(self.tasks.home))
        orders = {home: self._order(home, waits, one) for home, waits in self._waits(one).items()}
        return {home: {n: (at,) for at, (kind, n) in enumerate(order) if kind == "task"} for home, order in orders.items()}

    @cached_property
    def _merged(self) -> list[list[int]]:
        return [*self._merged_products()]

    def _merged_products(self) -> Iterator[list[int]]:
        """Products of one loop and pass that read the same array and do not wait for one another (fact: fusion-merges-products)."""
        computed, seen = self.tasks.computed, set[int]()
        for group in self.network.space.facts.sharing_products:
            by_layout: dict[Layout, list[int]] = {}
            for j, k in group:
                if j in computed:  # else a product of empty arrays
                    by_layout.setdefault(self.network.operand_layout(j, k, self.states), []).append(j)
            for products in by_layout.values():
                if len(products) < 2:
                    continue
                small = {computed[j] for j in products if op_bytes(self.network, self.states, j) <= MERGED_PRODUCT_BYTES}
                some = sorted({computed[j] for j in products} - seen)
                together = self.tasks.apart(some[next((k for k, n in enumerate(some) if n in small), len(some)) :])
                if len(together) > 1:
                    seen.update(together)
                    yield together

    @cached_property
    def task_seconds(self) -> TaskSeconds:
        """What each kernel and each collective takes."""
        return TaskSeconds(self.network, self.states, self.tasks, self.joined, self.options.profiled)

    # ---- computations

    @cached_property
    def _members(self) -> dict[int, dict[Member, dict[Member, None]]]:
        """Computation -> its tasks and loops -> those of them that each waits for, in the order of its operands.

        The operands of a combined collective stand in the order in which XLA came upon their collectives.
        """
        one, combined = self.joined
        out = self._waits(one)
        for first, some in combined.items():
            if len(some) > 1:
                home = self.tasks.home[first]
                in_order = sorted(some, key=self._places[home].__getitem__)
                read = (m for n in in_order for m in self.tasks.before[n] if home in self.graph.loop_holders[self.tasks.home[m]])
                out[home]["task", first] = dict.fromkeys(self.member(m, home) for m in read)
        return out

    def _waits(self, one: Sequence[int]) -> dict[int, dict[Member, dict[Member, None]]]:
        """`_members`, if each task is one with the task that `one` has for it."""
        tasks = self.tasks
        out: dict[int, dict[Member, dict[Member, None]]] = {home: {} for home in (OUTSIDE, *range(len(self.graph.loops)))}
        for n, before in enumerate(tasks.before):
            mine = self.graph.loop_holders[tasks.home[n]]
            for inside, home in zip((OUTSIDE, *mine), mine, strict=False):
                out[home].setdefault(("task", one[n]) if home == mine[0] else ("loop", inside), {})
            for m in before:
                others = self.graph.loop_holders[tasks.home[m]]
                home = next(x for x in mine if x in others)
                if (a := self.member(m, home, one)) != (b := self.member(n, home, one)):
                    out[home][b][a] = None
        return out

    def member(self, n: int, home: int, one: Sequence[int] | None = None) -> Member:
        """What stands for task n in a computation that holds it: the task that it is one with, or a loop."""
        holders = self.graph.loop_holders[self.tasks.home[n]]
        inside = holders.index(home)
        return ("loop", holders[inside - 1]) if inside else ("task", (self.joined[0] if one is None else one)[n])

    @cached_property
    def _orders(self) -> dict[int, list[Member]]:
        """By computation, its members in the order in which XLA's memory scheduler puts them.

        Raises:
            _CycleError: tasks wait for each other.
        """
        hlo = {home: self._order(home, waits, self.joined[0]) for home, waits in self._members.items()}
        waits = {home: {name: [*self._members[home][name]] for name in order} for home, order in hlo.items()}
        roots = {home: self._roots(home, self.joined[0]) for home in hlo}
        parts, collectives = self.task_seconds.parts_bytes, {n: self.tasks.transfers[n].step.kind for n in self.joined[1]}
        found = computations(self.graph, self._buffers, self.joined[0], self.tasks.home, waits, roots, parts, collectives)
        orders = memory_orders({home: of for home, (of, _) in found.items()}, OUTSIDE)
        return {home: [name for n in order if (name := found[home][1][n]) is not None] for home, order in orders.items()}

    @cached_property
    def _buffers(self) -> Buffers:
        return decided_buffers(self.network, self.states, self.tasks)

    def _order(self, home: int, waits: Mapping[Member, Mapping[Member, None]], one: Sequence[int]) -> list[Member]:
        """The members of a computation in the order of its HLO: from its results back, each operand before its reader."""
        order = topological_order({name: waits[name] for name in (*self._roots(home, one), *waits)})
        if order is None:
            raise _CycleError
        return order

    def _roots(self, home: int, one: Sequence[int]) -> list[Member]:
        """The members whose results a computation hands out."""
        holders = self.graph.loop_holders
        return [self.member(n, home, one) for n in self.tasks.roots.get(home, ()) if n >= 0 and home in holders[self.tasks.home[n]]]

    @cached_property
    def _pipelining(self) -> Pipelining:
        return Pipelining(self.graph, self.tasks, self.joined[1], self._members, self._orders, self.member)

    @cached_property
    def pipelined(self) -> dict[int, Pipelined]:
        """By loop, what the options have XLA issue a round ahead or end a round later."""
        return self._pipelining.by_loop(self.options.pipelined) if self.options.pipelined else {}

    def timed(self, home: int, pipelined: bool = True, some: frozenset[Member] | None = None) -> Timed:
        """A computation in the order in which it runs; not `pipelined`: its round without what is issued ahead or ends later.

        With `some`, of these members alone.
        """
        key = home, pipelined, some, self.hides, tuple(map(self._changed, self._inner_loops[home]))
        if (known := self._timed.get(key)) is None:
            (tasks, nested, members, of_another), _ = self.listed(home, pipelined, some)
            collectives, order = any(task.collective or task.has_collectives for task in tasks), scheduled(tasks, self.hides)
            members = {n: member for n, member in members.items() if n not in of_another}
            known = self._timed[key] = Timed(timeline_of(tasks, nested, order), collectives, order, members)
        return known

    @cached_property
    def _timed(self) -> dict[tuple, Timed]:
        """What `timed` found, by all that options change of it."""
        return {}

    @cached_property
    def _inner_loops(self) -> dict[int, list[int]]:
        """By computation, the loops that it is or holds, however deep."""
        holders = self.graph.loop_holders[:-1]
        return {home: [n for n, around in enumerate(holders) if home in around] for home in (OUTSIDE, *range(len(holders)))}

    def _changed(self, loop: int) -> tuple[Pipelined, bool]:
        """What the options change of a loop's rounds."""
        found = self.pipelined.get(loop, NOTHING)
        return found, self.options.double_buffering and found != NOTHING

    def round_s(self, loop: int, pipelined: bool = True) -> float:
        """Seconds of one round of a loop; without what is pipelined, or with it."""
        return self.timed(loop, pipelined).line.total_s

    def listed(
        self, home: int, pipelined: bool = True, some: Collection[Member] | None = None
    ) -> tuple[Listing, dict[Member, int]]:  # fmt: skip
        """Tasks of a computation, or of `some` members, and the number of each one's last task; without pipelining, or with it."""
        before, (ahead, needed, twice, later, _) = self._members[home], self.pipelined.get(home, NOTHING)
        ending, only_ahead = {("task", n) for n in later}, {*needed} - twice
        free, numbers, listing = {("task", n) for n in (*ahead, *later)}, dict[Member, int](), Listing([], {}, {}, set())
        carried: set[int] = set()  # what makes the arrays that pipelining copies from round to round
        gathered = {("task", n) for n in ahead} if pipelined and not self.options.double_buffering else ()
        for name in self._orders[home]:
            if some is not None and name not in some:
                continue
            waits = tuple(sorted({numbers[m] for m in before[name] if m in numbers}))
            if name in free:
                if pipelined and (name in ending or not before[name]):
                    listing.collective(name[1], self.task_seconds.collective(name[1], ()))
                carried.update(waits if name not in gathered else ())
            elif pipelined or name not in only_ahead:
                self._list(name, waits, listing)
                numbers[name] = len(listing.tasks) - 1
        if pipelined:
            self._list_ahead(home, twice, numbers, (), listing)
        copied_s = 2 * sum(self._carried_bytes(home)) / self.network.space.cluster.device.memory_rate
        around_s = sum(self.task_seconds.staging_s(n) for n in (*ahead, *later)) + copied_s
        if free and pipelined and around_s:
            listing.members.pop(len(listing.tasks), None)
            carried.update(n for n, name in listing.members.items() if name in gathered)
            listing.tasks.append(Task(around_s, False, tuple(sorted(carried))))
        return listing, numbers

    def _list_ahead(
        self, home: int, some: Collection[Member], made: Mapping[Member, int], waits: tuple[int, ...], listing: Listing
    ) -> None:
        """Adds some of what the gathers of the next round need, then the gathers that need any.

        Args:
            made: the numbers of what else they need.
            waits: what those wait for that need nothing else.
        """
        numbers, before = dict(made), self._members[home]
        ahead, needed, twice, *_ = found = self.pipelined.get(home, NOTHING)
        for name in needed:
            if name in some:
                part = self._pipelining.run_ahead(home, name[1], found) if name in twice and name[0] == "loop" else None
                first = len(listing.tasks)
                self._list(name, tuple(sorted({numbers[m] for m in before[name] if m in numbers})) or waits, listing, part)
                listing.of_another_round.update(range(first, len(listing.tasks)))
                numbers[name] = len(listing.tasks) - 1
        for n in ahead:
            if reads := before["task", n]:
                at = tuple(sorted({numbers[m] for m in reads if m in numbers})) or waits
                listing.collective(n, self.task_seconds.collective(n, at))

    def _list(self, name: Member, waits: tuple[int, ...], listing: Listing, some: frozenset[Member] | None = None) -> None:
        """Adds a member of a computation, of a loop `some` of its members."""
        kind, n = name
        if kind == "loop":
            self._list_loop(n, waits, listing, some)
        else:
            listing.members.update(dict.fromkeys((len(listing.tasks), len(listing.tasks) + 1), name))
            listing.tasks.extend(self._task(n, waits, len(listing.tasks)))

    def _list_loop(self, n: int, waits: tuple[int, ...], listing: Listing, some: frozenset[Member] | None = None) -> None:
        """Adds a loop: what is pipelined has its first run before it or its last run behind it, and is missing in one round."""
        (line, inside, *_), trips, tasks = self.timed(n, some=some), self.graph.loops[n].trips, listing.tasks
        ahead, needed, _, later, _ = pipelined = self.pipelined.get(n, NOTHING)
        if pipelined == NOTHING:
            listing.loop(n, line, trips, Task(line.total_s * trips, False, waits, inside, LOOP_S, True))
            return
        first = len(tasks)
        for m in ahead:
            if not self._members[n]["task", m]:
                listing.collective(m, self.task_seconds.collective(m, waits))
        self._list_ahead(n, {*needed}, {}, waits, listing)
        waits = tuple(range(first, len(tasks))) or waits
        line = (trips - 1) * line + self.timed(n, pipelined=False).line
        listing.loop(n, line, 1.0, Task(line.total_s, False, waits, True, LOOP_S, True))
        at = len(tasks) - 1
        for m in later:
            listing.collective(m, self.task_seconds.collective(m, (at,)))
        listing.members.pop(len(tasks), None)
        if later:
            tasks.append(Task(0.0, False, tuple(range(len(tasks) - len(later), len(tasks)))))

    def _carried_bytes(self, home: int) -> Iterator[float]:
        """Bytes of the arrays that a pipelined loop copies from round to round: sums that are not reduced yet."""
        tasks, (_, combined) = self.tasks, self.joined
        ahead, _, _, later, _ = self.pipelined.get(home, NOTHING)
        for first in (*later, *(() if self.options.double_buffering else (*ahead, *later))):
            yield from (tasks.transfers[n].step.bytes for n in combined[first])

    def _task(self, n: int, waits: tuple[int, ...], number: int) -> list[Task]:
        """A kernel with all that is merged into it, or a combined collective behind the kernels that fill its buffer."""
        if n not in self.joined[1]:
            kernel, last = self.task_seconds.kernel(n, waits), self.task_seconds.summing(n)
            if last is None:
                return [kernel]
            seconds = kernel.seconds - last.seconds
            estimate_s = seconds if self.options.profiled else kernel.estimate_s
            return [kernel._replace(seconds=seconds, estimate_s=estimate_s, viewed=False), last._replace(before=(number,))]
        staging_s = self.task_seconds.staging_s(n)
        if staging_s:
            return [Task(staging_s, False, waits), self.task_seconds.collective(n, (number,))]
        return [self.task_seconds.collective(n, waits)]
