"""A server that looks for GPUs where none can be used: it says why, everywhere the same, and computes on the CPU."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
from rig.server import Running, open_channel, running
from rig.wire import sample, unary_request

from dqkv.v1 import gradient_pb2 as pb
from dqkv.v1 import gradient_pb2_grpc as stubs


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def notes_of(server: Running) -> list[str]:
    """What an operator and a caller are told, which is the same."""
    with open_channel(server.target) as channel:
        told = stubs.CapabilityServiceStub(channel).GetCapabilities(pb.GetCapabilitiesRequest(), timeout=120).notes
        report = stubs.AttentionGradientServiceStub(channel).Backward(unary_request(sample()), timeout=120).report
    info = json.loads(server.http("/v1/info")[1])
    assert list(told) == info["notes"]
    assert [device["name"] for device in info["devices"]] == ["cpu:0"]
    assert report.device == "cpu:0"
    assert server.http("/readyz")[0] == 200
    return list(told)


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize("gpus", ["auto", "0,1"])
def test_a_machine_without_a_driver(gpus: str) -> None:
    with running(gpus=gpus) as server:
        assert notes_of(server) == ["GPU: this machine has no NVIDIA driver (libcuda.so.1 cannot be loaded)"]
        server_log = [event for event in server.events if event.get("event") == "looked for GPUs"]
        assert len(server_log) == 1


def test_gpus_that_are_not_wanted() -> None:
    with running(gpus="none") as server:
        assert notes_of(server) == ["GPU: DQKV_GPUS is none"]


@pytest.mark.gpu
@pytest.mark.skipif(not has_driver(), reason="no NVIDIA driver")
def test_kernels_that_are_not_built(tmp_path: Path) -> None:
    with running(gpus="auto", kernels=str(tmp_path)) as server:
        notes = notes_of(server)
        assert notes
        for note in notes:
            assert note.startswith("GPU: cuda:")
            assert "`dqkv kernels build" in note or "without CUDA" in note
