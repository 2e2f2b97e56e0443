"""The region socket takes sealed memfds from clients, tells users apart, and no client can hold up another."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from dqkv import errors
from dqkv.memory import mailbox as mailbox_module
from dqkv.memory import memfd
from dqkv.memory.mailbox import GREETING, REFUSAL, FdMailbox

pytestmark = pytest.mark.numpy_only

UID = os.getuid()
OWNER = f"uid:{UID}"
NBYTES = 1 << 16


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "regions.sock"


@pytest.fixture
async def box(path, clock):
    before = os.listdir("/proc/self/fd")
    made = FdMailbox(path, tickets_per_uid=4, clock=clock)
    await made.start()
    yield made
    await made.stop()
    left = set(os.listdir("/proc/self/fd")) - set(before)
    assert not left, "a descriptor was left open"


@pytest.fixture
def make_fd():
    opened = []

    def make(nbytes=NBYTES, seals=memfd.SIZE_SEALS, flags=0):
        fd = os.memfd_create("dqkv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        opened.append(fd)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    yield make
    for fd in opened:
        os.close(fd)


def connect(path):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(120)
    client.connect(str(path))
    return client


def exchange(path, message, fds):
    with connect(path) as client:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        # A client that is turned away at the door finds the reason behind the error.
        with contextlib.suppress(BrokenPipeError):
            client.sendmsg([message], rights)
        with contextlib.suppress(ConnectionResetError):
            return client.recv(1024)
        return client.recv(1024)


async def send(path, message=GREETING, fds=()):
    """What a client is answered, in a thread of its own as a client's process would be."""
    return await asyncio.to_thread(exchange, path, message, list(fds))


async def until(holds):
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in another process or thread
            await asyncio.sleep(0.001)


async def closers_end(box):
    await until(lambda: not any(box._closing.values()))


async def deposit(path, fd):
    answer = await send(path, fds=[fd])
    assert len(answer) == 32, answer
    return answer[:16], answer[16:]


async def test_a_memfd_becomes_memory_of_its_sender(box, path, make_fd):
    fd = make_fd()
    ticket, session = await deposit(path, fd)
    memory = box.take(ticket, OWNER)
    try:
        assert (memory.nbytes, memory.sealed, memory.writable, memory.kind) == (NBYTES, True, True, "memfd")
        assert (memory.device, memory.inode) == (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
        assert not os.get_inheritable(memory.fd)
        os.pwrite(fd, b"same memory", 0)
        assert os.pread(memory.fd, 11, 0) == b"same memory"
    finally:
        memory.close()
    assert box.uid_of_session(session) == UID


async def test_taken_memory_can_change_neither_its_size_nor_its_seals(box, path, make_fd):
    fd = make_fd()
    ticket, _ = await deposit(path, fd)
    box.take(ticket, OWNER).close()
    for size in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


async def test_a_session_is_the_users_and_stays_the_same(box, path, make_fd):
    answers = [await deposit(path, make_fd()) for _ in range(3)]
    assert len({ticket for ticket, _ in answers}) == 3
    assert len({session for _, session in answers}) == 1
    assert box.uid_of_session(b"") is None
    assert box.uid_of_session(bytes(16)) is None
    assert box.uid_of_session(answers[0][0]) is None


async def test_a_ticket_is_good_once(box, path, make_fd):
    ticket, _ = await deposit(path, make_fd())
    box.take(ticket, OWNER).close()
    with pytest.raises(errors.RegionUnknown) as refused:
        box.take(ticket, OWNER)
    assert refused.value.field == "memfd.ticket"


@pytest.mark.parametrize("ticket", [b"", bytes(16), b"x" * 15, b"x" * 10000])
async def test_an_unknown_ticket_is_refused(box, ticket):
    with pytest.raises(errors.RegionUnknown):
        box.take(ticket, OWNER)


async def test_another_user_cannot_take_a_ticket_and_a_caller_without_user_can(box, path, make_fd):
    ticket, _ = await deposit(path, make_fd())
    for owner in (f"uid:{UID + 1}", "uid:", f"uid:{UID}0"):
        with pytest.raises(errors.RegionUnknown):
            box.take(ticket, owner)
    box.take(ticket, "cert:trainer").close()


async def test_a_ticket_ends_after_ten_seconds_and_its_memory_is_closed(box, path, clock, make_fd):
    ticket, _ = await deposit(path, make_fd())
    early, _ = await deposit(path, make_fd())
    clock.now += 9.9
    box.take(early, OWNER).close()
    clock.now += 0.1
    before = len(os.listdir("/proc/self/fd"))
    box.expire()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(errors.RegionUnknown, match="10 s"):
        box.take(ticket, OWNER)


async def test_a_ticket_ends_by_itself(path, make_fd):
    box = FdMailbox(path, ticket_s=0.05)
    await box.start()
    try:
        fd = make_fd()
        before = len(os.listdir("/proc/self/fd"))
        await deposit(path, fd)
        await until(lambda: not box._tickets and len(os.listdir("/proc/self/fd")) == before)
    finally:
        await box.stop()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SEAL])
