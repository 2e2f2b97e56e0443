"""What all jobs of one call share (`Plan`), and what the regions of one place share (`Inputs`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dqkv.problem import Problem
from dqkv_kernels import operands
from dqkv_kernels.places import Place
from dqkv_kernels.reference_tiled import Logits
from dqkv_kernels.visibility import Region

KEYS_KEPT = 8192
"""Keys of a place that are kept in fp32; more are copied again for each region, whose work hides that."""
MASKS_KEPT = 8
"""Masks of a place's regions kept at once: a window's first, inner and last blocks, a few MiB each at most."""


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


class Inputs:
    """The inputs of one place in fp32, and which of its pairs are visible."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.plan = plan
        self.place = place
        self.regions = list(place.band.regions(place.q0, place.q1))
        self.k0 = min((region.k0 for region in self.regions), default=0)
        self.k1 = max((region.k1 for region in self.regions), default=0)
        self._keys: dict[str, torch.Tensor] = {}
        self._masks: dict[object, torch.Tensor] = {}

    def has(self, role: str) -> bool:
        """Whether the tensor was given."""
        return role in self.plan.tensors

    def queries(self, role: str) -> torch.Tensor:
        """fp32 (heads, rows, width) of the place's rows of q or dout."""
        return operands.of_queries(self._query_rows(role), self.place.heads, self.plan.width)

    def out(self) -> torch.Tensor:
        """fp32 (heads, rows, width) of the place's rows of out, which no kernel multiplies: a view where it can be."""
        return operands.in_place(self._query_rows("out"), self.place.heads, self.plan.width)

    def keys(self, role: str, region: Region) -> torch.Tensor:
        """fp32 (heads, keys, width) of the region's rows of k or v."""
        if self.k1 - self.k0 > KEYS_KEPT:
            return self._copied_keys(role, region.k0, region.k1)
        if role not in self._keys:
            self._keys[role] = self._copied_keys(role, self.k0, self.k1)
        return self._keys[role][:, region.k0 - self.k0 : region.k1 - self.k0]

    def statistics(self, role: str) -> torch.Tensor:
        """fp32 (heads, rows) of the place's rows of softmax_lse, delta or dlse."""
        place = self.place
        rows = operands.statistics_rows(self.plan.tensors[role], self.plan.problem, place.sequence)
        return rows[place.heads.first : place.heads.stop, place.q0 : place.q1].contiguous()

    def sink(self) -> torch.Tensor | None:
        """fp32 (heads,): the place's sink logits, or None."""
        sink = self.plan.tensors.get("sink")
        return None if sink is None else sink[self.place.heads.first : self.place.heads.stop].float()

    def mask(self, region: Region) -> torch.Tensor:
        """bool (rows, keys): the visibility of the region's pairs, made once for regions that look alike."""
        return self._kept("mask", region, lambda: self.place.band.mask(region, self.plan.device))

    def bias(self, region: Region) -> torch.Tensor:
        """fp32 (rows, keys): 0 where a pair is visible, -inf where it is hidden."""
        return self._kept("bias", region, lambda: torch.where(self.mask(region), 0.0, -torch.inf))

    def rows_of(self, region: Region) -> slice:
        """The region's rows among the place's."""
        return slice(region.q0 - self.place.q0, region.q1 - self.place.q0)

    def _kept(self, kind: str, region: Region, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        key = (kind, self.place.band.mask_key(region))
        found = self._masks.get(key)
        if found is None:
            if len(self._masks) >= MASKS_KEPT:
                self._masks.clear()
            found = self._masks[key] = make()
        return found

    def _query_rows(self, role: str) -> torch.Tensor:
        place = self.place
        rows = operands.query_rows(self.plan.tensors[role], self.plan.problem, place.sequence)
        return rows[place.q0 : place.q1]

    def _copied_keys(self, role: str, k0: int, k1: int) -> torch.Tensor:
        rows = operands.key_rows(self.plan.tensors[role], self.plan.problem, self.place.sequence)[k0:k1]
        return operands.of_keys(rows, self.place.heads, self.plan.width)
