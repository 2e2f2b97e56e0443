"""A region from its registration to its end: leases, releases, servers and clients that come and go."""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory

import grpc
import numpy as np
import pytest
from rig import regional
from rig.caller import Caller
from rig.memory import SHM, PosixMemory, segment_names
from rig.process import children, paused, wait_for
from rig.server import Running, running
from rig.wire import ROLES, Failure, assert_right, failure_of, sample

import dqkv
from dqkv.v1 import gradient_pb2 as pb

ONE = sample()
NBYTES = regional.nbytes(ONE)
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "REGION_UNKNOWN")
LEASES_S = (0.6, 3.0, 15.0)
"""The longer ones are for a machine that stands still for longer than the ones before."""
EXPIRED = (grpc.StatusCode.FAILED_PRECONDITION, "REGION_LEASE_EXPIRED")


@pytest.fixture
def caller(server: Running) -> Iterator[Caller]:
    with Caller(server) as one:
        yield one


@pytest.fixture
def memory() -> Iterator[PosixMemory]:
    with PosixMemory(NBYTES) as one:
        regional.fill(one.bytes, ONE)
        yield one


def how(refused: Failure) -> tuple[grpc.StatusCode, str]:
    return refused.code, refused.reason


def uses(caller: Caller, handle: bytes) -> list[Failure]:
    """How everything that names a handle is refused."""
    return [
        caller.refused(caller.gradients.Backward, regional.request(ONE, handle)),
        caller.refused(caller.regions.ProbeRegion, pb.ProbeRegionRequest(handle=handle, nbytes=1)),
        caller.refused(caller.regions.RenewRegion, pb.RenewRegionRequest(handle=handle)),
        caller.refused(caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle)),
    ]


def release(caller: Caller, handle: bytes) -> None:
    caller.ask(caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=handle))


# ---- ends
def test_a_released_handle_is_never_good_again(caller: Caller, memory: PosixMemory) -> None:
    old = caller.register(memory)
    release(caller, old)
    assert [how(refused) for refused in uses(caller, old)] == [UNKNOWN] * 4
    new = caller.register(memory)
    assert new != old
    assert [how(refused) for refused in uses(caller, old)] == [UNKNOWN] * 4
    caller.ask(caller.gradients.Backward, regional.request(ONE, new))
    assert_right(ONE, regional.gradients(memory.bytes, ONE))


def test_a_release_waits_for_the_request_that_uses_the_region(
    server: Running, caller: Caller, memory: PosixMemory
) -> None:
    handle = caller.register(memory)
    with paused(*children(server.process.pid)):
        request = regional.request(ONE, handle)
        future = caller.gradients.Backward.future(request, timeout=120, metadata=caller.metadata)
        wait_for(lambda: [region for region in caller.list_regions() if region.in_use], "the request is in flight")
        releasing = caller.regions.ReleaseRegion.future(
            pb.ReleaseRegionRequest(handle=handle), timeout=120, metadata=caller.metadata
        )
        wait_for(lambda: not caller.list_regions(), "the release has begun")
        assert not releasing.done()
    releasing.result()
    # What was running is done when release returns.
    assert_right(ONE, regional.gradients(memory.bytes, ONE))
    future.result()
    assert [how(refused) for refused in uses(caller, handle)] == [UNKNOWN] * 4


def test_a_region_ends_with_its_lease(server: Running, caller: Caller, memory: PosixMemory) -> None:
    expired = server.metric("dqkv_region_events_total", event="expire")
    handle = caller.register(memory, lease_s=0.5)
    # None where this machine took longer than the lease to ask.
    assert all(0 < region.lease_s <= 0.5 for region in caller.list_regions())
    wait_for(lambda: not caller.list_regions(), "the lease runs out")
    assert [how(refused) for refused in uses(caller, handle)] == [EXPIRED] * 4
    with Caller(server) as stranger:
        assert [how(refused) for refused in uses(stranger, handle)] == [UNKNOWN] * 4
    wait_for(lambda: server.metric("dqkv_region_events_total", event="expire") > expired, "it is closed")
    assert caller.register(memory) != handle


