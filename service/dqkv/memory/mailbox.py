"""The region socket: a client on this machine sends a memfd, and gets a ticket for it and a session as its user.

One connection is one exchange over SOCK_SEQPACKET. The client sends one byte, 1, with one descriptor (SCM_RIGHTS),
and is answered with 32 bytes: the ticket, for RegisterRegion, and the session, which makes calls with the metadata
"dqkv-session" (in hexadecimal) this unix user's. What is refused is answered with a longer text that begins with
REFUSAL and says why.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dqkv import errors
from dqkv.memory import memfd
from dqkv.memory.open_memory import OpenMemory
from dqkv.wire import GREETING, SECRET_NBYTES

REFUSAL = b"the region socket refuses this: "
"""As long as an answer; with a reason behind it, longer than any."""
PEER_S = 5.0
"""Seconds a connected client has to send its message."""
ACCEPT_PAUSE_S = 0.5
LOCK_S = 2.0
_UCRED = struct.Struct("3i")


class FdMailbox:
    """Takes descriptors of clients at a unix socket; belongs to the event loop that started it.

    Every client has its own short time and its user's share of connections and tickets, so that none holds up others.
    """

    def __init__(
        self,
        path: Path,
        *,
        mode: int = 0o600,
        tickets_per_uid: int = 16,
        ticket_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """mode is the socket file's; 0o666 lets other users of this machine in, who are told apart by their uid.

        tickets_per_uid bounds the connections and, again, the unused tickets of one user; a ticket lasts ticket_s.
        """
        self._path = path
        self._mode = mode
        self._tickets_per_uid = tickets_per_uid
        self._ticket_s = ticket_s
        self._clock = clock
        self._listener: socket.socket | None = None
        self._file: tuple[int, int] | None = None
        self._peers: dict[socket.socket, tuple[int, asyncio.TimerHandle]] = {}
        self._tickets: dict[bytes, _Ticket] = {}
        self._closing: Counter[int] = Counter()
        self._uids: dict[bytes, int] = {}
        self._sessions: dict[int, bytes] = {}

    async def start(self) -> None:
        """Makes the socket file and listens; the file of a server that is gone is replaced.

        Raises OSError, in words, where a living server listens at the path or another kind of file lies there.
        """
        deadline = time.monotonic() + LOCK_S
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Of two servers that start at once, one must not take the other's new socket for an old one.
            while not _lock(folder):
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, f"the folder of the region socket {self._path} stays locked")
                await asyncio.sleep(0.01)
            _clear(self._path)
            self._listener = self._listen()
        finally:
            os.close(folder)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """Stops listening, removes the socket file if it is still this server's, and closes what nobody took."""
        loop = asyncio.get_running_loop()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                if _file_of(self._path) == self._file:
                    self._path.unlink()
        for peer in list(self._peers):
            self._hang_up(peer)
        for ticket in self._tickets.values():
            os.close(ticket.fd)
        self._tickets.clear()

    def take(self, ticket: bytes, owner: str) -> OpenMemory:
        """The memory that a ticket stands for, once; it is then the caller's to close.

        owner is the name of who asks; one that is a unix user ("uid:...") must be the user who sent the memory.
        Raises RegionUnknown for a ticket that is unknown, used, too old or another user's, and RegionInvalid for a
        file that is no memfd sealed against shrinking and growing.
        """
        self.expire()
        held = self._tickets.get(ticket)
        if held is None or (owner.startswith("uid:") and owner != f"uid:{held.uid}"):
            raise errors.RegionUnknown(
                f"memfd.ticket is unknown, was used, or is older than {self._ticket_s:g} s", field="memfd.ticket"
            )
        del self._tickets[ticket]
        try:
            return memfd.inspect(held.fd)
        except BaseException:
            os.close(held.fd)
            raise

    def uid_of_session(self, session: bytes) -> int | None:
        """The unix user whom a session was given to, None for an unknown one."""
        return self._uids.get(session)

    def expire(self) -> None:
        """Closes what nobody took in time; tickets do this by themselves."""
        now = self._clock()
        for name in [name for name, ticket in self._tickets.items() if ticket.expires <= now]:
            os.close(self._tickets.pop(name).fd)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(self._path))
            # Nobody can connect before it listens, so nobody does before the mode is right.
            self._path.chmod(self._mode)
            self._file = _file_of(self._path)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, f"the region socket {self._path} cannot be made: {error.strerror}") from error
        return listener

    def _accept(self) -> None:
        loop, listener = asyncio.get_running_loop(), self._listener
        if listener is None:
            return
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionError, InterruptedError):
            return
        except OSError:
            # No descriptor is left: the client waits in the socket's own queue, and the loop goes on.
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_PAUSE_S, self._resume, listener)
            return
        peer.setblocking(False)
        _, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        connections = sum(other == uid for other, _ in self._peers.values())
        self._peers[peer] = uid, loop.call_later(PEER_S, self._refuse, peer, "nothing came in time")
        if connections >= self._tickets_per_uid:
            self._refuse(peer, f"this user has {connections} connections, the limit is {self._tickets_per_uid}")
        else:
            loop.add_reader(peer, self._receive, peer)

    def _resume(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept)

    def _receive(self, peer: socket.socket) -> None:
        uid, _ = self._peers[peer]
        try:
            # Room for one descriptor: the kernel closes what comes beyond it, and says so.
            message, ancillary, flags, _ = peer.recvmsg(
                len(GREETING) + 1, socket.CMSG_LEN(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._hang_up(peer)
            return
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data)
        truncated = flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        if message != GREETING or len(fds) != 1 or truncated:
            self._close_elsewhere(uid, fds)
            self._refuse(peer, "a message is one byte, 1, with one descriptor")
        elif not memfd.is_memfd(fds[0]):
            self._close_elsewhere(uid, fds)
            self._refuse(peer, "the descriptor is no memfd")
        else:
            self._answer(peer, uid, fds[0])

    def _answer(self, peer: socket.socket, uid: int, fd: int) -> None:
        self.expire()
        held = sum(ticket.uid == uid for ticket in self._tickets.values()) + self._closing[uid]
        if held >= self._tickets_per_uid:
            os.close(fd)
            self._refuse(peer, f"this user has {held} unused tickets, the limit is {self._tickets_per_uid}")
            return
        ticket, session = secrets.token_bytes(SECRET_NBYTES), self._session(uid)
        try:
            peer.send(ticket + session)
        except OSError:
            os.close(fd)
        else:
            self._tickets[ticket] = _Ticket(fd, uid, self._clock() + self._ticket_s)
            asyncio.get_running_loop().call_later(self._ticket_s, self.expire)
        self._hang_up(peer)

    def _session(self, uid: int) -> bytes:
        if uid not in self._sessions:
            self._sessions[uid] = secrets.token_bytes(SECRET_NBYTES)
            self._uids[self._sessions[uid]] = uid
        return self._sessions[uid]

    def _refuse(self, peer: socket.socket, reason: str) -> None:
        with contextlib.suppress(OSError):
            peer.send(REFUSAL + reason.encode())
        self._hang_up(peer)

    def _hang_up(self, peer: socket.socket) -> None:
        _, timer = self._peers.pop(peer)
        timer.cancel()
        asyncio.get_running_loop().remove_reader(peer)
        peer.close()

    def _close_elsewhere(self, uid: int, fds: array.array[int]) -> None:
        """Closes descriptors of any kind on a thread: the last close of some asks their file system, which may hang."""
        loop = asyncio.get_running_loop()
        for fd in fds:
            self._closing[uid] += 1
            threading.Thread(target=self._close, args=(loop, uid, fd), daemon=True, name="dqkv-close").start()

    def _close(self, loop: asyncio.AbstractEventLoop, uid: int, fd: int) -> None:
        with contextlib.suppress(OSError):
            os.close(fd)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._closing.subtract, {uid: 1})


@dataclass(frozen=True, slots=True)
class _Ticket:
    fd: int
    uid: int
    expires: float


def _lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_of(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _clear(path: Path) -> None:
    """Removes the socket file of a server that is gone; raises OSError for anything else that lies there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(errno.EEXIST, f"{path} is no socket: the region socket cannot be made there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # somebody listens and is busy
        except OSError as error:
            raise OSError(error.errno, f"{path} cannot be replaced: {error.strerror}") from error
    raise OSError(errno.EADDRINUSE, f"a living server listens at the region socket {path}")
