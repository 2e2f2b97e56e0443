"""Strided tensors in a file that must not be mapped: by position a file cut short is an error, mapped it is a crash."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dqkv import errors
from dqkv.memory.block import InBlock
from dqkv.memory.footprint import Footprint
from dqkv.tensor import Tensor, dense_strides

CALL_NBYTES = 1 << 30
"""Bytes of one call; Linux moves at most 2 GiB - 4 KiB."""
GAP_NBYTES = 4096
"""Gaps between runs that are read through: a call of its own for the next run costs about as much."""
SCRATCH_NBYTES = 1 << 18
"""Bytes read through at a time: they stay in a core's cache until the runs are picked out."""

Allocate: TypeAlias = Callable[[int], NDArray[np.uint8]]
"""Gives so many bytes of memory, of any content."""


def fresh(nbytes: int) -> NDArray[np.uint8]:
    """Memory of its own."""
    return np.empty(nbytes, dtype=np.uint8)


def read_tensor(fd: int, tensor: Tensor[InBlock], allocate: Allocate = fresh) -> Tensor[NDArray[np.uint8]]:
    """Copies a tensor (any shape and strides) out of the file, each element of the file once.

    Returns dtype and shape as given, with strides of its own (in elements) for a flat array of bytes whose first
    byte is the first element: dimensions of stride 0 keep it, the others lie without gaps in the file's order, and
    elements that share bytes are left as they lie in the file. The array is what `allocate` gives.
    Raises RegionChanged where the file ends too early.
    """
    footprint = Footprint.of(tensor, tensor.data.byte_offset)
    if footprint.nbytes >= tensor.extent_nbytes:
        data = allocate(tensor.extent_nbytes)
        _read(fd, data.data, footprint.start)
        return tensor.with_data(data)
    data = allocate(footprint.nbytes)
    size, stride = footprint.dims[-1]
    group_nbytes = size * footprint.run_nbytes
    read_group = _read_through if stride - footprint.run_nbytes <= GAP_NBYTES else _read_runs
    for index, base in enumerate(footprint.bases()):
        read_group(fd, data[index * group_nbytes : (index + 1) * group_nbytes], base, footprint)
    strides = _packed_strides(tensor)
    return Tensor(dtype=tensor.dtype, shape=tensor.shape, strides=strides, data=data)


def write_tensor(fd: int, tensor: Tensor[InBlock], source: memoryview | NDArray[Any]) -> None:
    """Copies a tensor into the file; the bytes between its elements are neither written nor read.

    source is contiguous and holds tensor.nbytes bytes, dense and row-major in tensor's shape. Elements may not share
    bytes. Raises ByteCountMismatch for a source of another size, RegionOverlap for shared bytes, RegionChanged where
    the file has become shorter or may no longer be written, QuotaBytes where the file system is full.
    """
    flat = np.frombuffer(source, dtype=np.uint8) if tensor.nbytes else np.empty(0, dtype=np.uint8)
    if flat.nbytes != tensor.nbytes:
        raise errors.ByteCountMismatch(f"the source has {flat.nbytes} bytes, the tensor {tensor.nbytes}")
    footprint = Footprint.of(tensor, tensor.data.byte_offset)
    if not footprint.is_exclusive:
        raise errors.RegionOverlap(f"strides {tensor.strides} for shape {tensor.shape}: elements share bytes")
    if not tensor.nbytes:
        return
    size = os.fstat(fd).st_size
    if size < footprint.end:
        # A write past the end would make the file longer again instead of failing.
        raise _changed(footprint.end, size)
    view = _in_memory_order(flat, tensor).data
    run_nbytes = footprint.run_nbytes
    size, stride = footprint.dims[-1] if footprint.dims else (1, run_nbytes)
    position = 0
    with _write_errors():
        for base in footprint.bases():
            for start in range(base, base + size * stride, stride):
                run = view[position : position + run_nbytes]
                written = os.pwrite(fd, run, start) if run_nbytes <= CALL_NBYTES else 0
                if written != run_nbytes:
                    _write(fd, run[written:], start + written)
                position += run_nbytes


def _memory_order(tensor: Tensor[Any]) -> list[int]:
    """Dimensions from the largest stride to the smallest, equal ones as in a Footprint."""
    return sorted(range(len(tensor.shape)), key=lambda index: tensor.strides[index])[::-1]


def _packed_strides(tensor: Tensor[Any]) -> tuple[int, ...]:
    """Strides of the same elements without gaps, in the order of memory."""
    strides, step = [0] * len(tensor.shape), 1
    for index in reversed(_memory_order(tensor)):
        if tensor.shape[index] > 1 and tensor.strides[index]:
            strides[index] = step
            step *= tensor.shape[index]
    return tuple(strides)


def _in_memory_order(flat: NDArray[np.uint8], tensor: Tensor[Any]) -> NDArray[np.uint8]:
    """The bytes of a dense tensor in the order in which its elements lie in the file; copied only if that differs."""
    order = [index for index in _memory_order(tensor) if tensor.shape[index] > 1]
    if order == sorted(order):
        return flat
    elements = flat.view(f"u{tensor.dtype.itemsize}")
    strides = dense_strides(tensor.shape)
    turned = as_strided(
        elements,
        [tensor.shape[index] for index in order],
        [strides[index] * tensor.dtype.itemsize for index in order],
        writeable=False,
    )
    return np.ascontiguousarray(turned).reshape(-1).view(np.uint8)


def _read_runs(fd: int, data: NDArray[np.uint8], base: int, footprint: Footprint) -> None:
    size, stride = footprint.dims[-1]
    run_nbytes, view = footprint.run_nbytes, data.data
    position = 0
    for start in range(base, base + size * stride, stride):
        run = view[position : position + run_nbytes]
        count = os.preadv(fd, [run], start) if run_nbytes <= CALL_NBYTES else 0
        if count != run_nbytes:
            _read(fd, run[count:], start + count)
        position += run_nbytes


def _read_through(fd: int, data: NDArray[np.uint8], base: int, footprint: Footprint) -> None:
    size, stride = footprint.dims[-1]
    run_nbytes = footprint.run_nbytes
    runs = data.reshape(size, run_nbytes)
    step = min(max(SCRATCH_NBYTES // stride, 1), size)
    scratch = np.empty((step - 1) * stride + run_nbytes, dtype=np.uint8)
    for first in range(0, size, step):
        count = min(step, size - first)
        piece = scratch[: (count - 1) * stride + run_nbytes]
        _read(fd, piece.data, base + first * stride)
        runs[first : first + count] = as_strided(piece, (count, run_nbytes), (stride, 1))


def _read(fd: int, view: memoryview, start: int) -> None:
    done = 0
    while done < view.nbytes:
        count = os.preadv(fd, [view[done : done + CALL_NBYTES]], start + done)
        if not count:
            raise _changed(start + view.nbytes, start + done)
        done += count


def _write(fd: int, view: memoryview, start: int) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done : done + CALL_NBYTES], start + done)


@contextmanager
def _write_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise errors.QuotaBytes("the file system of the region is full", retry_after_s=1.0) from error
        if error.errno in (errno.EPERM, errno.EFBIG):
            raise errors.RegionChanged("the region may no longer be written") from error
        raise


def _changed(nbytes: int, size: int) -> errors.RegionChanged:
    return errors.RegionChanged(f"the tensor takes the region's bytes up to {nbytes}, its memory ends after {size}")
