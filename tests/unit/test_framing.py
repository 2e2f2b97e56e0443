"""Data frames: what is written by hand is what protobuf reads, each byte has one place, and a wrong byte is refused."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from dqkv import errors, framing
from dqkv.v1 import gradient_pb2 as pb

pytestmark = pytest.mark.numpy_only


@given(st.binary(max_size=300_000))
def test_hand_written_frame_is_protobuf_s_own_bytes(data):
    assert framing.encode_data(memoryview(data)) == pb.BackwardStreamRequest(data=data).SerializeToString()
    assert framing.encode_data(memoryview(data)) == pb.BackwardStreamResponse(data=data).SerializeToString()


@given(st.binary(max_size=5_000))
def test_every_frame_reads_as_protobuf_reads_it(raw):
    """Whatever bytes arrive: the same data, the same message, or the same refusal as protobuf's own parser."""
    for kind, decode in (
        (pb.BackwardStreamRequest, framing.decode_request),
        (pb.BackwardStreamResponse, framing.decode_response),
    ):
        try:
            want = kind.FromString(raw)
        except DecodeError:
            with pytest.raises(DecodeError):
                decode(raw)
            continue
        got = decode(raw)
        if want.WhichOneof("frame") == "data":
            assert isinstance(got, memoryview)
            assert bytes(got) == want.data
        else:
            assert got == want


@given(st.binary(min_size=1, max_size=300), st.binary(max_size=40))
def test_a_frame_with_something_behind_its_data_reads_as_protobuf_reads_it(data, rest):
    raw = framing.encode_data(memoryview(data)) + rest
    try:
        want = pb.BackwardStreamRequest.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            framing.decode_request(raw)
        return
    got = framing.decode_request(raw)
    assert (bytes(got) == want.data) if isinstance(got, memoryview) else (got == want)


def test_a_length_written_the_long_way_reads_the_same():
    raw = bytes((framing.DATA_TAG, 0x83, 0x80, 0x00)) + b"abc"
    assert bytes(framing.decode_request(raw)) == b"abc"


def parts(*sizes):
    return [framing.Part(f"t{index}", memoryview(bytearray(size))) for index, size in enumerate(sizes)]


def filled(*sizes):
    rng = np.random.default_rng(7)
    return [framing.Part(f"t{index}", memoryview(rng.bytes(size))) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(0,), (1,), (5, 0, 7), (framing.CHUNK_NBYTES,), (framing.CHUNK_NBYTES + 1, 3)])
def test_what_is_sent_arrives_in_its_place(sizes):
    source, target = filled(*sizes), parts(*sizes)
    sender, receiver = framing.Sender(source), framing.Receiver(target)
    for frame in sender.frames():
        assert 0 < frame.nbytes <= framing.CHUNK_NBYTES
        receiver.take(frame)
    receiver.finish(sender.trailer())
    assert [bytes(part.view) for part in target] == [bytes(part.view) for part in source]
    assert receiver.received == sum(sizes)


def test_a_typed_view_is_sent_as_its_bytes():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    target = parts(24)
    sender, receiver = framing.Sender([framing.Part("q", memoryview(values))]), framing.Receiver(target)
    for frame in sender.frames():
        receiver.take(frame)
    receiver.finish(sender.trailer())
    assert bytes(target[0].view) == values.tobytes()


def test_a_frame_across_a_tensor_s_end_is_refused():
    receiver = framing.Receiver(parts(4, 4))
    receiver.take(memoryview(b"abc"))
    with pytest.raises(errors.ByteCountMismatch, match="t0"):
        receiver.take(memoryview(b"de"))


def test_a_byte_too_many_is_refused():
    receiver = framing.Receiver(parts(4))
    receiver.take(memoryview(b"abcd"))
    with pytest.raises(errors.ByteCountMismatch, match="after all 4 bytes"):
        receiver.take(memoryview(b"e"))


def test_an_empty_frame_is_refused():
    with pytest.raises(errors.MessageInvalid):
        framing.Receiver(parts(4)).take(memoryview(b""))


def test_a_byte_too_few_is_truncated():
    receiver = framing.Receiver(parts(4))
    receiver.take(memoryview(b"abc"))
    with pytest.raises(errors.Truncated, match="3 of 4"):
        receiver.finish(pb.Trailer(total_bytes=4))


def test_a_trailer_that_counts_otherwise_is_refused():
    receiver = framing.Receiver(parts(4))
    receiver.take(memoryview(b"abcd"))
    with pytest.raises(errors.ByteCountMismatch):
        receiver.finish(pb.Trailer(total_bytes=5))


def test_a_flipped_bit_is_data_loss():
    source = filled(1000)
    sender, receiver = framing.Sender(source), framing.Receiver(parts(1000))
    for frame in sender.frames():
        wrong = bytearray(frame)
        wrong[500] ^= 0x10
        receiver.take(memoryview(wrong))
    with pytest.raises(errors.ChecksumMismatch):
        receiver.finish(sender.trailer())


def test_a_trailer_without_checksum_is_taken_on_trust_of_its_count():
    receiver = framing.Receiver(parts(4))
    receiver.take(memoryview(b"abcd"))
    receiver.finish(pb.Trailer(total_bytes=4))
