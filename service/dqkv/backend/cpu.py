"""The CPU as a device: tensors are views of mapped blocks where those are safe to map, copies where they are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

import torch

from dqkv.backend.base import DeviceInfo, Task
from dqkv.backend.host_blocks import HostBlocks
from dqkv.backend.scratch import Scratch
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Report
from dqkv.tensor import DType, Tensor
from dqkv_kernels import attention_backward
from dqkv_kernels.dtypes import TORCH_DTYPES

SCRATCH_NBYTES = 1 << 30
"""Copies of tensors up to this many bytes in all are put where the last task's were."""

E = TypeVar("E")
T = TypeVar("T")


class CpuBackend:
    """Runs tasks with `num_threads` threads; a `Backend`."""

    def __init__(self, name: str, *, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.info = DeviceInfo(name=name, archs=(Arch.CPU,), dtypes=(DType.BF16, DType.FP16, DType.FP32))
        self._host = HostBlocks()
        self._scratch = Scratch(limit_nbytes=SCRATCH_NBYTES)
        # One core copies at a fraction of what memory gives.
        self._movers = ThreadPoolExecutor(num_threads, thread_name_prefix="dqkv-mover")

    def add_block(self, block: Block) -> None:
        """Know a block; it is mapped when a task first needs it."""
        self._host.add(block)

    def drop_block(self, block_id: int) -> None:
        """Forget a block; its mapping goes with the last tensor that views it."""
        self._host.drop(block_id)

    def run(self, task: Task, should_stop: Callable[[], bool]) -> Report:
        """Write every gradient of the task, in place where its block is mapped.

        Raises RegionChanged when memory of a caller became too short, Cancelled once `should_stop` said so, and
        MemoryError, OSError or RuntimeError when there is not enough memory.
        """
        try:
            return self._run(task, should_stop)
        finally:
            self._scratch.clear()

    def _run(self, task: Task, should_stop: Callable[[], bool]) -> Report:
        host = self._host
        begun = time.perf_counter()
        inputs = task.problem.tensors
        views = {role: host.view(item) for role, item in inputs.items() if host.is_mappable(item)}
        copies = self._each(
            lambda item: host.copy(item, self._scratch.take),
            {role: item for role, item in inputs.items() if role not in views},
        )
        tensors = views | copies
        gradients = {role: self._output(tensor) for role, tensor in task.gradients.items()}
        received = time.perf_counter()
        answer = attention_backward(task.problem, tensors, gradients, should_stop=should_stop)
        computed = time.perf_counter()
        self._each(
            lambda pair: host.write(*pair),
            {role: (item, gradients[role]) for role, item in task.gradients.items() if not host.is_mappable(item)},
        )
        return replace(
            answer.report,
            device=self.info.name,
            transfer_s=received - begun + time.perf_counter() - computed,
            device_s=computed - received,
        )

    def _each(self, move: Callable[[E], T], tensors: Mapping[str, E]) -> dict[str, T]:
        """Moves every tensor, several at once; when one fails the others have ended too before that is raised."""
        futures = {role: self._movers.submit(move, tensor) for role, tensor in tensors.items()}
        wait(futures.values())
        return {role: future.result() for role, future in futures.items()}

    def _output(self, tensor: Tensor[InBlock]) -> torch.Tensor:
        if self._host.is_mappable(tensor):
            return self._host.view(tensor)
        memory = torch.from_numpy(self._scratch.take(tensor.nbytes))
        return memory.view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)
