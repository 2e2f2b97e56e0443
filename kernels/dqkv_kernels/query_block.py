"""The query side of one job, and the kernels that its regions can be given to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch

from dqkv.tensor import DType
from dqkv_kernels import operands, reference_flash, reference_tiled
from dqkv_kernels.inputs import Inputs
from dqkv_kernels.reference_tiled import LogSumExp, Statistics
from dqkv_kernels.visibility import Region
from dqkv_kernels.workers import Crew

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Kernel = Callable[[Region], Parts]

FLOAT32_MOST = 2.0**127
"""A sum of products that are below it together does not overflow, whatever its order."""
SAME_LOGITS_MOST = 64.0
"""Statistics are recomputed from the tiled kernel's logits; PyTorch's kernel rounds its own in another order, by a few
units in the last place of the logit: beyond this size its weights no longer add up to 1 as an eager program's do."""


def statistics(inputs: Inputs, q: torch.Tensor, crew: Crew) -> Statistics:
    """The softmax (heads, rows) of a job's rows, whose q is (heads, rows, width)."""
    found = LogSumExp(q)
    for region in inputs.regions:
        crew.check()
        rows = inputs.rows_of(region)
        found.add(region, rows, (q[:, rows], inputs.keys("k", region)), inputs.plan.logits, inputs.mask)
    return found.value(inputs.sink(), inputs.blind)


