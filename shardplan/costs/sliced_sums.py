"""A sum that is completed and then sliced over all its axes: if nothing reads it whole, XLA reduce-scatters it instead.

    all-reduce over x, y -> slice over x, y     of the only reader, or of each of them: a reduce-scatter over x, y
    all-reduce over x, y -> slice over x        stays: other sums over x, y are combined with the all-reduce
    all-reduce over x, y -> slice over x, y     of one reader, while another one reads the whole sum: stays, as into unequal blocks

A search takes such a path where the all-reduce shares its latency with others. Fact: partition-sum-sliced-whole.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.reshard import ReshardStep

Path = tuple[ReshardStep, ...]


def slices_sum(steps: Path) -> bool:
    """Whether a reshard path begins with a sum that the next step slices over all its axes."""
    return len(steps) > 1 and steps[0].kind == "all-reduce" and steps[1].kind == "slice" and steps[0].axes == steps[1].axes


def scattered(steps: Path, every: Iterable[Path], shape: tuple[int, ...], mesh: MeshShape, cluster: Cluster) -> Path:
    """A path of which `slices_sum` holds, as XLA emits it; `every`: those of all readers of the array, which has this shape."""
    whole, part, *rest = steps
    if not (cluster.reduce_scatter and part.after.divides(shape, mesh)) or any(path[:2] != steps[:2] for path in every):
        return steps
    seconds = collective.seconds("reduce-scatter", whole.bytes, whole.axes, mesh, cluster)
    return ReshardStep("reduce-scatter", whole.axes, whole.bytes, seconds, whole.before, part.after), *rest
