"""The query side of one place in fp32, and the choice of kernel for each of its regions."""

from __future__ import annotations

from functools import cached_property

import torch

from dqkv_kernels import reference_flash, reference_tiled
from dqkv_kernels.places import Place
from dqkv_kernels.plan import Masks, Plan
from dqkv_kernels.reference_tiled import LogSumExp
from dqkv_kernels.visibility import Region
from dqkv_kernels.workers import Crew

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def softmax_lse(plan: Plan, place: Place, q: torch.Tensor, crew: Crew) -> torch.Tensor:
    """The softmax_lse (heads, rows) of a place whose q is fp32 (heads, rows, width)."""
    found = LogSumExp(q.shape[0], q.shape[1], q.device)
    masks = Masks(place, plan.device)
    for region in place.regions:
        crew.check()
        rows = slice(region.q0 - place.q0, region.q1 - place.q0)
        found.add(region, rows, (q[:, rows], plan.keys("k", place, region)), plan.logits, masks)
    return found.value(plan.sink(place))


class QueryBlock:
    """q, dout and the statistics of one place's rows, ready to meet the keys of its regions."""

    def __init__(self, plan: Plan, place: Place, crew: Crew) -> None:
        self._plan = plan
        self._place = place
        self._masks = Masks(place, plan.device)
        self._q = plan.queries("q", place)
        self._dout = plan.queries("dout", place)
        is_given = "softmax_lse" in plan.tensors
        found = plan.statistics("softmax_lse", place) if is_given else softmax_lse(plan, place, self._q, crew)
        # An infinite statistic means that the row sees nothing; +inf makes each of its weights exp(-inf) = 0.
        self._softmax_lse = found.masked_fill(torch.isinf(found), torch.inf)

    def gradients(self, region: Region) -> tuple[str, Parts]:
        """The name of the kernel that ran, and dq, dk, dv (heads, rows or keys, width) that the region adds, fp32."""
        plan, place = self._plan, self._place
        k, v = plan.keys("k", place, region), plan.keys("v", place, region)
        rows = slice(region.q0 - place.q0, region.q1 - place.q0)
        q, dout, lse = self._q[:, rows], self._dout[:, rows], self._softmax_lse[:, rows]
        if self._out is not None and self._is_finite_with(k, v):
            queries = (q, dout, self._out[:, rows], lse)
            return reference_flash.KERNEL, reference_flash.gradients(
                region, queries, (k, v), plan.problem.softmax_scale, self._masks
            )
        queries = (q, dout, self._delta[:, rows], lse)
        return f"{plan.device.type}/{reference_tiled.KERNEL}", reference_tiled.gradients(
            region, queries, (k, v), plan.logits, self._masks
        )

    @property
    def dsink(self) -> torch.Tensor:
        """fp64 (heads,): the place's sum of exp(sink - softmax_lse) * (dlse - delta); zeros without a sink."""
        sink = self._plan.sink(self._place)
        if sink is None:
            return torch.zeros(self._q.shape[0], dtype=torch.float64, device=self._q.device)
        weight = (sink.float().unsqueeze(-1) - self._softmax_lse).exp()
        part = (weight * self._delta).masked_fill(torch.isinf(self._softmax_lse), 0.0)
        return -part.double().sum(-1)

    @cached_property
    def _given_out(self) -> torch.Tensor | None:
        return self._plan.queries("out", self._place) if "out" in self._plan.tensors else None

    @cached_property
    def _delta(self) -> torch.Tensor:
        """delta - dlse (heads, rows): what is subtracted from each product of dout and v."""
        out = self._given_out
        delta = self._plan.statistics("delta", self._place) if out is None else (self._dout * out).sum(-1)
        return delta - self._plan.statistics("dlse", self._place) if "dlse" in self._plan.tensors else delta

    @cached_property
    def _out(self) -> torch.Tensor | None:
        """An out (heads, rows, width) with rowsum(dout * out) = delta - dlse; None if PyTorch's kernel cannot run."""
        if not self._plan.can_flash:
            return None
        if self._given_out is None or "dlse" in self._plan.tensors:
            return reference_flash.stand_in_for_out(self._dout, self._delta)
        bound = reference_flash.largest(self._dout) * reference_flash.largest(self._given_out) * self._plan.width
        return self._given_out if bound < reference_flash.SAFE_PRODUCT else None

    @cached_property
    def _largest(self) -> tuple[float, float]:
        """Bounds of a logit for each unit of k's largest element, and of a product of dout and v for each of v's."""
        width = self._plan.width
        scale = max(abs(self._plan.problem.softmax_scale), 1.0)
        return reference_flash.largest(self._q) * width * scale, reference_flash.largest(self._dout) * width

    def _is_finite_with(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether no product with these keys overflows: the zero weight of a hidden pair times it must be zero."""
        by_k, by_v = self._largest
        limit = reference_flash.SAFE_PRODUCT
        return by_k * reference_flash.largest(k) < limit and by_v * reference_flash.largest(v) < limit
