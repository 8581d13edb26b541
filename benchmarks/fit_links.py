"""The fit of links and collectives to measured collectives; `fit_rates.py` runs it.

`shardplan.mesh.collective` gives the seconds of each row of collective_rates.csv from a cluster's launch and links; their constants are
those of the least log errors (soft-L1 loss, 0.15). Not used: sends that several nodes pass on at once, fabrics that their owners call
degraded, and messages below 4 KiB. Rows of the source "autoparallel" have 150 us of dispatch in them, which is taken off.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from shardplan.mesh.cluster import AxisLink, Cluster
from shardplan.mesh.collective import seconds_on_link
from shardplan.mesh.device import Device, Link

KINDS = {
    "send-recv": "collective-permute",
    "collective-permute-mutual-pairs": "collective-permute",
    "collective-permute-ring": "collective-permute",
}
LEAST_BYTES = 4096
DISPATCH_S = {"autoparallel": 150e-6}
START = {
    "launch_s": 1.8e-5, "intra.latency_s": 1.2e-6, "intra.efficiency": 0.75,
    "intra.small_rate": 0.5, "intra.bulk_start_s": 2e-5, "intra.bulk_latency_s": 2e-6,
    "intra.ring_loss": 0.5, "intra.sum_loss": 1.0, "intra.reduce_bytes_per_s": 2.6e11,
    "intra.send_bytes_per_s": 9e10, "intra.send_latency_s": 4e-4,
    "inter.latency_s": 1e-5, "inter.efficiency": 0.86,
    "inter.small_rate": 0.5, "inter.bulk_start_s": 5e-5, "inter.bulk_latency_s": 1e-5,
}  # fmt: skip
"""Constants that are fitted, and from where the search starts; those between nodes and of the switch only where measured."""
NETWORK_PROTOCOL = {"inter.small_rate": 1.0, "inter.bulk_start_s": 0.0, "inter.bulk_latency_s": 0.0}
"""Of a network of which too few collectives are measured to tell two protocols apart."""

SWITCHES = ("h100", "b200")
"""GPUs whose NVLink switch adds up all-reduces."""


@dataclass(frozen=True)
class LinkFit:
    """Whose rows say what of a GPU's links.

    Attributes:
        gpus: names in the table.
        sources: of rows that count.
        free: constants that are fitted.
        base: GPU, fitted before, whose constants the others are.
        source: for people.
    """

    gpus: tuple[str, ...]
    sources: tuple[str, ...]
    free: tuple[str, ...]
    source: str
    base: str | None = None


FITS = {
    "h100": LinkFit(
        ("H100", "H200"),
        ("xla_coll", "xxrjun", "azure", "autoparallel", "dstack_nebius", "openshift_h200", "stas_torch", "stas_nccl"),
        tuple(START),
        "XLA's default collective performance table (Apache-2.0); nccl-tests by xxrjun (Apache-2.0), Azure (MIT), Nebius by dstack "
        "(MPL-2.0), OpenShift and stas00/ml-engineering (CC BY-SA 4.0); meta-pytorch/autoparallel (BSD-3); 1 to 32 nodes",
    ),
    "b200": LinkFit(
        ("B200",),
        ("xla_coll", "vultr", "stas_nccl", "stas_torch", "dstack_lambda", "dstack_gcp"),
        tuple(START),
        "XLA's default collective performance table (Apache-2.0); nccl-tests by Vultr, Lambda and GCP through dstack (MPL-2.0), and "
        "stas00/ml-engineering (CC BY-SA 4.0); 1, 2 and 4 nodes",
    ),
    "a100": LinkFit(
        ("A100-80GB", "A100-40GB"),
        ("azure", "stas_nccl", "oci_a100"),
        ("launch_s", "intra.efficiency", "intra.bulk_start_s", "inter.latency_s"),
        "all-reduces by Azure (MIT), stas00/ml-engineering (CC BY-SA 4.0) and Oracle, 1 and 2 nodes; the rest is as on the H100",
        base="h100",
    ),
}


def cluster(gpu: Mapping, constants: Mapping[str, float], switch: bool) -> Cluster:
    """A cluster of a GPU of gpus.json with these constants."""
    of = {level: {k.split(".")[1]: v for k, v in constants.items() if k.startswith(level)} for level in ("intra", "inter")}
    if not switch:
        of["intra"].pop("reduce_bytes_per_s", None)
    for level in of.values():
        level["small_rate"] = min(1.0, level["small_rate"])
    device = Device("", {"float32": 1.0}, 1.0, 1.0, 0.0)
    intra, inter = (Link(bytes_per_s=gpu[level]["bytes_per_s"], **of[level]) for level in ("intra", "inter"))
    return Cluster("", device, 8, intra, inter, launch_s=constants["launch_s"])


def measured(published: Path, fit: LinkFit) -> dict[tuple[str, AxisLink], np.ndarray]:
    """Kind and devices -> bytes and seconds, [rows, 2]."""
    found = defaultdict(list)
    with open(published / "collective_rates.csv") as f:
        for r in csv.DictReader(f):
            nodes, local, bytes_ = int(r["nodes"]), int(r["gpus_per_node"]), float(r["bytes"])
            kind = KINDS.get(r["collective"], r["collective"])
            fair = r["kind"] in ("measured", "fit") and "NVLS off" not in r["net"] and bytes_ >= LEAST_BYTES and nodes * local > 1
            odd = (kind == "collective-permute" and nodes > 2) or kind == "collective-permute-oneway-half"
            if fair and not odd and r["gpu"] in fit.gpus and r["source"] in fit.sources:
                found[kind, AxisLink(nodes * local, local, nodes)].append(
                    (bytes_, float(r["seconds"]) - DISPATCH_S.get(r["source"], 0.0))
                )
    return {key: np.array(rows) for key, rows in found.items()}


def errors(rows: Mapping[tuple[str, AxisLink], np.ndarray], machine: Cluster) -> np.ndarray:
    """Log of predicted over measured seconds of every row."""
    return np.log([seconds_on_link(kind, b, link, machine) / t for (kind, link), some in rows.items() for b, t in some])


def fitted(published: Path, gpus: Mapping) -> dict[str, dict]:
    """Per GPU, the constants, how well they agree with the rows, and the source."""
    out: dict[str, dict] = {}
    for name, fit in FITS.items():
        rows, switch = measured(published, fit), name in SWITCHES
        start = dict(out[fit.base]["constants"] if fit.base else START)
        start |= {key: value for key, value in NETWORK_PROTOCOL.items() if key not in fit.free}
        start["intra.reduce_bytes_per_s"] = gpus[name]["intra"].get("reduce_bytes_per_s", start["intra.reduce_bytes_per_s"])

        def off(logs, start=start, rows=rows, switch=switch, fit=fit, name=name):
            constants = start | dict(zip(fit.free, np.exp(logs).tolist(), strict=True))
            return errors(rows, cluster(gpus[name], constants, switch))

        found = least_squares(off, np.log([start[key] for key in fit.free]), loss="soft_l1", f_scale=0.15, diff_step=1e-3)
        constants = start | {key: float(f"{value:.4g}") for key, value in zip(fit.free, np.exp(found.x), strict=True)}
        constants |= {key: min(1.0, value) for key, value in constants.items() if key.endswith("small_rate")}
        if not switch:
            constants.pop("intra.reduce_bytes_per_s", None)
        of = np.abs(off(found.x))
        out[name] = {
            "constants": constants,
            "rows": len(of),
            "median_error": round(float(np.median(of)), 4),
            "p90_error": round(float(np.quantile(of, 0.9)), 4),
            "source": fit.source,
        }
    return out
