"""The work of one place: its gradients, or its softmax_lse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dqkv_kernels import operands
from dqkv_kernels.inputs import PlaceInputs
from dqkv_kernels.operands import Sum
from dqkv_kernels.places import Chain, Place
from dqkv_kernels.plan import PRECISIONS, Plan
from dqkv_kernels.query_block import Kernel, QueryBlock, statistics
from dqkv_kernels.tally import Tally
from dqkv_kernels.workers import Crew


class PlaceStatistics:
    """The softmax_lse of one place."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self._plan = plan
        self._place = place

    def __call__(self, crew: Crew) -> None:
        """Write the place's rows."""
        plan, place = self._plan, self._place
        inputs = PlaceInputs(plan, place)
        rows = operands.statistics_rows(plan.answers["softmax_lse"], plan.problem, place.sequence)
        found = statistics(inputs, inputs.queries("q"), crew).softmax_lse
        rows[place.heads.first : place.heads.stop, place.q0 : place.q1] = found


class PlaceBackward:
    """The gradients of one place: all of its dq, and its part of dk, dv and dsink."""

    def __init__(self, plan: Plan, chain: Chain, place: Place, tally: Tally, number: int) -> None:
        self._plan = plan
        self._chain = chain
        self._place = place
        self._tally = tally
        self._number = number

    def __call__(self, crew: Crew) -> None:
        """Write dq, add dk and dv to the chain when it is this place's turn, tally dsink and which kernels ran."""
        plan, place = self._plan, self._place
        inputs = PlaceInputs(plan, place)
        sums, kernel, dsink = Sums.empty(inputs), "", None
        if inputs.regions or inputs.has("sink"):
            sums, kernel, dsink = self._solve(inputs, crew)
        rows = operands.query_rows(plan.answers["dq"], plan.problem, place.sequence)[place.q0 : place.q1]
        sums.dq.write(rows, place.heads.first, place.heads.stop)
        self._tally.add(self._number, place.heads, {kernel} - {""}, dsink)
        crew.in_turn(self._chain.turns, place.turn, lambda: self._fold(inputs.k0, sums))

    def _solve(self, inputs: PlaceInputs, crew: Crew) -> tuple[Sums, str, torch.Tensor | None]:
        """The sums over all regions, the kernel that gave them, and dsink; wider where fp32 would not hold them."""
        block, sums, kernel = QueryBlock(inputs, crew), Sums.empty(inputs), ""
        dsink = None if block.sink_terms is None else block.sink_terms.sum(-1)
        if not block.may_overflow.any() or not block.is_sound.all():
            is_finite = True
            for name, gradients in block.kernels if inputs.regions else ():
                kernel, sums = name, Sums.of(inputs, gradients, crew)
                # Reads every sum: once a kernel.
                is_finite = sums.is_finite
                if is_finite:
                    break
            is_finite = is_finite and (dsink is None or operands.is_finite(dsink))
            if is_finite or inputs.precision is PRECISIONS[-1] or not block.is_sound.all():
                return sums, kernel, dsink
        return self._solve(PlaceInputs(self._plan, self._place, PRECISIONS[-1]), crew)

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
    def empty(cls, inputs: PlaceInputs) -> Sums:
        """The sums of no regions."""
        place, keys = inputs.place, inputs.k1 - inputs.k0
        kv_heads = place.heads.kv_stop - place.heads.kv_first
        return cls(dq=Sum(place.heads.count, place.q1 - place.q0), dk=Sum(kv_heads, keys), dv=Sum(kv_heads, keys))

    @property
    def is_finite(self) -> bool:
        """Whether none holds NaN or an infinity."""
        return self.dq.is_finite and self.dk.is_finite and self.dv.is_finite

    @classmethod
    def of(cls, inputs: PlaceInputs, gradients: Kernel, crew: Crew) -> Sums:
        """The sums of all regions."""
        sums = cls.empty(inputs)
        for region in inputs.regions:
            crew.check()
            dq, dk, dv = gradients(region)
            sums.dq.add(region.q0 - inputs.place.q0, dq)
            sums.dk.add(region.k0 - inputs.k0, dk)
            sums.dv.add(region.k0 - inputs.k0, dv)
        return sums
