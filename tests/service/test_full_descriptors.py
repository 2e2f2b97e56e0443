"""A server that has no descriptor left: who is connected is answered, and so is everybody once there are some again."""

from __future__ import annotations

import resource
import socket

import grpc
from rig.caller import Caller
from rig.process import open_files, wait_for
from rig.server import running
from rig.wire import assert_right, inline_gradients, sample, unary_request

SMALL = sample()
LARGER = sample(512, 2, 64)
"""More than the memory that a small request leaves behind for the next."""
ROOM = 20


def test_a_server_without_descriptors_refuses_in_words_and_recovers() -> None:
    with running() as server, Caller(server) as caller:
        pid = server.process.pid
        assert_right(SMALL, inline_gradients(SMALL, caller.ask(caller.gradients.Backward, unary_request(SMALL))))
        limit = open_files(pid) + ROOM
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
        idle = [socket.create_connection(("127.0.0.1", server.address["grpc_port"])) for _ in range(2 * ROOM)]
        wait_for(lambda: open_files(pid) >= limit, "no descriptor is left")
        assert_right(SMALL, inline_gradients(SMALL, caller.ask(caller.gradients.Backward, unary_request(SMALL))))
        refused = caller.refused(caller.gradients.Backward, unary_request(LARGER))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_BYTES")
        assert refused.retry_after_s
        for connection in idle:
            connection.close()
        wait_for(lambda: open_files(pid) < limit - ROOM / 2, "descriptors come back")
        with Caller(server) as other:
            assert_right(LARGER, inline_gradients(LARGER, other.ask(other.gradients.Backward, unary_request(LARGER))))
        assert server.http("/readyz")[0] == 200
