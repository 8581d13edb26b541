"""In which order XLA's memory scheduler puts the instructions of a module, before latency is hidden.

Three orders are made of every computation, and the module takes the one kind whose peak is least, in a tie the first:

    list            of what may run next, what leaves the fewest bytes more in memory than it frees; of equals, what most read. What
                    reads through views, as a product that is split does, goes by the bytes that it freed when it could first run
    depth first     from the results back; of operands first the one behind which most is read more than once, then the larger
    post-order      from the results back; operands from the first to the last

Example, two networks of which the losses are added: the list runs one of them to the end of its backward pass before it begins the
other, if gradients free more than they need; the other orders run them as the program adds them up.

The latency-hiding scheduler begins from this order, and decides ties by it; where it does not run, this is the order.
Also known as list scheduling for register pressure. Facts: schedule-memory-orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate


@dataclass(frozen=True)
class Computation:
    """Instructions that run one after the other, and the buffers that they share.

    Attributes:
        before: per instruction, those that it waits for, in the order of its operands.
        reads, writes: per instruction, numbers of buffers.
        sizes: bytes, by the number of a buffer.
        kept: buffers that are handed out.
        roots: the instructions whose results are handed out, in their order.
        called: instruction that is a loop -> its computation.
        viewing: instructions that read through views.
        inputs: buffers that are in memory before the first instruction, and until the last one that reads them.
        collectives: instruction that is a collective -> its kind.
    """

    before: Sequence[Sequence[int]]
    reads: Sequence[Sequence[int]]
    writes: Sequence[Sequence[int]]
    sizes: Mapping[int, float]
    kept: frozenset[int]
    roots: Sequence[int]
    called: Mapping[int, int]
    viewing: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    collectives: Mapping[int, str] = field(default_factory=dict)


OPERANDS_IN_RESULT = "all-gather", "collective-permute"
"""Kinds of collectives that XLA takes to write their operands besides their results."""

Orders = dict[int, list[int]]
"""By computation, its instructions in an order."""


def memory_orders(computations: Mapping[int, Computation], entry: int) -> Orders:
    """The order of each computation of a module, of which `entry` is the outermost."""
    kinds = [{name: order(of) for name, of in computations.items()} for order in (list_order, depth_first_order, post_order)]
    return min(kinds, key=lambda orders: peak_bytes(computations, orders, entry))


def list_order(of: Computation) -> list[int]:
    """What frees most first."""
    count = len(of.before)
    users = _users(of)
    written = {b for some in of.writes for b in some}
    mine = [[b for b in some if b in written] for some in of.reads]
    defined = [sum(of.sizes[b] for b in some) for some in of.writes]
    for n, kind in of.collectives.items():
        defined[n] += sum(of.sizes[b] for b in of.reads[n]) if kind in OPERANDS_IN_RESULT else 0.0
    holding = {n for n, kind in of.collectives.items() if kind != "all-reduce"}
    left = dict.fromkeys(written, 0)  # reads that are still to come
    readers: dict[int, list[int]] = {b: [] for b in written}
    for n, some in enumerate(mine):
        for b in some:
            left[b] += 1
            readers[b].append(n)
    for b in of.kept & written:
        left[b] += 1
    waiting = [len(some) for some in of.before]
    queue: list[tuple[float, int, int, int]] = []
    entered = [0] * count  # the number of the entry in the queue that counts
    bytes_more = [0.0] * count
    done = [False] * count
    turn = 0

    def enter(n: int) -> None:
        nonlocal turn
        more = defined[n] - sum(of.sizes[b] for b in mine[n] if left[b] == 1 and n not in holding)
        if not entered[n] or more != bytes_more[n]:
            turn += 1
            entered[n], bytes_more[n] = turn, more
            heappush(queue, (more, -len(users[n]), -turn, n))  # of equals the last to come

    for n in range(count):
        if not waiting[n]:
            enter(n)
    out: list[int] = []
    while queue:
        *_, at, n = heappop(queue)
        if done[n] or entered[n] != -at:
            continue
        done[n] = True
        out.append(n)
        last = []
        for b in mine[n]:
            left[b] -= 1
            if left[b] == 1:
                last.append(b)
        for m in users[n]:
            waiting[m] -= 1
            if not waiting[m]:
                enter(m)
        for b in last if n not in of.viewing else ():
            for m in readers[b]:
                if entered[m] and not done[m] and m not in of.viewing:
                    enter(m)
    return out


def depth_first_order(of: Computation) -> list[int]:
    """From the results back, of operands first what has most readers behind it."""
    users, all_bytes = _users(of), 0.0
    behind: list[tuple[int, float]] = [(0, 0.0)] * len(of.before)
    for n in post_order(of):
        own = sum(of.sizes[b] for b in of.writes[n])
        all_bytes += own
        shared = max(0, len(users[n]) - 1) + sum(behind[m][0] for m in of.before[n])
        size = own + sum(behind[m][1] for m in of.before[n])
        behind[n] = min(shared, len(behind)), min(size, all_bytes)
    return _from_results(of, lambda some: sorted(some, key=lambda n: (-behind[n][0], -behind[n][1])))


def post_order(of: Computation) -> list[int]:
    """From the results back."""
    return _from_results(of, lambda some: some)


def peak_bytes(computations: Mapping[int, Computation], orders: Orders, entry: int) -> float:
    """The most bytes of buffers at any time, those of loops while they run.

    A collective starts right behind its last operand, and is done right before the first instruction that waits for it; but for
    all-reduces it holds its operands until then.
    """
    of, order = computations[entry], orders[entry]
    place = {n: 2 * at + 2 for at, n in enumerate(order)}
    starts, ends = _collective_turns(of, order, place)
    changes = [0.0] * (2 * len(order) + 4)
    born = dict.fromkeys(of.inputs, 0)
    dies: dict[int, int] = {}
    for n in order:
        for b in of.writes[n]:
            born[b] = min(born.get(b, len(changes)), starts[n])
            dies[b] = max(dies.get(b, 0), place[n])
        for b in of.reads[n]:
            dies[b] = max(dies.get(b, 0), ends[n])
    for b, at in born.items():
        if b in dies or b in of.kept:
            changes[at] += of.sizes[b]
            changes[-1 if b in of.kept else dies[b] + 1] -= of.sizes[b]
    now = list(accumulate(changes))
    return max(*now, *(now[place[n]] + peak_bytes(computations, orders, name) for n, name in of.called.items()))


def _collective_turns(of: Computation, order: Sequence[int], place: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Per instruction, from when on its result is in memory, and until when what it reads is."""
    starts, ends = {**place}, {**place}
    loaded: dict[int, int] = {}  # inputs -> the turn before the first instruction that reads them
    done = dict.fromkeys(of.collectives, 2 * len(order) + 1)
    for n in order if of.collectives else ():
        for b in of.inputs.intersection(of.reads[n]):
            loaded.setdefault(b, place[n] - 1)
    for n in reversed(order) if of.collectives else ():
        done.update((m, place[n] - 1) for m in of.before[n] if m in done)
    for n, kind in of.collectives.items():
        starts[n] = max((*(place[m] + 1 for m in of.before[n]), *(loaded[b] for b in of.reads[n] if b in loaded)), default=0)
        ends[n] = starts[n] if kind == "all-reduce" else done[n]
    return starts, ends


def _users(of: Computation) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in of.before]
    for n, some in enumerate(of.before):
        for m in some:
            out[m].append(n)
    return out


def _from_results(of: Computation, ordered: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    out: list[int] = []
    seen = [False] * len(of.before)
    for root in (*ordered(of.roots), *range(len(of.before))):
        stack = [] if seen[root] else [(root, iter(ordered(of.before[root])))]
        seen[root] = True
        while stack:
            at, rest = stack[-1]
            for m in rest:
                if not seen[m]:
                    seen[m] = True
                    stack.append((m, iter(ordered(of.before[m]))))
                    break
            else:
                out.append(at)
                stack.pop()
    return out
