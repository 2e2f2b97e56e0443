"""Short sequences put together: one job computes many of about one shape, where a job each would cost more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dqkv.problem import Problem
from dqkv_kernels.places import JOB_BYTES, JOBS_LEAST

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows of a batched sequence on one side: it is padded to the next of these, by a half at most, so that lengths that
all differ still share jobs."""
SEQUENCES_LEAST = 8
"""Fewer sequences of a shape gain less from one job than PyTorch's kernel does for each."""
ELEMENTS_MOST = 80_000
"""Elements of q, k and the logits of a sequence, padding included: with more its work hides what a job costs, about 300
us of one thread, and PyTorch's kernel is faster at the work."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Sequences by their numbers, each padded to `rows` queries and `keys` keys; arrays are int64 (sequences,).

    q_start and k_start are flat first rows, counted over the whole tensor.
    """

    numbers: NDArray[np.int64]
    q_start: NDArray[np.int64]
    q_len: NDArray[np.int64]
    k_start: NDArray[np.int64]
    k_len: NDArray[np.int64]
    rows: int
    keys: int

    def take(self, which: NDArray[np.bool_]) -> Batch:
        """Those of the sequences, bool (sequences,), that are asked for."""
        return Batch(
            numbers=self.numbers[which],
            q_start=self.q_start[which],
            q_len=self.q_len[which],
            k_start=self.k_start[which],
            k_len=self.k_len[which],
            rows=self.rows,
            keys=self.keys,
        )


def split(problem: Problem[object], live: NDArray[np.bool_]) -> tuple[list[Batch], NDArray[np.bool_]]:
    """The batches of the live sequences (bool (batch_size,)), and which are in none: long ones, and few of a shape."""
    rows, alone = problem.rows, live.copy()
    numbers = np.flatnonzero(live & (rows.q_len <= SIZES[-1]) & (rows.k_len <= SIZES[-1]))
    q_size, k_size = (np.searchsorted(SIZES, lengths[numbers]) for lengths in (rows.q_len, rows.k_len))
    found: list[Batch] = []
    for kind in np.unique(q_size * len(SIZES) + k_size).tolist():
        of_q, of_k = divmod(kind, len(SIZES))
        members = numbers[(q_size == of_q) & (k_size == of_k)]
        found += _of_shape(problem, members, SIZES[of_q], SIZES[of_k])
    for batch in found:
        alone[batch.numbers] = False
    return found, alone


def _of_shape(problem: Problem[object], members: NDArray[np.int64], rows: int, keys: int) -> Iterator[Batch]:
    """Batches of sequences of one shape, each as large as a job may be, and as many as there may be threads."""
    shape, all_rows = problem.shape, problem.rows
    width = max(shape.head_dim, shape.head_dim_v)
    sizes = shape.num_heads_q * rows * width, shape.num_heads_kv * keys * width, shape.num_heads_q * rows * keys
    if len(members) < SEQUENCES_LEAST or sum(sizes) > ELEMENTS_MOST:
        return
    step = min(JOB_BYTES // (4 * max(sizes)), -(-len(members) // JOBS_LEAST))
    for first in range(0, len(members), step):
        part = members[first : first + step]
        yield Batch(
            numbers=part,
            q_start=all_rows.q_start[part],
            q_len=all_rows.q_len[part],
            k_start=all_rows.k_start[part],
            k_len=all_rows.k_len[part],
            rows=rows,
            keys=keys,
        )
