"""Workers in a Ray cluster behind one address: the shared cases, bit for bit, and workers that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from oracle.budget import BITWISE_CHECKS, bitwise_complaints, judge
from oracle.case import AS_IS
from oracle.cases import ANSWERED_CASES
from oracle.exact import solved
from oracle.inputs import build_inputs
from oracle.problems import to_problem
from rig.answers import arguments, assert_right, drawn_problem
from rig.cluster import Cluster, listens, ray_cluster, ray_front
from rig.process import PATIENCE_S, children, is_alive, paused, wait_for
from rig.server import Running, eventually
from rig.ways import ALWAYS_NBYTES, NEVER_NBYTES, Way, Ways

import dqkv
from dqkv import AsyncClient, Retry, errors
from dqkv.client.arrays import host_tensor

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
# A cluster starts a dozen processes, and each worker two more.
pytestmark = pytest.mark.timeout(900)

WORKERS = 4
NAMES = {f"ray:{index}" for index in range(WORKERS)}
REQUESTS = 3 * WORKERS
MANY = 64
"""So many at once have all devices at work, also where one was measured to be slower than another."""
RETURN_S = 240.0
"""A worker's process, its server and its device start one after the other, on a machine that is busy."""
BITWISE = [case for case in ANSWERED_CASES if case.deterministic or not BITWISE_CHECKS.keys().isdisjoint(case.checks)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(cpus=WORKERS) as one:
        yield one


@pytest.fixture(scope="module")
def front(cluster: Cluster) -> Iterator[Running]:
    with ray_front(cluster, workers=WORKERS) as one:
        # It serves from when each worker is there or failed to start once, as it may on a machine that stands still.
        wait_for(lambda: all(device["state"] == "ok" for device in devices(one).values()), "all are there", RETURN_S)
        yield one


def devices(front: Running) -> dict[str, dict[str, Any]]:
    status, body = front.http("/v1/info")
    assert status == 200
    return {device["name"]: device for device in json.loads(body)["devices"]}


def device_processes(cluster: Cluster) -> list[int]:
    """What computes: one process of each worker's."""
    return [pid for worker in cluster.workers() for pid in children(worker)]


def in_flight(front: Running) -> int:
    return sum(device["running"] + device["waiting"] for device in devices(front).values())


def process_of(device: dict[str, Any], cluster: Cluster) -> int:
    """The worker's: it listens at the port that its device's model names."""
    port = int(device["model"].rpartition(":")[2])
    (found,) = [pid for pid in cluster.workers() if listens(pid, port)]
    return found


async def until(truth: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(truth):  # noqa: ASYNC110 - what it waits for happens in other processes
            await asyncio.sleep(0.02)


def test_there_is_one_address_and_a_device_a_worker(front: Running, cluster: Cluster) -> None:
    found = devices(front)
    assert found.keys() == NAMES
    assert {device["state"] for device in found.values()} == {"ok"}
    assert len({device["model"] for device in found.values()}) == WORKERS
    assert len(cluster.workers()) == len(device_processes(cluster)) == WORKERS
    # The front computes nothing itself.
    assert children(front.process.pid) == []


async def test_the_cases_sent_all_at_once_are_answered_exactly(front: Running) -> None:
    """Every case, half of them in messages and half in streams."""
    limits = [ALWAYS_NBYTES, NEVER_NBYTES]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                AsyncClient(front.target, inline_nbytes=limit, retry=Retry(attempts=100), timeout_s=600)
            )
            for limit in limits
        ]
        problems = [to_problem(build_inputs(case), lambda tensor: host_tensor("", tensor)) for case in ANSWERED_CASES]
        calls = [clients[index % 2].submit(problem) for index, problem in enumerate(problems)]
        answers = await asyncio.gather(*calls)
    complaints = []
    for case, answer in zip(ANSWERED_CASES, answers, strict=True):
        complaints += [f"{case.name}: {text}" for text in judge(case, solved(case), answer, AS_IS)]
    assert not complaints, "\n".join(complaints)
    assert {answer.report.device for answer in answers} == NAMES


