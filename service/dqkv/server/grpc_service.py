"""The gradient service of the asyncio server: unary backward and estimates; it says where the stream is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from dqkv import codec, errors, framing
from dqkv.location import Inline, InStream, Location
from dqkv.metrics import Metrics
from dqkv.problem import Report
from dqkv.scheduler.queue import Scheduler
from dqkv.server import account
from dqkv.server.gate import Gate, Method, Visit, unary, unary_read_late
from dqkv.server.gradient import Desk, Job, Order, name_gradients
from dqkv.v1 import gradient_pb2 as pb

SERVICE = "dqkv.v1.AttentionGradientService"
ANSWER_SLACK_NBYTES = 64 << 10
"""What an answer holds beside its tensors, at most."""
OFFLOAD_NBYTES = 256 << 10
"""Messages larger than this are read and written on a thread: the loop must not stand still for a copy."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What unary calls are held to, how many messages are read at once, and where streams are served."""

    limits: pb.Limits
    messages: int
    stream_port: int


class GradientServicer:
    """AttentionGradientService on the asyncio server. Its stream has a server and a port of its own."""

    def __init__(self, *, gate: Gate, desk: Desk, scheduler: Scheduler, metrics: Metrics, terms: Terms) -> None:
        self._gate = gate
        self._desk = desk
        self._scheduler = scheduler
        self._metrics = metrics
        self._limits = terms.limits
        self._stream_port = terms.stream_port
        self._messages = asyncio.Semaphore(terms.messages)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods for an asyncio server."""
        backward = Method(service=SERVICE, name="Backward", transport="unary")
        estimate = Method(service=SERVICE, name="Estimate")
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                # Bytes in, bytes out: a large message is parsed and built on a thread, not by gRPC on the loop.
                "Backward": unary_read_late(self._gate, backward, self.backward),
                "Estimate": unary(self._gate, estimate, self.estimate, pb.EstimateRequest),
            },
        )

    async def backward(self, read: Callable[[], Awaitable[bytes]], visit: Visit) -> bytes:
        """One backward: `read` gives a serialized BackwardRequest, the answer is a serialized BackwardResponse.

        Raises what decoding, admission, regions and the device raise, and ChecksumMismatch.
        """
        # However many calls come, only so many messages are in memory besides what staging holds.
        async with self._messages:
            job, arrived, admitted = await self._receive(await read(), visit)
        try:
            received = time.monotonic()
            report = await job.run()
            ran = time.monotonic()
            report = replace(report, total_s=ran - arrived)
            answer = await _do(_answer_nbytes(job.order) > OFFLOAD_NBYTES, lambda: _answer(job, report))
        finally:
            job.close()
        visit.arch = report.arch
        visit.facts |= account.times(report)
        account.count(self._metrics, "unary", job, report)
        self._metrics.phase("validate", report.device, admitted - arrived)
        self._metrics.phase("receive", report.device, received - admitted)
        self._metrics.phase("send", report.device, time.monotonic() - ran)
        return answer

    async def _receive(self, raw: bytes, visit: Visit) -> tuple[Job, float, float]:
        """The job with its inline tensors in place, when its message was there, and when it was admitted."""
        arrived = time.monotonic()
        large = len(raw) > OFFLOAD_NBYTES
        order, message = await _do(large, lambda: _parse(raw))
        visit.request_id = order.request_id
        visit.facts |= account.sizes(order)
        self._check_fits(order)
        job = await self._desk.open(order, caller=visit.caller, deadline=visit.deadline)
        try:
            admitted = time.monotonic()
            await _do(large, lambda: _fill(job, message))
        except BaseException:
            job.close()
            raise
        return job, arrived, admitted

    async def estimate(self, request: pb.EstimateRequest, visit: Visit) -> pb.EstimateResponse:
        """What the problem would cost and where it would run. Raises what decoding and the scheduler raise."""
        problem = codec.decode_problem(request.problem, need_bytes=False)
        estimate = self._scheduler.estimate(problem, owner=visit.caller.name)
        visit.arch = estimate.arch.value
        fits = max(estimate.input_nbytes, estimate.gradient_nbytes) <= self._limits.inline_bytes
        return pb.EstimateResponse(
            pairs=estimate.pairs,
            flops=estimate.flops,
            input_bytes=estimate.input_nbytes,
            gradient_bytes=estimate.gradient_nbytes,
            device_s=estimate.device_s,
            queue_s=estimate.queue_s,
            device=estimate.device,
            arch=codec.encode_arch(estimate.arch),
            transport=pb.TRANSPORT_UNARY if fits else pb.TRANSPORT_STREAM,
        )

    def _check_fits(self, order: Order) -> None:
        for role, tensor in order.staged.items():
            if isinstance(tensor.data, InStream):
                raise errors.MessageInvalid(
                    f"{role} is marked stream, which only BackwardStream takes: "
                    f"it is served on port {self._stream_port}",
                    field=role,
                )
        nbytes, limit = _answer_nbytes(order), self._limits.message_bytes - ANSWER_SLACK_NBYTES
        if nbytes > limit:
            raise errors.TooLarge(
                f"the answer has {nbytes} bytes of gradients, a unary one has at most {limit}: use BackwardStream",
                field="tensors",
            )


async def _do(large: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if large else work()


def _parse(raw: bytes) -> tuple[Order, pb.BackwardRequest]:
    try:
        message = pb.BackwardRequest.FromString(raw)
    except DecodeError:
        raise errors.MessageInvalid("the message is no BackwardRequest", field="problem") from None
    return Order.decode(message.problem, message.request_id), message


def _fill(job: Job, message: pb.BackwardRequest) -> None:
    if message.HasField("checksum"):
        framing.check_sum(message, codec.inline_checksum(job.order.staged.values()))
    job.fill_inline()


def _answer_nbytes(order: Order) -> int:
    return sum(tensor.nbytes for tensor in order.answered.values())


def _answer(job: Job, report: Report) -> bytes:
    sent: dict[str, Location] = {part.role: Inline(part.view) for part in job.sending()}
    answered = [tensor.with_data(sent[role]) for role, tensor in job.order.answered.items()]
    return pb.BackwardResponse(
        report=codec.encode_report(report),
        gradients=name_gradients(job.order, sent),
        checksum=codec.inline_checksum(answered),
    ).SerializeToString()
