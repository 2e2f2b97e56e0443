"""How both gRPC servers and the HTTP port listen: their options, and an address that is taken said in words."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import Any, Protocol

import grpc

LOOKAHEAD_NBYTES = 4 << 20
"""What a stream may send ahead of its reader: a few frames, so that the next is there while one is copied."""
FRAME_NBYTES_LIMIT = (1 << 24) - 1
"""Largest HTTP/2 frame there is; with larger frames a megabyte costs fewer calls into the kernel."""
STREAMS_LIMIT = 128
"""Calls at the same time on one connection."""
KEEPALIVE_S = 60
KEEPALIVE_TIMEOUT_S = 20
PING_INTERVAL_S = 10
"""Callers may ping this often while nothing moves; a caller that pings every 30 s has slack."""
IDENTITY_ONLY = 1
"""Bit set of compressions: none. A few compressed bytes could otherwise become any number in memory."""


class AddressTaken(OSError):
    """An address that the server was told to listen at is taken, or is not this machine's."""


class Listener(Protocol):
    """Either kind of gRPC server before it starts."""

    def add_insecure_port(self, address: str) -> int:
        """Listens without TLS; returns the port."""

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Listens with TLS; returns the port."""


def grpc_options(message_bytes: int, connection_age_s: float) -> list[tuple[str, Any]]:
    """Options of both gRPC servers; message_bytes is the largest message, both ways.

    connection_age_s is how old a connection gets, in seconds: calls on it end, new ones take a new connection.
    """
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_concurrent_streams", STREAMS_LIMIT),
        # Two servers on one port would share its calls between them, and nobody would notice.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_frame_size", FRAME_NBYTES_LIMIT),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_NBYTES),
        # With no limit of its own on how long calls on an old connection may still take.
        ("grpc.max_connection_age_ms", int(connection_age_s * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_S * 1000),
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
    ]


def listen_grpc(
    server: Listener, host: str, port: int, credentials: grpc.ServerCredentials | None, setting: str
) -> int:
    """Listens at a TCP port, 0 for any free one, and returns it. Raises AddressTaken naming the setting."""
    address = _join(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        bound = 0
    if not bound:
        # gRPC does not tell why.
        try:
            _bind(host, port).close()
        except OSError as error:
            raise _refused(setting, address, error) from None
        why = "" if credentials is None else ": it does not take DQKV_TLS_CERT and DQKV_TLS_KEY"
        raise AddressTaken(f"{setting}: gRPC cannot listen at {address}, which is free{why}")
    return bound


def listen_unix(server: Listener, path: Path) -> None:
    """Listens at a unix socket that its owner alone can reach. Raises AddressTaken where a living server has it."""
    refuse_living_socket(path)
    before = os.umask(0o177)
    try:
        bound = server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        bound = 0
    finally:
        os.umask(before)
    if not bound:
        raise AddressTaken(f"DQKV_UNIX_SOCKET: cannot listen at {path}")


def listen_http(host: str, port: int) -> socket.socket:
    """A listening TCP socket, at any free port for 0. Raises AddressTaken."""
    try:
        listener = _bind(host, port)
        # Of two sockets bound to one port, the second one may only find out here.
        listener.listen(256)
    except OSError as error:
        raise _refused("DQKV_HTTP_PORT", _join(host, port), error) from None
    listener.setblocking(False)
    return listener


def refuse_living_socket(path: Path) -> None:
    """Raises AddressTaken when a process answers at a unix socket, or when the path is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressTaken(f"DQKV_UNIX_SOCKET: {path} is there and no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise AddressTaken(f"DQKV_UNIX_SOCKET: another server listens at {path}")


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _refused(setting: str, address: str, error: OSError) -> AddressTaken:
    question = "; is another server running there?" if error.errno == errno.EADDRINUSE else ""
    return AddressTaken(f"{setting}: cannot listen at {address}: {error.strerror}{question}")


def _join(host: str, port: int) -> str:
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
