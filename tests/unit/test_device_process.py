"""A device's process: answers, blocks, faults, deaths and cancellation, with real processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from blocks import Sizes, describe, exact, placed

from dqkv import errors
from dqkv.backend import messages
from dqkv.backend.base import DeviceState, Task
from dqkv.backend.channel import Channel
from dqkv.backend.process import Backoff, Death, DeviceProcess, DeviceSettings
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Lengths, Options, Problem
from dqkv.tensor import DType, Tensor

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAST = Backoff(initial_s=0.01, limit_s=0.05, lost_s=30.0)
LONG = Sizes(seqlen=1 << 18, num_heads=1, head_dim=8)
"""Minutes of work: never waited for, so that whatever has to happen meanwhile does."""

STOP_S = 60.0
"""Far less than LONG takes, and far more than it takes to stop."""

task_ids = itertools.count(1)


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in another process
            await asyncio.sleep(0.005)


def settings_of(name: str = "cpu:0", **changes: object) -> DeviceSettings:
    return DeviceSettings(name=name, num_threads=1, **changes)  # type: ignore[arg-type]


class Watched:
    """A device process and the deaths that it counted."""

    def __init__(self, settings: DeviceSettings, backoff: Backoff = FAST) -> None:
        self.deaths: list[tuple[str, Death]] = []
        self.process = DeviceProcess(
            settings, backoff=backoff, on_restart=lambda name, death: self.deaths.append((name, death))
        )

    async def ready(self) -> None:
        await self.process.start()
        await until(lambda: self.process.state is DeviceState.OK)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched() -> AsyncIterator[Watched]:
    device = Watched(settings_of(cancel_timeout_s=60.0))
    await device.ready()
    yield device
    await device.process.stop()


@pytest.fixture
def device(watched: Watched) -> DeviceProcess:
    return watched.process


def task_of(problem: Problem[InBlock], gradients: dict[str, Tensor[InBlock]]) -> Task:
    return Task(task_id=next(task_ids), problem=problem, gradients=gradients)


def open_files(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def maps_of(pid: int | None, name: str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count(name)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- answers
async def test_a_ready_device_says_what_it_is(device: DeviceProcess) -> None:
    assert device.state is DeviceState.OK
    assert device.fault == ""
    assert device.info is not None
    assert device.info.name == "cpu:0"
    assert device.info.archs == (Arch.CPU,)
    assert set(device.info.dtypes) == set(DType)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("sealed", [True, False], ids=["mapped", "by position"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("gap", [0, 8], ids=["dense", "gaps"])
async def test_gradients_land_where_they_are_wanted_and_nowhere_else(
    device: DeviceProcess, dtype: DType, sealed: bool, shift: int, gap: int
) -> None:
    with placed(Sizes(batch_size=2, dtype=dtype), sealed=sealed, shift=shift, gap=gap) as given:
        before = np.frombuffer(given.bytes(), dtype=np.uint8)
        report = await device.run(task_of(given.problem, given.gradients), [given.block])
        after = np.frombuffer(given.bytes(), dtype=np.uint8)
        answers, want = given.answers(), exact(given)
        device.drop_block(given.block.block_id)
    assert (report.arch, report.device) == ("cpu", "cpu:0")
    assert report.kernel
    assert report.softmax_lse_recomputed
    assert report.device_s > 0
    for role, gradient in answers.items():
        budget = {DType.FP32: 1e-5, DType.FP16: 4e-3, DType.BF16: 3e-2}[dtype] * np.abs(want[role]).max()
        assert np.abs(gradient - want[role]).max() <= budget, role
    mine = np.zeros(len(after), dtype=bool)
    for tensor in given.gradients.values():
        for index in np.ndindex(*tensor.shape):
            start = tensor.data.byte_offset + int(np.dot(index, tensor.strides)) * dtype.itemsize
            mine[start : start + dtype.itemsize] = True
    assert np.array_equal(before[~mine], after[~mine])


async def test_an_empty_problem_is_answered(device: DeviceProcess) -> None:
    with placed(Sizes(seqlen=0)) as given:
        report = await device.run(task_of(given.problem, given.gradients), [given.block])
        device.drop_block(given.block.block_id)
    assert report.arch == "cpu"


async def test_a_read_only_block_is_read(device: DeviceProcess) -> None:
    with placed(Sizes()) as given, placed(Sizes()) as other:
        reader = os.open(f"/proc/self/fd/{given.block.fd}", os.O_RDONLY)
        try:
            block = Block(
                block_id=given.block.block_id, fd=reader, nbytes=given.block.nbytes, sealed=True, writable=False
            )
            await device.run(task_of(given.problem, other.gradients), [block, other.block])
        finally:
            os.close(reader)
        want = exact(given)
        for role, gradient in other.answers().items():
            assert np.abs(gradient - want[role]).max() <= 1e-5 * np.abs(want[role]).max()
        for each in (given, other):
            device.drop_block(each.block.block_id)


async def test_a_block_is_mapped_once_and_gone_after_it_was_dropped(device: DeviceProcess) -> None:
    before = open_files(device.pid)
    with placed(Sizes()) as given:
        for _ in range(3):
            await device.run(task_of(given.problem, given.gradients), [given.block])
            assert maps_of(device.pid, "memfd:dqkv-test") == 1
        device.drop_block(given.block.block_id)
    with placed(Sizes()) as other:
        await device.run(task_of(other.problem, other.gradients), [other.block])
        device.drop_block(other.block.block_id)
    await until(lambda: open_files(device.pid) == before)
    assert maps_of(device.pid, "memfd:dqkv-test") == 0


async def test_a_hundred_thousand_sequences_reach_the_device(device: DeviceProcess) -> None:
    batch_size = 100_000
    offsets = tuple(range(batch_size + 1))
    with placed(Sizes(seqlen=batch_size, num_heads=1, head_dim=8, dtype=DType.BF16), sealed=True) as given:
        lengths = Lengths(cu_seqlens=offsets, seqused=(1,) * 7 + (0,) * (batch_size - 7))

        def packed(tensor: Tensor[InBlock]) -> Tensor[InBlock]:
            return Tensor.dense(tensor.dtype, tensor.shape[1:], tensor.data)

        inputs = {role: packed(tensor) for role, tensor in given.problem.tensors.items()}
        problem = Problem(**inputs, queries=lengths, keys=lengths)
        gradients = {role: packed(tensor) for role, tensor in given.gradients.items()}
        await device.run(task_of(problem, gradients), [given.block])
        dout, dv = given.read(inputs["dout"]), given.read(gradients["dv"])
        device.drop_block(given.block.block_id)
    # One key a sequence: p is 1, so dv is dout, and nothing flows where no row is used.
    assert np.array_equal(dv[:7], dout[:7])
    assert not dv[7:].astype(np.float32).any()


async def test_frames_survive_any_cut() -> None:
    problem = describe(Sizes()).with_tensors(
        {role: tensor.with_data(InBlock(1, 0)) for role, tensor in describe(Sizes()).tensors.items()}
    )
    run = messages.Run(task_of(problem, {"dq": Tensor.dense(DType.FP32, (2,), InBlock(1, 9))}))
    stream = messages.frame(run) + messages.frame(messages.Stop()) + messages.frame(messages.Cancel(7))
    for step in (1, 3, len(stream)):
        frames, got = messages.Frames(), []
        for start in range(0, len(stream), step):
            got += [messages.decode_to_device(body) for body in frames.feed(stream[start : start + step])]
        assert got == [run, messages.Stop(), messages.Cancel(7)]


async def test_the_front_never_waits_for_a_device_that_does_not_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    sent = [messages.Cancel(task_id) for task_id in range(50_000)]
    for message in sent:
        channel.send(message)
    frames, got = messages.Frames(), []
    with theirs:
        while len(got) < len(sent):
            data = await asyncio.wait_for(asyncio.to_thread(theirs.recv, 1 << 20), 120)
            got += [messages.decode_to_device(body) for body in frames.feed(data)]
        assert got == sent
        theirs.sendall(messages.frame(messages.Refused("no")))
        assert await channel.receive() == messages.Refused("no")
    channel.close()
    channel.close()
    channel.send(messages.Stop())


async def test_what_is_no_message_ends_the_conversation() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(ours)
    with theirs:
        theirs.sendall(b"\x05\x00\x00\x00wrong")
        assert await channel.receive() is None
    channel.close()


# ---- faults
async def test_memory_cut_short_is_the_callers_fault_and_the_device_goes_on(watched: Watched) -> None:
    device, deaths = watched.process, len(watched.deaths)
    with placed(Sizes(), sealed=False) as given:
        os.ftruncate(given.block.fd, 100)
        with pytest.raises(errors.RegionChanged):
            await device.run(task_of(given.problem, given.gradients), [given.block])
        device.drop_block(given.block.block_id)
    with placed(Sizes()) as given:
        await device.run(task_of(given.problem, given.gradients), [given.block])
        device.drop_block(given.block.block_id)
    assert len(watched.deaths) == deaths


async def test_a_fault_of_the_servers_own_says_nothing_of_this_machine(device: DeviceProcess) -> None:
    with placed(Sizes()) as given:
        gradients = {**given.gradients, "dq": given.gradients["dq"].with_data(InBlock(given.block.block_id, 2**40))}
        with pytest.raises(errors.InternalFault) as caught:
            await device.run(task_of(given.problem, gradients), [given.block])
        device.drop_block(given.block.block_id)
    assert "/" not in caught.value.message
    assert "Traceback" not in caught.value.message


async def test_too_little_address_space_fails_the_request_and_not_the_device() -> None:
    watched = Watched(settings_of(address_space_nbytes=6 << 30))
    await watched.ready()
    device = watched.process
    try:
        huge = Sizes(seqlen=1 << 20, num_heads=16, head_dim=256)
        described = describe(huge)
        # A block of 16 GiB is a number: the file is sparse, and what is tried is to map it.
        fd = os.memfd_create("dqkv-test", os.MFD_CLOEXEC)
        try:
            nbytes = sum(tensor.nbytes for tensor in described.tensors.values())
            os.ftruncate(fd, nbytes)
            block = Block(block_id=10**9, fd=fd, nbytes=nbytes, sealed=True, writable=True)
            inputs = {role: tensor.with_data(InBlock(10**9, 0)) for role, tensor in described.tensors.items()}
            gradients = {role: tensor.with_data(InBlock(10**9, 0)) for role, tensor in described.gradients.items()}
            with pytest.raises(errors.DeviceOutOfMemory) as caught:
                await device.run(task_of(described.with_tensors(inputs), gradients), [block])
            device.drop_block(10**9)
        finally:
            os.close(fd)
        assert "cpu:0" in caught.value.message
        with placed(Sizes()) as given:
            await device.run(task_of(given.problem, given.gradients), [given.block])
        assert watched.deaths == []
    finally:
        await device.stop()


async def test_torchs_own_allocation_failure_is_out_of_memory() -> None:
    watched = Watched(settings_of(address_space_nbytes=6 << 30))
    await watched.ready()
    device = watched.process
    try:
        # By position: the copy of q is numpy's, the gradient's buffer is torch's, and that one is too large.
        with placed(Sizes(seqlen=8), sealed=False) as given:
            large = Tensor(
                dtype=DType.FP32, shape=(1, 1 << 26, 2, 16), strides=(0, 0, 0, 0), data=given.gradients["dq"].data
            )
            with pytest.raises(errors.DeviceOutOfMemory):
                await device.run(task_of(given.problem, {**given.gradients, "dq": large}), [given.block])
    finally:
        await device.stop()


# ---- cancellation
async def test_a_cancelled_task_is_over_only_when_the_device_stopped_writing(device: DeviceProcess) -> None:
    with placed(LONG) as given:
        running = asyncio.create_task(device.run(task_of(given.problem, given.gradients), [given.block]))
        await asyncio.sleep(0.5)
        assert not running.done()
        pid = device.pid
        assert pid is not None
        # As long as it is not known that the device stopped, it may write: here it is only slow to hear of it.
        os.kill(pid, signal.SIGSTOP)
        running.cancel()
        await asyncio.sleep(0.3)
        running.cancel()  # an impatient caller cannot get its memory back early either
        await asyncio.sleep(0.1)
        assert not running.done()
        os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(STOP_S):
            with pytest.raises(asyncio.CancelledError):
                await running
        # The block is the caller's again: whatever it puts there now must stay.
        os.pwrite(given.block.fd, b"\x3c" * given.block.nbytes, 0)
        await asyncio.sleep(0.5)
        assert given.bytes() == b"\x3c" * given.block.nbytes
        device.drop_block(given.block.block_id)
    with placed(Sizes()) as small:
        await device.run(task_of(small.problem, small.gradients), [small.block])
        device.drop_block(small.block.block_id)


async def test_a_process_that_does_not_give_up_a_cancelled_task_is_killed_first() -> None:
    watched = Watched(settings_of(cancel_timeout_s=0.2))
    await watched.ready()
    device = watched.process
    try:
        with placed(LONG) as given:
            running = asyncio.create_task(device.run(task_of(given.problem, given.gradients), [given.block]))
            await asyncio.sleep(0.3)
            pid = device.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)  # deaf, as in a call that never returns
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not is_running(pid)
        await until(lambda: device.state is DeviceState.OK and device.pid != pid)
        assert watched.deaths == [("cpu:0", Death.STUCK)]
    finally:
        await device.stop()


# ---- deaths
async def test_a_killed_process_fails_its_task_alone_and_comes_back() -> None:
    watched = Watched(settings_of())
    await watched.ready()
    device = watched.process
    states: list[DeviceState] = []
    device.watch(lambda: states.append(device.state))
    try:
        with placed(LONG) as given:
            running = asyncio.create_task(device.run(task_of(given.problem, given.gradients), [given.block]))
            await asyncio.sleep(0.3)
            pid = device.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(errors.DeviceLost) as caught:
                await running
            assert caught.value.status.retryable
            assert not is_running(pid)
            assert device.state is DeviceState.STARTING
            with pytest.raises(errors.DeviceLost):
                await device.run(task_of(given.problem, given.gradients), [given.block])
        await until(lambda: device.state is DeviceState.OK)
        with placed(Sizes()) as small:
            await device.run(task_of(small.problem, small.gradients), [small.block])
        assert watched.deaths == [("cpu:0", Death.SIGNAL)]
        assert DeviceState.LOST not in states
    finally:
        await device.stop()


async def test_a_device_that_never_starts_is_lost_and_says_why() -> None:
    watched = Watched(settings_of(name="abacus:0"))
    await watched.process.start()
    try:
        await until(lambda: watched.process.state is DeviceState.LOST)
        assert "5 times in a row" in watched.process.fault
        assert "abacus" in watched.process.fault
        assert watched.process.info is None
        assert watched.deaths == [("abacus:0", Death.NOT_READY)] * 5
        with pytest.raises(errors.DeviceLost, match="abacus"):
            await watched.process.run(task_of(describe(Sizes()), {}), [])  # type: ignore[arg-type]
    finally:
        await watched.process.stop()


async def test_too_little_memory_to_start_is_said_in_words() -> None:
    watched = Watched(settings_of(address_space_nbytes=64 << 20), Backoff(initial_s=0.01, starts_limit=1))
    await watched.process.start()
    try:
        await until(lambda: watched.process.state is DeviceState.LOST)
        assert "/" not in watched.process.fault
        assert "process" in watched.process.fault
    finally:
        await watched.process.stop()


async def test_a_lost_device_that_can_start_again_is_found_again() -> None:
    watched = Watched(settings_of(start_timeout_s=0.05), Backoff(initial_s=0.01, starts_limit=2, lost_s=0.05))
    await watched.process.start()
    try:
        await until(lambda: watched.process.state is DeviceState.LOST)
        assert "not ready after 0.05 s" in watched.process.fault
        before = len(watched.deaths)
        await until(lambda: len(watched.deaths) > before + 1)
        assert watched.process.state is DeviceState.LOST
    finally:
        await watched.process.stop()


@pytest.mark.parametrize(
    ("deaths", "failed_starts", "wait_s"),
    [(1, 0, 0.1), (2, 0, 0.2), (5, 4, 1.6), (30, 0, 30.0), (10**6, 0, 30.0), (5, 5, 60.0), (99, 99, 60.0)],
)
async def test_the_wait_before_a_start_grows_and_is_bounded(deaths: int, failed_starts: int, wait_s: float) -> None:
    assert Backoff().wait_s(deaths=deaths, failed_starts=failed_starts) == pytest.approx(wait_s)


# ---- the end
async def test_a_stopped_device_leaves_no_process() -> None:
    watched = Watched(settings_of())
    await watched.ready()
    pid = watched.process.pid
    assert pid is not None
    await watched.process.stop()
    assert not is_running(pid)
    assert watched.process.state is DeviceState.LOST
    assert watched.deaths == []


async def test_stop_ends_a_task_that_runs() -> None:
    watched = Watched(settings_of(stop_timeout_s=0.5))
    await watched.ready()
    with placed(LONG) as given:
        running = asyncio.create_task(watched.process.run(task_of(given.problem, given.gradients), [given.block]))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(STOP_S):
            await watched.process.stop()
            with pytest.raises((errors.Cancelled, errors.DeviceLost)):
                await running


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_the_process_ends_when_the_front_dies(busy: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        command = [sys.executable, "-m", "dqkv.backend.worker", "cpu:9", "--num-threads", "1"]
        command += ["--socket-fd", str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()])  # noqa: ASYNC220 - as the front's own child
    try:
        frames: list[bytes] = []
        reader = messages.Frames()
        while not frames:
            frames = reader.feed(await asyncio.to_thread(ours.recv, 65536))
        assert isinstance(messages.decode_from_device(frames[0]), messages.Ready)
        with placed(LONG) as given:
            if busy:
                socket.send_fds(ours, [messages.frame(messages.AddBlock(given.block))], [given.block.fd])
                ours.sendall(messages.frame(messages.Run(task_of(given.problem, given.gradients))))
                await asyncio.sleep(0.3)
            worker.send_signal(signal.SIGTERM)  # the front decides, not the control group
            worker.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            assert worker.poll() is None
            ours.close()
            assert await asyncio.to_thread(worker.wait, STOP_S) == 3
    finally:
        ours.close()
        worker.kill()
        worker.wait()


async def test_the_front_needs_no_torch() -> None:
    program = "import sys, dqkv.scheduler.queue, dqkv.backend.process; sys.exit('torch' in sys.modules)"
    assert await asyncio.to_thread(subprocess.call, [sys.executable, "-c", program]) == 0


async def test_options_and_lengths_arrive_as_they_were_sent() -> None:
    options = Options(softmax_scale=-0.25, softcap=3.0, deterministic=True, grad_dtype=DType.FP32)
    problem = describe(Sizes(), options)
    inputs = {role: tensor.with_data(InBlock(3, 64)) for role, tensor in problem.tensors.items()}
    task = task_of(problem.with_tensors(inputs), {})
    got = messages.decode_to_device(messages.frame(messages.Run(task))[4:])
    assert isinstance(got, messages.Run)
    assert got.task == task
    assert got.task.problem.options.grad_dtype is DType.FP32
