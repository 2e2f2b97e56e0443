"""Wire messages <-> values of the vocabulary; the only module that knows both.

Whatever is wrong with a message ends here as an InvalidRequest that names the field: nothing is guessed, an unknown
enum value is refused, and the byte count of every tensor follows from its dtype and shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import grpc
import xxhash
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from dqkv import errors
from dqkv.location import Inline, InRegion, InStream, Location
from dqkv.problem import GRADIENT_ROLES, INPUT_ROLES, Arch, Lengths, LseScope, Options, Problem, Report, Window
from dqkv.tensor import DType, Tensor, dense_strides
from dqkv.v1 import gradient_pb2 as pb
from dqkv.wire import HANDLE_NBYTES

DIMENSIONS_LIMIT = 4
SEQUENCES_LIMIT = 1 << 20
"""Of one request: whoever reads more integers than these one by one does nothing else for a while."""

_DTYPES = {pb.DATA_TYPE_BF16: DType.BF16, pb.DATA_TYPE_FP16: DType.FP16, pb.DATA_TYPE_FP32: DType.FP32}
_GRAD_DTYPES = {pb.DATA_TYPE_UNSPECIFIED: None, **_DTYPES}
_DTYPE_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_ARCHS = {
    pb.ARCH_UNSPECIFIED: Arch.AUTO,
    pb.ARCH_CPU: Arch.CPU,
    pb.ARCH_SM80: Arch.SM80,
    pb.ARCH_SM90: Arch.SM90,
    pb.ARCH_SM100: Arch.SM100,
}
_ARCH_NUMBERS = {arch: number for number, arch in _ARCHS.items()}
_SCOPES = {pb.LSE_SCOPE_UNSPECIFIED: LseScope.LOCAL, pb.LSE_SCOPE_GLOBAL: LseScope.GLOBAL}
_SCOPE_NUMBERS = {scope: number for number, scope in _SCOPES.items()}
_ROLES: dict[pb.TensorRole, str] = {
    cast("pb.TensorRole", pb.TensorRole.Value(f"TENSOR_ROLE_{role.upper()}")): role
    for role in (*INPUT_ROLES, *GRADIENT_ROLES)
}
_ROLE_NUMBERS: dict[str, pb.TensorRole] = {role: number for number, role in _ROLES.items()}


# ---- problems
def encode_problem(problem: Problem[Location], outputs: Mapping[str, Tensor[InRegion]] | None = None) -> pb.Problem:
    """A problem as a message; `outputs` are the gradients, by role, that the server writes into regions."""
    message = encode_outline(problem)
    for item, tensor in zip(message.tensors, problem.tensors.values(), strict=True):
        _add_source(item, tensor)
    for role, tensor in (outputs or {}).items():
        message.outputs.append(pb.Output(role=_ROLE_NUMBERS[role], region=_encode_slice(tensor, tensor.data)))
    return message


def encode_outline(problem: Problem[Any]) -> pb.Problem:
    """A problem as a message that does not say where its bytes are, which an estimate does not need."""
    options = problem.options
    return pb.Problem(
        tensors=[_encode_sizes(role, tensor) for role, tensor in problem.tensors.items()],
        queries=_encode_lengths(problem.queries),
        keys=_encode_lengths(problem.keys),
        options=pb.Options(
            softmax_scale=options.softmax_scale,
            window=pb.Window(
                left=options.window.left,
                right=options.window.right,
                sink_token_length=options.window.sink_token_length,
            ),
            softcap=options.softcap,
            deterministic=options.deterministic,
            grad_dtype=pb.DATA_TYPE_UNSPECIFIED if options.grad_dtype is None else _DTYPE_NUMBERS[options.grad_dtype],
            arch=_ARCH_NUMBERS[options.arch],
            lse_scope=_SCOPE_NUMBERS[options.lse_scope],
        ),
    )


def decode_problem(message: pb.Problem, *, need_bytes: bool = True) -> Problem[Location]:
    """The problem of a message; raises the InvalidRequest of the first thing that is wrong.

    need_bytes False takes tensors that say no source (an estimate), and gives them an empty inline one.
    """
    if len(message.tensors) > len(INPUT_ROLES):
        raise errors.MessageInvalid(
            f"the request has {len(message.tensors)} tensors, there are {len(INPUT_ROLES)} roles",
            field="tensors",
        )
    tensors: dict[str, Tensor[Location]] = {}
    for item in message.tensors:
        role = _ROLES.get(item.role)
        if role not in INPUT_ROLES:
            raise errors.MessageInvalid(f"tensors has role {item.role}, which is no input's", field="role")
        if role in tensors:
            raise errors.MessageInvalid(f"{role} was given twice", field=role)
        tensors[role] = _decode_tensor(role, item, need_bytes)
    for role in INPUT_ROLES[:4]:
        if role not in tensors:
            raise errors.MessageInvalid(f"{role} is missing", field=role)
    return Problem(
        **tensors,
        queries=_decode_lengths("q", message.queries),
        keys=_decode_lengths("k", message.keys),
        options=_decode_options(message.options),
    )


def roles(message: pb.Problem) -> tuple[str, ...]:
    """The roles of the tensors in the message's order, which is the order of their bytes; after decode_problem."""
    return tuple(_ROLES[item.role] for item in message.tensors)


