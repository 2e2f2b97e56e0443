"""How a problem is split into jobs: all of it once, in parts of about one size, the longest first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dqkv.problem import Lengths, Problem
from dqkv.tensor import DType, Tensor
from dqkv_kernels.places import JOBS_LEAST, Place, chains

LENGTHS = (64, 0, 448, 192, 320)


def problem_of(heads: int, kv_heads: int, lengths: tuple[int, ...] = LENGTHS, head_dim: int = 64) -> Problem[Any]:
    bounds = (0, *np.cumsum(lengths).tolist())

    def tensor(count: int) -> Tensor[None]:
        shape = (bounds[-1], count, head_dim)
        return Tensor(dtype=DType.FP32, shape=shape, strides=(count * head_dim, head_dim, 1), data=None)

    packed = Lengths(cu_seqlens=bounds)
    q, k = tensor(heads), tensor(kv_heads)
    return Problem(q=q, k=k, v=k, dout=q, out=q, queries=packed, keys=packed)


def places_of(problem: Problem[Any]) -> list[Place]:
    live = np.asarray(problem.rows.q_len > 0)
    return [place for chain in chains(problem, live) for place in chain.places]


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (30, 10), (32, 1), (7, 7), (40, 2), (1, 1)])
def test_every_row_of_every_head_is_in_one_place(heads, kv_heads):
    problem = problem_of(heads, kv_heads)
    group = heads // kv_heads
    count = np.zeros((sum(LENGTHS), heads), dtype=int)
    for place in places_of(problem):
        start = place.sequence.q_start
        count[start + place.q0 : start + place.q1, place.heads.first : place.heads.stop] += 1
        assert place.heads.kv_first == place.heads.first // group
        assert place.heads.kv_stop == -(-place.heads.stop // group)
    assert (count == 1).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (30, 10), (33, 33), (128, 64)])
def test_the_jobs_of_a_sequence_are_as_even_as_whole_groups_allow(heads, kv_heads):
    group = heads // kv_heads
    for length in filter(None, LENGTHS):
        sizes = [p.heads.count for p in places_of(problem_of(heads, kv_heads)) if p.sequence.q_len == length]
        assert sum(sizes) == heads
        assert max(sizes) == -(-kv_heads // len(sizes)) * group


@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 1), (34, 2), (17, 1)])
def test_the_jobs_of_a_group_too_large_for_one_are_even(heads, kv_heads):
    problem = problem_of(heads, kv_heads, (2048,))
    for chain in chains(problem, np.asarray(problem.rows.q_len > 0)):
        sizes = [place.heads.count for place in chain.places]
        assert sum(sizes) == heads // kv_heads
        assert max(sizes) == -(-sum(sizes) // len(sizes)) < heads // kv_heads


def test_the_longest_sequences_come_first_whatever_their_place_in_the_batch():
    lengths = [place.sequence.q_len for place in places_of(problem_of(32, 32))]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == max(LENGTHS)


def test_there_are_jobs_for_every_core_of_a_small_machine():
    for heads, lengths in ((32, (1024,)), (8, (4096,)), (1, (8192,))):
        assert len(places_of(problem_of(heads, heads, lengths))) >= JOBS_LEAST
