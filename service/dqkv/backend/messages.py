"""What the server's front and a device's process say to each other, and how it is cut out of a byte stream.

Each message is a frame: its length as four little-endian bytes, then MessagePack. The socket is a SOCK_STREAM pair,
so that a problem of any number of sequences fits; a file travels as SCM_RIGHTS beside the frame that names it.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from dqkv.backend.base import DeviceInfo, Task
from dqkv.memory.block import Block
from dqkv.problem import Report

_LENGTH = struct.Struct("<I")


# ---- to the device
class AddBlock(msgspec.Struct, frozen=True, tag="add_block"):
    """A block that later tasks name; its open file comes with the frame, and `block.fd` is the sender's number."""

    block: Block


class DropBlock(msgspec.Struct, frozen=True, tag="drop_block"):
    """No later task names this block: unmap it and close its file."""

    block_id: int


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Do this task after those sent before; answered by one Done or Failed."""

    task: Task


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop this task soon, whether it waits or runs; it still answers, and from then on touches none of its blocks."""

    task_id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process after the tasks sent before."""


# ---- from the device
class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The device takes tasks."""

    info: DeviceInfo


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The device cannot be used, or not any more, in words; the process ends."""

    message: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Every gradient of the task is written."""

    task_id: int
    report: Report


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The task ended without an answer: what a `DqkvError` says; `detail` is for the log alone."""

    task_id: int
    reason: str
    message: str
    field: str = ""
    retry_after_s: float | None = None
    detail: str = ""


ToDevice: TypeAlias = AddBlock | DropBlock | Run | Cancel | Stop
FromDevice: TypeAlias = Ready | Refused | Done | Failed


def frame(message: ToDevice | FromDevice) -> bytes:
    """The bytes of one message, its length first."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes, in order."""
        self._buffer += data
        bodies, start = [], 0
        while start + _LENGTH.size <= len(self._buffer):
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def decode_to_device(body: bytes) -> ToDevice:
    """A message to the device. Raises msgspec.ValidationError, and InvalidRequest for a problem that is none."""
    return msgspec.msgpack.decode(body, type=ToDevice)


def decode_from_device(body: bytes) -> FromDevice:
    """A message from the device. Raises msgspec.ValidationError."""
    return msgspec.msgpack.decode(body, type=FromDevice)
