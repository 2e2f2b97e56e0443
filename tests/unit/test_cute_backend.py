"""What surrounds the kernels of a GPU: copies, dispatch, refused memory, errors that stay; here on the CPU."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from blocks import Placed, Sizes, exact, placed

from dqkv import errors
from dqkv.backend import cute, driver, messages
from dqkv.backend.base import DeviceBroken, DeviceState, Task
from dqkv.backend.channel import Channel
from dqkv.backend.cute import CuteBackend
from dqkv.backend.kernel_sets import KernelSet
from dqkv.backend.life import Death, DeviceSettings, Life
from dqkv.backend.worker import answer_task, load_backend
from dqkv.problem import Arch, Options
from dqkv.scheduler.cost import Work
from dqkv.scheduler.lane import Lane
from dqkv.scheduler.placement import place
from dqkv.tensor import DType
from dqkv_kernels import attention_backward
from dqkv_kernels.on_demand import OnDemandArtifacts

OUT_OF_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
SMALL = Sizes(seqlen=33, head_dim=32, dtype=DType.BF16)


class ToldEvent:
    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 2.0


class ToldChain:
    """Computes on the CPU what the kernels would on the device, after raising what it was told to raise."""

    target = "sm_90a"
    archs = (Arch.SM90, Arch.SM80)
    failures: list[Exception]

    def __init__(self, artifacts: object, workspace: object) -> None:
        pass

    def backward(self, problem: Any, tensors: Any, answers: Any) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        plain = replace(problem, options=replace(problem.options, arch=Arch.CPU))
        answer = attention_backward(plain, tensors, answers)
        return replace(answer, report=replace(answer.report, arch=problem.options.arch.value))


class Cuda:
    """The device as the test tells it."""

    def __init__(self) -> None:
        self.trims = 0
        self.lost = False

    def empty_cache(self) -> None:
        self.trims += 1

    def synchronize(self, device: object) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    told = Cuda()
    for name, value in {
        "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda device: "NVIDIA Told",
        "set_device": lambda device: None,
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "Event": lambda enable_timing: ToldEvent(),
        "synchronize": told.synchronize,
        "empty_cache": told.empty_cache,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cute, "_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(cute, "Chain", ToldChain)
    monkeypatch.setattr(ToldChain, "failures", [], raising=False)
    use(monkeypatch, "", "")
    return told


def use(monkeypatch: pytest.MonkeyPatch, sm90: str, sm80: str) -> None:
    sets = [KernelSet(arch=Arch.SM90, fault=sm90), KernelSet(arch=Arch.SM80, fault=sm80)]
    monkeypatch.setattr(cute, "kernel_sets", lambda capability, artifacts, *_: sets)


@pytest.fixture
def backend(cuda: Cuda, tmp_path: Path) -> Iterator[CuteBackend]:
    threads = torch.get_num_threads()
    yield new_backend(tmp_path)
    torch.set_num_threads(threads)


def new_backend(directory: Path) -> CuteBackend:
    return CuteBackend("cuda:0", kernels=directory, num_threads=1)


def run(backend: CuteBackend, one: Placed, *, stop: bool = False) -> Any:
    backend.add_block(replace(one.block, fd=os.dup(one.block.fd)))
    try:
        return backend.run(Task(task_id=1, problem=one.problem, gradients=one.gradients), lambda: stop)
    finally:
        backend.drop_block(one.block.block_id)


def is_right(one: Placed) -> bool:
    wanted, got = exact(one), one.answers()
    return all(np.abs(got[role] - wanted[role]).max() < 0.05 for role in wanted)


# ---- an answer
@pytest.mark.parametrize("sealed", [True, False], ids=["mapped", "by position"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("gap", [0, 8, 200])
def test_tensors_go_to_the_device_and_gradients_come_back(
    backend: CuteBackend, sealed: bool, shift: int, gap: int
) -> None:
    with placed(SMALL, sealed=sealed, shift=shift, gap=gap) as one:
        report = run(backend, one)
        assert is_right(one)
    assert (report.arch, report.device, report.device_s) == ("sm90", "cuda:0", 0.002)
    assert report.transfer_s > 0


def test_memory_of_the_device_is_used_again(backend: CuteBackend) -> None:
    with placed(SMALL) as one, placed(Sizes(seqlen=20, head_dim=16, dtype=DType.BF16)) as smaller:
        run(backend, one)
        before = {name: buffer.data_ptr() for name, buffer in backend._tensors.buffers.items()}
        for _ in range(3):
            run(backend, smaller)
            run(backend, one)
        assert {name: buffer.data_ptr() for name, buffer in backend._tensors.buffers.items()} == before


# ---- dispatch
@pytest.mark.parametrize(
    ("faults", "asked", "ran"),
    [
        (("", ""), Arch.AUTO, "sm90"),
        (("", ""), Arch.SM90, "sm90"),
        (("", ""), Arch.SM80, "sm80"),
        (("not built", ""), Arch.AUTO, "sm80"),
        (("", "not built"), Arch.AUTO, "sm90"),
        (("not built", ""), Arch.SM90, None),
        (("", ""), Arch.SM100, None),
        (("", ""), Arch.CPU, None),
    ],
)
def test_the_family_that_runs(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faults: tuple[str, str], asked: Arch, ran: str | None
) -> None:
    use(monkeypatch, *faults)
    backend = new_backend(tmp_path)
    with placed(SMALL, options=Options(arch=asked)) as one:
        if ran is None:
            with pytest.raises(errors.ArchUnavailable, match=f"arch is {asked}, cuda:0 runs "):
                run(backend, one)
        else:
            assert run(backend, one).arch == ran


def test_a_device_without_any_family_does_not_start(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, "3 are not built", "4 are damaged")
    with pytest.raises(errors.ArchUnavailable, match="sm90: 3 are not built; sm80: 4 are damaged"):
        new_backend(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(errors.ArchUnavailable, match="finds no CUDA device"):
        load_backend("cuda:0", num_threads=1, kernels=tmp_path)
    with pytest.raises(errors.OptionInvalid, match="needs a directory of kernels"):
        load_backend("cuda:0", num_threads=1)


@pytest.mark.parametrize(
    ("cpu", "asked", "dtype", "where"),
    [
        (True, Arch.AUTO, DType.BF16, ("cuda:0", Arch.SM90)),
        (True, Arch.AUTO, DType.FP32, ("cpu:0", Arch.CPU)),
        (True, Arch.SM80, DType.FP16, ("cuda:0", Arch.SM80)),
        (True, Arch.CPU, DType.BF16, ("cpu:0", Arch.CPU)),
        (True, Arch.SM100, DType.BF16, "arch is sm100, which no device of this server runs"),
        (True, Arch.SM90, DType.FP32, "q is fp32, which no device that runs sm90 of this server takes"),
        (False, Arch.AUTO, DType.FP32, "q is fp32, which no device of this server takes"),
        (False, Arch.CPU, DType.BF16, "arch is cpu, which no device of this server runs"),
    ],
)
def test_a_request_goes_where_it_can_run_or_is_refused(
    backend: CuteBackend, cpu: bool, asked: Arch, dtype: DType, where: tuple[str, Arch] | str
) -> None:
    infos = [backend.info]
    if cpu:
        infos.append(replace(backend.info, name="cpu:0", archs=(Arch.CPU,), dtypes=tuple(DType)))
    lanes: list[Any] = [
        Lane(SimpleNamespace(name=info.name, info=info, state=DeviceState.OK, fault=""), measured=True)  # type: ignore[arg-type]
        for info in infos
    ]
    with placed(replace(SMALL, dtype=dtype)) as one:
        work = Work.of(one.problem)
    if isinstance(where, str):
        with pytest.raises(errors.ArchUnavailable, match=where):
            place(lanes, work, asked, "somebody")
    else:
        lane, estimate = place(lanes, work, asked, "somebody")
        assert (lane.device.name, estimate.arch) == (estimate.device, estimate.arch) == where


# ---- its start
class ToldDriver:
    """Notes what it is asked; `status` is what starting it answers."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.asked: list[Any] = []

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 40 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.asked.append(device.value)
        return 0