async def test_a_memfd_that_can_be_resized_is_refused(box, path, make_fd, seals):
    ticket, _ = await deposit(path, make_fd(seals=seals))
    with pytest.raises(errors.RegionInvalid, match="F_SEAL_SHRINK and F_SEAL_GROW"):
        box.take(ticket, OWNER)


async def test_an_empty_memfd_is_refused(box, path, make_fd):
    ticket, _ = await deposit(path, make_fd(nbytes=0))
    with pytest.raises(errors.RegionInvalid, match="empty"):
        box.take(ticket, OWNER)


async def test_a_memfd_of_huge_pages_is_refused(box, path, make_fd):
    try:
        fd = make_fd(nbytes=1 << 21, flags=os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel makes no memfd of huge pages")
    ticket, _ = await deposit(path, fd)
    with pytest.raises(errors.RegionInvalid, match="huge pages"):
        box.take(ticket, OWNER)


async def test_a_memfd_sealed_against_writing_is_for_reading(box, path, make_fd):
    ticket, _ = await deposit(path, make_fd(seals=memfd.SIZE_SEALS | fcntl.F_SEAL_WRITE))
    memory = box.take(ticket, OWNER)
    assert not memory.writable
    memory.close()


@pytest.mark.parametrize("kind", ["file", "pipe", "folder", "socket", "device", "shared memory by name"])
async def test_another_kind_of_descriptor_is_refused_in_words(box, path, tmp_path, kind):
    read_end, write_end = os.pipe()
    pair = socket.socketpair()
    fds = {
        "file": lambda: os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT),
        "pipe": lambda: os.dup(read_end),
        "folder": lambda: os.open(tmp_path, os.O_RDONLY),
        "socket": lambda: os.dup(pair[0].fileno()),
        "device": lambda: os.open("/dev/zero", os.O_RDWR),
        "shared memory by name": lambda: os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE),
    }
    fd = fds[kind]()
    try:
        answer = await send(path, fds=[fd])
        if len(answer) == 32:  # tmpfs files carry seals, of another kind than asked for
            with pytest.raises(errors.RegionInvalid):
                box.take(answer[:16], OWNER)
        else:
            assert answer == REFUSAL + b"the descriptor is no memfd"
        await closers_end(box)
    finally:
        for used in (fd, read_end, write_end):
            os.close(used)
        for end in pair:
            end.close()


@pytest.mark.parametrize("message", [b"\x00", b"\x01\x01", b"\x02", b"GET / HTTP/1.1\r\n", b"x" * 100000])
@pytest.mark.parametrize("count", [0, 1])
async def test_a_garbled_message_is_refused_in_words_and_its_descriptor_closed(box, path, make_fd, message, count):
    answer = await send(path, message, [make_fd()] * count)
    assert answer.startswith(REFUSAL)
    assert len(answer) > 32
    await closers_end(box)


