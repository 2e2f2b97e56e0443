"""The calls of one client to one server: unary ones and bulk streams, and the session that makes them one caller's.

All go through grpcio's synchronous stack, which moves bulk data about 1.5 times as fast as its asyncio one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc_status import rpc_status

from dqkv import codec, errors, framing
from dqkv.client.capabilities import Capabilities, Health, capabilities_of
from dqkv.client.endpoint import Endpoint
from dqkv.client.hints import Contact, hinted
from dqkv.client.waiting import Metadata, UnaryCall, Waiting
from dqkv.framing import Part, Receiver, Sender
from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs
from dqkv.wire import SESSION_HEADER

CONTROL_TIMEOUT_S = 30.0
"""Longest wait for an answer to a call that moves no tensors."""

_STREAM_METHOD = "/dqkv.v1.AttentionGradientService/BackwardStream"
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"

Req = TypeVar("Req")
Resp = TypeVar("Resp")


Accept: TypeAlias = Callable[[pb.BackwardStreamResponse.Header], Sequence[Part]]
"""Says where the gradients that an answer's header announces go; raises when they are not those asked for."""


class Connection:
    """Channels to the server's control and stream ports; any thread may use it."""

    def __init__(self, endpoint: Endpoint, waiting: Waiting) -> None:
        self._endpoint = endpoint
        self._waiting = waiting
        self._control = endpoint.channel()
        self._bulk: grpc.Channel | None = None
        self._bulk_port = 0
        self._closed = False
        self._opening = threading.Lock()
        self._capabilities: Capabilities | None = None
        self._session = ""
        self._answered = False
        self.gradients = stubs.AttentionGradientServiceStub(self._control)
        self.regions = stubs.RegionServiceStub(self._control)
        self._about = stubs.CapabilityServiceStub(self._control)

    async def capabilities(self, deadline: float = math.inf, *, fresh: bool = False) -> Capabilities:
        """What the server said of itself, asked once a connection unless `fresh`. Raises what `call` raises.

        deadline: by time.monotonic(); the answer is waited for until then, or for CONTROL_TIMEOUT_S.
        """
        known = self._capabilities
        if known is None or fresh:
            deadline = min(deadline, time.monotonic() + CONTROL_TIMEOUT_S)
            answer = await self.call(self._about.GetCapabilities, pb.GetCapabilitiesRequest(), deadline)
            self._capabilities = known = capabilities_of(answer)
            self._session = known.session
            self._answered = True
        return known

    def forget(self) -> None:
        """Asks for capabilities again before the next call: the server may be another one by then.

        It is asked with the session so far: the same server then takes a new connection for the same caller, whose
        regions these are, and another one gives a session of its own.
        """
        self._capabilities = None

    async def call(self, method: grpc.UnaryUnaryMultiCallable[Req, Resp], request: Req, deadline: float) -> Resp:
        """One unary call. Raises the server's typed error, or TransportError where none came back."""
        call = UnaryCall(method=method, request=request, timeout_s=_left(deadline), metadata=self._metadata())
        with _typed_errors(self._is_closed, self._contact()):
            return await self._waiting.call(call)

    def call_here(self, method: grpc.UnaryUnaryMultiCallable[Req, Resp], request: Req, timeout_s: float) -> Resp:
        """As `call`, on a thread of the client's own."""
        with _typed_errors(self._is_closed, self._contact()):
            return method(request, timeout=timeout_s, metadata=self._metadata())

    async def health(self, deadline: float) -> Health:
        """The whole server's health as grpc.health.v1 tells it. Raises what `call` raises."""
        # The health messages are an extra of the server; a request without a service is empty, and the answer's
        # only field is the status.
        check = self._control.unary_unary(_HEALTH_METHOD, request_serializer=bytes, response_deserializer=bytes)
        answer = await self.call(check, b"", deadline)
        number = answer[1] if len(answer) == 2 and answer[0] == 0x08 else 0
        return list(Health)[number] if number < len(Health) else Health.UNKNOWN

    async def stream(
        self, header: pb.BackwardStreamRequest.Header, parts: Sequence[Part], accept: Accept, deadline: float
    ) -> pb.Report:
        """One streamed backward: sends header, parts and trailer, and receives into what `accept` names.

        Returns the report. Once this has raised, nothing is written any more. Raises the server's typed error,
        TransportError, Truncated or ChecksumMismatch.
        """
        port = (await self.capabilities(deadline)).stream_port
        call = _Stream(self._stream_channel(port), header, parts, accept)

        def run() -> pb.Report:
            with _typed_errors(lambda: call.cancelled or self._is_closed(), self._contact()):
                return call.run(deadline, self._metadata())

        return await self._waiting.work(run, call.cancel)

    async def close(self) -> None:
        """Ends all calls and closes the channels."""
        self._closed = True
        self._control.close()
        with self._opening:
            if self._bulk is not None:
                self._bulk.close()
        await self._waiting.close()

    def _is_closed(self) -> bool:
        return self._closed

    def _contact(self) -> Contact:
        return Contact(tls=self._endpoint.tls is not None, answered=self._answered)

    def _metadata(self) -> Metadata:
        session = ((SESSION_HEADER, self._session),) if self._session else ()
        return (*self._endpoint.metadata(), *session)

    def _stream_channel(self, port: int) -> grpc.Channel:
        if not port:
            return self._control
        with self._opening:
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
        self.cancelled = False

    def cancel(self) -> None:
        """Ends the call, or keeps it from starting."""
        self.cancelled = True
        if self._call is not None:
            self._call.cancel()

    def run(self, deadline: float, metadata: Metadata) -> pb.Report:
        """The whole call; raises what grpcio raises, and what an answer that is not right raises."""
        self._call = self._open(self._frames(), timeout=_left(deadline), metadata=metadata)
        if self.cancelled:
            self._call.cancel()
        try:
            return self._receive(self._call)
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


@contextmanager
def _typed_errors(ended_here: Callable[[], bool], contact: Contact) -> Iterator[None]:
    """Turns what grpcio raises into the typed error that the server sent, Cancelled, or a TransportError.

    ended_here tells whether this side ended the call. A call that the far side's gRPC cancelled, as one does that
    stops, is one that no answer came to.
    """
    try:
        yield
    except grpc.FutureCancelledError:
        raise errors.Cancelled("the call was cancelled") from None
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise errors.TransportError(str(error)) from error
        if error.code() is grpc.StatusCode.CANCELLED and ended_here():
            raise errors.Cancelled("the call was ended by this client") from None
        try:
            status = rpc_status.from_call(error)
        except ValueError:
            # Something between changed the call's status, so its details are not to be trusted.
            status = None
        found = codec.decode_error(status, error.code(), error.details() or "")
        raise hinted(found, contact) from None