@pytest.mark.parametrize(("status", "asked"), [(0, [43]), (100, [])])
def test_the_context_of_its_gpu_is_made_beside_the_import_of_torch(
    monkeypatch: pytest.MonkeyPatch, status: int, asked: list[int]
) -> None:
    told = ToldDriver(status)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: told)
    driver.warm_up(3).join(60)
    assert told.asked == asked


def test_a_machine_without_a_driver_is_warmed_up_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    monkeypatch.setattr(driver, "DRIVER", "libcuda-that-is-nowhere.so.1")
    driver.warm_up(0).join(60)
    assert failures == []


# ---- kernels that are built when they are needed
@pytest.mark.parametrize("builds", [False, True])
def test_a_backend_builds_only_where_it_may(cuda: Cuda, tmp_path: Path, builds: bool) -> None:
    backend = load_backend("cuda:0", num_threads=1, kernels=tmp_path, builds=builds)
    assert isinstance(backend, CuteBackend)
    assert isinstance(backend._artifacts, OnDemandArtifacts) == builds


def test_a_kernel_that_is_being_built_fails_its_request_with_a_time_to_come_back(backend: CuteBackend) -> None:
    ToldChain.failures = [errors.KernelBuilding("being built", retry_after_s=5.0)]
    with placed(SMALL) as one:
        task = Task(task_id=1, problem=one.problem, gradients=one.gradients)
        backend.add_block(replace(one.block, fd=os.dup(one.block.fd)))
        answer = answer_task(backend, task, threading.Event())
    assert isinstance(answer, messages.Failed)
    assert (answer.reason, answer.retry_after_s) == ("KERNEL_BUILDING", 5.0)
    assert messages.decode_from_device(messages.frame(answer)[4:]) == answer


