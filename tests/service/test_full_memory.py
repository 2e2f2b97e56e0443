"""No shared memory is left: an error in words at whoever asked for it, and no process ends by a bus error."""

from __future__ import annotations

import _posixshmem
import ctypes
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from rig import regional
from rig.caller import Caller, posix
from rig.memory import SHM
from rig.process import children
from rig.server import running
from rig.wire import assert_right, inline_gradients, role_number, sample, unary_request

import dqkv
from dqkv import errors
from dqkv.v1 import gradient_pb2 as pb

MIB = 1 << 20
ROOM_NBYTES = 8 * MIB
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
ONE = sample()
LARGE = sample(1024, 8, 128)
"""4 MiB a tensor: its gradients are more than there is room for."""


class NoNamespace(Exception):
    """This process may not have mounts of its own."""


@contextmanager
def little_shared_memory(nbytes: int) -> Iterator[None]:
    """For this thread and the processes that it starts, /dev/shm has room for nbytes; nobody else sees that."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise NoNamespace(os.strerror(ctypes.get_errno()))

    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={nbytes}".encode())
    yield


def in_little_shared_memory(body: Callable[[], None]) -> None:
    """Runs a test's body on a thread with little shared memory; skips, in words, where that cannot be had."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            with little_shared_memory(ROOM_NBYTES):
                body()
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(ended[0], NoNamespace):
        pytest.skip(f"this process cannot mount a small /dev/shm: {ended[0]}")
    if ended[0] is not None:
        raise ended[0]


def test_memory_that_is_full_is_an_error_in_words_and_no_process_ends() -> None:
    def body() -> None:
        with running() as server:
            workers = children(server.process.pid)
            with Caller(server) as caller:
                refuse_gradients_that_find_no_room(caller)
                assert_right(ONE, inline_gradients(ONE, caller.ask(caller.gradients.Backward, unary_request(ONE))))
            assert os.listdir(SHM) == []
            # Its threads are started by this one, so that they, too, have little shared memory.
            with dqkv.Client(server.target, timeout_s=120) as client:
                refuse_regions_that_find_no_room(client)
            assert os.listdir(SHM) == []
            assert children(server.process.pid) == workers
            assert server.stop() == 0

    in_little_shared_memory(body)


def refuse_gradients_that_find_no_room(caller: Caller) -> None:
    """The segment has its size but no pages: ftruncate promises what the file system does not have."""
    name = f"/dqkv-hollow-{secrets.token_hex(4)}"
    fd = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    try:
        os.ftruncate(fd, 4 * ROOM_NBYTES)
        handle = caller.ask(caller.regions.RegisterRegion, posix(name, 4 * ROOM_NBYTES)).handle
        request = unary_request(LARGE)
        for place, role in enumerate(LARGE.gradients):
            region = pb.RegionSlice(handle=handle, byte_offset=place * LARGE.inputs["q"].nbytes)
            request.problem.outputs.add(role=role_number(role), region=region)
        refused = caller.refused(caller.gradients.Backward, request)
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_BYTES")
        caller.ask(caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle))
    finally:
        os.close(fd)
        _posixshmem.shm_unlink(name)


def refuse_regions_that_find_no_room(client: dqkv.Client) -> None:
    """What fits is filled with pages at once, so that writing to it cannot fail later."""
    with pytest.raises(errors.RegionInvalid, match="No space left"):
        client.region(ROOM_NBYTES + MIB, kind="posix")
    with client.region(ROOM_NBYTES - MIB, kind="posix") as region:
        with pytest.raises(errors.RegionInvalid, match="No space left"):
            client.region(2 * MIB, kind="posix")
        region.tensor((region.nbytes // 4,), "fp32")[:] = 1
        places = regional.layout(ONE)
        arrays = {
            role: region.tensor(array.shape, "fp32", byte_offset=places[role]) for role, array in ONE.inputs.items()
        }
        for role, array in ONE.inputs.items():
            arrays[role][...] = array
        answer = client.backward(**arrays)
        assert_right(ONE, {role: getattr(answer, role) for role in ONE.gradients})
