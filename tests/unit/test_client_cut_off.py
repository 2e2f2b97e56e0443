"""A call that the far side ends without a word of ours: no answer came, so it is sent again where that is safe."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import dqkv
from dqkv import errors
from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs

pytestmark = pytest.mark.numpy_only

ROWS = np.zeros((1, 8, 1, 8), np.float32)
DELTA = np.zeros((1, 1, 8), np.float32)
ATTEMPTS = 3


class CuttingServer(stubs.AttentionGradientServiceServicer, stubs.CapabilityServiceServicer):
    """Cancels every gradient's call, as a gRPC server does with calls that it has when it stops."""

    def __init__(self) -> None:
        self.asked = 0

    def GetCapabilities(self, request: Any, context: grpc.ServicerContext) -> pb.GetCapabilitiesResponse:
        limits = pb.Limits(message_bytes=1 << 26, inline_bytes=1 << 22, request_bytes=1 << 30)
        return pb.GetCapabilitiesResponse(version="0", limits=limits, session="session")

    def Backward(self, request: Any, context: grpc.ServicerContext) -> pb.BackwardResponse:
        self.asked += 1
        context.cancel()
        return pb.BackwardResponse()

    def BackwardStream(self, request_iterator: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.asked += 1
        context.cancel()
        yield from ()


@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
def test_a_call_that_the_far_side_cancels_is_sent_again_and_then_a_transport_error(inline_nbytes: int | None) -> None:
    cutting = CuttingServer()
    server = grpc.server(ThreadPoolExecutor(4))
    stubs.add_AttentionGradientServiceServicer_to_server(cutting, server)
    stubs.add_CapabilityServiceServicer_to_server(cutting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        retry = dqkv.Retry(attempts=ATTEMPTS, first_s=0.001)
        with (
            dqkv.Client(f"127.0.0.1:{port}", retry=retry, inline_nbytes=inline_nbytes, timeout_s=120) as client,
            pytest.raises(errors.TransportError, match="CANCELLED"),
        ):
            client.backward(ROWS, ROWS, ROWS, ROWS, delta=DELTA)
        assert cutting.asked == ATTEMPTS
    finally:
        server.stop(None)
