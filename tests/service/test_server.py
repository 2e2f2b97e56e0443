"""A request through the real server, unary and streamed, and what the server refuses."""

from __future__ import annotations

import json

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rig.server import Running
from rig.wire import (
    Sample,
    assert_right,
    failing,
    frames_of,
    inline_gradients,
    sample,
    stream,
    streamed_gradients,
    unary_request,
)

from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs


def test_a_unary_request_is_answered_with_exact_gradients(channel: grpc.Channel) -> None:
    one = sample()
    answer = stubs.AttentionGradientServiceStub(channel).Backward(unary_request(one), timeout=30)
    assert_right(one, inline_gradients(one, answer))
    assert answer.report.arch == pb.ARCH_CPU
    assert answer.report.device == "cpu:0"
    assert answer.report.softmax_lse_recomputed
    assert 0 < answer.report.device_s <= answer.report.total_s


@pytest.mark.parametrize(("rows", "heads"), [(16, 1), (512, 12)], ids=["one_frame", "many_frames"])
def test_a_streamed_request_is_answered_with_exact_gradients(bulk: grpc.Channel, rows: int, heads: int) -> None:
    one = sample(rows, heads, head_dim=128)
    assert_right(one, streamed_gradients(one, stream(bulk, frames_of(one))))
