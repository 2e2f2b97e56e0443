"""gRPC reflection, of version v1alpha, which every tool speaks: the API described to callers that may see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_status import rpc_status

from dqkv.server.gate import Gate, Method, Refusal

METHOD = Method(service=reflection.SERVICE_NAME, name="ServerReflectionInfo", kind="bidi_streaming")


def add_reflection(server: grpc.aio.Server, services: Sequence[str], gate: Gate) -> None:
    """Serves descriptions of `services` on an asyncio server."""
    names = [*services, reflection.SERVICE_NAME]
    add: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add(_Guarded(names, gate), server)


class _Guarded:
    """Reflection behind the gate, like every other method."""

    def __init__(self, services: Sequence[str], gate: Gate) -> None:
        self._open: Any = reflection.aio.ReflectionServicer(services)
        self._gate = gate

    async def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers one stream of questions."""
        try:
            with self._gate.visit(METHOD, context):
                async for answer in self._open.ServerReflectionInfo(request_iterator, context):
                    yield answer
                return
        except Refusal as refusal:
            status = rpc_status.to_status(refusal.status)
        await context.abort(status.code, status.details, status.trailing_metadata)
