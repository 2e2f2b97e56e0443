"""What a server says of itself and of a problem's cost, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dqkv.v1 import gradient_pb2 as pb


class Health(StrEnum):
    """The server's answer to grpc.health.v1.Health/Check for the whole server."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device: the archs it runs, best first, its state ("starting", "ok", "lost"), and its backlog in seconds."""

    name: str
    archs: tuple[str, ...]
    state: str
    dtypes: tuple[str, ...]
    queue_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one caller may send: the largest unary message, above which size to stream, the largest request; bytes."""

    message_nbytes: int
    inline_nbytes: int
    request_nbytes: int
    regions: int
    lease_s: float
    head_dim: int
    stream_idle_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """A server's version, devices and limits, how to reach its other doors, and why devices are absent (`notes`).

    stream_port 0 is the port of the control calls; region_socket "" is none.
    """

    version: str
    devices: tuple[Device, ...]
    limits: Limits
    stream_port: int
    region_socket: str
    session: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a backward would cost: pairs over all heads, operations, bytes, and seconds on and before its device."""

    pairs: int
    flops: float
    input_nbytes: int
    gradient_nbytes: int
    device_s: float
    queue_s: float
    device: str
    arch: str


def capabilities_of(message: pb.GetCapabilitiesResponse) -> Capabilities:
    """The message as a value; enum values of a newer server read as their numbers."""
    limits = message.limits
    return Capabilities(
        version=message.version,
        devices=tuple(_device(device) for device in message.devices),
        limits=Limits(
            message_nbytes=limits.message_bytes,
            inline_nbytes=limits.inline_bytes,
            request_nbytes=limits.request_bytes,
            regions=limits.regions,
            lease_s=limits.lease_s,
            head_dim=limits.head_dim,
            stream_idle_s=limits.stream_idle_s,
        ),
        stream_port=message.stream_port,
        region_socket=message.region_socket,
        session=message.session,
        notes=tuple(message.notes),
    )


def estimate_of(message: pb.EstimateResponse) -> Estimate:
    """The message as a value."""
    return Estimate(
        pairs=message.pairs,
        flops=message.flops,
        input_nbytes=message.input_bytes,
        gradient_nbytes=message.gradient_bytes,
        device_s=message.device_s,
        queue_s=message.queue_s,
        device=message.device,
        arch=_named(pb.Arch, message.arch, "ARCH_"),
    )


def _device(message: pb.Device) -> Device:
    return Device(
        name=message.name,
        archs=tuple(_named(pb.Arch, arch, "ARCH_") for arch in message.archs),
        state=_named(pb.DeviceState, message.state, "DEVICE_STATE_"),
        dtypes=tuple(_named(pb.DataType, dtype, "DATA_TYPE_") for dtype in message.dtypes),
        queue_s=message.queue_s,
    )


def _named(kind: Any, number: int, prefix: str) -> str:
    """The lower-case name of an enum's value, or its number where this client does not know it."""
    try:
        name = str(kind.Name(number))
    except ValueError:
        return str(number)
    return name.removeprefix(prefix).lower()
