"""A server on a GPU whose kernels have yet to pass their selftest there is not ready, and says why; a stand-in GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rig import server as rig
from rig.server import Running

FAULT = "sm100: it has run on no such device yet, and `dqkv kernels selftest --arch 100` has to pass on it first"
PROGRAM = """
import sys
import msgspec
from dqkv.backend import findings
found = msgspec.json.decode(sys.argv.pop().encode(), type=findings.Findings)
async def look(kernels, **options):
    return found
findings.look = look
from dqkv.__main__ import main
main()
"""


@contextmanager
def serving_with(gpu: dict[str, object], wanted: str = "auto") -> Iterator[Running]:
    """A server whose probe finds this GPU."""
    command = [sys.executable, "-c", PROGRAM, "serve", json.dumps({"gpus": [gpu], "absence": ""})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "COMMAND", command)
        with rig.running(gpus=wanted) as server:
            yield server


def untested(index: int = 0) -> dict[str, object]:
    return {"index": index, "model": "Told B200", "faults": [FAULT], "unproven": ["sm100"], "uuid": "0011"}


def test_a_gpu_that_waits_for_its_selftest_keeps_the_server_from_being_ready() -> None:
    with serving_with(untested()) as server:
        status, body = server.http("/readyz")
        said = json.loads(body)
        assert (status, said["ready"]) == (503, False)
        (failing,) = [check for check in said["failing"] if check["check"] == "selftest"]
        assert failing["reason"] == f"cuda:0 (Told B200): {FAULT}"
        info = json.loads(server.http("/v1/info")[1])
        assert f"GPU: cuda:0 (Told B200) is not used: {FAULT}" in info["notes"]
        assert [device["name"] for device in info["devices"]] == ["cpu:0"]
        assert server.http("/livez")[0] == 200


def test_a_gpu_that_is_not_wanted_is_not_waited_for() -> None:
    with serving_with(untested(), wanted="none") as server:
        assert server.http("/readyz")[0] == 200


def test_the_stand_in_is_what_makes_the_difference() -> None:
    gpu = {"index": 0, "model": "Told", "faults": ["compute capability 7.5 has no kernels"]}
    with serving_with(gpu) as server:
        assert server.http("/readyz")[0] == 200
        assert "Told" in json.loads(server.http("/v1/info")[1])["notes"][0]
