"""What a job multiplies (`Inputs`), and the inputs of one place (`PlaceInputs`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dqkv_kernels import operands
from dqkv_kernels.places import Place
from dqkv_kernels.plan import Plan
from dqkv_kernels.visibility import Region

KEYS_KEPT = 8192
"""Keys of a place that are kept in fp32; more are copied again for each region, whose work hides that."""
MASKS_KEPT = 8
"""Masks of a place's regions kept at once: a window's first, inner and last blocks, a few MiB each at most."""


class Inputs(Protocol):
    """A job's tensors in the dtype that it computes in, (heads, rows, width): `heads` are its independent products."""

    @property
    def plan(self) -> Plan:
        """The call that the job is of."""

    @property
    def precision(self) -> torch.dtype:
        """The dtype of all tensors that are given out, and of sums."""

    @property
    def regions(self) -> list[Region]:
        """Regions that hold every visible pair of the job once."""

    @property
    def blind(self) -> torch.Tensor | None:
        """bool, broadcasts to (heads, rows): rows that see no key, whatever their statistic is; None if all see one."""

    @property
    def can_flash(self) -> bool:
        """Whether PyTorch's CPU kernel may compute the job."""

    def has(self, role: str) -> bool:
        """Whether the tensor was given."""

    def queries(self, role: str) -> torch.Tensor:
        """(heads, rows, width) of q or dout, in memory of its own."""

    def out(self) -> torch.Tensor:
        """(heads, rows, width) of out, which no kernel multiplies; only to be read."""

    def keys(self, role: str, region: Region) -> torch.Tensor:
        """(heads, keys, width) of the region's rows of k or v; only to be read."""

    def statistics(self, role: str) -> torch.Tensor:
        """(heads, rows) of softmax_lse, delta or dlse; only to be read."""

    def sink(self) -> torch.Tensor | None:
        """The sink logits, which broadcast to (heads, rows), or None."""

    def mask(self, region: Region) -> torch.Tensor:
        """bool (rows, keys) or (heads, rows, keys): the visibility of the region's pairs."""

    def bias(self, region: Region) -> torch.Tensor:
        """(rows, keys): 0 where a pair is visible, -inf where it is hidden; only where `can_flash`."""

    def rows_of(self, region: Region) -> slice:
        """The region's rows among the job's."""


class PlaceInputs:
    """The inputs of one place, and which of its pairs are visible."""

    def __init__(self, plan: Plan, place: Place, precision: torch.dtype = torch.float32) -> None:
        self.plan = plan
        self.place = place
        self.precision = precision
        self.regions = list(place.band.regions(place.q0, place.q1))
        self.blind = _outside_band(place, plan.device)
        self.can_flash = plan.can_flash and precision is torch.float32
        self.k0 = min((region.k0 for region in self.regions), default=0)
        self.k1 = max((region.k1 for region in self.regions), default=0)
        self._keys: dict[str, torch.Tensor] = {}
        self._masks: dict[object, torch.Tensor] = {}

    def has(self, role: str) -> bool:
        """Whether the tensor was given."""
        return role in self.plan.tensors

    def queries(self, role: str) -> torch.Tensor:
        """(heads, rows, width) of the place's rows of q or dout."""
        return operands.of_queries(self._query_rows(role), self.place.heads, self._shape)

    def out(self) -> torch.Tensor:
        """(heads, rows, width) of the place's rows of out: a view where it can be."""
        return operands.in_place(self._query_rows("out"), self.place.heads, self._shape)

    def keys(self, role: str, region: Region) -> torch.Tensor:
        """(heads, keys, width) of the region's rows of k or v."""
        if self.k1 - self.k0 > KEYS_KEPT:
            return self._copied_keys(role, region.k0, region.k1)
        if role not in self._keys:
            self._keys[role] = self._copied_keys(role, self.k0, self.k1)
        return self._keys[role][:, region.k0 - self.k0 : region.k1 - self.k0]

    def statistics(self, role: str) -> torch.Tensor:
        """(heads, rows) of the place's rows of softmax_lse, delta or dlse."""
        place = self.place
        rows = operands.statistics_rows(self.plan.tensors[role], self.plan.problem, place.sequence)
        return rows[place.heads.first : place.heads.stop, place.q0 : place.q1].to(self.precision).contiguous()

    def sink(self) -> torch.Tensor | None:
        """(heads, 1): the place's sink logits, or None."""
        sink = self.plan.tensors.get("sink")
        if sink is None:
            return None
        return sink[self.place.heads.first : self.place.heads.stop, None].to(self.precision)

    def mask(self, region: Region) -> torch.Tensor:
        """bool (rows, keys): the visibility of the region's pairs, made once for regions that look alike."""
        return self._kept("mask", region, lambda: self.place.band.mask(region, self.plan.device))

    def bias(self, region: Region) -> torch.Tensor:
        """fp32 (rows, keys): 0 where a pair is visible, -inf where it is hidden."""
        return self._kept("bias", region, lambda: torch.where(self.mask(region), 0.0, -torch.inf))

    def rows_of(self, region: Region) -> slice:
        """The region's rows among the place's."""
        return slice(region.q0 - self.place.q0, region.q1 - self.place.q0)

    @property
    def _shape(self) -> operands.Tile:
        return operands.Tile(width=self.plan.width, dtype=self.precision)

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
        return operands.of_keys(rows, self.place.heads, self._shape)


def _outside_band(place: Place, device: torch.device) -> torch.Tensor | None:
    """bool (rows,): the place's rows that see no key of this call; None if all do."""
    first, stop = place.band.rows
    if first <= place.q0 and place.q1 <= stop:
        return None
    row = torch.arange(place.q0, place.q1, device=device)
    return (row < first) | (row >= stop)
