"""How quick something is, told apart from how quick this machine is at the moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

PROBES = 15
ROUNDS = 8


def steady_s(probe: Callable[[], Any], *, below_s: float) -> float:
    """Seconds that a probe takes: the median of a round, of the first round in which it is below the limit.

    A machine that is disturbed spoils some rounds; what is slow itself is slow in every one. Without a good round it is
    the best of them.
    """
    medians = []
    for _ in range(ROUNDS):
        medians.append(statistics.median(_timed(probe) for _ in range(PROBES)))
        if medians[-1] < below_s:
            break
    return min(medians)


def _timed(probe: Callable[[], Any]) -> float:
    began = time.perf_counter()
    probe()
    return time.perf_counter() - began