def test_answers_are_those_of_a_server_bit_for_bit_by_every_way(front: Running, ways: Ways) -> None:
    complaints = []
    with Ways(front.target) as remote:
        for index, case in enumerate(BITWISE):
            way = list(Way)[index % len(Way)]
            checked = replace(case, checks=("BITWISE",)) if case.deterministic else case
            inputs = build_inputs(case)
            answers = [ways.ask(inputs, Way.UNARY), remote.ask(inputs, way), remote.ask(inputs, way)]
            complaints += [f"{case.name} by {way}: {text}" for text in judge(case, solved(case), answers[1], AS_IS)]
            complaints += [f"{case.name} by {way}: {text}" for text in bitwise_complaints(checked, answers)]
    assert not complaints, "\n".join(complaints)


def test_what_is_refused_says_so_as_a_server_would(front: Running) -> None:
    drawn = drawn_problem()
    with dqkv.Client(front.target) as client, pytest.raises(errors.ArchUnavailable, match="arch is sm90"):
        client.backward(**arguments(drawn), arch="sm90")


async def test_a_killed_worker_fails_only_what_ran_there_and_returns(front: Running, cluster: Cluster) -> None:
    drawn, before = drawn_problem(), set(cluster.workers())
    # No second tries: what fails is told.
    async with AsyncClient(front.target, retry=Retry(attempts=1), timeout_s=3600) as client:
        with paused(*device_processes(cluster)):
            asked = [asyncio.create_task(client.backward(**arguments(drawn))) for _ in range(REQUESTS)]
            await until(lambda: in_flight(front) == REQUESTS)
            lost = next(name for name, device in devices(front).items() if device["running"])
            victim = process_of(devices(front)[lost], cluster)
            os.kill(victim, signal.SIGKILL)
            (failed,), others = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            error = failed.exception()
        assert isinstance(error, errors.DeviceLost), error
        assert error.status.retryable
        assert lost in error.message
        for answer in await asyncio.gather(*others):
            assert_right(drawn, answer)
    # It is back: another process, the same device, and it answers.
    await until(lambda: devices(front)[lost]["state"] == "ok", RETURN_S)
    await until(lambda: not is_alive(victim))
    assert len(set(cluster.workers()) - before) == 1
    assert front.metric("dqkv_worker_restarts_total", device=lost) == 1
    assert front.metric("dqkv_worker_restarts_total") == 1
    async with AsyncClient(front.target, retry=Retry(attempts=1), timeout_s=3600) as client:
        seen: set[str] = set()
        async with asyncio.timeout(PATIENCE_S):
            while lost not in seen:
                answers = await asyncio.gather(*(client.backward(**arguments(drawn)) for _ in range(MANY)))
                seen |= {answer.report.device for answer in answers}
        for answer in answers:
            assert_right(drawn, answer)


async def test_callers_see_nothing_of_a_killed_worker_but_time(front: Running, cluster: Cluster) -> None:
    """With the client's own tries, each of many requests is answered while a worker dies under one of them."""
    drawn = drawn_problem()
    async with AsyncClient(front.target, timeout_s=3600) as client:
        with paused(*device_processes(cluster)):
            asked = [asyncio.create_task(client.backward(**arguments(drawn))) for _ in range(REQUESTS)]
            await until(lambda: in_flight(front) == REQUESTS)
            lost = next(name for name, device in devices(front).items() if device["running"])
            os.kill(process_of(devices(front)[lost], cluster), signal.SIGKILL)
            await until(lambda: devices(front)[lost]["state"] != "ok")
        for answer in await asyncio.gather(*asked):
            assert_right(drawn, answer)


def test_the_front_drains_and_its_workers_end_with_it(front: Running, cluster: Cluster) -> None:
    processes = cluster.workers() + device_processes(cluster)
    assert front.stop() == 0
    eventually(lambda: not any(map(is_alive, processes)))
