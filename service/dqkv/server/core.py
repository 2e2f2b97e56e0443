"""Everything behind the ports: memory, devices, the desk and the metrics, built from the settings."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import structlog

from dqkv.backend import findings
from dqkv.backend.base import Device, DeviceState
from dqkv.backend.process import Death, DeviceProcess, DeviceSettings
from dqkv.memory import leftovers
from dqkv.memory.mailbox import FdMailbox
from dqkv.memory.regions import RegionLimits, RegionTable
from dqkv.memory.staging import StagingPool
from dqkv.metrics import DeviceGauge, Metrics
from dqkv.problem import Report
from dqkv.scheduler.cost import Estimate
from dqkv.scheduler.queue import Scheduler, SchedulerLimits
from dqkv.server.gradient import Desk
from dqkv.server.health import Readiness
from dqkv.settings import Settings

HOUSEKEEPING_S = 1.0
GPU_START_TIMEOUT_S = 180.0
"""A PyTorch with CUDA on a cold disk takes most of a minute to import."""

OnRestart: TypeAlias = Callable[[str, Death], None]
"""Called with a device's name for each death that is followed by another start."""

Fleet: TypeAlias = Callable[[OnRestart], Sequence[Device]]
"""Makes the devices that a server has beside those of its machine."""

_log = structlog.get_logger("dqkv.server")


def no_fleet(_: OnRestart) -> Sequence[Device]:
    """None beside those of its machine."""
    return ()


class Core:
    """The parts that every face of the server shares. It belongs to the loop that starts it."""

    def __init__(self, settings: Settings, fleet: Fleet = no_fleet) -> None:
        """Builds the parts; nothing runs yet."""
        self._settings = settings
        self._fleet = fleet
        self._folder: Path | None = None
        self._housekeeper: asyncio.Task[None] | None = None
        block_ids = itertools.count(1)
        self.version = metadata.version("dqkv")
        self.metrics = Metrics(version=self.version, torch=metadata.version("torch"), grpcio=metadata.version("grpcio"))
        self.scheduler = Scheduler(
            self._processes(_cpus(settings)),
            limits=SchedulerLimits(request_nbytes=settings.request_bytes, queue_s=settings.queue_seconds),
            block_ids=block_ids,
            observe=self._observe,
        )
        self.staging = StagingPool(
            limit_nbytes=settings.staging_bytes, block_ids=block_ids, on_drop=self.scheduler.drop_block
        )
        self.regions = RegionTable(
            limits=RegionLimits(
                regions_per_owner=settings.regions_per_caller,
                lease_default_s=settings.lease_default_s,
                lease_limit_s=settings.lease_limit_s,
            ),
            block_ids=block_ids,
            on_close=self.scheduler.drop_block,
            observe=self.metrics.region_event,
            # Staging memory has no name, but a process of the same user finds its descriptors under /proc.
            is_own=self.staging.owns,
        )
        self.desk = Desk(scheduler=self.scheduler, staging=self.staging, regions=self.regions, metrics=self.metrics)
        self.readiness = Readiness(scheduler=self.scheduler, queue_seconds=settings.queue_seconds)
        self.mailbox: FdMailbox | None = None
        self.region_socket = ""
        self._gpu_notes: tuple[str, ...] = ()

    async def open_region_socket(self) -> None:
        """Listens for memfds where the settings say. Raises OSError in words."""
        where = self._settings.region_socket
        if where == "none":
            return
        if where == "auto":
            path = leftovers.make_socket_path()
            self._folder, where = path.parent, str(path)
        self.mailbox = FdMailbox(Path(where), mode=int(self._settings.region_socket_mode, 8))
        await self.mailbox.start()
        self.region_socket = where

    async def start(self) -> None:
        """Finds the GPUs and starts the devices; returns when each is ready or was found not to start."""
        await self._find_gpus()
        self.scheduler.add(self._fleet(self._on_restart))
        self._housekeeper = asyncio.create_task(self._keep_house(), name="dqkv housekeeping")
        await self.scheduler.start()

    async def stop(self) -> None:
        """Ends devices and sockets and gives all memory back."""
        if self._housekeeper is not None:
            self._housekeeper.cancel()
        await self.scheduler.stop()
        if self.mailbox is not None:
            await self.mailbox.stop()
        self.regions.close()
        self.staging.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def exposition(self) -> bytes:
        """Every metric as it is now, in the text format of Prometheus."""
        gauges = [
            DeviceGauge(
                device=status.name,
                state=status.state.value,
                depth=status.waiting + status.running,
                queue_s=status.queue_s,
            )
            for status in self.scheduler.statuses()
        ]
        self.metrics.set_devices(gauges, [state.value for state in DeviceState])
        self.metrics.set_staging(used_nbytes=self.staging.used_nbytes, total_nbytes=self.staging.total_nbytes)
        for kind, (count, nbytes) in self.regions.totals().items():
            self.metrics.set_regions(kind, count=count, nbytes=nbytes)
        return self.metrics.exposition()

    def notes(self) -> tuple[str, ...]:
        """Why a device or a family of kernels that one may expect is absent; complete once the server started."""
        notes = [*self._gpu_notes]
        if not self._settings.cpu_devices:
            notes.append("CPU: DQKV_CPU_DEVICES is 0")
        return tuple(notes)

    async def _find_gpus(self) -> None:
        settings = self._settings
        wanted = settings.gpu_indices
        if wanted == ():
            self._gpu_notes = ("GPU: DQKV_GPUS is none",)
            return
        choice = findings.choose(await findings.look(settings.kernels, builds=settings.compile == "on_demand"), wanted)
        self._gpu_notes = choice.notes
        self.readiness.await_selftests(choice.untested)
        self.scheduler.add(self._processes(_gpus(settings, choice.indices)))
        for note in choice.notes:
            _log.info("looked for GPUs", note=note)

    def _processes(self, devices: Iterable[DeviceSettings]) -> list[DeviceProcess]:
        return [DeviceProcess(device, on_restart=self._on_restart) for device in devices]

    def _observe(self, estimate: Estimate, report: Report) -> None:
        if estimate.device_s > 0:
            self.metrics.prediction(report.arch, (report.device_s + report.transfer_s) / estimate.device_s)

    def _on_restart(self, device: str, death: Death) -> None:
        self.metrics.worker_restarted(device, death.value)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.regions.expire()
            self.staging.trim(self._settings.staging_idle_s)


def _cpus(settings: Settings) -> list[DeviceSettings]:
    return [
        DeviceSettings(
            name=f"cpu:{index}",
            num_threads=_threads(settings, settings.cpu_devices),
            address_space_nbytes=settings.worker_memory_bytes or None,
        )
        for index in range(settings.cpu_devices)
    ]


def _gpus(settings: Settings, indices: Sequence[int]) -> list[DeviceSettings]:
    # No limit of address space: CUDA reserves far more of it than a GPU has memory.
    return [
        DeviceSettings(
            name=f"cuda:{index}",
            num_threads=_threads(settings, len(indices)),
            kernels=settings.kernels,
            builds_kernels=settings.compile == "on_demand",
            start_timeout_s=GPU_START_TIMEOUT_S,
        )
        for index in indices
    ]


def _threads(settings: Settings, devices: int) -> int:
    return settings.cpu_threads or max(len(os.sched_getaffinity(0)) // max(devices, 1), 1)
