"""The server's own faults, and callers that ask for more than their share."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import structlog
from rig.process import anonymous_nbytes
from rig.server import eventually, open_channel, running
from rig.wire import (
    assert_right,
    failing,
    frames_of,
    inline_gradients,
    sample,
    stream,
    streamed_gradients,
    unary_request,
)

from dqkv.server.app import Server
from dqkv.server.gradient import Desk
from dqkv.settings import Settings
from dqkv.v1 import gradient_pb2_grpc as stubs

MIB = 1 << 20
ANY_PORTS: dict[str, Any] = {"port": 0, "stream_port": 0, "http_port": 0}
SECRET = "/dev/shm/dqkv-secret"


@pytest.fixture
async def broken(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """A server in this process whose desk fails in a way that nobody foresaw."""

    async def open_job(*_: Any, **__: Any) -> None:
        raise ValueError(f"cannot map {SECRET}")

    server = Server(Settings(**ANY_PORTS, cpu_devices=0))
    await server.start()
    monkeypatch.setattr(Desk, "open", open_job)
    yield server
    await server.stop()


@pytest.mark.parametrize("way", ["unary", "stream"])
async def test_a_fault_is_told_by_request_id_and_logged_with_its_traceback(broken: Server, way: str) -> None:
    addresses, one = broken.addresses, sample()

    def ask() -> str:
        port = addresses.grpc_port if way == "unary" else addresses.stream_port
        with open_channel(f"127.0.0.1:{port}") as channel, failing() as found:
            if way == "unary":
                stubs.AttentionGradientServiceStub(channel).Backward(unary_request(one), timeout=120)
            else:
                list(stream(channel, frames_of(one)))
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.INTERNAL, "INTERNAL_FAULT")
        return found[0].message

    with structlog.testing.capture_logs() as events:
        message = await asyncio.to_thread(ask)
    assert SECRET not in message
    assert "Error" not in message
    (fault,) = [event for event in events if event["event"] == "fault"]
    assert fault["request_id"] in message
    assert fault["exc_info"]


def test_one_caller_does_not_hold_every_stream() -> None:
    with running(streams_per_caller="2", stream_threads="3") as server:
        one, hold = sample(), threading.Event()

        def frames() -> Iterator[Any]:
            yield from itertools.islice(frames_of(one), 2)
            hold.wait(600)

        with open_channel(server.stream_target) as greedy, open_channel(server.stream_target) as other:
            held = [stream(greedy, frames()) for _ in range(2)]
            eventually(lambda: server.metric("dqkv_inflight_requests") == 2)
            with failing() as found:
                list(stream(greedy, frames_of(one)))
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_STREAMS")
            assert found[0].retry_after_s is not None
            assert_right(one, streamed_gradients(one, stream(other, frames_of(one))))
            for call in held:
                call.cancel()
            hold.set()
            eventually(lambda: server.metric("dqkv_inflight_requests") == 0)
            assert_right(one, streamed_gradients(one, stream(greedy, frames_of(one))))


def test_large_messages_of_strangers_stay_with_them() -> None:
    with running(tokens="alice:gradient:secret", cpu_devices="0") as server, open_channel(server.target) as channel:
        method = channel.unary_unary("/dqkv.v1.AttentionGradientService/Backward")
        before, message = anonymous_nbytes(server.process.pid), bytes(60 * MIB)
        calls = [method.future(message, timeout=120) for _ in range(6)]
        for call in calls:
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert anonymous_nbytes(server.process.pid) - before < 100 * MIB


def test_only_so_many_messages_are_read_at_once() -> None:
    with running(unary_messages="1") as server:
        one, hold = sample(), threading.Event()

        def nothing_yet() -> Iterator[bytes]:
            hold.wait(600)
            yield from ()

        with open_channel(server.target) as slow, open_channel(server.target) as quick:
            first = slow.stream_unary("/dqkv.v1.AttentionGradientService/Backward").future(nothing_yet(), timeout=120)
            eventually(lambda: server.metric("grpc_server_started_total", grpc_method="Backward") == 1)
            second = stubs.AttentionGradientServiceStub(quick).Backward.future(unary_request(one), timeout=120)
            with pytest.raises(grpc.FutureTimeoutError):
                second.result(timeout=0.5)
            first.cancel()
            hold.set()
            assert_right(one, inline_gradients(one, second.result(timeout=120)))


def test_requests_that_find_no_staging_memory_are_told_when_to_come_back() -> None:
    with running(staging_bytes=str(2 * MIB)) as server:
        one, hold = sample(512, 2, 64), threading.Event()

        def frames() -> Iterator[Any]:
            yield from itertools.islice(frames_of(one), 2)
            hold.wait(600)

        assert MIB < one.nbytes < 2 * MIB
        with open_channel(server.stream_target) as channel, open_channel(server.target) as control:
            held = stream(channel, frames())
            eventually(lambda: server.metric("dqkv_inflight_requests") == 1)
            with failing() as found:
                list(stream(channel, frames_of(one)))
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_BYTES")
            assert found[0].retry_after_s is not None
            with failing() as never:
                list(stream(channel, frames_of(sample(2048, 2, 64))))
            assert (never[0].code, never[0].reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE")
            held.cancel()
            hold.set()
            eventually(lambda: server.metric("dqkv_inflight_requests") == 0)
            small = sample()
            answer = stubs.AttentionGradientServiceStub(control).Backward(unary_request(small), timeout=120)
            assert_right(small, inline_gradients(small, answer))
