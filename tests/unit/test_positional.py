"""Tensors are read and written by position exactly, and a file that was cut short is an error, never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from dqkv import errors
from dqkv.memory.block import InBlock
from dqkv.memory.positional import GAP_NBYTES, SCRATCH_NBYTES, read_tensor, write_tensor
from dqkv.tensor import DType, Tensor

pytestmark = pytest.mark.numpy_only

NUMPY = {DType.BF16: np.uint16, DType.FP16: np.uint16, DType.FP32: np.uint32}
B, S, H, D = 2, 5, 3, 16


def tensor(shape, strides, offset=0, dtype=DType.BF16):
    return Tensor(dtype=dtype, shape=tuple(shape), strides=tuple(strides), data=InBlock(1, offset))


def elements(data, t, offset=0):
    """The elements of t in flat bytes, as an array of its shape."""
    flat = np.frombuffer(data, dtype=np.uint8)[offset:]
    usable = flat[: flat.nbytes // t.dtype.itemsize * t.dtype.itemsize].view(NUMPY[t.dtype])
    return as_strided(usable, t.shape, [stride * t.dtype.itemsize for stride in t.strides])


@pytest.fixture
def file():
    """Makes a file of random bytes: (descriptor, its bytes)."""
    opened = []

    def make(nbytes, seed=0):
        content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
        fd = os.memfd_create("dqkv-test")
        opened.append(fd)
        assert os.write(fd, content) == nbytes
        return fd, content

    yield make
    for fd in opened:
        os.close(fd)


LAYOUTS = {
    "dense": ((B, S, H, D), (S * H * D, H * D, D, 1)),
    "fused qkv": ((B, S, H, D), (S * 3 * H * D, 3 * H * D, D, 1)),
    "fused per head": ((B, S, H, D), (S * 3 * H * D, 3 * H * D, 3 * D, 1)),
    "heads before rows": ((B, S, H, D), (H * S * D, D, S * D, 1)),
    "padded rows": ((B, S, H, D), (S * H * (D + 8), H * (D + 8), D + 8, 1)),
    "gaps larger than are read through": ((S, H, D), (GAP_NBYTES, D, 1)),
    "runs larger than the scratch": ((3, SCRATCH_NBYTES), (SCRATCH_NBYTES + 64, 1)),
    "statistics, rows before heads": ((B, H, S), (S * H, 1, H)),
    "scalar": ((), ()),
    "empty": ((B, 0, H, D), (0, H * D, D, 1)),
}
EXPANDED = {
    "expanded scalar": ((B, S, H, D), (0, 0, 0, 0)),
    "expanded rows": ((B, S, H, D), (0, 0, D, 1)),
    "expanded heads of a fused tensor": ((B, S, H, D), (S * 3 * D, 3 * D, 0, 1)),
    "sliding": ((S, D), (4, 1)),
}


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize(("shape", "strides"), {**LAYOUTS, **EXPANDED}.values(), ids={**LAYOUTS, **EXPANDED})
def test_read_returns_every_element(file, shape, strides, dtype):
    t = tensor(shape, strides, 8, dtype)
    fd, content = file(8 + t.extent_nbytes + 8)
    found = read_tensor(fd, t)
    assert (found.dtype, found.shape) == (t.dtype, t.shape)
    np.testing.assert_array_equal(elements(found.data, found), elements(content, t, 8))


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize(("shape", "strides"), LAYOUTS.values(), ids=LAYOUTS)
def test_write_puts_every_element_and_touches_nothing_between(file, shape, strides, dtype):
    t = tensor(shape, strides, 8, dtype)
    nbytes = 8 + t.extent_nbytes + 8
    fd, content = file(nbytes)
    source = np.random.default_rng(1).integers(0, 60000, shape).astype(NUMPY[dtype])
    want = bytearray(content)
    elements(want, t, 8)[...] = source
    write_tensor(fd, t, memoryview(source.tobytes()))
    assert os.pread(fd, nbytes + 1, 0) == bytes(want)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 4).flatmap(
        lambda rank: st.tuples(
            st.lists(st.integers(0, 4), min_size=rank, max_size=rank),
            st.lists(st.integers(0, 40), min_size=rank, max_size=rank),
        )
    )
)
def test_any_strides_read_as_numpy_reads_them(shape_and_strides):
    t = tensor(*shape_and_strides)
    content = np.random.default_rng(2).integers(0, 256, t.extent_nbytes, dtype=np.uint8).tobytes()
    fd = os.memfd_create("dqkv-test")
    try:
        os.write(fd, content)
        found = read_tensor(fd, t)
    finally:
        os.close(fd)
    np.testing.assert_array_equal(elements(found.data, found), elements(content, t))
    assert found.data.nbytes <= t.extent_nbytes


def test_an_expanded_tensor_is_not_expanded_by_reading(file):
    t = tensor((64, 1 << 20, 64, 128), (0, 0, 0, 1))
    fd, _ = file(256)
    found = read_tensor(fd, t)
    assert found.data.nbytes == 256
    assert found.strides == (0, 0, 0, 1)


def test_gaps_are_not_kept(file):
    shape, strides = LAYOUTS["fused qkv"]
    t = tensor(shape, strides)
    fd, _ = file(t.extent_nbytes)
    assert read_tensor(fd, t).data.nbytes == t.nbytes


@pytest.mark.parametrize(("shape", "strides"), EXPANDED.values(), ids=EXPANDED)
def test_outputs_whose_elements_share_bytes_are_refused(file, shape, strides):
    t = tensor(shape, strides)
    fd, content = file(t.extent_nbytes)
    with pytest.raises(errors.RegionOverlap):
        write_tensor(fd, t, memoryview(bytes(t.nbytes)))
    assert os.pread(fd, t.extent_nbytes, 0) == content


@pytest.mark.parametrize("delta", [-1, 1])
def test_a_source_of_another_size_is_refused(file, delta):
    t = tensor((4, 8), (8, 1))
    fd, _ = file(t.extent_nbytes)
    with pytest.raises(errors.ByteCountMismatch, match=str(t.nbytes)):
        write_tensor(fd, t, memoryview(bytes(t.nbytes + delta)))


@pytest.mark.parametrize("cut", [0, 1, 100])
@pytest.mark.parametrize("name", ["dense", "fused qkv", "fused per head", "gaps larger than are read through"])
def test_a_file_cut_short_is_region_changed_and_stays_short(file, name, cut):
    t = tensor(*LAYOUTS[name])
    fd, _ = file(t.extent_nbytes)
    size = 0 if cut == 0 else t.extent_nbytes - cut
    os.ftruncate(fd, size)
    with pytest.raises(errors.RegionChanged):
        read_tensor(fd, t)
    with pytest.raises(errors.RegionChanged):
        write_tensor(fd, t, memoryview(bytes(t.nbytes)))
    assert os.fstat(fd).st_size == size


def test_a_file_sealed_against_writing_is_region_changed(file):
    import fcntl

    fd = os.memfd_create("dqkv-test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 64)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(errors.RegionChanged, match="written"):
            write_tensor(fd, tensor((32,), (1,)), memoryview(bytes(64)))
    finally:
        os.close(fd)


CUTTING_CLIENT = """
    import os, sys, threading
    import numpy as np
    from dqkv import errors
    from dqkv.memory.block import InBlock
    from dqkv.memory.positional import read_tensor, write_tensor
    from dqkv.tensor import DType, Tensor

    fd, nbytes = os.open(sys.argv[1], os.O_RDWR), 1 << 20
    rows = Tensor(dtype=DType.FP32, shape=(256, 256), strides=(1024, 1), data=InBlock(1, 0))
    source = memoryview(bytes(rows.nbytes))
    done = threading.Event()

    def cut():
        while not done.is_set():
            os.truncate(sys.argv[1], 0)
            os.truncate(sys.argv[1], nbytes)

    threading.Thread(target=cut).start()
    changed = 0
    for _ in range(200):
        try:
            read_tensor(fd, rows)
            write_tensor(fd, rows, source)
        except errors.RegionChanged:
            changed += 1
    done.set()
    print(changed)
