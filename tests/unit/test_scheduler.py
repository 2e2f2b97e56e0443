"""Admission, turns, placement, cancellation and drain: on real device processes, and on a device whose time is told."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress

import numpy as np
import pytest
import pytest_asyncio
from blocks import Placed, Sizes, block_ids, describe, exact, placed
from hypothesis import given, settings
from hypothesis import strategies as st
from rig.process import paused

from dqkv import errors
from dqkv.backend.base import Device, DeviceInfo, DeviceState, Task
from dqkv.backend.process import Backoff, DeviceProcess, DeviceSettings
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Options, Problem, Report
from dqkv.scheduler.cost import Estimate, Work
from dqkv.scheduler.fairness import QUANTUM_S, FairQueue
from dqkv.scheduler.queue import Scheduler, SchedulerLimits
from dqkv.tensor import DType, Tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = Sizes(seqlen=1 << 18, num_heads=1, head_dim=8)
"""Minutes of work for a real device: never waited for."""
SECOND = Sizes(seqlen=100, num_heads=100, head_dim=8)
"""What the told device needs about a second for: 2 * 100 * 100 * 100 pairs * 40, and the statistics."""
LOGGER = "dqkv.scheduler.queue"
LAUNCH_S, RATE = 0.001, 9.6e7

Seen = list[tuple[Estimate, Report]]


class ToldDevice:
    """A device that takes exactly as long as it says, and ends a task when the test says so.

    A real one cannot: what is tested with it is order and arithmetic, not work.
    """

    def __init__(self, name: str = "told:0", *, dtypes: Sequence[DType] = tuple(DType), arch: Arch = Arch.CPU) -> None:
        self.name = name
        self.state = DeviceState.STARTING
        self.fault = ""
        self.info: DeviceInfo | None = None
        self.started: list[Problem[InBlock]] = []
        self.current: asyncio.Future[None] | None = None
        self.broken: errors.DqkvError | None = None
        self.refused = 0
        self._known = DeviceInfo(name=name, archs=(arch,), dtypes=tuple(dtypes))
        self._held = False
        self._on_change: Callable[[], None] = lambda: None

    def watch(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    async def start(self) -> None:
        self.become(DeviceState.OK)

    async def stop(self) -> None:
        self.die(DeviceState.LOST, "it was stopped")

    def drop_block(self, block_id: int) -> None:
        pass

    async def run(self, task: Task, blocks: Sequence[Block]) -> Report:
        assert self.state is DeviceState.OK
        assert self.current is None, "one task at a time"
        if self.broken is not None:
            self.refused += 1
            raise self.broken
        seconds = LAUNCH_S + Work.of(task.problem).flops / RATE
        if self._held:
            self.started.append(task.problem)
            self.current = asyncio.get_running_loop().create_future()
            try:
                await self.current
            finally:
                self.current = None
        return Report(arch="cpu", kernel="told", device=self.name, device_s=seconds)

    # ---- what the test tells it
    def hold(self) -> None:
        """From now on tasks last until `finish`."""
        self._held = True

    async def finish(self) -> None:
        """End the task that runs, and let the next begin."""
        assert self.current is not None
        self.current.set_result(None)
        await settled()

    def become(self, state: DeviceState, fault: str = "") -> None:
        self.state, self.fault = state, fault
        if state is DeviceState.OK:
            self.info = self._known
        self._on_change()

    def die(self, state: DeviceState = DeviceState.STARTING, fault: str = "its process was ended by SIGKILL") -> None:
        current = self.current
        self.become(state, fault)
        if current is not None and not current.done():
            current.set_exception(errors.DeviceLost(fault))


async def settled() -> None:
    """Let everything that can happen now happen."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in another process
            await asyncio.sleep(0.005)


def scheduler_of(devices: Sequence[Device], *, queue_s: float = 1e6, request_nbytes: int = 2**40) -> Scheduler:
    limits = SchedulerLimits(request_nbytes=request_nbytes, queue_s=queue_s)
    return Scheduler(devices, limits=limits, block_ids=block_ids, observe=lambda estimate, report: None)


@asynccontextmanager
async def told(*devices: ToldDevice, queue_s: float = 1e6, request_nbytes: int = 2**40) -> AsyncIterator[Scheduler]:
    """A started scheduler whose devices hold every task."""
    scheduler = scheduler_of(devices, queue_s=queue_s, request_nbytes=request_nbytes)
    await scheduler.start()
    for device in devices:
        device.hold()
    yield scheduler
    await scheduler.stop()


