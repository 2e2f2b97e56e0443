"""Two hundred streams that send nothing: probes answer beside them, they cost little, and the server ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from rig.caller import Caller
from rig.pace import steady_s
from rig.process import anonymous_nbytes, wait_for
from rig.server import Running, running
from rig.wire import assert_right, frames_of, header_of, inline_gradients, sample, unary_request

STREAMS = 200
CALLERS = 10
PROBE_S = 0.1
IDLE_S = 2.0
ONE = sample()
MIB = 1 << 20


def test_probes_answer_beside_200_idle_streams_that_cost_little_and_are_ended() -> None:
    hold = threading.Event()

    def frames() -> Iterator[Any]:
        yield header_of(ONE)
        hold.wait(600)

    with running(stream_idle_s=str(IDLE_S)) as server, ExitStack() as stack:
        callers = [stack.enter_context(Caller(server)) for _ in range(CALLERS)]
        list(callers[0].stream(frames_of(ONE)))
        callers[0].ask(callers[0].health.Check, health_pb2.HealthCheckRequest())
        before = anonymous_nbytes(server.process.pid)
        calls = [callers[index % CALLERS].stream(frames(), timeout_s=600) for index in range(STREAMS)]
        wait_for(lambda: server.metric("dqkv_inflight_requests") >= 32, "many of them are admitted")
        check_probes(server, callers[0])
        grown = anonymous_nbytes(server.process.pid) - before
        print(f"{STREAMS} idle streams: {grown / MIB:.0f} MiB")
        assert grown < 256 * MIB
        for call in calls:
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() is grpc.StatusCode.CANCELLED
        hold.set()
        wait_for(lambda: server.metric("dqkv_stream_aborts_total", cause="idle") == STREAMS, "each was counted")
        wait_for(server.is_quiet, "each has ended")
        assert server.metric("dqkv_staging_pool_bytes", state="used") == 0
        answer = callers[1].ask(callers[1].gradients.Backward, unary_request(ONE))
        assert_right(ONE, inline_gradients(ONE, answer))


def check_probes(server: Running, caller: Caller) -> None:
    probes: dict[str, Callable[[], Any]] = {
        "/livez": lambda: server.http("/livez"),
        "/readyz": lambda: server.http("/readyz"),
        "Check": lambda: caller.ask(caller.health.Check, health_pb2.HealthCheckRequest()),
    }
    for name, probe in probes.items():
        took_s = steady_s(probe, below_s=PROBE_S)
        print(f"{name}: {1e3 * took_s:.1f} ms")
        assert took_s < PROBE_S, name
