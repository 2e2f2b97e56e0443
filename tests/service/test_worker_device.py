"""A worker as a device of a front: a real server is asked over the wire, dies, is replaced, and answers again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from blocks import Placed, Sizes, exact, placed
from rig.process import PATIENCE_S, children, paused
from rig.server import Running, running

from dqkv import errors
from dqkv.backend.base import DeviceState, Task
from dqkv.backend.life import Death
from dqkv.backend.process import Backoff
from dqkv.cluster.device import Post, WorkerDevice
from dqkv.memory.block import Block
from dqkv.tensor import DType

SECRET = "of-the-front"
POST = Post(name="ray:7", token=SECRET, look_s=0.05)
FAST = Backoff(initial_s=0.01, limit_s=0.05, lost_s=0.05)

task_ids = itertools.count(1)


@dataclass(eq=False)
class Chair:
    """A seat that a test puts servers on; without one, no worker can be started."""

    server: Running | None = None
    restarts: int = 0
    ended: bool = False
    stuck: bool = False

    async def address(self) -> str:
        if self.stuck:
            await asyncio.Event().wait()
        if self.server is None:
            raise RuntimeError("a long story\nnobody sits here")
        return self.server.target

    async def restart(self) -> None:
        self.restarts += 1
        self.stuck = False

    async def end(self) -> None:
        self.ended = True


@dataclass(eq=False)
class Watched:
    """A device on a chair, and the deaths that it counted."""

    chair: Chair
    device: WorkerDevice
    deaths: list[tuple[str, Death]] = field(default_factory=list)

    async def run(self, given: Placed) -> str:
        report = await self.device.run(task_of(given), [given.block])
        assert report.device == "ray:7"
        return report.kernel


@asynccontextmanager
async def watched(server: Running | None, post: Post = POST, **chair: bool) -> AsyncIterator[Watched]:
    deaths: list[tuple[str, Death]] = []
    seat = Chair(server, **chair)
    device = WorkerDevice(post, seat, on_restart=lambda name, death: deaths.append((name, death)), backoff=FAST)
    await device.start()
    try:
        yield Watched(seat, device, deaths)
    finally:
        await device.stop()
    assert seat.ended
    assert device.state is DeviceState.LOST


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in another process
            await asyncio.sleep(0.005)


async def ready(one: Watched) -> None:
    await until(lambda: one.device.state is DeviceState.OK)


def task_of(given: Placed) -> Task:
    return Task(task_id=next(task_ids), problem=given.problem, gradients=given.gradients)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:dqkv-test")


def serving() -> AbstractContextManager[Running]:
    return running(tokens=f"front:gradient:{SECRET}", inline_bytes="4096")


@pytest.fixture(scope="module")
def worker() -> Iterator[Running]:
    with serving() as server:
        yield server


def assert_right(given: Placed, dtype: DType = DType.FP32) -> None:
    answers, want = given.answers(), exact(given)
    for role, gradient in answers.items():
        budget = {DType.FP32: 1e-5, DType.FP16: 4e-3, DType.BF16: 3e-2}[dtype] * np.abs(want[role]).max()
        assert np.abs(gradient - want[role]).max() <= budget, role


# ---- answers
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("sealed", [True, False], ids=["mapped", "by position"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("gap", [0, 8], ids=["dense", "gaps"])
@pytest.mark.parametrize("seqlen", [4, 24], ids=["in one message", "in a stream"])
async def test_gradients_land_where_they_are_wanted_and_nowhere_else(
    worker: Running, dtype: DType, sealed: bool, shift: int, gap: int, seqlen: int
) -> None:
    sizes = Sizes(batch_size=2, seqlen=seqlen, dtype=dtype)
    async with watched(worker) as one:
        await ready(one)
        with placed(sizes, sealed=sealed, shift=shift, gap=gap) as given:
            before = np.frombuffer(given.bytes(), dtype=np.uint8)
            report = await one.device.run(task_of(given), [given.block])
            after = np.frombuffer(given.bytes(), dtype=np.uint8)
            one.device.drop_block(given.block.block_id)
            assert_right(given, dtype)
    assert (report.arch, report.device, report.queued_s) == ("cpu", "ray:7", 0.0)
    assert report.kernel
    assert report.device_s > 0
    assert report.transfer_s > 0
    mine = np.zeros(len(after), dtype=bool)
    for tensor in given.gradients.values():
        for index in np.ndindex(*tensor.shape):
            start = tensor.data.byte_offset + int(np.dot(index, tensor.strides)) * dtype.itemsize
            mine[start : start + dtype.itemsize] = True
    assert np.array_equal(before[~mine], after[~mine])


async def test_an_empty_problem_is_answered(worker: Running) -> None:
    async with watched(worker) as one:
        await ready(one)
        with placed(Sizes(seqlen=0)) as given:
            assert await one.run(given)
            one.device.drop_block(given.block.block_id)


async def test_a_read_only_block_is_read(worker: Running) -> None:
    async with watched(worker) as one:
        await ready(one)
        with placed(Sizes()) as given, placed(Sizes()) as other:
            reader = os.open(f"/proc/self/fd/{given.block.fd}", os.O_RDONLY)
            try:
                block = Block(
                    block_id=given.block.block_id, fd=reader, nbytes=given.block.nbytes, sealed=True, writable=False
                )
                task = Task(task_id=next(task_ids), problem=given.problem, gradients=other.gradients)
                await one.device.run(task, [block, other.block])
                want = exact(given)
                for role, gradient in other.answers().items():
                    assert np.abs(gradient - want[role]).max() <= 1e-5 * np.abs(want[role]).max()
            finally:
                for each in (given, other):
                    one.device.drop_block(each.block.block_id)
                os.close(reader)


async def test_a_block_is_mapped_once_and_gone_after_it_was_dropped(worker: Running) -> None:
    async with watched(worker) as one:
        await ready(one)
        with placed(Sizes()) as given:
            for _ in range(3):
                await one.run(given)
                assert mappings() == 1
            one.device.drop_block(given.block.block_id)
            await until(lambda: not mappings())


async def test_what_a_worker_refuses_comes_back_as_it_said_it() -> None:
    with running(tokens=f"front:gradient:{SECRET}", request_bytes="1000") as small:
        async with watched(small) as one:
            await ready(one)
            with placed(Sizes()) as given, pytest.raises(errors.TooLarge):
                await one.run(given)
            assert one.device.state is DeviceState.OK
            assert one.deaths == []


# ---- deaths
async def test_a_worker_that_dies_fails_what_ran_there_and_its_successor_answers() -> None:
    with serving() as first, serving() as second:
        async with watched(first) as one:
            await ready(one)
            with placed(Sizes()) as given:
                with paused(*children(first.process.pid)):
                    work = asyncio.create_task(one.run(given))
                    await until(lambda: bool(first.metric("dqkv_inflight_requests")))
                    one.chair.server = None
                    first.process.kill()
                    with pytest.raises(errors.DeviceLost, match="it can be sent again"):
                        await work
                # It is told before it fails, or what is sent again would come back here.
                assert one.device.state is not DeviceState.OK
                with pytest.raises(errors.DeviceLost, match="takes no work"):
                    await one.run(given)
                assert one.deaths == [("ray:7", Death.EXIT)]
                await until(lambda: "nobody sits here" in one.device.fault)
                one.chair.server = second
                await ready(one)
                await one.run(given)
                assert_right(given)
                one.device.drop_block(given.block.block_id)


async def test_a_worker_that_dies_idle_is_missed_without_a_request() -> None:
    with serving() as server:
        async with watched(server) as one:
            await ready(one)
            one.chair.server = None
            server.process.kill()
            # After enough tries it counts as lost, and is tried all the same.
            await until(lambda: one.device.state is DeviceState.LOST)
            assert one.deaths == [("ray:7", Death.EXIT)]
            with serving() as other:
                one.chair.server = other
                await ready(one)


async def test_a_worker_whose_own_device_dies_comes_back_by_itself(worker: Running) -> None:
    async with watched(worker) as one:
        await ready(one)
        with placed(Sizes()) as given:
            (device,) = children(worker.process.pid)
            with paused(device):
                work = asyncio.create_task(one.run(given))
                await until(lambda: bool(worker.metric("dqkv_inflight_requests")))
                os.kill(device, signal.SIGKILL)
                with pytest.raises(errors.DeviceLost, match="it can be sent again"):
                    await work
            assert one.deaths == [("ray:7", Death.EXIT)]
            await ready(one)
            await one.run(given)
            assert_right(given)
            one.device.drop_block(given.block.block_id)


async def test_a_cancelled_request_leaves_its_memory_alone_and_the_worker_goes_on(worker: Running) -> None:
    async with watched(worker) as one:
        await ready(one)
        with placed(Sizes()) as given:
            before = given.bytes()
            with paused(*children(worker.process.pid)):
                work = asyncio.create_task(one.run(given))
                await until(lambda: bool(worker.metric("dqkv_inflight_requests")))
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
            assert given.bytes() == before
            assert one.device.state is DeviceState.OK
            await one.run(given)
            assert_right(given)
            one.device.drop_block(given.block.block_id)


async def test_a_worker_that_stands_still_is_missed_and_found_again(worker: Running) -> None:
    post = Post(name="ray:7", token=SECRET, look_s=0.05, answer_timeout_s=0.5)
    async with watched(worker, post) as one:
        await ready(one)
        with paused(worker.process.pid):
            await until(lambda: one.device.state is not DeviceState.OK)
            await until(lambda: "unanswered" in one.device.fault)
        await ready(one)


async def test_a_stranger_at_the_worker_s_address_is_given_nothing() -> None:
    with running(tokens="front:gradient:another-secret") as stranger:
        async with watched(stranger) as one:
            await until(lambda: bool(one.device.fault))
            assert one.device.state is not DeviceState.OK
            assert one.device.info is None
            with placed(Sizes()) as given, pytest.raises(errors.DeviceLost):
                await one.run(given)


async def test_a_worker_that_does_not_start_in_time_is_started_again(worker: Running) -> None:
    post = Post(name="ray:7", token=SECRET, look_s=0.05, start_timeout_s=0.2)
    async with watched(worker, post, stuck=True) as one:
        await until(lambda: bool(one.chair.restarts))
        await ready(one)
