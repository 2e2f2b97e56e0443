"""Lists in a message that are longer than any problem needs: refused by their number, before they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest
from rig.caller import Caller
from rig.server import Running
from rig.wire import header_of, sample, unary_request

from dqkv.codec import SEQUENCES_LIMIT
from dqkv.v1 import gradient_pb2 as pb

MANY = 1_000_000
MESSAGE_LIMIT = 1000
"""Characters of an error's words: gRPC sends no more than a few KiB beside an answer."""


@pytest.fixture
def caller(server: Running) -> Iterator[Caller]:
    with Caller(server) as one:
        yield one


def _dimensions(problem: pb.Problem) -> None:
    problem.tensors[0].shape.extend([1] * MANY)


def _strides(problem: pb.Problem) -> None:
    problem.tensors[0].region.handle = bytes(16)
    problem.tensors[0].region.strides.extend([1] * MANY)


def _output_strides(problem: pb.Problem) -> None:
    region = pb.RegionSlice(handle=bytes(16), strides=[1] * MANY)
    problem.outputs.add(role=pb.TENSOR_ROLE_DQ, region=region)


def _offsets(problem: pb.Problem) -> None:
    problem.queries.cu_seqlens.extend([0] * (SEQUENCES_LIMIT + 2))


def _used(problem: pb.Problem) -> None:
    problem.keys.seqused.extend([0] * (SEQUENCES_LIMIT + 1))


def _outputs(problem: pb.Problem) -> None:
    region = pb.RegionSlice(handle=bytes(16))
    problem.outputs.extend([pb.Output(role=pb.TENSOR_ROLE_DQ, region=region)] * MANY)


LISTS: dict[Callable[[pb.Problem], None], tuple[str, str]] = {
    _dimensions: ("SHAPE_MISMATCH", "q"),
    _strides: ("SHAPE_MISMATCH", "q"),
    _output_strides: ("SHAPE_MISMATCH", "dq"),
    _offsets: ("OFFSETS_INVALID", "cu_seqlens_q"),
    _used: ("SEQUSED_INVALID", "seqused_k"),
    _outputs: ("MESSAGE_INVALID", "dq"),
}


@pytest.mark.parametrize("lengthen", LISTS, ids=lambda lengthen: lengthen.__name__[1:])
@pytest.mark.parametrize("transport", ["unary", "stream"])
def test_a_list_that_is_too_long_is_refused_in_few_words(
    caller: Caller, lengthen: Callable[[pb.Problem], None], transport: str
) -> None:
    one = sample()
    if transport == "unary":
        request = unary_request(one)
        lengthen(request.problem)
        refused = caller.refused(caller.gradients.Backward, request)
    else:
        frame = header_of(one)
        lengthen(frame.header.problem)
        refused = caller.stream_refused([frame])
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.reason, refused.field) == LISTS[lengthen]
    assert len(refused.message) < MESSAGE_LIMIT


def test_an_estimate_is_refused_alike(caller: Caller) -> None:
    request = pb.EstimateRequest(problem=unary_request(sample()).problem)
    _offsets(request.problem)
    assert caller.refused(caller.gradients.Estimate, request).reason == "OFFSETS_INVALID"
