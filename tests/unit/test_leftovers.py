"""Folders of region sockets: a killed server's are removed by the next, and no others."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest

from dqkv.memory.leftovers import PREFIX, SOCKET, make_socket_path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folder_of(parent: Path, name: str) -> Path:
    folder = parent / f"{PREFIX}{name}"
    folder.mkdir(mode=0o700)
    return folder


def bound(path: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(str(path))
    return listener


def test_a_folder_is_new_private_and_this_users(temporary: Path) -> None:
    one, other = make_socket_path(), make_socket_path()
    assert one != other
    for path in (one, other):
        assert path.parent.parent == temporary
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert not path.exists()


def test_folders_of_killed_servers_are_removed(temporary: Path) -> None:
    dead = [folder_of(temporary, f"dead{number}") for number in range(3)]
    for folder in dead:
        bound(folder / SOCKET).close()
    made = make_socket_path()
    assert list(temporary.iterdir()) == [made.parent]


def test_a_living_server_keeps_its_folder(temporary: Path) -> None:
    folder = folder_of(temporary, "alive")
    with bound(folder / SOCKET) as listener:
        listener.listen()
        make_socket_path()
        assert (folder / SOCKET).exists()


def test_a_server_that_is_about_to_listen_keeps_its_folder(temporary: Path) -> None:
    folder = folder_of(temporary, "starting")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with bound(folder / SOCKET):
            make_socket_path()
            assert (folder / SOCKET).exists()
    finally:
        os.close(fd)


@pytest.mark.parametrize("content", ["nothing", "a_file", "more", "another_name"])
def test_what_is_no_servers_folder_is_left_alone(temporary: Path, content: str) -> None:
    folder = folder_of(temporary, "other")
    if content == "a_file":
        (folder / SOCKET).touch()
    if content == "more":
        bound(folder / SOCKET).close()
        (folder / "notes").touch()
    if content == "another_name":
        bound(folder / "socket").close()
    before = sorted(folder.iterdir())
    make_socket_path()
    assert sorted(folder.iterdir()) == before


def test_a_link_is_not_followed(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    bound(elsewhere / SOCKET).close()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    make_socket_path()
    assert (elsewhere / SOCKET).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
def test_another_users_folder_is_left_alone(temporary: Path) -> None:
    folder = folder_of(temporary, "theirs")
    bound(folder / SOCKET).close()
    os.chown(folder, 65534, 65534)
    make_socket_path()
    assert (folder / SOCKET).exists()
