"""Raw requests: small problems with their exact gradients, as messages and as frames."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import xxhash
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from numpy.typing import NDArray

from dqkv import framing
from dqkv.v1 import gradient_pb2 as pb

ROLES = ("q", "k", "v", "dout", "out")
STREAM_METHOD = "/dqkv.v1.AttentionGradientService/BackwardStream"
ALL_METHODS = {
    "AttentionGradientService": {"Backward": pb.BackwardRequest, "Estimate": pb.EstimateRequest},
    "RegionService": {
        "RegisterRegion": pb.RegisterRegionRequest,
        "RenewRegion": pb.RenewRegionRequest,
        "ListRegions": pb.ListRegionsRequest,
        "ReleaseRegion": pb.ReleaseRegionRequest,
        "ProbeRegion": pb.ProbeRegionRequest,
    },
    "CapabilityService": {"GetCapabilities": pb.GetCapabilitiesRequest},
}

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """A dense problem in fp32, (batch_size, rows, heads, head_dim), and its gradients in float64."""

    inputs: dict[str, Array]
    gradients: dict[str, NDArray[np.float64]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


def sample(rows: int = 16, heads: int = 2, head_dim: int = 16, *, seed: int = 0) -> Sample:
    """Random inputs and what attention's backward makes of them."""
    random = np.random.default_rng(seed)
    q, k, v, dout = (random.standard_normal((1, rows, heads, head_dim)).astype(np.float32) for _ in range(4))
    qd, kd, vd, dod = (array.astype(np.float64).transpose(0, 2, 1, 3) for array in (q, k, v, dout))
    scale = head_dim**-0.5
    s = qd @ kd.swapaxes(-1, -2) * scale
    p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    p /= p.sum(-1, keepdims=True)
    out = p @ vd
    delta = (dod * out).sum(-1, keepdims=True)
    ds = p * (dod @ vd.swapaxes(-1, -2) - delta) * scale
    found = {"dq": ds @ kd, "dk": ds.swapaxes(-1, -2) @ qd, "dv": p.swapaxes(-1, -2) @ dod}
    inputs = dict(zip(ROLES, (q, k, v, dout, out.transpose(0, 2, 1, 3).astype(np.float32)), strict=True))
    return Sample(inputs, {role: array.transpose(0, 2, 1, 3) for role, array in found.items()})


def endless() -> Sample:
    """Minutes of work in a message of 40 MiB: it is in flight until a test gives it up, and never waited for."""
    rows = np.zeros((1, 1 << 18, 1, 8), np.float32)
    return Sample(dict.fromkeys(ROLES, rows), {})


def role_number(role: str) -> Any:
    return pb.TensorRole.Value(f"TENSOR_ROLE_{role.upper()}")


def problem_of(one: Sample, *, streamed: bool = False) -> pb.Problem:
    """The problem as a message, its bytes inline or to come in frames."""
    tensors = []
    for role, array in one.inputs.items():
        tensor = pb.Tensor(role=role_number(role), dtype=pb.DATA_TYPE_FP32, shape=array.shape)
        if streamed:
            tensor.stream.SetInParent()
        else:
            tensor.data = array.tobytes()
        tensors.append(tensor)
    return pb.Problem(tensors=tensors)


def unary_request(one: Sample, *, checksum: bool = True) -> pb.BackwardRequest:
    request = pb.BackwardRequest(problem=problem_of(one))
    if checksum:
        request.checksum = xxhash.xxh3_64(b"".join(array.tobytes() for array in one.inputs.values())).intdigest()
    return request


def header_of(one: Sample, **given: Any) -> pb.BackwardStreamRequest:
    fields = {"problem": problem_of(one, streamed=True), "total_bytes": one.nbytes, **given}
    return pb.BackwardStreamRequest(header=pb.BackwardStreamRequest.Header(**fields))


def frames_of(one: Sample) -> Iterator[framing.RequestFrame]:
    """A whole stream: header, data, trailer."""
    sender = framing.Sender([framing.Part(role, memoryview(array)) for role, array in one.inputs.items()])
    yield header_of(one)
    yield from sender.frames()
    yield pb.BackwardStreamRequest(trailer=sender.trailer())


def stream(channel: grpc.Channel, frames: Iterable[Any], *, timeout_s: float = 120.0, metadata: Any = ()) -> Any:
    """Opens a stream; iterating gives the answer's frames."""
    method = channel.stream_stream(
        STREAM_METHOD, request_serializer=framing.encode_frame, response_deserializer=framing.decode_response
    )
    return method(iter(frames), timeout=timeout_s, metadata=metadata)


def streamed_gradients(one: Sample, answer: Iterable[Any]) -> dict[str, Array]:
    """The gradients of a streamed answer, checked as a client checks them."""
    frames = iter(answer)
    header = next(frames).header
    assert [tensor.role for tensor in header.gradients] == [role_number(role) for role in one.gradients]
    found = {role: np.full(array.shape, np.nan, np.float32) for role, array in one.gradients.items()}
    receiver = framing.Receiver([framing.Part(role, memoryview(array)) for role, array in found.items()])
    for frame in frames:
        if isinstance(frame, memoryview):
            receiver.take(frame)
        else:
            receiver.finish(frame.trailer)
    return found


def inline_gradients(one: Sample, answer: pb.BackwardResponse) -> dict[str, Array]:
    """The gradients of a unary answer."""
    assert answer.checksum == xxhash.xxh3_64(b"".join(tensor.data for tensor in answer.gradients)).intdigest()
    names = {role_number(role): role for role in one.gradients}
    return {
        names[tensor.role]: np.frombuffer(tensor.data, np.float32).reshape(tuple(tensor.shape))
        for tensor in answer.gradients
    }


def assert_right(one: Sample, found: dict[str, Array]) -> None:
    assert found.keys() == one.gradients.keys()
    for role, want in one.gradients.items():
        np.testing.assert_allclose(found[role], want, rtol=0, atol=2e-5 * np.abs(want).max(initial=0.0), err_msg=role)


@dataclass(frozen=True)
class Failure:
    """How a call failed: gRPC's code, the reason and field of its ErrorInfo, and the words."""

    code: grpc.StatusCode
    reason: str
    field: str
    message: str
    retry_after_s: float | None = None


@contextlib.contextmanager
def failing() -> Iterator[list[Failure]]:
    """The block has to fail with an RpcError; the list then holds what it said."""
    found: list[Failure] = []
    try:
        yield found
    except grpc.RpcError as error:
        found.append(failure_of(error))
    else:
        raise AssertionError("the call did not fail")


def failure_of(error: Any) -> Failure:
    status = rpc_status.from_call(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    delay = None
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Unpack(retry):
            delay = retry.retry_delay.ToNanoseconds() / 1e9
    return Failure(error.code(), info.reason, info.metadata.get("field", ""), error.details(), delay)
