"""Requests whose tensors lie in regions: bounded by the region, never another caller's, never one over another."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from rig import doorbell, regional
from rig.caller import Caller, posix
from rig.memory import PosixMemory, memfd
from rig.process import children, paused, wait_for
from rig.server import Running
from rig.wire import Failure, assert_right, failure_of, inline_gradients, sample, unary_request

from dqkv.v1 import gradient_pb2 as pb

ONE = sample()
NBYTES = regional.nbytes(ONE)
SLOW = sample(1024, 4, 64)
"""Long enough on one core that its memory can be cut short while it runs."""
INVALID = grpc.StatusCode.INVALID_ARGUMENT
BOUNDS = (grpc.StatusCode.OUT_OF_RANGE, "REGION_BOUNDS")
OVERFLOW = (INVALID, "SIZE_OVERFLOW")
OVERLAP = (INVALID, "REGION_OVERLAP")
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "REGION_UNKNOWN")
CHANGED = (grpc.StatusCode.FAILED_PRECONDITION, "REGION_CHANGED")
BUSY = (grpc.StatusCode.FAILED_PRECONDITION, "REGION_BUSY")


@pytest.fixture
def caller(server: Running) -> Iterator[Caller]:
    with Caller(server) as one:
        yield one


@pytest.fixture
def memory() -> Iterator[PosixMemory]:
    """A segment with the request's tensors, and as much behind them."""
    with PosixMemory(2 * NBYTES) as one:
        regional.fill(one.bytes, ONE)
        yield one


def how(refused: Failure) -> tuple[grpc.StatusCode, str]:
    return refused.code, refused.reason


def failure(future: Any) -> Failure | None:
    """How a call that was begun ended; None when it was answered."""
    error = future.exception()
    return None if error is None else failure_of(error)


def backward(caller: Caller, request: pb.BackwardRequest) -> pb.BackwardResponse:
    return caller.ask(caller.gradients.Backward, request)


def slices(request: pb.BackwardRequest) -> dict[str, pb.RegionSlice]:
    """Every region slice of a request, by role."""
    named = (*request.problem.tensors, *request.problem.outputs)
    return {pb.TensorRole.Name(item.role).removeprefix("TENSOR_ROLE_").lower(): item.region for item in named}


# ---- what is right
@pytest.mark.parametrize("base", [0, 64, 4, NBYTES])
def test_gradients_are_written_where_they_should_be_and_nowhere_else(caller: Caller, base: int) -> None:
    with PosixMemory(3 * NBYTES) as memory:
        memory.bytes[:] = 0xA5
        regional.fill(memory.bytes, ONE, base)
        handle = caller.register(memory)
        answer = backward(caller, regional.request(ONE, handle, base=base))
        assert all(not tensor.data for tensor in answer.gradients)
        assert_right(ONE, regional.gradients(memory.bytes, ONE, base))
        assert (memory.bytes[:base] == 0xA5).all()
        assert (memory.bytes[base + NBYTES :] == 0xA5).all()


def test_the_same_request_works_by_memfd(server: Running, caller: Caller) -> None:
    fd = memfd(NBYTES)
    try:
        memory = np.frombuffer(mmap.mmap(fd, NBYTES), dtype=np.uint8)
        regional.fill(memory, ONE)
        handle = doorbell.register_memfd(server, caller, fd)
        backward(caller, regional.request(ONE, handle))
        assert_right(ONE, regional.gradients(memory, ONE))
    finally:
        os.close(fd)


# ---- offsets and sizes that lie
Q_NBYTES = ONE.inputs["q"].nbytes
OFFSETS = {
    "one_element_past": (NBYTES - Q_NBYTES + 4, BOUNDS),
    "at_the_end": (NBYTES, BOUNDS),
    "between_region_and_file_end": (NBYTES + 64, BOUNDS),
    "beyond_the_file": (1 << 40, BOUNDS),
    "largest": (2**63 - 4, BOUNDS),
    "largest_odd": (2**63 - 1, BOUNDS),
    "wraps_to_inside": (2**63 - Q_NBYTES, BOUNDS),
    "minus_one": (-1, BOUNDS),
    "minus_an_element": (-4, BOUNDS),
    "smallest": (-(2**63), BOUNDS),
    "unaligned": (2, BOUNDS),
}


