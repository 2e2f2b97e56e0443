"""Tensors in blocks of host memory, as torch sees them: views where a block is safe to map, copies where it is not."""

from __future__ import annotations

import mmap
import os

import torch

from dqkv.memory import positional
from dqkv.memory.block import Block, InBlock
from dqkv.tensor import Tensor
from dqkv_kernels.dtypes import TORCH_DTYPES


class HostBlocks:
    """The blocks that a device's process knows; each is mapped when a tensor in it is first viewed."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._mappings: dict[int, mmap.mmap] = {}

    def add(self, block: Block) -> None:
        """Know a block; its file belongs to this object from now on."""
        self.drop(block.block_id)
        self._blocks[block.block_id] = block

    def drop(self, block_id: int) -> None:
        """Forget a block; its mapping goes with the last tensor that views it. An unknown one is nothing."""
        self._mappings.pop(block_id, None)
        block = self._blocks.pop(block_id, None)
        if block is not None:
            os.close(block.fd)

    def is_mappable(self, tensor: Tensor[InBlock]) -> bool:
        """Whether a view of the tensor is safe: nobody can shrink its block, and its elements lie on whole words."""
        # An element that straddles a word is no element to vector loads.
        return self._blocks[tensor.data.block_id].sealed and tensor.data.byte_offset % tensor.dtype.itemsize == 0

    def view(self, tensor: Tensor[InBlock]) -> torch.Tensor:
        """The elements where they lie, with the tensor's shape and strides; only for a mappable one.

        Raises OSError or ValueError when the block cannot be mapped.
        """
        dtype = TORCH_DTYPES[tensor.dtype]
        if 0 in tensor.shape:
            return torch.empty(tensor.shape, dtype=dtype)
        elements = torch.frombuffer(
            self._mapping(tensor.data.block_id),
            dtype=dtype,
            count=tensor.extent_nbytes // tensor.dtype.itemsize,
            offset=tensor.data.byte_offset,
        )
        return elements.as_strided(tensor.shape, tensor.strides)

    def copy(self, tensor: Tensor[InBlock], allocate: positional.Allocate = positional.fresh) -> torch.Tensor:
        """A copy of the elements in memory from `allocate`, of the tensor's shape and strides of its own.

        Raises RegionChanged when memory of a caller became too short.
        """
        copy = positional.read_tensor(self._blocks[tensor.data.block_id].fd, tensor, allocate)
        elements = torch.from_numpy(copy.data).view(TORCH_DTYPES[tensor.dtype])
        return elements.as_strided(copy.shape, copy.strides)

    def write(self, tensor: Tensor[InBlock], values: torch.Tensor) -> None:
        """Write values of the tensor's shape, in host memory, where it lies, and nothing between its elements.

        Raises RegionChanged when memory of a caller became too short or may no longer be written, and QuotaBytes.
        """
        flat = values.reshape(-1).view(torch.uint8).numpy()
        positional.write_tensor(self._blocks[tensor.data.block_id].fd, tensor, flat)

    def _mapping(self, block_id: int) -> mmap.mmap:
        mapping = self._mappings.get(block_id)
        if mapping is None:
            block = self._blocks[block_id]
            # A read-only block is mapped as copy-on-write: torch knows no memory that may not be written.
            access = mmap.ACCESS_WRITE if block.writable else mmap.ACCESS_COPY
            self._mappings[block_id] = mapping = mmap.mmap(block.fd, block.nbytes, access=access)
        return mapping
