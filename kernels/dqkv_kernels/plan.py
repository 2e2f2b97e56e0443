"""What all jobs of one call share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dqkv.problem import Problem
from dqkv_kernels.reference_tiled import Logits

PRECISIONS = (torch.float32, torch.float64)
"""What is computed in, and what again where that overflowed though nothing that was given is NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A call: the inputs by role, which are never written, and where the answers go."""

    problem: Problem[object]
    tensors: Mapping[str, torch.Tensor]
    answers: Mapping[str, torch.Tensor]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors["q"].device

    @property
    def logits(self) -> Logits:
        """How logits follow from q and k."""
        return Logits(softmax_scale=self.problem.softmax_scale, softcap=self.problem.options.softcap)

    @property
    def can_flash(self) -> bool:
        """Whether PyTorch's CPU kernel computes such logits at all."""
        return self.device.type == "cpu" and not self.problem.options.softcap

    @property
    def width(self) -> int:
        """Columns of every operand: PyTorch's kernel wants head_dim_v = head_dim, and a zero column adds nothing."""
        return max(self.problem.shape.head_dim, self.problem.shape.head_dim_v)