@pytest.mark.parametrize("by", ["renewal", "use"])
def test_a_lease_is_renewed(caller: Caller, memory: PosixMemory, by: str) -> None:
    """Asked for or used every half lease, the region outlives several leases."""
    for lease_s in LEASES_S:
        try:
            handle = outlive(caller, memory, by, lease_s)
        except grpc.RpcError as error:
            if how(failure_of(error)) != EXPIRED:
                raise
            # Not in time, as on a machine that stands still: a longer lease has to do.
            continue
        assert [region.handle for region in caller.list_regions()] == [handle]
        release(caller, handle)
        return
    pytest.fail("no lease was renewed")


def outlive(caller: Caller, memory: PosixMemory, by: str, lease_s: float) -> bytes:
    """The handle of a region whose lease has been renewed for two leases. Raises grpc.RpcError once it has ended."""
    handle = caller.register(memory, lease_s=lease_s)
    for _ in range(4):
        time.sleep(lease_s / 2)
        if by == "renewal":
            answer = caller.ask(caller.regions.RenewRegion, pb.RenewRegionRequest(handle=handle))
            assert answer.lease_s == pytest.approx(lease_s)
        else:
            caller.ask(caller.gradients.Backward, regional.request(ONE, handle))
    return handle


@pytest.mark.parametrize("lease_s", [-1.0, float("nan"), float("inf"), 1e9, -0.5])
def test_a_lease_that_cannot_be_is_refused(caller: Caller, memory: PosixMemory, lease_s: float) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        caller.register(memory, lease_s=lease_s)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    handle = caller.register(memory)
    renewed = caller.refused(caller.regions.RenewRegion, pb.RenewRegionRequest(handle=handle, lease_s=lease_s))
    assert how(renewed) == (grpc.StatusCode.INVALID_ARGUMENT, "REGION_INVALID")


def test_a_client_that_dies_leaves_nothing_behind_its_lease() -> None:
    """Killed with a region open: its name is gone with it, and the server's hold on the memory ends with the lease."""
    with running(cpu_devices="0") as server:
        program = (
            "import dqkv, time\n"
            f"client = dqkv.Client('{server.target}')\n"
            "region = client.region(1 << 20, kind='posix', lease_s=1.0)\n"
            "print('open', flush=True)\n"
            "time.sleep(60)\n"
        )
        names = segment_names()
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as client:
            try:
                assert client.stdout is not None
                assert client.stdout.readline().strip() == "open"
                assert server.metric("dqkv_region_events_total", kind="posix", event="register") == 1
            finally:
                client.kill()
        wait_for(lambda: segment_names() <= names, "no name is left; others of this machine come and go")
        wait_for(lambda: server.metric("dqkv_region_bytes", kind="posix") == 0, "the region is closed")


# ---- requests that were given up
LONG_ROWS = (1, 16384, 1, 64)
"""Seconds on one core, so that it is given up in the middle."""
MARK = 7.0
REGION_NBYTES = 9 * 4 * int(np.prod(LONG_ROWS))


def long_request(region: dqkv.Region | dqkv.AsyncRegion) -> dict[str, np.ndarray]:
    """Inputs and gradients in one region, by role."""
    step = 4 * int(np.prod(LONG_ROWS))
    arrays = {
        role: region.tensor(LONG_ROWS, "fp32", byte_offset=place * step)
        for place, role in enumerate((*ROLES, "dq", "dk", "dv"))
    }
    random = np.random.default_rng(3)
    for role in ROLES:
        arrays[role][...] = random.standard_normal(LONG_ROWS, dtype=np.float32)
    return arrays


def is_left_alone(arrays: dict[str, np.ndarray]) -> bool:
    """Whether gradients' memory, marked now, is as it was after a time in which the request would have written more."""
    for role in ("dq", "dk", "dv"):
        arrays[role][...] = MARK
    time.sleep(0.6)
    return all((arrays[role] == MARK).all() for role in ("dq", "dk", "dv"))


