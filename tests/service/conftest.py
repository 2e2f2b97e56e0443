"""One server for the tests that change nothing about it; those that do start their own with `running`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc
import pytest
from rig.server import Running, eventually, open_channel, running

if TYPE_CHECKING:
    from rig.ways import Ways


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> None:
    """Whatever the test before asked of the common server has ended and was counted, in whichever order they run."""
    if "server" in request.fixturenames:
        eventually(request.getfixturevalue("server").is_quiet)


@pytest.fixture
def channel(server: Running) -> Iterator[grpc.Channel]:
    with open_channel(server.target) as one:
        yield one


@pytest.fixture
def bulk(server: Running) -> Iterator[grpc.Channel]:
    with open_channel(server.stream_target) as one:
        yield one


@pytest.fixture(scope="session")
def ways(server: Running) -> Iterator[Ways]:
    """Clients of the session's server, one for each way that a request's tensors can travel."""
    # torch and the oracle come in only where cases are asked for.
    import torch
    from rig.ways import Ways

    # Small matrices gain nothing from threads that wait for each other, and the server needs the cores.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Ways(server.target) as one:
        yield one
    torch.set_num_threads(before)
