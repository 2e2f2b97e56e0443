"""What can be registered as a region: a caller's own memory by a plain name or a sealed memfd, of its true size."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from rig import doorbell
from rig.caller import Caller, posix, refusal
from rig.memory import SHM, PosixMemory, memfd
from rig.process import open_files
from rig.server import Running
from rig.wire import sample, unary_request

from dqkv.v1 import gradient_pb2 as pb

NBYTES = 8192
INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "REGION_INVALID")
NOT_OWNED = (grpc.StatusCode.PERMISSION_DENIED, "REGION_NOT_OWNED")
NO_SESSION = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "REGION_UNKNOWN")
NOBODY = 65534


@pytest.fixture
def caller(server: Running) -> Iterator[Caller]:
    with Caller(server) as one:
        yield one


@pytest.fixture
def memory() -> Iterator[PosixMemory]:
    with PosixMemory(NBYTES) as one:
        yield one


# ---- names
NAMES = {
    "no_slash": "dqkv-a",
    "two_slashes": "//dqkv-a",
    "without_the_prefix": "/other-a",
    "prefix_alone": "/dqkv-",
    "empty": "",
    "slash": "/",
    "parent": "/dqkv-/../dqkv-a",
    "parent_first": "/../dqkv-a",
    "inner_slash": "/dqkv-a/b",
    "whole_path": "/dev/shm/dqkv-a",
    "proc": "/proc/self/mem",
    "newline": "/dqkv-a\n",
    "nul": "/dqkv-a\0b",
    "space": "/dqkv-a b",
    "not_ascii": "/dqkv-ä",
    "digits_of_another_script": "/dqkv-٣",
    "too_long": "/dqkv-" + "a" * 300,
    "semaphore": "/sem.dqkv-a",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_is_not_a_plain_one_with_our_prefix_is_refused(caller: Caller, name: str) -> None:
    refused = caller.refused(caller.regions.RegisterRegion, posix(name, NBYTES))
    assert (refused.code, refused.reason) == INVALID
    assert refused.field == "posix.name"


@pytest.mark.parametrize("way", ["folder_below", "parent_of_folder"])
def test_a_name_never_leads_out_of_the_folder_of_shared_memory(caller: Caller, tmp_path: Path, way: str) -> None:
    """The file is there, is this user's, and a plain open would find it."""
    folder = SHM / f"dqkv-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        target = folder / "dqkv-inside" if way == "folder_below" else tmp_path / "dqkv-outside"
        target.write_bytes(bytes(NBYTES))
        name = f"/{folder.name}/dqkv-inside" if way == "folder_below" else f"/{folder.name}/../../..{target}"
        assert Path(f"{SHM}{name}").stat().st_size == NBYTES
        refused = caller.refused(caller.regions.RegisterRegion, posix(name, NBYTES))
        assert (refused.code, refused.reason) == INVALID
    finally:
        with suppress(FileNotFoundError):
            (folder / "dqkv-inside").unlink()
        folder.rmdir()


# ---- kinds and owners of files
def _symlink(path: Path, memory: PosixMemory) -> None:
    path.symlink_to(memory.path)


def _hard_link(path: Path, memory: PosixMemory) -> None:
    path.hardlink_to(memory.path)


def _fifo(path: Path, _: PosixMemory) -> None:
    os.mkfifo(path)


def _folder(path: Path, _: PosixMemory) -> None:
    path.mkdir()


def _socket(path: Path, _: PosixMemory) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _empty(path: Path, _: PosixMemory) -> None:
    path.touch()


def _nothing(_: Path, __: PosixMemory) -> None:
    pass


def _link_to_a_descriptor(path: Path, memory: PosixMemory) -> None:
    path.symlink_to(f"/proc/{os.getpid()}/fd/{memory.fd}")


@pytest.mark.parametrize(
    "make", [_symlink, _link_to_a_descriptor, _hard_link, _fifo, _folder, _socket, _empty, _nothing]
)
def test_what_is_no_segment_of_its_own_is_refused(
    caller: Caller, memory: PosixMemory, make: Callable[[Path, PosixMemory], None]
) -> None:
    path = SHM / f"dqkv-{secrets.token_hex(8)}"
    make(path, memory)
    try:
        refused = caller.refused(caller.regions.RegisterRegion, posix(f"/{path.name}", NBYTES))
        assert (refused.code, refused.reason) == INVALID
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def test_a_segment_with_a_second_name_is_refused(caller: Caller, memory: PosixMemory) -> None:
    """Whoever holds the other name could hold the memory after its owner thinks it gone."""
    other = SHM / f"{memory.name[1:]}-again"
    other.hardlink_to(memory.path)
    try:
        refused = caller.refused(caller.regions.RegisterRegion, posix(memory.name, NBYTES))
        assert (refused.code, refused.reason) == INVALID
    finally:
        other.unlink()
    assert caller.register(memory)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make memory of another user")
