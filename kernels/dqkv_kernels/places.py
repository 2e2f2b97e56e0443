"""How a problem is split into jobs: by its sizes alone, so that no sum depends on how many threads there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dqkv.problem import Problem
from dqkv_kernels.operands import Heads, Sequence, Sum
from dqkv_kernels.reference_tiled import TILE_KEYS, TILE_ROWS
from dqkv_kernels.visibility import Band
from dqkv_kernels.workers import Turns

JOBS_LEAST = 8
"""Heads are joined, and rows left together, only while there are as many jobs as a machine may have cores."""
JOB_BYTES = 2**22
"""fp32 bytes of one of a job's tensors at most, where it has more than one head."""
JOB_ROWS = (512, 4096)
"""Query rows of a job, least and most: partial sums cost more the fewer rows, memory grows with them."""
BANDS_KEPT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What one job computes: the query rows q0 to q1 of some heads of a sequence, against every key that they see."""

    sequence: Sequence
    band: Band
    heads: Heads
    q0: int
    q1: int
    turn: int


@dataclass(kw_only=True, eq=False)
class Chain:
    """The places whose dk and dv add up to those of the same key heads of a sequence, in the order of the sum."""

    places: tuple[Place, ...]
    turns: Turns = field(default_factory=Turns, init=False)
    dk: Sum | None = field(default=None, init=False)
    dv: Sum | None = field(default=None, init=False)


def live_sequences(problem: Problem[object]) -> NDArray[np.bool_]:
    """bool (batch_size,): which sequences have a row that sees a key, or a row that only the sink's gradient sees.

    All others have gradients of zero, and are in no place.
    """
    rows, window = problem.rows, problem.options.window
    if problem.sink is not None:
        return np.asarray(rows.q_len > 0)
    live = np.asarray((rows.q_len > 0) & (rows.k_len > 0))
    lengths, kind = np.unique(np.stack([rows.q_len[live], rows.k_len[live]]), axis=1, return_inverse=True)
    sees = [Band.of(int(q_len), int(k_len), window).rows != (0, 0) for q_len, k_len in lengths.T]
    live[live] = np.array(sees, dtype=np.bool_)[kind.reshape(-1)]
    return live


def chains(problem: Problem[object], live: NDArray[np.bool_]) -> Iterator[Chain]:
    """Every row and head of the live sequences (bool (batch_size,)) in exactly one place, made when asked for."""
    shape, window, rows = problem.shape, problem.options.window, problem.rows
    # the longest first, so that what is left at the end is small and all threads are done at about the same time
    numbers = np.flatnonzero(live)
    numbers = numbers[np.argsort(-rows.q_len[numbers] * rows.k_len[numbers], kind="stable")]
    units = shape.num_heads_q * len(numbers)
    band = lru_cache(maxsize=BANDS_KEPT)(lambda q_len, k_len: Band.of(q_len, k_len, window))
    for number in numbers.tolist():
        sequence = Sequence(
            index=number,
            q_start=int(rows.q_start[number]),
            q_len=int(rows.q_len[number]),
            k_start=int(rows.k_start[number]),
            k_len=int(rows.k_len[number]),
        )
        step = _rows(sequence.q_len, units)
        starts = range(0, sequence.q_len, step)
        fitting = JOB_BYTES // _head_bytes(problem, min(step, sequence.q_len), sequence.k_len)
        count = max(1, min(fitting, units // JOBS_LEAST))
        for blocks in _head_blocks(shape.num_heads_q, shape.group_size, count):
            yield Chain(
                places=tuple(
                    Place(
                        sequence=sequence,
                        band=band(sequence.q_len, sequence.k_len),
                        heads=heads,
                        q0=start,
                        q1=min(start + step, sequence.q_len),
                        turn=part * len(starts) + order,
                    )
                    for part, heads in enumerate(blocks)
                    for order, start in enumerate(starts)
                )
            )


def _head_bytes(problem: Problem[object], rows: int, keys: int) -> int:
    """fp32 bytes of one head of the largest of a job's tensors: its rows, its keys, or a tile of logits."""
    width = max(problem.shape.head_dim, problem.shape.head_dim_v)
    logits = min(rows, TILE_ROWS) * min(keys, TILE_KEYS)
    return 4 * max(width * rows, width * min(keys, JOB_ROWS[1]), logits)


def _rows(q_len: int, units: int) -> int:
    """Query rows of a job."""
    least, most = JOB_ROWS
    wanted = -(-q_len * max(units, 1) // JOBS_LEAST) if units < JOBS_LEAST else q_len
    return min(max(wanted, least), most)


def _head_blocks(num_heads_q: int, group_size: int, count: int) -> Iterator[list[Heads]]:
    """For each chain the heads of its places: some whole groups in one place, or the parts of one group."""
    if group_size <= count:
        # as many blocks as that takes, of about one size
        groups = num_heads_q // group_size
        step = -(-groups // -(-groups // (count // group_size))) * group_size
        for first in range(0, num_heads_q, step):
            stop = min(first + step, num_heads_q)
            yield [Heads(first=first, stop=stop, kv_first=first // group_size, kv_stop=stop // group_size)]
        return
    step = -(-group_size // -(-group_size // count))
    for first in range(0, num_heads_q, group_size):
        kv = first // group_size
        yield [
            Heads(first=part, stop=min(part + step, first + group_size), kv_first=kv, kv_stop=kv + 1)
            for part in range(first, first + group_size, step)
        ]
