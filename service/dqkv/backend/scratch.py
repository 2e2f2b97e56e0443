"""Private memory of a device's process that tasks take in turn: its pages are there already."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes; a cache line."""


class Scratch:
    """Memory for one task at a time: `take` as often as needed, `clear` when the task is over.

    A first touch costs several times what a copy into warm memory does, so what a task took is kept for the next, up
    to a limit; beyond it memory is fresh and goes with the task. Its content is anything.
    """

    def __init__(self, *, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._memory = np.empty(0, dtype=np.uint8)
        self._taken_nbytes = 0
        self._taking = threading.Lock()

    @property
    def kept_nbytes(self) -> int:
        """Bytes that stay between tasks."""
        return self._memory.nbytes

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """nbytes of memory that nobody else has until `clear`; any thread may ask. Raises MemoryError."""
        with self._taking:
            start = self._taken_nbytes
            self._taken_nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
            kept = self._memory[start : start + nbytes]
        return kept if kept.nbytes == nbytes else np.empty(nbytes, dtype=np.uint8)

    def clear(self) -> None:
        """Ends the task: all memory that was taken may be taken again."""
        wanted = min(self._taken_nbytes, self._limit_nbytes)
        self._taken_nbytes = 0
        if wanted > self._memory.nbytes:
            self._memory = np.empty(wanted, dtype=np.uint8)
