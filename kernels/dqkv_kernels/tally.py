"""What the jobs of one call add up to besides dq, dk and dv."""

from __future__ import annotations

import threading

import torch

from dqkv_kernels.operands import Heads


class Tally:
    """What the jobs of one call add up to besides dq, dk and dv, in the order of their numbers.

    kernels are the names of those that ran; dsink is fp64 (heads,), zeros without a sink.
    """

    def __init__(self, heads: int, device: torch.device) -> None:
        self.kernels: set[str] = set()
        self.dsink = torch.zeros(heads, dtype=torch.float64, device=device)
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, tuple[Heads, torch.Tensor | None]] = {}

    def add(self, number: int, heads: Heads, kernels: set[str], dsink: torch.Tensor | None) -> None:
        """Take in the job of a number, whose dsink is fp64 (heads.count,) or None where it adds nothing."""
        with self._lock:
            self.kernels |= kernels
            self._waiting[number] = heads, dsink
            while self._next in self._waiting:
                at, part = self._waiting.pop(self._next)
                if part is not None:
                    self.dsink[at.first : at.stop] += part
                self._next += 1
