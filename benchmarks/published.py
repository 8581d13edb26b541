"""Predicted against published seconds of whole training steps.

    python benchmarks/published.py ../shared/published                    every row that the planner can express
    python benchmarks/published.py ../shared/published --only mpt-7b      some: parts of their ids
    python benchmarks/published.py ../shared/published --docs             and writes the table and the scatter plot into docs/
    python benchmarks/published.py ../shared/published --every 6          of MPT's 151 rows each sixth

A row of steps.csv becomes a transformer at its sizes (`published_models.py`), with its layout as pins: the state over the FSDP axis,
heads, hidden and vocabulary over the tensor axis, the batch over both data axes. The planner's search "recursive" chooses the
rest, without a memory limit; all steps ran, so the predicted peak should be at most the GPU's memory. Not expressed: pipelines,
context parallelism.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import measurements
import numpy as np
import published_models as models
from published_systems import saved_by, system_of

import shardplan
from shardplan import Cluster
from shardplan.mesh.rates import Attention, attention_rate
from shardplan.xla_model.compiler_options import LATENCY_HIDING, PIPELINED, PROFILE
from shardplan.xla_model.overlap_windows import OverlapWindows

GPUS = {"A100-40GB": "a100-40gb", "A100-80GB": "a100", "H100-80GB": "h100", "H100-96GB HBM2e 500W": "h100-500w", "H200": "h200"}
FAMILIES = {"H100-80GB": "H100", "H100-96GB HBM2e 500W": "H100 of 500 W"}
NETWORKS = {"1600 Gbps RoCE": "1600G-roce", "400 Gbps per node": "400G", "800 Gbps per node": "800G"}
"""Start of a row's network -> what follows the preset's name in a cluster's."""
HEADS = {1.7: 24, 3.6: 32, 7.5: 32, 18.4: 48}
"""Parameters in units of 10^9 -> heads of the models of arXiv:2104.04473, table 1, where the row has none."""
FITTED = ("MPT on H100", "MPT float8 on H100", "MPT on A100-80GB", "torchtitan on H100 of 500 W")
"""Families that `MPT_ATTENTION` and each preset's fraction of the rate of products that steps reach were fitted to: A100, H100, H100 of
500 W, and float8."""
MPT_ATTENTION = 1.9
"""How much longer than FlashAttention-2 the attention kernel of the MPT rows takes: Triton's, with a bias per key, without ALiBi."""
ENOUGH_BYTES = 1e13
HEAD_FITTING = ("steps that ran", "rows", "predicted to fit", "median of peak ÷ memory", "largest", "peak ÷ published memory, median",
                "compute blocks again", "predicted not to fit otherwise")  # fmt: skip
HEAD_LEFT = "memory left ÷ a block's weights in 16 bits", "rows", "median error", "lowest", "below −10 %"
NEAR_TIE = 0.02
"""Logarithm of the ratio of two published steps below which they have no order."""
DATA, SPLIT = ("dp", "fsdp"), ("tp", "pp", "cp", "ep", "zero")
"""Columns that say how a row's step was laid out. Those that differ only in numbers of the first two are one layout."""
DEPTHS = 6, 8
"""Layers of the two models that a deeper one is extrapolated from. From fewer, seconds of steps that expose collectives are up to 3 %
off, and the peak may be where embeddings are, not layers."""


@dataclass(frozen=True)
class Row:
    """A published step and its prediction, in seconds."""

    id: str
    family: str
    gpus: int
    params: float
    published_s: float
    predicted_s: float
    low_s: float
    high_s: float
    hidden_s: float
    parts: Mapping[str, float]
    peak_bytes: float
    gpu_bytes: float
    published_bytes: float  # that were reserved; 0 if not stated
    kept_peak_bytes: float = 0.0  # of a step that computes whole blocks again: the peak if it did not; 0 of others

    @property
    def error(self) -> float:
        """How much longer than published the prediction is, as a fraction."""
        return self.predicted_s / self.published_s - 1

    @property
    def within(self) -> bool:
        """Whether the published seconds are in the range of the predicted ones."""
        return self.low_s <= self.published_s <= self.high_s

    @property
    def range(self) -> float:
        """How far the range reaches to either side, as a fraction of the prediction."""
        return (self.high_s - self.low_s) / 2 / self.predicted_s

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is at most the GPU's memory; all of the steps ran."""
        return self.peak_bytes <= self.gpu_bytes


def gpu_of(row: Mapping[str, str]) -> str | None:
    """The cluster preset of a row's GPU."""
    return next((preset for name, preset in GPUS.items() if row["gpu"].startswith(name)), None)


