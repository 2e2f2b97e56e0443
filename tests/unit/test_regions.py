"""Regions belong to their owner, end with their lease, and no request reads or writes a byte that is not its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from pathlib import Path

import pytest

from dqkv import errors
from dqkv.location import InRegion
from dqkv.memory import memfd
from dqkv.memory.block import InBlock
from dqkv.memory.posix import open_posix
from dqkv.memory.regions import LABEL_LIMIT, Access, RegionLimits, RegionTable
from dqkv.memory.staging import StagingPool
from dqkv.tensor import DType, Tensor

pytestmark = pytest.mark.numpy_only

A, B = "uid:1000", "cert:other"
NBYTES = 1 << 16
EXTREMES = [-(2**63), -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64]


class World:
    """A table with its clock, what it told others, and files that clients share with it."""

    def __init__(self, **limits):
        self.now = 1000.0
        self.closed = []
        self.events = []
        self.paths = []
        ids = itertools.count(1)
        self.staging = StagingPool(limit_nbytes=1 << 20, block_ids=ids, on_drop=self.closed.append)
        self.table = RegionTable(
            limits=RegionLimits(**{"regions_per_owner": 8, **limits}),
            block_ids=ids,
            on_close=self.closed.append,
            observe=lambda kind, event: self.events.append((kind, event)),
            is_own=self.staging.owns,
            clock=lambda: self.now,
        )

    def memfd(self, nbytes=NBYTES):
        return memfd.inspect(memfd.create("dqkv-test", nbytes))

    def posix(self, nbytes=NBYTES):
        path = Path("/dev/shm", f"dqkv-test.{secrets.token_hex(6)}")
        path.write_bytes(bytes(nbytes))
        self.paths.append(path)
        return open_posix(f"/{path.name}", uid=os.geteuid())

    def register(self, owner=A, memory=None, **terms):
        memory = memory or self.memfd()
        terms = {"nbytes": memory.nbytes, "access": Access.READ_WRITE, "label": "", "lease_s": 0.0, **terms}
        return self.table.register(owner, memory, **terms)

    def again(self, memory):
        """Another descriptor of the same memory, as a client would send it."""
        return memfd.inspect(os.dup(memory.fd))

    def use(self, owner=A, reads=None, writes=None):
        return self.table.use(owner, reads=reads or {}, writes=writes or {})

    def close(self):
        self.table.close()
        self.staging.close()
        for path in self.paths:
            path.unlink(missing_ok=True)


@pytest.fixture
def make_world():
    made = []

    def make(**limits):
        made.append(World(**limits))
        return made[-1]

    before = os.listdir("/proc/self/fd")
    yield make
    for world in made:
        world.close()
    left = set(os.listdir("/proc/self/fd")) - set(before)
    assert not left, "a descriptor was left open"


@pytest.fixture
def world(make_world):
    return make_world()


def tensor(region, byte_offset=0, shape=(4, 8), strides=(8, 1), dtype=DType.BF16):
    where = InRegion(getattr(region, "handle", region), byte_offset)
    return Tensor(dtype=dtype, shape=tuple(shape), strides=tuple(strides), data=where)


# ---- registering
@pytest.mark.parametrize("kind", ["memfd", "posix"])
def test_a_region_is_what_was_registered(world, kind):
    memory = getattr(world, kind)()
    region = world.register(memory=memory, nbytes=NBYTES - 1, label="step 3", lease_s=30)
    assert len(region.handle) == 16
    assert (region.nbytes, region.label, region.access, region.kind) == (NBYTES - 1, "step 3", "read_write", kind)
    assert (region.lease_s, region.in_use) == (30, 0)
    assert world.table.list(A) == [region]
    assert world.table.totals()[kind] == (1, NBYTES - 1)
    with world.use(reads={"q": tensor(region, 64)}) as use:
        (block,) = use.blocks
        assert (block.nbytes, block.sealed, block.writable) == (NBYTES - 1, kind == "memfd", True)
        assert use.tensors["q"].data == InBlock(block.block_id, 64)
        assert world.table.list(A)[0].in_use == 1


def test_handles_never_come_twice(world):
    handles = set()
    for _ in range(100):
        region = world.register()
        handles.add(region.handle)
        asyncio.run(world.table.release(A, region.handle))
    assert len(handles) == 100


@pytest.mark.parametrize("nbytes", [0, NBYTES + 1, *EXTREMES])
def test_a_size_that_the_memory_does_not_have_is_refused(world, nbytes):
    with pytest.raises(errors.RegionInvalid, match=str(NBYTES)) as refused:
        world.register(nbytes=nbytes)
    assert refused.value.field == "nbytes"


@pytest.mark.parametrize("lease_s", [-1.0, 3600.5, float("inf"), float("nan"), 1e300])
def test_a_lease_that_cannot_be_is_refused(world, lease_s):
    with pytest.raises(errors.RegionInvalid) as refused:
        world.register(lease_s=lease_s)
    assert refused.value.field == "lease_s"
    region = world.register()
    with pytest.raises(errors.RegionInvalid):
        world.table.renew(A, region.handle, lease_s)


def test_a_label_is_short(world):
    world.register(label="x" * LABEL_LIMIT)
    with pytest.raises(errors.RegionInvalid) as refused:
        world.register(label="x" * (LABEL_LIMIT + 1))
    assert refused.value.field == "label"


def test_memory_that_is_for_reading_cannot_be_registered_for_writing(world):
    fd = memfd.create("dqkv-test", NBYTES)
    for_reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    memory = memfd.inspect(for_reading)
    assert not memory.writable
    with pytest.raises(errors.RegionInvalid) as refused:
        world.register(memory=memfd.inspect(os.dup(for_reading)))
    assert refused.value.field == "access"
    region = world.register(memory=memory, access=Access.READ)
    with world.use(reads={"q": tensor(region)}) as use:
        assert not use.blocks[0].writable


def test_the_servers_own_memory_cannot_be_registered(world):
    with world.staging.acquire(NBYTES) as staging:
        memory = memfd.inspect(os.dup(staging.block.fd))
        with pytest.raises(errors.RegionNotOwned, match="this server"):
            world.register(memory=memory, nbytes=NBYTES)


def test_one_owner_and_all_owners_hold_as_many_regions_as_they_may(make_world):
    world = make_world(regions_per_owner=2, regions=3)
    first = world.register(A)
    world.register(A)
    with pytest.raises(errors.QuotaRegions, match="2"):
        world.register(A)
    world.register(B)
    with pytest.raises(errors.QuotaRegions, match="3"):
        world.register(B)
    asyncio.run(world.table.release(A, first.handle))
    world.register(B)


# ---- owners
def test_a_stranger_is_answered_as_if_there_were_no_region(world):
    region = world.register(A)
    unknown = secrets.token_bytes(16)
    for handle in (region.handle, unknown, b"", b"x" * 1000):
        for call in (
            lambda handle=handle: world.table.renew(B, handle, 0),
            lambda handle=handle: world.table.probe(B, handle, 0, 8),
            lambda handle=handle: asyncio.run(world.table.release(B, handle)),
            lambda handle=handle: world.use(B, reads={"handle": tensor(handle)}),
            lambda handle=handle: world.use(B, writes={"handle": tensor(handle)}),
        ):
            with pytest.raises(errors.RegionUnknown) as refused:
                call()
            assert refused.value.message == "handle names no region of this caller"
    assert world.table.list(B) == []
    assert [found.handle for found in world.table.list(A)] == [region.handle]
    assert world.table.list(A)[0].in_use == 0


@pytest.mark.parametrize("kind", ["memfd", "posix"])
def test_memory_of_anothers_region_cannot_be_registered_while_it_lives(world, kind):
    memory = getattr(world, kind)()
    region = world.register(A, memory)

    def again():
        return world.again(memory) if kind == "memfd" else open_posix(f"/{world.paths[0].name}", uid=os.geteuid())

    with pytest.raises(errors.RegionNotOwned):
        world.register(B, again())
    twice = world.register(A, again())
    anew = again()
    asyncio.run(world.table.release(A, region.handle))
    with pytest.raises(errors.RegionNotOwned):
        world.register(B, again()) if kind == "posix" else world.register(B, memfd.inspect(os.dup(anew.fd)))
    asyncio.run(world.table.release(A, twice.handle))
    world.register(B, anew)


# ---- bounds
@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("byte_offset", [NBYTES - 62, NBYTES, NBYTES + 2, 1, 3, *EXTREMES])
def test_a_tensor_that_leaves_its_region_or_is_unaligned_is_refused(world, byte_offset, writes):
    region = world.register()
    with pytest.raises(errors.RegionBounds, match=str(NBYTES)) as refused:
        world.use(**{"writes" if writes else "reads": {"dq": tensor(region, byte_offset)}})
    assert refused.value.field == "dq"
    assert world.table.list(A)[0].in_use == 0


def test_a_tensor_may_end_with_its_region(world):
    region = world.register()
    world.use(reads={"q": tensor(region, NBYTES - 64)}).release()
    world.use(writes={"dq": tensor(region, NBYTES - 64)}).release()
    world.use(reads={"q": tensor(region, NBYTES, shape=(0, 8))}).release()
    with pytest.raises(errors.RegionBounds):
        world.use(reads={"q": tensor(region, NBYTES + 2, shape=(0, 8))})


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 8), (NBYTES // 2, 1)),
        ((2**31, 2**29), (1, 1)),
        ((2, 8), (2**61 - 64, 1)),
        ((2**31 - 1, 8), (2**30, 1)),
        ((NBYTES,), (1,)),
    ],
)
def test_a_shape_whose_last_byte_leaves_the_region_is_refused(world, shape, strides):
    region = world.register()
    with pytest.raises((errors.RegionBounds, errors.SizeOverflow)):
        world.use(reads={"q": tensor(region, 0, shape, strides)})


def test_bounds_are_the_regions_not_the_files(world):
    region = world.register(nbytes=64)
    world.use(reads={"q": tensor(region)}).release()
    with pytest.raises(errors.RegionBounds):
        world.use(reads={"q": tensor(region, 2)})


def test_an_expanded_tensor_takes_only_the_bytes_it_has(world):
    region = world.register(nbytes=16)
    world.use(reads={"dout": tensor(region, 0, (1 << 20, 64, 8), (0, 0, 1))}).release()


def test_a_write_into_a_region_for_reading_is_refused(world):
    region = world.register(access=Access.READ)
    world.use(reads={"q": tensor(region)}).release()
    with pytest.raises(errors.RegionInvalid, match="reading") as refused:
        world.use(writes={"dq": tensor(region)})
    assert refused.value.field == "dq"


@pytest.mark.parametrize("size", [0, 1, NBYTES - 1])
def test_memory_cut_short_after_registration_is_region_changed(world, size):
    region = world.register(memory=world.posix())
    os.truncate(world.paths[0], size)
    for call in (
        lambda: world.use(reads={"q": tensor(region)}),
        lambda: world.use(writes={"dq": tensor(region)}),
        lambda: world.table.probe(A, region.handle, NBYTES - 8, 8),
    ):
        with pytest.raises(errors.RegionChanged):
            call()
    assert ("posix", "probe_fail") in world.events
    os.truncate(world.paths[0], NBYTES)
    world.use(reads={"q": tensor(region)}).release()


def test_a_sealed_memfd_cannot_be_cut_short(world):
    memory = world.memfd()
    world.register(memory=memory)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)


# ---- overlap
def test_an_output_over_an_input_or_another_output_is_refused(world):
    region = world.register()
    for reads, writes, field in (
        ({"q": tensor(region)}, {"dq": tensor(region)}, "dq"),
        ({"q": tensor(region)}, {"dq": tensor(region, 62)}, "dq"),
        ({}, {"dq": tensor(region, 128), "dk": tensor(region, 128 + 62)}, "dk"),
        ({"q": tensor(region, 0, (4, 8), (0, 1))}, {"dq": tensor(region, 14)}, "dq"),
    ):
        with pytest.raises(errors.RegionOverlap) as refused:
            world.use(reads=reads, writes=writes)
        assert refused.value.field == field
    world.use(reads={"q": tensor(region)}, writes={"dq": tensor(region, 64), "dk": tensor(region, 128)}).release()
    world.use(reads={"q": tensor(region), "k": tensor(region), "v": tensor(region, 2)}).release()


def test_overlap_is_seen_through_two_regions_on_the_same_memory(world):
    memory = world.memfd()
    again = world.again(memory)
    first, second = world.register(memory=memory), world.register(memory=again)
    with pytest.raises(errors.RegionOverlap):
        world.use(reads={"q": tensor(first)}, writes={"dq": tensor(second, 62)})
    with pytest.raises(errors.RegionOverlap):
        world.use(writes={"dq": tensor(first), "dk": tensor(second)})
    with world.use(writes={"dq": tensor(first)}), pytest.raises(errors.RegionBusy):
        world.use(reads={"q": tensor(second, 62)})
    other = world.register()
    world.use(reads={"q": tensor(first)}, writes={"dq": tensor(other)}).release()


def test_gradients_may_interleave_in_one_fused_tensor(world):
    region = world.register()
    rows, heads, width = 16, 2, 8
    parts = {
        role: tensor(region, 2 * index * heads * width, (rows, heads, width), (3 * heads * width, width, 1))
        for index, role in enumerate(("dq", "dk", "dv"))
    }
    world.use(writes=parts).release()
    with world.use(writes={"dq": parts["dq"]}):
        world.use(writes={"dk": parts["dk"], "dv": parts["dv"]}).release()
        with pytest.raises(errors.RegionBusy):
            world.use(writes={"dq": parts["dq"]})


@pytest.mark.parametrize("strides", [(0, 1), (4, 1), (1, 1)])
def test_an_output_whose_elements_share_bytes_is_refused(world, strides):
    region = world.register()
    with pytest.raises(errors.RegionOverlap, match="strides"):
        world.use(writes={"dq": tensor(region, 0, (4, 8), strides)})
    world.use(reads={"q": tensor(region, 0, (4, 8), strides)}).release()
    world.use(writes={"dq": tensor(region, 0, (1, 8), strides)}).release()


def test_two_requests_in_flight_never_write_the_same_bytes_nor_read_what_one_writes(world):
    region = world.register()
    writing = world.use(writes={"dq": tensor(region)})
    for reads, writes in (
        ({}, {"dk": tensor(region)}),
        ({}, {"dk": tensor(region, 62)}),
        ({"q": tensor(region)}, {}),
    ):
        with pytest.raises(errors.RegionBusy):
            world.use(reads=reads, writes=writes)
    world.use(reads={"q": tensor(region, 64)}, writes={"dk": tensor(region, 128)}).release()
    writing.release()
    reading = [world.use(reads={"q": tensor(region)}) for _ in range(2)]
    for use in reading:
        with pytest.raises(errors.RegionBusy):
            world.use(writes={"dq": tensor(region)})
        use.release()
    world.use(writes={"dq": tensor(region)}).release()
    assert world.table.list(A)[0].in_use == 0


# ---- the end of a region
async def test_a_released_handle_is_unknown_and_its_memory_closed(world):
    region = world.register()
    with world.use(reads={"q": tensor(region)}) as use:
        block_id = use.blocks[0].block_id
    await world.table.release(A, region.handle)
    assert block_id in world.closed
    for call in (
        lambda: world.table.renew(A, region.handle, 0),
        lambda: world.table.probe(A, region.handle, 0, 8),
        lambda: world.use(reads={"q": tensor(region)}),
    ):
        with pytest.raises(errors.RegionUnknown):
            call()
    with pytest.raises(errors.RegionUnknown):
        await world.table.release(A, region.handle)
    anew = world.register()
    with pytest.raises(errors.RegionUnknown):
        world.use(reads={"q": tensor(region)})
    world.use(reads={"q": tensor(anew)}).release()


async def test_release_waits_for_requests_in_flight_and_lets_no_new_one_in(world):
    region = world.register()
    first, second = world.use(reads={"q": tensor(region)}), world.use(reads={"q": tensor(region)})
    block = first.blocks[0]
    releasing = [asyncio.create_task(world.table.release(A, region.handle)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(errors.RegionUnknown):
        world.use(reads={"q": tensor(region)})
    assert world.table.list(A) == []
    first.release()
    first.release()
    await asyncio.sleep(0)
    assert not any(task.done() for task in releasing)
    assert os.fstat(block.fd).st_size == NBYTES
    second.release()
    await asyncio.gather(*releasing)
    assert world.closed == [block.block_id]


async def test_a_client_that_stops_waiting_does_not_take_the_release_back(world):
    region = world.register()
    use = world.use(reads={"q": tensor(region)})
    releasing = asyncio.create_task(world.table.release(A, region.handle))
    await asyncio.sleep(0)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    with pytest.raises(errors.RegionUnknown):
        world.use(reads={"q": tensor(region)})
    use.release()
    assert world.closed == [use.blocks[0].block_id]


def test_an_expired_handle_says_so_to_its_owner_alone(world):
    region = world.register(lease_s=10)
    world.now += 10
    for _ in range(2):
        for call in (
            lambda: world.table.renew(A, region.handle, 0),
            lambda: world.table.probe(A, region.handle, 0, 8),
            lambda: world.use(reads={"q": tensor(region)}),
            lambda: asyncio.run(world.table.release(A, region.handle)),
        ):
            with pytest.raises(errors.RegionLeaseExpired):
                call()
        with pytest.raises(errors.RegionUnknown):
            world.use(B, reads={"q": tensor(region)})
        assert world.table.list(A) == []
        world.table.expire()
    assert len(world.closed) == 1
    assert world.table.totals()["memfd"] == (0, 0)
    assert world.events == [("memfd", "register"), ("memfd", "expire")]


def test_a_lease_is_renewed_by_request_and_by_use(world):
    region = world.register(lease_s=10)
    for _ in range(5):
        world.now += 9
        assert world.table.renew(A, region.handle, 0) == 10
    for _ in range(5):
        world.now += 9
        world.use(reads={"q": tensor(region)}).release()
    assert world.table.renew(A, region.handle, 20) == 20
    world.now += 19
    world.table.expire()
    assert world.table.list(A)[0].lease_s == pytest.approx(1)
    world.now += 1
    world.table.expire()
    assert world.table.list(A) == []


def test_a_lease_does_not_run_out_under_a_request_in_flight(world):
    region = world.register(lease_s=10)
    use = world.use(reads={"q": tensor(region)})
    world.now += 1000
    world.table.expire()
    assert world.closed == []
    assert os.fstat(use.blocks[0].fd).st_size == NBYTES
    use.release()
    world.now += 9
    world.table.expire()
    assert world.closed == []
    world.now += 1
    world.table.expire()
    assert world.closed == [use.blocks[0].block_id]


def test_closing_the_table_waits_for_requests_in_flight(world):
    idle, busy = world.register(), world.register()
    use = world.use(reads={"q": tensor(busy)})
    world.table.close()
    assert len(world.closed) == 1
    assert world.table.list(A) == []
    use.release()
    assert len(world.closed) == 2
    assert idle.handle != busy.handle


def test_a_refused_use_holds_nothing(world):
    good, bad = world.register(), world.register(nbytes=16)
    with pytest.raises(errors.RegionBounds):
        world.use(reads={"q": tensor(good), "k": tensor(bad)})
    with pytest.raises(errors.RegionUnknown):
        world.use(reads={"q": tensor(good)}, writes={"dq": tensor(b"x" * 16)})
    assert [region.in_use for region in world.table.list(A)] == [0, 0]


# ---- probes
def test_a_probe_returns_what_lies_there(world):
    memory = world.memfd()
    region = world.register(memory=memory)
    os.pwrite(memory.fd, b"nonce", NBYTES - 5)
    assert world.table.probe(A, region.handle, NBYTES - 5, 5) == b"nonce"
    assert world.table.probe(A, region.handle, 0, 64) == bytes(64)


@pytest.mark.parametrize(("byte_offset", "nbytes"), [(NBYTES, 1), (NBYTES - 7, 8), *((x, 8) for x in EXTREMES)])
def test_a_probe_stays_in_its_region(world, byte_offset, nbytes):
    region = world.register()
    with pytest.raises(errors.RegionBounds):
        world.table.probe(A, region.handle, byte_offset, nbytes)


@pytest.mark.parametrize("nbytes", [0, 65, *EXTREMES])
def test_a_probe_is_small(world, nbytes):
    region = world.register()
    with pytest.raises(errors.RegionInvalid):
        world.table.probe(A, region.handle, 0, nbytes)
