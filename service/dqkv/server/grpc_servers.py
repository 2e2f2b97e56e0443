"""Both gRPC servers: asyncio for control and unary calls, a synchronous one with bounded threads for streams."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from dqkv.server import capability_service, grpc_service, ports, region_service, stream_service
from dqkv.server.capability_service import CapabilityServicer, Facts
from dqkv.server.core import Core
from dqkv.server.elsewhere import Elsewhere, control_methods
from dqkv.server.gate import Gate
from dqkv.server.grpc_service import GradientServicer, Terms
from dqkv.server.health import HealthReporter
from dqkv.server.identity import Doorkeeper
from dqkv.server.limits import LimitsInfo
from dqkv.server.reflection import add_reflection
from dqkv.server.region_service import RegionServicer
from dqkv.server.stream_service import StreamServicer
from dqkv.server.watchdog import Watchdog
from dqkv.settings import Settings

SERVICES = (grpc_service.SERVICE, region_service.SERVICE, capability_service.SERVICE)
STOP_GRACE_S = 1.0
"""What calls that are left after the drain get to end: control calls, and answers on their way."""

LINGER_S = 0.25
"""How long new calls are still answered that the server drains: one that meets the very end of a gRPC server is
cancelled without a word."""


class GrpcServers:
    """The two servers over one core: `listen`, then `start`, then `stop`, on the core's loop."""

    def __init__(self, settings: Settings, core: Core, door: Doorkeeper) -> None:
        options = ports.grpc_options(settings.message_bytes, settings.connection_age_s)
        self._settings = settings
        self._core = core
        self._door = door
        self._control = grpc.aio.server(options=options)
        self._threads = ThreadPoolExecutor(settings.stream_threads, thread_name_prefix="dqkv-stream")
        self._bulk = grpc.server(self._threads, options=options)
        self._watchdog = Watchdog(settings.stream_idle_s)
        self._reporter = HealthReporter(core.readiness, SERVICES)
        self._tasks: list[asyncio.Task[None]] = []
        self._serving = False
        self._socket: Path | None = None
        self._log = structlog.get_logger("dqkv.server")

    def listen(self, credentials: grpc.ServerCredentials | None) -> tuple[int, int]:
        """Takes the addresses of the settings; returns the ports of control and streams. Raises AddressTaken."""
        settings = self._settings
        control = ports.listen_grpc(self._control, settings.host, settings.port, credentials, "DQKV_PORT")
        bulk = ports.listen_grpc(self._bulk, settings.host, settings.stream_port, credentials, "DQKV_STREAM_PORT")
        if settings.unix_socket is not None:
            ports.listen_unix(self._control, settings.unix_socket)
            self._socket = settings.unix_socket
        self._add_services(control_port=control, stream_port=bulk)
        return control, bulk

    async def start(self) -> None:
        """Takes calls from now on."""
        self._tasks.append(asyncio.create_task(self._watchdog.run(), name="dqkv watchdog"))
        await self._reporter.look()
        self._tasks.append(asyncio.create_task(self._reporter.run(), name="dqkv health"))
        self._serving = True
        self._bulk.start()
        await self._control.start()

    async def stop(self) -> None:
        """Turns new work away, waits for accepted work as long as the settings allow, and ends both servers."""
        self._core.scheduler.turn_away()
        if self._serving:
            await self._drain()
        else:
            # gRPC stops only what was started, and complains on standard error when it frees anything else.
            await self._control.start()
        bulk = self._bulk.stop(STOP_GRACE_S)
        await self._control.stop(STOP_GRACE_S)
        await asyncio.to_thread(bulk.wait)
        for task in self._tasks:
            task.cancel()
        # The streams that were left have been cancelled; their threads end by themselves.
        self._threads.shutdown(wait=False, cancel_futures=True)
        # One that could not be taken is another server's.
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    async def _drain(self) -> None:
        desk, began = self._core.desk, time.monotonic()
        await self._reporter.look()
        left = await desk.idle(self._settings.drain_s)
        await asyncio.sleep(min(LINGER_S, self._settings.drain_s))
        log = self._log.warning if left else self._log.info
        log("drained", left=left, duration_s=round(time.monotonic() - began, 3))

    def _add_services(self, *, control_port: int, stream_port: int) -> None:
        core, settings = self._core, self._settings
        gate = Gate(door=self._door, metrics=core.metrics, default_timeout_s=settings.default_timeout_s)
        limits = LimitsInfo.of(settings).message()
        facts = Facts(
            version=core.version,
            limits=limits,
            stream_port=stream_port,
            region_socket=core.region_socket,
            notes=core.notes,
        )
        gradients = GradientServicer(
            gate=gate,
            desk=core.desk,
            scheduler=core.scheduler,
            metrics=core.metrics,
            terms=Terms(limits=limits, messages=settings.unary_messages, stream_port=stream_port),
        )
        regions = RegionServicer(gate=gate, table=core.regions, mailbox=core.mailbox)
        capabilities = CapabilityServicer(gate=gate, door=self._door, scheduler=core.scheduler, facts=facts)
        streams = StreamServicer(
            gate=gate,
            desk=core.desk,
            metrics=core.metrics,
            watchdog=self._watchdog,
            streams_per_caller=settings.streams_per_caller,
            loop=asyncio.get_running_loop(),
        )
        self._control.add_generic_rpc_handlers((gradients.handlers(), regions.handlers(), capabilities.handlers()))
        health_pb2_grpc.add_HealthServicer_to_server(self._reporter.servicer, self._control)
        add_reflection(self._control, [*SERVICES, health.SERVICE_NAME], gate)
        here, there = {stream_service.METHOD: stream_port}, dict.fromkeys(control_methods(), control_port)
        self._control.add_generic_rpc_handlers((Elsewhere(gate, ports=here, asynchronous=True),))
        self._bulk.add_generic_rpc_handlers((streams.handlers(), Elsewhere(gate, ports=there, asynchronous=False)))
