"""CapabilityService of the asyncio server: what this server is and can do, and a session for its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from dqkv import codec
from dqkv.backend.base import DeviceState
from dqkv.scheduler.lane import DeviceStatus
from dqkv.scheduler.queue import Scheduler
from dqkv.server.gate import Gate, Method, Visit, unary
from dqkv.server.identity import Doorkeeper
from dqkv.v1 import gradient_pb2 as pb

SERVICE = "dqkv.v1.CapabilityService"

DEVICE_STATES: dict[DeviceState, pb.DeviceState] = {
    DeviceState.STARTING: pb.DEVICE_STATE_STARTING,
    DeviceState.OK: pb.DEVICE_STATE_OK,
    DeviceState.LOST: pb.DEVICE_STATE_LOST,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What does not change while a server runs; `notes` say why a device is absent, which is known once it started."""

    version: str
    limits: pb.Limits
    stream_port: int
    region_socket: str
    notes: Callable[[], tuple[str, ...]]


class CapabilityServicer:
    """CapabilityService."""

    def __init__(self, *, gate: Gate, door: Doorkeeper, scheduler: Scheduler, facts: Facts) -> None:
        self._gate = gate
        self._door = door
        self._scheduler = scheduler
        self._facts = facts
        self._devices: list[DeviceStatus] = []
        self._answer: pb.GetCapabilitiesResponse | None = None

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods for an asyncio server."""
        method = Method(service=SERVICE, name="GetCapabilities")
        handler = unary(self._gate, method, self.get_capabilities, pb.GetCapabilitiesRequest)
        return grpc.method_handlers_generic_handler(SERVICE, {method.name: handler})

    async def get_capabilities(self, _: pb.GetCapabilitiesRequest, visit: Visit) -> pb.GetCapabilitiesResponse:
        """Devices, limits, ports and the caller's session."""
        devices = self._scheduler.statuses()
        if self._answer is None or devices != self._devices:
            # Of all that is the same for every caller, only devices change; those of an idle server do not.
            self._answer, self._devices = self._describe(devices), devices
        answer = pb.GetCapabilitiesResponse(session=self._door.session(visit.caller))
        answer.MergeFrom(self._answer)
        return answer

    def _describe(self, devices: Iterable[DeviceStatus]) -> pb.GetCapabilitiesResponse:
        return pb.GetCapabilitiesResponse(
            version=self._facts.version,
            devices=[
                pb.Device(
                    name=status.name,
                    archs=[codec.encode_arch(arch) for arch in status.info.archs] if status.info else (),
                    state=DEVICE_STATES[status.state],
                    dtypes=[codec.encode_dtype(dtype) for dtype in status.info.dtypes] if status.info else (),
                    queue_s=status.queue_s,
                )
                for status in devices
            ],
            limits=self._facts.limits,
            stream_port=self._facts.stream_port,
            region_socket=self._facts.region_socket,
            notes=self._facts.notes(),
        )
