"""Faults of the server's own beside the gradients' way: callers learn that there was one, operators the rest."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog
from rig.caller import SECRETS, Caller, posix
from rig.memory import PosixMemory
from rig.wire import Failure

from dqkv.memory.regions import RegionTable
from dqkv.server.app import Server
from dqkv.settings import Settings
from dqkv.v1 import gradient_pb2 as pb

SECRET = "/dev/shm/dqkv-of-somebody-else"


@pytest.fixture
async def broken(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A server in this process whose parts fail in a way that nobody thought of, as a caller's target."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"no such thing: {SECRET}")

    server = Server(Settings(port=0, stream_port=0, http_port=0, cpu_devices=0))
    await server.start()
    for name in ("register", "probe", "totals"):
        monkeypatch.setattr(RegionTable, name, fail)
    addresses = server.addresses
    ports = {name: getattr(addresses, name) for name in ("grpc_port", "stream_port", "http_port")}
    yield SimpleNamespace(address=ports)
    monkeypatch.undo()
    await server.stop()


def registering(caller: Caller) -> Failure:
    with PosixMemory(4096) as memory:
        return caller.refused(caller.regions.RegisterRegion, posix(memory.name, 4096))


def probing(caller: Caller) -> Failure:
    return caller.refused(caller.regions.ProbeRegion, pb.ProbeRegionRequest(handle=bytes(16), nbytes=1))


@pytest.mark.parametrize("call", [registering, probing])
async def test_a_fault_is_told_by_its_request_id_alone(broken: Any, call: Callable[[Caller], Failure]) -> None:
    def ask() -> Failure:
        with Caller(broken) as caller:
            return call(caller)

    with structlog.testing.capture_logs() as logs:
        refused = await asyncio.to_thread(ask)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL_FAULT")
    assert SECRET not in refused.message
    assert "no such thing" not in refused.message
    (fault,) = (entry for entry in logs if entry["event"] == "fault")
    assert fault["request_id"]
    assert fault["request_id"] in refused.message, "what the caller can tell the operator"
    assert fault["exc_info"], "what the operator finds under it"


async def test_a_fault_behind_http_tells_nothing(broken: Any) -> None:
    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{broken.address['http_port']}{path}", timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    status, body = await asyncio.to_thread(get, "/metrics")
    assert status == 500
    assert SECRETS.search(body) is None
    assert "no such thing" not in body
    assert (await asyncio.to_thread(get, "/livez"))[0] == 200