@pytest.mark.parametrize("count", [0, 2, 3, 100])
async def test_more_or_fewer_descriptors_than_one_are_refused_and_closed(box, path, make_fd, count):
    fds = [make_fd()] * count
    before = len(os.listdir("/proc/self/fd"))
    answer = await send(path, fds=fds)
    assert answer == REFUSAL + b"a message is one byte, 1, with one descriptor"
    await closers_end(box)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_client_that_hangs_up_leaves_nothing(box, path, make_fd):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        client = await asyncio.to_thread(connect, path)
        client.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) == before and not box._peers)
    await deposit(path, make_fd())


async def test_silent_clients_hold_up_nobody_and_are_dropped(path, clock, make_fd, monkeypatch):
    monkeypatch.setattr(mailbox_module, "PEER_S", 600)
    box = FdMailbox(path, clock=clock)
    await box.start()
    try:
        silent = [await asyncio.to_thread(connect, path) for _ in range(3)]
        await until(lambda: len(box._peers) == 3)
        await deposit(path, make_fd())
        await until(lambda: len(box._peers) == 3)
        monkeypatch.setattr(mailbox_module, "PEER_S", 0.1)
        hasty = [await asyncio.to_thread(connect, path) for _ in range(3)]
        for client in hasty:
            assert await asyncio.to_thread(client.recv, 1024) == REFUSAL + b"nothing came in time"
            assert await asyncio.to_thread(client.recv, 1024) == b""
        for client in (*silent, *hasty):
            client.close()
    finally:
        await box.stop()


async def test_one_user_has_so_many_connections_and_tickets_and_no_more(box, path, make_fd):
    silent = [await asyncio.to_thread(connect, path) for _ in range(4)]
    assert b"4 connections" in await send(path, fds=[make_fd()])
    for client in silent:
        client.close()
    await until(lambda: not box._peers)
    tickets = [(await deposit(path, make_fd()))[0] for _ in range(4)]
    assert b"4 unused tickets" in await send(path, fds=[make_fd()])
    box.take(tickets[0], OWNER).close()
    await deposit(path, make_fd())


