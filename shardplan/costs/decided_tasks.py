"""The tasks of a decided program: a kernel per op, a chain of collectives per reshard, before XLA combines or merges any.

    op        a kernel of c_i[s] seconds (`roofline.py`)
    reshard   its collectives one after the other, then what XLA computes around them (`tables.py`)

What takes no time and waits for one task is that task: views, casts inside fusions, border ops. Equal steps of one array, in one loop
and phase, are one collective for all readers, unless the array is regathered behind a barrier.

Facts: cse-merges-equal-reshards, cse-merges-equal-sums, cse-stops-at-barriers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardplan.costs.network import CostNetwork
from shardplan.costs.states import PS
from shardplan.ir.graph import Graph, Phase
from shardplan.mesh.reshard import ReshardStep
from shardplan.xla_model.combining import CollectiveSite

OUTSIDE = -1
"""The computation that no loop holds."""


class Transfer(NamedTuple):
    """One collective of one array."""

    step: ReshardStep
    site: CollectiveSite
    value: int
    result_bytes: float  # on one device
    order: tuple[int, int]  # of arrays that are combined: as they are needed, or as they are made


@dataclass
class Tasks:
    """Tasks of all computations, in program order: each waits for earlier ones only.

    Attributes:
        seconds: of a kernel in one run; 0 of collectives.
        home: the loop that runs it, or OUTSIDE.
        before: what it waits for, in the order of its operands.
        transfers: those that are collectives.
        roots: by computation, the tasks whose results it hands out, in their order.
        kernels: by op, its task, -1 if it has none.
    """

    seconds: list[float] = field(default_factory=list)
    home: list[int] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    roots: dict[int, list[int]] = field(default_factory=dict)
    kernels: dict[int, int] = field(default_factory=dict)

    def add(self, home: int, before: Iterable[int], seconds: float = 0.0, transfer: Transfer | None = None) -> int:
        """A new task, its number; -1 for one that takes no time and waits for none."""
        waits = tuple(dict.fromkeys(n for n in before if n >= 0))
        if not seconds and transfer is None and len(waits) < 2:
            return waits[0] if waits else -1
        self.seconds.append(seconds)
        self.home.append(home)
        self.before.append(waits)
        if transfer is not None:
            self.transfers[len(self.home) - 1] = transfer
        return len(self.home) - 1

    def waits_for(self, n: int, m: int) -> bool:
        """Whether task n waits, directly or not, for the earlier task m."""
        stack, seen = [n], {n}
        while stack:
            for at in self.before[stack.pop()]:
                if at == m:
                    return True
                if at > m and at not in seen:
                    seen.add(at)
                    stack.append(at)
        return False


def decided_tasks(network: CostNetwork, states: Sequence[int]) -> Tasks:
    """The tasks of a cost network's ops and reshards under these states."""
    graph, tasks = network.space.graph, Tasks()
    strategies, retained = network.strategies(states), network.retained(states)
    beyond, regathers = network.beyond_collectives(states), network.regathers(strategies, retained)
    kernel_ps = network.kernel_ps(states)
    makes: dict[int, int] = {}  # value -> the task that makes it
    done: dict[tuple, int] = {}  # step of an array -> the task after which the array has gone it
    for j, op in enumerate(graph.ops):
        moved, waits = dict(network.reshards(j, strategies, retained)), []
        for k, v in enumerate(op.inputs):
            at = -1 if v is None else makes[v]
            for step in moved.get(k, ()):
                assert v is not None
                copy = regathers.get(j if op.traits.copy else graph.values[v].producer[0], 0)
                key = (at, step.before, step.after, *shared_key(graph, j, v), copy)
                if key not in done:
                    done[key] = _moved(tasks, network, j, v, at, step)
                at = done[key]
            waits.append(tasks.add(op.loop, (at,), beyond[j, k] / op.reads / PS) if (j, k) in beyond else at)
        seconds = kernel_ps[j] / op.runs / PS
        home = op.held_during if op.traits.loop_slice or op.traits.loop_stack else op.loop
        made = tasks.kernels[j] = tasks.add(home, waits, seconds)
        if op.traits.leaves_region or op.traits.loop_stack:
            tasks.roots.setdefault(home, []).append(made)
        makes.update(dict.fromkeys(op.outputs, made))
    return tasks


def shared_key(graph: Graph, j: int, v: int) -> tuple[int, int, Phase]:
    """What two readers of an array must agree in to share a collective: op j reads value v."""
    return v, graph.ops[j].loop, graph.ops[j].phase


def _moved(tasks: Tasks, network: CostNetwork, j: int, v: int, at: int, step: ReshardStep) -> int:
    """The task after which value v, made by task `at`, has gone one step towards op j."""
    graph, space = network.space.graph, network.space
    if step.kind == "slice":
        return tasks.add(graph.ops[j].loop, (at,), step.seconds)
    made = graph.values[v].producer[0]
    site, size = space.collective_sites[v], graph.values[v].bytes / step.after.shards(space.mesh)
    order = (j, made) if site.collective_class == "prefetch" else (made, j)
    return tasks.add(graph.ops[j].loop, (at,), transfer=Transfer(step, site, v, size, order))
