"""Predicted against published seconds of whole training steps.

    python benchmarks/published.py ../shared/published                    every row that the planner can express
    python benchmarks/published.py ../shared/published --only mpt-7b      some: parts of their ids
    python benchmarks/published.py ../shared/published --docs             and writes the table and the scatter plot into docs/

A row of steps.csv becomes a transformer at its sizes (`published_models.py`), with its layout as pins: the state over the FSDP axis,
heads, hidden and vocabulary over the tensor axis, the batch over both data axes. The planner's search "propagation" chooses the
rest, without a memory limit, since other frameworks keep other residuals than JAX. Not expressed: pipelines, context parallelism.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import measurements
import numpy as np
import published_models as models

import shardplan
from shardplan import Cluster

GPUS = {"A100-40GB": "a100-40gb", "A100-80GB": "a100", "H100-80GB": "h100", "H100-96GB HBM2e 500W": "h100-500w", "H200": "h200"}
FAMILIES = {"H100-80GB": "H100", "H100-96GB HBM2e 500W": "H100 of 500 W"}
NETWORKS = {"1600 Gbps RoCE": "1600G-roce", "400 Gbps per node": "400G", "800 Gbps per node": "800G"}
"""Start of a row's network -> what follows the preset's name in a cluster's."""
HEADS = {1.7: 24, 3.6: 32, 7.5: 32, 18.4: 48}
"""Parameters in units of 10^9 -> heads of the models of arXiv:2104.04473, table 1, where the row has none."""
FITTED = ("MPT on H100", "MPT float8 on H100", "MPT on A100-80GB", "torchtitan on H100 of 500 W")
"""Families that the fraction of the rate of products that steps reach, one per GPU, and the attention kernel of MPT were fitted to."""
MPT_ATTENTION = 1.8
"""How much longer than FlashAttention-2 the attention kernel of the MPT rows takes: Triton's, with ALiBi. Fitted to the same."""
ENOUGH_BYTES = 1e13
OPTIONS = {f"xla_gpu_{kind}_combine_threshold_bytes": 1 << 31 for kind in ("all_gather", "reduce_scatter", "all_reduce")} | {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
}
"""One collective per block and kind, started a block ahead, as FSDP does."""


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
    parts: Mapping[str, float]

    @property
    def error(self) -> float:
        """How much longer than published the prediction is, as a fraction."""
        return self.predicted_s / self.published_s - 1

    @property
    def within(self) -> bool:
        """Whether the published seconds are in the range of the predicted ones."""
        return self.low_s <= self.published_s <= self.high_s


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
    remat = (
        "full"
        if row["remat"].startswith(("every", "full"))
        else "selective"
        if row["remat"].startswith(("selective", "per-op", "minimal"))
        else "none"
    )
    plain = row["framework"].startswith(("Megatron-LM", "Pax")) and "TE" not in row["precision"]
    if "Megatron" in row["framework"]:
        remat = remat if remat == "full" else "none"  # selective is attention's: flash attention does it
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
        remat=remat,
        param_dtype="bfloat16" if "PURE" in row["param_dtype"] else "float32",
        compute_dtype="float16" if row["precision"] == "fp16" else "bfloat16",
        flash=not plain,
        float8="" if "fp8" not in row["precision"] else "dynamic" if row["framework"] == "torchtitan" else "delayed",
        sequence_parallel=row["framework"].startswith(("torchtitan", "Megatron-Core", "Megatron-LM 2022")),
    )


def mesh_of(row: Mapping[str, str]) -> dict[str, int]:
    """Axes from the outermost to the innermost; a size that no dim of the model divides is rounded up to a power of two."""
    sizes = {"data": int(row["dp"] or 1), "fsdp": int(row["fsdp"] or 1), "tensor": int(row["tp"] or 1)}
    if int(row["d_model"]) % sizes["fsdp"]:
        sizes["fsdp"] = 1 << (sizes["fsdp"] - 1).bit_length()
    return sizes


def cluster_of(row: Mapping[str, str]) -> Cluster:
    """The preset of a row's GPUs, with its network."""
    network = next((word for text, word in NETWORKS.items() if row["inter"].startswith(text)), None)
    return Cluster.preset(f"{gpu_of(row)}@{network}" if network else gpu_of(row) or "")


