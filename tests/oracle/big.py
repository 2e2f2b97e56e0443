"""Problems too large to draw or solve whole: any rows of them can be made alone, and any part solved exactly.

Values come from a small table for each tensor, addressed by a hash of row and head, so that they are the same
on any device and in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .case import Case, Window
from .exact import F64, Forward, Scoring, Upstream, attend, attend_grad
from .geometry import geometry, visible
from .values import TORCH_DTYPES

Role = Literal["q", "k", "v", "dout"]
TABLE_ROWS = 1021
"""Prime, so that no power of two in a shape meets it."""
SALTS: dict[Role, int] = {"q": 1, "k": 2, "v": 3, "dout": 4}
INT32_ELEMENTS = 2**31 - 1
SAMPLE_SPAN = 64
PITCH = 9728
"""Elements of a row in a wide projection: where an offset of 32 bits ends for a caller who sends a view of it."""
FILL_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Exact gradients of one sequence or one range of rows, float64.

    q_rows and k_rows are flat row numbers; out, dq (rows, num_heads_q, ...), softmax_lse (num_heads_q, rows),
    dk, dv (rows, num_heads_kv, ...).
    """

    index: int
    q_rows: Tensor
    k_rows: Tensor
    out: Tensor
    softmax_lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def big_rows(case: Case, role: Role, rows: Iterable[int] | Tensor, device: str | torch.device = "cpu") -> Tensor:
    """(rows, heads, width) of the given flat rows (sequence * seqlen + position, or packed), in the case's dtype."""
    heads = case.num_heads_q if role in ("q", "dout") else case.num_heads_kv
    numbers = torch.as_tensor(rows if isinstance(rows, Tensor) else list(rows), dtype=torch.int64, device=device)
    head = torch.arange(heads, dtype=torch.int64, device=device)
    hashed = numbers[:, None] * 7919 + head[None] * 104729 + (numbers[:, None] // 977) * 31
    return _table(case, role).to(device)[(hashed + SALTS[role] * 15485863) % TABLE_ROWS]


def big_fill(case: Case, role: Role, tensor: Tensor) -> Tensor:
    """Fills (batch_size, seqlen, heads, width) or (rows, heads, width) of any strides, some rows at a time."""
    rows_each = 1 if tensor.dim() == 3 else tensor.shape[1]
    step = max(1, FILL_ROWS // max(1, rows_each * tensor.shape[-2]))
    for start in range(0, tensor.shape[0], step):
        end = min(tensor.shape[0], start + step)
        rows = torch.arange(start * rows_each, end * rows_each, device=tensor.device)
        tensor[start:end] = big_rows(case, role, rows, tensor.device).reshape(tensor[start:end].shape)
    return tensor


def big_forward(case: Case, q: Tensor, k: Tensor, v: Tensor, *, first_query: int = 0, first_key: int = 0) -> Forward:
    """out and softmax_lse in fp32 for some queries over some keys of one sequence, on their device.

    q (rows, num_heads_q, head_dim) starts at first_query, k and v at first_key of the sequence; the window is
    aligned as in the whole sequence. Every key that these queries see must be there.
    """
    i = torch.arange(q.shape[0], device=q.device)[:, None] + first_query + case.seqlen_k - case.seqlen_q
    j = torch.arange(k.shape[0], device=q.device)[None] + first_key
    scoring = Scoring(visible=_seen(i, j, case.window), scale=case.scale, softcap=case.softcap, sink=None)
    return attend(q.float(), k.float(), v.float(), scoring)


def big_samples(case: Case, picks: Iterable[int] | None = None) -> list[Sample]:
    """Exact gradients of a few sequences ("batch"), or ranges of rows of the one sequence ("swa"), of a big case.

    picks are sequences, or first rows of ranges; without them those around the ends of 32-bit offsets are taken.
    """
    if case.big == "batch":
        return [_sequence(case, index) for index in picks or _edge_sequences(case)]
    return [_range(case, start) for start in picks or _edge_starts(case)]


def shrink(case: Case) -> Case:
    """A small clone of a big case, solvable whole, that takes the same way through `big_samples`."""
    if case.big == "batch":
        return replace(case, batch_size=3, seqlen_q=min(case.seqlen_q, 64), seqlen_k=min(case.seqlen_k, 48))
    heads = min(case.num_heads_q, 4)
    grouped = case.num_heads_kv < case.num_heads_q
    kv_heads = min(case.num_heads_kv, 2) if grouped else heads
    return replace(case, seqlen_q=400, seqlen_k=400, num_heads_q=heads, num_heads_kv=kv_heads)


def _table(case: Case, role: Role) -> Tensor:
    width = case.head_dim if role in ("q", "k") else case.head_dim_v
    generator = torch.Generator(device="cpu").manual_seed(case.seed + SALTS[role])
    table = torch.randn(TABLE_ROWS, width, generator=generator, dtype=torch.float32)
    return table.to(TORCH_DTYPES[case.dtype])


def _edge_sequences(case: Case) -> list[int]:
    last = case.batch_size - 1
    edge_q = INT32_ELEMENTS // max(1, case.num_heads_q * case.seqlen_q * case.head_dim)
    edge_k = INT32_ELEMENTS // max(1, case.num_heads_kv * case.seqlen_k * case.head_dim)
    wanted = (0, 1, case.batch_size // 2, edge_q, edge_q + 1, edge_k, 65535, 65536, last)
    return sorted({min(last, index) for index in wanted})


def _edge_starts(case: Case) -> list[int]:
    last, half = case.seqlen_q - SAMPLE_SPAN, SAMPLE_SPAN // 2
    edge = INT32_ELEMENTS // max(1, case.num_heads_q * case.head_dim)
    edges = (min(last, edge - half), min(last, INT32_ELEMENTS // PITCH - half))
    return sorted({0, case.seqlen_q // 2, last, *(max(0, start) for start in edges)})


def _sequence(case: Case, index: int) -> Sample:
    q_start, q_len, k_start, k_len = geometry(case).sequences[index]
    q_rows, k_rows = torch.arange(q_start, q_start + q_len), torch.arange(k_start, k_start + k_len)
    return _solved(case, index, q_rows, k_rows, visible(q_len, k_len, case.window))


def _range(case: Case, start: int) -> Sample:
    # Rows before `start` miss keys of their own, but no key from `start` on is seen by other rows than these.
    reach = case.window_left or 0
    first = max(0, start - reach)
    rows = torch.arange(first, min(case.seqlen_q, start + SAMPLE_SPAN + reach))
    sample = _solved(case, start, rows, rows, _seen(rows[:, None], rows[None], case.window))
    kept = slice(start - first, start - first + SAMPLE_SPAN)
    return replace(
        sample,
        q_rows=rows[kept],
        k_rows=rows[kept],
        out=sample.out[kept],
        softmax_lse=sample.softmax_lse[:, kept],
        dq=sample.dq[kept],
        dk=sample.dk[kept],
        dv=sample.dv[kept],
    )


def _solved(case: Case, index: int, q_rows: Tensor, k_rows: Tensor, seen: Tensor) -> Sample:
    scoring = Scoring(visible=seen, scale=case.scale, softcap=case.softcap, sink=None)
    q, dout = big_rows(case, "q", q_rows).to(F64), big_rows(case, "dout", q_rows).to(F64)
    k, v = big_rows(case, "k", k_rows).to(F64), big_rows(case, "v", k_rows).to(F64)
    forward = attend(q, k, v, scoring)
    flow = attend_grad(q, k, v, forward, Upstream(dout, None), scoring)
    out, lse = forward
    return Sample(
        index=index, q_rows=q_rows, k_rows=k_rows, out=out, softmax_lse=lse, dq=flow.dq, dk=flow.dk, dv=flow.dv
    )


def _seen(i: Tensor, j: Tensor, window: Window) -> Tensor:
    seen = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool, device=i.device)
    if window.right is not None:
        seen &= j <= i + window.right
    if window.left is not None:
        seen &= j >= i - window.left
    return seen