# ---- faults
def test_refused_memory_is_given_back_and_tried_once_more(backend: CuteBackend, cuda: Cuda) -> None:
    ToldChain.failures = [OUT_OF_MEMORY]
    with placed(SMALL) as one:
        assert run(backend, one).arch == "sm90"
        assert is_right(one)
    assert cuda.trims == 1


@pytest.mark.parametrize("refusal", [OUT_OF_MEMORY, RuntimeError("CUDA Error: out of memory (2)")])
def test_memory_refused_twice_fails_the_request_alone(backend: CuteBackend, cuda: Cuda, refusal: Exception) -> None:
    ToldChain.failures = [refusal, refusal]
    with placed(SMALL) as one:
        with pytest.raises(errors.DeviceOutOfMemory, match="cuda:0 has not enough free memory"):
            run(backend, one)
        assert backend._tensors.buffers == {}
        assert cuda.trims == 2
        run(backend, one)
        assert is_right(one)


def test_an_error_that_passes_fails_the_request_alone(backend: CuteBackend) -> None:
    ToldChain.failures = [RuntimeError("invalid argument")]
    with placed(SMALL) as one:
        with pytest.raises(RuntimeError, match="invalid argument"):
            run(backend, one)
        run(backend, one)
        assert is_right(one)


@pytest.mark.parametrize("first", [[], [OUT_OF_MEMORY]], ids=["at once", "after refused memory"])
def test_an_error_that_stays_ends_the_process(backend: CuteBackend, cuda: Cuda, first: list[Exception]) -> None:
    class Loses(RuntimeError):
        def __init__(self) -> None:
            super().__init__("CUDA error: an illegal memory access was encountered")

    def lose(problem: Any, tensors: Any, answers: Any) -> None:
        if first:
            raise first.pop()
        cuda.lost = True
        raise Loses

    ToldChain.backward, real = lambda self, *given: lose(*given), ToldChain.backward  # type: ignore[method-assign,assignment]
    try:
        with placed(SMALL) as one, pytest.raises(DeviceBroken, match=r"CUDA fails on cuda:0.*illegal memory access"):
            run(backend, one)
    finally:
        ToldChain.backward = real  # type: ignore[method-assign]


def test_a_request_that_was_cancelled_launches_nothing(backend: CuteBackend) -> None:
    with placed(SMALL) as one:
        before = one.bytes()
        with pytest.raises(errors.Cancelled):
            run(backend, one, stop=True)
        assert one.bytes() == before


WORKER = """
import socket, sys, threading
from dqkv import errors
from dqkv.backend import messages, worker
from dqkv.backend.base import DeviceBroken, DeviceInfo
from dqkv.problem import Arch
from dqkv.tensor import DType

class Backend:
    info = DeviceInfo(name="cuda:0", archs=(Arch.SM90,), dtypes=(DType.BF16,))
    def add_block(self, block): pass
    def drop_block(self, block_id): pass
    def run(self, task, should_stop): raise RAISED

with socket.socket(fileno=int(sys.argv[1])) as front:
    inbox = worker.Inbox(front)
    threading.Thread(target=inbox.read_forever, daemon=True).start()
    front.sendall(messages.frame(messages.Ready(info=Backend.info)))
    worker.serve(front, inbox, Backend())
"""


async def living(raised: str) -> Life:
    """The process of a device whose every task raises this, and that is ready."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WORKER.replace("RAISED", raised), str(theirs.fileno())), pass_fds=[theirs.fileno()]
        )
    life = Life(DeviceSettings(name="cuda:0", num_threads=1), process, Channel(ours))
    assert await life.until_ready() is not None
    return life


async def test_a_broken_device_fails_its_task_as_lost_and_its_process_ends_with_the_reason() -> None:
    life = await living('DeviceBroken("CUDA fails on cuda:0")')
    with placed(SMALL) as one:
        answer = life.give(Task(task_id=1, problem=one.problem, gradients=one.gradients), [one.block])
        async with asyncio.timeout(120):
            assert [task_id async for task_id in life.answers()] == []
        assert await life.bury() == (Death.BROKEN, "CUDA fails on cuda:0")
        with pytest.raises(errors.DeviceLost, match="cuda:0 ended"):
            answer.result()


async def test_a_kernel_that_is_being_built_reaches_the_front_with_a_time_to_come_back() -> None:
    life = await living('errors.KernelBuilding("being built", retry_after_s=7.5)')
    with placed(SMALL) as one:
        answer = life.give(Task(task_id=1, problem=one.problem, gradients=one.gradients), [one.block])
        async with asyncio.timeout(120):
            async for task_id in life.answers():
                assert task_id == 1
                break
        with pytest.raises(errors.KernelBuilding, match="being built") as caught:
            answer.result()
        assert caught.value.retry_after_s == 7.5
        await life.bury()
