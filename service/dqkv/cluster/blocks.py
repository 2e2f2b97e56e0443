"""Tensors in blocks of memory as numpy sees them: views where a block is safe to map, copies where it is not."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dqkv.client.arrays import HostArray, dense_bytes
from dqkv.memory import positional
from dqkv.memory.block import Block, InBlock
from dqkv.tensor import NUMPY_DTYPES, Tensor


class ArrayBlocks:
    """The blocks of this process that hold tensors; each is mapped when a tensor in it is first viewed."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._mappings: dict[int, mmap.mmap] = {}

    def know(self, blocks: Iterable[Block]) -> None:
        """Know blocks until each is dropped; their files stay their owners'."""
        self._blocks |= {block.block_id: block for block in blocks}

    def drop(self, block_id: int) -> None:
        """Forget a block; its mapping goes with the last array that views it. An unknown one is nothing."""
        self._blocks.pop(block_id, None)
        self._mappings.pop(block_id, None)

    def is_mappable(self, tensor: Tensor[InBlock]) -> bool:
        """Whether a view of the tensor is safe: nobody can shrink its block, and its elements lie on whole words."""
        return self._blocks[tensor.data.block_id].sealed and tensor.data.byte_offset % tensor.dtype.itemsize == 0

    def view(self, tensor: Tensor[InBlock]) -> HostArray:
        """The elements where they lie, with the tensor's shape and strides; only for a mappable one.

        Raises OSError or ValueError when the block cannot be mapped.
        """
        dtype = NUMPY_DTYPES[tensor.dtype]
        if 0 in tensor.shape:
            return np.empty(tensor.shape, dtype)
        place = self._mapping(tensor.data.block_id)
        data = np.frombuffer(place, dtype=np.uint8, count=tensor.extent_nbytes, offset=tensor.data.byte_offset)
        return _strided(data, tensor)

    def copy(self, tensor: Tensor[InBlock]) -> HostArray:
        """A copy of the elements, of the tensor's shape and strides of its own.

        Raises RegionChanged when memory of a caller became too short.
        """
        copy = positional.read_tensor(self._blocks[tensor.data.block_id].fd, tensor)
        return _strided(copy.data, copy)

    def write(self, tensor: Tensor[InBlock], values: HostArray) -> None:
        """Write values of the tensor's shape where it lies, and nothing between its elements.

        Raises RegionChanged when memory of a caller became too short or may no longer be written, and QuotaBytes.
        """
        if self.is_mappable(tensor):
            self.view(tensor)[...] = values
        else:
            positional.write_tensor(self._blocks[tensor.data.block_id].fd, tensor, dense_bytes(values))

    def _mapping(self, block_id: int) -> mmap.mmap:
        mapping = self._mappings.get(block_id)
        if mapping is None:
            block = self._blocks[block_id]
            access = mmap.ACCESS_WRITE if block.writable else mmap.ACCESS_READ
            self._mappings[block_id] = mapping = mmap.mmap(block.fd, block.nbytes, access=access)
        return mapping


def _strided(data: NDArray[np.uint8], tensor: Tensor[object]) -> HostArray:
    dtype = NUMPY_DTYPES[tensor.dtype]
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    return as_strided(data.view(dtype), tensor.shape, strides)
