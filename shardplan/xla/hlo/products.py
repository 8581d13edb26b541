"""Matrix products and convolutions of a compiled step, and their flops, read out of the HLO text.

>>> flops(compiled.as_text())
805306368.0
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from shardplan.ir.windows import window_hits
from shardplan.xla.hlo.text import Frame, HloArray, HloInstruction, HloModule, origin, read, source_of


@dataclass(frozen=True)
class HloProduct:
    """One matrix product or convolution of the compiled program, on one device.

    Attributes:
        kind: 'dot', 'convolution', 'attention' or 'ragged-dot'.
        result: its result on one device.
        dtype: of its left operand; it decides the peak rate.
        flops: of one run; a multiply-add is two.
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

    @property
    def total_flops(self) -> float:
        """Flops of all runs in one step."""
        return self.flops * self.runs

    @property
    def source(self) -> str | None:
        """'file:line' in the user's own code, innermost; None when XLA kept none."""
        return source_of(self.stack)


REMATERIALISED = ".remat"
"""Part of the names of instructions that XLA's rematerialization made."""


def products(text: str | HloModule) -> tuple[HloProduct, ...]:
    """Every matrix product and convolution, those inside fusions and library calls too."""
    module = read(text)
    repeated = {
        c
        for body in module.computations.values()
        for i in body
        if REMATERIALISED in i.name
        for called in i.callees.values()
        for c in called
    }
    out = []
    for computation, body in module.computations.items():
        if not module.runs[computation]:
            continue
        for i in body:
            if i.opcode in ("dot", "convolution", "ragged-dot") or (i.opcode == "custom-call" and "__cu" in i.attributes):
                found = _flops(module, i)
                if found:
                    kind, n, dtype = found
                    op_name, stack = origin(module, i)
                    twice, runs = REMATERIALISED in i.name or computation in repeated, module.runs[computation]
                    out.append(HloProduct(kind, i.name, i.arrays[0], dtype, n, runs, computation, op_name, stack, twice))
    return tuple(out)


def flops(text: str | HloModule) -> float:
    """Floating-point operations of one step on one device, in matrix products and convolutions (2mnk for m,k x k,n)."""
    return float(sum(p.total_flops for p in products(text)))


def _flops(module: HloModule, i: HloInstruction) -> tuple[str, float, str] | None:
    """(kind, flops of one run, dtype of the left operand); None for a library call that is no product."""
    operands = [o.arrays[0] for o in module.operands(i) if o.arrays]
    out = i.arrays[0]
    if len(operands) < 2:
        return None
    left, right = operands[:2]
    if i.opcode == "dot":
        contracted = [left.shape[int(d)] for d in re.findall(r"\d+", i.attribute("lhs_contracting_dims") or "")]
        return "dot", 2.0 * out.size * math.prod(contracted), left.dtype
    if i.opcode == "convolution":
        return "convolution", _conv_flops(i, left, right, out), left.dtype
    if i.opcode == "ragged-dot":
        group = {int(d) for d in re.findall(r"\d+", i.attribute("rhs_group_dims") or "")}
        contracted = {int(d) for d in re.findall(r"\d+", i.attribute("rhs_contracting_dims") or "")}
        batch = {int(d) for d in re.findall(r"\d+", i.attribute("rhs_batch_dims") or "")}
        free = [n for d, n in enumerate(right.shape) if d not in group | contracted | batch]
        return "ragged-dot", 2.0 * left.size * math.prod(free), left.dtype
    target = (i.attribute("custom_call_target") or "").strip('"')
    config = _config(i)
    if target.startswith("__cublas"):
        gemm = config.get("gemm_backend_config", config.get("grouped_gemm_backend_config", config))
        dims = gemm.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", ())
        return "dot", 2.0 * out.size * math.prod(left.shape[int(d)] for d in dims), left.dtype
    if target.startswith("__cudnn$conv"):
        if "BackwardInput" in target:
            image, kernel, result = out, right, left
        elif "BackwardFilter" in target:
            image, kernel, result = left, out, right
        else:
            image, kernel, result = left, right, out
        return "convolution", _conv_flops(i, image, kernel, result), left.dtype
    if target.startswith("__cudnn$fmha"):
        scores = config.get("cudnn_fmha_backend_config", config).get("intermediate_tensor_shape", {}).get("dimensions", ())
        width = min(left.shape[-1], right.shape[-1])
        n_products = 5 if "Backward" in target else 2
        return "attention", 2.0 * n_products * math.prod(map(int, scores)) * width, left.dtype
    return None


def _config(i: HloInstruction) -> dict:
    try:
        return json.loads(i.attribute("backend_config") or "{}")
    except ValueError:
        return {}


def _conv_flops(i: HloInstruction, image: HloArray, kernel: HloArray, result: HloArray) -> float:
    """2 x (multiplications with data, not padding), counted dim by dim as XLA's cost analysis counts them.

    `window={size=3x3 stride=2x2 pad=0_1x0_1 lhs_dilate=1x1 rhs_dilate=1x1}`, `dim_labels=b01f_01io->b01f`.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attribute("dim_labels") or "")
    if not labels:
        return 0.0
    image_of, kernel_of, result_of = labels.groups()
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", i.attribute("window") or ""))

    def per_dim(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * len(spatial)

    spatial = [c for c in image_of if c.isdigit()]
    spatial.sort()
    strides = [int(s) for s in per_dim("stride", "1")]
    pads = [int(p.split("_")[0]) for p in per_dim("pad", "0_0")]
    spread, gaps = [int(d) for d in per_dim("lhs_dilate", "1")], [int(d) for d in per_dim("rhs_dilate", "1")]
    hits = 1
    for d, label in enumerate(spatial):
        n, taps, results = (x.shape[of.index(label)] for x, of in ((image, image_of), (kernel, kernel_of), (result, result_of)))
        hits *= window_hits(n, taps, results, strides[d], pads[d], spread[d], gaps[d])
    groups = int(i.attribute("batch_group_count") or 1)
    features = kernel.shape[kernel_of.index("i")] * result.shape[result_of.index("f")]
    return 2.0 * hits * features * image.shape[image_of.index("b")] / groups
