"""POSIX shared memory by name: opened as shm_open(3) does, checked, and never deleted."""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]  # CPython's own shm_open(3), which no stub describes
import errno
import os
import re
import stat

from dqkv import errors
from dqkv.memory.open_memory import OpenMemory

NAME_LIMIT = 200
"""Characters of a name with its slash."""

_NAME = re.compile(r"/dqkv-[A-Za-z0-9._-]+")
_FIELD = "posix.name"


def open_posix(name: str, *, uid: int) -> OpenMemory:
    """Opens a client's shared memory: a regular file of user `uid` that has this name and no other.

    uid is the caller's user where the connection proves one, else the server's own. The memory is open for writing
    where its mode allows that, stays the client's to delete, and is never sealed: its owner can cut it short at any
    time, so it is read and written by position only.
    Raises RegionInvalid for a name that is not "/dqkv-" and then letters, digits, ".", "_" or "-", at most 200
    characters, for one that does not exist, and for a link, FIFO, folder or empty file; RegionNotOwned for memory of
    another user.
    """
    if len(name) > NAME_LIMIT or not _NAME.fullmatch(name):
        raise errors.RegionInvalid(
            f"{_FIELD} is {name[: NAME_LIMIT + 1]!r}, must be '/dqkv-' and then letters, digits, '.', '_' or '-', "
            f"at most {NAME_LIMIT} characters",
            field=_FIELD,
        )
    fd, writable = _open(name)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise errors.RegionInvalid(f"{_FIELD} {name!r} is no shared memory", field=_FIELD)
        if status.st_uid != uid:
            raise _not_owned(name)
        if status.st_nlink != 1:
            raise errors.RegionInvalid(
                f"{_FIELD} {name!r} names memory that has {status.st_nlink} names, must have 1", field=_FIELD
            )
        if status.st_size < 1:
            raise errors.RegionInvalid(f"{_FIELD} {name!r} has 0 bytes, give it its size first", field=_FIELD)
    except BaseException:
        os.close(fd)
        raise
    return OpenMemory(
        fd=fd,
        nbytes=status.st_size,
        sealed=False,
        writable=writable,
        device=status.st_dev,
        inode=status.st_ino,
        kind="posix",
    )


def _open(name: str) -> tuple[int, bool]:
    # A FIFO would keep the caller waiting for its other end.
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        try:
            return _posixshmem.shm_open(name, os.O_RDWR | flags), True
        except PermissionError:
            return _posixshmem.shm_open(name, os.O_RDONLY | flags), False
    except PermissionError:
        raise _not_owned(name) from None
    except OSError as error:
        found = "does not exist" if error.errno == errno.ENOENT else "is no shared memory that can be opened"
        raise errors.RegionInvalid(f"{_FIELD} {name!r} {found}", field=_FIELD) from None


def _not_owned(name: str) -> errors.RegionNotOwned:
    return errors.RegionNotOwned(f"{_FIELD} {name!r} belongs to another user", field=_FIELD)
