"""Tensors in regions as they lie: fused views, expanded ones, odd offsets and strides that mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
import torch
from oracle.budget import judge
from oracle.case import AS_IS, Case, variants
from oracle.cases import ANSWERED_CASES, BY_NAME
from oracle.exact import solved
from oracle.inputs import Inputs, build_inputs
from oracle.layouts import ABSURD_STRIDE, LAYOUTS
from oracle.problems import DTYPES, inline, to_problem
from rig.caller import Caller
from rig.memory import PosixMemory
from rig.server import Running, eventually
from rig.ways import TENSORS, Way, Ways

from dqkv.client.segment import Kind
from dqkv.codec import encode_problem
from dqkv.location import Inline, InRegion
from dqkv.tensor import Tensor
from dqkv.v1 import gradient_pb2 as pb

STRIDED = [case for case in ANSWERED_CASES if case.theme == "STRIDE"]
LAID_ANEW = [BY_NAME[name] for name in ("gqa_12_3_dv128", "varlen_tile_straddle", "sink_dlse_varlen_empty")]


@pytest.fixture
def caller(server: Running) -> Iterator[Caller]:
    with Caller(server) as one:
        yield one


def moved(server: Running) -> dict[str, float]:
    """Tensor bytes read so far, by the way they came."""
    eventually(lambda: server.metric("dqkv_inflight_requests") == 0)
    return {way: server.metric("dqkv_bytes_total", direction="in", transport=way) for way in Way}


@pytest.mark.parametrize("kind", Kind, ids=str)
@pytest.mark.parametrize("case", STRIDED, ids=lambda case: case.name)
def test_a_layout_is_read_in_place(case: Case, kind: Kind, ways: Ways, server: Running) -> None:
    for variant in variants(case):
        inputs = build_inputs(case, variant)
        before = moved(server)
        answer = ways.ask(inputs, Way.REGION, kind=kind, gap=8)
        assert judge(case, solved(variant.of(case)), answer, variant) == []
        after = moved(server)
        given = [getattr(inputs, role) for role in TENSORS if getattr(inputs, role) is not None]
        want = {Way.UNARY: 0, Way.STREAM: 0, Way.REGION: 0}
        for tensor in given:
            # No reference says a last stride other than 1: the client sends these elements inline.
            want[Way.REGION if tensor.stride(-1) == 1 else Way.UNARY] += tensor.numel() * tensor.element_size()
        assert {way: after[way] - before[way] for way in Way} == want


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name is not None])
@pytest.mark.parametrize("case", LAID_ANEW, ids=lambda case: case.name)
def test_every_input_in_every_layout_gives_the_same_bits(case: Case, layout: str, ways: Ways) -> None:
    for role in ("q", "k", "v", "dout", "out"):
        inputs = build_inputs(case)
        tensor = getattr(inputs, role)
        if tensor.dim() == 3 and layout == "sbhd":
            continue
        laid = LAYOUTS[layout](tensor)
        dense = laid.clone(memory_format=torch.contiguous_format)
        answers = [
            ways.ask(replace(inputs, **{role: each}, deterministic=True), Way.REGION, kind=kind)
            for each, kind in ((dense, Kind.MEMFD), (laid, Kind.MEMFD), (laid, Kind.POSIX))
        ]
        for name in ("dq", "dk", "dv"):
            first, *rest = (getattr(answer, name).contiguous().view(torch.uint8) for answer in answers)
            assert all(torch.equal(first, other) for other in rest), f"{name} with {role} as {layout}"


def test_strides_of_a_dimension_of_one_may_be_anything(caller: Caller) -> None:
    case = BY_NAME["batch1_absurd_stride"]
    inputs = build_inputs(case)
    with PosixMemory(1 << 20) as memory:
        request = _by_region(inputs, caller, memory)
        for tensor, laid in zip(request.problem.tensors, (inputs.q, inputs.k, inputs.v), strict=False):
            # Ours leaves strides out that mean nothing; another client may send what its tensor has.
            assert ABSURD_STRIDE in laid.stride()
            tensor.region.strides[:] = laid.stride()
        answer = caller.ask(caller.gradients.Backward, request)
    assert judge(case, solved(case), _Answered(answer), AS_IS) == []


def test_a_last_stride_other_than_1_is_refused(caller: Caller) -> None:
    with PosixMemory(1 << 20) as memory:
        request = _by_region(build_inputs(BY_NAME["last_dim_stride_2"]), caller, memory)
        assert list(request.problem.tensors[0].region.strides)[-1] == 2
        found = caller.refused(caller.gradients.Backward, request)
    assert (found.code, found.reason, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, "SHAPE_MISMATCH", "q")


class _Answered:
    """The gradients of a bare answer."""

    dsink = None

    def __init__(self, answer: pb.BackwardResponse) -> None:
        self.dq, self.dk, self.dv = (
            torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).reshape(tuple(tensor.shape))
            for tensor in answer.gradients
        )


def _by_region(inputs: Inputs, caller: Caller, memory: PosixMemory) -> pb.BackwardRequest:
    """The request as it is, with q, k, v by reference with the strides that they have, and the rest inline."""
    handle, end = caller.register(memory), 0

    def lay(tensor: torch.Tensor) -> Tensor[InRegion | Inline]:
        nonlocal end
        if tensor.is_contiguous() and ABSURD_STRIDE not in tensor.stride():
            return inline(tensor)
        raw = bytes(tensor.untyped_storage())
        place, end = end, end + len(raw)
        memory.bytes[place : place + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).numpy()
        return Tensor(
            dtype=DTYPES[tensor.dtype],
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            data=InRegion(handle, place),
        )

    return pb.BackwardRequest(problem=encode_problem(to_problem(inputs, lay)))
