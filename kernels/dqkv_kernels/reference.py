"""The backward of attention in torch on any device, tiled, in fp32: the CPU backend, and an oracle for the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dqkv.problem import Gradients, Problem, Report
from dqkv_kernels import operands
from dqkv_kernels.operands import Heads, Sum
from dqkv_kernels.places import Chain, Place, chains, live_sequences
from dqkv_kernels.plan import Inputs, Plan
from dqkv_kernels.query_block import Kernel, QueryBlock, softmax_lse
from dqkv_kernels.workers import Crew

GAPS_MOST = 1024
"""Rows to be zeroed in more pieces than this are zeroed with all others: one pass over memory costs less."""


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
    crew, live = Crew(should_stop), live_sequences(problem)
    _zero_rows_without_gradient(problem, live, gradients, crew)
    tally = Tally(problem.shape.num_heads_q, device)
    places = ((chain, place) for chain in chains(problem, live) for place in chain.places)
    crew.run((Backward(plan, chain, place, tally, number) for number, (chain, place) in enumerate(places)), device)
    if "dsink" in gradients:
        gradients["dsink"].copy_(tally.dsink)
    report = Report(
        arch=device.type,
        kernel="+".join(sorted(tally.kernels)) or f"{device.type}/none",
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
    found = chains(problem, live_sequences(problem))
    Crew(should_stop).run((Statistics(plan, place) for chain in found for place in chain.places), answer.device)


class Tally:
    """What the places of one call add up to besides dq, dk and dv, in the order of their numbers.

    kernels are the names of those that ran; dsink is fp64 (heads,), zeros without a sink.
    """

    def __init__(self, heads: int, device: torch.device) -> None:
        self.kernels: set[str] = set()
        self.dsink = torch.zeros(heads, dtype=torch.float64, device=device)
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, tuple[Heads, torch.Tensor | None]] = {}

    def add(self, number: int, heads: Heads, kernel: str, dsink: torch.Tensor | None) -> None:
        """Take in the place of a number, whose dsink is fp64 (heads.count,) or None where it adds nothing."""
        with self._lock:
            if kernel:
                self.kernels.add(kernel)
            self._waiting[number] = heads, dsink
            while self._next in self._waiting:
                at, part = self._waiting.pop(self._next)
                if part is not None:
                    self.dsink[at.first : at.stop] += part
                self._next += 1


class Statistics:
    """The softmax_lse of one place."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self._plan = plan
        self._place = place

    def __call__(self, crew: Crew) -> None:
        """Write the place's rows."""
        plan, place = self._plan, self._place
        inputs = Inputs(plan, place)
        rows = operands.statistics_rows(plan.answers["softmax_lse"], plan.problem, place.sequence)
        found = softmax_lse(inputs, inputs.queries("q"), crew)
        rows[place.heads.first : place.heads.stop, place.q0 : place.q1] = found


class Backward:
    """The gradients of one place: all of its dq, and its part of dk, dv and dsink."""

    def __init__(self, plan: Plan, chain: Chain, place: Place, tally: Tally, number: int) -> None:
        self._plan = plan
        self._chain = chain
        self._place = place
        self._tally = tally
        self._number = number

    def __call__(self, crew: Crew) -> None:
        """Write dq, add dk and dv to the chain when it is this place's turn, tally dsink and which kernel ran."""
        plan, place = self._plan, self._place
        inputs = Inputs(plan, place)
        sums, kernel, dsink = Sums.empty(inputs), "", None
        if inputs.regions or inputs.has("sink"):
            block = QueryBlock(inputs, crew)
            dsink = block.dsink
            for name, gradients in block.kernels if inputs.regions else ():
                kernel, sums = name, Sums.of(inputs, gradients, crew)
                if sums.dq.is_finite:
                    break
        rows = operands.query_rows(plan.answers["dq"], plan.problem, place.sequence)[place.q0 : place.q1]
        sums.dq.write(rows, place.heads.first, place.heads.stop)
        self._tally.add(self._number, place.heads, kernel, dsink)
        crew.in_turn(self._chain.turns, place.turn, lambda: self._fold(inputs.k0, sums))

    def _fold(self, k0: int, sums: Sums) -> None:
        """Add the place's dk and dv to those of the chain, and write these after the last place."""
        plan, chain, heads, sequence = self._plan, self._chain, self._place.heads, self._place.sequence
        if chain.dk is None or chain.dv is None:
            kv_heads = heads.kv_stop - heads.kv_first
            chain.dk, chain.dv = Sum(kv_heads, sequence.k_len), Sum(kv_heads, sequence.k_len)
        for role, total, part in (("dk", chain.dk, sums.dk), ("dv", chain.dv, sums.dv)):
            if part.total is not None:
                total.add(k0, part.total)
            if self._place is chain.places[-1]:
                rows = operands.key_rows(plan.answers[role], plan.problem, sequence)
                total.write(rows, heads.kv_first, heads.kv_stop)
        if self._place is chain.places[-1]:
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


def _zero_rows_without_gradient(
    problem: Problem[object], live: NDArray[np.bool_], gradients: Mapping[str, torch.Tensor], crew: Crew
) -> None:
    """Zero the rows of dq, dk and dv that no live sequence owns: beyond seqused, between sequences, of dead ones."""
    shape, rows = problem.shape, problem.rows
    sides = (
        (("dq",), problem.queries.is_packed, shape.seqlen_q, rows.q_start, rows.q_len),
        (("dk", "dv"), problem.keys.is_packed, shape.seqlen_k, rows.k_start, rows.k_len),
    )
    for roles, is_packed, seqlen, starts, lengths in sides:
        gaps: list[tuple[int | slice, ...]]
        for answer in (gradients[role] for role in roles):
            if is_packed:
                ends = np.append(0, (starts + lengths)[live])
                nexts = np.append(starts[live], answer.shape[0])
                gaps = [(slice(int(ends[i]), int(nexts[i])),) for i in np.flatnonzero(ends < nexts)]
            else:
                used = np.where(live, lengths, 0)
                gaps = [(int(i), slice(int(used[i]), None)) for i in np.flatnonzero(used < seqlen)]
            if len(gaps) > GAPS_MOST:
                answer.zero_()
                continue
            for gap in gaps:
                crew.check()
                answer[gap].zero_()
