"""A server's life as a process: it starts, runs until a signal, drains and ends; a second signal ends it at once."""

from __future__ import annotations

import asyncio
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
    """Runs a server until SIGTERM or SIGINT; raises what its start raises.

    A second signal while it drains ends the process at once, with exit code 128 + the signal's number.
    """
    log = structlog.get_logger("dqkv.server")
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    first = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal first
        if not stopped.is_set():
            log.info("draining", signal=number.name)
            first = loop.time()
            stopped.set()
        elif loop.time() - first > SAME_S:
            log.warning("ending at once", signal=number.name)
            os._exit(KILLED_EXIT + number)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await server.start()
        await stopped.wait()
    finally:
        await server.stop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
