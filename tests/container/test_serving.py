"""A server in a container, used from outside: answers, health, metrics, restarts, drains, and clients that die."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from rig.caller import Caller
from rig.server import eventually, open_channel
from rig.upload import HALF_SENT
from rig.wire import (
    assert_right,
    failing,
    frames_of,
    inline_gradients,
    sample,
    stream,
    streamed_gradients,
    unary_request,
)

from container.image import Image
from container.server import Contained, contained
from dqkv.check import Outcome, check
from dqkv.courier import Courier, Door
from dqkv.trials import TRIALS
from dqkv.v1 import gradient_pb2_grpc as stubs

ONE = sample()
PATIENCE_S = 120.0


def ask(server: Contained) -> None:
    """A right answer, unary."""
    with Caller(server) as caller:
        assert_right(ONE, inline_gradients(ONE, caller.ask(caller.gradients.Backward, unary_request(ONE))))


def test_every_problem_with_a_known_answer_is_answered_right_by_every_transport(server: Contained) -> None:
    with Courier(Door(address=server.target)) as courier:
        verdicts = list(check(courier, TRIALS))
    assert len(verdicts) == 3 * len(TRIALS)
    assert {f"{v.trial.name} by {v.transport}": v.says for v in verdicts if v.outcome is not Outcome.RIGHT} == {}


def test_it_is_live_ready_and_healthy(server: Contained) -> None:
    assert server.http("/livez")[0] == 200
    assert server.http("/readyz")[0] == 200
    with Caller(server) as caller:
        answer = caller.ask(caller.health.Check, health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_command_line_in_the_image_checks_the_server_beside_it(server: Contained) -> None:
    assert "Every answer was right" in server.ask("dqkv", "check", server.target)


def test_what_was_asked_is_counted(server: Contained) -> None:
    labels = {"rpc": "Backward", "transport": "unary"}
    before = server.metric("dqkv_requests_total", **labels)
    for _ in range(3):
        ask(server)
    assert server.metric("dqkv_requests_total", **labels) == before + 3
    assert server.metric("dqkv_build_info") == 1


def test_a_client_that_is_killed_in_the_middle_leaves_the_server_as_it_was(server: Contained) -> None:
    before = server.metric("dqkv_stream_aborts_total")
    command = [sys.executable, "-m", "rig.upload", server.stream_target, "1024"]
    tests = Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tests) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline().strip() == HALF_SENT
        finally:
            client.kill()
    eventually(lambda: server.metric("dqkv_stream_aborts_total") == before + 1)
    eventually(lambda: server.metric("dqkv_inflight_requests") == 0)
    ask(server)


def test_when_it_is_stopped_it_finishes_what_it_accepted_and_ends_well(image: Image) -> None:
    with contained(image) as server, open_channel(server.stream_target) as bulk, open_channel(server.target) as control:
        more = threading.Event()

        def frames() -> Iterator[Any]:
            whole = frames_of(ONE)
            yield from itertools.islice(whole, 3)
            more.wait(PATIENCE_S)
            yield from whole

        upload = stream(bulk, frames(), timeout_s=2 * PATIENCE_S)
        eventually(lambda: server.metric("dqkv_inflight_requests") == 1)
        codes: list[int] = []
        stopping = threading.Thread(target=lambda: codes.append(server.stop()))
        stopping.start()
        server.wait_for("draining", PATIENCE_S)
        eventually(lambda: server.http("/readyz")[0] == 503)
        with failing() as refused:
            stubs.AttentionGradientServiceStub(control).Backward(unary_request(ONE), timeout=PATIENCE_S)
        assert (refused[0].code, refused[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        more.set()
        assert_right(ONE, streamed_gradients(ONE, upload))
        stopping.join(2 * PATIENCE_S)
        assert codes == [0]


def test_a_stopped_or_killed_container_starts_again_as_it_was(image: Image) -> None:
    with contained(image) as server:
        ask(server)
        assert server.stop() == 0
        with server.again() as second:
            ask(second)
            second.send("KILL")
            assert second.ended() == 137
        with server.again() as third:
            ask(third)


def test_a_device_whose_process_is_killed_is_back(image: Image) -> None:
    with contained(image) as server:
        restarts = server.metric("dqkv_worker_restarts_total")
        server.ask("python3", "-c", KILL_WORKER)
        eventually(lambda: server.metric("dqkv_worker_restarts_total") > restarts)
        eventually(lambda: server.http("/readyz")[0] == 200)
        ask(server)


KILL_WORKER = r"""
import os, signal
from pathlib import Path
for folder in Path("/proc").glob("[0-9]*"):
    if b"-m\0dqkv.backend.worker" in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), signal.SIGKILL)
"""


# ---- what only Docker's own engine does
@pytest.mark.docker
def test_the_engine_itself_finds_it_healthy(docker: object, image: Image) -> None:
    with contained(image, http_port="18080") as server:
        eventually(lambda: server.state()["Health"]["Status"] == "healthy")


@pytest.mark.docker
def test_the_engine_starts_a_killed_server_again_by_its_restart_policy(docker: object, image: Image) -> None:
    with contained(image, options=("--restart", "on-failure")) as server:
        before = server.state()["Pid"]
        server.ask("python3", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
        assert server.ended() == 0
        assert server.state()["Pid"] != before
