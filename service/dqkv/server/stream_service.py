"""BackwardStream, on a synchronous gRPC server of its own: it moves bulk data faster than an asyncio one.

A stream's frames are read on a thread, and copied once, into staging memory; everything else about it happens on the
loop. Nothing is read before the request is admitted: until then flow control holds the client back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from dqkv import codec, errors, framing
from dqkv.location import InStream, Location
from dqkv.metrics import Metrics
from dqkv.problem import Report
from dqkv.server import account
from dqkv.server.gate import Gate, Method, Refusal, Visit
from dqkv.server.gradient import Desk, Job, Order, name_gradients
from dqkv.server.watchdog import Watch, Watchdog
from dqkv.v1 import gradient_pb2 as pb

METHOD = Method(
    service="dqkv.v1.AttentionGradientService", name="BackwardStream", kind="bidi_streaming", transport="stream"
)

RETRY_AFTER_S = 0.5

T = TypeVar("T")

_ABORTS: dict[type[errors.DqkvError], str] = {
    errors.Truncated: "truncated",
    errors.StreamIdle: "idle",
    errors.ByteCountMismatch: "oversize",
    errors.ChecksumMismatch: "checksum",
    errors.Cancelled: "cancel",
}
"""How a stream that ends with an error is counted; other errors are no aborts of the stream."""


class _Garbage:
    """A frame that is no message: told apart here, because gRPC would answer INTERNAL for it."""


class StreamServicer:
    """BackwardStream; its calls run on the threads of a synchronous server, and reach the loop by `loop`."""

    def __init__(
        self,
        *,
        gate: Gate,
        desk: Desk,
        metrics: Metrics,
        watchdog: Watchdog,
        streams_per_caller: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._gate = gate
        self._desk = desk
        self._metrics = metrics
        self._watchdog = watchdog
        self._loop = loop
        self._streams_per_caller = streams_per_caller
        self._open_streams: Counter[str] = Counter()
        self._counting = threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's method for a synchronous server."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._answer, request_deserializer=_decode, response_serializer=framing.encode_frame
        )
        return grpc.method_handlers_generic_handler(METHOD.service, {METHOD.name: handler})

    def _answer(self, frames: Iterator[Any], context: grpc.ServicerContext) -> Iterator[framing.ResponseFrame]:
        """The frames of the answer; an error becomes the call's status here."""
        try:
            stream = _Stream(context, frames, self._loop)
            with self._gate.visit(METHOD, context) as visit, self._watchdog.watch(stream.give_up) as watch:
                stream.watch = watch
                try:
                    with self._one_more(visit.caller.name):
                        yield from self._backward(stream, visit)
                except errors.DqkvError as error:
                    if type(error) in _ABORTS:
                        self._metrics.stream_aborted(_ABORTS[type(error)])
                    raise
                except GeneratorExit:
                    visit.cut_off_by = gone = stream.gone()
                    self._metrics.stream_aborted(_ABORTS[type(gone)])
                    raise
                return
        except Refusal as refusal:
            status = refusal.status
        context.abort_with_status(rpc_status.to_status(status))

    @contextmanager
    def _one_more(self, caller: str) -> Iterator[None]:
        """Keeps one caller from holding every thread."""
        with self._counting:
            count = self._open_streams[caller]
            if count >= self._streams_per_caller:
                raise errors.QuotaStreams(
                    f"this caller has {count} streams open, the limit is {self._streams_per_caller}",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._open_streams[caller] += 1
        try:
            yield
        finally:
            with self._counting:
                self._open_streams[caller] -= 1
                if not self._open_streams[caller]:
                    del self._open_streams[caller]

    def _backward(self, stream: _Stream, visit: Visit) -> Iterator[framing.ResponseFrame]:
        began = time.monotonic()
        order = stream.reading(lambda: _order(stream.next_frame(), visit))
        visit.facts |= account.sizes(order)
        holding = _Holding()
        try:
            job = stream.on_loop(self._open(order, visit, holding))
            admitted = time.monotonic()
            job.fill_inline()
            stream.reading(lambda: _receive(stream, job))
            received = time.monotonic()
            report = stream.on_loop(job.run())
            ran = time.monotonic()
            report = replace(report, total_s=ran - received)
            visit.arch = report.arch
            visit.facts |= account.times(report)
            yield from _send(stream, job, report)
            account.count(self._metrics, "stream", job, report)
            for phase, duration_s in (
                ("validate", admitted - began),
                ("receive", received - admitted),
                ("send", time.monotonic() - ran),
            ):
                self._metrics.phase(phase, report.device, duration_s)
        finally:
            self._loop.call_soon_threadsafe(holding.end)

    async def _open(self, order: Order, visit: Visit, holding: _Holding) -> Job:
        job = await self._desk.open(order, caller=visit.caller, deadline=visit.deadline)
        holding.hold(job)
        return job


class _Stream:
    """One call: its frames, and the way to the loop and back; both end when the call does."""

    watch: Watch

    def __init__(self, context: grpc.ServicerContext, frames: Iterator[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._frames = frames
        self._loop = loop
        self._work: concurrent.futures.Future[Any] | None = None
        self._read: concurrent.futures.Future[Any] | None = None
        self._over = not context.add_callback(self._end)

    def give_up(self) -> None:
        """Ends the call because the client keeps it waiting; from any thread.

        While frames are read the client is told why. Where it does not take its answer, what would tell it why waits
        behind the answer: gRPC then ends the call with CANCELLED alone.
        """
        read = self._read
        if read is None:
            self._context.cancel()
        else:
            _settle(read, error=self.gone())

    def reading(self, work: Callable[[], T]) -> T:
        """Does work that reads frames, on a thread of its own: gRPC lets nobody end such a wait but the call's end.

        Raises what it raises, or StreamIdle when the watch rang, after which no frame is given to it any more.
        """
        self._read = read = concurrent.futures.Future[T]()
        threading.Thread(target=_run, args=(read, work), name="dqkv-stream-reader", daemon=True).start()
        try:
            return read.result()
        finally:
            # A future knows its error, which knows this frame and all memory that it sees.
            self._read = None
            del read, work

    def next_frame(self) -> Any:
        """The next frame, None after the client's last one. Raises StreamIdle, Cancelled or MessageInvalid."""
        with self.watch.waiting():
            try:
                frame = next(self._frames, None)
            except grpc.RpcError as error:
                # gRPC keeps its error for as long as the call, and the error its frames with all memory they see.
                error.__traceback__ = None
                raise self.gone() from None
        if self.watch.rang:
            # What comes now is too late: the memory that it would go to may be another call's.
            raise self.gone()
        if isinstance(frame, _Garbage):
            raise errors.MessageInvalid("a frame is no BackwardStreamRequest", field="frame")
        return frame

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Does `work` on the loop and waits for it; when the call ends before, `work` is cancelled.

        Raises what it raises, StreamIdle or Cancelled.
        """
        self._work = future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._over:
            future.cancel()
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise self.gone() from None
        finally:
            # A future knows its error, which knows this frame and all memory that it sees.
            self._work = None
            del future

    def send(self, frame: framing.ResponseFrame) -> Iterator[framing.ResponseFrame]:
        """Hands one frame to gRPC, which asks for the next one when the client has room for it."""
        with self.watch.waiting():
            yield frame

    def gone(self) -> errors.DqkvError:
        """Why the call is over before its end: StreamIdle or Cancelled."""
        if self.watch.rang:
            return errors.StreamIdle(
                f"no frame went through for {self.watch.limit_s:g} s, the limit (the server's DQKV_STREAM_IDLE_S)",
                field="frame",
            )
        return errors.Cancelled("the caller went away")

    def _end(self) -> None:
        self._over, work = True, self._work
        if work is not None:
            work.cancel()


def _run(outcome: concurrent.futures.Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - carried to the thread that waits, which raises it
        _settle(outcome, error=error)
    else:
        with suppress(concurrent.futures.InvalidStateError):
            outcome.set_result(result)
    finally:
        # The error knows this frame: without this, both would know each other, and keep all memory that they see.
        del outcome, work


def _settle(outcome: concurrent.futures.Future[Any], *, error: BaseException) -> None:
    """Gives a future its error, unless it has an end already."""
    with suppress(concurrent.futures.InvalidStateError):
        outcome.set_exception(error)


def _decode(raw: bytes) -> framing.RequestFrame | _Garbage:
    try:
        return framing.decode_request(raw)
    except DecodeError:
        return _Garbage()


def _order(frame: Any, visit: Visit) -> Order:
    if frame is None:
        raise errors.Truncated("the stream ended before its header", field="header")
    if isinstance(frame, memoryview) or frame.WhichOneof("frame") != "header":
        raise errors.MessageInvalid("the first frame is no header", field="frame")
    header = frame.header
    order = Order.decode(header.problem, header.request_id)
    visit.request_id = order.request_id
    if header.total_bytes != order.streamed_nbytes:
        raise errors.ByteCountMismatch(
            f"total_bytes is {header.total_bytes}, the tensors marked stream have {order.streamed_nbytes}",
            field="total_bytes",
        )
    return order


def _receive(stream: _Stream, job: Job) -> None:
    receiver = framing.Receiver(job.receiving())
    while True:
        frame = stream.next_frame()
        if frame is None:
            raise errors.Truncated(
                f"the stream ended after {receiver.received} bytes, without a trailer", field="trailer"
            )
        if isinstance(frame, memoryview):
            receiver.take(frame)
            continue
        if frame.WhichOneof("frame") != "trailer":
            raise errors.MessageInvalid("a frame after the header is neither data nor the trailer", field="frame")
        receiver.finish(frame.trailer)
        break
    if stream.next_frame() is not None:
        raise errors.MessageInvalid("a frame came after the trailer", field="frame")


def _send(stream: _Stream, job: Job, report: Report) -> Iterator[framing.ResponseFrame]:
    parts = job.sending()
    where: dict[str, Location] = {part.role: InStream() for part in parts}
    header = pb.BackwardStreamResponse.Header(
        report=codec.encode_report(report),
        gradients=name_gradients(job.order, where),
        total_bytes=framing.total_nbytes(parts),
    )
    yield from stream.send(pb.BackwardStreamResponse(header=header))
    sender = framing.Sender(parts)
    for chunk in sender.frames():
        yield from stream.send(chunk)
    yield from stream.send(pb.BackwardStreamResponse(trailer=sender.trailer()))


class _Holding:
    """The job of one call, on the loop: closed when the call ends, also when it is opened only after that.

    A coroutine that is cancelled before its first step still takes that step, and may open a job in it.
    """

    def __init__(self) -> None:
        self._job: Job | None = None
        self._ended = False

    def hold(self, job: Job) -> None:
        """Keeps the job until the end; closes it at once when that is past."""
        if self._ended:
            job.close()
        self._job = job

    def end(self) -> None:
        """Closes the job, now or when it comes."""
        self._ended = True
        if self._job is not None:
            self._job.close()
