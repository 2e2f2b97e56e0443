"""How a problem is split into jobs: by its sizes alone, so that no sum depends on how many threads there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from dqkv.problem import Problem
from dqkv_kernels.operands import Heads, Sequence, Sum, sequences
from dqkv_kernels.visibility import Band

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
    dk: Sum | None = field(default=None, init=False)
    dv: Sum | None = field(default=None, init=False)


def chains(problem: Problem[object]) -> Iterator[Chain]:
    """Every row and head of the problem in exactly one place; a sequence without rows has places without rows."""
    shape, window = problem.shape, problem.options.window
    found = sequences(problem)
    units = shape.num_heads_q * sum(1 for sequence in found if sequence.q_len and sequence.k_len)
    band = lru_cache(maxsize=BANDS_KEPT)(lambda q_len, k_len: Band.of(q_len, k_len, window))
    for sequence in found:
        row_bytes = 4 * max(shape.head_dim, shape.head_dim_v)
        rows = _rows(sequence.q_len, units)
        fitting = JOB_BYTES // (row_bytes * max(1, rows, min(sequence.k_len, JOB_ROWS[1])))
        count = max(1, min(fitting, units // JOBS_LEAST))
        for blocks in _head_blocks(shape.num_heads_q, shape.group_size, count):
            starts = range(0, max(1, sequence.q_len), rows)
            yield Chain(
                places=tuple(
                    Place(
                        sequence=sequence,
                        band=band(sequence.q_len, sequence.k_len),
                        heads=heads,
                        q0=start,
                        q1=min(start + rows, sequence.q_len),
                        turn=number * len(starts) + order,
                    )
                    for number, heads in enumerate(blocks)
                    for order, start in enumerate(starts)
                )
            )


def _rows(q_len: int, units: int) -> int:
    """Query rows of a job."""
    least, most = JOB_ROWS
    wanted = -(-q_len * max(units, 1) // JOBS_LEAST) if units < JOBS_LEAST else q_len
    return min(max(wanted, least), most)


def _head_blocks(num_heads_q: int, group_size: int, count: int) -> Iterator[list[Heads]]:
    """For each chain the heads of its places: some whole groups in one place, or the parts of one group."""
    if group_size <= count:
        step = count // group_size * group_size
        for first in range(0, num_heads_q, step):
            stop = min(first + step, num_heads_q)
            yield [Heads(first=first, stop=stop, kv_first=first // group_size, kv_stop=stop // group_size)]
        return
    for first in range(0, num_heads_q, group_size):
        kv = first // group_size
        yield [
            Heads(first=part, stop=min(part + count, first + group_size), kv_first=kv, kv_stop=kv + 1)
            for part in range(first, first + group_size, count)
        ]
