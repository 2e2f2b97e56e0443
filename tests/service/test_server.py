"""A request through the real server, unary and streamed, and what the server answers to wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from rig.server import Running
from rig.wire import (
    ALL_METHODS,
    STREAM_METHOD,
    Failure,
    assert_right,
    failing,
    frames_of,
    inline_gradients,
    role_number,
    sample,
    stream,
    streamed_gradients,
    unary_request,
)

from dqkv.server.identity import RIGHTS
from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs

MIB = 1 << 20
UNARY_METHODS = [f"/dqkv.v1.{service}/{name}" for service, methods in ALL_METHODS.items() for name in methods]


def backward(channel: grpc.Channel, request: pb.BackwardRequest, timeout_s: float = 30.0) -> pb.BackwardResponse:
    return stubs.AttentionGradientServiceStub(channel).Backward(request, timeout=timeout_s)


def refusal(channel: grpc.Channel, request: pb.BackwardRequest) -> Failure:
    with failing() as found:
        backward(channel, request)
    return found[0]


# ---- answers
def test_a_unary_request_is_answered_with_exact_gradients(channel: grpc.Channel) -> None:
    one = sample()
    answer = backward(channel, unary_request(one))
    assert_right(one, inline_gradients(one, answer))
    assert answer.report.arch == pb.ARCH_CPU
    assert answer.report.device == "cpu:0"
    assert answer.report.softmax_lse_recomputed
    assert 0 < answer.report.device_s <= answer.report.total_s


@pytest.mark.parametrize(("rows", "heads"), [(16, 1), (300, 8)], ids=["one_frame", "many_frames"])
def test_a_streamed_request_is_answered_with_exact_gradients(bulk: grpc.Channel, rows: int, heads: int) -> None:
    one = sample(rows, heads, head_dim=128)
    assert_right(one, streamed_gradients(one, stream(bulk, frames_of(one))))


def test_a_large_unary_request_is_answered_like_a_small_one(channel: grpc.Channel) -> None:
    one = sample(300, 8, head_dim=128)
    assert one.nbytes > 4 * MIB
    assert_right(one, inline_gradients(one, backward(channel, unary_request(one))))


def test_an_empty_problem_has_empty_gradients(channel: grpc.Channel, bulk: grpc.Channel) -> None:
    one = sample(0)
    assert all(tensor.data == b"" for tensor in backward(channel, unary_request(one)).gradients)
    assert streamed_gradients(one, stream(bulk, frames_of(one)))["dq"].shape == (1, 0, 2, 16)


def test_an_estimate_names_cost_device_and_transport(channel: grpc.Channel) -> None:
    stub = stubs.AttentionGradientServiceStub(channel)
    request = pb.EstimateRequest(problem=unary_request(sample(16, 2, 16)).problem)
    for tensor in request.problem.tensors:
        tensor.ClearField("source")
    answer = stub.Estimate(request, timeout=120)
    assert answer.pairs == 16 * 16 * 2
    assert answer.flops >= 2 * answer.pairs * 5 * 16
    assert answer.input_bytes == 5 * answer.gradient_bytes // 3
    assert (answer.device, answer.arch, answer.transport) == ("cpu:0", pb.ARCH_CPU, pb.TRANSPORT_UNARY)
    assert answer.device_s > 0
    for tensor in request.problem.tensors:
        tensor.shape[:] = [1, 1 << 16, 2, 16]
    assert stub.Estimate(request, timeout=120).transport == pb.TRANSPORT_STREAM


def test_capabilities_tell_limits_devices_and_ports(server: Running, channel: grpc.Channel) -> None:
    answer = stubs.CapabilityServiceStub(channel).GetCapabilities(pb.GetCapabilitiesRequest(), timeout=120)
    assert answer.stream_port == server.address["stream_port"]
    assert answer.limits.message_bytes == 64 * MIB
    assert answer.limits.inline_bytes == 4 * MIB
    assert answer.limits.head_dim == 256
    assert [(device.name, device.state) for device in answer.devices] == [("cpu:0", pb.DEVICE_STATE_OK)]
    assert pb.DATA_TYPE_BF16 in answer.devices[0].dtypes
    assert len(bytes.fromhex(answer.session)) == 32
    assert any("GPU" in note for note in answer.notes)


# ---- refusals
def _shorten(request: pb.BackwardRequest) -> None:
    request.problem.tensors[1].data = request.problem.tensors[1].data[:-4]


def _repeat(request: pb.BackwardRequest) -> None:
    request.problem.tensors.append(request.problem.tensors[0])


def _drop_out(request: pb.BackwardRequest) -> None:
    del request.problem.tensors[4]


def _unknown_dtype(request: pb.BackwardRequest) -> None:
    request.problem.tensors[0].dtype = 99


def _unknown_arch(request: pb.BackwardRequest) -> None:
    request.problem.options.arch = 99


def _gpu(request: pb.BackwardRequest) -> None:
    request.problem.options.arch = pb.ARCH_SM90


def _overflow(request: pb.BackwardRequest) -> None:
    request.problem.tensors[0].shape[:] = [1 << 40, 1 << 21, 1, 16]


def _answer_in_regions(request: pb.BackwardRequest) -> None:
    for role in ("dq", "dk", "dv"):
        request.problem.outputs.append(pb.Output(role=role_number(role), region=pb.RegionSlice(handle=bytes(16))))


def _huge(request: pb.BackwardRequest) -> None:
    for tensor in request.problem.tensors:
        tensor.shape[:] = [1, 1 << 30, 16, 128]
        tensor.region.handle = bytes(16)
    _answer_in_regions(request)


def _million_tensors(request: pb.BackwardRequest) -> None:
    request.problem.tensors.extend([pb.Tensor(role=pb.TENSOR_ROLE_Q)] * 1_000_000)


def _mark_streamed(request: pb.BackwardRequest) -> None:
    request.problem.tensors[0].stream.SetInParent()


def _flip(request: pb.BackwardRequest) -> None:
    data = bytearray(request.problem.tensors[2].data)
    data[100] ^= 1
    request.problem.tensors[2].data = bytes(data)


def _long_id(request: pb.BackwardRequest) -> None:
    request.request_id = "x" * 129


def _foreign_region(request: pb.BackwardRequest) -> None:
    request.problem.tensors[0].region.handle = bytes(16)


INVALID = grpc.StatusCode.INVALID_ARGUMENT
REFUSED: dict[str, tuple[Callable[[pb.BackwardRequest], None], grpc.StatusCode, str, str]] = {
    "bytes_that_do_not_fill_the_shape": (_shorten, INVALID, "BYTE_COUNT_MISMATCH", "k"),
    "a_tensor_twice": (_repeat, INVALID, "MESSAGE_INVALID", "q"),
    "neither_out_nor_delta": (_drop_out, INVALID, "OUT_OR_DELTA", "out"),
    "an_unknown_dtype": (_unknown_dtype, INVALID, "MESSAGE_INVALID", "q"),
    "an_unknown_arch": (_unknown_arch, INVALID, "MESSAGE_INVALID", "arch"),
    "an_arch_that_no_device_runs": (_gpu, grpc.StatusCode.UNIMPLEMENTED, "ARCH_UNAVAILABLE", "arch"),
    "a_shape_whose_product_overflows": (_overflow, INVALID, "SIZE_OVERFLOW", "shape"),
    "more_bytes_than_ever_fit": (_huge, INVALID, "TOO_LARGE", ""),
    "a_million_tensors": (_million_tensors, INVALID, "MESSAGE_INVALID", "tensors"),
    "a_streamed_tensor_in_a_unary_call": (_mark_streamed, INVALID, "MESSAGE_INVALID", "q"),
    "a_flipped_bit": (_flip, grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH", "checksum"),
    "a_request_id_that_is_too_long": (_long_id, INVALID, "MESSAGE_INVALID", "request_id"),
    "a_region_without_a_session": (
        _foreign_region,
        grpc.StatusCode.UNAUTHENTICATED,
        "UNAUTHENTICATED",
        "dqkv-session",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_unary_request_is_refused_with_its_reason(channel: grpc.Channel, server: Running, name: str) -> None:
    spoil, code, reason, field = REFUSED[name]
    request = unary_request(sample())
    spoil(request)
    before = server.metric("dqkv_requests_total", rpc="Backward", reason=reason)
    found = refusal(channel, request)
    assert (found.code, found.reason, found.field) == (code, reason, field)
    assert server.metric("dqkv_requests_total", rpc="Backward", reason=reason) == before + 1


def test_a_message_that_is_no_request_is_refused(channel: grpc.Channel) -> None:
    method = channel.unary_unary("/dqkv.v1.AttentionGradientService/Backward")
    with failing() as found:
        method(b"\x0a\xff\xff\xff\xff\x0f", timeout=120)
    assert (found[0].code, found[0].reason) == (INVALID, "MESSAGE_INVALID")


@pytest.mark.parametrize("method", UNARY_METHODS)
def test_bytes_that_are_no_message_are_refused_by_every_method(channel: grpc.Channel, method: str) -> None:
    with failing() as found:
        channel.unary_unary(method)(b"\xff\xff\xff", timeout=120)
    assert (found[0].code, found[0].reason) == (INVALID, "MESSAGE_INVALID")
    assert f"{method.rpartition('/')[2]}Request" in found[0].message


# ---- the wrong port
def test_the_stream_on_the_control_port_says_where_it_is_served(channel: grpc.Channel, server: Running) -> None:
    with failing() as found:
        list(stream(channel, frames_of(sample())))
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNIMPLEMENTED, "WRONG_PORT")
    assert f"port {server.address['stream_port']} " in found[0].message
    server.wait_for("request", rpc="BackwardStream", reason="WRONG_PORT")


@pytest.mark.parametrize("method", [method for method in RIGHTS if method != STREAM_METHOD])
@pytest.mark.parametrize("message", [b"", bytes(3 * MIB)], ids=["empty", "large"])
def test_every_method_on_the_stream_port_says_where_it_is_served(
    bulk: grpc.Channel, server: Running, method: str, message: bytes
) -> None:
    with failing() as found:
        bulk.unary_unary(method)(message, timeout=120)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNIMPLEMENTED, "WRONG_PORT")
    assert f"port {server.address['grpc_port']} " in found[0].message


@pytest.mark.parametrize("path", ["/dqkv.v1.AttentionGradientService/Forward", "/no.such.Service/Nothing", "/Nowhere"])
@pytest.mark.parametrize("port", ["channel", "bulk"])
def test_an_unknown_method_is_told_so_on_both_ports(
    request: pytest.FixtureRequest, server: Running, port: str, path: str
) -> None:
    channel: grpc.Channel = request.getfixturevalue(port)
    with failing() as found:
        channel.unary_unary(path)(b"", timeout=120)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNIMPLEMENTED, "METHOD_UNKNOWN")
    with failing() as found:
        list(channel.stream_stream(path)(iter([b"", b""]), timeout=120))
    assert found[0].reason == "METHOD_UNKNOWN"
    assert path.rpartition("/")[2] not in server.http("/metrics")[1].decode(), "a caller's words are no label"


def test_a_message_over_the_limit_is_refused(channel: grpc.Channel) -> None:
    method = channel.unary_unary("/dqkv.v1.AttentionGradientService/Backward")
    with failing() as found:
        method(bytes(65 * MIB), timeout=120)
    assert found[0].code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_answer_over_the_message_limit_is_refused_before_it_is_computed(channel: grpc.Channel) -> None:
    request = unary_request(sample(1, 1, 8), checksum=False)
    # Gradients of expanded inputs are as large as their shapes, whatever the inputs' bytes.
    for tensor in request.problem.tensors:
        tensor.shape[:] = [1, 64, 1 << 14, 8]
        tensor.region.handle = bytes(16)
    found = refusal(channel, request)
    assert (found.code, found.reason) == (INVALID, "TOO_LARGE")
    assert "BackwardStream" in found.message


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("port", ["control", "stream"])
def test_compressed_messages_are_refused(server: Running, port: str, algorithm: grpc.Compression) -> None:
    target = server.target if port == "control" else server.stream_target
    with grpc.insecure_channel(target, compression=algorithm) as channel:
        with failing() as found:
            if port == "control":
                channel.unary_unary("/dqkv.v1.AttentionGradientService/Backward")(bytes(32 * MIB), timeout=120)
            else:
                list(stream(channel, frames_of(sample(200, 8, 128))))
        assert found[0].code is grpc.StatusCode.UNIMPLEMENTED
        assert "compress" in found[0].message.lower() or "gzip" in found[0].message or "deflate" in found[0].message


def test_errors_never_show_paths_segments_or_tracebacks(channel: grpc.Channel, bulk: grpc.Channel) -> None:
    said = []
    for spoil, *_ in REFUSED.values():
        request = unary_request(sample())
        spoil(request)
        said.append(refusal(channel, request).message)
    request = pb.RegisterRegionRequest(nbytes=64, posix=pb.PosixSharedMemory(name="/dqkv-no-such-segment"))
    with failing() as found:
        stubs.RegionServiceStub(channel).RegisterRegion(request, timeout=120, metadata=[("dqkv-session", "00" * 32)])
    said.append(found[0].message)
    with failing() as found:
        list(stream(bulk, []))
    said.append(found[0].message)
    for text in said:
        assert text
        assert not any(mark in text for mark in ("/dev/", "/tmp", "/proc", "Traceback", 'File "', ".py"))


# ---- deadlines and cancellation
def test_a_deadline_that_cannot_be_kept_is_refused_at_once(channel: grpc.Channel) -> None:
    request = unary_request(sample(1, 1, 8), checksum=False)
    for tensor in request.problem.tensors:
        tensor.shape[:] = [1, 1 << 20, 1, 8]
        tensor.region.handle = bytes(16)
    _answer_in_regions(request)
    with failing() as found:
        backward(channel, request, timeout_s=5)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "WONT_FINISH")
