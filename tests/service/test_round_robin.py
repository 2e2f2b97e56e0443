"""Several servers behind one name: a client goes round them, past one that dies, and finds one that is new."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from rig.answers import arguments, assert_right, drawn_problem
from rig.fleet import HOSTS, Fleet, fleet
from rig.names import Names, name_server
from rig.process import wait_for

import dqkv

CALLS = 30
WAYS = {"Backward": None, "BackwardStream": -1}
"""Inline bytes above which a client streams, by the method that it then calls."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def names() -> Iterator[Names]:
    with name_server(HOSTS) as one:
        yield one


@pytest.fixture(scope="module")
def servers() -> Iterator[Fleet]:
    with fleet(*HOSTS) as one:
        yield one


def target(names: Names, servers: Fleet) -> str:
    return f"dns://127.0.0.1:{names.port}/dqkv.test:{servers.port}"


def ask(client: dqkv.Client, count: int) -> None:
    drawn = drawn_problem()
    for _ in range(count):
        assert_right(drawn, client.backward(**arguments(drawn)))


@pytest.mark.parametrize("rpc", WAYS)
def test_calls_of_one_client_are_spread(names: Names, servers: Fleet, rpc: str) -> None:
    with dqkv.Client(target(names, servers), inline_nbytes=WAYS[rpc]) as client:
        # From when each has been reached, the round is whole.
        wait_for(lambda: ask(client, 1) or all(servers.answered(rpc).values()), "each server answers")
        before = servers.answered(rpc)
        total = sum(before.values())
        ask(client, CALLS)
        wait_for(lambda: sum(servers.answered(rpc).values()) >= total + CALLS, "all are counted")
    after = servers.answered(rpc)
    counts = {host: after[host] - before[host] for host in HOSTS}
    assert min(counts.values()) >= CALLS / len(HOSTS) / 2, counts


@pytest.mark.parametrize("rpc", WAYS)
def test_a_server_that_dies_under_load_costs_no_answer(names: Names, servers: Fleet, rpc: str) -> None:
    victim = HOSTS[list(WAYS).index(rpc)]
    with (
        dqkv.Client(target(names, servers), inline_nbytes=WAYS[rpc], timeout_s=300) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        wait_for(lambda: ask(client, 1) or all(servers.answered(rpc).values()), "each server answers")
        before = servers.answered(rpc)
        asking = [threads.submit(ask, client, CALLS) for _ in range(4)]
        wait_for(lambda: servers.answered(rpc)[victim] > before[victim] + 2, "the load is on")
        servers.kill(victim)
        for one in asking:
            one.result()
        # Its successor at the same address is found again.
        servers.start(victim)
        wait_for(lambda: ask(client, len(HOSTS)) or servers.answered(rpc)[victim] > 0, "its successor answers")


def test_a_server_that_is_new_is_found_while_calls_go_on() -> None:
    """Connections that end after a while are made anew to whatever the name says by then, and no call is lost."""
    new = HOSTS[-1]
    with (
        fleet(*HOSTS[:-1], connection_age_s="0.5") as servers,
        name_server(HOSTS[:-1]) as names,
        ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(dqkv.Client(target(names, servers), inline_nbytes=limit, timeout_s=300))
            for limit in WAYS.values()
        ]

        def everybody_asks() -> bool:
            for client in clients:
                ask(client, 1)
            return all(servers.answered(rpc).get(new) for rpc in WAYS)

        assert not everybody_asks()
        servers.start(new)
        names.addresses = list(HOSTS)
        wait_for(everybody_asks, "the new server answers calls and streams", 120)