def sized(heads: int, *, seqlen: int = 100) -> Problem[InBlock]:
    """A problem of `heads` hundredths of a told second; its number of heads also tells it from others."""
    described = describe(Sizes(seqlen=seqlen, num_heads=heads, head_dim=8))
    return described.with_tensors({role: each.with_data(InBlock(0, 0)) for role, each in described.tensors.items()})


def gradients_of(problem: Problem[InBlock]) -> dict[str, Tensor[InBlock]]:
    return {role: tensor.with_data(InBlock(0, 0)) for role, tensor in problem.gradients.items()}


def begin(
    scheduler: Scheduler, problem: Problem[InBlock], *, owner: str = "a", deadline: float | None = None
) -> asyncio.Task[Report]:
    """Admit now, run in the background."""
    admission = scheduler.admit(problem, owner=owner, deadline=deadline)

    async def run() -> Report:
        with admission:
            return await admission.run(problem, gradients_of(problem), [])

    return asyncio.create_task(run())


def begin_soon_late(scheduler: Scheduler, problem: Problem[InBlock]) -> asyncio.Task[Report]:
    """Admitted in time, with a deadline that passes soon after; again when this machine stood still in between."""
    for _ in range(100):
        with suppress(errors.WontFinish):
            return begin(scheduler, problem, deadline=time.monotonic() + 0.2)
    raise AssertionError("it was never admitted")


async def ended(*tasks: asyncio.Task[Report]) -> list[Report | BaseException]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def heads_of(device: ToldDevice) -> list[int]:
    return [problem.shape.num_heads_q for problem in device.started]


# ---- turns
async def test_a_flood_of_one_owner_delays_another_by_one_request_at_most() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        flood = [begin(scheduler, sized(100), owner="flood") for _ in range(100)]
        await settled()
        for _ in range(5):
            await device.finish()
        other = begin(scheduler, sized(101), owner="other")
        await settled()
        position = len(device.started)
        while not other.done():
            await device.finish()
        # The one that ran when it came, and its own.
        assert heads_of(device)[position:].index(101) <= 1
        assert sum(task.done() for task in flood) <= 7
        for task in flood:
            task.cancel()
        await ended(*flood)


async def test_owners_share_the_seconds_and_not_the_requests() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        tasks = [begin(scheduler, sized(400), owner="long") for _ in range(10)]
        tasks += [begin(scheduler, sized(100), owner="short") for _ in range(40)]
        await settled()
        for _ in range(25):
            await device.finish()
        seconds = {heads: heads_of(device)[:25].count(heads) * heads / 100 for heads in (100, 400)}
        # One long one had begun before there was anybody to share with.
        assert abs(seconds[400] - seconds[100]) <= 2 * 4 + 0.1
        for task in tasks:
            task.cancel()
        await ended(*tasks)


async def test_requests_of_one_owner_keep_their_order() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (5, 900, 1, 30)]
        await settled()
        while device.current is not None:
            await device.finish()
        assert heads_of(device) == [5, 900, 1, 30]
        assert all(isinstance(answer, Report) for answer in await ended(*tasks))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
