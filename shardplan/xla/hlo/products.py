"""Matrix products and convolutions of a compiled step, and their flops, read out of the HLO text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardplan.ir.windows import window_hits
from shardplan.mesh.rates import Attention, convolution_sizes
from shardplan.xla.hlo.text import Frame, HasSource, HloArray, HloInstruction, HloModule, origin, read

Sizes = tuple[float, float, float, float]


@dataclass(frozen=True)
class HloProduct(HasSource):
    """One matrix product or convolution of the compiled program, on one device.

    Attributes:
        kind: 'dot', 'convolution', 'attention' or 'ragged-dot'.
        dtype: of its left operand; it decides the peak rate.
        flops: of one run; a multiply-add is two.
        sizes: [batch, rows, columns, contracted] of a 'dot', and of a 'convolution' as a product; None of other kinds.
        attention: what decides how fast an 'attention' is; None of other kinds.
        rematerialised: whether XLA computes it a second time on its own, to save memory.
    """

    kind: str
    name: str
    result: HloArray
    dtype: str
    flops: float
    runs: float
    computation: str
    op_name: str
    stack: tuple[Frame, ...] = ()
    rematerialised: bool = False
    sizes: Sizes | None = None
    attention: Attention | None = None

    @property
    def total_flops(self) -> float:
        """Flops of all runs in one step."""
        return self.flops * self.runs


REMATERIALISED = ".remat"
"""Part of the names of instructions that XLA's rematerialization made."""


def products(text: str | HloModule) -> tuple[HloProduct, ...]:
    """Every matrix product and convolution, those inside fusions and library calls too."""
    module, out = read(text), []
    repeated = {name for i in module if REMATERIALISED in i.name for names in i.callees.values() for name in names}
    for i in module:
        is_product = i.opcode in ("dot", "convolution", "ragged-dot") or (i.opcode == "custom-call" and "__cu" in i.attributes)
        runs = module.runs[i.computation]
        if is_product and runs and (found := _flops(i)):
            kind, n, dtype, sizes = found
            again = REMATERIALISED in i.name or i.computation in repeated
            product = HloProduct(kind, i.name, i.arrays[0], dtype, n, runs, i.computation, *origin(module, i), again)
            out.append(replace(product, attention=sizes) if kind == "attention" else replace(product, sizes=sizes))
    return tuple(out)


def flops(text: str | HloModule) -> float:
    """Floating-point operations of one step on one device, in matrix products and convolutions (2mnk for m,k x k,n)."""
    return float(sum(p.total_flops for p in products(text)))


def _flops(i: HloInstruction) -> tuple[str, float, str, Sizes | Attention | None] | None:
    """(kind, flops of one run, dtype of the left operand, sizes if known); None for a library call that is no product."""
    operands = [o.arrays[0] for o in i.operands if o.arrays]
    out = i.arrays[0]
    if len(operands) < 2:
        return None
    left, right = operands[:2]
    if i.opcode == "dot":
        return _dot(left, out, dims_of(i, "lhs_contracting_dims"), dims_of(i, "lhs_batch_dims"))
    if i.opcode == "convolution":
        return _convolution(i, "", left, right, out)
    if i.opcode == "ragged-dot":
        bound = {d for role in ("group", "contracting", "batch") for d in dims_of(i, f"rhs_{role}_dims")}
        free = (n for d, n in enumerate(right.shape) if d not in bound)
        return "ragged-dot", 2.0 * left.size * math.prod(free), left.dtype, None
    target = (i.attribute("custom_call_target") or "").strip('"')
    config = _config(i)
    if target.startswith("__cublas"):
        gemm = config.get("gemm_backend_config", config.get("grouped_gemm_backend_config", config))
        numbers = gemm.get("dot_dimension_numbers", {})
        contracting, batch = (map(int, numbers.get(f"lhs_{role}_dimensions", ())) for role in ("contracting", "batch"))
        return _dot(left, out, contracting, batch)
    if target.startswith("__cudnn$conv"):
        return _convolution(i, target, left, right, out)
    if target.startswith("__cudnn$fmha"):
        found = config.get("cudnn_fmha_backend_config", config)
        scores = [int(n) for n in found.get("intermediate_tensor_shape", {}).get("dimensions", ())]
        width, backward = min(left.shape[-1], right.shape[-1]), "Backward" in target
        causal = "CAUSAL" in str(found.get("mask_type", ""))
        flops = 2.0 * (5 if backward else 2) * math.prod(scores) * width * (0.5 if causal else 1.0)
        return "attention", flops, left.dtype, Attention(width, scores[-1] if scores else 1, causal, backward)
    return None


