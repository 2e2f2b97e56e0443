"""A GPU as a device: tensors are copied in, the compiled chain runs on a stream, gradients are copied back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dqkv import errors
from dqkv.backend.base import DeviceBroken, DeviceInfo, Task
from dqkv.backend.host_blocks import HostBlocks
from dqkv.backend.kernel_sets import artifacts_in, kernel_sets
from dqkv.backend.proof import device_id_of
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Problem, Report
from dqkv.tensor import DType, Tensor
from dqkv_kernels import attention_backward
from dqkv_kernels.chain import Chain, Workspace
from dqkv_kernels.dtypes import TORCH_DTYPES
from dqkv_kernels.launch_plan import ARCHS
from dqkv_kernels.tiles import tile_holding

COPIED_GAPS = 2
"""A tensor whose extent is at most so many times its bytes travels with its gaps, which saves gathering it here."""

_log = logging.getLogger(__name__)


class CuteBackend:
    """Runs tasks on one GPU with the kernels in a directory; a `Backend`.

    Memory of the device is kept from task to task and grows to the largest one; after a refusal of memory all of it
    is given back, and the task is tried once more.
    """

    def __init__(self, name: str, *, kernels: Path, num_threads: int, builds: bool = False) -> None:
        """builds: whether a kernel that `kernels` lacks is built there.

        Raises ArchUnavailable when the device is not there or no family of kernels can be used on it.
        """
        torch.set_num_threads(num_threads)
        self._device = _device(name)
        self._artifacts = artifacts_in(kernels, builds=builds)
        capability = torch.cuda.get_device_capability(self._device)
        sets = kernel_sets(capability, self._artifacts, partial(device_id_of, self._device.index))
        archs = tuple(each.arch for each in sets if not each.fault)
        if not archs:
            raise errors.ArchUnavailable("; ".join(f"{each.arch}: {each.fault}" for each in sets), field="arch")
        self.info = DeviceInfo(
            name=name,
            archs=archs,
            dtypes=(DType.BF16, DType.FP16),
            model=torch.cuda.get_device_name(self._device),
        )
        torch.cuda.set_device(self._device)
        self._host = HostBlocks()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._chain, self._tensors = self._fresh()

    def add_block(self, block: Block) -> None:
        """Know a block; it is mapped when a task first needs it."""
        self._host.add(block)

    def drop_block(self, block_id: int) -> None:
        """Forget a block; its mapping goes with the last tensor that views it."""
        self._host.drop(block_id)

    def run(self, task: Task, should_stop: Callable[[], bool]) -> Report:
        """Write every gradient of the task; nothing of it is on the device's stream any more when this ends.

        Raises RegionChanged when memory of a caller became too short, Cancelled when `should_stop` said so before the
        launch, KernelBuilding and BuildFailed where kernels are built on demand, DeviceOutOfMemory, DeviceBroken after
        an error that this process cannot recover from, and RuntimeError for one that it can.
        """
        try:
            return self._attempt(task, should_stop)
        except errors.DqkvError:
            raise
        except Exception as error:
            self._check_alive(error)
            if not _is_out_of_memory(error):
                raise
        # Here, since the traceback of the first error held on to what the task had taken.
        self._trim()
        try:
            return self._attempt(task, should_stop)
        except errors.DqkvError:
            raise
        except Exception as error:
            self._check_alive(error)
            if not _is_out_of_memory(error):
                raise
        self._trim()
        raise errors.DeviceOutOfMemory(
            f"{self.info.name} has not enough free memory for this request ({_need(task.problem)} bytes of tensors)"
        )

    def _attempt(self, task: Task, should_stop: Callable[[], bool]) -> Report:
        with torch.cuda.stream(self._stream):
            begun = time.perf_counter()
            problem = self._with_arch(task.problem)
            tensors = {}
            for role, item in problem.tensors.items():
                _check_wanted(should_stop)
                tensors[role] = self._upload(role, item)
            gradients = {
                role: self._tensors.take(role, item.shape, TORCH_DTYPES[item.dtype])
                for role, item in task.gradients.items()
            }
            _check_wanted(should_stop)
            first, last = self._event(), self._event()
            first.record(self._stream)
            first.synchronize()
            received = time.perf_counter()
            answer = attention_backward(problem, tensors, gradients, chain=self._chain)
            last.record(self._stream)
            last.synchronize()
            computed = time.perf_counter()
            for role, item in task.gradients.items():
                self._download(item, gradients[role])
        return replace(
            answer.report,
            device=self.info.name,
            transfer_s=received - begun + time.perf_counter() - computed,
            device_s=first.elapsed_time(last) * 1e-3,
        )

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _with_arch(self, problem: Problem[InBlock]) -> Problem[InBlock]:
        """The problem with the family that is to run: the one asked for, or the best here that holds its head dims.

        Raises ArchUnavailable for one that was asked for and is not offered here.
        """
        asked, shape = problem.options.arch, problem.shape
        if asked is Arch.AUTO:
            widths = (shape.head_dim, shape.head_dim_v)
            fitting = [arch for arch in self.info.archs if tile_holding(ARCHS[arch], self._chain.target, *widths)]
            asked = fitting[0] if fitting else self.info.archs[0]
        if asked not in self.info.archs:
            raise errors.ArchUnavailable(
                f"arch is {asked}, {self.info.name} runs {', '.join(self.info.archs)}", field="arch"
            )
        return replace(problem, options=replace(problem.options, arch=asked))

    def _upload(self, role: str, item: Tensor[InBlock]) -> torch.Tensor:
        """The tensor on the device, with the item's shape and strides that are its own or dense."""
        host = self._host.view(item) if self._host.is_mappable(item) else self._host.copy(item)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True))
        if not host.numel() or extent > COPIED_GAPS * host.numel():
            return self._tensors.take(role, tuple(host.shape), host.dtype).copy_(host)
        flat = self._tensors.take(role, (extent,), host.dtype).copy_(host.as_strided((extent,), (1,)))
        return flat.as_strided(host.shape, host.stride())

    def _download(self, item: Tensor[InBlock], gradient: torch.Tensor) -> None:
        if self._host.is_mappable(item):
            self._host.view(item).copy_(gradient)
        else:
            self._host.write(item, gradient.cpu())

    def _fresh(self) -> tuple[Chain, Workspace]:
        """A chain, and memory for tensors, that hold nothing yet."""
        return Chain(self._artifacts, Workspace(self._device)), Workspace(self._device)

    def _trim(self) -> None:
        """Give all memory of the device back."""
        self._chain, self._tensors = self._fresh()
        torch.cuda.empty_cache()

    def _check_alive(self, error: Exception) -> None:
        """Wait until the stream is empty. Raises DeviceBroken when the device does not answer any more."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as lasting:
            _log.exception("%s does not work any more", self.info.name, exc_info=error)
            raise DeviceBroken(
                f"CUDA fails on {self.info.name} until its process starts anew: {_first(lasting)}"
            ) from error


def _device(name: str) -> torch.device:
    """The CUDA device of a name like "cuda:0". Raises ArchUnavailable."""
    if not torch.cuda.is_available():
        raise errors.ArchUnavailable(f"{name}: PyTorch {torch.__version__} finds no CUDA device", field="device")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.index >= count:
        raise errors.ArchUnavailable(f"{name} is not there: PyTorch sees {count} CUDA devices", field="device")
    return device


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the device refused memory: torch's allocator, or CUDA itself while it loads or launches a kernel."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "cuda" in str(error).lower() and "out of memory" in str(error).lower()


def _check_wanted(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise errors.Cancelled("the request was cancelled before its kernels were launched")


def _need(problem: Problem[InBlock]) -> int:
    return sum(item.nbytes for item in (*problem.tensors.values(), *problem.gradients.values()))


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0]