@pytest.fixture
def reachable_path():
    """A path that other users of this machine get to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder, "regions.sock")


DEPOSIT_AS = """
    import array, fcntl, os, socket, sys

    uid = int(sys.argv[2])
    fd = os.memfd_create("dqkv-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
    for _ in range(int(sys.argv[3])):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            client.connect(sys.argv[1])
        except PermissionError:
            sys.exit("not let in")
        client.sendmsg([b"\\x01"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        print(client.recv(1024).hex())
"""


async def as_user(path, uid, count=1):
    command = [sys.executable, "-c", textwrap.dedent(DEPOSIT_AS), str(path), str(uid), str(count)]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    return result.stdout.split(), result.stderr


@pytest.mark.skipif(UID != 0, reason="other users' connections take root")
async def test_users_are_told_apart_and_have_their_own_share(reachable_path, clock, make_fd):
    path = reachable_path
    box = FdMailbox(path, mode=0o666, tickets_per_uid=2, clock=clock)
    await box.start()
    try:
        answers, words = await as_user(path, 12345, 3)
        assert not words
        first = bytes.fromhex(answers[0])
        assert bytes.fromhex(answers[2]).startswith(REFUSAL)
        ticket, session = await deposit(path, make_fd())
        assert (box.uid_of_session(first[16:]), box.uid_of_session(session)) == (12345, UID)
        with pytest.raises(errors.RegionUnknown):
            box.take(first[:16], OWNER)
        with pytest.raises(errors.RegionUnknown):
            box.take(ticket, "uid:12345")
        box.take(first[:16], "uid:12345").close()
        box.take(ticket, OWNER).close()
    finally:
        await box.stop()


@pytest.mark.skipif(UID != 0, reason="other users' connections take root")
async def test_the_socket_lets_in_its_own_user_alone_unless_told_otherwise(reachable_path):
    box = FdMailbox(reachable_path)
    await box.start()
    assert stat.S_IMODE(reachable_path.stat().st_mode) == 0o600
    assert await as_user(reachable_path, 12345) == ([], "not let in\n")
    await box.stop()


async def test_a_descriptor_whose_close_hangs_holds_up_nobody(box, path, tmp_path, make_fd, monkeypatch):
    go = threading.Event()
    close = os.close

    def hanging(fd):
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(120)
        close(fd)

    monkeypatch.setattr(os, "close", hanging)
    try:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        answer = await send(path, fds=[fd])
        assert answer.startswith(REFUSAL)
        await deposit(path, make_fd())
    finally:
        go.set()
        await closers_end(box)
        close(fd)


# ---- the socket file
DEAD_SERVER = """
    import asyncio, pathlib, sys
    from dqkv.memory.mailbox import FdMailbox

    async def main():
        await FdMailbox(pathlib.Path(sys.argv[1])).start()
        print("listening", flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""


async def test_the_socket_of_a_killed_server_is_replaced(path, make_fd):
    command = [sys.executable, "-c", textwrap.dedent(DEAD_SERVER), str(path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert await process.stdout.readline() == b"listening\n"
    second = FdMailbox(path)
    with pytest.raises(OSError, match="a living server listens"):
        await second.start()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert path.exists()
    await second.start()
    await deposit(path, make_fd())
    await second.stop()
    assert not path.exists()


async def test_a_second_server_is_refused_and_leaves_the_first_alone(box, path, make_fd):
    second = FdMailbox(path)
    with pytest.raises(OSError, match="a living server listens"):
        await second.start()
    await second.stop()
    ticket, _ = await deposit(path, make_fd())
    box.take(ticket, OWNER).close()


async def test_of_servers_that_start_at_once_on_a_dead_socket_one_wins(path, make_fd):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    boxes = [FdMailbox(path) for _ in range(8)]
    outcomes = await asyncio.gather(*(box.start() for box in boxes), return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 1
    winner = boxes[outcomes.index(None)]
    for box in boxes:
        if box is not winner:
            await box.stop()
    ticket, _ = await deposit(path, make_fd())
    winner.take(ticket, OWNER).close()
    await winner.stop()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
async def test_what_is_no_socket_is_never_replaced(path, tmp_path, kind):
    make = {
        "file": lambda: path.write_text("precious"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
    }
    make[kind]()
    with pytest.raises(OSError, match="is no socket"):
        await FdMailbox(path).start()
    assert path.is_symlink() or path.exists()


async def test_a_path_that_cannot_be_is_refused_in_words(tmp_path):
    with pytest.raises(OSError, match=r"region socket .* cannot be made"):
        await FdMailbox(tmp_path / ("x" * 120)).start()
    with pytest.raises(FileNotFoundError):
        await FdMailbox(tmp_path / "missing" / "regions.sock").start()


async def test_stopping_leaves_another_servers_socket(path):
    first = FdMailbox(path)
    await first.start()
    path.unlink()
    second = FdMailbox(path)
    await second.start()
    await first.stop()
    assert path.exists()
    await second.stop()
    assert not path.exists()


async def test_the_loop_goes_on_when_no_descriptor_is_left(path, make_fd, monkeypatch):
    monkeypatch.setattr(mailbox_module, "ACCEPT_PAUSE_S", 0.05)
    box = FdMailbox(path)
    await box.start()
    accept = socket.socket.accept
    failures = iter([OSError(24, "Too many open files")] * 3)

    def failing(self):
        error = next(failures, None)
        if error is not None:
            raise error
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    try:
        ticket, _ = await asyncio.wait_for(deposit(path, make_fd()), 120)
        box.take(ticket, OWNER).close()
        assert next(failures, None) is None
    finally:
        await box.stop()
