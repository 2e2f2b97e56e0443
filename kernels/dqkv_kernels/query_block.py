"""The query side of one place in fp32, and the kernels that its regions can be given to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch

from dqkv_kernels import reference_flash, reference_tiled
from dqkv_kernels.plan import Inputs
from dqkv_kernels.reference_tiled import LogSumExp
from dqkv_kernels.visibility import Region
from dqkv_kernels.workers import Crew

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Kernel = Callable[[Region], Parts]


def softmax_lse(inputs: Inputs, q: torch.Tensor, crew: Crew) -> torch.Tensor:
    """The softmax_lse (heads, rows) of a place whose q is fp32 (heads, rows, width)."""
    found = LogSumExp(q.shape[0], q.shape[1], q.device)
    for region in inputs.regions:
        crew.check()
        rows = inputs.rows_of(region)
        found.add(region, rows, (q[:, rows], inputs.keys("k", region)), inputs.plan.logits, inputs.mask)
    return found.value(inputs.sink())


class QueryBlock:
    """q, dout and the statistics of one place's rows, ready to meet the keys of its regions."""

    def __init__(self, inputs: Inputs, crew: Crew) -> None:
        self._inputs = inputs
        self._q = inputs.queries("q")
        self._dout = inputs.queries("dout")
        is_given = inputs.has("softmax_lse")
        found = inputs.statistics("softmax_lse") if is_given else softmax_lse(inputs, self._q, crew)
        # An infinite statistic means that the row sees nothing; +inf makes each of its weights exp(-inf) = 0.
        self._softmax_lse = found.masked_fill(torch.isinf(found), torch.inf)

    @property
    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """Names of kernels, with what gives dq, dk, dv (heads, rows or keys, width) of a region in fp32; best first.

        Where a kernel's dq is not finite the next is to be asked: the last alone selects the zero weight of a hidden
        pair, where the others multiply it with something that may have overflowed.
        """
        out = self._out
        if out is not None:
            yield reference_flash.KERNEL, partial(self._by_flash, out)
        yield f"{self._inputs.plan.device.type}/{reference_tiled.KERNEL}", self._by_tiles

    @property
    def dsink(self) -> torch.Tensor:
        """fp64 (heads,): the place's sum of exp(sink - softmax_lse) * (dlse - delta); zeros without a sink."""
        sink = self._inputs.sink()
        if sink is None:
            return torch.zeros(self._q.shape[0], dtype=torch.float64, device=self._q.device)
        weight = (sink.unsqueeze(-1) - self._softmax_lse).exp()
        part = (weight * self._delta).masked_fill(torch.isinf(self._softmax_lse), 0.0)
        return -part.double().sum(-1)

    def _by_flash(self, out: torch.Tensor, region: Region) -> Parts:
        inputs, rows = self._inputs, self._inputs.rows_of(region)
        keys = inputs.keys("k", region), inputs.keys("v", region)
        queries = self._q[:, rows], self._dout[:, rows], out[:, rows], self._softmax_lse[:, rows]
        return reference_flash.gradients(region, queries, keys, inputs.plan.problem.softmax_scale, inputs.bias)

    def _by_tiles(self, region: Region) -> Parts:
        inputs, rows = self._inputs, self._inputs.rows_of(region)
        keys = inputs.keys("k", region), inputs.keys("v", region)
        queries = self._q[:, rows], self._dout[:, rows], self._delta[:, rows], self._softmax_lse[:, rows]
        return reference_tiled.gradients(region, queries, keys, inputs.plan.logits, inputs.mask)

    @cached_property
    def _given_out(self) -> torch.Tensor | None:
        return self._inputs.out() if self._inputs.has("out") else None

    @cached_property
    def _delta(self) -> torch.Tensor:
        """delta - dlse (heads, rows): what is subtracted from each product of dout and v."""
        out = self._given_out
        delta = self._inputs.statistics("delta") if out is None else (self._dout * out).sum(-1)
        return delta - self._inputs.statistics("dlse") if self._inputs.has("dlse") else delta

    @cached_property
    def _out(self) -> torch.Tensor | None:
        """An out (heads, rows, width) with rowsum(dout * out) = delta - dlse; None if PyTorch's kernel cannot run."""
        if not self._inputs.plan.can_flash:
            return None
        if self._given_out is None or self._inputs.has("dlse"):
            return reference_flash.stand_in_for_out(self._dout, self._delta)
        return self._given_out