"""


def test_a_file_cut_during_reads_and_writes_never_ends_the_process(tmp_path):
    path = tmp_path / "segment"
    path.write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", textwrap.dedent(CUTTING_CLIENT), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


FULL_FOLDER = """
    import os, sys
    from dqkv import errors
    from dqkv.memory import memfd
    from dqkv.memory.block import InBlock
    from dqkv.memory.positional import write_tensor
    from dqkv.memory.staging import StagingPool
    from dqkv.tensor import DType, Tensor

    folder, nbytes = sys.argv[1], 8 << 20
    fd = os.open(folder + "/region", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, nbytes)  # succeeds: a size alone takes no memory
    for shape, strides in [((nbytes // 4,), (1,)), ((nbytes // 8192, 1024), (2048, 1))]:
        t = Tensor(dtype=DType.FP32, shape=shape, strides=strides, data=InBlock(1, 0))
        try:
            write_tensor(fd, t, memoryview(bytes(t.nbytes)))
            sys.exit("the file system was not full")
        except errors.QuotaBytes as error:
            print("region", error.reason, error.retry_after_s)
    os.unlink(folder + "/region")
    os.close(fd)

    # The pool's own files, in the same full place.
    os.memfd_create = lambda name, flags: os.open(folder + "/" + name, os.O_RDWR | os.O_CREAT)
    pool = StagingPool(limit_nbytes=1 << 30, block_ids=iter(range(9)), on_drop=print)
    try:
        pool.acquire(nbytes)
        sys.exit("the file system was not full")
    except errors.QuotaBytes as error:
        print("staging", error.reason, error.retry_after_s, pool.total_nbytes)
"""


def test_a_full_tmpfs_is_quota_bytes_and_never_ends_the_process(tmp_path):
    mounts = f"mount -t tmpfs -o size=2m dqkv-test '{tmp_path}'"
    # A mount namespace of its own: nothing has to be unmounted. Without root, a user namespace too.
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "sh", "-c", mounts], capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here: it takes root or user namespaces")
    script = textwrap.dedent(FULL_FOLDER)
    command = [*unshare, "sh", "-c", f'{mounts} && exec "$@"', "sh", sys.executable, "-c", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["region QUOTA_BYTES 1.0"] * 2 + ["staging QUOTA_BYTES 1.0 0"]
