"""Data frames of a stream: a protobuf message with one `bytes` field, written and read by hand at raw-bytes speed.

A frame is the field's tag, its length as a varint, and the bytes. Any protobuf client writes and reads the same
bytes; doing it by hand saves the two copies that a protobuf runtime makes of every megabyte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dqkv import errors
from dqkv.v1 import gradient_pb2 as pb

CHUNK_NBYTES = 1 << 20
"""Bytes of one data frame; smaller frames cost a message's fixed price more often, larger ones overlap less."""

DATA_TAG = (pb.BackwardStreamRequest.DATA_FIELD_NUMBER << 3) | 2
"""First byte of a data frame in both directions: field 2, length-delimited."""


def encode_data(view: memoryview) -> bytes:
    """A data frame around `view` (bytes-like, contiguous), in one copy."""
    prefix = bytearray((DATA_TAG,))
    length = view.nbytes
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return b"".join((prefix, view))


def decode_data(raw: bytes) -> memoryview | None:
    """The bytes of a data frame written the short way, without a copy; None when protobuf has to read the frame."""
    if len(raw) < 2 or raw[0] != DATA_TAG:
        return None
    length, shift, start = 0, 0, 1
    while start < len(raw) and shift < 35:
        byte = raw[start]
        length |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if byte < 0x80:
            return memoryview(raw)[start:] if len(raw) - start == length else None
    return None


RequestFrame = pb.BackwardStreamRequest | memoryview
ResponseFrame = pb.BackwardStreamResponse | memoryview


def encode_frame(frame: RequestFrame | ResponseFrame) -> bytes:
    """A frame of either direction as bytes: what a gRPC serializer is given."""
    return encode_data(frame) if isinstance(frame, memoryview) else frame.SerializeToString()


def decode_request(raw: bytes) -> RequestFrame:
    """A frame of a request: data as a view of `raw`, header and trailer as messages. Raises DecodeError on garbage."""
    view = decode_data(raw)
    if view is not None:
        return view
    message = pb.BackwardStreamRequest.FromString(raw)
    return memoryview(message.data) if message.WhichOneof("frame") == "data" else message


def decode_response(raw: bytes) -> ResponseFrame:
    """A frame of a response, as decode_request."""
    view = decode_data(raw)
    if view is not None:
        return view
    message = pb.BackwardStreamResponse.FromString(raw)
    return memoryview(message.data) if message.WhichOneof("frame") == "data" else message


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a stream: its role and the memory that its bytes come from (any strides) or go to (contiguous)."""

    role: str
    view: memoryview


def total_nbytes(parts: Sequence[Part]) -> int:
    """Bytes of all parts together."""
    return sum(part.view.nbytes for part in parts)


class Sender:
    """Cuts tensors into data frames and sums them up for the trailer."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._digest = xxhash.xxh3_64()

    def frames(self) -> Iterator[memoryview]:
        """The bytes of all parts in order, in views of at most CHUNK_NBYTES that never cross a tensor's end."""
        for part in self._parts:
            for chunk in _chunks(part.view):
                self._digest.update(chunk)
                yield chunk

    def trailer(self) -> pb.Trailer:
        """The trailer; valid once all frames were taken."""
        return pb.Trailer(total_bytes=total_nbytes(self._parts), checksum=self._digest.intdigest())


def _chunks(view: memoryview) -> Iterator[memoryview]:
    """The elements of `view` in row-major order; what is not contiguous is gathered one chunk at a time."""
    if not view.nbytes:
        return
    if not view.c_contiguous:
        for block in _blocks(np.asarray(view)):
            yield np.ascontiguousarray(block).data.cast("B")
        return
    flat = view.cast("B")
    for start in range(0, flat.nbytes, CHUNK_NBYTES):
        yield flat[start : start + CHUNK_NBYTES]


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    if array.nbytes <= CHUNK_NBYTES:
        yield array
        return
    step = CHUNK_NBYTES // array[0].nbytes
    for start in range(0, array.shape[0], max(step, 1)):
        if step:
            yield array[start : start + step]
        else:
            yield from _blocks(array[start])


class Receiver:
    """Puts data frames where they belong: each has one legal place, and a byte too many or too few is refused."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [Part(part.role, part.view.cast("B")) for part in parts if part.view.nbytes]
        self._index = 0
        self._filled = 0
        self._received = 0
        self._total = total_nbytes(parts)
        self._digest = xxhash.xxh3_64()

    @property
    def received(self) -> int:
        """Bytes received so far."""
        return self._received

    def take(self, data: memoryview) -> None:
        """Copies one frame to its place. Raises ByteCountMismatch for bytes beyond a tensor's or the stream's end."""
        if not data.nbytes:
            raise errors.MessageInvalid("a data frame is empty", field="data")
        if self._index == len(self._parts):
            raise errors.ByteCountMismatch(
                f"a data frame of {data.nbytes} bytes came after all {self._total} bytes", field="data"
            )
        part = self._parts[self._index]
        end = self._filled + data.nbytes
        if end > part.view.nbytes:
            raise errors.ByteCountMismatch(
                f"a data frame of {data.nbytes} bytes crosses the end of {part.role}: "
                f"{self._filled} of its {part.view.nbytes} bytes had come",
                field=part.role,
            )
        # numpy copies without the interpreter's lock: gRPC's threads go on meanwhile.
        np.copyto(np.frombuffer(part.view[self._filled : end], np.uint8), np.frombuffer(data, np.uint8))
        self._digest.update(data)
        self._received += data.nbytes
        self._filled = end
        if end == part.view.nbytes:
            self._index, self._filled = self._index + 1, 0

    def finish(self, trailer: pb.Trailer) -> None:
        """Checks that all bytes came as sent. Raises Truncated, ByteCountMismatch or ChecksumMismatch."""
        if self._received != self._total:
            raise errors.Truncated(f"the stream ended after {self._received} of {self._total} bytes", field="trailer")
        if trailer.total_bytes != self._total:
            raise errors.ByteCountMismatch(
                f"the trailer says {trailer.total_bytes} bytes, the header {self._total}", field="trailer"
            )
        check_sum(trailer, self._digest.intdigest())


def check_sum(message: pb.Trailer | pb.BackwardRequest | pb.BackwardResponse, actual: int) -> None:
    """Compares a message's checksum, where it has one, with the bytes' own. Raises ChecksumMismatch."""
    if message.HasField("checksum") and message.checksum != actual:
        raise errors.ChecksumMismatch(
            f"the bytes have xxh3-64 {actual:016x}, were sent with {message.checksum:016x}", field="checksum"
        )
