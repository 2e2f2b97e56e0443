"""A Ray cluster of this machine, small and on free ports, and the front of `dqkv ray` on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .fleet import free_ports
from .process import children, is_alive, wait_for
from .server import DEFAULTS, STOP_S, Running, attended

START_S = 240.0
"""Ray's own processes import Python a dozen times over, on as many cores as are free."""

HOST = "127.0.0.2"
"""Loopback; Ray takes 127.0.0.1 for this machine's address in its network."""

OBJECT_STORE_NBYTES = 80_000_000
"""The least that Ray takes. No tensor goes through it."""

LISTENING = "0A"
"""As the kernel's tables of sockets write it."""

COMMAND = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(eq=False)
class Cluster:
    """Of one node with `cpus` places for workers; `process` is the one whose descendants are all of it."""

    cpus: int
    folder: Path
    ports: list[int]
    process: subprocess.Popen[Any] = field(init=False)
    _seen: set[int] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.ports[0]}"

    @property
    def command(self) -> list[str]:
        """What starts it, and goes on until it ends."""
        options = {
            "node-ip-address": HOST,
            "port": self.ports[0],
            "ray-client-server-port": self.ports[1],
            "num-cpus": self.cpus,
            "num-gpus": 0,
            "object-store-memory": OBJECT_STORE_NBYTES,
            "include-dashboard": "false",
            "temp-dir": self.folder,
        }
        return [*COMMAND, "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())]

    @property
    def environment(self) -> dict[str, str]:
        """What its processes, and those that come to it, are started with."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DQKV_", "RAY_"))}
        ours = {
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "a-token-of-the-tests-that-ray-finds-long-enough",
            # It ends workers when the machine has little memory left, whoever took it.
            "RAY_memory_monitor_refresh_ms": "0",
        }
        return {**clean, **DEFAULTS, **ours}

    def workers(self) -> list[int]:
        """The processes of the workers' actors."""
        return [pid for pid in self.processes() if _title(pid).startswith("ray::_NodeWorker")]

    def processes(self) -> list[int]:
        """Every process of it but the first."""
        found: list[int] = []
        front = [self.process.pid]
        while front:
            pid = front.pop()
            with contextlib.suppress(OSError):
                front += children(pid)
            found.append(pid)
        self._seen |= set(found[1:])
        return found[1:]

    def end(self) -> None:
        """Ends it, with what was seen of it when its first process still lived."""
        self.processes()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        for pid in filter(is_alive, self._seen):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def room_for_ray(*, cpus: int) -> Iterator[Cluster]:
    """A cluster to be started; whatever became of it, nothing of it is left afterwards."""
    # The sockets in it have paths of 107 bytes at most, so it lies no deeper than this.
    folder = Path(tempfile.mkdtemp(prefix="dqkv-ray-", dir="/tmp"))
    cluster = Cluster(cpus=cpus, folder=folder, ports=free_ports(2))
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(*, cpus: int) -> Iterator[Cluster]:
    """A cluster that runs."""
    with room_for_ray(cpus=cpus) as cluster:
        log = cluster.folder / "start"
        with log.open("wb") as out:
            cluster.process = subprocess.Popen(
                cluster.command,
                env=cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        wait_for(
            lambda: "Ray runtime started" in log.read_text() or cluster.process.poll() is not None,
            "Ray starts",
            START_S,
        )
        assert cluster.process.poll() is None, log.read_text()
        yield cluster


@contextlib.contextmanager
def serving(process: subprocess.Popen[str]) -> Iterator[Running]:
    """A front that was started, from when it serves; killed at the end."""
    with attended(process) as front:
        front.wait_for("serving", START_S)
        yield front


@contextlib.contextmanager
def ray_front(cluster: Cluster, *, workers: int) -> Iterator[Running]:
    """`dqkv ray`, serving from so many workers; killed at the end."""
    command = [sys.executable, "-m", "dqkv", "ray", "--address", cluster.address, "--workers", str(workers)]
    with serving(subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True)) as front:
        yield front


def listens(pid: int, port: int) -> bool:
    """Whether a process listens at a TCP port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{inode}]")
    return any(_target(link) in inodes for link in Path(f"/proc/{pid}/fd").iterdir())


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
