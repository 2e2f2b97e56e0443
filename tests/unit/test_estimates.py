"""Estimates of problems with many sequences: the loop serves others while one is read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dqkv.problem import Arch, Problem
from dqkv.scheduler.cost import Estimate, Work
from dqkv.server.gate import Visit
from dqkv.server.grpc_service import GradientServicer, Terms
from dqkv.server.identity import Identity
from dqkv.v1 import gradient_pb2 as pb

ROLES = (pb.TENSOR_ROLE_Q, pb.TENSOR_ROLE_K, pb.TENSOR_ROLE_V, pb.TENSOR_ROLE_DOUT, pb.TENSOR_ROLE_OUT)
TICK_S = 0.001


class Costs:
    """The scheduler of a server without devices: work is counted, and takes no time."""

    def estimate(self, problem: Problem[Any], *, owner: str) -> Estimate:
        work = Work.of(problem)
        return Estimate(
            pairs=work.pairs,
            flops=work.flops,
            input_nbytes=work.input_nbytes,
            gradient_nbytes=work.gradient_nbytes,
            device_s=0.0,
            queue_s=0.0,
            device=owner,
            arch=Arch.CPU,
        )


def request_of(sequences: int) -> pb.EstimateRequest:
    """Sequences of one row each."""
    problem = pb.Problem(
        tensors=[pb.Tensor(role=role, dtype=pb.DATA_TYPE_BF16, shape=[sequences, 1, 8]) for role in ROLES]
    )
    for lengths in (problem.queries, problem.keys):
        lengths.cu_seqlens.extend(range(sequences + 1))
    return pb.EstimateRequest(problem=problem)


async def ticks_during_an_estimate(sequences: int) -> tuple[int, pb.EstimateResponse]:
    unused: Any = None
    terms = Terms(limits=pb.Limits(inline_bytes=1 << 20), messages=1, stream_port=1)
    servicer = GradientServicer(gate=unused, desk=unused, scheduler=cast("Any", Costs()), metrics=unused, terms=terms)
    visit = Visit(caller=Identity(name="someone", rights=frozenset()), deadline=1e9)
    work = asyncio.create_task(servicer.estimate(request_of(sequences), visit))
    ticks = 0
    while not work.done():
        await asyncio.sleep(TICK_S)
        ticks += 1
    return ticks, await work


@pytest.mark.parametrize("sequences", [1, 1 << 20])
def test_an_estimate_is_exact_for_few_sequences_and_for_many(sequences: int) -> None:
    _, answer = asyncio.run(ticks_during_an_estimate(sequences))
    assert (answer.pairs, answer.device) == (sequences, "someone")


def test_the_loop_goes_on_while_many_sequences_are_read() -> None:
    """Tried again where this machine has no time for the loop at the moment: on the loop itself it is one tick."""
    assert any(asyncio.run(ticks_during_an_estimate(1 << 20))[0] > 5 for _ in range(5))
