"""Calls that a port does not serve: they are told the right port, or that there is no such method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from dqkv import codec, errors
from dqkv.server import stream_service
from dqkv.server.gate import Gate, Method, Refusal
from dqkv.v1 import gradient_pb2 as pb

_APIS: tuple[Any, ...] = (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)


def control_methods() -> list[Method]:
    """Every method of the control port: all but the stream."""
    found = [
        Method(service=service.full_name, name=method.name, kind=_kind(method))
        for api in _APIS
        for service in api.services_by_name.values()
        for method in service.methods
    ]
    return [method for method in found if method.path != stream_service.METHOD.path]


class Elsewhere(grpc.GenericRpcHandler):
    """The last handler of an asyncio or a synchronous server: it refuses whatever no other one took."""

    def __init__(self, gate: Gate, *, ports: Mapping[Method, int], asynchronous: bool) -> None:
        """ports: the methods that another port serves, and which one."""
        self._gate = gate
        self._ports = {method.path: (method, port) for method, port in ports.items()}
        self._asynchronous = asynchronous

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler for any kind of call: a stream of messages is what each of them is on the wire."""
        path = handler_call_details.method

        def refuse(_: Any, context: Any) -> None:
            context.abort_with_status(rpc_status.to_status(self._status(path, context)))

        async def refuse_on_loop(_: Any, context: Any) -> None:
            status = rpc_status.to_status(self._status(path, context))
            await context.abort(status.code, status.details or "", status.trailing_metadata or ())

        behaviour: Any = refuse_on_loop if self._asynchronous else refuse
        return grpc.stream_stream_rpc_method_handler(behaviour)

    def _status(self, path: str, context: Any) -> status_pb2.Status:
        if path not in self._ports:
            # Neither counted nor logged by name: callers could make up any number of them.
            return codec.encode_error(errors.MethodUnknown("this server has no such method"))
        method, port = self._ports[path]
        try:
            with self._gate.visit(method, context):
                raise errors.WrongPort(f"{method.name} is served on port {port} of this host, not on this port")
        except Refusal as refusal:
            return refusal.status


def _kind(method: Any) -> str:
    if method.client_streaming:
        return "bidi_streaming" if method.server_streaming else "client_streaming"
    return "server_streaming" if method.server_streaming else "unary"
