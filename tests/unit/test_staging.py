"""The staging pool lends warm sealed memory, never more than its limit, and never what somebody still looks at."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from dqkv import errors
from dqkv.memory import memfd
from dqkv.memory.staging import SMALLEST_NBYTES, StagingPool

pytestmark = pytest.mark.numpy_only

MIB = 1 << 20
SHM = Path("/dev/shm")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def pool(clock, dropped):
    made = StagingPool(limit_nbytes=16 * MIB, block_ids=itertools.count(1), on_drop=dropped.append, clock=clock)
    yield made
    made.close()


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_a_block_is_writable_shared_memory_that_cannot_be_resized(pool):
    staging = pool.acquire(3 * MIB)
    assert staging.view.nbytes == 3 * MIB
    assert (staging.block.sealed, staging.block.writable) == (True, True)
    staging.view[-4:] = b"last"
    assert os.pread(staging.block.fd, 4, 3 * MIB - 4) == b"last"
    for size in (0, MIB, 64 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(staging.block.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(staging.block.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    staging.release()


def test_a_block_has_its_memory_before_it_is_lent(pool):
    with pool.acquire(2 * MIB) as staging:
        assert os.fstat(staging.block.fd).st_blocks * 512 >= 2 * MIB


def test_a_warm_block_is_lent_again_and_nothing_new_is_made(pool, dropped):
    with pool.acquire(2 * MIB) as first:
        block = first.block
    before = open_fds()
    for nbytes in (2 * MIB, 2 * MIB - 5, 3 * MIB // 2):
        with pool.acquire(nbytes) as staging:
            assert staging.block == block
            assert staging.view.nbytes == nbytes
    assert open_fds() == before
    assert pool.total_nbytes == block.nbytes
    assert dropped == []


def test_requests_in_flight_never_share_a_block(pool):
    held = [pool.acquire(MIB) for _ in range(4)]
    assert len({staging.block.block_id for staging in held}) == 4
    for index, staging in enumerate(held):
        staging.view[:] = bytes([index]) * MIB
    assert [bytes(staging.view[:3]) for staging in held] == [bytes([index]) * 3 for index in range(4)]


def test_a_small_request_does_not_take_a_large_block(pool):
    with pool.acquire(8 * MIB):
        pass
    with pool.acquire(MIB) as small:
        assert small.block.nbytes == MIB
    with pool.acquire(0) as empty:
        assert empty.view.nbytes == 0
        assert empty.block.nbytes == SMALLEST_NBYTES


@pytest.mark.parametrize("nbytes", [1, 4096, SMALLEST_NBYTES, SMALLEST_NBYTES + 1, MIB - 1, MIB + 1, 5 * MIB + 7])
def test_a_block_wastes_an_eighth_at_most(pool, nbytes):
    with pool.acquire(nbytes) as staging:
        assert nbytes <= staging.block.nbytes <= max(SMALLEST_NBYTES, nbytes * 9 / 8 + 4096)


def test_the_whole_limit_can_be_lent_and_not_a_byte_more(pool):
    with pool.acquire(16 * MIB), pytest.raises(errors.QuotaBytes) as quota:
        pool.acquire(1)
    assert quota.value.retry_after_s > 0
    with pytest.raises(errors.TooLarge, match=str(16 * MIB)):
        pool.acquire(16 * MIB + 1)
    with pytest.raises(errors.SizeOverflow):
        pool.acquire(-1)
    with pytest.raises(errors.TooLarge):
        pool.acquire(2**64)


def test_idle_blocks_make_room_for_a_size_that_does_not_fit_them(pool, dropped):
    with pool.acquire(6 * MIB) as first, pool.acquire(6 * MIB) as second:
        ids = [first.block.block_id, second.block.block_id]
    with pool.acquire(15 * MIB):
        assert pool.total_nbytes <= 16 * MIB
    assert sorted(dropped) == sorted(ids)


def test_used_memory_is_counted_and_given_back_once(pool):
    staging = pool.acquire(MIB)
    assert (pool.used_nbytes, pool.total_nbytes) == (MIB, MIB)
    staging.release()
    staging.release()
    assert (pool.used_nbytes, pool.total_nbytes) == (0, MIB)
    first, second = pool.acquire(MIB), pool.acquire(MIB)
    assert first.block.block_id != second.block.block_id


def test_a_view_is_dead_after_release(pool):
    staging = pool.acquire(MIB)
    view = staging.view
    staging.release()
    with pytest.raises(ValueError, match="released"):
        view[0]


@pytest.mark.parametrize(
    "look",
    [lambda view: view[5:9], lambda view: np.frombuffer(view, dtype=np.uint8)[5:9], memoryview],
    ids=["slice", "array", "memoryview"],
)
def test_memory_that_is_still_looked_at_is_not_lent_again(pool, dropped, look):
    staging = pool.acquire(MIB)
    staging.view[5:9] = b"mine"
    block_id = staging.block.block_id
    seen = look(staging.view)
    staging.release()
    with pool.acquire(MIB) as other:
        assert other.block.block_id != block_id
        other.view[:] = bytes(MIB)
    assert b"mine" in bytes(seen)
    pool.trim(0)
    assert block_id not in dropped
    del seen
    pool.trim(0)
    assert block_id in dropped


def test_closing_the_pool_leaves_views_and_releases_in_any_order_sound(clock, dropped):
    before = open_fds()
    pool = StagingPool(limit_nbytes=MIB, block_ids=itertools.count(), on_drop=dropped.append, clock=clock)
    held, idle = pool.acquire(MIB // 4), pool.acquire(MIB // 4)
    idle.release()
    held.view[:4] = b"mine"
    seen = held.view[:4]
    pool.close()
    assert dropped == [1]
    assert bytes(held.view[:4]) == b"mine"
    held.release()
    assert dropped == [1, 0]
    assert (pool.used_nbytes, pool.total_nbytes) == (0, 0)
    assert bytes(seen) == b"mine"
    del seen
    assert open_fds() == before


def test_trim_closes_what_was_idle_for_long(pool, clock, dropped):
    with pool.acquire(MIB) as old:
        pass
    clock.now += 30
    with pool.acquire(4 * MIB) as young:
        pass
    clock.now += 40
    pool.trim(60)
    assert dropped == [old.block.block_id]
    assert pool.total_nbytes == young.block.nbytes


def test_the_pool_knows_its_own_files(pool):
    with pool.acquire(MIB) as staging:
        own = os.fstat(staging.block.fd)
        other = memfd.create("dqkv-test", MIB)
        stranger = os.fstat(other)
        os.close(other)
        assert pool.owns(own.st_dev, own.st_ino)
        assert not pool.owns(stranger.st_dev, stranger.st_ino)


async def test_a_new_block_is_made_while_the_loop_goes_on(pool, monkeypatch):
    started, go = threading.Event(), threading.Event()
    create = memfd.create

    def slow(name, nbytes):
        started.set()
        assert go.wait(120)
        return create(name, nbytes)

    monkeypatch.setattr(memfd, "create", slow)
    waiting = asyncio.create_task(pool.acquire_async(10 * MIB))
    assert await asyncio.to_thread(started.wait, 120)
    with pytest.raises(errors.QuotaBytes):  # what is being made is counted
        pool.acquire(10 * MIB)
    go.set()
    with await waiting as staging:
        assert staging.view.nbytes == 10 * MIB


async def test_a_request_cancelled_while_its_block_is_made_leaks_nothing(pool, monkeypatch):
    started, go, made = threading.Event(), threading.Event(), threading.Event()
    create = memfd.create

    def slow(name, nbytes):
        started.set()
        assert go.wait(120)
        try:
            return create(name, nbytes)
        finally:
            made.set()

    monkeypatch.setattr(memfd, "create", slow)
    waiting = asyncio.create_task(pool.acquire_async(10 * MIB))
    assert await asyncio.to_thread(started.wait, 120)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    assert await asyncio.to_thread(made.wait, 120)
    async with asyncio.timeout(120):
        while not pool._idle:  # noqa: ASYNC110 - the thread's end reaches the loop by itself
            await asyncio.sleep(0.001)
    assert pool.used_nbytes == 0
    before = open_fds()
    with pool.acquire(10 * MIB):
        assert pool.total_nbytes == 10 * MIB
        assert open_fds() == before


async def test_memory_that_the_machine_does_not_have_is_quota_bytes_and_not_counted(pool, monkeypatch):
    def full(fd, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_fds()
    with pytest.raises(errors.QuotaBytes):
        pool.acquire(MIB)
    with pytest.raises(errors.QuotaBytes):
        await pool.acquire_async(MIB)
    assert pool.total_nbytes == 0
    assert open_fds() == before


KILLED_SERVER = """
    import itertools, sys, time
    from dqkv.memory.staging import StagingPool

    pool = StagingPool(limit_nbytes=1 << 26, block_ids=itertools.count(), on_drop=print)
    held = [pool.acquire(1 << 20) for _ in range(8)]
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_nothing_in_dev_shm():
    before = {path.name for path in SHM.iterdir()}
    for _ in range(5):
        command = [sys.executable, "-c", textwrap.dedent(KILLED_SERVER)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait(120) == -signal.SIGKILL
    assert not [path.name for path in SHM.iterdir() if path.name not in before and "dqkv-staging" in path.name]


def test_a_file_limit_is_quota_bytes():
    script = """
        import resource, itertools
        from dqkv import errors
        from dqkv.memory.staging import StagingPool

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        pool = StagingPool(limit_nbytes=1 << 26, block_ids=itertools.count(), on_drop=print)
        try:
            pool.acquire(1 << 21)
        except errors.QuotaBytes as error:
            print(error.reason, pool.total_nbytes)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "QUOTA_BYTES 0\n"), result.stderr
