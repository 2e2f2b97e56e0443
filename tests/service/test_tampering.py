"""A byte that changes between client and server is noticed by whoever receives it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from rig.proxy import ADDRESS, Direction, TamperingProxy
from rig.server import Running
from rig.wire import Array

import dqkv
from dqkv import errors

SHAPE = (64, 1, 4, 64)
"""Sequences of one row: its one key has probability 1, so that dv is dout, to the last bit."""
ONCE = dqkv.Retry(attempts=1)
ROW = np.linspace(1.0, 2.0, SHAPE[-1], dtype=np.float32)
"""Of dout, and so of dv, in every place: the mark by which the proxy finds a tensor's bytes."""


@pytest.fixture(scope="module")
def inputs() -> dict[str, Array]:
    dout = np.broadcast_to(ROW, SHAPE).copy()
    v = np.ones(SHAPE, dtype=np.float32)
    return {
        "q": np.zeros(SHAPE, dtype=np.float32),
        "k": np.ones(SHAPE, dtype=np.float32),
        "v": v,
        "dout": dout,
        "delta": np.ascontiguousarray((dout * v).sum(-1).transpose(0, 2, 1)),
    }


@pytest.fixture(params=[4 << 20, -1], ids=["unary", "stream"])
def inline_nbytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def ports(server: Running) -> list[int]:
    return [server.address["grpc_port"], server.address["stream_port"]]


@pytest.fixture
def proxy(ports: list[int], request: pytest.FixtureRequest) -> Iterator[TamperingProxy]:
    with TamperingProxy(ports, mark=ROW.tobytes(), direction=request.param) as one:
        yield one


def through(ports: list[int], inline_nbytes: int) -> dqkv.Client:
    return dqkv.Client(f"{ADDRESS}:{ports[0]}", retry=ONCE, timeout_s=120, inline_nbytes=inline_nbytes)


@pytest.mark.parametrize("proxy", [Direction.UP], indirect=True)
def test_a_byte_that_changes_on_the_way_up_is_data_loss_at_the_server(
    server: Running, proxy: TamperingProxy, ports: list[int], inline_nbytes: int, inputs: dict[str, Array]
) -> None:
    launched = server.metric("dqkv_pairs_total")
    with through(ports, inline_nbytes) as client, pytest.raises(errors.ChecksumMismatch):
        client.backward(**inputs)
    assert proxy.flipped == 1
    assert server.metric("dqkv_pairs_total") == launched, "nothing was launched"


@pytest.mark.parametrize("proxy", [Direction.DOWN], indirect=True)
def test_a_byte_that_changes_on_the_way_down_is_data_loss_at_the_client(
    proxy: TamperingProxy, ports: list[int], inline_nbytes: int, inputs: dict[str, Array]
) -> None:
    with through(ports, inline_nbytes) as client:
        with pytest.raises(errors.ChecksumMismatch):
            client.backward(**inputs)
        assert proxy.flipped == 1
        # The proxy is honest from here on, and so is the answer.
        assert (client.backward(**inputs).dv == ROW).all()


@pytest.mark.parametrize("proxy", [Direction.DOWN], indirect=True)
def test_without_a_byte_that_changes_the_proxy_is_not_noticed(
    proxy: TamperingProxy, ports: list[int], inline_nbytes: int, inputs: dict[str, Array]
) -> None:
    proxy.flipped = 1
    with through(ports, inline_nbytes) as client:
        assert (client.backward(**inputs).dv == ROW).all()
