"""What a server says of itself: the devices as they are now, and to each caller its own session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from dqkv.backend.base import DeviceInfo, DeviceState
from dqkv.problem import Arch
from dqkv.scheduler.lane import DeviceStatus
from dqkv.server.capability_service import CapabilityServicer, Facts
from dqkv.server.gate import Visit
from dqkv.server.identity import Call, Doorkeeper
from dqkv.tensor import DType
from dqkv.v1 import gradient_pb2 as pb

METHOD = "/dqkv.v1.CapabilityService/GetCapabilities"
STATES = {
    DeviceState.STARTING: pb.DEVICE_STATE_STARTING,
    DeviceState.OK: pb.DEVICE_STATE_OK,
    DeviceState.LOST: pb.DEVICE_STATE_LOST,
}
STARTING = DeviceStatus(
    name="told:0", info=None, state=DeviceState.STARTING, fault="", queue_s=0.0, waiting=0, running=0
)
READY = replace(
    STARTING,
    info=DeviceInfo(name="told:0", archs=(Arch.SM90, Arch.SM80), dtypes=(DType.BF16,)),
    state=DeviceState.OK,
)


class Devices:
    """The scheduler of a server whose devices are as the test says."""

    def __init__(self, *statuses: DeviceStatus) -> None:
        self.now = list(statuses)

    def statuses(self) -> list[DeviceStatus]:
        return list(self.now)


class Asking:
    """Callers of one server, each of which brings its session."""

    def __init__(self, devices: Devices) -> None:
        unused: Any = None
        self._door = Doorkeeper(tokens=(), certificates=False, uid_of_session=lambda _: None)
        facts = Facts(version="1", limits=pb.Limits(regions=3), stream_port=7, region_socket="/s", notes=lambda: ("n",))
        self._servicer = CapabilityServicer(gate=unused, door=self._door, scheduler=cast("Any", devices), facts=facts)

    async def ask(self, session: str = "") -> pb.GetCapabilitiesResponse:
        call = Call(method=METHOD, peer="ipv4:127.0.0.1:5000", metadata={"dqkv-session": session} if session else {})
        visit = Visit(caller=self._door.authorize(call), deadline=1e9)
        return await self._servicer.get_capabilities(pb.GetCapabilitiesRequest(), visit)


async def test_every_answer_shows_the_devices_as_they_are_then() -> None:
    devices = Devices()
    asking = Asking(devices)
    lost, busy = replace(READY, state=DeviceState.LOST), replace(READY, queue_s=2.5)
    for now in ([STARTING], [READY], [busy], [lost], [READY], [], [READY, replace(lost, name="told:1")]):
        devices.now = now
        for _ in range(2):
            told = [(device.name, device.state, device.queue_s) for device in (await asking.ask()).devices]
            assert told == [(status.name, STATES[status.state], status.queue_s) for status in now]


async def test_a_device_is_told_by_number_and_best_arch_first() -> None:
    (told,) = (await Asking(Devices(READY)).ask()).devices
    assert told == pb.Device(
        name="told:0",
        archs=[pb.ARCH_SM90, pb.ARCH_SM80],
        state=pb.DEVICE_STATE_OK,
        dtypes=[pb.DATA_TYPE_BF16],
    )


async def test_every_caller_is_told_the_same_facts_and_its_own_session() -> None:
    asking = Asking(Devices(READY))
    first, second = await asking.ask(), await asking.ask()
    again = await asking.ask(first.session)
    assert again == first
    assert len({first.session, second.session, ""}) == 3
    second.session = first.session
    assert second == first
    assert (first.version, first.limits.regions, first.stream_port) == ("1", 3, 7)
    assert (first.region_socket, list(first.notes)) == ("/s", ["n"])