def expressible(row: Mapping[str, str]) -> bool:
    """Whether the planner has all that a row needs."""
    whole = all(int(row[name] or 1) == 1 for name in ("pp", "cp", "ep")) and row["plannable"] != "pipeline"
    return whole and gpu_of(row) is not None and bool(row["layers"])


def family(row: Mapping[str, str]) -> str:
    """System and GPU."""
    system = "MPT" if row["model"].startswith("MPT") else row["framework"].split(" (")[0]
    gpu = next(name for name in GPUS if row["gpu"].startswith(name))
    return f"{system}{' float8' if 'fp8' in row['precision'] else ''} on {FAMILIES.get(gpu, gpu)}"


def shape_of(row: Mapping[str, str]) -> models.Shape:
    """The sizes of a row's model and batch."""
    number = {name: int(row[name] or 0) for name in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab", "seq", "gbs")}
    heads = number["heads"] or HEADS[round(float(row["params"]) / 1e9, 1)]
    system, (saved, one_of) = system_of(row), saved_by(row)
    return models.Shape(
        layers=number["layers"],
        width=number["d_model"],
        heads=heads,
        kv_heads=number["kv_heads"] or heads,
        hidden=number["d_ff"],
        gated=row["gated"] == "swiglu",
        vocab=number["vocab"],
        tied=row["tied"].startswith("yes"),
        seq=number["seq"],
        batch=number["gbs"],
        accum=int(row["accum"] or 1),
        saved=saved,
        recompute_one_of=one_of,
        compute_dtype="float16" if row["precision"] == "fp16" else "bfloat16",
        flash=system.attention != "unfused",
        fused_softmax=system.fused_softmax,
        dropout=system.dropout,
        one_hot=system.one_hot,
        sequence_parallel=system.sequence_parallel,
        float8="" if "fp8" not in row["precision"] else "dynamic" if row["framework"] == "torchtitan" else "delayed",
    )


def mesh_of(row: Mapping[str, str]) -> dict[str, int]:
    """Axes from the outermost to the innermost; an FSDP axis that does not divide the width is rounded up to a power of two."""
    sizes = {"data": int(row["dp"] or 1), "fsdp": int(row["fsdp"] or 1), "tensor": int(row["tp"] or 1)}
    if int(row["d_model"]) % sizes["fsdp"]:
        sizes["fsdp"] = 1 << (sizes["fsdp"] - 1).bit_length()
    return sizes


def cluster_of(row: Mapping[str, str]) -> Cluster:
    """The preset of a row's GPUs, with its network."""
    network = next((word for text, word in NETWORKS.items() if row["inter"].startswith(text)), None)
    return Cluster.preset(f"{gpu_of(row)}@{network}" if network else gpu_of(row) or "")


def compiler_options(row: Mapping[str, str], shape: models.Shape, sizes: Mapping[str, int]) -> dict[str, int | bool | str]:
    """One collective per block and kind, hidden behind compute, as FSDP does. XLA counts bytes of results.

    Nothing is pipelined across microbatches. PyTorch's order is that of XLA with a profile of the step; its name says nothing.
    """
    block = models.block_bytes(shape) // sizes["tensor"]
    bytes_ = {"all_gather": block, "all_reduce": block, "reduce_scatter": block // (sizes["fsdp"] * sizes["data"])}
    combined = {f"xla_gpu_{kind}_combine_threshold_bytes": most for kind, most in bytes_.items()}
    order = {LATENCY_HIDING: True} if system_of(row).on_jax else {PROFILE: "measured"}
    return combined | order | dict.fromkeys(PIPELINED.values(), False)


def predicted(row: Mapping[str, str]) -> Row:
    """The row's step, and its peak if it kept what it computes again."""
    shape = shape_of(row)
    found = extrapolated(row, shape)
    return found if shape.saved != () else replace(found, kept_peak_bytes=extrapolated(row, replace(shape, saved=None)).peak_bytes)


def extrapolated(row: Mapping[str, str], shape: models.Shape) -> Row:
    """From two steps with fewer layers: seconds and bytes are linear in them."""
    depths = (shape.recompute_one_of, 2 * shape.recompute_one_of) if shape.recompute_one_of > 1 else DEPTHS
    shallow, deeper = (planned(row, replace(shape, layers=depth)) for depth in depths)
    times = (shape.layers - depths[0]) / (depths[1] - depths[0])

    def linear(a: float, b: float) -> float:
        return a + times * (b - a)

    parts = {name: linear(seconds, deeper.parts[name]) for name, seconds in shallow.parts.items()}
    names = ("params", "predicted_s", "low_s", "high_s", "hidden_s", "peak_bytes")
    found = {name: linear(getattr(shallow, name), getattr(deeper, name)) for name in names}
    return replace(shallow, **found, parts=parts)


def attention_prices(row: Mapping[str, str], shape: models.Shape, cluster: Cluster) -> tuple[float, float]:
    """Flops of a large product that take as long as a flop of the forward attention kernel, and as one of the backward kernel."""
    of_products, head = cluster.device.flops_per_s(shape.compute_dtype), shape.width // shape.heads
    if system_of(row).attention == "cudnn":
        kernels = (Attention(head, shape.seq, True, backward) for backward in (False, True))
        forward, backward = (of_products / attention_rate(cluster.device, shape.compute_dtype, kernel) for kernel in kernels)
        return forward, backward
    gpu = "A100" if row["gpu"].startswith("A100") else "H100"
    rate = models.flash_rate(gpu, head, shape.seq) / (MPT_ATTENTION if family(row).startswith("MPT") else 1)
    rate *= of_products / Cluster.preset(gpu.lower()).device.flops_per_s(shape.compute_dtype)  # by the GPU's power limit
    return of_products / rate, of_products / rate


def planned(row: Mapping[str, str], shape: models.Shape) -> Row:
    """Plans a step of a row's layout."""
    sizes, cluster = mesh_of(row), cluster_of(row)
    shape = replace(shape, batch=shape.batch * sizes["fsdp"] // int(row["fsdp"] or 1))
    models.register_kernels(*attention_prices(row, shape, cluster))
    zero = 3 if sizes["fsdp"] > 1 else 1 if "ZeRO-1" in row["zero"] else 0
    axes = {name: n for name, n in sizes.items() if n > 1} or {"data": 1}
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    step, state, batch, wanted = models.build(shape, mesh, sizes, zero)
    auto = shardplan.auto(
        mesh,
        cluster=cluster,
        donate_argnums=0,
        pins=wanted,
        memory=ENOUGH_BYTES,
        search="recursive",
        overlap=system_of(row).hides,
        compiler_options=compiler_options(row, shape, sizes),
    )
    plan = auto(step).plan(state, batch)
    params = sum(x.size for x in jax.tree.leaves(state["params"]))
    total, low, high, hidden = (plan.seconds[name] for name in ("total", "low", "high", "hidden"))
    peak = plan.memory_report.peak if system_of(row).on_jax else in_program_order(plan)
    memory, reserved = float(cluster.device.memory_bytes), float(row["mem_gib"] or 0) * 2**30
    known = row["id"], family(row), int(row["gpus"]), params, float(row["step_s"])
    return Row(*known, total, low, high, hidden, parts_of(plan), peak, memory, reserved)


def in_program_order(plan: shardplan.Plan) -> float:
    """Bytes per device at the peak, if ops run in the order of the program, as PyTorch runs them.

    XLA's scheduler computes gradients as late as their collectives are hidden, and keeps what they are computed from until then.
    """
    planned = plan.context.planned
    in_order = replace(planned.network.prices, given=OverlapWindows())
    return replace(planned.network, prices=in_order).peak(planned.solution.states)


def parts_of(plan: shardplan.Plan) -> dict[str, float]:
    """Seconds of products, of attention, of other kernels and of collectives that compute waits for; together those of the step."""
    planned = plan.context.planned
    parts = dict.fromkeys(("products", "attention", "other", "exposed"), 0.0)
    for op, seconds, chosen in zip(planned.graph.ops, planned.space.kernel_seconds, planned.strategies, strict=True):
        kind = "attention" if op.primitive.startswith("published_flash") else "products" if op.traits.matmul else "other"
        parts[kind] += float(seconds[chosen]) * op.runs
    parts["exposed"] = plan.seconds["communication"] - plan.seconds["hidden"]
    parts["other"] = plan.seconds["total"] - sum(x for name, x in parts.items() if name != "other")
    return parts


def kind_of(family_: str) -> str:
    """Whether constants were fitted to a family, to others of its system, or to none of it."""
    if family_ in FITTED:
        return "fitted"
    return "other GPU or dtype" if family_.split()[0] in {name.split()[0] for name in FITTED} else "held out"


def summary(rows: Iterable[Row]) -> tuple[int, float, float, float]:
    """(rows, median and 90th percentile of |error|, median error)."""
    errors = np.array([r.error for r in rows])
    return len(errors), float(np.median(abs(errors))), float(np.quantile(abs(errors), 0.9)), float(np.median(errors))


def by_size(rows: Sequence[Row]) -> list[tuple]:
    """(size, rows, median error) for ranges of GPUs and of parameters."""
    out = []
    for unit, of, edges in (
        ("GPUs", lambda r: r.gpus, (1, 9, 33, 129, 1025)),
        ("10⁹ parameters", lambda r: r.params / 1e9, (0, 0.2, 0.8, 2, 5, 10, 40, 100)),
    ):
        for low, high in itertools.pairwise(edges):
            some = [r for r in rows if low <= of(r) < high]
            if some:
                mean = float(np.mean([r.error for r in some]))
                out.append((f"{low} to below {high} {unit}", len(some), f"{summary(some)[3]:+.1%}", f"{mean:+.1%}"))
    return out


def by_memory_left(rows: Iterable[Row], table: Iterable[Mapping[str, str]]) -> list[tuple]:
    """(memory that the predicted peak leaves, rows, median and lowest error, how many are below -10 %) of FSDP on PyTorch.

    In units of the weights of a block: FSDP allocates and frees these, and their gradients, whole.
    """
    known, lefts = {r.id: r for r in rows}, {}
    for row in table:
        if row["id"] in known and mesh_of(row)["fsdp"] > 1 and not system_of(row).on_jax:
            one, block = known[row["id"]], models.block_bytes(shape_of(row)) // mesh_of(row)["tensor"]
            lefts[one.id] = (one.gpu_bytes - one.peak_bytes) / block
    out = []
    for low, high in itertools.pairwise((0, 16, 32, 64, math.inf)):
        errors = [known[name].error for name, left in lefts.items() if low <= left < high]
        if errors:
            below = sum(x < -0.1 for x in errors)
            label = f"{low} and more" if high == math.inf else f"{low} to below {high}"
            out.append((label, len(errors), f"{np.median(errors):+.1%}", f"{min(errors):+.1%}", below))
    return out


def layout_of(row: Mapping[str, str]) -> tuple:
    """How a row's step was laid out, whatever its number of GPUs."""
    return *(int(row[name] or 1) > 1 for name in DATA), *(row[name] for name in SPLIT)


def layouts(rows: Iterable[Row], table: Sequence[Mapping[str, str]], scales: bool = False) -> list[tuple]:
    """Of groups of rows that time one model in several layouts, or in one at several `scales`: (group, GPUs, pairs in order, of how
    many, largest error of a ratio).

    A pair whose published seconds differ by less than 2 % has no order. A ratio's error is that to the group's median.
    """
    known, splits = {r.id: r for r in rows}, {row["id"]: layout_of(row) for row in table}
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in table:
        if row["id"] in known:
            same = ("framework", "model", "gpu", "precision", "seq", "micro", "accum", "remat")
            key = *(row[name] for name in same), splits[row["id"]] if scales else ()
            groups[key].append(known[row["id"]])
    out = []
    for key, some in groups.items():
        several = itertools.combinations(some, 2)
        others = [(a, b) for a, b in several if (a.gpus != b.gpus if scales else splits[a.id] != splits[b.id])]
        if not others:
            continue
        pairs = [(a, b) for a, b in others if abs(math.log(a.published_s / b.published_s)) > NEAR_TIE]
        right = sum((a.published_s < b.published_s) == (a.predicted_s < b.predicted_s) for a, b in pairs)
        logs = [math.log(1 + r.error) for r in some]
        off = max(abs(x - float(np.median(logs))) for x in logs)
        gpus = " ".join(str(r.gpus) for r in some)
        out.append((f"{key[1]} on {key[2].split(' ')[0]}, {key[4]} tokens", gpus, f"{right} of {len(pairs)}", f"{math.expm1(off):.1%}"))
    return out


def fitting(groups: Mapping[str, Sequence[Row]]) -> list[tuple]:
    """Of steps that all ran: (family, rows, how many are predicted to fit, median and largest of peak ÷ memory, peak ÷ published, of
    how many blocks are computed again, and how many of these are predicted not to fit otherwise)."""
    out = []
    for name, rows in groups.items():
        shares = [r.peak_bytes / r.gpu_bytes for r in rows]
        stated = [r.peak_bytes / r.published_bytes for r in rows if r.published_bytes]
        of_published = f"{np.median(stated):.2f}" if stated else ""
        again = [r for r in rows if r.kept_peak_bytes]
        needed = (len(again), sum(r.kept_peak_bytes > r.gpu_bytes for r in again)) if again else ("", "")
        out.append(
            (name, len(rows), sum(r.fits for r in rows), f"{np.median(shares):.2f}", f"{max(shares):.2f}", of_published, *needed)
        )
    return out


def write_docs(groups: Mapping[str, list[Row]], table: Sequence[Mapping[str, str]], sampled: str) -> None:
    """The section of docs/measurements.md, and the scatter plot beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name, rows in groups.items():
        seconds = [r.published_s for r in rows], [r.predicted_s / r.published_s for r in rows]
        axes.scatter(*seconds, s=18, marker="o" if name in FITTED else "^", label=name)
    axes.axhline(1, color="grey", lw=0.8)
    axes.set(xscale="log", xlabel="published seconds of a step", ylabel="predicted / published", ylim=(0.4, 1.6))
    axes.legend(fontsize=6, ncols=3, loc="lower right")
    figure.savefig(Path(__file__).parent.parent / "docs" / "published.png", dpi=110, metadata={"Software": None})
    out = []
    for name, rows in groups.items():
        n, median, p90, bias = summary(rows)
        off = sum(abs(r.error) > 0.2 for r in rows)
        reach = float(np.median([r.range for r in rows]))
        errors = (f"{median:.1%}", f"{p90:.1%}", f"{bias:+.1%}", off, f"±{reach:.0%}", sum(r.within for r in rows))
        out.append((name, kind_of(name), n, *errors))
    head = ("system and GPU", "", "rows", "median of the error", "90th percentile", "bias", "off by more than 20 %")
    head = (*head, "range of the prediction, median", "published within it")
    every = [r for rows in groups.values() for r in rows]
    head_layouts = ("one model in several layouts", "GPUs", "pairs in order", "largest error of a ratio")
    head_scales = ("one model and layout on several numbers of GPUs", *head_layouts[1:])
    sections = [
        measurements.table(head, out),
        measurements.table(("size", "rows", "median error", "mean error"), by_size(every)),
        measurements.table(head_layouts, layouts(every, table)),
        measurements.table(head_scales, layouts(every, table, scales=True)),
        measurements.table(HEAD_FITTING, fitting(groups)),
        measurements.table(HEAD_LEFT, by_memory_left(every, table)),
    ]
    text = "\n\n".join(sections)
    measurements.write("published", f"python benchmarks/published.py PUBLISHED{sampled} --docs", text)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("published", type=Path, help="the folder of steps.csv")
    parser.add_argument("--docs", action="store_true", help="write the table and the plot into docs/")
    parser.add_argument("--json", type=Path, help="where to store the rows; those that it has are not predicted again")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of the 151 MPT rows each N-th; all others")
    parser.add_argument("--only", help="parts of ids, separated by commas")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    with open(options.published / "steps.csv") as f:
        table = [r for r in csv.DictReader(f) if expressible(r)]
    mpt = [r for r in table if family(r).startswith("MPT")]
    table = [r for r in table if not family(r).startswith("MPT")] + mpt[:: options.every]
    if options.only:
        table = [r for r in table if any(part in r["id"] for part in options.only.split(","))]
    stored = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    known = {values["id"]: Row(**values) for values in stored}
    found: list[Row] = []
    groups: dict[str, list[Row]] = defaultdict(list)
    for given in table:
        row = known[given["id"]] = known.get(given["id"]) or predicted(given)
        found.append(row)
        groups[row.family].append(row)
        parts = "  ".join(f"{name} {seconds / row.predicted_s:.0%}" for name, seconds in row.parts.items())
        print(f"{row.id:60} {row.published_s:9.4f} {row.predicted_s:9.4f} {1 + row.error:6.2f}  {parts}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in known.values()]))
    if options.docs:
        write_docs(groups, table, f" --every {options.every}" if options.every > 1 else "")
    kinds: dict[str, list[Row]] = defaultdict(list)
    for r in found:
        kinds[kind_of(r.family)].append(r)
    not_fitted = [r for r in found if r.family not in FITTED]
    for name, some in {**groups, **kinds, "all but those fitted": not_fitted, "all": found}.items():
        if not some:
            continue
        n, median, p90, bias = summary(some)
        errors = f"median |error| {median:6.1%}  p90 {p90:6.1%}  bias {bias:+6.1%}"
        print(f"{name:44} {n:4} rows  {errors}  within the range {sum(r.within for r in some)}")
    for r in found:
        if not r.fits:
            print(f"{r.id} ran, but is predicted to exceed the memory by {r.peak_bytes / r.gpu_bytes - 1:.0%}")
    tables = [by_size(found), layouts(found, table), layouts(found, table, scales=True), fitting(groups), by_memory_left(found, table)]
    for line in itertools.chain.from_iterable(tables):
        print("  ".join(str(x) for x in line))


if __name__ == "__main__":
    main()