@pytest.mark.parametrize("role", ["q", "dk"])
@pytest.mark.parametrize(("offset", "wanted"), OFFSETS.values(), ids=OFFSETS)
def test_an_offset_that_leaves_the_region_is_refused(
    caller: Caller, memory: PosixMemory, offset: int, wanted: tuple[Any, str], role: str
) -> None:
    """The region is half of its file, so the bound is the region's; inputs and gradients alike."""
    handle = caller.register(memory, NBYTES)
    before = memory.bytes.copy()
    request = regional.request(ONE, handle)
    slices(request)[role].byte_offset = offset
    refused = caller.refused(caller.gradients.Backward, request)
    assert how(refused) == wanted
    assert refused.field == role
    assert (memory.bytes == before).all()


STRIDES = {
    "one_row_past": ([512, 33, 16, 1], BOUNDS),
    "a_stride_beyond_everything": ([1, 2**61, 16, 1], OVERFLOW),
    "a_sum_beyond_64_bits": ([2**62 - 1, 2**62 - 1, 2**62 - 1, 1], OVERFLOW),
    "largest": ([2**63 - 1, 32, 16, 1], OVERFLOW),
    "negative": ([512, -32, 16, 1], OVERFLOW),
    "last_not_one": ([512, 32, 16, 2], (INVALID, "SHAPE_MISMATCH")),
    "too_few": ([32, 16, 1], (INVALID, "SHAPE_MISMATCH")),
    "too_many": ([512, 512, 32, 16, 1], (INVALID, "SHAPE_MISMATCH")),
}


@pytest.mark.parametrize(("strides", "wanted"), STRIDES.values(), ids=STRIDES)
def test_strides_that_leave_the_region_are_refused(
    caller: Caller, memory: PosixMemory, strides: list[int], wanted: tuple[Any, str]
) -> None:
    handle = caller.register(memory, NBYTES)
    request = regional.request(ONE, handle)
    # The last tensor in the region: whatever is more than it leaves it.
    slices(request)["dv"].strides[:] = strides
    assert how(caller.refused(caller.gradients.Backward, request)) == wanted


SHAPES = {
    "product_beyond_64_bits": [2**31, 2**31, 2**31, 16],
    "product_that_wraps_to_little": [2**32, 2**32, 2, 16],
    "product_at_the_limit": [2**60, 1, 2, 16],
    "largest": [1, 2**63 - 1, 2, 16],
    "negative": [1, -16, 2, 16],
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_whose_bytes_cannot_be_counted_is_refused(
    caller: Caller, memory: PosixMemory, shape: list[int]
) -> None:
    handle = caller.register(memory, NBYTES)
    request = regional.request(ONE, handle)
    for tensor in request.problem.tensors:
        tensor.shape[:] = shape
    assert how(caller.refused(caller.gradients.Backward, request)) == OVERFLOW


PROBES = {
    "nothing": (0, 0, (INVALID, "REGION_INVALID")),
    "negative_size": (0, -1, (INVALID, "REGION_INVALID")),
    "too_much": (0, 65, (INVALID, "REGION_INVALID")),
    "last_byte_and_one": (NBYTES - 1, 2, BOUNDS),
    "behind_the_region": (NBYTES, 1, BOUNDS),
    "before_it": (-1, 1, BOUNDS),
    "largest": (2**63 - 1, 64, BOUNDS),
}


@pytest.mark.parametrize(("offset", "nbytes", "wanted"), PROBES.values(), ids=PROBES)
def test_a_probe_that_leaves_the_region_is_refused(
    caller: Caller, memory: PosixMemory, offset: int, nbytes: int, wanted: tuple[Any, str]
) -> None:
    handle = caller.register(memory, NBYTES)
    request = pb.ProbeRegionRequest(handle=handle, byte_offset=offset, nbytes=nbytes)
    assert how(caller.refused(caller.regions.ProbeRegion, request)) == wanted


# ---- memory cut short
def test_memory_cut_short_before_a_request_is_refused_and_harms_nobody(
    server: Running, caller: Caller, memory: PosixMemory
) -> None:
    handle = caller.register(memory)
    workers = children(server.process.pid)
    os.ftruncate(memory.fd, 0)
    assert how(caller.refused(caller.gradients.Backward, regional.request(ONE, handle))) == CHANGED
    probe = pb.ProbeRegionRequest(handle=handle, nbytes=1)
    assert how(caller.refused(caller.regions.ProbeRegion, probe)) == CHANGED
    os.ftruncate(memory.fd, 2 * NBYTES)
    regional.fill(memory.bytes, ONE)
    backward(caller, regional.request(ONE, handle))
    assert_right(ONE, regional.gradients(memory.bytes, ONE))
    assert children(server.process.pid) == workers


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.005, 0.02, 0.1])
def test_memory_cut_short_while_a_request_runs_harms_nobody_else(
    server: Running, caller: Caller, delay_s: float
) -> None:
    """Cut at any moment the caller gets REGION_CHANGED or an exact answer, and every process lives."""
    workers = children(server.process.pid)
    with PosixMemory(regional.nbytes(SLOW)) as memory, Caller(server) as other:
        regional.fill(memory.bytes, SLOW)
        handle = caller.register(memory)
        request = regional.request(SLOW, handle)
        del request.problem.outputs[:]
        began = time.monotonic()
        future = caller.gradients.Backward.future(request, timeout=120, metadata=caller.metadata)
        time.sleep(delay_s)
        os.ftruncate(memory.fd, 4096)
        assert_right(ONE, inline_gradients(ONE, backward(other, unary_request(ONE))))
        refused = failure(future)
        took_s = time.monotonic() - began
    if refused is None:
        assert_right(SLOW, inline_gradients(SLOW, future.result()))
    else:
        assert how(refused) == CHANGED
    print(f"cut after {delay_s} s of {took_s:.2f} s: {'an exact answer' if refused is None else refused.reason}")
    assert children(server.process.pid) == workers
    assert server.process.poll() is None


