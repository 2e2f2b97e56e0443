"""A caller that checks nothing before it sends: bare gRPC stubs, an identity, and how it was refused."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from dqkv.server.identity import SESSION_NBYTES
from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs
from dqkv.wire import SESSION_HEADER

from . import wire
from .memory import PosixMemory
from .server import Running
from .wire import Failure

TIMEOUT_S = 120.0
SECRETS = re.compile(r"/dev/shm|/proc/|Traceback|\.py\b|site-packages|memfd:|File \"|/tmp/|0x[0-9a-f]{9,}")
"""What no answer may tell: where things lie on the server, and how its code is made."""


class Caller:
    """A connection to each port, one caller by a session of its own; `metadata` travels with every call."""

    def __init__(
        self,
        server: Running,
        *,
        token: str | None = None,
        metadata: Iterable[tuple[str, str]] = (),
        credentials: grpc.ChannelCredentials | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.server = server
        session = (SESSION_HEADER, secrets.token_hex(SESSION_NBYTES))
        self.metadata = [session, *metadata, *([] if token is None else [("authorization", f"Bearer {token}")])]
        self.channel, self.bulk = (
            _open(f"{host}:{server.address[port]}", credentials) for port in ("grpc_port", "stream_port")
        )
        self.gradients = stubs.AttentionGradientServiceStub(self.channel)
        self.regions = stubs.RegionServiceStub(self.channel)
        self.facts = stubs.CapabilityServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.channel.close()
        self.bulk.close()

    # ---- calls
    def ask(self, method: Any, request: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
        """One unary call's answer. Raises grpc.RpcError."""
        return method(request, timeout=timeout_s, metadata=self.metadata)

    def refused(self, method: Any, request: Any, *, timeout_s: float = TIMEOUT_S) -> Failure:
        """How a unary call is refused. Raises AssertionError when it is answered."""
        said = request.posix.name if isinstance(request, pb.RegisterRegionRequest) else ""
        return refusal(lambda: self.ask(method, request, timeout_s=timeout_s), said=said)

    def stream(self, frames: Iterable[Any], *, timeout_s: float = TIMEOUT_S) -> Any:
        """A streamed call, begun: an iterator of frames, and gRPC's call. Frames that are bytes go as they are."""
        method = self.bulk.stream_stream(
            wire.STREAM_METHOD, request_serializer=_raw, response_deserializer=wire.framing.decode_response
        )
        return method(iter(frames), timeout=timeout_s, metadata=self.metadata)

    def stream_refused(self, frames: Iterable[Any], *, timeout_s: float = TIMEOUT_S) -> Failure:
        """How a streamed call is refused. Raises AssertionError when it is answered."""
        return refusal(lambda: list(self.stream(frames, timeout_s=timeout_s)))

    # ---- the calls that most tests make
    def register(self, memory: PosixMemory, nbytes: int | None = None, **fields: Any) -> bytes:
        """The handle of a segment. Raises grpc.RpcError."""
        return bytes(
            self.ask(self.regions.RegisterRegion, posix(memory.name, nbytes or memory.nbytes, **fields)).handle
        )

    def list_regions(self) -> list[pb.Region]:
        """What it holds."""
        return list(self.ask(self.regions.ListRegions, pb.ListRegionsRequest()).regions)


def posix(name: str, nbytes: int, **fields: Any) -> pb.RegisterRegionRequest:
    """The request to register a named segment."""
    return pb.RegisterRegionRequest(posix=pb.PosixSharedMemory(name=name), nbytes=nbytes, **fields)


def refusal(call: Callable[[], Any], *, said: str = "") -> Failure:
    """How a call is refused; every refusal is also searched for what no caller may learn, but had `said` itself."""
    with wire.failing() as found:
        call()
    (refused,) = found
    leaked = SECRETS.search(refused.message.replace(repr(said), ""))
    assert leaked is None, f"{refused.code} {refused.reason} tells {leaked and leaked.group()!r}: {refused.message}"
    return refused


def _open(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_retries", 0),
    ]
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)


def _raw(frame: Any) -> bytes:
    return frame if isinstance(frame, bytes) else wire.framing.encode_frame(frame)
