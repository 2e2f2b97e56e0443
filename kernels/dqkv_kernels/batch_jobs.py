"""The work of one batch: the gradients, or the softmax_lse, of its sequences."""

from __future__ import annotations

import torch

from dqkv_kernels import operands
from dqkv_kernels.batch_inputs import BatchInputs
from dqkv_kernels.batches import Batch
from dqkv_kernels.operands import Heads
from dqkv_kernels.plan import PRECISIONS, Plan
from dqkv_kernels.query_block import QueryBlock, statistics
from dqkv_kernels.tally import Tally
from dqkv_kernels.workers import Crew


class BatchStatistics:
    """The softmax_lse of one batch."""

    def __init__(self, plan: Plan, batch: Batch) -> None:
        self._plan = plan
        self._batch = batch

    def __call__(self, crew: Crew) -> None:
        """Write the rows of the batch's sequences."""
        inputs = BatchInputs(self._plan, self._batch)
        found = statistics(inputs, inputs.queries("q"), crew).softmax_lse
        inputs.write_statistics(self._plan.answers["softmax_lse"], found)


class BatchBackward:
    """The gradients of the sequences of one batch."""

    def __init__(self, plan: Plan, batch: Batch, tally: Tally, number: int) -> None:
        self._plan = plan
        self._batch = batch
        self._tally = tally
        self._number = number

    def __call__(self, crew: Crew) -> None:
        """Write dq, dk and dv, tally dsink and which kernels ran."""
        shape = self._plan.problem.shape
        dsink = torch.zeros(shape.num_heads_q, dtype=torch.float64, device=self._plan.device)
        kernels: set[str] = set()
        left: Batch | None = self._batch
        for precision in PRECISIONS:
            if left is None:
                break
            crew.check()
            inputs = BatchInputs(self._plan, left, precision)
            block = QueryBlock(inputs, crew)
            parts = self._parts(inputs, block, kernels)
            left, terms = self._unsettled(inputs, block, parts)
            if terms is not None:
                dsink += inputs.by_head(terms)
        heads = Heads(first=0, stop=shape.num_heads_q, kv_first=0, kv_stop=shape.num_heads_kv)
        self._tally.add(self._number, heads, kernels, dsink)

    def _parts(self, inputs: BatchInputs, block: QueryBlock, kernels: set[str]) -> tuple[torch.Tensor, ...]:
        """Writes the gradients and adds to kernels; dq, dk and dv, or dq alone where there are no keys."""
        answers = self._plan.answers
        if not inputs.regions:
            dq = torch.zeros_like(inputs.queries("q"))
            inputs.write_queries(answers["dq"], dq)
            return (dq,)
        name, gradients = next(block.kernels)
        kernels.add(name)
        dq, dk, dv = gradients(inputs.regions[0])
        inputs.write_queries(answers["dq"], dq)
        inputs.write_keys(answers["dk"], dk)
        inputs.write_keys(answers["dv"], dv)
        return dq, dk, dv

    def _unsettled(
        self, inputs: BatchInputs, block: QueryBlock, parts: tuple[torch.Tensor, ...]
    ) -> tuple[Batch | None, torch.Tensor | None]:
        """The sequences to be computed again, wider, or None; and the sink's terms of the others."""
        terms = block.sink_terms
        found = [*parts, *([] if terms is None else [terms.unsqueeze(-1)])]
        overflowed = block.may_overflow
        if not all(map(operands.is_finite, found)):
            for part in found:
                overflowed = overflowed | ~torch.isfinite(part).flatten(1).all(1)
        if inputs.precision is PRECISIONS[-1] or not overflowed.any():
            return None, terms
        again = ~inputs.by_sequence(~overflowed) & inputs.by_sequence(block.is_sound)
        if not again.any():
            return None, terms
        if terms is not None:
            terms = terms.view(len(again), -1, terms.shape[1]).masked_fill(again[:, None, None], 0.0).flatten(0, 1)
        return inputs.batch.take(again.cpu().numpy()), terms
