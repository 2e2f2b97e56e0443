"""Shared memory as a client makes it, in every right and wrong way."""

from __future__ import annotations

import _posixshmem
import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SHM = Path("/dev/shm")
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def segment_names() -> set[str]:
    """What lies in the folder of POSIX shared memory now."""
    return {entry.name for entry in SHM.iterdir()}


class PosixMemory:
    """A named segment, mapped here; removed by `remove`."""

    def __init__(self, nbytes: int, name: str = "") -> None:
        self.name = name or f"/dqkv-test-{secrets.token_hex(8)}"
        self.nbytes = nbytes
        self.fd = _posixshmem.shm_open(self.name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        os.posix_fallocate(self.fd, 0, nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)

    @property
    def path(self) -> Path:
        return SHM / self.name[1:]

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            _posixshmem.shm_unlink(self.name)
        with suppress(OSError):
            os.close(self.fd)

    def __enter__(self) -> PosixMemory:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.remove()


def memfd(nbytes: int, seals: int = ALL_SEALS) -> int:
    """An anonymous file of zeros; the caller closes it."""
    fd = os.memfd_create("dqkv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
