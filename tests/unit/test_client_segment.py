"""Shared memory of the client: nothing is left behind, nothing is read outside it, views outlive the region."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    assert segment.tensor((1,), "bf16")[0] == 3.0


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


def test_more_memory_than_there_is_is_an_error_and_leaves_nothing() -> None:
    before = own_names()
    free = os.statvfs(SHM)
    too_much = free.f_blocks * free.f_frsize + (1 << 30)
    with pytest.raises(errors.RegionInvalid, match="No space left"):
        Segment(too_much, Kind.POSIX)
    assert own_names() == before


@KINDS
@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_size_is_refused(kind: Kind, nbytes: int) -> None:
    with pytest.raises(errors.RegionInvalid):
        Segment(nbytes, kind)


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert own_names() == before