@pytest.mark.parametrize("cut", [0, 4096, "inside_the_gradients"])
def test_gradients_are_never_written_past_a_region_that_was_cut_short(
    server: Running, caller: Caller, cut: int | str
) -> None:
    """The file stays as short as its owner made it: a write past its end would make it longer again."""
    with PosixMemory(regional.nbytes(SLOW)) as memory:
        regional.fill(memory.bytes, SLOW)
        handle = caller.register(memory)
        future = caller.gradients.Backward.future(regional.request(SLOW, handle), timeout=120, metadata=caller.metadata)
        wait_for(lambda: future.done() or any(region.in_use for region in caller.list_regions()), "the request runs")
        # The inputs have been read by now, or are being read.
        time.sleep(0.1)
        size = regional.layout(SLOW)["dk"] + 64 if isinstance(cut, str) else cut
        os.ftruncate(memory.fd, size)
        refused = failure(future)
        assert refused is None or how(refused) == CHANGED
        assert memory.path.stat().st_size == size
    assert server.process.poll() is None


def test_memory_whose_name_is_removed_goes_on(caller: Caller, memory: PosixMemory) -> None:
    handle = caller.register(memory)
    memory.path.unlink()
    backward(caller, regional.request(ONE, handle))
    assert_right(ONE, regional.gradients(memory.bytes, ONE))


# ---- whose memory it is
def test_a_strangers_handle_answers_as_if_it_did_not_exist(
    server: Running, caller: Caller, memory: PosixMemory
) -> None:
    """Use, probe, renewal, release and list: word for word what a handle of nobody gets."""
    handle = caller.register(memory)
    nobodys = bytes(16)
    with Caller(server) as stranger:
        calls = {
            "Backward": lambda name: (stranger.gradients.Backward, regional.request(ONE, name)),
            "ProbeRegion": lambda name: (stranger.regions.ProbeRegion, pb.ProbeRegionRequest(handle=name, nbytes=1)),
            "RenewRegion": lambda name: (stranger.regions.RenewRegion, pb.RenewRegionRequest(handle=name)),
            "ReleaseRegion": lambda name: (stranger.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=name)),
        }
        for make in calls.values():
            refused = stranger.refused(*make(handle))
            assert how(refused) == UNKNOWN
            assert refused == stranger.refused(*make(nobodys))
        assert stranger.list_regions() == []
    assert [region.handle for region in caller.list_regions()] == [handle]
    backward(caller, regional.request(ONE, handle))
    assert_right(ONE, regional.gradients(memory.bytes, ONE))


