"""The most memory that several processes hold together at one moment; what they share counts once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

INTERVAL_S = 0.05
BLOCK_NBYTES = 512
"""The unit of st_blocks, whatever the file system's own."""


class PeakMemory:
    """Watches processes while the `with` block runs; `nbytes` is the most that they held together.

    Each process counts with its private memory and all of its program files (RssAnon + RssFile). Shared memory counts
    with what is allocated for it, touched or not, once for each file, however many processes have it open or mapped.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.nbytes = 0
        self._pids = pids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self.nbytes = max(self.nbytes, held_nbytes(self._pids))


def held_nbytes(pids: Sequence[int]) -> int:
    """Bytes that these processes hold now, as PeakMemory counts them."""
    shared: dict[tuple[int, int], int] = {}
    own = 0
    for pid in pids:
        own += status_nbytes(pid, "RssAnon") + status_nbytes(pid, "RssFile")
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # Files come and go while they are counted.
            with suppress(OSError):
                if os.readlink(link).startswith(("/memfd:", "/dev/shm/")):
                    file = os.stat(link)
                    shared[file.st_dev, file.st_ino] = file.st_blocks * BLOCK_NBYTES
    return own + sum(shared.values())


def status_nbytes(pid: int, field: str) -> int:
    """One of the sizes in /proc/PID/status: VmHWM is the most that a process ever had mapped, shared memory too."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) << 10


def available_nbytes() -> int:
    """Memory that a new process can have without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) << 10


class Clock:
    """Seconds since it was last read."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._begun = now - self._begun, now
        return seconds
