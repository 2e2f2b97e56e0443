"""A device that runs out of memory refuses that request and goes on with the next."""

from __future__ import annotations

import _posixshmem
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from rig.caller import Caller, posix
from rig.process import children
from rig.server import running
from rig.wire import assert_right, inline_gradients, role_number, sample, unary_request

from dqkv.v1 import gradient_pb2 as pb

ONE = sample()
GIB = 1 << 30
ROOM_NBYTES = GIB // 2
"""What the device may map beside what it takes to start: much for a small request, half a tensor of a large one."""
LARGE_SHAPE = (1, 1 << 22, 1, 64)
"""1 GiB a tensor in fp32."""


@pytest.fixture
def sparse() -> Iterator[str]:
    """A segment of 4 GiB that takes no memory: nothing was ever written to it."""
    name = f"/dqkv-sparse-{secrets.token_hex(4)}"
    fd = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    os.ftruncate(fd, 4 * GIB)
    yield name
    os.close(fd)
    _posixshmem.shm_unlink(name)


def large_request(handle: bytes) -> pb.BackwardRequest:
    """Every input at the region's start, each gradient in a part of its own; each query sees one key alone."""
    inputs = dict.fromkeys(("q", "k", "v", "dout"), LARGE_SHAPE) | {"delta": (1, 1, LARGE_SHAPE[1])}
    problem = pb.Problem(options=pb.Options(window=pb.Window(left=0, right=0)))
    for role, shape in inputs.items():
        problem.tensors.add(
            role=role_number(role), dtype=pb.DATA_TYPE_FP32, shape=shape, region=pb.RegionSlice(handle=handle)
        )
    for place, role in enumerate(("dq", "dk", "dv"), 1):
        problem.outputs.add(role=role_number(role), region=pb.RegionSlice(handle=handle, byte_offset=place * GIB))
    return pb.BackwardRequest(problem=problem)


def address_space_nbytes(pid: int) -> int:
    """The most that a process ever had mapped."""
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in fields if line.startswith("VmPeak"))) << 10


def test_a_request_beyond_the_devices_memory_is_refused_and_the_next_is_answered(sparse: str) -> None:
    """A named segment is not safe to map, so the device has to copy it, and has no room for that."""
    with running() as plain:
        (device,) = children(plain.process.pid)
        limit = address_space_nbytes(device) + ROOM_NBYTES
    with running(worker_memory_bytes=str(limit)) as small, Caller(small) as caller:
        (device,) = children(small.process.pid)
        handle = caller.ask(caller.regions.RegisterRegion, posix(sparse, 4 * GIB)).handle
        refused = caller.refused(caller.gradients.Backward, large_request(handle))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DEVICE_OOM")
        assert_right(ONE, inline_gradients(ONE, caller.ask(caller.gradients.Backward, unary_request(ONE))))
        assert children(small.process.pid) == [device], "the same process goes on"
        assert small.metric("dqkv_worker_restarts_total") == 0
        assert small.metric("dqkv_staging_pool_bytes", state="used") == 0
        assert not [region for region in caller.list_regions() if region.in_use]
        assert small.http("/readyz")[0] == 200