def decode_outputs(message: pb.Problem, problem: Problem[Any]) -> dict[str, Tensor[InRegion]]:
    """The gradients that go to regions, by role, with their dtype and shape. Raises MessageInvalid."""
    wanted = problem.gradients
    outputs: dict[str, Tensor[InRegion]] = {}
    for item in message.outputs:
        role = _ROLES.get(item.role)
        if role not in wanted:
            raise errors.MessageInvalid(f"outputs has role {item.role}, which this problem does not give", field="role")
        if role in outputs:
            raise errors.MessageInvalid(f"output {role} was given twice", field=role)
        outputs[role] = _decode_slice(role, wanted[role].dtype, wanted[role].shape, item.region)
    return outputs


# ---- tensors
def encode_tensor(role: str, tensor: Tensor[Location]) -> pb.Tensor:
    """One tensor as a message, with its bytes where they are inline."""
    message = _encode_sizes(role, tensor)
    _add_source(message, tensor)
    return message


def decode_gradients(messages: Iterable[pb.Tensor]) -> dict[str, Tensor[Location]]:
    """The gradients of an answer, by role. Raises MessageInvalid for what is no gradient."""
    gradients: dict[str, Tensor[Location]] = {}
    for item in messages:
        role = _ROLES.get(item.role)
        if role not in GRADIENT_ROLES or role in gradients:
            raise errors.MessageInvalid(f"the answer has role {item.role}, unknown or twice", field="role")
        gradients[role] = _decode_tensor(role, item, need_bytes=True)
    return gradients


