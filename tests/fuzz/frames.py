"""Any bytes as a frame of a stream: read as protobuf reads them, put into their tensors, or refused by type."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["dqkv"]):
    from dqkv import errors, framing
    from dqkv.v1 import gradient_pb2 as pb

from google.protobuf.message import DecodeError

SIZES = (5, 0, 64)


def read_frame(raw: bytes) -> framing.RequestFrame | None:
    """The frame, held against protobuf's own reading; None where both refuse it."""
    try:
        want = pb.BackwardStreamRequest.FromString(raw)
    except DecodeError:
        assert not _is_read(raw), raw
        return None
    got = framing.decode_request(raw)
    if isinstance(got, memoryview):
        assert want.WhichOneof("frame") == "data", raw
        assert bytes(got) == want.data, raw
    else:
        assert got.SerializeToString(deterministic=True) == want.SerializeToString(deterministic=True), raw
    return got


def _is_read(raw: bytes) -> bool:
    try:
        framing.decode_request(raw)
    except DecodeError:
        return False
    return True


def receive(stream: bytes) -> None:
    """A whole stream: each frame is one byte of length and so many bytes."""
    targets = [bytearray(size) for size in SIZES]
    receiver = framing.Receiver([framing.Part("t", memoryview(target)) for target in targets])
    arrived = b""
    try:
        while stream:
            frame, stream = read_frame(stream[1 : 1 + stream[0]]), stream[1 + stream[0] :]
            if isinstance(frame, memoryview):
                receiver.take(frame)
                arrived += bytes(frame)
            elif frame is not None and frame.WhichOneof("frame") == "trailer":
                receiver.finish(frame.trailer)
                assert len(arrived) == sum(SIZES)
                assert b"".join(targets) == arrived
                return
    except errors.InvalidRequest:
        return
    except (errors.Truncated, errors.ChecksumMismatch):
        return


def main() -> None:
    atheris.Setup(sys.argv, receive)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