async def test_everything_that_waits_gets_its_turn_once(entries: list[tuple[str, float]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for index, (owner, seconds) in enumerate(entries):
        queue.push(owner, seconds, index)
    order = [queue.pop() for _ in entries]
    assert sorted(order) == list(range(len(entries)))
    assert len(queue) == 0
    for owner in "abc":
        mine = [index for index in order if entries[index][0] == owner]
        assert mine == sorted(mine)
    with pytest.raises(IndexError):
        queue.pop()


@given(st.lists(st.floats(0.01, 5), min_size=30, max_size=30), st.lists(st.floats(0.01, 5), min_size=30, max_size=30))
@settings(max_examples=100, deadline=None)
async def test_no_owner_gets_ahead_by_more_than_one_request(first: list[float], second: list[float]) -> None:
    queue: FairQueue[tuple[str, float]] = FairQueue()
    for owner, costs in (("a", first), ("b", second)):
        for seconds in costs:
            queue.push(owner, seconds, (owner, seconds))
    served = {"a": 0.0, "b": 0.0}
    left = {"a": 30, "b": 30}
    while all(left.values()):
        owner, seconds = queue.pop()
        served[owner] += seconds
        left[owner] -= 1
        assert abs(served["a"] - served["b"]) <= 5 + 2 * QUANTUM_S


async def test_a_removed_item_never_has_its_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", 1.0, "one")
    queue.push("a", 1.0, "two")
    assert queue.remove("one")
    assert not queue.remove("one")
    assert [queue.pop()] == ["two"]
    assert queue.items() == []


# ---- admission
async def test_an_arch_that_no_device_runs_is_refused_with_what_there_is() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        for ask in (scheduler.estimate, lambda problem: scheduler.admit(problem, owner="a", deadline=None)):
            with pytest.raises(
                errors.ArchUnavailable, match=r"arch is sm90.*told:0 \(arch cpu; bf16, fp16, fp32\)"
            ) as e:
                ask(describe(SECOND, Options(arch=Arch.SM90)))
            assert e.value.field == "arch"


async def test_a_dtype_that_no_device_takes_is_refused_with_what_there_is() -> None:
    async with told(ToldDevice(dtypes=[DType.BF16])) as scheduler:
        with pytest.raises(errors.ArchUnavailable, match=r"q is fp32.*told:0 \(arch cpu; bf16\)") as caught:
            scheduler.estimate(describe(SECOND))
        assert caught.value.field == "q"


async def test_each_request_goes_where_its_arch_is() -> None:
    cpu, gpu = ToldDevice("told:0"), ToldDevice("told:1", arch=Arch.SM90)
    async with told(cpu, gpu) as scheduler:
        assert scheduler.estimate(describe(SECOND, Options(arch=Arch.SM90))).device == "told:1"
        assert scheduler.estimate(describe(SECOND, Options(arch=Arch.CPU))).device == "told:0"


async def test_a_request_that_can_never_fit_is_too_large_and_says_by_how_much() -> None:
    problem = describe(SECOND)
    nbytes = 8 * problem.q.nbytes
    async with told(ToldDevice(), request_nbytes=nbytes - 1) as scheduler:
        with pytest.raises(errors.TooLarge, match=f"together {nbytes}: the limit is {nbytes - 1}"):
            scheduler.admit(problem, owner="a", deadline=None)
    async with told(ToldDevice(), request_nbytes=nbytes) as scheduler:
        scheduler.admit(problem, owner="a", deadline=None).release()


async def test_an_estimate_is_the_cost_model_and_the_wait() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        work = Work.of(describe(SECOND))
        idle = scheduler.estimate(describe(SECOND))
        assert idle.device_s == pytest.approx(LAUNCH_S + work.flops / RATE, rel=0.02)
        assert idle.device_s == pytest.approx(1.0, rel=0.02)
        assert (idle.pairs, idle.flops, idle.queue_s) == (work.pairs, work.flops, 0.0)
        assert (idle.device, idle.arch) == ("told:0", Arch.CPU)
        with (
            scheduler.admit(describe(SECOND), owner="a", deadline=None),
            scheduler.admit(describe(SECOND), owner="a", deadline=None),
        ):
            # Its own two go first; of the stranger's two only as much as is its own.
            assert scheduler.estimate(describe(SECOND), owner="a").queue_s == pytest.approx(2.0, rel=0.02)
            assert scheduler.estimate(describe(SECOND), owner="b").queue_s == pytest.approx(1.0, rel=0.02)
        assert scheduler.estimate(describe(SECOND), owner="a").queue_s == 0.0


async def test_a_full_queue_refuses_with_the_time_to_wait_and_takes_on_again() -> None:
    async with told(ToldDevice(), queue_s=2.5) as scheduler:
        held = [scheduler.admit(describe(SECOND), owner="a", deadline=None) for _ in range(3)]
        with pytest.raises(errors.QueueFull) as caught:
            scheduler.admit(describe(SECOND), owner="a", deadline=None)
        assert caught.value.retry_after_s == pytest.approx(0.5, abs=0.1)
        assert scheduler.statuses()[0].queue_s == pytest.approx(3.0, rel=0.02)
        held.pop().release()
        held.append(scheduler.admit(describe(SECOND), owner="a", deadline=None))
        for admission in held:
            admission.release()
            admission.release()
        assert scheduler.statuses()[0].queue_s == 0.0


async def test_an_idle_device_takes_on_what_is_longer_than_the_queue() -> None:
    async with told(ToldDevice(), queue_s=0.5) as scheduler:
        scheduler.admit(describe(SECOND), owner="a", deadline=None).release()


async def test_an_owner_that_fills_the_queue_does_not_lock_others_out() -> None:
    async with told(ToldDevice(), queue_s=4.5) as scheduler:

        def fill(owner: str) -> int:
            for count in range(100):
                try:
                    scheduler.admit(describe(SECOND), owner=owner, deadline=None)
                except errors.QueueFull:
                    return count
            return 100

        assert fill("flood") == 5
        # Half of the queue is the other's, and none of it the first one's any more.
        assert fill("other") == 3
        assert fill("flood") == 0
        assert fill("third") == 2


async def test_a_request_that_cannot_be_done_in_time_is_refused_at_once() -> None:
    problem = sized(10_000)
    async with told(ToldDevice()) as scheduler:
        needed_s = scheduler.estimate(problem).device_s
        assert needed_s == pytest.approx(100, rel=0.02)
        with pytest.raises(errors.WontFinish, match=f"told:0 would begin in 0 s and take {needed_s:.3g}"):
            scheduler.admit(problem, owner="a", deadline=time.monotonic() + needed_s / 2)
        held = scheduler.admit(problem, owner="a", deadline=time.monotonic() + 1.5 * needed_s)
        with held, pytest.raises(errors.WontFinish):
            scheduler.admit(problem, owner="a", deadline=time.monotonic() + 1.5 * needed_s)
        with pytest.raises(errors.WontFinish):
            scheduler.admit(problem, owner="a", deadline=time.monotonic() - 10)


async def test_a_refused_request_holds_nothing() -> None:
    async with told(ToldDevice(), queue_s=0.5, request_nbytes=10**6) as scheduler:
        for deadline, sizes in ((0.0, SECOND), (None, LONG)):
            with pytest.raises((errors.WontFinish, errors.TooLarge)):
                scheduler.admit(describe(sizes), owner="a", deadline=deadline)
        assert scheduler.statuses()[0].queue_s == 0.0


async def test_an_admission_is_run_once() -> None:
    device, problem = ToldDevice(), sized(1)
    async with told(device) as scheduler:
        admission = scheduler.admit(problem, owner="a", deadline=None)
        first = asyncio.create_task(admission.run(problem, gradients_of(problem), []))
        await settled()
        with pytest.raises(errors.InternalFault):
            await admission.run(problem, gradients_of(problem), [])
        await device.finish()
        assert (await first).kernel == "told"
        released = scheduler.admit(problem, owner="a", deadline=None)
        released.release()
        with pytest.raises(errors.InternalFault):
            await released.run(problem, gradients_of(problem), [])


# ---- deadlines and cancellation
async def test_a_deadline_that_passes_in_the_queue_ends_the_wait() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        first = begin(scheduler, sized(1))
        late = begin_soon_late(scheduler, sized(2))
        with pytest.raises(errors.WontFinish, match="in the queue"):
            await late
        await device.finish()
        await first
        assert heads_of(device) == [1]
        assert scheduler.statuses()[0].waiting == 0


async def test_a_deadline_that_passes_while_it_runs_stops_it() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        late = begin_soon_late(scheduler, sized(1))
        with pytest.raises(errors.WontFinish, match="while told:0 worked"):
            await late
        assert scheduler.statuses()[0].running == 0


async def test_a_request_cancelled_in_the_queue_never_runs() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (1, 2, 3)]
        await settled()
        tasks[1].cancel()
        await settled()
        assert scheduler.statuses()[0].waiting == 1
        await device.finish()
        await device.finish()
        assert heads_of(device) == [1, 3]
        answers = await ended(*tasks)
        assert isinstance(answers[1], asyncio.CancelledError)


@pytest.mark.parametrize("steps", range(8))
async def test_a_request_cancelled_as_its_turn_comes_gives_the_turn_on(steps: int) -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (1, 2, 3)]
        await settled()
        assert device.current is not None
        device.current.set_result(None)
        for _ in range(steps):
            await asyncio.sleep(0)
        tasks[1].cancel()
        await settled()
        while device.current is not None:
            await device.finish()
        answers = await ended(*tasks)
        assert isinstance(answers[1], asyncio.CancelledError)
        assert isinstance(answers[2], Report)
        status = scheduler.statuses()[0]
        assert (status.running, status.waiting, status.queue_s) == (0, 0, 0.0)


