"""Several servers at one name: each has an address of its own, and all have the same ports, like pods."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from .server import Running, running

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@dataclass(eq=False)
class Fleet:
    """The servers by address, those that were killed included, and their two ports."""

    port: int
    stream_port: int
    servers: dict[str, Running] = field(default_factory=dict)
    _held: ExitStack = field(default_factory=ExitStack)

    def start(self, host: str, **settings: str) -> Running:
        """A server at an address that has none now."""
        ports = {"port": str(self.port), "stream_port": str(self.stream_port)}
        server = self._held.enter_context(running(host=host, **ports, **settings))
        self.servers[host] = server
        return server

    def kill(self, host: str) -> None:
        """Ends a server without a word."""
        self.servers[host].process.kill()
        self.servers[host].process.wait()

    def answered(self, rpc: str) -> dict[str, float]:
        """Requests of a method that each living server has answered well."""
        return {
            host: server.metric("dqkv_requests_total", rpc=rpc, code="OK")
            for host, server in self.servers.items()
            if server.process.poll() is None
        }


@contextmanager
def fleet(*hosts: str, **settings: str) -> Iterator[Fleet]:
    """Servers at these addresses; killed at the end."""
    port, stream_port = free_ports(2)
    one = Fleet(port=port, stream_port=stream_port)
    with one._held:
        for host in hosts:
            one.start(host, **settings)
        yield one


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, on any address of this machine."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
