"""A name server of one name: it has as many addresses as servers, like that of a headless Service."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

HEADER = struct.Struct(">6H")
ANSWER = 0x8400
"""An answer, of the one who knows."""
ADDRESS, INTERNET = 1, 1
NAME_OF_QUESTION = 0xC00C
"""A pointer to the name that the question holds."""
TTL_S = 1


class Names:
    """Answers every question for an address with `addresses`, in an order that turns; they may change meanwhile."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def serve(self) -> None:
        """Until the empty datagram that `stop` sends."""
        while True:
            question, asker = self._socket.recvfrom(4096)
            if not question:
                return
            self._socket.sendto(self._answer(question), asker)

    def stop(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", self.port))

    def close(self) -> None:
        self._socket.close()

    def _answer(self, question: bytes) -> bytes:
        number, *_ = HEADER.unpack_from(question)
        end = question.index(b"\0", HEADER.size) + 5
        (kind,) = struct.unpack_from(">H", question, end - 4)
        known = self.addresses if kind == ADDRESS else []
        self.addresses = self.addresses[1:] + self.addresses[:1]
        records = b"".join(
            struct.pack(">3HIH4s", NAME_OF_QUESTION, ADDRESS, INTERNET, TTL_S, 4, socket.inet_aton(address))
            for address in known
        )
        return HEADER.pack(number, ANSWER, 1, len(known), 0, 0) + question[HEADER.size : end] + records


@contextmanager
def name_server(addresses: Sequence[str]) -> Iterator[Names]:
    """A name server on a free UDP port of 127.0.0.1."""
    names = Names(addresses)
    thread = threading.Thread(target=names.serve, daemon=True)
    thread.start()
    try:
        yield names
    finally:
        names.stop()
        thread.join()
        names.close()