def test_memory_of_another_user_is_not_owned(caller: Caller, memory: PosixMemory) -> None:
    os.fchown(memory.fd, NOBODY, NOBODY)
    refused = caller.refused(caller.regions.RegisterRegion, posix(memory.name, NBYTES))
    assert (refused.code, refused.reason) == NOT_OWNED


# ---- sizes
@pytest.mark.parametrize("nbytes", [0, -1, NBYTES + 1, 2**31, 2**62, 2**63 - 1, -(2**63)])
def test_a_size_that_the_memory_does_not_have_is_refused(caller: Caller, memory: PosixMemory, nbytes: int) -> None:
    refused = caller.refused(caller.regions.RegisterRegion, posix(memory.name, nbytes))
    assert (refused.code, refused.reason) == INVALID
    assert refused.field == "nbytes"
    assert str(nbytes) in refused.message


def test_a_size_above_what_the_wire_can_say_is_a_negative_one(caller: Caller, memory: PosixMemory) -> None:
    """2**64 - 1 as a varint: ten bytes that protobuf reads as -1."""
    raw = pb.RegisterRegionRequest(posix=pb.PosixSharedMemory(name=memory.name)).SerializeToString()
    raw += bytes((3 << 3,)) + b"\xff" * 9 + b"\x01"
    call = caller.channel.unary_unary("/dqkv.v1.RegionService/RegisterRegion")
    refused = refusal(lambda: call(raw, timeout=120, metadata=caller.metadata))
    assert (refused.code, refused.reason) == INVALID
    assert "-1" in refused.message


def test_refusals_leave_no_descriptor_open_in_the_server(server: Running, caller: Caller, memory: PosixMemory) -> None:
    before = open_files(server.process.pid)
    for _ in range(32):
        caller.refused(caller.regions.RegisterRegion, posix(memory.name, NBYTES + 1))
        caller.refused(caller.regions.RegisterRegion, posix(memory.name, NBYTES, lease_s=-1.0))
        caller.refused(caller.regions.RegisterRegion, posix(memory.name, NBYTES, label="x" * 129))
    assert open_files(server.process.pid) <= before + 4, "connections come and go, files of refused regions do not stay"


def test_one_caller_holds_as_many_regions_as_it_may_and_others_their_own(server: Running, caller: Caller) -> None:
    limit = caller.ask(caller.facts.GetCapabilities, pb.GetCapabilitiesRequest()).limits.regions
    with PosixMemory(NBYTES) as memory, Caller(server) as other:
        handles = [caller.register(memory) for _ in range(limit)]
        refused = caller.refused(caller.regions.RegisterRegion, posix(memory.name, NBYTES))
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_REGIONS")
        with PosixMemory(NBYTES) as second:
            assert other.register(second)
        for handle in handles:
            caller.ask(caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle))
        assert caller.register(memory)


# ---- whose they are
def test_who_comes_from_the_address_of_a_caller_is_not_that_caller(caller: Caller, memory: PosixMemory) -> None:
    """Calls on one connection have one address, as have a caller and whoever binds its port after it."""
    handle = caller.register(memory)
    one = sample()
    for session in (caller.metadata[0][1][:-2], "", secrets.token_hex(32), None):
        caller.metadata = [] if session is None else [("dqkv-session", session)]
        given = caller.ask(caller.facts.GetCapabilities, pb.GetCapabilitiesRequest()).session
        if session is not None and len(session) == 64:
            assert caller.list_regions() == []
            wanted = UNKNOWN
            assert given == session
        else:
            listed = caller.refused(caller.regions.ListRegions, pb.ListRegionsRequest())
            assert (listed.code, listed.reason, listed.field) == (*NO_SESSION, "dqkv-session")
            registered = caller.refused(caller.regions.RegisterRegion, posix(memory.name, NBYTES))
            assert (registered.code, registered.reason) == NO_SESSION
            wanted = NO_SESSION
        request = unary_request(one)
        request.problem.tensors[0].region.handle = handle
        for method, message in (
            (caller.regions.ProbeRegion, pb.ProbeRegionRequest(handle=handle, nbytes=1)),
            (caller.regions.RenewRegion, pb.RenewRegionRequest(handle=handle)),
            (caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle)),
            (caller.gradients.Backward, request),
        ):
            refused = caller.refused(method, message)
            assert (refused.code, refused.reason) == wanted
        # What it is given instead is its own.
        caller.metadata = [("dqkv-session", given)]
        assert caller.list_regions() == []


