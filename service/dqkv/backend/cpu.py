"""The CPU as a device: tensors are views of mapped blocks where those are safe to map, copies where they are not."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

import torch

from dqkv.backend.base import DeviceInfo, Task
from dqkv.memory import positional
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Report
from dqkv.tensor import DType, Tensor
from dqkv_kernels import attention_backward

E = TypeVar("E")
T = TypeVar("T")

_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}


class CpuBackend:
    """Runs tasks with `num_threads` threads; a `Backend`."""

    def __init__(self, name: str, *, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.info = DeviceInfo(name=name, archs=(Arch.CPU,), dtypes=(DType.BF16, DType.FP16, DType.FP32))
        self._blocks: dict[int, Block] = {}
        self._mappings: dict[int, mmap.mmap] = {}
        # One core copies at a fraction of what memory gives.
        self._movers = ThreadPoolExecutor(num_threads, thread_name_prefix="dqkv-mover")

    def add_block(self, block: Block) -> None:
        """Know a block; it is mapped when a task first needs it."""
        self.drop_block(block.block_id)
        self._blocks[block.block_id] = block

    def drop_block(self, block_id: int) -> None:
        """Forget a block; its mapping goes with the last tensor that views it."""
        self._mappings.pop(block_id, None)
        block = self._blocks.pop(block_id, None)
        if block is not None:
            os.close(block.fd)

    def run(self, task: Task, should_stop: Callable[[], bool]) -> Report:
        """Write every gradient of the task, in place where its block is mapped.

        Raises RegionChanged when memory of a caller became too short, Cancelled once `should_stop` said so, and
        MemoryError, OSError or RuntimeError when there is not enough memory.
        """
        begun = time.perf_counter()
        inputs = task.problem.tensors
        views = {role: self._view(item) for role, item in inputs.items() if self._is_mappable(item)}
        copies = self._each(self._copy, {role: item for role, item in inputs.items() if role not in views})
        tensors = views | copies
        gradients = {role: self._output(tensor) for role, tensor in task.gradients.items()}
        received = time.perf_counter()
        answer = attention_backward(task.problem, tensors, gradients, should_stop=should_stop)
        computed = time.perf_counter()
        self._each(
            lambda pair: self._write(*pair),
            {role: (item, gradients[role]) for role, item in task.gradients.items() if not self._is_mappable(item)},
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

    def _copy(self, tensor: Tensor[InBlock]) -> torch.Tensor:
        copy = positional.read_tensor(self._blocks[tensor.data.block_id].fd, tensor)
        elements = torch.from_numpy(copy.data).view(_DTYPES[tensor.dtype])
        return elements.as_strided(copy.shape, copy.strides)

    def _output(self, tensor: Tensor[InBlock]) -> torch.Tensor:
        if self._is_mappable(tensor):
            return self._view(tensor)
        return torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype])

    def _write(self, tensor: Tensor[InBlock], gradient: torch.Tensor) -> None:
        flat = gradient.reshape(-1).view(torch.uint8).numpy()
        positional.write_tensor(self._blocks[tensor.data.block_id].fd, tensor, flat)

    def _is_mappable(self, tensor: Tensor[InBlock]) -> bool:
        # An element that straddles a word is no element to vector loads.
        return self._blocks[tensor.data.block_id].sealed and tensor.data.byte_offset % tensor.dtype.itemsize == 0

    def _view(self, tensor: Tensor[InBlock]) -> torch.Tensor:
        dtype = _DTYPES[tensor.dtype]
        if 0 in tensor.shape:
            return torch.empty(tensor.shape, dtype=dtype)
        elements = torch.frombuffer(
            self._mapping(tensor.data.block_id),
            dtype=dtype,
            count=tensor.extent_nbytes // tensor.dtype.itemsize,
            offset=tensor.data.byte_offset,
        )
        return elements.as_strided(tensor.shape, tensor.strides)

    def _mapping(self, block_id: int) -> mmap.mmap:
        mapping = self._mappings.get(block_id)
        if mapping is None:
            block = self._blocks[block_id]
            # A read-only block is mapped as copy-on-write: torch knows no memory that may not be written.
            access = mmap.ACCESS_WRITE if block.writable else mmap.ACCESS_COPY
            self._mappings[block_id] = mapping = mmap.mmap(block.fd, block.nbytes, access=access)
        return mapping
