"""Where the rows of a case lie, and which keys each query sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .case import Case, Window

NEG_INF = float("-inf")


class Sequence(NamedTuple):
    """Where one sequence lies in flat rows, and how many of its rows count."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """All sequences of a case, and the rows of both sides in memory."""

    sequences: tuple[Sequence, ...]
    total_q: int
    total_k: int


def geometry(case: Case) -> Geometry:
    """Where each sequence lies on both sides, with seqused applied."""
    q_starts, q_lens, total_q = _side(case, "q")
    k_starts, k_lens, total_k = _side(case, "k")
    columns = zip(q_starts, q_lens, k_starts, k_lens, strict=True)
    return Geometry(sequences=tuple(Sequence(*row) for row in columns), total_q=total_q, total_k=total_k)


def offsets(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """cu_seqlens of allocated lengths: batch_size + 1 offsets from 0."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return tuple(sums)


def visible(seqlen_q: int, seqlen_k: int, window: Window, device: str | torch.device = "cpu") -> Tensor:
    """Which of seqlen_k keys each of seqlen_q queries sees: bool (seqlen_q, seqlen_k)."""
    diagonal = seqlen_k - seqlen_q
    i = torch.arange(seqlen_q, device=device, dtype=torch.int64)[:, None]
    j = torch.arange(seqlen_k, device=device, dtype=torch.int64)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if window.right is not None:
        seen &= j <= i + diagonal + window.right
    if window.left is not None:
        seen &= (j >= i + diagonal - window.left) | (j < window.sink_token_length)
    return seen


def request_keys(case: Case, index: int, sequence: Sequence) -> tuple[slice, slice]:
    """(rows of k that the softmax of the index-th sequence runs over, which of these the request holds)."""
    start, length = sequence.k_start, sequence.k_len
    if case.ring is None:
        return slice(start, start + length), slice(0, length)
    whole, first = length * case.ring.count, case.ring.block * length
    return slice(index * whole, (index + 1) * whole), slice(first, first + length)


def request_shape(case: Case, rows: Tensor, side: str) -> Tensor:
    """Flat rows of side "q" or "k" as requested: (batch_size, seqlen, ...) where the side is dense."""
    if getattr(case, f"seqlens_{side}") is not None:
        return rows
    return rows.reshape(case.batch_size, getattr(case, f"seqlen_{side}"), *rows.shape[1:])


def statistics_shape(case: Case, rows: Tensor) -> Tensor:
    """(total_q, heads) as softmax_lse is requested: (batch_size, heads, seqlen_q), or (heads, total_q)."""
    return request_shape(case, rows, "q").transpose(-1, -2)


def _side(case: Case, side: str) -> tuple[list[int], list[int], int]:
    allocated: tuple[int, ...] | None = getattr(case, f"seqlens_{side}")
    used: tuple[int, ...] | None = getattr(case, f"seqused_{side}")
    length: int = getattr(case, f"seqlen_{side}")
    tail: int = getattr(case, f"tail_{side}")
    if allocated is None:
        starts, lengths = [n * length for n in range(case.batch_size)], [length] * case.batch_size
        total = case.batch_size * length
    else:
        *starts, end = offsets(allocated)
        lengths, total = list(allocated), end + tail
    return starts, lengths if used is None else list(used), total
