"""BackwardStream frame by frame: what is out of turn, what is missing, and callers that go away."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rig.server import Running, eventually, open_channel, running
from rig.upload import HALF_SENT
from rig.wire import (
    Failure,
    Sample,
    assert_right,
    failing,
    frames_of,
    header_of,
    inline_gradients,
    sample,
    stream,
    streamed_gradients,
    unary_request,
)

from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs

TESTS = Path(__file__).parents[1]
ONE = sample(32, 2, 32)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
LOSS = grpc.StatusCode.DATA_LOSS


def whole(one: Sample = ONE) -> list[Any]:
    return list(frames_of(one))


def refusal(channel: grpc.Channel, frames: list[Any]) -> Failure:
    with failing() as found:
        list(stream(channel, frames))
    return found[0]


def _without_header() -> list[Any]:
    return whole()[1:]


def _two_headers() -> list[Any]:
    return [whole()[0], *whole()]


def _wrong_total() -> list[Any]:
    return [header_of(ONE, total_bytes=ONE.nbytes - 4), *whole()[1:]]


def _declared_terabyte() -> list[Any]:
    return [header_of(ONE, total_bytes=1 << 40), *whole()[1:]]


def _without_trailer() -> list[Any]:
    return whole()[:-1]


def _without_last_tensor() -> list[Any]:
    frames = whole()
    return [*frames[:-2], frames[-1]]


def _nothing_but_header() -> list[Any]:
    return whole()[:1]


def _across_tensors() -> list[Any]:
    frames = whole()
    joined = memoryview(b"".join((bytes(frames[1])[:-8], bytes(frames[1])[-8:], bytes(frames[2])[:8])))
    return [frames[0], joined, *frames[2:]]


def _a_byte_too_many() -> list[Any]:
    frames = whole()
    return [*frames[:-1], memoryview(b"x"), frames[-1]]


def _empty_frame() -> list[Any]:
    frames = whole()
    return [frames[0], memoryview(b""), *frames[1:]]


def _frame_after_trailer() -> list[Any]:
    return [*whole(), memoryview(b"x")]


def _second_trailer() -> list[Any]:
    return [*whole(), whole()[-1]]


def _trailer_first() -> list[Any]:
    frames = whole()
    return [frames[0], frames[-1], *frames[1:-1]]


def _wrong_trailer_total() -> list[Any]:
    trailer = pb.Trailer(total_bytes=ONE.nbytes + 1)
    return [*whole()[:-1], pb.BackwardStreamRequest(trailer=trailer)]


def _wrong_checksum() -> list[Any]:
    frames = whole()
    spoiled = bytearray(frames[1])
    spoiled[7] ^= 1
    return [frames[0], memoryview(bytes(spoiled)), *frames[2:]]


def _empty_oneof() -> list[Any]:
    frames = whole()
    return [frames[0], pb.BackwardStreamRequest(), *frames[1:]]


def _nothing() -> list[Any]:
    return []


OUT_OF_TURN: dict[str, tuple[Callable[[], list[Any]], grpc.StatusCode, str]] = {
    "no_frame_at_all": (_nothing, LOSS, "TRUNCATED"),
    "data_before_the_header": (_without_header, INVALID, "MESSAGE_INVALID"),
    "a_second_header": (_two_headers, INVALID, "MESSAGE_INVALID"),
    "a_header_whose_total_is_not_the_tensors": (_wrong_total, INVALID, "BYTE_COUNT_MISMATCH"),
    "a_header_that_declares_a_terabyte": (_declared_terabyte, INVALID, "BYTE_COUNT_MISMATCH"),
    "no_trailer": (_without_trailer, LOSS, "TRUNCATED"),
    "a_tensor_missing": (_without_last_tensor, LOSS, "TRUNCATED"),
    "a_header_alone": (_nothing_but_header, LOSS, "TRUNCATED"),
    "a_frame_across_two_tensors": (_across_tensors, INVALID, "BYTE_COUNT_MISMATCH"),
    "a_byte_too_many": (_a_byte_too_many, INVALID, "BYTE_COUNT_MISMATCH"),
    "an_empty_frame": (_empty_frame, INVALID, "MESSAGE_INVALID"),
    "data_after_the_trailer": (_frame_after_trailer, INVALID, "MESSAGE_INVALID"),
    "a_second_trailer": (_second_trailer, INVALID, "MESSAGE_INVALID"),
    "the_trailer_before_the_data": (_trailer_first, LOSS, "TRUNCATED"),
    "a_trailer_with_another_total": (_wrong_trailer_total, INVALID, "BYTE_COUNT_MISMATCH"),
    "a_flipped_bit": (_wrong_checksum, LOSS, "CHECKSUM_MISMATCH"),
    "a_frame_that_is_nothing": (_empty_oneof, INVALID, "MESSAGE_INVALID"),
}


@pytest.mark.parametrize("name", OUT_OF_TURN)
def test_frames_out_of_turn_are_refused_and_nothing_is_launched(bulk: grpc.Channel, server: Running, name: str) -> None:
    build, code, reason = OUT_OF_TURN[name]
    launched = server.metric("dqkv_pairs_total")
    found = refusal(bulk, build())
    assert (found.code, found.reason) == (code, reason), found.message
    eventually(server.is_quiet)
    assert server.metric("dqkv_pairs_total") == launched
    assert server.metric("dqkv_staging_pool_bytes", state="used") == 0


def test_a_frame_that_is_no_message_is_refused(bulk: grpc.Channel) -> None:
    method = bulk.stream_stream("/dqkv.v1.AttentionGradientService/BackwardStream")
    with failing() as found:
        list(method(iter([b"\x0a\xff\xff\xff\xff\x0f"]), timeout=120))
    assert (found[0].code, found[0].reason) == (INVALID, "MESSAGE_INVALID")


def test_frames_written_by_protobuf_are_taken_like_those_written_by_hand(bulk: grpc.Channel) -> None:
    method = bulk.stream_stream(
        "/dqkv.v1.AttentionGradientService/BackwardStream",
        request_serializer=pb.BackwardStreamRequest.SerializeToString,
        response_deserializer=pb.BackwardStreamResponse.FromString,
    )
    frames = [pb.BackwardStreamRequest(data=bytes(f)) if isinstance(f, memoryview) else f for f in whole()]
    answer = [memoryview(f.data) if f.WhichOneof("frame") == "data" else f for f in method(iter(frames), timeout=120)]
    assert_right(ONE, streamed_gradients(ONE, answer))


def test_many_streams_of_one_caller_are_answered_each_with_its_own(bulk: grpc.Channel) -> None:
    samples = [sample(24, 2, 16, seed=seed) for seed in range(12)]
    answers = [stream(bulk, frames_of(one)) for one in samples]
    for one, answer in zip(samples, answers, strict=True):
        assert_right(one, streamed_gradients(one, answer))


# ---- callers that go away
def test_a_client_killed_while_it_uploads_launches_nothing_and_leaks_nothing(server: Running) -> None:
    launched = server.metric("dqkv_pairs_total")
    aborted = server.metric("dqkv_stream_aborts_total")
    kills = 5
    for _ in range(kills):
        command = [sys.executable, "-m", "rig.upload", server.stream_target, "1024"]
        with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline().strip() == HALF_SENT
            eventually(lambda: server.metric("dqkv_staging_pool_bytes", state="used") > 0)
            client.kill()
        eventually(lambda: server.metric("dqkv_staging_pool_bytes", state="used") == 0)
    eventually(server.is_quiet)
    assert server.metric("dqkv_stream_aborts_total") == aborted + kills
    assert server.metric("dqkv_pairs_total") == launched


def test_a_client_that_cancels_while_it_uploads_leaks_nothing(bulk: grpc.Channel, server: Running) -> None:
    one, hold = sample(64, 2, 32), threading.Event()

    def frames() -> Iterator[Any]:
        yield from itertools.islice(frames_of(one), 3)
        hold.wait(600)

    # gRPC sometimes shows a cancelled upload as one that ended: "cancel" or "truncated".
    before = server.metric("dqkv_stream_aborts_total")
    call = stream(bulk, frames())
    eventually(lambda: server.metric("dqkv_staging_pool_bytes", state="used") > 0)
    call.cancel()
    hold.set()
    eventually(lambda: server.metric("dqkv_staging_pool_bytes", state="used") == 0)
    eventually(lambda: server.metric("dqkv_stream_aborts_total") == before + 1)


def test_an_idle_stream_is_ended_and_counted() -> None:
    with (
        running(stream_idle_s="0.6") as server,
        open_channel(server.stream_target) as channel,
        open_channel(server.target) as control,
    ):
        hold = threading.Event()

        def frames() -> Iterator[Any]:
            yield from itertools.islice(frames_of(ONE), 2)
            hold.wait(600)

        began = time.monotonic()
        with failing() as found:
            list(stream(channel, frames()))
        hold.set()
        assert found[0].code is grpc.StatusCode.CANCELLED
        assert found[0].reason == "STREAM_IDLE"
        assert "0.6 s" in found[0].message
        assert "DQKV_STREAM_IDLE_S" in found[0].message
        assert time.monotonic() - began > 0.5
        eventually(lambda: server.metric("dqkv_stream_aborts_total", cause="idle") == 1)
        eventually(lambda: server.metric("dqkv_staging_pool_bytes", state="used") == 0)
        # In one message, which is on time on a machine that stands still for a moment, too.
        answer = stubs.AttentionGradientServiceStub(control).Backward(unary_request(ONE), timeout=120)
        assert_right(ONE, inline_gradients(ONE, answer))


def test_a_client_that_does_not_read_its_answer_loses_the_stream() -> None:
    with running(stream_idle_s="0.6") as server:
        one = sample(300, 16, 128)
        # Small windows that stay small, so that the answer does not fit into what lies between both.
        windows = {"grpc.http2.lookahead_bytes": 65536, "grpc.http2.bdp_probe": 0}
        with open_channel(server.stream_target, **windows) as channel:
            call = stream(channel, frames_of(one), timeout_s=120)
            eventually(lambda: server.metric("dqkv_stream_aborts_total", cause="idle") == 1)
            eventually(lambda: server.metric("dqkv_staging_pool_bytes", state="used") == 0)
            eventually(lambda: server.metric("dqkv_requests_total", rpc="BackwardStream", reason="STREAM_IDLE") == 1)
            with failing() as found:
                list(call)
            assert found[0].code is grpc.StatusCode.CANCELLED
        assert server.stop() == 0
        (said,) = (event for event in server.events if event.get("reason") == "STREAM_IDLE")
        assert (said["code"], said["level"]) == ("CANCELLED", "info")
        assert "0.6 s" in said["message"]


def test_nothing_is_read_before_admission() -> None:
    """A request that is refused costs no more than what flow control lets through."""
    with running(request_bytes="1000000") as server, open_channel(server.stream_target) as channel:
        sent = itertools.count()
        one = sample(512, 8, 128)

        def frames() -> Iterator[Any]:
            for frame in frames_of(one):
                next(sent)
                yield frame

        with failing() as found:
            list(stream(channel, frames()))
        assert found[0].reason == "TOO_LARGE"
        assert server.metric("dqkv_staging_pool_bytes", state="total") == 0
