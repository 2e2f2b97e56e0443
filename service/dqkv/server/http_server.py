"""The HTTP port: uvicorn on the server's own loop, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

STOP_S = 2.0
BACKLOG = 128
"""Connections that wait to be accepted; while no descriptor is left, asyncio tries, and logs, as often in a row."""


class HttpServer:
    """Serves an application on a socket that listens already."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(STOP_S),
        )
        self._server = _Quiet(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="dqkv http")

    async def stop(self) -> None:
        """Lets requests in progress end, briefly, and closes the socket."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=2 * STOP_S)
            self._task.cancel()
        self._listener.close()


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the server's own lifecycle."""
        yield
