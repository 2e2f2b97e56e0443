"""What all jobs of one call share: the inputs, where the answers go, and the masks of a place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dqkv.problem import Problem
from dqkv_kernels import operands
from dqkv_kernels.places import Place
from dqkv_kernels.reference_tiled import Logits
from dqkv_kernels.visibility import Region

MASKS_KEPT = 8
"""Masks of a place's regions kept at once: a window's first, inner and last blocks, a few MiB each at most."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all jobs of a call share: the inputs by role, which are never written, and where the answers go."""

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

    def queries(self, role: str, place: Place) -> torch.Tensor:
        """fp32 (heads, rows, width) of a place's rows of q, dout or out."""
        rows = operands.query_rows(self.tensors[role], self.problem, place.sequence)[place.q0 : place.q1]
        return operands.of_queries(rows, place.heads, self.width)

    def keys(self, role: str, place: Place, region: Region) -> torch.Tensor:
        """fp32 (heads, keys, width) of a region's rows of k or v."""
        rows = operands.key_rows(self.tensors[role], self.problem, place.sequence)[region.k0 : region.k1]
        return operands.of_keys(rows, place.heads, self.width)

    def statistics(self, role: str, place: Place) -> torch.Tensor:
        """fp32 (heads, rows) of a place's rows of softmax_lse, delta or dlse."""
        rows = operands.statistics_rows(self.tensors[role], self.problem, place.sequence)
        return rows[place.heads.first : place.heads.stop, place.q0 : place.q1].contiguous()

    def sink(self, place: Place) -> torch.Tensor | None:
        """A place's sink logits (heads,), or None."""
        sink = self.tensors.get("sink")
        return None if sink is None else sink[place.heads.first : place.heads.stop]


class Masks:
    """The visibility of a place's regions, made once for regions that look alike."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._band = place.band
        self._device = device
        self._kept: dict[object, torch.Tensor] = {}

    def __call__(self, region: Region) -> torch.Tensor:
        """bool (rows, keys)."""
        key = self._band.mask_key(region)
        if key not in self._kept:
            if len(self._kept) == MASKS_KEPT:
                self._kept.clear()
            self._kept[key] = self._band.mask(region, self._device)
        return self._kept[key]
