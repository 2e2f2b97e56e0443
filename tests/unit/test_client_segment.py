"""Shared memory of the client: nothing is left behind, nothing is read outside it, views outlive the region."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dqkv import errors
from dqkv.client.segment import SEALS, Kind, Segment

pytestmark = pytest.mark.numpy_only

SHM = Path("/dev/shm")
KINDS = pytest.mark.parametrize("kind", list(Kind))
HANDLE = bytes(16)


def own_names() -> list[str]:
    return [path.name for path in SHM.glob("dqkv-*")]


@KINDS
def test_a_tensor_sees_the_segments_bytes(kind: Kind) -> None:
    segment = Segment(4096, kind)
    segment.head(4)[:] = (0x80, 0x3F, 0x00, 0x40)
    array = segment.tensor((2,), "bf16")
    assert array.dtype == ml_dtypes.bfloat16
    assert array.tolist() == [1.0, 2.0]
    segment.hide()
    array[0] = 3.0
    assert segment.tensor((1,), "bf16", byte_offset=0)[0] == 3.0


def test_a_memfd_is_sealed() -> None:
    segment = Segment(100, Kind.MEMFD)
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == SEALS
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 10)
    segment.hide()


def test_a_name_is_private_and_gone_once_hidden() -> None:
    before = own_names()
    segment = Segment(100, Kind.POSIX)
    (name,) = set(own_names()) - set(before)
    assert (SHM / name).stat().st_mode & 0o777 == 0o600
    segment.hide()
    segment.hide()
    assert own_names() == before


def test_a_full_file_system_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = own_names()
    with pytest.raises(errors.RegionInvalid, match="No space left"):
        Segment(4096, Kind.POSIX)
    assert own_names() == before


def machine_nbytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) << 10


@KINDS
@pytest.mark.parametrize(
    "nbytes",
    [0, -1, -(1 << 60), 1.5, "4096", None, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, "machine"],
)
def test_a_size_that_cannot_be_had_is_refused_before_anything_is_allocated(
    kind: Kind, nbytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> int:
        pytest.fail("memory was allocated")

    for name in ("posix_fallocate", "memfd_create", "ftruncate"):
        monkeypatch.setattr(os, name, never)
    before = own_names()
    asked = machine_nbytes() if nbytes == "machine" else nbytes
    with pytest.raises(errors.RegionInvalid) as caught:
        Segment(asked, kind)
    assert caught.value.field == "nbytes"
    assert f"nbytes is {asked!r}" in caught.value.message
    if isinstance(asked, int) and asked > 0:
        assert "the limit is" in caught.value.message
    assert own_names() == before


# ---- places
def places(segment: Segment, *arrays: np.ndarray) -> list[int]:
    found = [segment.find(array, HANDLE) for array in arrays]
    return [one.data.byte_offset for one in found if one is not None]


def test_tensors_without_an_offset_lie_behind_each_other_and_share_no_byte() -> None:
    segment = Segment(4096, Kind.MEMFD)
    shapes = [((3,), "bf16"), ((1,), "fp32"), ((33,), "fp16"), ((4, 4), "fp32")]
    arrays = [segment.tensor(shape, dtype) for shape, dtype in shapes]
    assert places(segment, *arrays) == [0, 64, 128, 256]
    for index, array in enumerate(arrays):
        array[...] = index + 1
    assert [np.unique(array).tolist() for array in arrays] == [[1.0], [2.0], [3.0], [4.0]]
    segment.hide()


def test_what_an_offset_placed_is_passed_over_too() -> None:
    segment = Segment(4096, Kind.MEMFD)
    far = segment.tensor((2, 8), "fp32", byte_offset=1000, strides=(16, 1))
    near = segment.tensor((1,), "fp32", byte_offset=4)
    after = segment.tensor((1,), "fp32")
    assert places(segment, far, near, after) == [1000, 4, 1152]
    segment.hide()


def test_a_refused_tensor_takes_no_place_and_the_message_says_what_is_left() -> None:
    segment = Segment(256, Kind.MEMFD)
    segment.tensor((17,), "fp32")
    with pytest.raises(errors.RegionInvalid, match="needs 132 bytes, the region has 128 of 256 left") as caught:
        segment.tensor((33,), "fp32")
    assert caught.value.field == "byte_offset"
    with pytest.raises(errors.RegionBounds):
        segment.tensor((1,), "fp32", byte_offset=256)
    assert places(segment, segment.tensor((32,), "fp32")) == [128]
    with pytest.raises(errors.RegionInvalid, match="has 0 of 256 left"):
        segment.tensor((1,), "fp32")
    segment.hide()


def test_threads_get_different_places() -> None:
    segment = Segment(64 * 256, Kind.MEMFD)
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda _: segment.tensor((1,), "fp32"), range(256)))
    assert sorted(places(segment, *arrays)) == [64 * index for index in range(256)]
    segment.hide()


@pytest.mark.parametrize(
    ("shape", "byte_offset", "strides"),
    [
        ((65,), 0, None),
        ((64,), 4, None),
        ((1,), 1, None),
        ((1,), -4, None),
        ((2, 2), 0, (63, 1)),
        ((2,), 0, (1 << 61,)),
        ((1,), 1 << 62, None),
    ],
)
def test_a_tensor_that_leaves_the_segment_is_refused(
    shape: tuple[int, ...], byte_offset: int, strides: tuple[int, ...] | None
) -> None:
    segment = Segment(256, Kind.MEMFD)
    with pytest.raises((errors.RegionBounds, errors.SizeOverflow)):
        segment.tensor(shape, "fp32", byte_offset=byte_offset, strides=strides)
    segment.hide()


@pytest.mark.parametrize(
    ("view", "strides", "byte_offset"),
    [
        (lambda a: a, (16, 4, 1), 0),
        (lambda a: a[1:], (16, 4, 1), 64),
        (lambda a: a[:, ::2], (16, 8, 1), 0),
        (lambda a: a.transpose(1, 0, 2), (4, 16, 1), 0),
        (lambda a: np.broadcast_to(a[:1], a.shape), (0, 4, 1), 0),
        (lambda a: a[:, :, :1], (16, 4, 1), 0),
        (lambda a: a[3:, 3:, 3:], (1, 1, 1), 252),
    ],
)
def test_a_view_is_found_with_its_own_strides(
    view: Callable[[np.ndarray], np.ndarray], strides: tuple[int, ...], byte_offset: int
) -> None:
    segment = Segment(256, Kind.MEMFD)
    array = view(segment.tensor((4, 4, 4), "fp32"))
    found = segment.find(array, HANDLE)
    assert found is not None
    assert (found.shape, found.strides, found.data.byte_offset) == (array.shape, strides, byte_offset)
    segment.hide()


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[..., ::2],
        lambda a: a[..., ::-1],
        lambda a: a[::-1],
        lambda a: a.transpose(2, 1, 0),
        lambda a: a[:0],
        lambda a: a.copy(),
        lambda a: np.lib.stride_tricks.as_strided(a, (5, 4, 4), a.strides),
        lambda a: a.reshape(-1).view(np.uint8)[2:66].view(np.float32).reshape(1, 4, 4),
    ],
)
def test_a_view_that_a_reference_cannot_say_is_not_found(view: Callable[[np.ndarray], np.ndarray]) -> None:
    segment = Segment(256, Kind.MEMFD)
    assert segment.find(view(segment.tensor((4, 4, 4), "fp32")), HANDLE) is None
    segment.hide()


def test_the_mapping_lives_as_long_as_an_array_sees_it() -> None:
    def mapped() -> int:
        return sum("memfd:dqkv" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    segment = Segment(1 << 16, Kind.MEMFD)
    array = segment.tensor((4,), "fp32", byte_offset=1 << 15)
    part = array[1:]
    segment.hide()
    del segment, array
    gc.collect()
    part[:] = 7.0
    assert part.tolist() == [7.0, 7.0, 7.0]
    assert mapped() == before + 1
    del part
    gc.collect()
    assert mapped() == before


def test_a_process_that_ends_with_open_segments_leaves_no_name_and_no_complaint() -> None:
    before = own_names()
    program = (
        "from dqkv.client.segment import Kind, Segment\n"
        "s = Segment(4096, Kind.POSIX); a = s.tensor((4,), 'fp32'); s.hide(); a[0] = 1\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert own_names() == before
