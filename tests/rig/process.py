"""What a process is made of, as /proc tells it: children, memory, whether it lives; and how to make it stand still."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
"""Longest wait for what happens in milliseconds: a busy machine is no fault of what is tested."""


def children(pid: int) -> list[int]:
    """Its child processes; a server's are one a device."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def anonymous_nbytes(pid: int) -> int:
    """Memory that it has for itself alone, without the files that it maps."""
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in fields if line.startswith("RssAnon"))) << 10


def open_files(pid: int) -> int:
    """How many descriptors it holds."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def is_alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for(value: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first true value, asked for again and again. Raises AssertionError, naming what it is, after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not (found := value()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return found


@contextmanager
def paused(*pids: int) -> Iterator[None]:
    """Processes that stand still while the block runs; those that it ended stay dead.

    What a paused device was given or is given stays in flight, however slow this machine is at the moment.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
