"""The server as a whole: the core and its faces, started, drained and stopped in order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import structlog

from dqkv.server import heap, lifecycle, logs, ports, tls
from dqkv.server.core import Core, Fleet, no_fleet
from dqkv.server.grpc_servers import GrpcServers
from dqkv.server.http_app import DeviceInfo, Info, Sources, make_app
from dqkv.server.http_server import HttpServer
from dqkv.server.identity import Doorkeeper
from dqkv.server.limits import LimitsInfo
from dqkv.settings import Settings, SettingsInvalid, is_loopback


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where a server listens; paths are "" where it does not."""

    host: str
    grpc_port: int
    stream_port: int
    http_host: str
    http_port: int
    unix_socket: str
    region_socket: str


def run(settings: Settings, fleet: Fleet = no_fleet) -> int:
    """Serves until SIGTERM or SIGINT, and returns the exit code: 0 after a drain, 1 when it cannot start."""
    logs.configure(level=settings.log_level, form=settings.log_format)
    heap.keep_freed_memory()
    try:
        asyncio.run(_live(settings, fleet))
    except (SettingsInvalid, OSError) as error:
        structlog.get_logger("dqkv.server").error("cannot start", reason=str(error))
        return 1
    return 0


async def _live(settings: Settings, fleet: Fleet) -> None:
    await lifecycle.live(Server(settings, fleet))


class Server:
    """A server in this process: `await start()`, then `addresses`, then `await stop()`.

    `fleet` gives it devices beside those of the settings. Raises SettingsInvalid for files and tokens that cannot be
    read.
    """

    def __init__(self, settings: Settings, fleet: Fleet = no_fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._tokens = settings.read_tokens()
        self._credentials = tls.server_credentials(settings)
        self._held = AsyncExitStack()
        self._addresses: Addresses | None = None
        self._log = structlog.get_logger("dqkv.server")

    @property
    def addresses(self) -> Addresses:
        """Where it listens. Raises RuntimeError before it was started."""
        if self._addresses is None:
            raise RuntimeError("the server was not started")
        return self._addresses

    async def start(self) -> None:
        """Listens, starts the devices, then takes calls. Raises AddressTaken and OSError, and then holds nothing.

        When it returns each device is ready, or was found not to start.
        """
        try:
            await self._start()
        except BaseException:
            await self._held.aclose()
            raise
        self._log.info("serving", **asdict(self.addresses))

    async def stop(self) -> None:
        """Turns new work away, lets accepted work end within the settings' drain_s, and ends everything."""
        await self._held.aclose()

    async def _start(self) -> None:
        settings = self._settings
        core = Core(settings, self._fleet)
        self._held.push_async_callback(core.stop)
        await core.open_region_socket()
        # Every address is taken before a device is started, so that a second server ends at once. What was started
        # last is stopped first: health and metrics are there until the drain is over.
        listener = ports.listen_http(settings.http_host, settings.http_port)
        self._held.callback(listener.close)
        http = HttpServer(make_app(self._sources(core), version=core.version), listener)
        await http.start()
        self._held.push_async_callback(http.stop)
        servers = GrpcServers(settings, core, self._doorkeeper(core))
        self._held.push_async_callback(servers.stop)
        grpc_port, stream_port = servers.listen(self._credentials)
        self._addresses = Addresses(
            host=settings.host,
            grpc_port=grpc_port,
            stream_port=stream_port,
            http_host=settings.http_host,
            http_port=listener.getsockname()[1],
            unix_socket="" if settings.unix_socket is None else str(settings.unix_socket),
            region_socket=core.region_socket,
        )
        self._warn_of_open_ports()
        await core.start()
        await servers.start()

    def _warn_of_open_ports(self) -> None:
        settings = self._settings
        if self._tokens and self._credentials is None and not is_loopback(settings.host):
            self._log.warning(
                "tokens travel in the clear",
                reason=f"DQKV_HOST is {settings.host} and there is no TLS: whoever is on the way reads every secret",
                remedy="give DQKV_TLS_CERT and DQKV_TLS_KEY",
            )
        if not is_loopback(settings.http_host):
            self._log.warning(
                "HTTP is open to others",
                reason=f"DQKV_HTTP_HOST is {settings.http_host}, and HTTP has neither TLS nor authentication",
                remedy="let only probes and the collector of metrics reach it",
            )

    def _doorkeeper(self, core: Core) -> Doorkeeper:
        return Doorkeeper(
            tokens=self._tokens,
            certificates=self._settings.tls_client_ca is not None,
            uid_of_session=lambda session: None if core.mailbox is None else core.mailbox.uid_of_session(session),
        )

    def _sources(self, core: Core) -> Sources:
        return Sources(failing=core.readiness.failing, info=lambda: self._info(core), exposition=core.exposition)

    def _info(self, core: Core) -> Info:
        return Info(
            version=core.version,
            grpc_port=self.addresses.grpc_port,
            stream_port=self.addresses.stream_port,
            devices=[
                DeviceInfo(
                    name=status.name,
                    model="" if status.info is None else status.info.model,
                    state=status.state.value,
                    fault=status.fault,
                    archs=[] if status.info is None else [arch.value for arch in status.info.archs],
                    dtypes=[] if status.info is None else [dtype.value for dtype in status.info.dtypes],
                    queue_s=status.queue_s,
                    waiting=status.waiting,
                    running=status.running,
                )
                for status in core.scheduler.statuses()
            ],
            limits=LimitsInfo.of(self._settings),
            notes=list(core.notes()),
        )
