"""A server's life as a process: it starts, runs until a signal, drains and ends; a second signal ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Protocol

import structlog

SIGNALS = (signal.SIGTERM, signal.SIGINT)
KILLED_EXIT = 128
SAME_S = 1.0
"""Signals this close together are one: a terminal and a wrapper may both pass it on."""


class Startable(Protocol):
    """What has a life: a server."""

    async def start(self) -> None:
        """Begins to serve."""

    async def stop(self) -> None:
        """Drains and ends."""


async def live(server: Startable) -> None:
    """Runs a server until SIGTERM or SIGINT; raises what its start raises. A signal during the start ends it there.

    A second signal while it drains ends the process at once, with exit code 128 + the signal's number.
    """
    log = structlog.get_logger("dqkv.server")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    starting = asyncio.create_task(server.start(), name="dqkv start")
    first = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal first
        if not stopped.is_set():
            log.info("draining" if starting.done() else "ending before it served", signal=number.name)
            first = loop.time()
            stopped.set()
        elif loop.time() - first > SAME_S:
            log.warning("ending at once", signal=number.name)
            os._exit(KILLED_EXIT + number)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    ending = asyncio.create_task(stopped.wait(), name="dqkv signal")
    try:
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            await ending
    finally:
        starting.cancel()
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await starting
        await server.stop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
