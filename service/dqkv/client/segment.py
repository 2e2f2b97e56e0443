"""Shared memory of this process: created, filled with pages, mapped, and seen through arrays."""

from __future__ import annotations

# multiprocessing.shared_memory would register the name with a tracker that later removes others' segments.
import _posixshmem  # type: ignore[import-not-found]
import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dqkv import errors
from dqkv.client.arrays import NUMPY_DTYPES, HostArray, as_torch, dtype_of
from dqkv.location import InRegion
from dqkv.tensor import Tensor, dense_strides

if TYPE_CHECKING:
    import torch

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody, its owner included, can change the size: what is mapped stays there."""


class Kind(StrEnum):
    """What a region is made of: an anonymous file, or POSIX shared memory by name."""

    MEMFD = "memfd"
    POSIX = "posix"


class Segment:
    """Shared memory of `nbytes`, mapped into this process for as long as an array still sees it.

    `fd` and `name` are for the server to find it by, until `hide` is called. Raises RegionInvalid when it cannot be
    created: no size, no shared memory left, or no such kind here.
    """

    def __init__(self, nbytes: int, kind: Kind) -> None:
        if nbytes < 1:
            raise errors.RegionInvalid(f"nbytes is {nbytes}, must be at least 1", field="nbytes")
        self.nbytes = nbytes
        self.kind = kind
        self.name = f"/dqkv-{secrets.token_hex(16)}" if kind is Kind.POSIX else ""
        try:
            self.fd = _create(self.name)
            self._map = self._fill_and_map()
        except OSError as error:
            self.hide()
            raise errors.RegionInvalid(
                f"no {kind} shared memory of {nbytes} bytes: {error.strerror}", field="nbytes"
            ) from None
        self._address = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])

    def hide(self) -> None:
        """Closes the descriptor and removes the name: the mapping stays, and nothing outlives this process."""
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)
        if self.name:
            with suppress(FileNotFoundError):
                _unlink(self.name)
        self.name = ""

    def tensor(
        self, shape: Sequence[int], dtype: Any, *, byte_offset: int = 0, strides: Sequence[int] | None = None
    ) -> HostArray:
        """A numpy array over the segment's memory; bf16 is ml_dtypes.bfloat16.

        dtype: "bf16", "fp16", "fp32", or a numpy or torch dtype. byte_offset: from the segment's start to the first
        element. strides: elements between neighbours, None is dense. Raises RegionBounds when a byte of it lies
        outside, DTypeMismatch, ShapeMismatch, SizeOverflow.
        """
        kind = dtype_of("dtype", dtype)
        tensor = Tensor(
            dtype=kind,
            shape=tuple(shape),
            strides=dense_strides(shape) if strides is None else tuple(strides),
            data=None,
        )
        if byte_offset < 0 or byte_offset % kind.itemsize or byte_offset + tensor.extent_nbytes > self.nbytes:
            raise errors.RegionBounds(
                f"byte_offset is {byte_offset}, the tensor's extent {tensor.extent_nbytes}: must be a multiple of "
                f"{kind.itemsize} and end within {self.nbytes} bytes",
                field="byte_offset",
            )
        return np.ndarray(
            tensor.shape,
            NUMPY_DTYPES[kind],
            self._map,
            byte_offset,
            tuple(stride * kind.itemsize for stride in tensor.strides),
        )

    def torch(
        self, shape: Sequence[int], dtype: Any, *, byte_offset: int = 0, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A torch tensor on the CPU over the segment's memory; see `tensor`."""
        return as_torch(self.tensor(shape, dtype, byte_offset=byte_offset, strides=strides))

    def head(self, count: int) -> NDArray[np.uint8]:
        """The segment's first bytes."""
        return np.frombuffer(self._map, np.uint8, count)

    def find(self, array: HostArray, handle: bytes) -> Tensor[InRegion] | None:
        """Where in the region an array of this process lies, with its own strides; None when a byte lies outside.

        None too for what a reference cannot say (a negative or uneven stride, a last stride other than 1).
        """
        offset = int(array.__array_interface__["data"][0]) - self._address
        itemsize = array.dtype.itemsize
        if not 0 <= offset < self.nbytes or offset % itemsize or not array.size:
            return None
        pairs = list(zip(array.shape, array.strides, strict=True))
        if any(size > 1 and (stride < 0 or stride % itemsize) for size, stride in pairs):
            return None
        # Strides of dimensions of size 1 mean nothing, and may be anything.
        strides = tuple(stride // itemsize if size > 1 else 1 for size, stride in pairs)
        if array.shape[-1] > 1 and strides[-1] != 1:
            return None
        found = Tensor(
            dtype=dtype_of("dtype", array.dtype),
            shape=array.shape,
            strides=strides,
            data=InRegion(handle, offset),
        )
        return found if offset + found.extent_nbytes <= self.nbytes else None

    def _fill_and_map(self) -> mmap.mmap:
        # Allocating the pages now makes a full file system an error here; ftruncate alone would leave a bus error
        # for the first touch.
        os.posix_fallocate(self.fd, 0, self.nbytes)
        if self.kind is Kind.MEMFD:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(self.fd, self.nbytes, flags=flags)


def _create(name: str) -> int:
    if not name:
        return os.memfd_create("dqkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return int(_posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600))


def _unlink(name: str) -> None:
    _posixshmem.shm_unlink(name)
