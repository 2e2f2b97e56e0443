"""Which keys a query sees, as regions: rectangles of queries and keys that one kernel call computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch

from dqkv.problem import Window

KEYS_PER_REGION = 4096
"""A region's keys are copied to fp32, so their number bounds the memory; large enough that the copy costs nothing."""
ROWS_UNBOUNDED_LEFT = 4096
"""Rows of a block when keys are only cut on the right: the fewer blocks, the fewer partial sums are added up."""
ROWS_BOUNDED_LEFT = (128, 1024)
"""Rows of a block of a sliding window, least and most: wide blocks waste hidden keys, narrow ones waste calls."""
FULL_KEYS_LEAST = 256
"""A fully visible piece narrower than this is computed under its neighbours' mask instead of in its own call."""


class Cover(Enum):
    """How much of a region is visible: everything, key k0 + j to row q0 + i where j <= i, or what a mask says."""

    FULL = "full"
    CAUSAL = "causal"
    PARTIAL = "partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Queries q0 to q1 and keys k0 to k1 (ends excluded, counted from the sequence's first), and what of it is seen."""

    q0: int
    q1: int
    k0: int
    k1: int
    cover: Cover


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The visible keys of one sequence: query i sees key j when i + low <= j <= i + high, or j < sink, j <= i + high.

    low and high are None where nothing is cut on that side.
    """

    seqlen_q: int
    seqlen_k: int
    low: int | None
    high: int | None
    sink: int

    @classmethod
    def of(cls, seqlen_q: int, seqlen_k: int, window: Window) -> Band:
        """The band of a sequence whose used lengths are seqlen_q and seqlen_k, aligned to its bottom-right corner."""
        offset = seqlen_k - seqlen_q
        low = None if window.left is None else offset - window.left
        high = None if window.right is None else offset + window.right
        if low is not None and seqlen_q - 1 + low <= 0:
            low = None
        if high is not None and high >= seqlen_k - 1:
            high = None
        sink = 0 if low is None else min(window.sink_token_length, seqlen_k)
        return cls(seqlen_q=seqlen_q, seqlen_k=seqlen_k, low=low, high=high, sink=sink)

    @property
    def rows(self) -> tuple[int, int]:
        """First row that sees a key, and the row behind the last; both 0 when none does."""
        if self.seqlen_k == 0 or (self._is_hollow and not self.sink):
            return 0, 0
        first = 0 if self.high is None else max(0, -self.high)
        stop = self.seqlen_q
        if not self.sink and self.low is not None:
            stop = min(stop, self.seqlen_k - self.low)
        return (first, stop) if first < stop else (0, 0)

    def regions(self, q0: int, q1: int) -> Iterator[Region]:
        """Regions that hold every visible pair of the rows q0 to q1 once, in a fixed order."""
        first, stop = self.rows
        q0, q1 = max(q0, first), min(q1, stop)
        step = self._rows_per_block
        for start in range(q0, q1, step):
            end = min(start + step, q1)
            for k0, k1, cover in self._pieces(start, end):
                width = KEYS_PER_REGION if cover is Cover.FULL else k1 - k0
                for left in range(k0, k1, width):
                    yield Region(q0=start, q1=end, k0=left, k1=min(left + width, k1), cover=cover)

    def mask(self, region: Region, device: torch.device) -> torch.Tensor:
        """bool (q1 - q0, k1 - k0): whether the region's query sees the region's key."""
        i = torch.arange(region.q0, region.q1, device=device)[:, None]
        j = torch.arange(region.k0, region.k1, device=device)[None, :]
        seen = torch.ones(region.q1 - region.q0, region.k1 - region.k0, dtype=torch.bool, device=device)
        if self.low is not None:
            seen &= (j >= i + self.low) | (j < self.sink)
        if self.high is not None:
            seen &= j <= i + self.high
        return seen

    def mask_key(self, region: Region) -> tuple[int, int, int, int]:
        """Regions of this band with equal keys have equal masks."""
        return region.k0 - region.q0, region.q1 - region.q0, region.k1 - region.k0, max(0, self.sink - region.k0)

    @property
    def _is_hollow(self) -> bool:
        return self.low is not None and self.high is not None and self.low > self.high

    @property
    def _rows_per_block(self) -> int:
        if self.low is None:
            return ROWS_UNBOUNDED_LEFT
        least, most = ROWS_BOUNDED_LEFT
        width = self.seqlen_k if self.high is None else self.high - self.low + 1
        return min(max(width, least), most)

    def _left(self, row: int) -> int:
        return 0 if self.low is None else min(max(row + self.low, 0), self.seqlen_k)

    def _right(self, row: int) -> int:
        return self.seqlen_k if self.high is None else min(max(row + self.high + 1, 0), self.seqlen_k)

    def _pieces(self, q0: int, q1: int) -> Iterator[tuple[int, int, Cover]]:
        """(k0, k1, cover) of the rows q0 to q1, left to right, small full pieces joined to masked neighbours."""
        pieces: list[tuple[int, int, Cover]] = []
        for k0, k1, kind in self._atoms(q0, q1):
            is_small = self.low is not None and kind is Cover.FULL and k1 - k0 < FULL_KEYS_LEAST
            cover = Cover.PARTIAL if is_small else kind
            if pieces and pieces[-1][1] == k0 and Cover.FULL not in (cover, pieces[-1][2]):
                pieces[-1] = (pieces[-1][0], k1, Cover.PARTIAL)
            elif pieces and pieces[-1][1] == k0 and cover is pieces[-1][2] is Cover.FULL:
                pieces[-1] = (pieces[-1][0], k1, Cover.FULL)
            else:
                pieces.append((k0, k1, cover))
        yield from pieces

    def _atoms(self, q0: int, q1: int) -> Iterator[tuple[int, int, Cover]]:
        """The visible keys of the rows q0 to q1, cut wherever the visibility of a key changes its kind."""
        last = q1 - 1
        end = self._right(last)
        diagonal = end if self.high is None else min(q0 + self.high, end)
        band_start = end if self._is_hollow else self._left(q0)
        cuts = {0, self.sink, self._left(q0), self._left(last), diagonal, end}
        edges = sorted(cut for cut in cuts if cut <= end)
        for k0, k1 in pairwise(edges):
            in_sink = k1 <= self.sink
            if not in_sink and k0 < band_start:
                continue
            uncut_left = in_sink or self._left(last) <= k0
            if uncut_left and k1 <= self._right(q0):
                yield k0, k1, Cover.FULL
            elif uncut_left and k0 == diagonal:
                yield k0, k1, Cover.CAUSAL
            else:
                yield k0, k1, Cover.PARTIAL
