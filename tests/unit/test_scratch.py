"""Scratch: memory that tasks take in turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dqkv.backend.scratch import ALIGNMENT, Scratch

LIMIT = 1 << 20


def addresses(scratch: Scratch, *sizes: int) -> list[int]:
    return [memory.ctypes.data for memory in [scratch.take(nbytes) for nbytes in sizes]]


def test_the_second_task_gets_the_first_ones_memory_again() -> None:
    scratch = Scratch(limit_nbytes=LIMIT)
    for _ in range(2):
        scratch.clear()
        scratch.take(3000)
        scratch.take(5000)
    scratch.clear()
    first = addresses(scratch, 3000, 5000)
    scratch.clear()
    assert addresses(scratch, 3000, 5000) == first


@pytest.mark.parametrize(
    "sizes", [(0,), (0, 0, 1), (1, 63, 64, 65), (LIMIT, 1), (1, LIMIT), (2 * LIMIT,), (LIMIT - 64, 64)]
)
def test_what_one_task_takes_never_overlaps(sizes: tuple[int, ...]) -> None:
    scratch = Scratch(limit_nbytes=LIMIT)
    for _ in range(3):
        pieces = [scratch.take(nbytes) for nbytes in sizes]
        assert [piece.nbytes for piece in pieces] == list(sizes)
        for number, piece in enumerate(pieces):
            piece[...] = number
        for number, piece in enumerate(pieces):
            assert (piece == number).all()
        scratch.clear()


def test_no_more_than_the_limit_is_kept() -> None:
    scratch = Scratch(limit_nbytes=LIMIT)
    for nbytes in (10 * LIMIT, LIMIT, 10):
        scratch.take(nbytes)
        scratch.clear()
        assert scratch.kept_nbytes <= LIMIT


def test_pieces_begin_on_cache_lines() -> None:
    scratch = Scratch(limit_nbytes=LIMIT)
    scratch.take(LIMIT)
    scratch.clear()
    first, *others = addresses(scratch, 1, 3, 65, 1)
    assert all((other - first) % ALIGNMENT == 0 for other in others)


def test_threads_take_different_memory() -> None:
    scratch = Scratch(limit_nbytes=LIMIT)
    scratch.take(LIMIT)
    scratch.clear()

    def fill(number: int) -> tuple[int, np.ndarray]:
        piece = scratch.take(1000)
        piece[...] = number % 251
        return number, piece

    with ThreadPoolExecutor(8) as pool:
        filled = list(pool.map(fill, range(500)))
    assert all((piece == number % 251).all() for number, piece in filled)