@pytest.mark.parametrize("kind", ["posix", "memfd"])
def test_memory_of_anothers_region_cannot_be_registered(server: Running, caller: Caller, kind: str) -> None:
    """Names do not protect: it is the memory itself that is known."""
    with Caller(server) as other, PosixMemory(NBYTES) as memory:
        fd = memfd(NBYTES) if kind == "memfd" else -1
        try:

            def register(one: Caller) -> bytes:
                return one.register(memory) if kind == "posix" else doorbell.register_memfd(server, one, fd)

            handle = register(caller)
            with pytest.raises(grpc.RpcError) as refused:
                register(other)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert register(caller), "its owner may register it again"
            for region in caller.list_regions():
                caller.ask(caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=region.handle))
            assert register(other) != handle
        finally:
            if kind == "memfd":
                os.close(fd)


# ---- one over another
MOVES = {
    "an_output_on_an_input": ("dq", "q", 0),
    "an_output_into_an_inputs_last_element": ("dq", "k", Q_NBYTES - 4),
    "an_output_on_another": ("dv", "dk", 0),
    "an_output_half_over_another": ("dv", "dk", Q_NBYTES // 2),
}


@pytest.mark.parametrize(("role", "over", "shift"), MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("twice", [False, True], ids=["one_region", "two_regions_on_one_file"])
def test_an_output_over_other_tensors_is_refused(
    caller: Caller, memory: PosixMemory, role: str, over: str, shift: int, twice: bool
) -> None:
    handle = caller.register(memory)
    request = regional.request(ONE, handle)
    moved = slices(request)[role]
    moved.byte_offset = slices(request)[over].byte_offset + shift
    if twice:
        moved.handle = caller.register(memory)
    before = memory.bytes.copy()
    refused = caller.refused(caller.gradients.Backward, request)
    assert how(refused) == OVERLAP
    assert (memory.bytes == before).all()


def test_an_output_whose_elements_share_bytes_is_refused(caller: Caller, memory: PosixMemory) -> None:
    handle = caller.register(memory)
    request = regional.request(ONE, handle)
    slices(request)["dq"].strides[:] = [512, 0, 16, 1]
    assert how(caller.refused(caller.gradients.Backward, request)) == OVERLAP


def test_of_two_requests_in_flight_the_second_writer_is_refused(server: Running, caller: Caller) -> None:
    """And so is one that reads what the first writes."""
    with PosixMemory(NBYTES) as memory:
        regional.fill(memory.bytes, ONE)
        handle = caller.register(memory)
        again = caller.register(memory)
        request = regional.request(ONE, handle)
        with paused(*children(server.process.pid)):
            future = caller.gradients.Backward.future(request, timeout=120, metadata=caller.metadata)
            wait_for(lambda: [region for region in caller.list_regions() if region.in_use], "the request is in flight")
            assert how(caller.refused(caller.gradients.Backward, request)) == BUSY
            assert how(caller.refused(caller.gradients.Backward, regional.request(ONE, again))) == BUSY
            reader = unary_request(ONE)
            written = pb.RegionSlice(handle=again, byte_offset=regional.layout(ONE)["dq"])
            reader.problem.tensors[0].region.CopyFrom(written)
            reader.ClearField("checksum")
            assert how(caller.refused(caller.gradients.Backward, reader)) == BUSY
        future.result()
        assert_right(ONE, regional.gradients(memory.bytes, ONE))
        assert how_many_in_use(caller) == 0
        backward(caller, request)


def test_two_requests_may_read_the_same_memory(caller: Caller, memory: PosixMemory) -> None:
    handle = caller.register(memory)
    request = regional.request(ONE, handle)
    del request.problem.outputs[:]
    futures = [caller.gradients.Backward.future(request, timeout=120, metadata=caller.metadata) for _ in range(4)]
    for future in futures:
        assert_right(ONE, inline_gradients(ONE, future.result()))


def test_a_region_for_reading_is_not_written(caller: Caller, memory: PosixMemory) -> None:
    handle = bytes(
        caller.ask(caller.regions.RegisterRegion, posix(memory.name, NBYTES, access=pb.REGION_ACCESS_READ)).handle
    )
    before = memory.bytes.copy()
    refused = caller.refused(caller.gradients.Backward, regional.request(ONE, handle))
    assert how(refused) == (INVALID, "REGION_INVALID")
    assert refused.field in {"dq", "dk", "dv"}
    assert (memory.bytes == before).all()


def how_many_in_use(caller: Caller) -> int:
    return sum(region.in_use for region in caller.list_regions())