# ---- devices that come and go
async def test_work_goes_to_the_device_that_is_done_first() -> None:
    first, second = ToldDevice("told:0"), ToldDevice("told:1")
    async with told(first, second) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (300, 100, 101, 102, 103)]
        await settled()
        assert heads_of(first) == [300]
        for _ in range(3):
            await second.finish()
        assert heads_of(second)[:3] == [100, 101, 102]
        for device in (first, second):
            while device.current is not None:
                await device.finish()
        await ended(*tasks)


async def test_a_dead_device_fails_what_runs_and_its_queue_goes_to_another() -> None:
    first, second = ToldDevice("told:0"), ToldDevice("told:1")
    async with told(first, second) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (100, 101, 102, 103)]
        await settled()
        assert (heads_of(first), heads_of(second)) == ([100], [101])
        first.die()
        await settled()
        for _ in range(3):
            await second.finish()
        answers = await ended(*tasks)
        assert isinstance(answers[0], errors.DeviceLost)
        assert [answer.device for answer in answers[1:] if isinstance(answer, Report)] == ["told:1"] * 3


async def test_the_queue_of_the_only_device_waits_for_its_restart() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (1, 2)]
        await settled()
        device.die()
        await settled()
        assert not tasks[1].done()
        late = begin(scheduler, sized(3))
        device.become(DeviceState.OK)
        await settled()
        await device.finish()
        await device.finish()
        answers = await ended(*tasks, late)
        assert isinstance(answers[0], errors.DeviceLost)
        assert all(isinstance(answer, Report) for answer in answers[1:])


