"""POSIX shared memory is opened by exactly the documented names, checked, and never deleted."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from dqkv import errors
from dqkv.memory.posix import NAME_LIMIT, open_posix

pytestmark = pytest.mark.numpy_only

SHM = Path("/dev/shm")
UID = os.geteuid()


@pytest.fixture
def segment():
    """Makes files in /dev/shm: (name as shm_open takes it, path); they are removed at the end."""
    made = []

    def make(nbytes=4096, name=None, mode=0o600):
        path = SHM / (name or f"dqkv-test.{secrets.token_hex(6)}")
        made.append(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        os.ftruncate(fd, nbytes)
        os.close(fd)
        return f"/{path.name}", path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_memory_is_opened_as_it_is(segment):
    name, path = segment(5000)
    memory = open_posix(name, uid=UID)
    try:
        status = path.stat()
        assert (memory.nbytes, memory.sealed, memory.writable, memory.kind) == (5000, False, True, "posix")
        assert (memory.device, memory.inode) == (status.st_dev, status.st_ino)
        assert not os.get_inheritable(memory.fd)
        path.write_bytes(b"seen by both")
        assert os.pread(memory.fd, 4, 8) == b"both"
    finally:
        memory.close()
    assert path.exists()


@pytest.mark.parametrize("name", ["/dqkv-a", "/dqkv-A.b_c-9", "/dqkv-..", "/dqkv-" + "x" * (NAME_LIMIT - 6)])
def test_documented_names_are_taken(segment, name):
    segment(name=name[1:])
    open_posix(name, uid=UID).close()


REFUSED = {
    "empty": "",
    "no slash": "dqkv-test",
    "another prefix": "/psm_test",
    "prefix in another case": "/DQKV-test",
    "nothing behind the prefix": "/dqkv-",
    "inner slash": "/dqkv-a/b",
    "leading slashes": "//dqkv-a",
    "parent folder": "/dqkv-/../dqkv-a",
    "parent folder first": "/../dqkv-a",
    "NUL": "/dqkv-a\0b",
    "newline at the end": "/dqkv-a\n",
    "space": "/dqkv-a b",
    "letter beyond ASCII": "/dqkv-ä",
    "digit beyond ASCII": "/dqkv-٣",
    "lone surrogate": "/dqkv-\ud800",
    "too long": "/dqkv-" + "x" * (NAME_LIMIT - 5),
    "a million characters": "/dqkv-" + "x" * 1_000_000,
}


@pytest.mark.parametrize("name", REFUSED.values(), ids=REFUSED)
def test_other_names_are_refused(name):
    with pytest.raises(errors.RegionInvalid) as refused:
        open_posix(name, uid=UID)
    assert refused.value.field == "posix.name"
    assert len(refused.value.message) < 1000
    assert "/dev/shm" not in refused.value.message


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(errors.RegionInvalid, match="does not exist") as refused:
        open_posix(f"/dqkv-{secrets.token_hex(8)}", uid=UID)
    assert "/dev/shm" not in refused.value.message


def test_a_symlink_is_refused(segment):
    _, target = segment()
    link = SHM / f"dqkv-test.{secrets.token_hex(6)}"
    link.symlink_to(target)
    try:
        with pytest.raises(errors.RegionInvalid):
            open_posix(f"/{link.name}", uid=UID)
    finally:
        link.unlink()


def test_a_hard_link_is_refused(segment):
    name, path = segment()
    other = SHM / f"dqkv-test.{secrets.token_hex(6)}"
    other.hardlink_to(path)
    try:
        with pytest.raises(errors.RegionInvalid, match="2 names"):
            open_posix(name, uid=UID)
    finally:
        other.unlink()
    open_posix(name, uid=UID).close()


def test_a_fifo_is_refused_without_waiting_for_its_other_end():
    path = SHM / f"dqkv-test.{secrets.token_hex(6)}"
    os.mkfifo(path)
    try:
        with pytest.raises(errors.RegionInvalid):
            open_posix(f"/{path.name}", uid=UID)
    finally:
        path.unlink()


def test_a_folder_is_refused():
    path = SHM / f"dqkv-test.{secrets.token_hex(6)}"
    path.mkdir()
    try:
        with pytest.raises(errors.RegionInvalid):
            open_posix(f"/{path.name}", uid=UID)
    finally:
        path.rmdir()


def test_an_empty_file_is_refused(segment):
    name, _ = segment(0)
    with pytest.raises(errors.RegionInvalid, match="0 bytes"):
        open_posix(name, uid=UID)


def test_memory_of_another_user_is_refused(segment):
    name, path = segment(mode=0o666)
    with pytest.raises(errors.RegionNotOwned) as refused:
        open_posix(name, uid=UID + 1)
    assert "/dev/shm" not in refused.value.message
    if UID != 0:
        pytest.skip("what root's file answers to another owner takes root")
    os.chown(path, 12345, -1)
    with pytest.raises(errors.RegionNotOwned):
        open_posix(name, uid=UID)
    open_posix(name, uid=12345).close()


def run_as(uid, script, *arguments):
    """Runs a script as another user; the interpreter's own files may be closed to that one, so it changes inside."""
    change = f"import os\nimport dqkv.memory.posix\nos.setgroups([]); os.setresgid({uid}, {uid}, {uid}); "
    change += f"os.setresuid({uid}, {uid}, {uid})\n"
    command = [sys.executable, "-c", change + textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(UID != 0, reason="changing the user takes root")
def test_what_the_server_may_not_open_is_not_owned_or_for_reading(segment):
    secret, _ = segment(mode=0o600)
    readable, path = segment(mode=0o644)
    path.chmod(0o644)
    script = """
        import sys
        from dqkv import errors
        from dqkv.memory.posix import open_posix

        try:
            open_posix(sys.argv[1], uid=0)
        except errors.RegionNotOwned as error:
            print(error.reason)
        print(open_posix(sys.argv[2], uid=0).writable)
    """
    result = run_as(12345, script, secret, readable)
    assert (result.returncode, result.stdout.split()) == (0, ["REGION_NOT_OWNED", "False"]), result.stderr


def test_refusals_leave_no_descriptor_open(segment):
    name, path = segment(0)
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        with pytest.raises(errors.RegionInvalid):
            open_posix(name, uid=UID)
    path.write_bytes(b"x")
    with pytest.raises(errors.RegionNotOwned):
        open_posix(name, uid=UID + 1)
    assert os.listdir("/proc/self/fd") == before


def test_attaching_and_ending_never_deletes_the_clients_memory():
    # As a client makes it: Python's own class, whose name may lack the slash.
    made = shared_memory.SharedMemory(f"dqkv-test.{secrets.token_hex(6)}", create=True, size=4096)
    try:
        name = made._name if made._name.startswith("/") else f"/{made._name}"
        script = """
            import os, sys
            from dqkv.memory.posix import open_posix

            memory = open_posix(sys.argv[1], uid=os.geteuid())
            assert os.pwrite(memory.fd, b"served", 0) == 6
            print("multiprocessing.resource_tracker" in sys.modules)
            if sys.argv[2] == "killed":
                os.kill(os.getpid(), 9)
        """
        for end in ("killed", "ended", "ended"):
            command = [sys.executable, "-c", textwrap.dedent(script), name, end]
            result = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert result.returncode == (-9 if end == "killed" else 0), result.stderr
            assert result.stdout in ("", "False\n")
            assert result.stderr == ""
            assert (SHM / name[1:]).exists()
        assert bytes(made.buf[:6]) == b"served"
    finally:
        made.close()
        made.unlink()


def test_unlinked_memory_stays_usable(segment):
    name, path = segment()
    memory = open_posix(name, uid=UID)
    try:
        path.unlink()
        assert os.pwrite(memory.fd, b"x", 4095) == 1
        with pytest.raises(errors.RegionInvalid, match="does not exist"):
            open_posix(name, uid=UID)
    finally:
        memory.close()