def test_a_session_owns_its_regions_on_every_connection(server: Running, caller: Caller, memory: PosixMemory) -> None:
    caller.metadata = []
    session = ("dqkv-session", caller.ask(caller.facts.GetCapabilities, pb.GetCapabilitiesRequest()).session)
    caller.metadata = [session]
    handle = caller.register(memory)
    with Caller(server, metadata=[session]) as reconnected:
        assert [region.handle for region in reconnected.list_regions()] == [handle]
        reconnected.ask(reconnected.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle))
    assert caller.list_regions() == []


# ---- memfds
def test_a_sealed_memfd_is_registered_and_seen(server: Running, caller: Caller) -> None:
    fd = memfd(NBYTES)
    try:
        os.pwrite(fd, b"nonce", 100)
        handle = doorbell.register_memfd(server, caller, fd)
        answer = caller.ask(caller.regions.ProbeRegion, pb.ProbeRegionRequest(handle=handle, byte_offset=100, nbytes=5))
        assert answer.data == b"nonce"
    finally:
        os.close(fd)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_a_memfd_that_can_change_its_size_is_refused(server: Running, caller: Caller, seals: int) -> None:
    fd = memfd(NBYTES, seals)
    try:
        ticket = doorbell.hand_over(server, fd).ticket
        request = pb.RegisterRegionRequest(memfd=pb.Memfd(ticket=ticket), nbytes=NBYTES)
        refused = caller.refused(caller.regions.RegisterRegion, request)
        assert (refused.code, refused.reason) == INVALID
        again = caller.refused(caller.regions.RegisterRegion, request)
        assert (again.code, again.reason) == UNKNOWN, "a ticket is good once"
    finally:
        os.close(fd)


@pytest.mark.parametrize("ticket", [b"", bytes(16), b"x" * 15, b"x" * 1000])
def test_a_ticket_that_nobody_was_given_is_unknown(caller: Caller, ticket: bytes) -> None:
    request = pb.RegisterRegionRequest(memfd=pb.Memfd(ticket=ticket), nbytes=NBYTES)
    refused = caller.refused(caller.regions.RegisterRegion, request)
    assert (refused.code, refused.reason) == UNKNOWN


# ---- the server's own memory
def test_the_servers_own_memory_cannot_be_registered(server: Running, caller: Caller) -> None:
    """A process of the same user finds the server's files under /proc, and hands them back to it."""
    caller.ask(caller.gradients.Backward, unary_request(sample()))
    own = [
        path
        for path in Path(f"/proc/{server.process.pid}/fd").iterdir()
        if str(path.readlink()).startswith("/memfd:dqkv-")
    ]
    assert own, "no staging memory to try"
    for path in own:
        fd = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            ticket = doorbell.hand_over(server, fd).ticket
            request = pb.RegisterRegionRequest(memfd=pb.Memfd(ticket=ticket), nbytes=size)
            refused = caller.refused(caller.regions.RegisterRegion, request)
            assert (refused.code, refused.reason) == NOT_OWNED
        finally:
            os.close(fd)


def test_no_name_leads_to_the_servers_own_memory(server: Running, caller: Caller) -> None:
    """Staging memory has no name, and a link to its descriptor is not followed."""
    caller.ask(caller.gradients.Backward, unary_request(sample()))
    link = SHM / f"dqkv-{secrets.token_hex(8)}"
    own = next(
        path
        for path in Path(f"/proc/{server.process.pid}/fd").iterdir()
        if str(path.readlink()).startswith("/memfd:dqkv-")
    )
    link.symlink_to(own)
    try:
        refused = caller.refused(caller.regions.RegisterRegion, posix(f"/{link.name}", 64))
        assert (refused.code, refused.reason) == INVALID
    finally:
        link.unlink()