async def test_the_queue_of_a_lost_device_fails_where_no_other_can_take_it() -> None:
    device = ToldDevice()
    async with told(device) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (1, 2)]
        uploading = scheduler.admit(sized(3), owner="a", deadline=None)
        await settled()
        device.die(DeviceState.LOST, "it failed to start 5 times in a row")
        for answer in await ended(*tasks):
            assert isinstance(answer, errors.DeviceLost)
            assert answer.status.retryable
        with uploading, pytest.raises(errors.DeviceLost, match="5 times"):
            await uploading.run(sized(3), gradients_of(sized(3)), [])
        with pytest.raises(errors.DeviceLost, match="5 times"):
            scheduler.admit(describe(SECOND), owner="a", deadline=None)
        status = scheduler.statuses()[0]
        assert (status.state, status.waiting, status.running, status.queue_s) == (DeviceState.LOST, 0, 0, 0.0)
        device.become(DeviceState.OK)
        again = begin(scheduler, sized(4))
        await settled()
        await device.finish()
        assert (await again).kernel == "told"


async def test_a_device_whose_small_runs_fail_is_not_ok_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    device = ToldDevice()
    device.broken = errors.InternalFault("told:0 failed on this request: RuntimeError")
    scheduler = scheduler_of([device])
    await scheduler.start()
    status = scheduler.statuses()[0]
    assert status.state is DeviceState.LOST
    assert "small runs failed" in status.fault
    assert [record.levelname for record in caplog.records if record.name == LOGGER] == ["ERROR"]
    with pytest.raises(errors.DeviceLost, match="small runs failed"):
        scheduler.estimate(describe(SECOND))
    await scheduler.stop()


