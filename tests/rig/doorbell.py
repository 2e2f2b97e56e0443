"""The region socket as a client uses it, with nothing checked before it is sent."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from dqkv.v1 import gradient_pb2 as pb

from .caller import Caller
from .server import Running


@dataclass(frozen=True)
class HandedOver:
    """What the socket gave for a file: the ticket to register it by, and the session of the user who sent it."""

    ticket: bytes
    session: str


def hand_over(server: Running, fd: int) -> HandedOver:
    """Passes an open file; it stays the caller's to close. Raises AssertionError, in the socket's words, if refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(60)
        door.connect(server.address["region_socket"])
        socket.send_fds(door, [b"\x01"], [fd])
        answer = door.recv(512)
    assert len(answer) == 32, answer.decode(errors="replace")
    return HandedOver(answer[:16], answer[16:].hex())


def register_memfd(server: Running, caller: Caller, fd: int, nbytes: int | None = None, **fields: Any) -> bytes:
    """Hands an anonymous file over and registers it; the handle. Raises grpc.RpcError."""
    ticket = hand_over(server, fd).ticket
    request = pb.RegisterRegionRequest(
        memfd=pb.Memfd(ticket=ticket), nbytes=os.fstat(fd).st_size if nbytes is None else nbytes, **fields
    )
    return bytes(caller.ask(caller.regions.RegisterRegion, request).handle)