def inline_checksum(tensors: Iterable[Tensor[Location]]) -> int:
    """xxh3-64 of the inline tensors' bytes, one after the other."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if isinstance(tensor.data, Inline):
            digest.update(tensor.data.view)
    return digest.intdigest()


def _encode_sizes(role: str, tensor: Tensor[Any]) -> pb.Tensor:
    return pb.Tensor(role=_ROLE_NUMBERS[role], dtype=_DTYPE_NUMBERS[tensor.dtype], shape=tensor.shape)


def _add_source(message: pb.Tensor, tensor: Tensor[Location]) -> None:
    match tensor.data:
        case Inline(view):
            message.data = bytes(view)
        case InStream():
            message.stream.SetInParent()
        case InRegion() as where:
            message.region.CopyFrom(_encode_slice(tensor, where))


def _decode_tensor(role: str, message: pb.Tensor, need_bytes: bool) -> Tensor[Location]:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise errors.MessageInvalid(f"{role} has dtype {message.dtype}, which this server does not know", field=role)
    if len(message.shape) > DIMENSIONS_LIMIT:
        raise errors.ShapeMismatch(
            f"{role} has {len(message.shape)} dimensions, the limit is {DIMENSIONS_LIMIT}", field=role
        )
    shape = tuple(message.shape)
    source = message.WhichOneof("source")
    if source == "region":
        return _decode_slice(role, dtype, shape, message.region)
    if source == "stream":
        return Tensor.dense(dtype, shape, InStream())
    if source is None and need_bytes:
        raise errors.MessageInvalid(f"{role} does not say where its bytes are", field=role)
    tensor = Tensor.dense(dtype, shape, Inline(memoryview(message.data)))
    if need_bytes and len(message.data) != tensor.nbytes:
        raise errors.ByteCountMismatch(
            f"{role} has {len(message.data)} bytes, shape {shape} in {dtype} has {tensor.nbytes}", field=role
        )
    return tensor


def _encode_slice(tensor: Tensor[Any], where: InRegion) -> pb.RegionSlice:
    strides = () if tensor.is_dense else tensor.strides
    return pb.RegionSlice(handle=where.handle, byte_offset=where.byte_offset, strides=strides)


def _decode_slice(role: str, dtype: DType, shape: tuple[int, ...], message: pb.RegionSlice) -> Tensor[InRegion]:
    if len(message.handle) != HANDLE_NBYTES:
        raise errors.MessageInvalid(
            f"{role} has a region handle of {len(message.handle)} bytes, must have {HANDLE_NBYTES}",
            field=role,
        )
    if message.byte_offset < 0 or message.byte_offset % dtype.itemsize:
        raise errors.RegionBounds(
            f"{role} has byte_offset {message.byte_offset}, must be a multiple of {dtype.itemsize} and not negative",
            field=role,
        )
    if len(message.strides) not in (0, len(shape)):
        raise errors.ShapeMismatch(
            f"{role} has {len(message.strides)} strides in its region for {len(shape)} dimensions, must be as many",
            field=role,
        )
    strides = tuple(message.strides) or dense_strides(shape)
    if shape and shape[-1] > 1 and strides[-1] != 1:
        raise errors.ShapeMismatch(f"{role} has strides {strides} in its region, the last must be 1", field=role)
    return Tensor(dtype=dtype, shape=shape, strides=strides, data=InRegion(bytes(message.handle), message.byte_offset))


# ---- lengths and options
def _encode_lengths(lengths: Lengths) -> pb.Lengths:
    return pb.Lengths(cu_seqlens=lengths.cu_seqlens, seqused=lengths.seqused, max_seqlen=lengths.max_seqlen)


def _decode_lengths(side: str, message: pb.Lengths) -> Lengths:
    for name, count, limit, kind in (
        ("cu_seqlens", len(message.cu_seqlens), SEQUENCES_LIMIT + 1, errors.OffsetsInvalid),
        ("seqused", len(message.seqused), SEQUENCES_LIMIT, errors.SequsedInvalid),
    ):
        if count > limit:
            raise kind(f"{name}_{side} has {count} entries, the limit is {limit}", field=f"{name}_{side}")
    return Lengths(
        cu_seqlens=tuple(message.cu_seqlens) or None,
        seqused=tuple(message.seqused) or None,
        max_seqlen=message.max_seqlen if message.HasField("max_seqlen") else None,
    )


def _decode_options(message: pb.Options) -> Options:
    for name, number, known in (
        ("grad_dtype", message.grad_dtype, _GRAD_DTYPES),
        ("arch", message.arch, _ARCHS),
        ("lse_scope", message.lse_scope, _SCOPES),
    ):
        if number not in known:
            raise errors.MessageInvalid(f"{name} is {number}, which this server does not know", field=name)
    window = message.window
    right = window.right if window.HasField("right") else None
    return Options(
        softmax_scale=message.softmax_scale if message.HasField("softmax_scale") else None,
        window=Window(
            left=window.left if window.HasField("left") else None,
            right=0 if window.causal else right,
            sink_token_length=window.sink_token_length,
        ),
        softcap=message.softcap,
        deterministic=message.deterministic,
        grad_dtype=_GRAD_DTYPES[message.grad_dtype],
        arch=_ARCHS[message.arch],
        lse_scope=_SCOPES[message.lse_scope],
    )


# ---- reports
def encode_report(report: Report) -> pb.Report:
    """How an answer was made, as a message."""
    return pb.Report(
        arch=_ARCH_NUMBERS[Arch(report.arch)],
        kernel=report.kernel,
        device=report.device,
        softmax_lse_recomputed=report.softmax_lse_recomputed,
        queued_s=report.queued_s,
        transfer_s=report.transfer_s,
        device_s=report.device_s,
        total_s=report.total_s,
    )


def decode_report(message: pb.Report) -> Report:
    """How an answer was made; an arch of a newer server reads as its number."""
    arch = _ARCHS.get(message.arch)
    return Report(
        arch=str(message.arch) if arch is None else arch.value,
        kernel=message.kernel,
        device=message.device,
        softmax_lse_recomputed=message.softmax_lse_recomputed,
        queued_s=message.queued_s,
        transfer_s=message.transfer_s,
        device_s=message.device_s,
        total_s=message.total_s,
    )


def encode_arch(arch: Arch) -> pb.Arch:
    """An arch as its number on the wire."""
    return _ARCH_NUMBERS[arch]


def encode_dtype(dtype: DType) -> pb.DataType:
    """A dtype as its number on the wire."""
    return _DTYPE_NUMBERS[dtype]


# ---- errors
def encode_error(error: errors.DqkvError) -> status_pb2.Status:
    """An error as google.rpc.Status with ErrorInfo (reason, field), and RetryInfo where a delay is known."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=errors.ERROR_DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    status = status_pb2.Status(code=error.status.grpc_code, message=error.message)
    details: list[Any] = [info]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(retry)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def decode_error(status: status_pb2.Status | None, code: grpc.StatusCode, message: str) -> errors.DqkvError:
    """The typed error of a failed call: by its reason where the server gave one, else by what gRPC itself says."""
    info, delay = error_details_pb2.ErrorInfo(), None
    for detail in status.details if status else ():
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            delay = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            detail.Unpack(info)
    if info.domain == errors.ERROR_DOMAIN:
        return errors.from_reason(info.reason, message, field=info.metadata.get("field", ""), retry_after_s=delay)
    kind = _TRANSPORT_ERRORS.get(code, errors.TransportError)
    return kind(f"{code.name}: {message}")


_TRANSPORT_ERRORS: dict[grpc.StatusCode, type[errors.DqkvError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.WontFinish,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.TooLarge,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.RightMissing,
}
