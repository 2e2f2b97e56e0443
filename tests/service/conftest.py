"""One server for the tests that change nothing about it; those that do start their own with `running`."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from rig.server import Running, open_channel, running


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.fixture
def channel(server: Running) -> Iterator[grpc.Channel]:
    with open_channel(server.target) as one:
        yield one


@pytest.fixture
def bulk(server: Running) -> Iterator[grpc.Channel]:
    with open_channel(server.stream_target) as one:
        yield one
