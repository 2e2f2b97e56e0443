"""The calls of one client to one server: unary calls bridged to asyncio, bulk streams on threads of their own.

Both go through grpcio's synchronous stack, which moves bulk data about 1.5 times as fast as its asyncio one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc_status import rpc_status

from dqkv import codec, errors, framing
from dqkv.client.capabilities import Capabilities, Health, capabilities_of
from dqkv.client.endpoint import Endpoint
from dqkv.framing import Part, Receiver, Sender
from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs

SESSION_HEADER = "dqkv-session"
STREAMS = 16
"""Streams of one client at the same time; each holds a thread."""
CONTROL_TIMEOUT_S = 30.0
"""Longest wait for an answer to a call that moves no tensors."""

_STREAM_METHOD = "/dqkv.v1.AttentionGradientService/BackwardStream"
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"

Req = TypeVar("Req")
Resp = TypeVar("Resp")


Accept: TypeAlias = Callable[[pb.BackwardStreamResponse.Header], Sequence[Part]]
"""Says where the gradients that an answer's header announces go; raises when they are not those asked for."""
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


class Connection:
    """Channels to the server's control and stream ports, and the session that makes calls on both one caller's."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._control = endpoint.channel()
        self._bulk: grpc.Channel | None = None
        self._bulk_port = 0
        self._threads = ThreadPoolExecutor(STREAMS, thread_name_prefix="dqkv-stream")
        self._capabilities: Capabilities | None = None
        self._asking = asyncio.Lock()
        self._session = ""
        self._adopted = ""
        self.gradients = stubs.AttentionGradientServiceStub(self._control)
        self.regions = stubs.RegionServiceStub(self._control)

    async def capabilities(self, *, fresh: bool = False) -> Capabilities:
        """What the server said of itself, asked once a connection unless `fresh`. Raises what `call` raises."""
        async with self._asking:
            if self._capabilities is None or fresh:
                ask = stubs.CapabilityServiceStub(self._control).GetCapabilities
                deadline = time.monotonic() + CONTROL_TIMEOUT_S
                self._capabilities = capabilities_of(await self.call(ask, pb.GetCapabilitiesRequest(), deadline))
                self._session = self._session or self._capabilities.session
            return self._capabilities

    def forget(self) -> None:
        """Asks for capabilities and session again before the next call: the server may be another one by then."""
        self._capabilities, self._session = None, self._adopted

    def adopt(self, session: str) -> None:
        """Makes every later call that of the session's caller."""
        self._session = self._adopted = session

    async def call(self, method: grpc.UnaryUnaryMultiCallable[Req, Resp], request: Req, deadline: float) -> Resp:
        """One unary call; cancelling the task cancels the call.

        Raises the server's typed error, or TransportError where none came back.
        """
        future = method.future(request, timeout=_left(deadline), metadata=self._metadata())
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: grpc.Future[Resp]) -> None:
            # The loop may be closed by the time a call that nobody waits for any more ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(wake)
        try:
            await done.wait()
        except asyncio.CancelledError:
            future.cancel()
            raise
        return _result(future.result)

    async def health(self) -> Health:
        """The whole server's health as grpc.health.v1 tells it."""
        # The health messages are an extra of the server; a request without a service is empty, and the answer's
        # only field is the status.
        check = self._control.unary_unary(_HEALTH_METHOD, request_serializer=bytes, response_deserializer=bytes)
        answer = await self.call(check, b"", time.monotonic() + CONTROL_TIMEOUT_S)
        number = answer[1] if len(answer) == 2 and answer[0] == 0x08 else 0
        return list(Health)[number] if number < len(Health) else Health.UNKNOWN

    async def stream(
        self, header: pb.BackwardStreamRequest.Header, parts: Sequence[Part], accept: Accept, deadline: float
    ) -> pb.Report:
        """One streamed backward: sends header, parts and trailer, and receives into what `accept` names.

        Returns the report. When the task is cancelled, the call is, and nothing is written any more once this has
        raised. Raises the server's typed error, TransportError, Truncated or ChecksumMismatch.
        """
        port = (await self.capabilities()).stream_port
        call = _Stream(self._stream_channel(port), header, parts, accept)
        work = asyncio.get_running_loop().run_in_executor(self._threads, call.run, deadline, self._metadata())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait([work])
            raise

    async def close(self) -> None:
        """Ends all calls and closes the channels."""
        self._control.close()
        if self._bulk is not None:
            self._bulk.close()
        await asyncio.to_thread(self._threads.shutdown)

    def _metadata(self) -> Metadata:
        session = ((SESSION_HEADER, self._session),) if self._session else ()
        return (*self._endpoint.metadata(), *session)

    def _stream_channel(self, port: int) -> grpc.Channel:
        if not port:
            return self._control
        if self._bulk is None or self._bulk_port != port:
            if self._bulk is not None:
                self._bulk.close()
            self._bulk, self._bulk_port = self._endpoint.with_port(port).channel(), port
        return self._bulk


class _Stream:
    """One streamed call, run on a thread; `cancel` may come from any other."""

    def __init__(
        self,
        channel: grpc.Channel,
        header: pb.BackwardStreamRequest.Header,
        parts: Sequence[Part],
        accept: Accept,
    ) -> None:
        self._open = channel.stream_stream(
            _STREAM_METHOD, request_serializer=framing.encode_frame, response_deserializer=framing.decode_response
        )
        self._header = header
        self._parts = parts
        self._accept = accept
        self._call: Any = None
        self._cancelled = False

    def cancel(self) -> None:
        """Ends the call, or keeps it from starting."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def run(self, deadline: float, metadata: Metadata) -> pb.Report:
        """The whole call; see Connection.stream."""
        self._call = self._open(self._frames(), timeout=_left(deadline), metadata=metadata)
        if self._cancelled:
            self._call.cancel()
        try:
            return _result(lambda: self._receive(self._call))
        except BaseException:
            self._call.cancel()
            raise

    def _frames(self) -> Iterator[framing.RequestFrame]:
        sender = Sender(self._parts)
        yield pb.BackwardStreamRequest(header=self._header)
        yield from sender.frames()
        yield pb.BackwardStreamRequest(trailer=sender.trailer())

    def _receive(self, frames: Iterator[framing.ResponseFrame]) -> pb.Report:
        report, receiver, complete = pb.Report(), None, False
        for frame in frames:
            if complete:
                raise errors.MessageInvalid("the answer goes on after its trailer", field="trailer")
            if isinstance(frame, memoryview):
                if receiver is None:
                    raise errors.MessageInvalid("the answer's data came before its header", field="header")
                receiver.take(frame)
            elif frame.WhichOneof("frame") == "header" and receiver is None:
                receiver = Receiver(self._accept(frame.header))
                report = frame.header.report
            elif frame.WhichOneof("frame") == "trailer" and receiver is not None:
                receiver.finish(frame.trailer)
                complete = True
            else:
                raise errors.MessageInvalid("the answer has a frame out of turn", field="frame")
        if not complete:
            raise errors.Truncated("the answer ended before its trailer", field="trailer")
        return report


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise errors.WontFinish("the deadline passed before the request was sent", field="timeout_s")
    return left


def _result(take: Callable[[], Resp]) -> Resp:
    """What a call gives, its failure as a typed error."""
    try:
        return take()
    except grpc.FutureCancelledError:
        raise errors.Cancelled("the call was cancelled") from None
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise errors.TransportError(str(error)) from error
        try:
            status = rpc_status.from_call(error)
        except ValueError:
            # Something between changed the call's status, so its details are not to be trusted.
            status = None
        raise codec.decode_error(status, error.code(), error.details() or "") from None
