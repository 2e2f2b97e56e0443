"""Regions of a sequence in plain torch, a tile at a time, on any device: every option, and any value of an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dqkv_kernels.visibility import Cover, Region

KERNELS = {torch.float32: "tiled-fp32", torch.float64: "tiled-fp64"}
"""Names by the dtype that everything is computed in."""
TILE_ROWS = 256
TILE_KEYS = 512
"""A tile of logits and one of their gradients stay in a core's cache."""

Mask = Callable[[Region], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Logits:
    """A logit from q and k: softmax_scale * q k, then softcap * tanh(that / softcap) if softcap is not 0."""

    softmax_scale: float
    softcap: float


def gradients(
    region: Region,
    queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    logits: Logits,
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq (heads, rows, head_dim), dk and dv (heads, keys, head_dim and head_dim_v) that a region adds.

    queries are q (heads, rows, head_dim), dout (heads, rows, head_dim_v), delta - dlse and softmax_lse (heads, rows)
    of its rows; keys are k, v (heads, keys, head_dim and head_dim_v); all have one dtype, which is that of the sums.
    mask gives a region's visibility, bool (rows, keys) or (heads, rows, keys). What a row does not see, and rows whose
    softmax_lse is infinite, weigh exactly 0.
    """
    q, dout, delta, softmax_lse = queries
    k, v = keys
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    hidden_rows = torch.isinf(softmax_lse)
    softmax_lse = softmax_lse.masked_fill(hidden_rows, torch.inf).unsqueeze(-1)
    delta = delta.unsqueeze(-1)
    seen = None if region.cover is Cover.FULL else mask(region)
    for rows, cols in _tiles(region):
        hidden = hidden_rows[:, rows, None]
        if seen is not None:
            hidden = hidden | ~seen[..., rows, cols]
        weight, slope = _logits(q[:, rows], k[:, cols], logits)
        weight = weight.sub_(softmax_lse[:, rows]).exp_().masked_fill_(hidden, 0.0)
        dv[:, cols].baddbmm_(weight.transpose(1, 2), dout[:, rows])
        dlogit = torch.bmm(dout[:, rows], v[:, cols].transpose(1, 2)).sub_(delta[:, rows])
        dlogit.mul_(weight).masked_fill_(hidden, 0.0)
        if slope is not None:
            dlogit.mul_(slope)
        dq[:, rows].baddbmm_(dlogit, k[:, cols])
        dk[:, cols].baddbmm_(dlogit.transpose(1, 2), q[:, rows])
    return dq.mul_(logits.softmax_scale), dk.mul_(logits.softmax_scale), dv


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """A row's softmax: its largest logit, and the sum of all exp(logit - largest); each (heads, rows).

    Apart they keep what their sum rounds away: a softmax_lse of thousands in fp32 is 1e-4 off, and each weight with it.
    largest is -inf in rows that see nothing and NaN in rows whose logits overflowed; both have a total of 1.
    """

    largest: torch.Tensor
    total: torch.Tensor

    @property
    def softmax_lse(self) -> torch.Tensor:
        """(heads, rows): the natural logarithm of the sum of all exp(logit)."""
        return self.largest + self.total.log()


class LogSumExp:
    """The statistics of a block of rows (heads, rows), region after region, in the dtype of q."""

    def __init__(self, q: torch.Tensor) -> None:
        self._largest = q.new_full(q.shape[:2], -torch.inf)
        self._total = torch.zeros_like(self._largest)

    def add(
        self, region: Region, block: slice, operands: tuple[torch.Tensor, torch.Tensor], logits: Logits, mask: Mask
    ) -> None:
        """Take in a region: its rows of the block, and its q (heads, rows, head_dim) and k (heads, keys, head_dim)."""
        q, k = operands
        largest, total = self._largest[:, block], self._total[:, block]
        seen = None if region.cover is Cover.FULL else mask(region)
        for rows, cols in _tiles(region):
            logit, _ = _logits(q[:, rows], k[:, cols], logits)
            if seen is not None:
                logit.masked_fill_(~seen[..., rows, cols], -torch.inf)
            before = largest[:, rows]
            after = torch.maximum(before, logit.amax(-1))
            # A row without a key so far has no largest logit: subtract 0 there, -inf minus -inf is NaN.
            shift = after.masked_fill(torch.isinf(after), 0.0)
            total[:, rows] *= (before - shift).exp()
            total[:, rows] += logit.sub_(shift.unsqueeze(-1)).exp_().sum(-1)
            largest[:, rows] = after

    def value(self, sink: torch.Tensor | None, blind: torch.Tensor | None) -> Statistics:
        """The statistics with the sink logit, which broadcasts to (heads, rows), among the logits.

        blind says, bool that broadcasts to (heads, rows), which rows see no key at all; None is none.
        """
        largest, total = self._largest, self._total
        if sink is not None:
            after = torch.maximum(largest, sink)
            shift = after.masked_fill(torch.isinf(after), 0.0)
            largest, total = after, total * (largest - shift).exp() + (sink - shift).exp()
        nothing = torch.isneginf(largest)
        if blind is None:
            nothing = torch.zeros_like(nothing)
        else:
            nothing &= blind
        # A row that sees keys and has an infinite logit is no row that sees nothing: it must not answer 0.
        largest = largest.masked_fill(torch.isinf(largest) & ~nothing, torch.nan)
        return Statistics(largest=largest, total=total.masked_fill(nothing | torch.isnan(largest), 1.0))


def _tiles(region: Region) -> Iterator[tuple[slice, slice]]:
    rows, keys = region.q1 - region.q0, region.k1 - region.k0
    for row in range(0, rows, TILE_ROWS):
        row_stop = min(row + TILE_ROWS, rows)
        # Keys behind the last row's diagonal are hidden from the whole tile.
        visible = min(keys, row_stop) if region.cover is Cover.CAUSAL else keys
        for col in range(0, visible, TILE_KEYS):
            yield slice(row, row_stop), slice(col, min(col + TILE_KEYS, visible))


def _logits(q: torch.Tensor, k: torch.Tensor, logits: Logits) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits of a tile and, with a softcap, their derivative by the uncapped logit."""
    logit = torch.bmm(q, k.transpose(1, 2)).mul_(logits.softmax_scale)
    if not logits.softcap:
        return logit, None
    ratio = logit.div_(logits.softcap).tanh_()
    slope = 1.0 - ratio * ratio
    return ratio.mul_(logits.softcap), slope
