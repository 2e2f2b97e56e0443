"""Messages and values say the same thing, and a message that says nothing valid is refused by field."""

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from dqkv import codec, errors
from dqkv.location import Inline, InRegion, InStream
from dqkv.problem import Arch, Lengths, LseScope, Options, Problem, Report, Window
from dqkv.tensor import DType, Tensor
from dqkv.v1 import gradient_pb2 as pb

pytestmark = pytest.mark.numpy_only

HANDLE = bytes(range(16))


def inline(*shape, dtype=DType.BF16):
    count = int(np.prod(shape)) * dtype.itemsize
    return Tensor.dense(dtype, shape, Inline(memoryview(np.random.default_rng(count).bytes(count))))


def streamed(*shape, dtype=DType.BF16):
    return Tensor.dense(dtype, shape, InStream())


def in_region(*shape, strides=None, byte_offset=64):
    dense = Tensor.dense(DType.BF16, shape, InRegion(HANDLE, byte_offset))
    return Tensor(dtype=dense.dtype, shape=shape, strides=strides or dense.strides, data=dense.data)


def problem(**changes):
    fields = {
        "q": streamed(2, 5, 4, 16),
        "k": inline(2, 7, 2, 16),
        "v": in_region(2, 7, 2, 24, strides=(400, 50, 24, 1)),
        "dout": in_region(2, 5, 4, 24, strides=(0, 0, 0, 1)),
        "delta": inline(2, 4, 5, dtype=DType.FP32),
        "softmax_lse": inline(2, 4, 5, dtype=DType.FP32),
        "dlse": streamed(2, 4, 5, dtype=DType.FP32),
        "sink": inline(4, dtype=DType.FP32),
    }
    return Problem(**{**fields, **changes})


OPTIONS = [
    Options(),
    Options(softmax_scale=0.0, softcap=30.0, deterministic=True, grad_dtype=DType.FP32, arch=Arch.CPU),
    Options(window=Window(left=0, right=0, sink_token_length=4), lse_scope=LseScope.GLOBAL, arch=Arch.SM100),
    Options(window=Window(left=-3), softmax_scale=-0.125, grad_dtype=DType.BF16),
    Options(window=Window(right=2**40)),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_problem_reads_back_as_it_was_written(options):
    value = problem(options=options, queries=Lengths(seqused=(5, 0), max_seqlen=5))
    outputs = {"dk": in_region(2, 7, 2, 16, byte_offset=4096)}
    message = pb.Problem.FromString(codec.encode_problem(value, outputs).SerializeToString())
    assert codec.decode_problem(message) == value
    if options.grad_dtype is not DType.FP32:
        assert codec.decode_outputs(message, value) == outputs


def test_causal_is_right_0_whatever_right_says():
    message = codec.encode_problem(problem())
    message.options.window.causal = True
    message.options.window.right = 5
    assert codec.decode_problem(message).options.window.right == 0


def test_an_estimate_needs_no_bytes():
    message = codec.encode_problem(problem())
    for tensor in message.tensors:
        tensor.ClearField("source")
    assert codec.decode_problem(message, need_bytes=False).shape == problem().shape
    with pytest.raises(errors.MessageInvalid, match="where its bytes are"):
        codec.decode_problem(message)


def twice(message):
    message.tensors.append(message.tensors[0])


def crowd(message):
    message.tensors.extend([message.tensors[0]] * 1_000_000)


def without_v(message):
    del message.tensors[2]


BROKEN = {
    "a tensor twice": (twice, errors.MessageInvalid),
    "a million tensors": (crowd, errors.MessageInvalid),
    "no v": (without_v, errors.MessageInvalid),
    "an unknown role": (lambda m: setattr(m.tensors[0], "role", 99), errors.MessageInvalid),
    "a gradient among the inputs": (lambda m: setattr(m.tensors[0], "role", pb.TENSOR_ROLE_DQ), errors.MessageInvalid),
    "an unknown dtype": (lambda m: setattr(m.tensors[0], "dtype", 99), errors.MessageInvalid),
    "no dtype": (lambda m: setattr(m.tensors[0], "dtype", 0), errors.MessageInvalid),
    "an unknown arch": (lambda m: setattr(m.options, "arch", 99), errors.MessageInvalid),
    "an unknown lse_scope": (lambda m: setattr(m.options, "lse_scope", 99), errors.MessageInvalid),
    "an unknown grad_dtype": (lambda m: setattr(m.options, "grad_dtype", 99), errors.MessageInvalid),
    "a byte too few": (lambda m: setattr(m.tensors[1], "data", m.tensors[1].data[:-1]), errors.ByteCountMismatch),
    "a byte too many": (lambda m: setattr(m.tensors[1], "data", m.tensors[1].data + b"x"), errors.ByteCountMismatch),
    "a thousand dimensions": (lambda m: m.tensors[0].shape.extend([1] * 1000), errors.ShapeMismatch),
    "a negative size": (lambda m: m.tensors[0].shape.__setitem__(1, -5), errors.SizeOverflow),
    "a size that overflows": (lambda m: m.tensors[0].shape.__setitem__(1, 2**62), errors.SizeOverflow),
    "a product that overflows": (
        lambda m: [m.tensors[0].shape.__setitem__(index, 2**31) for index in range(4)], errors.SizeOverflow,
    ),
    "a short handle": (lambda m: setattr(m.tensors[2].region, "handle", b"abc"), errors.MessageInvalid),
    "an odd offset": (lambda m: setattr(m.tensors[2].region, "byte_offset", 3), errors.RegionBounds),
    "a negative offset": (lambda m: setattr(m.tensors[2].region, "byte_offset", -2), errors.RegionBounds),
    "a negative stride": (lambda m: m.tensors[2].region.strides.__setitem__(0, -1), errors.SizeOverflow),
    "a stride that overflows": (lambda m: m.tensors[2].region.strides.__setitem__(0, 2**61), errors.SizeOverflow),
    "three strides for four dimensions": (lambda m: m.tensors[2].region.strides.pop(), errors.ShapeMismatch),
    "a last stride of 2": (lambda m: m.tensors[2].region.strides.__setitem__(3, 2), errors.ShapeMismatch),
    "a scale that is no number": (
        lambda m: setattr(m.options, "softmax_scale", float("nan")), errors.OptionInvalid,
    ),
    "negative sink tokens": (lambda m: setattr(m.options.window, "sink_token_length", -1), errors.OptionInvalid),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_message_is_refused(name):
    change, kind = BROKEN[name]
    message = codec.encode_problem(problem())
    change(message)
    with pytest.raises(kind) as caught:
        codec.decode_problem(message)
    assert caught.value.field


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        ([pb.Output(role=pb.TENSOR_ROLE_Q)], errors.MessageInvalid),
        ([pb.Output(role=77)], errors.MessageInvalid),
        ([pb.Output(role=pb.TENSOR_ROLE_DQ, region=pb.RegionSlice(handle=HANDLE))] * 2, errors.MessageInvalid),
        ([pb.Output(role=pb.TENSOR_ROLE_DQ)], errors.MessageInvalid),
    ],
)
def test_a_broken_output_is_refused(outputs, kind):
    message = codec.encode_problem(problem())
    message.outputs.extend(outputs)
    with pytest.raises(kind):
        codec.decode_outputs(message, problem())


