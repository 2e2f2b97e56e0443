"""The backward of attention in torch on any device, tiled, in fp32: the CPU backend, and an oracle for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dqkv.problem import Gradients, Problem, Report
from dqkv_kernels import operands
from dqkv_kernels.operands import Sum
from dqkv_kernels.places import Chain, Place, chains
from dqkv_kernels.plan import Inputs, Plan
from dqkv_kernels.query_block import Kernel, QueryBlock, softmax_lse
from dqkv_kernels.workers import Crew


def attention_backward(
    problem: Problem[object],
    tensors: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    should_stop: Callable[[], object] | None,
) -> Gradients[torch.Tensor]:
    """Write the gradients of a problem; see `dqkv_kernels.attention_backward`, which checks and allocates."""
    begin_s = time.perf_counter()
    device = tensors["q"].device
    plan = Plan(problem=problem, tensors=tensors, answers=gradients)
    _zero_unowned_rows(problem, gradients)
    jobs = [Backward(plan, chain, place) for chain in chains(problem) for place in chain.places]
    Crew(should_stop).run(jobs, device)
    if "dsink" in gradients:
        dsink = torch.zeros(problem.shape.num_heads_q, dtype=torch.float64, device=device)
        for job in jobs:
            dsink[job.place.heads.first : job.place.heads.stop] += job.dsink
        gradients["dsink"].copy_(dsink)
    report = Report(
        arch=device.type,
        kernel="+".join(sorted({job.kernel for job in jobs if job.kernel})) or f"{device.type}/none",
        device=str(device),
        softmax_lse_recomputed="softmax_lse" not in tensors,
        device_s=time.perf_counter() - begin_s,
    )
    return Gradients(
        dq=gradients["dq"], dk=gradients["dk"], dv=gradients["dv"], dsink=gradients.get("dsink"), report=report
    )


def softmax_statistics(
    problem: Problem[object],
    tensors: Mapping[str, torch.Tensor],
    answer: torch.Tensor,
    should_stop: Callable[[], object] | None,
) -> None:
    """Write a problem's softmax_lse into answer; see `dqkv_kernels.softmax_statistics`, which allocates it."""
    plan = Plan(problem=problem, tensors=tensors, answers={"softmax_lse": answer})
    answer.fill_(-torch.inf)
    jobs = [Statistics(plan, place) for chain in chains(problem) for place in chain.places]
    Crew(should_stop).run(jobs, answer.device)


class Statistics:
    """The softmax_lse of one place."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self._plan = plan
        self._place = place

    def __call__(self, crew: Crew) -> None:
        """Write the place's rows."""
        plan, place = self._plan, self._place
        if place.q1 > place.q0:
            inputs = Inputs(plan, place)
            rows = operands.statistics_rows(plan.answers["softmax_lse"], plan.problem, place.sequence)
            found = softmax_lse(inputs, inputs.queries("q"), crew)
            rows[place.heads.first : place.heads.stop, place.q0 : place.q1] = found


class Backward:
    """The gradients of one place: all of its dq, and its part of dk, dv and dsink."""

    def __init__(self, plan: Plan, chain: Chain, place: Place) -> None:
        self.place = place
        self.kernel = ""
        self.dsink = torch.zeros(place.heads.count, dtype=torch.float64, device=plan.device)
        self._plan = plan
        self._chain = chain

    def __call__(self, crew: Crew) -> None:
        """Write dq, add dk and dv to the chain when it is this place's turn, keep dsink and which kernel ran."""
        plan, place = self._plan, self.place
        inputs = Inputs(plan, place)
        sums = Sums.empty(inputs)
        if place.q1 > place.q0 and (inputs.regions or inputs.has("sink")):
            block = QueryBlock(inputs, crew)
            self.dsink = block.dsink
            for kernel, gradients in block.kernels if inputs.regions else ():
                self.kernel, sums = kernel, Sums.of(inputs, gradients, crew)
                if sums.dq.is_finite:
                    break
        rows = operands.query_rows(plan.answers["dq"], plan.problem, place.sequence)[place.q0 : place.q1]
        sums.dq.write(rows, place.heads.first, place.heads.stop)
        crew.in_turn(id(self._chain), place.turn, lambda: self._fold(inputs.k0, sums))

    def _fold(self, k0: int, sums: Sums) -> None:
        """Add the place's dk and dv to those of the chain, and write these after the last place."""
        plan, chain, heads, sequence = self._plan, self._chain, self.place.heads, self.place.sequence
        if chain.dk is None or chain.dv is None:
            kv_heads = heads.kv_stop - heads.kv_first
            chain.dk, chain.dv = Sum(kv_heads, sequence.k_len), Sum(kv_heads, sequence.k_len)
        for role, total, part in (("dk", chain.dk, sums.dk), ("dv", chain.dv, sums.dv)):
            if part.total is not None:
                total.add(k0, part.total)
            if self.place is chain.places[-1]:
                rows = operands.key_rows(plan.answers[role], plan.problem, sequence)
                total.write(rows, heads.kv_first, heads.kv_stop)
        if self.place is chain.places[-1]:
            chain.dk = chain.dv = None


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What the regions of one place add up to; dk and dv from the first key on that any of them holds."""

    dq: Sum
    dk: Sum
    dv: Sum

    @classmethod
    def empty(cls, inputs: Inputs) -> Sums:
        """The sums of no regions."""
        place, keys = inputs.place, inputs.k1 - inputs.k0
        kv_heads = place.heads.kv_stop - place.heads.kv_first
        return cls(dq=Sum(place.heads.count, place.q1 - place.q0), dk=Sum(kv_heads, keys), dv=Sum(kv_heads, keys))

    @classmethod
    def of(cls, inputs: Inputs, gradients: Kernel, crew: Crew) -> Sums:
        """The sums of all regions."""
        sums = cls.empty(inputs)
        for region in inputs.regions:
            crew.check()
            dq, dk, dv = gradients(region)
            sums.dq.add(region.q0 - inputs.place.q0, dq)
            sums.dk.add(region.k0 - inputs.k0, dk)
            sums.dv.add(region.k0 - inputs.k0, dv)
        return sums


def _zero_unowned_rows(problem: Problem[object], gradients: Mapping[str, torch.Tensor]) -> None:
    """Zero the rows of dq, dk and dv that no sequence owns: beyond seqused, and behind the last offset."""
    shape, rows = problem.shape, problem.rows
    sides = (
        (("dq",), problem.queries.is_packed, shape.seqlen_q, rows.q_start.tolist(), rows.q_len.tolist()),
        (("dk", "dv"), problem.keys.is_packed, shape.seqlen_k, rows.k_start.tolist(), rows.k_len.tolist()),
    )
    for roles, is_packed, seqlen, starts, lengths in sides:
        for role in roles:
            answer = gradients[role]
            if not is_packed:
                for index, length in enumerate(lengths):
                    if length < seqlen:
                        answer[index, length:].zero_()
                continue
            ends = [0, *(start + length for start, length in zip(starts, lengths, strict=True))]
            for end, start in zip(ends, [*starts, answer.shape[0]], strict=True):
                if end < start:
                    answer[end:start].zero_()