def predicted(row: Mapping[str, str]) -> Row:
    """Plans a row's step."""
    shape, sizes, cluster = shape_of(row), mesh_of(row), cluster_of(row)
    shape = replace(shape, batch=shape.batch * sizes["fsdp"] // int(row["fsdp"] or 1))
    gpu = "A100" if row["gpu"].startswith("A100") else "H100"
    rate = models.attention_rate(gpu, shape.width // shape.heads, shape.seq) / (MPT_ATTENTION if family(row).startswith("MPT") else 1)
    of_products = cluster.device.flops_per_s(shape.compute_dtype)
    rate *= of_products / Cluster.preset(gpu.lower()).device.flops_per_s(shape.compute_dtype)  # what its power limit leaves
    models.price_attention(of_products / rate)
    zero = 3 if sizes["fsdp"] > 1 else 1 if "ZeRO-1" in row["zero"] else 0
    axes = {name: n for name, n in sizes.items() if n > 1} or {"data": 1}
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    step, state, batch = models.build(shape, mesh)
    wanted = models.pins(state, sizes, zero)
    auto = shardplan.auto(
        mesh, cluster=cluster, donate_argnums=0, pins=wanted, memory=ENOUGH_BYTES, search="propagation", compiler_options=OPTIONS
    )
    plan = auto(step).plan(state, batch)
    params = sum(x.size for x in jax.tree.leaves(state["params"]))
    seconds = (plan.seconds[name] for name in ("total", "low", "high"))
    return Row(row["id"], family(row), int(row["gpus"]), params, float(row["step_s"]), *seconds, parts_of(plan))


def parts_of(plan: shardplan.Plan) -> dict[str, float]:
    """Seconds of products, of attention, of other kernels and of collectives that compute waits for; together those of the step."""
    planned = plan.context.planned
    parts = dict.fromkeys(("products", "attention", "other", "exposed"), 0.0)
    for op, seconds, chosen in zip(planned.graph.ops, planned.space.seconds, planned.strategies, strict=True):
        kind = "attention" if op.primitive.startswith("published_flash") else "products" if op.traits.matmul else "other"
        parts[kind] += float(seconds[chosen]) * op.runs
    parts["exposed"] = plan.seconds["communication"] - plan.seconds["hidden"]
    parts["other"] = plan.seconds["total"] - sum(x for name, x in parts.items() if name != "other")
    return parts


def summary(rows: Iterable[Row]) -> tuple[int, float, float, float]:
    """(rows, median and 90th percentile of |error|, median error)."""
    errors = np.array([r.error for r in rows])
    return len(errors), float(np.median(abs(errors))), float(np.quantile(abs(errors), 0.9)), float(np.median(errors))


def write_docs(groups: Mapping[str, list[Row]]) -> None:
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
    axes.legend(fontsize=7)
    figure.savefig(Path(__file__).parent.parent / "docs" / "published.png", dpi=110, metadata={"Software": None})
    out = []
    for name, rows in groups.items():
        n, median, p90, bias = summary(rows)
        off = sum(abs(r.error) > 0.2 for r in rows)
        errors = (f"{median:.1%}", f"{p90:.1%}", f"{bias:+.1%}", off, sum(r.within for r in rows))
        out.append((name, "fitted" if name in FITTED else "held out", n, *errors))
    head = ("system and GPU", "", "rows", "median of the error", "90th percentile", "bias", "off by more than 20 %", "within the range")
    measurements.write("published", "python benchmarks/published.py PUBLISHED --docs", measurements.table(head, out))


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("published", type=Path, help="the folder of steps.csv")
    parser.add_argument("--docs", action="store_true", help="write the table and the plot into docs/")
    parser.add_argument("--json", type=Path, help="where to store the rows")
    parser.add_argument("--only", help="parts of ids, separated by commas")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", shardplan.ShardingWarning)
    with open(options.published / "steps.csv") as f:
        table = [r for r in csv.DictReader(f) if expressible(r)]
    if options.only:
        table = [r for r in table if any(part in r["id"] for part in options.only.split(","))]
    found: list[Row] = []
    groups: dict[str, list[Row]] = defaultdict(list)
    for given in table:
        row = predicted(given)
        found.append(row)
        groups[row.family].append(row)
        parts = "  ".join(f"{name} {seconds / row.predicted_s:.0%}" for name, seconds in row.parts.items())
        print(f"{row.id:60} {row.published_s:9.4f} {row.predicted_s:9.4f} {1 + row.error:6.2f}  {parts}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    if options.docs:
        write_docs(groups)
    for name, some in {**groups, "all": found}.items():
        n, median, p90, bias = summary(some)
        errors = f"median |error| {median:6.1%}  p90 {p90:6.1%}  bias {bias:+6.1%}"
        print(f"{name:44} {n:4} rows  {errors}  within the range {sum(r.within for r in some)}")


if __name__ == "__main__":
    main()