def test_dsink_is_no_output_without_a_sink():
    value = problem(sink=None)
    message = codec.encode_problem(value)
    message.outputs.append(pb.Output(role=pb.TENSOR_ROLE_DSINK, region=pb.RegionSlice(handle=HANDLE)))
    with pytest.raises(errors.MessageInvalid):
        codec.decode_outputs(message, value)


@given(st.binary(max_size=2000))
def test_no_bytes_make_anything_but_a_problem_or_a_refusal(raw):
    kind = None
    try:
        message = pb.Problem.FromString(raw)
        codec.decode_outputs(message, codec.decode_problem(message))
    except DecodeError:
        return
    except errors.DqkvError as error:
        kind = type(error)
    assert kind is None or kind.status is not errors.INTERNAL


def test_checksums_cover_inline_bytes_in_order():
    tensors = [inline(2, 4), inline(3, 8)]
    assert codec.inline_checksum(tensors) != codec.inline_checksum(reversed(tensors))
    assert codec.inline_checksum([*tensors, streamed(9, 9)]) == codec.inline_checksum(tensors)


def test_reports_read_back():
    report = Report(
        arch="cpu", kernel="cpu/x", device="cpu:0", softmax_lse_recomputed=True, queued_s=0.5, transfer_s=0.25,
        device_s=2.0, total_s=3.0,
    )  # fmt: skip
    assert codec.decode_report(codec.encode_report(report)) == report


def test_every_error_travels_with_its_reason_and_field():
    for reason, kind in errors.table().items():
        error = kind("words", field="q", retry_after_s=1.5)
        status = codec.encode_error(error)
        assert status.code == kind.status.grpc_code
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        back = codec.decode_error(status, code, status.message)
        assert (type(back), back.reason, back.field, back.message) == (kind, reason, "q", "words")
        assert back.retry_after_s == 1.5


def test_reasons_are_unique_and_spelled_as_enums():
    kinds, todo = [], [errors.DqkvError]
    while todo:
        kinds.append(todo.pop())
        todo.extend(kinds[-1].__subclasses__())
    assert len({kind.reason for kind in kinds}) == len(kinds)
    assert all(kind.reason.replace("_", "").isalpha() and kind.reason.isupper() for kind in kinds)


def test_statuses_are_grpc_s():
    for kind in errors.table().values():
        assert grpc.StatusCode[kind.status.grpc_name].value[0] == kind.status.grpc_code


def test_a_failed_call_without_a_reason_is_named_by_its_code():
    lost = codec.decode_error(None, grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert isinstance(lost, errors.TransportError)
    assert lost.status.retryable
    assert isinstance(codec.decode_error(None, grpc.StatusCode.DEADLINE_EXCEEDED, ""), errors.WontFinish)
