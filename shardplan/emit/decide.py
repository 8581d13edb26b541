"""Which sharding constraints emission puts into the program, given the strategy of every op.

Two things are constrained: every reshard, at the op that reads the array; and every array that is written to memory or leaves a big
op, where it is made. Inside fusions XLA propagates shardings by itself. With these alone XLA would build another program than the
planned one in some places: each is a function here, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from shardplan.costs.network import CostNetwork
from shardplan.costs.space import StrategySpace
from shardplan.emit.emit import BARRIER, EmitDecision
from shardplan.ir.graph import Graph, Op, Path
from shardplan.mesh.layout import Layout, splits_unevenly


def decide(
    network: CostNetwork,
    strategies: Sequence[int],
    retained: Collection[int],
    known: Mapping[Path, EmitDecision] | None = None,
    otherwise: Collection[int] = (),
) -> dict[Path, EmitDecision]:
    """The constraints of a decided program.

    Args:
        network: the cost network that was solved; its reshard paths are emitted.
        strategies: per op of the graph, the number of its strategy.
        retained: copies that reuse the copy of an earlier phase: they move nothing.
        known: the constraints of another program of the same strategy space, if there is one.
        otherwise: ops that may be constrained otherwise than in `known`, as `affected` finds them.

    Returns:
        By path in the nested jaxprs, what is constrained at that op; ops without constraints are left out.
    """
    decided = _Decided(network, network.space, network.space.graph, strategies, retained)
    ops = ((i, op) for i, op in enumerate(decided.graph.ops) if not op.traits.copy)
    every = ((op, decided.decision(i) if known is None or i in otherwise else known.get(op.path)) for i, op in ops)
    return {op.path: found for op, found in every if found}


def affected(graph: Graph, changed: Collection[int]) -> set[int]:
    """The ops whose constraints or reshards may differ where those of `changed` have other strategies or other reshards.

    These are the readers of what a changed op makes, behind copies too, and the ops that make what it reads: whether a result is
    constrained depends on its readers, behind copies and transposes too (`_Decided.is_resharded`, `_Decided.is_only_completed`).
    """
    found = set(changed)
    readers, makers = list(changed), list(changed)
    while readers:
        for v in graph.ops[readers.pop()].outputs:
            for i, _ in graph.values[v].consumers:
                if graph.ops[i].traits.copy:
                    readers.append(i)
                found.add(i)
    seen = set(changed)
    while makers:
        for v in graph.ops[makers.pop()].inputs:
            i = -1 if v is None else graph.values[v].producer[0]
            if i >= 0 and i not in seen:
                seen.add(i)
                if graph.ops[i].traits.copy or graph.ops[i].traits.transpose:
                    makers.append(i)
    return found | seen


@dataclass(frozen=True, eq=False)
class _Decided:
    """A cost network with one strategy per op."""

    network: CostNetwork
    space: StrategySpace
    graph: Graph
    strategies: Sequence[int]
    retained: Collection[int]

    def producer(self, v: int) -> Op:
        return self.graph.ops[self.graph.values[v].producer[0]]

    def copied(self, v: int) -> int | None:
        """The value that `v` is a copy of, if it is one."""
        op = self.producer(v)
        return op.inputs[0] if op.traits.copy else None

    def layout(self, v: int) -> Layout:
        i, r = self.graph.values[v].producer
        return self.space.strategies[i].results[r][self.strategies[i]]

    def operand_layout(self, i: int, k: int) -> Layout:
        return self.space.strategies[i].operands[k][self.strategies[i]]

    # ---- one op

    def decision(self, i: int) -> EmitDecision:
        op = self.graph.ops[i]
        factors = self.space.strategies[i].factors[self.strategies[i]]
        local = op.traits.runs_on_shards or not self.space.rules[i].shard_local.isdisjoint(factors)  # all its layouts are decided
        sum_order = self.sum_order(i)
        local = local or (bool(op.traits.scatter) and self.may_split_unevenly(op.ins[2].shape)) or bool(sum_order)
        copies = tuple(self.copy_number(i, v) for v in op.inputs)
        reads = tuple(self.read(i, k, v, copies[k], local) for k, v in enumerate(op.inputs))
        results = tuple(self.result(i, v, local) for v in op.outputs)
        return EmitDecision(reads, results, copies if any(copies) else (), sum_order)

    def may_split_unevenly(self, shape: tuple[int, ...]) -> bool:
        """Whether XLA could shard the updates of a scatter in unequal blocks unasked, and add what it fills them up with.

        Fact: uneven-updates-are-not-masked.
        """
        return any(splits_unevenly(n, k) for n in shape for k in self.space.mesh.sizes)

    def copy_number(self, i: int, v: int | None) -> int:
        """As in `EmitDecision.copies`."""
        if self.graph.ops[i].traits.recompute_barrier:
            return self.regathers.get(i, 0)
        maker = -1 if v is None else self.graph.values[v].producer[0]
        again = self.regathers.get(maker, 0) if self.graph.ops[maker].traits.copy else 0
        return BARRIER if v is not None and self.reads_behind_barrier(i, v) else again

    def read(self, i: int, k: int, v: int | None, copy: int, local: bool) -> tuple[Layout, ...]:
        """The layouts that operand k of op i goes through, the last the one that it is read in; () leaves it to XLA."""
        wanted = self.operand_layout(i, k)
        if wanted.partial and (i, k) in self.space.accumulated_operands:
            return (replace(wanted, partial=()),)  # as the loop's carry, see `completes_partial_sum`
        source = (self.layout(v),) if v is not None and self.graph.ops[i].traits.recompute_barrier and copy else ()
        path = () if v is None else (*source, *self.regather_source(v, copy), *self.copy_path(v), *self.reshard_path(i, k, wanted))
        # A loop's operands are constrained in any case: XLA chooses their layouts anew inside the loop.
        fixed = local or (self.graph.ops[i].traits.loop_operand and not self.is_scalar_broadcast(i))
        return path or ((wanted,) if fixed and wanted.rank and not wanted.partial else ())

    def result(self, i: int, v: int, local: bool) -> Layout | None:
        """The layout that op i makes value v in; None leaves it to XLA."""
        op, layout, fusion = self.graph.ops[i], self.layout(v), self.space.rules[i].fusion
        written = local or op.traits.border or op.traits.sharding_constraint or fusion in ("none", "reduce")
        written = written or self.space.materialised[v] or self.is_resharded(v)
        if op.traits.step_output or self.is_scalar_broadcast(i) or not written:
            return None
        if self.completes_partial_sum(i, v):
            layout = replace(layout, partial=())
        return layout if layout.rank and not layout.partial else None

    # ---- reshards

    def reshard_path(self, i: int, k: int, wanted: Layout) -> tuple[Layout, ...]:
        """The layouts from the one that operand k of op i is made in (excluded) to the one it is wanted in (included).

        One constraint per collective: XLA's partitioner, given only the last layout, may replicate the array first, or all-reduce a
        partial sum where the path has two reduce-scatters (facts: partition-one-constraint-per-step, partition-two-dims-all-reduce).
        A partial sum is constrained to its dims as sharded so far; the partial result of a gather also where it is made, since XLA
        otherwise loses the path, or aborts.
        """
        v = self.graph.ops[i].inputs[k]
        if v is None or not _differs(made := self.layout(v), wanted):
            return ()
        steps = self.network.path(i, k, made, wanted)
        passed = [s.after for s, t in pairwise(steps) if not s.after.partial or s.kind == t.kind == "reduce-scatter"]
        if made.partial and self.producer(v).traits.gather:
            passed.insert(0, made)
        complete = (replace(layout, partial=()) for layout in passed)
        shape = self.graph.values[v].shape
        return (*(layout for layout in complete if layout != wanted and layout.splits(shape, self.space.mesh)), wanted)

    def copy_path(self, v: int) -> tuple[Layout, ...]:
        """The layouts that a copy, or a copy of a copy, went through."""
        source, copy = self.copied(v), self.graph.values[v].producer[0]
        return () if source is None else (*self.copy_path(source), *self.reshard_path(copy, 0, self.layout(v)))

    def is_resharded(self, v: int) -> bool:
        """Whether some reader reshards a value, or a copy of it in its layout.

        Such a value is constrained where it is made: sharding propagation runs backwards, too, and would make it in that reader's
        layout.
        """
        made, ops = self.layout(v), self.graph.ops
        for i, k in self.graph.values[v].consumers:
            if _differs(made, self.operand_layout(i, k)):
                return True
            if ops[i].traits.copy and self.layout(ops[i].outputs[0]) == made and self.is_resharded(ops[i].outputs[0]):
                return True
        return False

    # ---- copies that XLA would merge

    @cached_property
    def regathers(self) -> dict[int, int]:
        """Copy -> how many times its array was gathered and freed before."""
        return self.network.regathers(self.strategies, self.retained)

    def regather_source(self, v: int, copy: int) -> tuple[Layout, ...]:
        """The layout that a regathered copy starts from."""
        source = self.copied(v) if copy > 0 else None
        return () if source is None or self.layout(source).partial else (self.layout(source),)

    def reads_behind_barrier(self, i: int, v: int) -> bool:
        """Whether op i updates a parameter that the step also computes with.

        XLA's multi-output fusion may fuse the two readers of the parameter. Then the next layer waits for the reduction of this
        layer's gradient, and gradient reductions are not combined (fact: combine-not-through-fused-updates).
        """
        if self.graph.ops[i].phase != "update":
            return False
        source = self.graph.ops[self.graph.maker(v)]
        readers = [self.graph.ops[j] for j in self.graph.readers(source.outputs[0])] if source.traits.step_input else []
        return any(not op.traits.step_output and op.phase != "update" for op in readers)

    # ---- ops that XLA would shard otherwise

    def sum_order(self, i: int) -> tuple[str, ...]:
        """The axes over which a scatter-add sums, in the order in which a reader shards a dim of the sum, if that is not the op's own.

        XLA sums over devices in the order in which the updates are sharded, and all-reduces where the shards of the sum lie in
        another one (fact: partition-scatter-in-one-order).
        """
        if self.graph.ops[i].traits.scatter != "add":
            return ()
        (v,) = self.graph.ops[i].outputs
        axes = self.layout(v).partial_axes
        own = tuple(a for a in self.space.strategies[i].orders[self.strategies[i]] if a in axes)
        paths = (self.reshard_path(j, k, self.operand_layout(j, k)) for j, k in self.graph.values[v].consumers)
        read = {tuple(a for a in dim if a in axes) for path in paths for layout in path for dim in layout.dims}
        wanted = sorted(x for x in read if len(x) == len(own) > 1)
        return wanted[0] if wanted and own not in wanted else ()

    def is_scalar_broadcast(self, i: int) -> bool:
        """Whether op i is a broadcast scalar, or that as a loop's constant: XLA makes it where it is read, in any layout.

        Fact: fusion-broadcast-scalar.
        """
        source = self.graph.ops[i].inputs[0] if self.graph.ops[i].traits.loop_const else None
        return self.graph.ops[i if source is None else self.graph.maker(source)].scalar_broadcast

    def completes_partial_sum(self, i: int, v: int) -> bool:
        """Whether a result that is planned as a partial sum is constrained as if it were complete.

        - A scatter-add: XLA otherwise completes the array that it adds to first, or gathers the rows.
        - The carry of a loop that accumulates partial sums: XLA then defers the all-reduce to the loop's end (fact:
          accumulate-reduces-after-loop).
        - A product with an idle mesh axis whose readers all complete it: XLA may otherwise shard the product over the idle axis, and
          reshard the result (fact: partition-idle-axis).
        - A ragged product whose readers all complete it: XLA otherwise gathers its operand where a reader scatters the sum (fact:
          partition-ragged-sum).
        """
        traits = self.graph.ops[i].traits
        if traits.loop_carry or traits.loop_next or traits.scatter == "add":
            return True
        if not self.layout(v).partial or not traits.product:
            return False
        if traits.grouped_matmul:
            return self.is_only_completed(v)
        factors = self.space.strategies[i].factors[self.strategies[i]]
        idle = any(n > 1 and factor is None for (_, n), factor in zip(self.space.mesh, factors, strict=True))
        return idle and self.is_only_completed(v)

    def is_only_completed(self, v: int) -> bool:
        """Whether every reader of a partial sum completes it, some after a transpose."""
        for i, k in self.graph.values[v].consumers:
            if _differs(self.layout(v), self.operand_layout(i, k)):
                continue
            op = self.graph.ops[i]
            passes = (op.traits.copy or op.traits.transpose) and self.layout(v).partial == self.layout(op.outputs[0]).partial
            if not (passes and self.is_only_completed(op.outputs[0])):
                return False
        return True


def _differs(made: Layout, wanted: Layout) -> bool:
    """Whether an array is brought from one layout to another; a partial sum is made where it is read."""
    return wanted is not made and wanted != made and not wanted.partial
