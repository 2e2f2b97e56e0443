"""The backward of attention in torch on any device, tiled, in fp32: the CPU backend, and an oracle for the others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from dqkv.problem import Gradients, Problem, Report
from dqkv_kernels.batch_jobs import BatchBackward, BatchStatistics
from dqkv_kernels.batches import split
from dqkv_kernels.place_jobs import PlaceBackward, PlaceStatistics
from dqkv_kernels.places import chains, live_sequences
from dqkv_kernels.plan import Plan
from dqkv_kernels.tally import Tally
from dqkv_kernels.workers import Crew, Job

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
    crew.run(_backward_jobs(plan, live, tally), device)
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
    together, alone = split(problem, live_sequences(problem))
    jobs: Iterator[Job] = chain(
        (BatchStatistics(plan, batch) for batch in together),
        (PlaceStatistics(plan, place) for each in chains(problem, alone) for place in each.places),
    )
    Crew(should_stop).run(jobs, answer.device)


def _backward_jobs(plan: Plan, live: NDArray[np.bool_], tally: Tally) -> Iterator[Job]:
    """The jobs that write the gradients of the live sequences, numbered as the tally counts them."""
    together, alone = split(plan.problem, live)
    number = itertools.count()
    for batch in together:
        yield BatchBackward(plan, batch, tally, next(number))
    for each in chains(plan.problem, alone):
        for place in each.places:
            yield PlaceBackward(plan, each, place, tally, next(number))


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
