"""Scratch memory of one stream of one device; it grows to the largest problem seen and is then reused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

ALIGNMENT_BYTES = 16


@dataclass
class Workspace:
    """Named buffers on one device, for the kernels that run one after the other on one stream."""

    device: torch.device
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    generation: int = 0
    """Counts the times a buffer grew: views taken before are then of memory given back."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape with whatever was left in it; the same name gives the same memory again."""
        nbytes = max(math.prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            self.buffers.pop(name, None)
            buffer = self.buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.generation += 1
        return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def must_grow(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether any of these 4-byte tensors does not fit what is there under its name."""
        have = {name: buffer.numel() for name, buffer in self.buffers.items()}
        return any(math.prod(shape) * 4 > have.get(name, 0) for name, shape in shapes.items())
