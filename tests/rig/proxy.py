"""A TCP proxy that changes one byte of what passes: what a broken switch or a hostile hop does."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from enum import StrEnum

ADDRESS = "127.0.0.2"
"""Also loopback: the proxy has the server's own ports there, so that a client that is told a port finds the proxy."""
READ_NBYTES = 1 << 16


class Direction(StrEnum):
    """Which way the bytes go that are changed."""

    UP = "client to server"
    DOWN = "server to client"


class TamperingProxy:
    """Passes what arrives at ADDRESS on to the same port of 127.0.0.1, and flips one bit of the first `mark`."""

    def __init__(self, ports: list[int], *, mark: bytes, direction: Direction) -> None:
        self.flipped = 0
        self._mark = mark
        self._direction = direction
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        for port in ports:
            listener = socket.create_server((ADDRESS, port))
            self._sockets.append(listener)
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()

    def close(self) -> None:
        """Cuts every connection."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> TamperingProxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket, port: int) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                self._sockets += [near, far]
                for source, target, direction in ((near, far, Direction.UP), (far, near, Direction.DOWN)):
                    threading.Thread(target=self._pass, args=(source, target, direction), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            while data := source.recv(READ_NBYTES):
                target.sendall(self._flip(data) if direction is self._direction else data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _flip(self, data: bytes) -> bytes:
        # A mark lies inside a tensor's bytes, so the frames around it stay whole.
        place = data.find(self._mark)
        with self._lock:
            if place < 0 or self.flipped:
                return data
            self.flipped += 1
        changed = bytearray(data)
        changed[place + len(self._mark) // 2] ^= 0x01
        return bytes(changed)
