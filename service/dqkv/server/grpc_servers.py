"""Both gRPC servers: asyncio for control and unary calls, a synchronous one with bounded threads for streams."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from dqkv.problem import HEAD_DIM_LIMIT
from dqkv.server import capability_service, grpc_service, ports, region_service
from dqkv.server.capability_service import CapabilityServicer, Facts
from dqkv.server.core import Core
from dqkv.server.gate import Gate
from dqkv.server.grpc_service import GradientServicer, Terms
from dqkv.server.health import HealthReporter
from dqkv.server.identity import Doorkeeper
from dqkv.server.reflection import add_reflection
from dqkv.server.region_service import RegionServicer
from dqkv.server.stream_service import StreamServicer
from dqkv.server.watchdog import Watchdog
from dqkv.settings import Settings
from dqkv.v1 import gradient_pb2 as pb

SERVICES = (grpc_service.SERVICE, region_service.SERVICE, capability_service.SERVICE)
STOP_GRACE_S = 1.0
"""What calls that are left after the drain get to end: control calls, and answers on their way."""

LINGER_S = 0.25
"""How long new calls are still answered that the server drains: one that meets the very end of a gRPC server is
cancelled without a word."""


class GrpcServers:
    """The two servers over one core: `listen`, then `start`, then `stop`, on the core's loop."""

    def __init__(self, settings: Settings, core: Core, door: Doorkeeper) -> None:
        options = ports.grpc_options(settings.message_bytes)
        self._settings = settings
        self._core = core
        self._door = door
        self._control = grpc.aio.server(options=options)
        self._threads = ThreadPoolExecutor(settings.stream_threads, thread_name_prefix="dqkv-stream")
        self._bulk = grpc.server(self._threads, options=options)
        self._watchdog = Watchdog(settings.stream_idle_s)
        self._reporter = HealthReporter(core.readiness, SERVICES)
        self._tasks: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger("dqkv.server")

    def listen(self, credentials: grpc.ServerCredentials | None) -> tuple[int, int]:
        """Takes the addresses of the settings; returns the ports of control and streams. Raises AddressTaken."""
        settings = self._settings
        control = ports.listen_grpc(self._control, settings.host, settings.port, credentials, "DQKV_PORT")
        bulk = ports.listen_grpc(self._bulk, settings.host, settings.stream_port, credentials, "DQKV_STREAM_PORT")
        if settings.unix_socket is not None:
            ports.listen_unix(self._control, settings.unix_socket)
        self._add_services(stream_port=bulk)
        return control, bulk

    async def start(self) -> None:
        """Takes calls from now on."""
        self._tasks.append(asyncio.create_task(self._watchdog.run(), name="dqkv watchdog"))
        await self._reporter.look()
        self._tasks.append(asyncio.create_task(self._reporter.run(), name="dqkv health"))
        self._bulk.start()
        await self._control.start()

    async def stop(self) -> None:
        """Turns new work away, waits for accepted work as long as the settings allow, and ends both servers."""
        desk, began = self._core.desk, time.monotonic()
        desk.turn_away()
        await self._reporter.look()
        left = await desk.idle(self._settings.drain_s)
        await asyncio.sleep(min(LINGER_S, self._settings.drain_s))
        log = self._log.warning if left else self._log.info
        log("drained", left=left, duration_s=round(time.monotonic() - began, 3))
        bulk = self._bulk.stop(STOP_GRACE_S)
        await self._control.stop(STOP_GRACE_S)
        await asyncio.to_thread(bulk.wait)
        for task in self._tasks:
            task.cancel()
        # The streams that were left have been cancelled; their threads end by themselves.
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._settings.unix_socket is not None:
            self._settings.unix_socket.unlink(missing_ok=True)

    def _add_services(self, stream_port: int) -> None:
        core, settings = self._core, self._settings
        gate = Gate(door=self._door, metrics=core.metrics, default_timeout_s=settings.default_timeout_s)
        limits = pb.Limits(
            message_bytes=settings.message_bytes,
            inline_bytes=settings.inline_bytes,
            request_bytes=settings.request_bytes,
            regions=settings.regions_per_caller,
            lease_s=settings.lease_limit_s,
            head_dim=HEAD_DIM_LIMIT,
            stream_idle_s=settings.stream_idle_s,
        )
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
        self._bulk.add_generic_rpc_handlers((streams.handlers(),))