@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.1])
async def test_nothing_is_written_after_a_cancelled_request_has_ended(server: Running, delay_s: float) -> None:
    """The caller may use the memory for something else as soon as it has its answer, whatever that is."""
    async with (
        dqkv.AsyncClient(server.target, timeout_s=120) as client,
        await client.region(REGION_NBYTES, kind="memfd") as region,
    ):
        arrays = long_request(region)
        task = asyncio.create_task(client.backward(**arrays))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(is_left_alone, arrays)


@pytest.mark.parametrize("inline_nbytes", [None, -1], ids=["unary", "stream"])
def test_nothing_is_written_after_a_deadline_has_passed(server: Running, inline_nbytes: int | None) -> None:
    """Whether the server refuses it at once, because it predicts more, or gives it up in the middle."""
    with (
        dqkv.Client(server.target, timeout_s=120, inline_nbytes=inline_nbytes) as client,
        client.region(REGION_NBYTES, kind="memfd") as region,
    ):
        arrays = long_request(region)
        with pytest.raises(dqkv.errors.WontFinish):
            client.backward(**arrays, timeout_s=0.15)
        assert is_left_alone(arrays)


# ---- whose memory it stays
def test_a_client_s_segment_outlives_the_servers_that_opened_it() -> None:
    """Made by Python's own SharedMemory, whose tracker removes what a process attached to when that process ends."""
    creator = shared_memory.SharedMemory(name=f"dqkv-tracked-{secrets.token_hex(4)}", create=True, size=NBYTES)
    try:
        memory = np.frombuffer(creator.buf, dtype=np.uint8)[:NBYTES]
        for end in (signal.SIGTERM, signal.SIGKILL):
            regional.fill(memory, ONE)
            with running() as server, Caller(server) as caller:
                request = pb.RegisterRegionRequest(posix=pb.PosixSharedMemory(name=f"/{creator.name}"), nbytes=NBYTES)
                handle = caller.ask(caller.regions.RegisterRegion, request).handle
                caller.ask(caller.gradients.Backward, regional.request(ONE, handle))
                assert_right(ONE, regional.gradients(memory, ONE))
                server.stop(end)
            assert (SHM / creator.name).stat().st_size >= NBYTES
        del memory
    finally:
        creator.close()
        creator.unlink()


def test_arrays_over_a_region_outlive_it(server: Running) -> None:
    """Closing the region with views alive raises nothing and takes nothing away; the arrays then go by message."""
    with dqkv.Client(server.target, timeout_s=120) as client:
        region = client.region(NBYTES, kind="posix", label="views")
        places = regional.layout(ONE)
        arrays = {
            role: region.tensor(array.shape, "fp32", byte_offset=places[role]) for role, array in ONE.inputs.items()
        }
        for role, array in ONE.inputs.items():
            arrays[role][...] = array
        by_region = server.metric("dqkv_bytes_total", direction="in", transport="region")
        answer = client.backward(**arrays)
        sent = server.metric("dqkv_bytes_total", direction="in", transport="region") - by_region
        assert sent == ONE.nbytes
        region.close()
        region.close()
        again = client.backward(**arrays)
        assert server.metric("dqkv_bytes_total", direction="in", transport="region") - by_region == sent
        for gradients in (answer, again):
            assert_right(ONE, {role: getattr(gradients, role) for role in ONE.gradients})
        arrays["q"][...] = 0
    assert (arrays["q"] == 0).all()
    assert not (arrays["k"] == 0).all()


def test_this_process_tracks_no_segment_of_the_client(server: Running) -> None:
    """A tracker would remove segments, of this process or others, that somebody still uses."""
    seen: list[str] = []
    honest = resource_tracker.register

    def watching(name: str, kind: str) -> None:
        seen.append(name)
        honest(name, kind)

    resource_tracker.register = watching
    try:
        with dqkv.Client(server.target) as client, client.region(NBYTES, kind="posix"):
            pass
    finally:
        resource_tracker.register = honest
    assert seen == []
