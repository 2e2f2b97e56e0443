"""Options of channels and servers: gRPC takes any name, and does nothing for one that it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from dqkv.client.endpoint import CHANNEL_OPTIONS
from dqkv.server.ports import KEEPALIVE_S, PING_INTERVAL_S, grpc_options

SERVER_OPTIONS = dict(grpc_options(1 << 20, 300.0))
PINGS = "grpc.keepalive_time_ms"


@pytest.fixture(scope="module")
def binary() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted({*SERVER_OPTIONS, *dict(CHANNEL_OPTIONS)}))
def test_grpc_knows_every_option_that_is_set(binary: bytes, name: str) -> None:
    # A longer name may end with this one, but none may go on after it.
    assert name.encode() + b"\0" in binary


def test_grpc_knows_no_made_up_option(binary: bytes) -> None:
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in binary


def test_a_client_may_ping_as_often_as_it_does() -> None:
    allowed_ms = SERVER_OPTIONS["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_ms == PING_INTERVAL_S * 1000
    assert 2 * allowed_ms <= int(dict(CHANNEL_OPTIONS)[PINGS]) < KEEPALIVE_S * 1000
