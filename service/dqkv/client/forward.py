"""Attention itself, in torch on the caller's device: the output and softmax_lse that a backward starts from.

Scores are fp32 and exist for one tile of queries at a time, so memory grows linearly with the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dqkv.problem import Problem

TILE_ELEMENTS = 1 << 24
"""Scores of one tile, over all heads: 64 MiB of fp32."""
TILE_ROWS = 256
"""Most queries of a tile where a window bounds the keys; more would see mostly keys outside the window."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """out like q with head_dim_v, in q's dtype; softmax_lse fp32 (batch_size, num_heads_q, seqlen_q), or packed."""

    out: torch.Tensor
    softmax_lse: torch.Tensor


def attend(
    problem: Problem[Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> Statistics:
    """Attention over the problem's tensors; rows that see no key, or belong to no sequence, have out 0, lse -inf.

    q (batch_size, seqlen_q, num_heads_q, head_dim) or (rows, num_heads_q, head_dim), k and v likewise, sink
    (num_heads_q,); any strides. Raises nothing of its own: the problem has checked them.
    """
    shape = problem.shape
    out = q.new_zeros(*q.shape[:-1], shape.head_dim_v)
    rows_first = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
    bias = None if sink is None else sink.float()
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for index, (q_start, q_len, k_start, k_len) in enumerate(problem.rows):
            rows = _rows(problem.queries.is_packed, index, q_start, q_len)
            keys = _rows(problem.keys.is_packed, index, k_start, k_len)
            for tile in _tiles(problem, q_len, k_len):
                done = _attend_tile(problem, tile, q[rows], k[keys], v[keys], bias)
                out[rows][tile.queries] = done.out.to(q.dtype)
                rows_first[rows][tile.queries] = done.softmax_lse
    return Statistics(out=out, softmax_lse=rows_first.transpose(-1, -2))


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Queries of one sequence, and the keys that any of them sees: the sink tokens in front, then a range."""

    queries: slice
    sink_tokens: slice
    keys: slice


def _rows(is_packed: bool, index: int, start: int, length: int) -> Any:
    return slice(start, start + length) if is_packed else (index, slice(0, length))


def _tiles(problem: Problem[Any], q_len: int, k_len: int) -> Iterator[_Tile]:
    window, diagonal = problem.options.window, k_len - q_len
    width, limit = k_len, q_len
    if window.left is not None:
        ahead = k_len if window.right is None else window.right
        width = min(k_len, max(window.left + ahead, 0) + 1 + TILE_ROWS + window.sink_token_length)
        limit = TILE_ROWS
    step = max(1, min(limit, TILE_ELEMENTS // max(1, problem.shape.num_heads_q * width)))
    for first in range(0, q_len, step):
        last = min(first + step, q_len)
        begin = 0 if window.left is None else min(max(0, first + diagonal - window.left), k_len)
        end = k_len if window.right is None else min(max(0, last + diagonal + window.right), k_len)
        sinks = min(window.sink_token_length, begin, end)
        yield _Tile(queries=slice(first, last), sink_tokens=slice(0, sinks), keys=slice(begin, max(begin, end)))


def _attend_tile(
    problem: Problem[Any], tile: _Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> Statistics:
    """One tile of one sequence, q (seqlen_q, heads, width) and so on: out and softmax_lse both with rows first."""
    heads, groups, width = k.shape[1], problem.shape.group_size, q.shape[-1]
    parts = [tile.sink_tokens, tile.keys]
    tile_k, tile_v = (torch.cat([t[part] for part in parts]).float() for t in (k, v))
    tile_q = q[tile.queries].float()
    rows = tile_q.shape[0]
    # (rows, heads * groups, width) -> (heads, groups * rows, width): a group shares its key head's product.
    grouped = tile_q.reshape(rows, heads, groups, width).permute(1, 2, 0, 3).reshape(heads, groups * rows, width)
    scores = torch.matmul(grouped, tile_k.permute(1, 2, 0)).mul_(problem.softmax_scale)
    softcap = problem.options.softcap
    if softcap > 0:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.reshape(heads, groups, rows, tile_k.shape[0])
    scores = scores.masked_fill_(~_visible(problem, tile, q, k), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    if bias is not None:
        lse = torch.logaddexp(lse, bias.reshape(heads, groups, 1))
    alive = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
    weights = scores.sub_(alive[..., None]).exp_()
    out = torch.matmul(weights.flatten(1, 2), tile_v.transpose(0, 1)).reshape(heads, groups, rows, v.shape[-1])
    return Statistics(out=out.permute(2, 0, 1, 3).flatten(1, 2), softmax_lse=lse.permute(2, 0, 1).flatten(1, 2))


def _visible(problem: Problem[Any], tile: _Tile, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Which of the tile's keys each of its queries sees: bool (queries, keys)."""
    window, diagonal = problem.options.window, k.shape[0] - q.shape[0]
    i = torch.arange(tile.queries.start, tile.queries.stop, device=q.device)[:, None] + diagonal
    spans = [torch.arange(part.start, part.stop, device=q.device) for part in (tile.sink_tokens, tile.keys)]
    j = torch.cat(spans)[None, :]
    seen = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool, device=q.device)
    if window.right is not None:
        seen &= j <= i + window.right
    if window.left is not None:
        seen &= (j >= i - window.left) | (j < window.sink_token_length)
    return seen