def _dot(left: HloArray, out: HloArray, contracting: Iterable[int], batch: Iterable[int]) -> tuple[str, float, str, Sizes]:
    k, b = (math.prod(left.shape[d] for d in dims) for dims in (contracting, batch))
    rows = left.size // max(1, b * k)
    return "dot", 2.0 * out.size * k, left.dtype, (b, rows, out.size // max(1, b * rows), k)


def dims_of(i: HloInstruction, attribute: str) -> list[int]:
    """The numbers of an attribute that lists dims."""
    return [int(d) for d in re.findall(r"\d+", i.attribute(attribute) or "")]


def _config(i: HloInstruction) -> dict:
    try:
        return json.loads(i.attribute("backend_config") or "{}")
    except ValueError:
        return {}


def _convolution(
    i: HloInstruction, target: str, left: HloArray, right: HloArray, out: HloArray
) -> tuple[str, float, str, Sizes | None] | None:
    """What `_flops` says of a convolution, or of a call of cuDNN, by its name."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attribute("dim_labels") or "")
    if not labels:
        return None
    image, kernel, result, filter_gradient = left, right, out, "BackwardFilter" in target
    if "BackwardInput" in target:
        image, result = out, left
    elif filter_gradient:
        kernel, result = out, right
    image_of, kernel_of, result_of = labels.groups()
    flops = _conv_flops(i, image, image_of, kernel, kernel_of, result, result_of)
    groups = max(int(i.attribute(f"{of}_group_count") or 1) for of in ("feature", "batch"))
    channels, features = kernel.shape[kernel_of.index("i")], kernel.shape[kernel_of.index("o")]
    if "BackwardInput" in target:
        channels, features = features // groups, channels * groups
    if not flops:
        return "convolution", flops, left.dtype, None
    window = [kernel.shape[n] for n, of in enumerate(kernel_of) if of.isdigit()]
    sizes = convolution_sizes(groups, out.size, features, flops, channels, left.bytes / left.size, filter_gradient, window)
    return "convolution", flops, left.dtype, sizes


def _conv_flops(
    i: HloInstruction, image: HloArray, image_of: str, kernel: HloArray, kernel_of: str, result: HloArray, result_of: str
) -> float:
    """2 x (multiplications with data, not padding), counted dim by dim as XLA's cost analysis counts them.

    `window={size=3x3 stride=2x2 pad=0_1x0_1 lhs_dilate=1x1 rhs_dilate=1x1}`, `dim_labels=b01f_01io->b01f`.
    """
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", i.attribute("window") or ""))

    spatial = sorted(c for c in image_of if c.isdigit())

    def per_dim(key: str, default: int) -> list[int]:
        return [int(n.split("_")[0]) for n in window[key].split("x")] if key in window else [default] * len(spatial)

    sizes = ([x.shape[of.index(d)] for d in spatial] for x, of in ((image, image_of), (kernel, kernel_of), (result, result_of)))
    steps = (per_dim(key, default) for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1)))
    hits = math.prod(map(window_hits, *sizes, *steps))
    features = kernel.shape[kernel_of.index("i")] * result.shape[result_of.index("f")]
    return 2.0 * hits * features * image.shape[image_of.index("b")] / int(i.attribute("batch_group_count") or 1)
