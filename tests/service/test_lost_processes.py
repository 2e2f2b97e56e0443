"""Processes that die: the whole server, one of its devices, and what their clients see of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rig import doorbell, regional
from rig.caller import Caller
from rig.memory import PosixMemory, memfd, segment_names
from rig.process import children, is_alive, wait_for
from rig.server import Running, running
from rig.wire import (
    ROLES,
    Sample,
    assert_right,
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
SLOW = sample(1024, 8, 64)
"""Some tenths of a second on one core."""
LONG_ROWS = (1, 2048, 8, 64)
"""A second or so; only held against itself, for it is a hundred times as long to check."""


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
    with running() as server, ThreadPoolExecutor(2) as threads:
        once = dqkv.Retry(attempts=1)
        with (
            dqkv.Client(server.target, retry=once, timeout_s=60) as unary,
            dqkv.Client(server.target, retry=once, timeout_s=60, inline_nbytes=-1) as streaming,
        ):
            sent = [threads.submit(client.backward, **SLOW.inputs) for client in (unary, streaming)]
            wait_for(lambda: server.metric("dqkv_inflight_requests") == 2, "both requests are in flight")
            server.process.kill()
            began = time.monotonic()
            for future in sent:
                error = future.exception(timeout=30)
                assert isinstance(error, errors.TransportError), error
                assert error.reason == "TRANSPORT"
            assert time.monotonic() - began < 1.0


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
    random = np.random.default_rng(1)
    one = Sample({role: random.standard_normal(LONG_ROWS, dtype=np.float32) for role in ROLES}, {})
    restarts = pair.metric("dqkv_worker_restarts_total")
    with Caller(pair) as caller, PosixMemory(regional.nbytes(one)) as memory:
        regional.fill(memory.bytes, one)
        # By region: nothing is uploaded, so all four are queued before the first is done.
        request = regional.request(one, caller.register(memory))
        undisturbed = caller.ask(caller.gradients.Backward, request, timeout_s=60)
        futures = [caller.gradients.Backward.future(request, timeout=60, metadata=caller.metadata) for _ in range(4)]
        wait_for(lambda: queued(pair) == 4, "all four run or wait, wherever they were predicted to be done first")
        kill_device(pair, wait_for(lambda: busy(pair), "it runs"))
        failures = []
        for future in futures:
            error = future.exception()
            if error is not None:
                failures.append(failure_of(error))
                continue
            for got, want in zip(future.result().gradients, undisturbed.gradients, strict=True):
                np.testing.assert_allclose(
                    np.frombuffer(got.data, np.float32), np.frombuffer(want.data, np.float32), atol=1e-5
                )
        assert [(failed.code, failed.reason) for failed in failures] == [(grpc.StatusCode.UNAVAILABLE, "DEVICE_LOST")]
        wait_for(lambda: are_ok(pair), "the device comes back", 40)
        assert pair.metric("dqkv_worker_restarts_total") == restarts + 1
        assert pair.metric("dqkv_staging_pool_bytes", state="used") == 0
        assert_right(ONE, inline_gradients(ONE, caller.ask(caller.gradients.Backward, unary_request(ONE))))


def test_the_client_library_sends_again_what_a_killed_device_lost(pair: Running) -> None:
    wait_for(lambda: are_ok(pair), "both devices are there", 40)
    lost = pair.metric("dqkv_requests_total", reason="DEVICE_LOST")
    with dqkv.Client(pair.target, timeout_s=60) as client, ThreadPoolExecutor(1) as thread:
        sent: Future[dqkv.Gradients[object]] = thread.submit(client.backward, **SLOW.inputs)
        name = wait_for(lambda: busy(pair), "it runs")
        kill_device(pair, name)
        answer = sent.result(timeout=60)
    assert_right(SLOW, {role: getattr(answer, role) for role in SLOW.gradients})
    assert pair.metric("dqkv_requests_total", reason="DEVICE_LOST") == lost + 1


def test_a_stream_whose_device_was_killed_fails_as_retryable(pair: Running) -> None:
    wait_for(lambda: are_ok(pair), "both devices are there", 40)
    with Caller(pair) as caller:
        killed = threading.Event()

        def kill() -> None:
            name = wait_for(lambda: busy(pair), "it runs")
            kill_device(pair, name)
            killed.set()

        threading.Thread(target=kill).start()
        refused = caller.stream_refused(frames_of(SLOW))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DEVICE_LOST")
        assert killed.wait(10)
        assert_right(ONE, streamed_gradients(ONE, caller.stream(frames_of(ONE))))