async def test_a_device_whose_kernels_are_being_built_says_which_once_and_in_words(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{LOGGER}.MEASURE_AGAIN_S", 0.0)
    caplog.set_level(logging.INFO, logger=LOGGER)
    device = ToldDevice()
    device.broken = errors.KernelBuilding("kernels are being built, 2 of them (main_loop-a, preprocess-a)")
    scheduler = scheduler_of([device])
    await scheduler.start()
    faults = []
    for names in ("main_loop-a, preprocess-a", "main_loop-b, main_loop-c"):
        device.broken = errors.KernelBuilding(f"kernels are being built, 2 of them ({names})")
        seen = device.refused
        await until(lambda seen=seen: device.refused > seen + 3)
        assert scheduler.statuses()[0].state is DeviceState.LOST
        faults.append(scheduler.statuses()[0].fault)
        assert faults[-1] == f"its small runs wait: {device.broken.message}"
    device.broken = None
    await until(lambda: scheduler.statuses()[0].state is DeviceState.OK)
    assert scheduler.statuses()[0].fault == ""
    said = [(record.levelname, record.getMessage(), record.exc_info) for record in caplog.records]
    assert said == [("INFO", f"device told:0: {fault}", None) for fault in faults]
    await scheduler.stop()


async def test_nothing_is_promised_before_a_device_was_ready_once() -> None:
    scheduler = scheduler_of([ToldDevice()])
    with pytest.raises(errors.DeviceLost, match="not known yet"):
        scheduler.estimate(describe(SECOND))


async def test_a_server_without_devices_says_so() -> None:
    scheduler = scheduler_of([])
    await scheduler.start()
    with pytest.raises(errors.ArchUnavailable, match="there is none"):
        scheduler.estimate(describe(SECOND))
    await scheduler.stop()


# ---- the end
async def test_turning_away_lets_all_that_was_taken_on_finish_and_nothing_else_in() -> None:
    device, problem = ToldDevice(), sized(3)
    async with told(device) as scheduler:
        tasks = [begin(scheduler, sized(heads)) for heads in (1, 2)]
        uploading = scheduler.admit(problem, owner="b", deadline=None)
        await settled()
        scheduler.turn_away()
        assert scheduler.draining
        with pytest.raises(errors.Draining):
            scheduler.admit(describe(SECOND), owner="a", deadline=None)
        with uploading:
            last = asyncio.create_task(uploading.run(problem, gradients_of(problem), []))
            await settled()
            while device.current is not None:
                await device.finish()
            assert isinstance(await last, Report)
        assert all(isinstance(answer, Report) for answer in await ended(*tasks))


async def test_stop_fails_what_waits_or_runs_as_retryable() -> None:
    device = ToldDevice()
    scheduler = scheduler_of([device])
    await scheduler.start()
    device.hold()
    tasks = [begin(scheduler, sized(heads)) for heads in (1, 2)]
    await settled()
    scheduler.turn_away()
    assert not any(task.done() for task in tasks)
    await scheduler.stop()
    for answer in await ended(*tasks):
        assert isinstance(answer, errors.Draining)
        assert answer.status.retryable


# ---- real devices
class Real:
    """Two CPU devices under one scheduler, and what it observed."""

    def __init__(self) -> None:
        self.seen: Seen = []
        self.devices = [
            DeviceProcess(
                DeviceSettings(name=f"cpu:{index}", num_threads=1, cancel_timeout_s=60.0),
                backoff=Backoff(initial_s=0.01),
                on_restart=lambda name, death: None,
            )
            for index in range(2)
        ]
        self.scheduler = Scheduler(
            self.devices,
            limits=SchedulerLimits(request_nbytes=2**34, queue_s=1e6),
            block_ids=block_ids,
            observe=lambda estimate, report: self.seen.append((estimate, report)),
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Real]:
    both = Real()
    await both.scheduler.start()
    yield both
    await both.scheduler.stop()


async def run_placed(scheduler: Scheduler, given_problem: Placed, owner: str = "a") -> Report:
    with scheduler.admit(given_problem.problem, owner=owner, deadline=None) as admission:
        return await admission.run(given_problem.problem, given_problem.gradients, [given_problem.block])


async def test_started_devices_are_measured(real: Real) -> None:
    assert [status.state for status in real.scheduler.statuses()] == [DeviceState.OK] * 2
    for dtype in DType:
        estimate = real.scheduler.estimate(describe(Sizes(seqlen=512, num_heads=4, head_dim=64, dtype=dtype)))
        assert 1e-4 < estimate.device_s < 60


async def test_requests_are_answered_right_and_observed(real: Real) -> None:
    real.seen.clear()
    with placed(Sizes(seqlen=40)) as one, placed(Sizes(seqlen=50)) as two, placed(Sizes(seqlen=60)) as three:
        given_problems = (one, two, three)
        reports = await asyncio.gather(*(run_placed(real.scheduler, each) for each in given_problems))
        for each in given_problems:
            want = exact(each)
            for role, gradient in each.answers().items():
                assert np.abs(gradient - want[role]).max() <= 1e-5 * np.abs(want[role]).max()
            real.scheduler.drop_block(each.block.block_id)
    assert {report.device for report in reports} <= {"cpu:0", "cpu:1"}
    assert len(real.seen) == 3
    for estimate, report in real.seen:
        assert estimate.device == report.device
        assert estimate.device_s > 0
        assert report.device_s > 0
        assert report.queued_s >= 0


async def test_memory_of_a_cancelled_request_is_the_next_ones_alone(real: Real) -> None:
    """Staging memory is used again at once: a device that still wrote for the old request would spoil the new one."""
    with placed(LONG) as old, placed(Sizes(seqlen=64)) as new:
        running = asyncio.create_task(run_placed(real.scheduler, old))
        await until(lambda: any(status.running for status in real.scheduler.statuses()))
        await asyncio.sleep(0.3)
        busy = [status.running for status in real.scheduler.statuses()].index(1)
        pid = real.devices[busy].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # slow to hear of the cancellation
        running.cancel()
        await asyncio.sleep(0.3)
        assert not running.done()
        assert real.scheduler.statuses()[busy].running
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not any(status.running for status in real.scheduler.statuses())
        # The new request's tensors, laid over the old one's gradients in the same block.
        shift = old.gradients["dq"].data.byte_offset
        os.pwrite(old.block.fd, new.bytes(), shift)

        def moved(tensor: Tensor[InBlock]) -> Tensor[InBlock]:
            return tensor.with_data(InBlock(old.block.block_id, shift + tensor.data.byte_offset))

        problem = new.problem.with_tensors({role: moved(each) for role, each in new.problem.tensors.items()})
        gradients = {role: moved(each) for role, each in new.gradients.items()}
        overlaid = Placed(problem=problem, gradients=gradients, block=old.block)
        await run_placed(real.scheduler, overlaid)
        await asyncio.sleep(0.3)
        want = exact(new)
        for role, gradient in overlaid.answers().items():
            assert np.abs(gradient - want[role]).max() <= 1e-5 * np.abs(want[role]).max()
        real.scheduler.drop_block(old.block.block_id)


async def test_a_killed_process_fails_its_own_request_and_no_other(real: Real) -> None:
    with ExitStack() as blocks:
        given_problems: list[Placed] = []
        tasks: list[asyncio.Task[Report]] = []
        # Both stand still, so that what they are given is in flight.
        blocks.enter_context(paused(*(device.pid for device in real.devices if device.pid)))
        # Two keep both devices busy, unless one was measured to be much slower.
        while not all(status.running for status in real.scheduler.statuses()):
            given_problems.append(blocks.enter_context(placed(Sizes())))
            tasks.append(asyncio.create_task(run_placed(real.scheduler, given_problems[-1])))
            await settled()
        given_problems.append(blocks.enter_context(placed(Sizes())))
        tasks.append(asyncio.create_task(run_placed(real.scheduler, given_problems[-1], owner="b")))
        await settled()
        killed, other = (device.pid for device in real.devices)
        assert killed is not None
        assert other is not None
        os.kill(killed, signal.SIGKILL)
        os.kill(other, signal.SIGCONT)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [type(answer) for answer in answers if isinstance(answer, BaseException)]
        assert lost == [errors.DeviceLost]
        assert isinstance(answers[-1], Report)
        for each in given_problems:
            real.scheduler.drop_block(each.block.block_id)
    await until(lambda: all(status.state is DeviceState.OK for status in real.scheduler.statuses()))


async def test_what_the_device_refuses_comes_back_typed_and_frees_the_device(real: Real) -> None:
    with placed(Sizes(), sealed=False) as short:
        os.ftruncate(short.block.fd, 10)
        with pytest.raises(errors.RegionChanged):
            await run_placed(real.scheduler, short)
        real.scheduler.drop_block(short.block.block_id)
    assert not any(status.running for status in real.scheduler.statuses())


async def test_predictions_of_real_runs_come_near(real: Real) -> None:
    real.seen.clear()
    with placed(Sizes(seqlen=512, num_heads=4, head_dim=64)) as given_problem:
        for _ in range(8):
            await run_placed(real.scheduler, given_problem)
        real.scheduler.drop_block(given_problem.block.block_id)
    ratios = [(report.device_s + report.transfer_s) / estimate.device_s for estimate, report in real.seen]
    assert 0.1 < float(np.median(ratios)) < 10