class QueryBlock:
    """q, dout and the statistics of one job's rows, ready to meet the keys of its regions.

    A row's weights are exp(logit - shift) / total. Where softmax_lse is given it is the shift, and total is 1. Where it
    is not, total divides what the weights are multiplied with instead, dout and delta, once a row. sink_terms is what
    each row adds to its head's dsink, P(sink) * (dlse - delta), fp64 (heads, rows); None without a sink.
    """

    def __init__(self, inputs: Inputs, crew: Crew) -> None:
        self._inputs = inputs
        self._q = inputs.queries("q")
        self._dout = inputs.queries("dout")
        self._total: torch.Tensor | None = None
        if inputs.has("softmax_lse"):
            shift = inputs.statistics("softmax_lse")
        else:
            found = statistics(inputs, self._q, crew)
            shift, self._total = found.largest, found.total
        # An infinite statistic means that the row sees nothing; +inf makes each of its weights exp(-inf) = 0.
        self._dead = torch.isinf(shift)
        self._shift = shift.masked_fill(self._dead, torch.inf)
        self._blind = self._dead if inputs.blind is None else self._dead | inputs.blind
        self._any_blind = bool(self._blind.any())
        if self._total is not None:
            self._dout.div_(self._total.unsqueeze(-1))
        self.sink_terms = self._sink_terms()
        if self._any_blind:
            # What such a row holds must choose no kernel for the others, nor meet a weight of 0 as a NaN. The sink sees
            # it all the same.
            for rows in (self._q, self._dout):
                rows.masked_fill_(self._blind.unsqueeze(-1), 0.0)

    @property
    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """Names of kernels, with what gives dq, dk, dv (heads, rows or keys, width) of a region; best first.

        Where a kernel's sums are not finite the next is to be asked: the last alone selects the zero weight of a hidden
        pair, where the others multiply it with something that may have overflowed.
        """
        out, inputs = self._out, self._inputs
        if out is not None:
            yield reference_flash.KERNEL, partial(self._by_flash, out)
        yield f"{inputs.plan.device.type}/{reference_tiled.KERNELS[inputs.precision]}", self._by_tiles

    @property
    def may_overflow(self) -> torch.Tensor:
        """bool (heads,): whether a product of q and k may be beyond the precision, and stand for a weight of 0 or 1.

        An infinite logit may answer a wrong weight without a trace, where whatever else overflows ends as NaN.
        """
        inputs, nothing = self._inputs, self._q.new_zeros(len(self._q), dtype=torch.bool)
        if inputs.plan.problem.dtype is DType.FP16 or inputs.precision is not torch.float32:
            return nothing
        keys = [inputs.keys("k", region) for region in inputs.regions]
        if not operands.length(self._q) * max(map(operands.length, keys), default=0.0) >= FLOAT32_MOST:
            return nothing
        by_head = torch.stack([k.abs().amax((1, 2)) for k in keys]).amax(0)
        return self._q.abs().amax((1, 2)) * by_head >= FLOAT32_MOST / self._q.shape[-1]

    @property
    def is_sound(self) -> torch.Tensor:
        """bool (heads,): whether nothing that the rows that see keys, and these keys, hold is NaN or infinite."""
        inputs, sound = self._inputs, torch.isfinite(self._dout).all(-1) & torch.isfinite(self._q).all(-1)
        if self._given_out is not None:
            sound &= torch.isfinite(self._given_out).all(-1)
        for role in ("delta", "dlse"):
            if inputs.has(role):
                sound &= torch.isfinite(inputs.statistics(role))
        if self._total is None:
            sound &= ~torch.isnan(self._shift)
        heads: torch.Tensor = (sound | self._blind).all(-1)
        for region in inputs.regions:
            for role in ("k", "v"):
                heads &= torch.isfinite(inputs.keys(role, region)).all(-1).all(-1)
        return heads

    def _by_flash(self, out: torch.Tensor, region: Region) -> Parts:
        inputs, rows = self._inputs, self._inputs.rows_of(region)
        keys = inputs.keys("k", region), inputs.keys("v", region)
        queries = self._q[:, rows], self._dout[:, rows], out[:, rows], self._shift[:, rows]
        return reference_flash.gradients(region, queries, keys, inputs.plan.problem.softmax_scale, inputs.bias)

    def _by_tiles(self, region: Region) -> Parts:
        inputs, rows = self._inputs, self._inputs.rows_of(region)
        keys = inputs.keys("k", region), inputs.keys("v", region)
        queries = self._q[:, rows], self._dout[:, rows], self._delta[:, rows], self._shift[:, rows]
        return reference_tiled.gradients(region, queries, keys, inputs.plan.logits, inputs.mask)

    @cached_property
    def _given_out(self) -> torch.Tensor | None:
        return self._inputs.out() if self._inputs.has("out") else None

    @cached_property
    def _delta(self) -> torch.Tensor:
        """(delta - dlse) / total (heads, rows): what is subtracted from each product of dout / total and v."""
        out = self._given_out
        delta = self._weighted("delta") if out is None else (self._dout * out).sum(-1)
        return delta - self._weighted("dlse") if self._inputs.has("dlse") else delta

    def _sink_terms(self) -> torch.Tensor | None:
        sink = self._inputs.sink()
        if sink is None:
            return None
        return -((sink - self._shift).exp() * self._delta).masked_fill(self._dead, 0.0).double()

    def _weighted(self, role: str) -> torch.Tensor:
        found = self._inputs.statistics(role)
        return found if self._total is None else found / self._total

    @cached_property
    def _out(self) -> torch.Tensor | None:
        """An out (heads, rows, width) with rowsum(dout * out) = delta - dlse; None if PyTorch's kernel cannot run."""
        inputs = self._inputs
        if not inputs.can_flash or self._has_large_logits:
            return None
        out = self._given_out
        if out is None or inputs.has("dlse"):
            delta = self._delta.masked_fill(self._blind, 0.0) if self._any_blind else self._delta
            out = reference_flash.stand_in_for_out(self._dout, delta)
        if out is None or not self._any_blind:
            return out
        return out.masked_fill(self._blind.unsqueeze(-1), 0.0)

    @property
    def _has_large_logits(self) -> bool:
        """Whether the statistics are recomputed, and from logits of other weights than PyTorch's kernel would take."""
        if self._total is None:
            return False
        return bool((self._shift.masked_fill(self._dead, 0.0).abs() > SAME_LOGITS_MOST).any())
