"""Regions of a sequence by PyTorch's own CPU flash backward, in fp32.

Called with 16-bit inputs it sums dq, dk and dv over tiles in 16 bits: at seqlen 4096 in bf16 its dk is 3 times as far
from float64 (relative Frobenius error 5.1e-3) as sums in fp32 rounded once (1.7e-3). So it is only called in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dqkv_kernels.visibility import Cover, Region

KERNEL = "cpu/flash-fp32"
NORM_LEAST, NORM_MOST = 1e-15, 1e15
"""Between them the square of a row's length neither underflows nor overflows."""
FACTOR_LEAST, FACTOR_MOST = 1e-25, 1e25
"""A factor beyond them may have lost bits, or take bits of what it is multiplied with."""

Bias = Callable[[Region], torch.Tensor]


def stand_in_for_out(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor | None:
    """An out (heads, rows, width) with rowsum(dout * out) = delta to fp32 rounding: all that the kernel takes of out.

    None where dout (heads, rows, width) has no such partner: delta (heads, rows) is not 0 in a row where dout is 0 or
    so small or large that a factor between the two is not to be trusted.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(dout, dim=-1)
    factor = delta / norm / norm
    is_nothing = delta == 0
    size = factor.abs()
    is_safe = (size > FACTOR_LEAST) & (size < FACTOR_MOST) & (norm > NORM_LEAST) & (norm < NORM_MOST)
    if not bool((is_safe | is_nothing).all()):
        return None
    return dout * factor.masked_fill_(is_nothing, 0.0).unsqueeze(-1)


def gradients(
    region: Region,
    queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    softmax_scale: float,
    bias: Bias,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq (heads, rows, width), dk, dv (heads, keys, width) that a region adds, in fp32.

    queries are q, dout, out (heads, rows, width) and softmax_lse (heads, rows) of its rows, finite or +inf; keys are
    k, v (heads, keys, width); bias gives a region's hidden pairs, fp32 (rows, keys): -inf there, 0 elsewhere.
    """
    q, dout, out, softmax_lse = (tensor.unsqueeze(1) for tensor in queries)
    k, v = (tensor.unsqueeze(1) for tensor in keys)
    hidden = bias(region)[None, None] if region.cover is Cover.PARTIAL else None
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, softmax_lse, 0.0, region.cover is Cover.CAUSAL, attn_mask=hidden, scale=softmax_scale
    )
    return dq.squeeze(1), dk.squeeze(1), dv.squeeze(1)
