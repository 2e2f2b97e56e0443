"""Starting, draining and ending: what was accepted is finished, and everything else is told to go elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rig.process import children, is_alive, wait_for
from rig.server import STOP_S, Running, eventually, open_channel, running
from rig.starts import HeldStarts
from rig.wire import (
    assert_right,
    endless,
    failing,
    failure_of,
    frames_of,
    inline_gradients,
    sample,
    stream,
    streamed_gradients,
    unary_request,
)

from dqkv.server.app import Server
from dqkv.settings import Settings
from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_an_upload_in_progress_is_answered_after_sigterm_and_new_work_is_turned_away() -> None:
    with running() as server, open_channel(server.stream_target) as bulk, open_channel(server.target) as control:
        one, more = sample(64, 2, 32), threading.Event()

        def frames() -> Iterator[Any]:
            whole = frames_of(one)
            yield from itertools.islice(whole, 3)
            more.wait(600)
            yield from whole

        upload = stream(bulk, frames())
        eventually(lambda: server.metric("dqkv_inflight_requests") == 1)
        watch = health_pb2_grpc.HealthStub(control).Watch(health_pb2.HealthCheckRequest(), timeout=120)
        assert next(watch).status == SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        status, body = server.http("/readyz")
        assert status == 503
        assert b"draining" in body
        assert server.http("/livez")[0] == 200
        with failing() as unary:
            stubs.AttentionGradientServiceStub(control).Backward(unary_request(one), timeout=120)
        with failing() as streamed:
            list(stream(bulk, frames_of(one)))
        for found in (unary[0], streamed[0]):
            assert (found.code, found.reason) == (UNAVAILABLE, "DRAINING")
        more.set()
        assert_right(one, streamed_gradients(one, upload))
        assert server.process.wait(STOP_S) == 0


def test_an_upload_that_does_not_end_is_cut_off_after_the_drain_time() -> None:
    with running(drain_s="0.5") as server, open_channel(server.stream_target) as bulk:
        hold = threading.Event()

        def frames() -> Iterator[Any]:
            yield from itertools.islice(frames_of(sample()), 2)
            hold.wait(600)

        upload = stream(bulk, frames())
        eventually(lambda: server.metric("dqkv_inflight_requests") == 1)
        # It is held for far longer than this waits.
        assert server.stop() == 0
        hold.set()
        with failing():
            list(upload)
        assert server.wait_for("drained")["left"] == 1


def test_sigterm_under_load_loses_no_accepted_request() -> None:
    with running(cpu_devices="2") as server:
        one = sample(48, 2, 32)
        ended: list[str] = []
        wrong: list[BaseException] = []

        def work(target: str, streamed: bool) -> None:
            with open_channel(target) as channel:
                while True:
                    try:
                        if streamed:
                            assert_right(one, streamed_gradients(one, stream(channel, frames_of(one))))
                        else:
                            stub = stubs.AttentionGradientServiceStub(channel)
                            assert_right(one, inline_gradients(one, stub.Backward(unary_request(one), timeout=120)))
                        ended.append("answered")
                    except grpc.RpcError as error:
                        found = failure_of(error)
                        ended.append(found.code.name)
                        return
                    except BaseException as error:  # noqa: BLE001 - the main thread shows it
                        wrong.append(error)
                        return

        threads = [
            threading.Thread(target=work, args=(server.stream_target if index % 2 else server.target, bool(index % 2)))
            for index in range(6)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: ended.count("answered") >= 30)
        assert server.stop() == 0
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert set(ended) == {"answered", "UNAVAILABLE"}
        counted = [event for event in server.events if event.get("event") == "request" and event.get("code") == "OK"]
        assert len([event for event in counted if event["rpc"].startswith("Backward")]) == ended.count("answered")


def test_a_second_signal_ends_the_server_at_once() -> None:
    with running(drain_s="600") as server, open_channel(server.stream_target) as bulk:
        hold = threading.Event()

        def frames() -> Iterator[Any]:
            yield from itertools.islice(frames_of(sample()), 2)
            hold.wait(600)

        upload = stream(bulk, frames())
        eventually(lambda: server.metric("dqkv_inflight_requests") == 1)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("draining")
        time.sleep(1.2)
        assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        hold.set()
        upload.cancel()


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldStarts]:
    """Of the devices of every server that the test starts."""
    one = HeldStarts(tmp_path)
    monkeypatch.setenv("PYTHONPATH", one.python_path)
    yield one
    one.let_go()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_there(number: int, starts: HeldStarts) -> None:
    starts.hold()
    with running(ready=False, region_socket="auto") as server:
        workers = wait_for(lambda: children(server.process.pid), "a device's process")
        assert server.stop(number) == 0
        assert not any(is_alive(pid) for pid in workers)
    told = {event["event"] for event in server.events if event["level"] != "debug"}
    assert told == {"ending before it served"}
    assert len(server.lines) == len(server.events), server.lines


def test_a_stopped_server_leaves_no_process_and_no_socket() -> None:
    with running() as server:
        workers = children(server.process.pid)
        socket = Path(server.address["region_socket"])
        assert workers
        assert socket.exists()
        assert server.stop() == 0
        assert not any(is_alive(pid) for pid in workers)
        assert not socket.parent.exists()


def test_workers_of_a_killed_server_end_too() -> None:
    with running() as server:
        workers = children(server.process.pid)
        server.process.kill()
        eventually(lambda: not any(is_alive(pid) for pid in workers))


def test_a_server_without_devices_says_why_it_is_not_ready() -> None:
    with running(cpu_devices="0") as server, open_channel(server.target) as channel:
        status, body = server.http("/readyz")
        assert status == 503
        assert b"no device takes work" in body
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)
        assert check.status == NOT_SERVING
        assert server.http("/livez")[0] == 200


def test_health_is_told_for_the_server_and_each_service_but_no_other(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", *(f"dqkv.v1.{name}" for name in pb.DESCRIPTOR.services_by_name)):
        assert stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=120).status == SERVING
    with failing() as found:
        stub.Check(health_pb2.HealthCheckRequest(service="dqkv.v1.Nothing"), timeout=120)
    assert found[0].code is grpc.StatusCode.NOT_FOUND


def test_watchers_are_told_when_the_only_device_dies_and_when_it_is_back(starts: HeldStarts) -> None:
    with running() as server, open_channel(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=120)
        assert next(watch).status == SERVING
        (worker,) = children(server.process.pid)
        starts.hold()
        os.kill(worker, signal.SIGKILL)
        assert next(watch).status == NOT_SERVING
        starts.let_go()
        assert next(watch).status == SERVING
        assert server.metric("dqkv_worker_restarts_total", device="cpu:0", cause="signal") == 1
        one = sample()
        answer = stubs.AttentionGradientServiceStub(channel).Backward(unary_request(one), timeout=120)
        assert_right(one, inline_gradients(one, answer))


def test_calls_come_over_the_unix_socket_too(tmp_path: Path) -> None:
    path = tmp_path / "dqkv.sock"
    with running(unix_socket=str(path)) as server, open_channel(f"unix:{path}") as channel:
        assert path.stat().st_mode & 0o777 == 0o600
        one = sample()
        answer = stubs.AttentionGradientServiceStub(channel).Backward(unary_request(one), timeout=120)
        assert_right(one, inline_gradients(one, answer))
        caller = server.wait_for("request", rpc="Backward")["caller"]
        assert caller == f"uid:{os.getuid()}"
        session = stubs.CapabilityServiceStub(channel).GetCapabilities(pb.GetCapabilitiesRequest(), timeout=120).session
        with open_channel(server.stream_target) as bulk:
            answer = stream(bulk, frames_of(one), metadata=(("dqkv-session", session),))
            assert_right(one, streamed_gradients(one, answer))
        assert server.wait_for("request", rpc="BackwardStream")["caller"] == caller
        assert server.stop() == 0
        assert not path.exists()


# ---- cancellation
def test_a_cancelled_call_stops_its_work(server: Running, channel: grpc.Channel, bulk: grpc.Channel) -> None:
    """Minutes of work, which this test does not have: the device is free again because it was given up."""
    stub = stubs.AttentionGradientServiceStub(channel)
    running_call = stub.Backward.future(unary_request(endless(), checksum=False), timeout=36000)
    eventually(lambda: server.metric("dqkv_queue_depth") == 1)
    queued = stream(bulk, frames_of(sample()), timeout_s=36000)
    eventually(lambda: server.metric("dqkv_queue_depth") == 2)
    queued.cancel()
    eventually(lambda: server.metric("dqkv_queue_depth") == 1)
    running_call.cancel()
    eventually(lambda: server.metric("dqkv_queue_depth") == 0)
    eventually(lambda: server.metric("dqkv_inflight_requests") == 0)
    eventually(lambda: server.metric("dqkv_staging_pool_bytes", state="used") == 0)
    one = sample()
    assert_right(one, inline_gradients(one, stub.Backward(unary_request(one), timeout=120)))


# ---- in this process
async def test_a_server_runs_in_this_process_and_on_any_free_ports() -> None:
    settings = Settings(port=0, stream_port=0, http_port=0, cpu_threads=1)
    server = Server(settings)
    with pytest.raises(RuntimeError):
        _ = server.addresses
    await server.start()
    try:
        addresses = server.addresses
        assert len({addresses.grpc_port, addresses.stream_port, addresses.http_port}) == 3
        one = sample()

        def ask() -> Any:
            with open_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
                return stubs.AttentionGradientServiceStub(channel).Backward(unary_request(one), timeout=120)

        assert_right(one, inline_gradients(one, await asyncio.to_thread(ask)))
    finally:
        await server.stop()
