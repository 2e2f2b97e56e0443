"""Rows and heads of a tensor, copied to the dtype of the sums a tile at a time and written back rounded once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dqkv.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """One sequence: its number in the batch, first row in packed tensors, and how many rows count, on both sides."""

    index: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The query heads first to stop (stop excluded) and the key heads kv_first to kv_stop that they use."""

    first: int
    stop: int
    kv_first: int
    kv_stop: int

    @property
    def count(self) -> int:
        """Query heads."""
        return self.stop - self.first

    @property
    def per_key_head(self) -> int:
        """Query heads for each key head."""
        return self.count // (self.kv_stop - self.kv_first)


def query_rows(tensor: torch.Tensor, problem: Problem[object], sequence: Sequence) -> torch.Tensor:
    """The sequence's rows of q, dout, out or dq: a view (q_len, num_heads_q, width)."""
    if problem.queries.is_packed:
        return tensor[sequence.q_start : sequence.q_start + sequence.q_len]
    return tensor[sequence.index, : sequence.q_len]


def key_rows(tensor: torch.Tensor, problem: Problem[object], sequence: Sequence) -> torch.Tensor:
    """The sequence's rows of k, v, dk or dv: a view (k_len, num_heads_kv, width)."""
    if problem.keys.is_packed:
        return tensor[sequence.k_start : sequence.k_start + sequence.k_len]
    return tensor[sequence.index, : sequence.k_len]


def statistics_rows(tensor: torch.Tensor, problem: Problem[object], sequence: Sequence) -> torch.Tensor:
    """The sequence's rows of softmax_lse, delta or dlse: a view (num_heads_q, q_len)."""
    if problem.queries.is_packed:
        return tensor[:, sequence.q_start : sequence.q_start + sequence.q_len]
    return tensor[sequence.index, :, : sequence.q_len]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """What a copy of rows is widened to, and its dtype."""

    width: int
    dtype: torch.dtype = torch.float32

    def empty(self, count: int, rows: torch.Tensor) -> torch.Tensor:
        """Memory (count, rows, width) for a copy of rows (rows, heads, n), zero behind column n."""
        make = torch.empty if self.width == rows.shape[-1] else torch.zeros
        return make(count, rows.shape[0], self.width, dtype=self.dtype, device=rows.device)


def of_queries(rows: torch.Tensor, heads: Heads, shape: Tile) -> torch.Tensor:
    """(rows, num_heads_q, n) of any dtype and strides -> (heads.count, rows, width), zero behind column n."""
    tile = shape.empty(heads.count, rows)
    tile[:, :, : rows.shape[-1]].copy_(rows[:, heads.first : heads.stop].transpose(0, 1))
    return tile


def of_keys(rows: torch.Tensor, heads: Heads, shape: Tile) -> torch.Tensor:
    """(rows, num_heads_kv, n) of any dtype and strides -> (heads.count, rows, width), one for each query head.

    The query heads of a single key head share its memory.
    """
    if heads.kv_stop - heads.kv_first == 1:
        tile = shape.empty(1, rows)
        tile[0, :, : rows.shape[-1]].copy_(rows[:, heads.kv_first])
        return tile.expand(heads.count, -1, -1)
    tile = shape.empty(heads.count, rows)
    source = rows[:, heads.kv_first : heads.kv_stop].transpose(0, 1).unsqueeze(1)
    by_key_head = tile.view(-1, heads.per_key_head, *tile.shape[1:])
    by_key_head[..., : rows.shape[-1]].copy_(source)
    return tile


def in_place(rows: torch.Tensor, heads: Heads, shape: Tile) -> torch.Tensor:
    """As `of_queries`, but a view where the rows have that dtype and width, and are dense: for what is read once."""
    if rows.dtype is shape.dtype and rows.shape[-1] == shape.width and rows.stride(-1) == 1:
        return rows[:, heads.first : heads.stop].transpose(0, 1)
    return of_queries(rows, heads, shape)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds neither NaN nor an infinity."""
    # A sum takes a fifth of the time, and is finite only if everything in it is.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def length(tensor: torch.Tensor) -> float:
    """An upper bound of the root of the sum of all squares, NaN where there is one; infinity where squares overflow."""
    if not tensor.numel():
        return 0.0
    once = tensor[0] if tensor.stride(0) == 0 else tensor
    if once.is_contiguous():
        flat = once.view(-1)
        return math.sqrt(torch.dot(flat, flat).item() * (tensor.numel() / once.numel()))
    low, high = torch.aminmax(once)
    return max(-low.item(), high.item()) * math.sqrt(tensor.numel())


class Sum:
    """Partial results (heads, rows, width) added up in the order they come, in fp32 or wider."""

    def __init__(self, heads: int, rows: int) -> None:
        self._heads = heads
        self._rows = rows
        self._written = 0  # rows up to here hold sums, those behind hold nothing yet
        self._memory: torch.Tensor | None = None

    def add(self, start: int, value: torch.Tensor) -> None:
        """Add value (heads * n, m, width) to the rows from start on, each n heads together in their order.

        The value belongs to the sum from now on.
        """
        first, *rest = value.reshape(self._heads, -1, *value.shape[1:]).unbind(1)
        stop = start + value.shape[1]
        if self._memory is None and value.shape[1] == self._rows:
            self._memory, self._written = first, stop
            memory = first
        else:
            memory = self._put(start, stop, first)
        for part in rest:
            memory[:, start:stop] += part

    @property
    def total(self) -> torch.Tensor | None:
        """The sum, zero in rows that nothing was added to; None if nothing was added at all."""
        if self._memory is not None and self._written < self._rows:
            self._memory[:, self._written :].zero_()
            self._written = self._rows
        return self._memory

    @property
    def is_finite(self) -> bool:
        """Whether the sum holds neither NaN nor an infinity."""
        return self.total is None or is_finite(self.total)

    def write(self, rows: torch.Tensor, first: int, stop: int) -> None:
        """Round the sum once into the heads first to stop of rows (rows, all heads, n); zeros if nothing was added."""
        target, total = rows[:, first:stop].transpose(0, 1), self.total
        if total is None:
            target.zero_()
        else:
            target.copy_(total[:, :, : rows.shape[-1]])

    def _put(self, start: int, stop: int, value: torch.Tensor) -> torch.Tensor:
        """Add value (heads, m, width) where there are sums already, copy it where there are none yet; all sums."""
        memory = self._memory
        if memory is None:
            memory = value.new_empty(self._heads, self._rows, value.shape[2])
        if self._written < start:
            memory[:, self._written : start].zero_()
        seam = min(max(self._written, start), stop)
        if start < seam:
            memory[:, start:seam] += value[:, : seam - start]
        if seam < stop:
            memory[:, seam:stop].copy_(value[:, seam - start :])
        self._memory, self._written = memory, max(self._written, stop)
        return memory
