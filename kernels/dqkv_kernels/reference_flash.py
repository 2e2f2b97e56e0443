"""Regions of a sequence by PyTorch's own CPU flash backward, in fp32.

Called with 16-bit inputs it sums dq, dk and dv over tiles in 16 bits: at seqlen 4096 in bf16 its dk is 3 times as far
from float64 (relative Frobenius error 5.1e-3) as sums in fp32 rounded once (1.7e-3). So it is only called in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dqkv_kernels.visibility import Cover, Region

KERNEL = "cpu/flash-fp32"
SAFE_PRODUCT = 1e37
"""Below it no sum of products overflows, so that the zero weight of a hidden pair times it is zero, not NaN."""
SAFE_RATIO = 1e-30
"""A smaller factor may have lost bits to underflow."""

Mask = Callable[[Region], torch.Tensor]


def stand_in_for_out(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """An out (heads, rows, width) with rowsum(dout * out) = delta to fp32 rounding: all that the kernel takes of out.

    None where dout (heads, rows, width) has no such partner: delta (heads, rows) is not 0 in a row where dout is.
    """
    peak = dout.abs().amax(-1, keepdim=True)
    unit = dout / torch.where(peak > 0, peak, 1.0)
    norm = unit.square().sum(-1, keepdim=True)
    factor = delta.unsqueeze(-1) / torch.where(peak > 0, peak * norm, 0.0)
    nothing = delta.unsqueeze(-1) == 0
    factor = torch.where(nothing, 0.0, factor)
    size = factor.abs()
    if not bool(((size <= SAFE_PRODUCT) & ((size >= SAFE_RATIO) | nothing)).all()):
        return None
    return unit.mul_(factor)


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude in a tensor that is not empty; NaN if it holds one."""
    low, high = torch.aminmax(tensor)
    return max(abs(low.item()), abs(high.item()))


def gradients(
    region: Region,
    queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    softmax_scale: float,
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq (heads, rows, width), dk, dv (heads, keys, width) that a region adds, in fp32.

    queries are q, dout, out (heads, rows, width) and softmax_lse (heads, rows) of its rows, finite or +inf; keys are
    k, v (heads, keys, width); mask gives a region's visibility, bool (rows, keys).
    """
    q, dout, out, softmax_lse = (tensor.unsqueeze(1) for tensor in queries)
    k, v = (tensor.unsqueeze(1) for tensor in keys)
    bias = None
    if region.cover is Cover.PARTIAL:
        seen = mask(region)
        bias = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, -torch.inf)[None, None]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, softmax_lse, 0.0, region.cover is Cover.CAUSAL, attn_mask=bias, scale=softmax_scale
    )
    return dq.squeeze(1), dk.squeeze(1), dv.squeeze(1)
