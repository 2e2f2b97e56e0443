"""A worker: a whole server of ours in a process of the cluster's engine, with the one device that it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from dqkv.server import logs
from dqkv.server.app import Server
from dqkv.settings import Settings, is_loopback

NO_DEADLINE_S = 1e8
"""The front knows the caller's deadline and ends what is past it; three years never come between."""


class Worker:
    """Holds a server; the engine makes it, and calls its methods on one event loop."""

    def __init__(self, host: str, given: Mapping[str, Any]) -> None:
        """host: this node's address in the cluster. given: settings by name; the node's environment has the others."""
        self._host = host
        self._given = dict(given)
        self._server: Server | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> str:
        """Where its server listens, "host:port"; starts it at the first call. Raises SettingsInvalid and OSError."""
        async with self._starting:
            if self._server is None:
                settings = Settings.load(
                    **self._given,
                    host=self._host,
                    port=0,
                    stream_port=0,
                    http_host="127.0.0.1",
                    http_port=0,
                    # Nobody but the front asks it, with a token, over the network of the cluster.
                    insecure_bind=not is_loopback(self._host),
                    tls_cert=None,
                    tls_key=None,
                    tls_client_ca=None,
                    tokens_file=None,
                    unix_socket=None,
                    region_socket="none",
                    default_timeout_s=NO_DEADLINE_S,
                )
                logs.configure(level=settings.log_level, form="json")
                server = Server(settings)
                await server.start()
                self._server = server
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._server.addresses.grpc_port}"

    async def stop(self) -> None:
        """Ends its server; what runs on its device is stopped."""
        if self._server is not None:
            await self._server.stop()
