"""Whether this server is ready, with reasons: one truth for HTTP, for grpc.health.v1 and for logs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from dqkv.backend.base import DeviceState
from dqkv.scheduler.queue import Scheduler

POLL_S = 0.1
"""How often the truth is looked at for those who watch."""
RECOVERED_SHARE = 0.7
"""A queue that was full counts as full until it is below this share of its limit, so that readiness does not flap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failing:
    """A check that fails, and why."""

    check: str
    reason: str


class Readiness:
    """Ready is: not draining, no GPU waits for its selftest, a device is OK, and a queue has room."""

    def __init__(self, *, scheduler: Scheduler, queue_seconds: float) -> None:
        self._scheduler = scheduler
        self._queue_seconds = queue_seconds
        self._full = False
        self._untested: tuple[str, ...] = ()

    def await_selftests(self, untested: Sequence[str]) -> None:
        """Never be ready in this process: these GPUs, each with the reason, run nothing before they pass a selftest."""
        self._untested = tuple(untested)

    def failing(self) -> list[Failing]:
        """The checks that fail now; none when it is ready."""
        found = []
        if self._scheduler.draining:
            found.append(Failing(check="draining", reason="the server is shutting down"))
        if self._untested:
            found.append(Failing(check="selftest", reason="; ".join(self._untested)))
        statuses = self._scheduler.statuses()
        usable = [status for status in statuses if status.state is DeviceState.OK]
        if not usable:
            states = (
                ", ".join(f"{status.name} is {status.state} {status.fault}".strip() for status in statuses)
                or "there is none"
            )
            found.append(Failing(check="devices", reason=f"no device takes work: {states}"))
        else:
            shortest_s = min(status.queue_s for status in usable)
            limit_s = self._queue_seconds * (RECOVERED_SHARE if self._full else 1.0)
            self._full = shortest_s >= limit_s
            if self._full:
                found.append(
                    Failing(check="queue", reason=f"{shortest_s:.1f} s of work wait, the limit is {limit_s:.1f} s")
                )
        return found


class HealthReporter:
    """Tells grpc.health.v1 whenever readiness changes, for the whole server and for each service."""

    def __init__(self, readiness: Readiness, services: Sequence[str]) -> None:
        self.servicer = health_aio.HealthServicer()
        self._readiness = readiness
        self._services = ("", *services)
        self._known: tuple[str, ...] | None = None
        self._log = structlog.get_logger("dqkv.server")

    async def look(self) -> None:
        """Looks once."""
        failing = self._readiness.failing()
        checks = tuple(item.check for item in failing)
        if checks == self._known:
            return
        self._known = checks
        self._log.info("readiness", ready=not failing, failing={item.check: item.reason for item in failing})
        serving = health_pb2.HealthCheckResponse.NOT_SERVING if failing else health_pb2.HealthCheckResponse.SERVING
        for service in self._services:
            await self.servicer.set(service, serving)

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)
