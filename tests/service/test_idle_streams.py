"""Two hundred streams that send nothing: probes answer beside them, they cost little, and the server ends them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from rig.caller import Caller
from rig.process import anonymous_nbytes, wait_for
from rig.server import Running, running
from rig.wire import assert_right, frames_of, header_of, sample, streamed_gradients

STREAMS = 200
CALLERS = 10
PROBES = 15
IDLE_S = 2.0
ONE = sample()
MIB = 1 << 20


def latencies(probe: Callable[[], Any]) -> list[float]:
    """Seconds of each of a few probes."""
    took = []
    for _ in range(PROBES):
        began = time.perf_counter()
        probe()
        took.append(time.perf_counter() - began)
    return took


@pytest.mark.timeout(120)
def test_probes_answer_beside_200_idle_streams_that_cost_little_and_are_ended() -> None:
    hold = threading.Event()

    def frames() -> Iterator[Any]:
        yield header_of(ONE)
        hold.wait(60)

    with running(stream_idle_s=str(IDLE_S)) as server, ExitStack() as stack:
        callers = [stack.enter_context(Caller(server)) for _ in range(CALLERS)]
        list(callers[0].stream(frames_of(ONE)))
        callers[0].ask(callers[0].health.Check, health_pb2.HealthCheckRequest())
        before = anonymous_nbytes(server.process.pid)
        calls = [callers[index % CALLERS].stream(frames(), timeout_s=100) for index in range(STREAMS)]
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
        assert server.metric("dqkv_inflight_requests") == 0
        assert server.metric("dqkv_staging_pool_bytes", state="used") == 0
        assert_right(ONE, streamed_gradients(ONE, callers[1].stream(frames_of(ONE))))


def check_probes(server: Running, caller: Caller) -> None:
    probes: dict[str, Callable[[], Any]] = {
        "/livez": lambda: server.http("/livez"),
        "/readyz": lambda: server.http("/readyz"),
        "Check": lambda: caller.ask(caller.health.Check, health_pb2.HealthCheckRequest()),
    }
    for name, probe in probes.items():
        took = latencies(probe)
        print(f"{name}: median {1e3 * statistics.median(took):.1f} ms, worst {1e3 * max(took):.1f} ms")
        # The median is what the server does; the worst of a machine with two cores is what else it does.
        assert statistics.median(took) < 0.1
        assert max(took) < 1.0
