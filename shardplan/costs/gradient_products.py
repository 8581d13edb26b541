"""Which products of gradients run where their operands are made, and which at the end of the backward pass, for memory.

    dy |-- dx = dy w |          each gradient  g = x dy  may run anywhere between dy and its collective
       |-- g         |

XLA's memory scheduler takes of two products that read the same array first the one that writes fewer bytes: g, where activations are
larger than weights. Else dx comes first, and so do all after it, and the gradients last. The parts of a product that is split count;
such a product reads its operands by way of bitcasts, with which the latency-hiding scheduler moves it behind dx.

Facts: schedule-smaller-first, schedule-split-products-next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardplan._jax import itemsize
from shardplan.costs.space import StrategySpace
from shardplan.costs.split_products import product_parts, product_sizes
from shardplan.mesh.collective import CollectiveKey


def made_at_once(space: StrategySpace, reduced: Mapping[int, Sequence[tuple[CollectiveKey, float]]] | None) -> dict[int, int]:
    """Products of gradients that run where their operands are made -> the op at whose place; in loops rule 5 holds.

    `reduced`: by op that makes an array, its collectives, and the bytes of their results per device; None: sums over all devices.
    """
    graph, mesh, found = space.graph, space.mesh, dict[int, int]()
    for j, op in enumerate(graph.ops):
        if op.loop >= 0 or not _of_weights(space, j):
            continue
        if reduced is None:
            devices, size = mesh.n_devices, float(graph.values[op.outputs[0]].bytes)
        elif j in reduced:
            (kind, axes), size = reduced[j][0]
            devices = mesh.size(*axes)
            size *= devices if kind == "reduce-scatter" else 1
        else:
            continue
        others = {i: graph.values[graph.ops[i].outputs[0]].bytes / devices for i in _handing_on(space, j)}
        more = _parts(space, j, size, devices)
        if others and size * (more or 1.0) < max(others.values()):
            found[j] = max(j, *others) if more else j
    return found


def _of_weights(space: StrategySpace, j: int) -> bool:
    """Whether op j is a product of the backward pass that makes a gradient of weights."""
    op = space.graph.ops[j]
    sites = (space.collective_sites[v] for v in op.outputs)
    return op.phase == "backward" and op.traits.matmul and all(site.collective_class == "gradient" for site in sites)


def _handing_on(space: StrategySpace, j: int) -> Iterator[int]:
    """The products that hand on the gradient that product j reads."""
    graph = space.graph
    for v in graph.ops[j].inputs:
        if v is not None and graph.ops[graph.values[graph.original(v)].producer[0]].phase == "backward":
            readers = [at for at, _ in graph.values[graph.original(v)].consumers]
            copies = (w for at in readers if graph.ops[at].traits.copy for w in graph.ops[at].outputs)
            readers += [at for w in copies for at, _ in graph.values[w].consumers]
            yield from (at for at in readers if graph.ops[at].traits.matmul and not _of_weights(space, at))


def _parts(space: StrategySpace, j: int, size: float, devices: int) -> float:
    """By how much more product j writes than its result, of `size` bytes per device, where XLA splits it, parts in float32; else 0."""
    op = space.graph.ops[j]
    batch, _, columns, contracted = product_sizes(op, op.ins[0].shape, op.ins[1].shape)
    width = itemsize(op.outs[0].dtype)
    rows = max(1, round(size / max(1.0, batch * columns * width)))
    parts = product_parts(op, (batch, rows, columns, max(1, contracted // devices)), space.cluster.device)
    return parts * 4 / width if parts > 1 else 0.0
