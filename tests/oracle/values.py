"""What a case draws: the values of its tensors, already rounded to the dtypes of the request."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from .case import Case, Dtype
from .geometry import NEG_INF, geometry

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
VALUES_KEPT = 128
"""How many cases' values stay in memory: the tables ask for each case several times in a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Values:
    """Tensors in flat rows on the CPU; nobody may write to them.

    q (total_q, num_heads_q, head_dim), dout (total_q, num_heads_q, head_dim_v), k, v (total_k, num_heads_kv,
    ...), dlse fp32 (total_q, num_heads_q), sink (num_heads_q,). For ring cases k and v hold every block.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    sink: Tensor | None


@lru_cache(maxsize=VALUES_KEPT)
def make_values(case: Case) -> Values:
    """The values of a case; the same name gives the same draws, whatever the dtype."""
    values = _drawn(case)
    values = _scaled(case, values) if case.neg_target is None else _near_target(case, values, case.neg_target)
    for name, bend in SPECIALS.items():
        if name in case.special:
            values = bend(case, values)
    dtype = TORCH_DTYPES[case.dtype]
    rounded = {name: getattr(values, name).contiguous().to(dtype) for name in ("q", "k", "v", "dout")}
    return replace(values, **rounded)


def _drawn(case: Case) -> Values:
    generator = torch.Generator(device="cpu").manual_seed(case.seed)
    shape = geometry(case)
    total_q, total_k = shape.total_q, shape.total_k * (case.ring.count if case.ring else 1)
    heads, kv_heads = case.num_heads_q, case.num_heads_kv
    draw = torch.rand if "uniform_inputs" in case.special else torch.randn
    tensors = [
        draw(*size, generator=generator, dtype=torch.float32)
        for size in (
            (total_q, heads, case.head_dim),
            (total_k, kv_heads, case.head_dim),
            (total_k, kv_heads, case.head_dim_v),
            (total_q, heads, case.head_dim_v),
        )
    ]
    dlse = sink = None
    if case.dlse:
        dlse = torch.randn(total_q, heads, generator=generator, dtype=torch.float32) * case.dlse_mul
    if case.sink:
        sink = torch.randn(heads, generator=generator, dtype=torch.float32) + case.sink_add
        if "sink_neg_inf_half" in case.special:
            sink[::2] = NEG_INF
        sink = sink.to(TORCH_DTYPES[case.sink])
    return Values(q=tensors[0], k=tensors[1], v=tensors[2], dout=tensors[3], dlse=dlse, sink=sink)


def _scaled(case: Case, values: Values) -> Values:
    return replace(values, q=values.q * case.q_mul, k=values.k * case.k_mul, v=values.v * case.v_mul)


def _near_target(case: Case, values: Values, target: float) -> Values:
    # A direction that all rows share puts every logit near -target; a little noise stays.
    lift = math.sqrt(target / abs(case.scale)) / math.sqrt(case.head_dim)
    return replace(values, q=0.3 * values.q - lift, k=0.3 * values.k + lift, v=values.v * case.v_mul)


def _ties(case: Case, values: Values) -> Values:
    return replace(values, k=values.k[torch.arange(values.k.shape[0]) % 4])


def _mean_shift(case: Case, values: Values) -> Values:
    return replace(values, v=values.v + 3.0, dout=values.dout + 1.0)


def _row_scaled(case: Case, values: Values) -> Values:
    total_q = values.q.shape[0]
    by_row = torch.linspace(0.25, 2.5, max(total_q, 1))[:total_q, None, None]
    by_head = torch.linspace(0.5, 2.0, case.num_heads_q)[None, :, None]
    return replace(values, q=values.q * by_row, dout=values.dout * by_head)


def _ring_skew(case: Case, values: Values) -> Values:
    count = case.ring.count if case.ring else 1
    block = values.k.shape[0] // count
    lift = torch.zeros(case.head_dim)
    lift[0] = 12.0
    k = torch.cat([values.k[:block] - lift, values.k[block:] + lift])
    return replace(values, q=values.q + lift, k=k)


def _dout_ones(case: Case, values: Values) -> Values:
    return replace(values, dout=torch.ones_like(values.dout))


def _dout_zero(case: Case, values: Values) -> Values:
    return replace(values, dout=torch.zeros_like(values.dout))


def _kv_same_over_heads(case: Case, values: Values) -> Values:
    wide = {name: getattr(values, name)[:, :1].expand(-1, case.num_heads_kv, -1) for name in ("k", "v")}
    return replace(values, **wide)


SPECIALS: dict[str, Callable[[Case, Values], Values]] = {
    "ties": _ties,
    "mean_shift": _mean_shift,
    "row_scaled": _row_scaled,
    "ring_skew": _ring_skew,
    "dO_ones": _dout_ones,
    "dO_zero": _dout_zero,
    "kv_same_over_heads": _kv_same_over_heads,
}
"""What bends the draws, in this order; a case's other specials concern its memory or say what it shows."""
