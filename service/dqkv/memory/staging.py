"""Staging memory: where bytes that came over a connection wait for a device, and gradients for their way back."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dqkv import errors
from dqkv.memory import memfd
from dqkv.memory.block import Block

PAGE_NBYTES = mmap.PAGESIZE
SMALLEST_NBYTES = 1 << 16
"""Smaller requests share this size of block, so that a block that one left fits the next."""
STEPS = 8
"""Sizes of blocks between two powers of two: an eighth is the most that a request wastes."""
RETRY_AFTER_S = 0.5


class Staging:
    """Part of the pool for one request: `block` for a device, `view` (bytes, writable) for the front."""

    def __init__(self, pool: StagingPool, slot: _Slot, nbytes: int) -> None:
        self._pool = pool
        self._slot: _Slot | None = slot
        self.block: Block = slot.block
        self.view: memoryview = slot.lend(nbytes)

    def release(self) -> None:
        """Gives the memory back; again does nothing. What a view still shows is not lent again before that ends."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        # An array that somebody made of it still shows the memory; the slot finds out when that is gone.
        with contextlib.suppress(BufferError):
            self.view.release()
        self.view = memoryview(b"")
        self._pool.give_back(slot)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


class StagingPool:
    """Blocks of sealed anonymous memory, mapped here, kept warm between requests; belongs to the event loop.

    A warm block costs nothing to take, a new one what the kernel takes to find its pages (seen: 0.2 to 0.4 s a GB).
    """

    def __init__(
        self,
        *,
        limit_nbytes: int,
        block_ids: Iterator[int],
        on_drop: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit_nbytes bounds all blocks together; on_drop(block_id) is called when a block is closed."""
        self._limit_nbytes = limit_nbytes // PAGE_NBYTES * PAGE_NBYTES
        self._block_ids = block_ids
        self._on_drop = on_drop
        self._clock = clock
        self._total_nbytes = 0
        self._used: set[_Slot] = set()
        self._idle: list[_Slot] = []  # released last at the end
        self._files: set[tuple[int, int]] = set()
        self._closed = False

    @property
    def total_nbytes(self) -> int:
        """Bytes of all blocks, also of those that are being made."""
        return self._total_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes of the blocks that requests hold."""
        return sum(slot.block.nbytes for slot in self._used)

    def owns(self, device: int, inode: int) -> bool:
        """Whether a file is one of this pool's blocks."""
        return (device, inode) in self._files

    def acquire(self, nbytes: int) -> Staging:
        """Memory of at least nbytes, whose old content is anything. Makes a block on the spot if no warm one fits.

        Raises SizeOverflow for a negative size, TooLarge for more than the pool could ever hold, QuotaBytes while
        others hold too much of it or the machine has no memory.
        """
        warm = self._take_warm(nbytes)
        if warm is not None:
            return self._lend(warm, nbytes)
        size = self._reserve(nbytes)
        try:
            fd = memfd.create("dqkv-staging", size)
        except BaseException:
            self._total_nbytes -= size
            raise
        return self._lend(self._slot(fd, size), nbytes)

    async def acquire_async(self, nbytes: int) -> Staging:
        """As acquire, but a new block is made on a thread, so that the loop goes on meanwhile."""
        warm = self._take_warm(nbytes)
        if warm is not None:
            return self._lend(warm, nbytes)
        size = self._reserve(nbytes)
        making = asyncio.get_running_loop().run_in_executor(None, memfd.create, "dqkv-staging", size)
        try:
            fd = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: self._keep(made, size))
            raise
        except BaseException:
            self._total_nbytes -= size
            raise
        return self._lend(self._slot(fd, size), nbytes)

    def give_back(self, slot: _Slot) -> None:
        """Takes a slot back from its Staging."""
        self._used.discard(slot)
        slot.idle_since = self._clock()
        if self._closed:
            self._drop(slot)
        else:
            self._idle.append(slot)

    def trim(self, idle_s: float) -> None:
        """Closes the blocks that nobody used for idle_s seconds."""
        before = self._clock() - idle_s
        for slot in [slot for slot in self._idle if slot.idle_since <= before and not slot.is_seen]:
            self._idle.remove(slot)
            self._drop(slot)

    def close(self) -> None:
        """Closes idle blocks now and the others when they are released."""
        self._closed = True
        while self._idle:
            self._drop(self._idle.pop())

    def _take_warm(self, nbytes: int) -> _Slot | None:
        """The smallest idle block that fits and is at most twice as large, the one used last first."""
        if nbytes < 0:
            raise errors.SizeOverflow(f"staging memory of {nbytes} bytes was asked for", field="nbytes")
        if nbytes > self._limit_nbytes:
            raise errors.TooLarge(
                f"the request needs {nbytes} bytes of staging memory, this server has {self._limit_nbytes}"
            )
        limit = 2 * max(nbytes, SMALLEST_NBYTES)
        fitting = [slot for slot in reversed(self._idle) if nbytes <= slot.block.nbytes <= limit and not slot.is_seen]
        if not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.block.nbytes)
        self._idle.remove(slot)
        return slot

    def _reserve(self, nbytes: int) -> int:
        """Counts a block for nbytes as there, closing idle ones, oldest first, where there is no room otherwise."""
        size = min(_rounded(nbytes), self._limit_nbytes)
        for slot in list(self._idle):
            if self._total_nbytes + size <= self._limit_nbytes:
                break
            if not slot.is_seen:
                self._idle.remove(slot)
                self._drop(slot)
        if self._total_nbytes + size > self._limit_nbytes:
            raise errors.QuotaBytes(
                f"the request needs {nbytes} bytes of staging memory, "
                f"requests in flight hold {self._total_nbytes} of {self._limit_nbytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._total_nbytes += size
        return size

    def _slot(self, fd: int, size: int) -> _Slot:
        slot = _Slot(Block(block_id=next(self._block_ids), fd=fd, nbytes=size, sealed=True, writable=True))
        self._files.add(slot.file)
        return slot

    def _lend(self, slot: _Slot, nbytes: int) -> Staging:
        self._used.add(slot)
        return Staging(self, slot, nbytes)

    def _keep(self, made: asyncio.Future[int], size: int) -> None:
        # Its request is gone; the next one finds it warm.
        if made.cancelled() or made.exception() is not None:
            self._total_nbytes -= size
        else:
            self.give_back(self._slot(made.result(), size))

    def _drop(self, slot: _Slot) -> None:
        self._total_nbytes -= slot.block.nbytes
        self._files.discard(slot.file)
        slot.close()
        self._on_drop(slot.block.block_id)


class _Slot:
    """A block and its mapping; knows whether a view of it that somebody was lent is still alive."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.idle_since = 0.0
        status = os.fstat(block.fd)
        self.file = (status.st_dev, status.st_ino)
        self._mapping = mmap.mmap(block.fd, block.nbytes)
        self._lent: weakref.ref[NDArray[Any]] | None = None

    @property
    def is_seen(self) -> bool:
        """Whether a view that was lent, or one made of it, still shows the memory."""
        return self._lent is not None and self._lent() is not None

    def lend(self, nbytes: int) -> memoryview:
        # Every view of the memory keeps this array alive, and nothing else does.
        array = np.frombuffer(self._mapping, dtype=np.uint8, count=nbytes) if nbytes else np.empty(0, dtype=np.uint8)
        self._lent = weakref.ref(array)
        return array.data

    def close(self) -> None:
        """Closes the file and, unless a view still shows it, the mapping; that one goes away with its last view."""
        if not self.is_seen:
            self._mapping.close()
        os.close(self.block.fd)


def _rounded(nbytes: int) -> int:
    size = max(nbytes, SMALLEST_NBYTES)
    step = max((1 << (size - 1).bit_length()) // (2 * STEPS), PAGE_NBYTES)
    return -(-size // step) * step
