"""Right inputs for each target, which the fuzzer takes apart and puts together again."""

from __future__ import annotations

import random

from rig import regional, wire

from dqkv import framing
from dqkv.v1 import gradient_pb2 as pb

ROWS, HEADS, HEAD_DIM = 2, 1, 8


def frames() -> list[bytes]:
    """Streams as `fuzz.frames` reads them: whole, cut short, and with a frame too many."""
    parts = [framing.Part("t", memoryview(bytes(range(size)))) for size in (5, 64)]
    sender = framing.Sender(parts)
    written = [framing.encode_data(chunk) for chunk in sender.frames()]
    written.append(framing.encode_frame(pb.BackwardStreamRequest(trailer=sender.trailer())))
    whole = [bytes((len(frame),)) + frame for frame in written]
    return [b"".join(whole), b"".join(whole[:-1]), b"".join([*whole, *whole])]


def requests() -> list[bytes]:
    """BackwardRequests: inline, packed, with every option, by region with strides and outputs, and in a stream."""
    one = wire.sample(ROWS, HEADS, HEAD_DIM)
    plain = wire.unary_request(one)
    packed = wire.unary_request(one)
    packed.problem.queries.CopyFrom(pb.Lengths(cu_seqlens=[0, 1, 2], seqused=[1, 0], max_seqlen=2))
    for tensor in packed.problem.tensors:
        rows = [1] if tensor.role in (pb.TENSOR_ROLE_K, pb.TENSOR_ROLE_V) else []
        tensor.shape[:] = [2, *rows, 1, HEAD_DIM]
    options = wire.unary_request(one)
    options.problem.options.CopyFrom(
        pb.Options(
            softmax_scale=0.5,
            window=pb.Window(left=1, right=0, sink_token_length=1),
            softcap=3.0,
            deterministic=True,
            grad_dtype=pb.DATA_TYPE_FP32,
            arch=pb.ARCH_CPU,
        )
    )
    regions = regional.request(one, bytes(16))
    regions.problem.tensors[0].region.strides[:] = [0, HEAD_DIM, HEAD_DIM, 1]
    streamed = pb.BackwardRequest(problem=wire.problem_of(one, streamed=True))
    return [message.SerializeToString() for message in (plain, packed, options, regions, streamed)]


def headers() -> list[bytes]:
    """First frames of a stream: right, too large, of another size than they say, with one tensor inline."""
    one = wire.sample(ROWS, HEADS, HEAD_DIM)
    plain, large, wrong, mixed = (wire.header_of(one) for _ in range(4))
    for tensor in large.header.problem.tensors:
        tensor.shape[1] = 1 << 40
    wrong.header.total_bytes += 1
    q = mixed.header.problem.tensors[0]
    q.data = one.inputs["q"].tobytes()
    mixed.header.total_bytes -= len(q.data)
    return [frame.SerializeToString() for frame in (plain, large, wrong, mixed)]


def choices() -> list[bytes]:
    """Bytes that `fuzz.regions` reads its choices from."""
    rng = random.Random(7)
    return [rng.randbytes(size) for size in (40, 80, 160)]
