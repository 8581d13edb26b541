"""Fits the rates of GPUs to published measurements, and writes them to shardplan/mesh/gpu_rates.json.

    python benchmarks/fit_rates.py ../shared/published            fits and writes
    python benchmarks/fit_rates.py ../shared/published --check    says whether the file is what the fit gives

Matrix products: `shardplan.mesh.rates.compute_seconds` has four constants per GPU and dtype. Least squares of log seconds with a
soft-L1 loss (0.1), since some rows of the tables are of two kernels. Deterministic: same tables, same file.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import fit_attention
import fit_links
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shardplan.mesh.device import AttentionRate, ProductRate  # noqa: E402
from shardplan.mesh.fit_rates import CONSTANTS, START, fit_products, product_errors  # noqa: E402

FILE = ROOT / "shardplan" / "mesh" / "gpu_rates.json"
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float8": 1}
XLA = "XLA's default matmul performance table (openxla/xla, xla/service/gpu/model; Apache-2.0), medians of short runs"
AZURE = "Azure AI benchmarking guide (github.com/Azure/AI-benchmarking-guide, MIT), long runs on random data"
MAMF = "maximum achievable FLOP/s of stas00/ml-engineering (CC BY-SA 4.0)"


@dataclass(frozen=True)
class Fit:
    """Which measured products say what of one dtype on one GPU.

    Attributes:
        rows: whether a row of matmul_rates.csv counts.
        free: constants that are fitted; the others are those of `base`.
        base: (gpu, dtype) fitted before, whose constants are the start.
        source: of the rows.
        sustained: fraction that is left at the power limit, or the rows of long runs that say it (median of measured over fitted rate).
    """

    rows: Callable[[Mapping[str, str]], bool]
    free: tuple[str, ...]
    source: str
    base: tuple[str, str] | None = None
    sustained: float | Callable[[Mapping[str, str]], bool] = 1.0


def _xla(gpu: str, dtype: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda r: (r["gpu"], r["dtype"], r["source"], r["flag"]) == (gpu, dtype, "xla_mm", "")


IN_STEPS = {"h100": 0.655, "a100": 0.86, "h100-500w": 0.495}
"""GPU -> fraction of the rate of 16 bit products that is left in training steps: at it the published steps of MPT on H100 at 700 W
and on A100-80GB, and those of torchtitan on H100 at 500 W, have no bias (`published.py`). On the A100 the products were measured in
long runs, on the H100 in short ones."""


FLOAT8_IN_STEPS = 0.81
"""The same of products of 8 bits, measured in long runs. MPT's published steps in float8 are predicted 3 % too fast with it,
torchtitan's 3 % too slow."""


STEPS = {"h100": (57, 0.091), "a100": (58, 0.196), "a100-40gb": (57, 0.099), "h100-500w": (6, 0.091), "h200": (2, 0.091)}
"""GPU -> published steps that `published.py` predicts, and the 90th percentile of |log(predicted ÷ published)|; of the H200's two
that of the H100, whose rates it has."""


