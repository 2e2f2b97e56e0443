"""One watchdog for all streams: whoever keeps a stream waiting for too long loses it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watch:
    """One stream's: `waiting` marks the time in which the other side has to do something.

    It rings inside such a time alone: who leaves one and finds that it did not ring may go on.
    """

    def __init__(self, ring: Callable[[], object], limit_s: float) -> None:
        self._ring = ring
        self._changing = threading.Lock()
        self._since: float | None = None
        self.limit_s = limit_s
        self.rang = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The other side's turn, while the block runs."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            with self._changing:
                self._since = None

    def look(self, now: float) -> None:
        """Rings, once, when the other side's turn lasts longer than the limit."""
        with self._changing:
            since = self._since
            if since is None or now - since <= self.limit_s or self.rang:
                return
            self.rang = True
        self._ring()


class Watchdog:
    """Looks at every watch several times within the limit (seconds); `ring` is called on the loop and must not wait."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._watches: set[Watch] = set()

    @contextmanager
    def watch(self, ring: Callable[[], object]) -> Iterator[Watch]:
        """Watches a stream while the block runs; from any thread."""
        watch = Watch(ring, self._limit_s)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(min(self._limit_s / 4, 1.0))
            now = time.monotonic()
            # A copy in one step: threads add and discard meanwhile.
            for watch in list(self._watches):
                watch.look(now)
