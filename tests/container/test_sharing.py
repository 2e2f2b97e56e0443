"""Memory that a server in a container and a client outside it both see, by both kinds of region."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rig.caller import Caller
from rig.memory import segment_names
from rig.wire import assert_right, inline_gradients, sample, unary_request

from container.image import Image
from container.server import USER, Contained, contained
from dqkv.trials import TRIALS

MIB = 1 << 20
ROOM_NBYTES = 8 * MIB
HERE = Path(__file__).parent
ONE = sample()


def sent_nbytes(server: Contained) -> float:
    """Bytes of tensors that went through connections."""
    return sum(server.metric("dqkv_bytes_total", transport=transport) for transport in ("unary", "stream"))


@pytest.mark.parametrize("kind", ["memfd", "posix"])
def test_every_problem_is_answered_right_into_memory_of_a_client_outside(server: Contained, kind: str) -> None:
    """The client runs as the server's user: memory by name has to be the server's own or a proven caller's."""
    before = segment_names()
    counted = {"kind": kind, "event": "register"}
    registered, sent = server.metric("dqkv_region_events_total", **counted), sent_nbytes(server)
    command = [sys.executable, "-m", "container.outsider", server.target, str(USER), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=HERE.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == f"{len(TRIALS)} right as user {USER}"
    assert server.metric("dqkv_region_events_total", **counted) >= registered + len(TRIALS)
    # Of the tensors, nothing went through a connection.
    assert sent_nbytes(server) == sent
    assert segment_names() == before


def test_memory_by_name_of_another_user_is_refused(server: Contained) -> None:
    command = [sys.executable, "-m", "container.outsider", server.target, str(USER + 1), "posix"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=HERE.parent)
    assert done.returncode != 0
    assert "belongs to another user" in done.stderr


def test_little_shared_memory_is_an_error_in_words_and_the_server_goes_on(image: Image) -> None:
    """Both are in containers that share 8 MiB of /dev/shm; what does not fit there goes by message or stream."""
    options = ("--ipc", "shareable", "--shm-size", str(ROOM_NBYTES))
    with contained(image, options=options) as server:
        program = (HERE / "squeezed.py").read_text()
        beside = ("--network", "host", "--ipc", f"container:{server.name}")
        command = ("-c", program, server.target, str(ROOM_NBYTES))
        found = json.loads(image.run(*command, entrypoint="python3", options=beside))
        assert "No space left" in found["told"]["too large"]
        assert "No space left" in found["told"]["no room left"]
        for name, (outcome, says) in found["outcomes"].items():
            if name.endswith("by region"):
                assert (outcome, "No space left" in says) == ("skipped", True)
            else:
                assert (outcome, says) == ("right", "")
        assert server.ask("ls", "/dev/shm") == ""
        with Caller(server) as caller:
            assert_right(ONE, inline_gradients(ONE, caller.ask(caller.gradients.Backward, unary_request(ONE))))
        assert server.stop() == 0


def test_a_container_beside_it_can_see_its_processes(image: Image, server: Contained) -> None:
    """What handles of GPU memory need: one namespace of processes for both."""
    options = ("--pid", f"container:{server.name}")
    assert image.run("/proc/1/comm", entrypoint="cat", options=options).strip() == "tini"
    assert image.run("/proc/1/comm", entrypoint="cat").strip() == "cat"
