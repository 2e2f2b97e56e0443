"""The C heap of a process through which megabytes stream."""

from __future__ import annotations

import ctypes

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -8, -3, -1, -2
_KEEP = (
    # One arena: those of other threads give back whole heaps of 64 MiB however high the threshold is.
    (_ARENA_MAX, 1),
    # As high as glibc goes: every frame of a stream comes from the heap, none from a mapping of its own.
    (_MMAP_THRESHOLD, 32 << 20),
    # What flow control lets be under way at once, and as much again.
    (_TRIM_THRESHOLD, 128 << 20),
    # Grows in steps of a few frames.
    (_TOP_PAD, 8 << 20),
)
"""glibc's mallopt(3) parameters and values."""


def keep_freed_memory() -> bool:
    """Lets glibc keep what was freed, up to 128 MiB, for the next frame; whether this C library knows how.

    Each frame of a stream is memory that is freed a millisecond later. By default its pages go back to the kernel and
    come again one fault at a time, a tenth of the time that a stream takes. To be called before there are threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(parameter, value) for parameter, value in _KEEP]
    return all(taken)