def _long_b200(*dtypes: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda r: r["gpu"] == "B200" and r["dtype"] in dtypes and r["source"] not in ("xla_mm", "stas_mamf") and int(r["k"]) >= 8192


FITS = {
    ("h100", "bfloat16"): Fit(_xla("H100", "bf16"), CONSTANTS, XLA, sustained=IN_STEPS["h100"]),
    ("h100", "float32"): Fit(_xla("H100", "tf32"), CONSTANTS, XLA),
    ("h100", "float8"): Fit(
        lambda r: r["gpu"] in ("H100", "H200") and r["dtype"].startswith("fp8") and r["source"].startswith(("azure", "stas")),
        ("efficiency", "fill", "edge"),
        f"{AZURE}; {MAMF}",
        base=("h100", "bfloat16"),
        sustained=FLOAT8_IN_STEPS,
    ),
    ("a100", "bfloat16"): Fit(
        lambda r: r["gpu"] == "A100-SXM",
        ("efficiency", "fill"),
        f"{AZURE}; {MAMF}; edge and latency as on the H100",
        base=("h100", "bfloat16"),
        sustained=IN_STEPS["a100"],
    ),
    ("b200", "bfloat16"): Fit(_xla("B200", "bf16"), CONSTANTS, XLA, sustained=_long_b200("bf16", "fp16")),
    ("b200", "float32"): Fit(_xla("B200", "tf32"), CONSTANTS, XLA),
    ("b200", "float8"): Fit(_xla("B200", "fp8_e4m3e4m3_bf16"), CONSTANTS, XLA, sustained=_long_b200("fp8", "mxfp8")),
}  # fmt: skip
ALIKE = {("a100", "float32"): ("a100", "bfloat16")}
"""Dtypes of which nothing was measured -> those whose constants they have."""


def fitted(fit: Fit, start: ProductRate, table: list[Mapping[str, str]], gpu: Mapping, dtype: str) -> ProductRate:
    """The rates that agree best with the rows of a table, and how well they do."""
    device = {
        "peak": gpu["flops"][dtype],
        "multiprocessors": gpu["sms"],
        "memory_rate": gpu["bytes_per_s"] * gpu["bytes_efficiency"],
        "itemsize": ELEMENT_BYTES[dtype],
    }
    best = fit_products(start, fit.free, *_measured(table, fit.rows), **device)
    sustained = fit.sustained
    if callable(sustained):
        sustained = round(float(np.exp(np.median(product_errors(best, *_measured(table, sustained), **device)))), 3)
    return replace(best, sustained=sustained, source=fit.source)


def _measured(table: list[Mapping[str, str]], counts: Callable[[Mapping[str, str]], bool]) -> tuple[np.ndarray, np.ndarray]:
    """Sizes [rows, 4] and seconds of the rows that count."""
    rows = [r for r in table if counts(r)]
    sizes = np.array([[float(r[name]) for name in ("b", "m", "n", "k")] for r in rows])
    return sizes, 2 * sizes.prod(axis=1) / np.array([float(r["tflops"]) * 1e12 for r in rows])


def products(published: Path) -> dict[tuple[str, str], ProductRate]:
    """The rates of every GPU and dtype."""
    with open(published / "matmul_rates.csv") as f:
        table = list(csv.DictReader(f))
    gpus = json.loads((FILE.parent / "gpus.json").read_text())["gpus"]
    found: dict[tuple[str, str], ProductRate] = {}
    for (gpu, dtype), fit in FITS.items():
        found[gpu, dtype] = fitted(fit, found[fit.base] if fit.base else START, table, gpus[gpu], dtype)
    for key, like in ALIKE.items():
        found[key] = replace(found[like], rows=0, source=f"not measured; as {like[1]}")
    return found


Rate = TypeVar("Rate", ProductRate, AttentionRate)


def links_of(found: Mapping) -> dict:
    """The constants of a fit of links, as the file has them."""
    out: dict = {"intra": {}, "inter": {}}
    for name, value in found["constants"].items():
        level, _, constant = name.rpartition(".")
        (out[level] if level else out)[constant] = value
    return out | {name: found[name] for name in ("rows", "median_error", "p90_error", "source")}


def at_power(gpu: str, like: str, dtype: str, rate: Rate) -> Rate:
    """A rate on a GPU like another one but for its power limit: what steps keep of 16 bit products says what they keep of others."""
    if gpu == like or gpu not in IN_STEPS or dtype == "float32":
        return rate
    return replace(rate, sustained=round(rate.sustained * IN_STEPS[gpu] / IN_STEPS[like], 4))


def text(
    found: dict[tuple[str, str], ProductRate], attention: Mapping[str, Mapping[str, AttentionRate]], links: Mapping[str, Mapping]
) -> str:
    """The file."""
    gpus = json.loads((FILE.parent / "gpus.json").read_text())["gpus"]
    out = {}
    for key, entry in gpus.items():
        if (of := entry.get("like", key)) not in links:
            continue
        rates = {dtype: asdict(at_power(key, of, dtype, rate)) for (gpu, dtype), rate in found.items() if gpu == of}
        like = f"as measured for the {of}; " if of != key else ""
        off = f"median |error| {links[of]['median_error']:.0%} over {links[of]['rows']} rows"
        sources = {
            "products": f"{like}fitted by benchmarks/fit_rates.py to what gpu_rates.json names per dtype",
            "attention": f"{like}fitted by benchmarks/fit_attention.py to what gpu_rates.json names",
            "launch_s, intra, inter": f"{like}all but line rates fitted by benchmarks/fit_rates.py, {off}: {links[of]['source']}",
        }
        kernels = {way: asdict(at_power(key, of, "bfloat16", rate)) for way, rate in attention[of].items()}
        steps = dict(zip(("rows", "p90_error"), STEPS[key], strict=True)) if key in STEPS else None
        out[key] = {"sources": sources, "products": rates, "attention": kernels, "links": links_of(links[of]), "steps": steps}
    return json.dumps(out, indent=2) + "\n"


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("published", type=Path, help="the folder of matmul_rates.csv")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(argv)
    found = products(options.published)
    gpus = json.loads((FILE.parent / "gpus.json").read_text())["gpus"]
    links, attention = fit_links.fitted(options.published, gpus), fit_attention.fitted(options.published, gpus)
    for (gpu, dtype), r in found.items():
        print(f"{gpu:5} {dtype:9} {r.rows:4} rows  median |error| {r.median_error:.3f}  p90 {r.p90_error:.3f}", end="  ")
        print(f"efficiency {r.efficiency:g} x {r.sustained:g}  fill {r.fill:g}  edge {r.edge:g}  latency {r.latency_s * 1e6:.3g} us")
    for gpu, ways in attention.items():
        for way, x in ways.items():
            print(f"{gpu:5} attention {way:8} {x.rows:4} rows  median |error| {x.median_error:.3f}  p90 {x.p90_error:.3f}", end="  ")
            print(f"heads of {x.head_sizes}: {x.efficiency} x {x.sustained:g}  short {x.short:g}, causal {x.short_causal:g}")
    for gpu, of in links.items():
        print(f"{gpu:5} collectives {of['rows']:4} rows  median |error| {of['median_error']:.3f}  p90 {of['p90_error']:.3f}")
    if options.check:
        sys.exit(0 if FILE.read_text() == text(found, attention, links) else f"{FILE.name} is not what the fit gives")
    FILE.write_text(text(found, attention, links))


if __name__ == "__main__":
    main()
