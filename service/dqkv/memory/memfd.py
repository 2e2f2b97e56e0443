"""Anonymous files whose size is sealed, so that mapping them is safe: made here, or checked when a client sends one."""

from __future__ import annotations

import errno
import fcntl
import os

from dqkv import errors
from dqkv.memory.open_memory import OpenMemory

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Without them the file's owner can cut it short under a mapping, which ends the process that touches it."""

_F_SEAL_FUTURE_WRITE = 0x10
"""Of Linux 5.1; Python 3.11 has no name for it."""


def create(name: str, nbytes: int) -> int:
    """A new file of nbytes, in memory from its first to its last byte and sealed against a change of size.

    `name` is for people who look at /proc. Raises QuotaBytes when the machine has no memory for it, or this process
    as many open files as it may have.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise errors.QuotaBytes("this server has no descriptor left for more memory", retry_after_s=1.0) from error
        raise
    try:
        # A size alone promises nothing: without memory behind it, the first touch would end the process.
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise errors.QuotaBytes(f"this machine has no memory for {nbytes} bytes more", retry_after_s=1.0) from error
        raise
    return fd


def is_memfd(fd: int) -> bool:
    """Whether the file can carry seals; asks the kernel alone, never the file system of whoever sent the file."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def inspect(fd: int) -> OpenMemory:
    """What a client's memfd is; afterwards it carries F_SEAL_SEAL, so that nothing found out here can change.

    Raises RegionInvalid, naming the field "memfd", for a file that is no memfd, can still be resized, is backed by
    huge pages, or is empty. The descriptor stays the caller's.
    """
    if not is_memfd(fd):
        raise errors.RegionInvalid("memfd is another kind of file, must come from memfd_create", field="memfd")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise errors.RegionInvalid(
            f"memfd has seals {seals:#x}, must have F_SEAL_SHRINK and F_SEAL_GROW ({SIZE_SEALS:#x})", field="memfd"
        )
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    if writable and not seals & fcntl.F_SEAL_SEAL:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    status = os.fstat(fd)
    if status.st_dev != _memfd_device():
        raise errors.RegionInvalid("memfd is backed by huge pages, which are not supported", field="memfd")
    if status.st_size < 1:
        raise errors.RegionInvalid("memfd is empty", field="memfd")
    return OpenMemory(
        fd=fd,
        nbytes=status.st_size,
        sealed=True,
        writable=writable and not seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE),
        device=status.st_dev,
        inode=status.st_ino,
        kind="memfd",
    )


def _memfd_device() -> int:
    # The kernel keeps every memfd of ordinary pages on one internal mount of its own.
    fd = os.memfd_create("dqkv-device", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
