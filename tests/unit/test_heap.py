"""The heap of the server's process: a frame's memory comes from the frame before."""

from __future__ import annotations

import subprocess
import sys

FRAMES = """
import resource, sys, threading
from dqkv.server import heap

if sys.argv[1] == "kept":
    assert heap.keep_freed_memory()

def frames(count):
    for _ in range(count):
        held = [bytes(1 << 20) for _ in range(8)]
        del held

def on_a_thread(count):
    thread = threading.Thread(target=frames, args=(count,))
    thread.start()
    thread.join()

on_a_thread(10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
on_a_thread(100)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(heap: str) -> int:
    """Pages that 800 frames of 1 MiB, eight at a time on a thread, had to ask the kernel for."""
    run = [sys.executable, "-c", FRAMES, heap]
    return int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_frames_ask_the_kernel_for_no_pages() -> None:
    assert faults("kept") < 1000
    # As glibc does it by itself: the test would see nothing if this came to the same.
    assert faults("plain") > 10_000
