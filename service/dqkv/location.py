"""Where a tensor's bytes are while it travels: in the message, in the frames of its stream, or in a region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Inline:
    """In the message itself: dense bytes."""

    view: memoryview


@dataclass(frozen=True, slots=True)
class InStream:
    """In the data frames of this stream, dense, after those of the tensors named before."""


@dataclass(frozen=True, slots=True)
class InRegion:
    """In a region: its handle (16 bytes) and the bytes from its start to the tensor's first element."""

    handle: bytes
    byte_offset: int


Location: TypeAlias = Inline | InStream | InRegion
