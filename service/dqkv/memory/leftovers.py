"""Private folders of region sockets: made for a server, and removed by a later one where their server was killed."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

PREFIX = "dqkv-"
SOCKET = "regions"


def make_socket_path() -> Path:
    """A path for a region socket in a new folder, among temporary files, that is this user's alone.

    Removes the folders of servers that are gone first, so that a server that crashes again and again leaves one at
    most. Raises OSError when no folder can be made.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_dead(folder)
    return Path(tempfile.mkdtemp(prefix=PREFIX)) / SOCKET


def _remove_dead(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if os.fstat(fd).st_uid != os.getuid() or os.listdir(fd) != [SOCKET]:
            return
        # A server that is about to listen there holds this lock until it does.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_dead(folder / SOCKET):
            os.unlink(SOCKET, dir_fd=fd)
            folder.rmdir()
    except OSError:
        return
    finally:
        os.close(fd)


def _is_dead(path: Path) -> bool:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            return False
    return False
