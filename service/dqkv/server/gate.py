"""The way into every method: the caller is told, its right checked, the call counted, and an error becomes a status."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from grpc_status import rpc_status

from dqkv import codec, errors
from dqkv.metrics import Metrics, Served
from dqkv.server.identity import Call, Doorkeeper, Identity, passing

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

READ_S = 20.0
"""Longest wait for a unary request's only message, in seconds."""
NO_DEADLINE_S = 1e9
"""gRPC tells the time that remains of a call without a deadline as some 292 years."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One method: its full name's parts, gRPC's name of its kind, and how its tensors travel ("" where none do)."""

    service: str
    name: str
    kind: str = "unary"
    transport: str = ""

    @property
    def path(self) -> str:
        """As gRPC spells it."""
        return f"/{self.service}/{self.name}"


@dataclass(kw_only=True, slots=True)
class Visit:
    """One call while it lasts: who calls, until when, and what is known of it for logs and metrics."""

    caller: Identity
    deadline: float
    """Absolute, of time.monotonic()."""
    request_id: str = ""
    arch: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    cut_off_by: errors.DqkvError | None = None
    """Why the call was ended where its caller cannot be told any more; None is that the caller went away."""


class Gate:
    """Lets calls in and tells how they ended; one for both servers."""

    def __init__(self, *, door: Doorkeeper, metrics: Metrics, default_timeout_s: float) -> None:
        self._door = door
        self._metrics = metrics
        self._default_timeout_s = default_timeout_s
        self._log = structlog.get_logger("dqkv.server")

    @contextmanager
    def visit(self, method: Method, context: Any) -> Iterator[Visit]:
        """One call of `method`; raises a Refusal for whatever goes wrong in the block, counted and logged."""
        began = time.monotonic()
        self._metrics.rpc_started(method.kind, method.service, method.name)
        call = call_of(method.path, context)
        visit = Visit(caller=passing(call.peer), deadline=self._deadline(context, began))
        error: errors.DqkvError | None = None
        try:
            visit.caller = self._door.authorize(call)
            yield visit
        except errors.DqkvError as known:
            error = known
            raise Refusal(known) from None
        except GeneratorExit:
            error = visit.cut_off_by or errors.Cancelled("the caller went away")
            raise
        except Exception as unexpected:
            visit.request_id = visit.request_id or uuid.uuid4().hex
            self._log.exception("fault", rpc=method.name, request_id=visit.request_id)
            error = errors.InternalFault(f"the server failed; request id {visit.request_id}")
            raise Refusal(error) from unexpected
        except BaseException:
            error = errors.Cancelled("the caller went away")
            raise
        finally:
            self._ended(method, visit, error, time.monotonic() - began)
            # An error knows the frames it came through; kept in one of them, it would keep their memory, too.
            error = None

    def _deadline(self, context: Any, now: float) -> float:
        remaining = context.time_remaining()
        if remaining is None or remaining > NO_DEADLINE_S:
            remaining = self._default_timeout_s
        return now + float(remaining)

    def _ended(self, method: Method, visit: Visit, error: errors.DqkvError | None, duration_s: float) -> None:
        code = "OK" if error is None else error.status.grpc_name
        reason = "" if error is None else error.reason
        self._metrics.rpc_handled(method.kind, method.service, method.name, code)
        self._metrics.served(
            Served(
                rpc=method.name,
                transport=method.transport,
                code=code,
                reason=reason,
                arch=visit.arch,
                duration_s=duration_s,
            )
        )
        facts = {"reason": reason, "field": error.field, "message": error.message} if error is not None else {}
        level = "info" if method.transport or error is not None else "debug"
        getattr(self._log, level)(
            "request",
            rpc=method.name,
            request_id=visit.request_id,
            caller=visit.caller.name,
            code=code,
            duration_s=round(duration_s, 6),
            **facts,
            **visit.facts,
        )


class Refusal(Exception):
    """A call that ends with an error: the status that gRPC is given for it."""

    def __init__(self, error: errors.DqkvError) -> None:
        super().__init__(error.message)
        self.error = error
        self.status: status_pb2.Status = codec.encode_error(error)


def call_of(path: str, context: Any) -> Call:
    """What a call says of its caller, from the context of either server."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    names = (context.auth_context() or {}).get("x509_subject_alternative_name", ())
    return Call(
        method=path,
        peer=context.peer(),
        metadata=metadata,
        certificate_names=tuple(name.decode(errors="replace") for name in names),
    )


def unary(
    gate: Gate,
    method: Method,
    behaviour: Callable[[Any, Visit], Awaitable[Message]],
    request_type: type[Message],
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the asyncio server around `behaviour(request, visit)`; errors become status here.

    The request is parsed here, too: what is none gets a reason, which gRPC would not give it.
    """

    async def handle(raw: bytes, context: Context) -> Any:
        async def behave(visit: Visit) -> bytes:
            try:
                request = request_type.FromString(raw)
            except DecodeError:
                raise errors.MessageInvalid(f"the message is no {request_type.DESCRIPTOR.name}") from None
            return (await behaviour(request, visit)).SerializeToString()

        return await _answer(gate, method, context, behave)

    return grpc.unary_unary_rpc_method_handler(handle)


def unary_read_late(
    gate: Gate, method: Method, behaviour: Callable[[Callable[[], Awaitable[bytes]], Visit], Awaitable[bytes]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """As `unary`, of bytes, but the request is read when `behaviour(read, visit)` asks for it.

    Until then a large message stays with its caller, who is known by then. `read` raises StreamIdle and Truncated.
    """

    async def handle(_: Any, context: Context) -> Any:
        async def read() -> bytes:
            try:
                message = await asyncio.wait_for(context.read(), READ_S)
            except TimeoutError:
                raise errors.StreamIdle(f"the request did not come within {READ_S:g} s") from None
            if message is grpc.aio.EOF:
                raise errors.Truncated("the call ended before its request")
            return bytes(message)

        return await _answer(gate, method, context, lambda visit: behaviour(read, visit))

    # On the wire a call with one request is what a unary call is.
    return grpc.stream_unary_rpc_method_handler(handle)


async def _answer(gate: Gate, method: Method, context: Context, behaviour: Callable[[Visit], Awaitable[Any]]) -> Any:
    try:
        with gate.visit(method, context) as visit:
            return await behaviour(visit)
    except Refusal as refusal:
        status = rpc_status.to_status(refusal.status)
    # Out of the except block: gRPC keeps what abort raises, and with it everything that was raised before it.
    return await context.abort(status.code, status.details or "", status.trailing_metadata or ())
