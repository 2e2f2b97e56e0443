"""When a request is sent again: only after errors that say that nothing of it counts, and never past its deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from dqkv import errors

T = TypeVar("T")

SAFE_REASONS = {
    errors.Draining.reason: "the server took nothing on",
    errors.QueueFull.reason: "the server took nothing on, and says when to come back",
    errors.QuotaBytes.reason: "the server took nothing on, and says when to come back",
    errors.QuotaStreams.reason: "the server took nothing on, and says when to come back",
    errors.KernelBuilding.reason: "nothing of the request ran, and the server says when to come back",
    errors.DeviceLost.reason: "the process that could still write the answer is dead",
}
"""Reasons after which any request may be sent again, and why that is safe."""

TRANSPORT_REASON = errors.TransportError.reason
"""Nothing says whether the server still works on the request: safe unless it writes into the caller's region."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often and when: `attempts` in all; waits double from first_s up to limit_s, half of each drawn at random."""

    attempts: int = 4
    first_s: float = 0.05
    limit_s: float = 2.0

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        deadline: float,
        writes_region: bool,
        sleep: Callable[[float], Awaitable[None]],
        before_retry: Callable[[], None],
    ) -> T:
        """The first answer. Raises the last error when it is not safe, not worth waiting for, or one too many."""
        number = 0
        while True:
            number += 1
            try:
                return await attempt()
            except errors.DqkvError as error:
                wait = self.wait_s(number, error, writes_region=writes_region)
                if wait is None or time.monotonic() + wait >= deadline:
                    raise
            await sleep(wait)
            before_retry()

    def wait_s(self, number: int, error: errors.DqkvError, *, writes_region: bool) -> float | None:
        """Seconds to wait after the failed attempt `number`, counted from 1; None when it was the last."""
        safe = error.reason in SAFE_REASONS or (error.reason == TRANSPORT_REASON and not writes_region)
        if not safe or number >= self.attempts:
            return None
        step = min(self.first_s * 2.0 ** (number - 1), self.limit_s)
        # The random half keeps many clients that failed together from coming back together.
        jittered = step * random.uniform(0.5, 1.0)  # noqa: S311
        return max(jittered, error.retry_after_s or 0.0)
