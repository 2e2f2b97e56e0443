"""The front's end of the socket to a device's process: it never blocks the event loop, and sends files with frames."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque

import msgspec

from dqkv.backend import messages

_log = logging.getLogger(__name__)

_READ_NBYTES = 1 << 16


class Channel:
    """One end of a connected SOCK_STREAM pair, owned by this object; used on one event loop."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._frames = messages.Frames()
        self._received: deque[messages.FromDevice] = deque()

    def send(self, message: messages.ToDevice, *, fd: int | None = None) -> None:
        """Send a message after those before it; its file `fd` must stay open until the device answered for it.

        Nothing is raised when the device is gone or this end is closed: reading finds that out.
        """
        if self._socket.fileno() < 0:
            return
        self._unsent.append((memoryview(messages.frame(message)), fd))
        if len(self._unsent) == 1:
            self._flush()

    async def receive(self) -> messages.FromDevice | None:
        """The next message; None when the device's end is closed, or it sent what is no message."""
        while not self._received:
            try:
                data = await self._loop.sock_recv(self._socket, _READ_NBYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            try:
                self._received.extend(messages.decode_from_device(body) for body in self._frames.feed(data))
            except msgspec.MsgspecError:
                _log.exception("a device's process sent what is no message")
                return None
        return self._received.popleft()

    def close(self) -> None:
        """Close this end; what was not sent is dropped."""
        self._unsent.clear()
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _flush(self) -> None:
        while self._unsent:
            view, fd = self._unsent[0]
            try:
                sent = self._socket.send(view) if fd is None else socket.send_fds(self._socket, [view], [fd])
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._socket, self._flush)
                return
            except ConnectionError:
                self._unsent.clear()
                break
            # The file went with the first byte.
            self._unsent[0] = (view[sent:], None)
            if sent == len(view):
                self._unsent.popleft()
        self._loop.remove_writer(self._socket)
