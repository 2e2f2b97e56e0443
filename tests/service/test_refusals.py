"""Every refusal of a problem through a real server: its code, its reason, its field, and nothing runs on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from oracle.cases import REFUSED_CASES
from oracle.inputs import Inputs, build_inputs
from oracle.problems import DTYPES, inline, streamed, unchecked_problem
from oracle.refusals import REASONS, REFUSALS
from rig.caller import Caller
from rig.memory import PosixMemory
from rig.server import Running, eventually
from rig.ways import Way, Ways, arguments

from dqkv import errors, framing
from dqkv.codec import encode_problem
from dqkv.location import InRegion
from dqkv.tensor import Tensor
from dqkv.v1 import gradient_pb2 as pb

REGION_NBYTES = 4 << 20
CODES = {"ARCH_UNAVAILABLE": grpc.StatusCode.UNIMPLEMENTED}
"""All others are INVALID_ARGUMENT."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that nobody may answer, and how it has to be refused."""

    name: str
    inputs: Callable[[], Inputs]
    field: str
    reason: str
    found_by: str = "problem"
    travels: str = "inline"


REFUSED = [
    Refused(
        name=row.name,
        inputs=row.inputs,
        field=row.field,
        reason=row.reason,
        found_by=row.found_by,
        travels=row.travels,
    )
    for row in REFUSALS
] + [
    Refused(
        name=case.name,
        inputs=lambda case=case: build_inputs(case),  # type: ignore[misc]
        field=REASONS[case.name][0],
        reason=REASONS[case.name][1],
    )
    for case in REFUSED_CASES
]


def each(rows: list[Refused]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def caller(server: Running) -> Iterator[Caller]:
    with Caller(server) as one:
        yield one


@pytest.fixture
def untouched(server: Running) -> Iterator[None]:
    """Fails the test when a device runs anything during it; what a device ran is counted whatever became of it."""
    # A streamed answer is counted when its last frame has left, a request ends after that.
    eventually(lambda: server.metric("dqkv_inflight_requests") == 0)
    names = ("dqkv_cost_prediction_ratio_count", "dqkv_flops_total", "dqkv_bytes_total")
    before = {name: server.metric(name) for name in names}
    yield
    assert {name: server.metric(name) for name in names} == before
    assert server.metric("dqkv_inflight_requests") == 0


def message_of(row: Refused, describe: Callable[[torch.Tensor], Tensor[Any]]) -> pb.Problem:
    """The request as a client sends it that checks nothing."""
    return encode_problem(unchecked_problem(row.inputs(), describe))


def frames_of(row: Refused) -> Iterator[framing.RequestFrame]:
    """The same as a stream, with all bytes where they are few enough to exist."""
    problem = unchecked_problem(row.inputs(), streamed)
    total = sum(tensor.nbytes for tensor in problem.tensors.values())
    yield pb.BackwardStreamRequest(
        header=pb.BackwardStreamRequest.Header(problem=encode_problem(problem), total_bytes=min(total, 2**63 - 1))
    )
    if row.travels == "inline":
        bytes_of = unchecked_problem(row.inputs(), inline).tensors
        sender = framing.Sender([framing.Part(role, tensor.data.view) for role, tensor in bytes_of.items()])
        yield from sender.frames()
        yield pb.BackwardStreamRequest(trailer=sender.trailer())


def expected(row: Refused) -> tuple[grpc.StatusCode, str, str]:
    return CODES.get(row.reason, grpc.StatusCode.INVALID_ARGUMENT), row.reason, row.field


@each([row for row in REFUSED if row.travels != "never"])
def test_a_wrong_problem_in_a_message_is_refused(row: Refused, caller: Caller, untouched: None) -> None:
    describe = inline if row.travels == "inline" else streamed
    request = pb.BackwardRequest(problem=message_of(row, describe))
    found = caller.refused(caller.gradients.Backward, request)
    assert (found.code, found.reason, found.field) == expected(row)
    assert found.message


@each([row for row in REFUSED if row.travels != "never"])
def test_a_wrong_problem_in_a_stream_is_refused(row: Refused, caller: Caller, untouched: None) -> None:
    found = caller.stream_refused(frames_of(row))
    assert (found.code, found.reason, found.field) == expected(row)


@each([row for row in REFUSED if row.travels == "inline"])
def test_a_wrong_problem_in_a_region_is_refused(row: Refused, caller: Caller, untouched: None) -> None:
    with PosixMemory(REGION_NBYTES) as memory:
        handle, end = caller.register(memory), 0

        def lay(tensor: torch.Tensor) -> Tensor[InRegion]:
            nonlocal end
            data = inline(tensor).data.view
            place, end = end, end + -(-data.nbytes // 64) * 64
            memory.bytes[place : place + data.nbytes] = np.frombuffer(data, np.uint8)
            return Tensor.dense(DTYPES[tensor.dtype], tensor.shape, InRegion(handle, place))

        request = pb.BackwardRequest(problem=message_of(row, lay))
        found = caller.refused(caller.gradients.Backward, request)
        assert (found.code, found.reason, found.field) == expected(row)
        caller.ask(caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle))


@each([row for row in REFUSED if row.found_by == "problem"])
def test_the_client_refuses_a_wrong_problem_and_sends_nothing(
    row: Refused, ways: Ways, server: Running, untouched: None
) -> None:
    methods = ("Backward", "BackwardStream")
    before = [server.metric("grpc_server_started_total", grpc_method=method) for method in methods]
    for way in Way:
        with pytest.raises(errors.InvalidRequest) as caught:
            ways.client(way).backward(**arguments(row.inputs()))
        assert (caught.value.reason, caught.value.field) == (row.reason, row.field)
    assert [server.metric("grpc_server_started_total", grpc_method=method) for method in methods] == before


@each([row for row in REFUSED if row.found_by == "server"])
def test_the_client_raises_what_only_the_server_can_refuse(row: Refused, ways: Ways, untouched: None) -> None:
    for way in Way:
        with pytest.raises(errors.ArchUnavailable) as caught:
            ways.ask(row.inputs(), way)
        assert (caught.value.reason, caught.value.field) == (row.reason, row.field)
