"""Shared memory of this process: created, filled with pages, mapped, and seen through arrays."""

from __future__ import annotations

# multiprocessing.shared_memory would register the name with a tracker that later removes others' segments.
import _posixshmem  # type: ignore[import-not-found]
import fcntl
import mmap
import operator
import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dqkv import errors
from dqkv.client.arrays import HostArray, as_torch, dtype_of
from dqkv.client.headroom import headroom
from dqkv.location import InRegion
from dqkv.tensor import NUMPY_DTYPES, Tensor, dense_strides

if TYPE_CHECKING:
    import torch

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody, its owner included, can change the size: what is mapped stays there."""
ALIGNMENT = 64
"""Bytes that the place of a tensor is a multiple of, where the caller names none: a cache line."""


class Kind(StrEnum):
    """What a region is made of: an anonymous file, or POSIX shared memory by name."""

    MEMFD = "memfd"
    POSIX = "posix"


class Segment:
    """Shared memory of `nbytes`, mapped into this process for as long as an array still sees it.

    `fd` and `name` are for the server to find it by, until `hide` is called. Raises RegionInvalid when it cannot be
    created: no size, more than the machine or the control group has left, no shared memory left, or no such kind here.
    """

    def __init__(self, nbytes: int, kind: Kind) -> None:
        self.nbytes = _affordable(nbytes)
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
        self._placing = threading.Lock()
        self._end = 0
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
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        byte_offset: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> HostArray:
        """A numpy array over the segment's memory; bf16 is ml_dtypes.bfloat16.

        dtype: "bf16", "fp16", "fp32", or a numpy or torch dtype. strides: elements between neighbours, None is dense.
        byte_offset: from the segment's start to the first element. None is the next multiple of ALIGNMENT behind
        everything that was placed so far, so that tensors share no byte unless an offset says so. Places are never
        given back: what is used again and again is made once, or placed by offset.

        Raises RegionInvalid when no room is left behind what was placed, RegionBounds when a byte of a tensor with an
        offset lies outside, DTypeMismatch, ShapeMismatch, SizeOverflow.
        """
        kind = dtype_of("dtype", dtype)
        tensor = Tensor(
            dtype=kind,
            shape=tuple(shape),
            strides=dense_strides(shape) if strides is None else tuple(strides),
            data=None,
        )
        return np.ndarray(
            tensor.shape,
            NUMPY_DTYPES[kind],
            self._map,
            self._place(tensor, byte_offset),
            tuple(stride * kind.itemsize for stride in tensor.strides),
        )

    def torch(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        byte_offset: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A torch tensor on the CPU over the segment's memory; see `tensor`."""
        return as_torch(self.tensor(shape, dtype, byte_offset=byte_offset, strides=strides))

    def memory(self, byte_offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Some of the segment's bytes."""
        return np.frombuffer(self._map, np.uint8, nbytes, byte_offset)

    def head(self, count: int) -> NDArray[np.uint8]:
        """The segment's first bytes."""
        return self.memory(0, count)

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

    def _place(self, tensor: Tensor[None], byte_offset: int | None) -> int:
        """Bytes from the segment's start to the tensor, and the note that they are taken."""
        extent_nbytes, itemsize = tensor.extent_nbytes, tensor.dtype.itemsize
        with self._placing:
            if byte_offset is None:
                byte_offset = aligned(self._end)
                if byte_offset + extent_nbytes > self.nbytes:
                    raise errors.RegionInvalid(
                        f"the tensor needs {extent_nbytes} bytes, the region has {max(0, self.nbytes - byte_offset)} "
                        f"of {self.nbytes} left behind the tensors placed so far",
                        field="byte_offset",
                    )
            elif byte_offset < 0 or byte_offset % itemsize or byte_offset + extent_nbytes > self.nbytes:
                raise errors.RegionBounds(
                    f"byte_offset is {byte_offset}, the tensor's extent {extent_nbytes}: must be a multiple of "
                    f"{itemsize} and end within {self.nbytes} bytes",
                    field="byte_offset",
                )
            self._end = max(self._end, byte_offset + extent_nbytes)
        return byte_offset

    def _fill_and_map(self) -> mmap.mmap:
        # Allocating the pages now makes a full file system an error here; ftruncate alone would leave a bus error
        # for the first touch.
        os.posix_fallocate(self.fd, 0, self.nbytes)
        if self.kind is Kind.MEMFD:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(self.fd, self.nbytes, flags=flags)


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT, this one included."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _affordable(nbytes: int) -> int:
    """A size that can be had. Refused before anything is allocated: pages are taken at once, and none may be left."""
    try:
        nbytes = operator.index(nbytes)
    except TypeError:
        raise errors.RegionInvalid(f"nbytes is {nbytes!r}, must be an integer", field="nbytes") from None
    if nbytes < 1:
        raise errors.RegionInvalid(f"nbytes is {nbytes}, must be at least 1", field="nbytes")
    room = headroom()
    if room is not None and nbytes > room.nbytes:
        raise errors.RegionInvalid(f"nbytes is {nbytes}, the limit is {room.nbytes}: {room.limit}", field="nbytes")
    return nbytes


def _create(name: str) -> int:
    if not name:
        return os.memfd_create("dqkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return int(_posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600))


def _unlink(name: str) -> None:
    _posixshmem.shm_unlink(name)
