"""Processes that die: the whole server, one of its devices, and what their clients see of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from rig import doorbell, regional
from rig.caller import Caller
from rig.memory import PosixMemory, memfd, segment_names
from rig.process import children, is_alive, paused, wait_for
from rig.server import Running, running
from rig.wire import (
    assert_right,
    endless,
    failure_of,
    frames_of,
    inline_gradients,
    sample,
    streamed_gradients,
    unary_request,
)

import dqkv
from dqkv import errors

ONE = sample()
TRIES = 3
"""A machine may stand still for a moment: the best of so many counts where a time is promised."""


# ---- the server
def test_crashes_leave_nothing_behind_and_the_next_server_takes_over(tmp_path: Path) -> None:
    """Killed again and again at the same addresses: no memory stays, devices die, sockets are replaced."""
    socket_path = tmp_path / "regions"
    addresses = {"region_socket": str(socket_path), "unix_socket": str(tmp_path / "calls")}
    names = segment_names()
    fd = memfd(4096)
    try:
        for devices in ("1", "0", "0", "0", "0"):
            with running(**addresses, cpu_devices=devices) as server, Caller(server) as caller:
                assert server.address["region_socket"] == str(socket_path)
                assert doorbell.register_memfd(server, caller, fd)
                with PosixMemory(regional.nbytes(ONE)) as memory:
                    handle = caller.register(memory)
                    if devices != "0":
                        regional.fill(memory.bytes, ONE)
                        caller.ask(caller.gradients.Backward, regional.request(ONE, handle))
                        list(caller.stream(frames_of(ONE)))
                processes = children(server.process.pid)
                assert len(processes) == int(devices)
                server.process.kill()
                server.process.wait()
                wait_for(lambda pids=processes: not any(map(is_alive, pids)), "the devices end with their server")
            assert socket_path.exists(), "what a crash leaves"
            # Others of this machine come and go.
            wait_for(lambda: segment_names() <= names, "shared memory does not grow")
    finally:
        os.close(fd)


def test_a_client_learns_at_once_that_its_server_was_killed() -> None:
    """Unary and streamed, in flight: a typed TransportError within a second, not at the deadline."""
    assert min(seconds_until_a_death_is_told() for _ in range(TRIES)) < 1.0


def seconds_until_a_death_is_told() -> float:
    once, long = dqkv.Retry(attempts=1), endless()
    with running() as server, ThreadPoolExecutor(2) as threads:
        settings: dict[str, Any] = {"retry": once, "timeout_s": 36000}
        with (
            dqkv.Client(server.target, **settings, inline_nbytes=long.nbytes) as unary,
            dqkv.Client(server.target, **settings, inline_nbytes=-1) as streaming,
        ):
            sent = [threads.submit(client.backward, **long.inputs) for client in (unary, streaming)]
            wait_for(lambda: server.metric("dqkv_queue_depth") == 2, "both requests are in flight")
            server.process.kill()
            began = time.monotonic()
            for future in sent:
                error = future.exception(timeout=120)
                assert isinstance(error, errors.TransportError), error
                assert error.reason == "TRANSPORT"
            return time.monotonic() - began


# ---- a device
@pytest.fixture(scope="module")
def pair() -> Iterator[Running]:
    """A server with two devices."""
    with running(cpu_devices="2") as server:
        yield server


def kill_device(server: Running, name: str) -> None:
    """Ends a device's process as a crash does, by its command line's own words."""
    for pid in children(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if name in words:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"no process of {name}")


def devices(server: Running) -> dict[str, dict[str, Any]]:
    """What the server says of each device, by name."""
    return {device["name"]: device for device in json.loads(server.http("/v1/info")[1])["devices"]}


def are_ok(server: Running) -> bool:
    return {device["state"] for device in devices(server).values()} == {"ok"}


def busy(server: Running) -> str | None:
    """A device that runs something now; None without one."""
    return next((name for name, device in devices(server).items() if device["running"]), None)


def queued(server: Running) -> int:
    """How many requests run or wait, on all devices."""
    return sum(device["running"] + device["waiting"] for device in devices(server).values())


def test_a_killed_device_fails_only_its_own_request_and_comes_back(pair: Running) -> None:
    """Four are on their way: the one that the killed device runs fails, retryable; every other is answered as ever."""
    wait_for(lambda: are_ok(pair), "both devices are there")
    restarts = pair.metric("dqkv_worker_restarts_total")
    request = unary_request(ONE)
    with Caller(pair) as caller:
        with paused(*children(pair.process.pid)):
            futures = [
                caller.gradients.Backward.future(request, timeout=120, metadata=caller.metadata) for _ in range(4)
            ]
            wait_for(lambda: queued(pair) == 4, "all four run or wait, wherever they were predicted to be done first")
            kill_device(pair, wait_for(lambda: busy(pair), "it runs"))
        failures = []
        for future in futures:
            error = future.exception()
            if error is not None:
                failures.append(failure_of(error))
                continue
            assert_right(ONE, inline_gradients(ONE, future.result()))
        assert [(failed.code, failed.reason) for failed in failures] == [(grpc.StatusCode.UNAVAILABLE, "DEVICE_LOST")]
        wait_for(lambda: are_ok(pair), "the device comes back")
        assert pair.metric("dqkv_worker_restarts_total") == restarts + 1
        assert pair.metric("dqkv_staging_pool_bytes", state="used") == 0
        assert_right(ONE, inline_gradients(ONE, caller.ask(caller.gradients.Backward, unary_request(ONE))))


def test_the_client_library_sends_again_what_a_killed_device_lost(pair: Running) -> None:
    wait_for(lambda: are_ok(pair), "both devices are there")
    lost = pair.metric("dqkv_requests_total", reason="DEVICE_LOST")
    with dqkv.Client(pair.target, timeout_s=120) as client, ThreadPoolExecutor(1) as thread:
        with paused(*children(pair.process.pid)):
            sent: Future[dqkv.Gradients[object]] = thread.submit(client.backward, **ONE.inputs)
            kill_device(pair, wait_for(lambda: busy(pair), "it runs"))
        answer = sent.result(timeout=120)
    assert_right(ONE, {role: getattr(answer, role) for role in ONE.gradients})
    assert pair.metric("dqkv_requests_total", reason="DEVICE_LOST") == lost + 1


def test_a_stream_whose_device_was_killed_fails_as_retryable(pair: Running) -> None:
    wait_for(lambda: are_ok(pair), "both devices are there")
    with Caller(pair) as caller, ThreadPoolExecutor(1) as thread:
        with paused(*children(pair.process.pid)):
            sent = thread.submit(caller.stream_refused, frames_of(ONE))
            kill_device(pair, wait_for(lambda: busy(pair), "it runs"))
        refused = sent.result(timeout=120)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DEVICE_LOST")
        assert_right(ONE, streamed_gradients(ONE, caller.stream(frames_of(ONE))))
