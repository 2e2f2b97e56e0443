"""What builds images and runs containers: Docker where its engine answers, otherwise podman with a store of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOOLS = ("podman", "runc", "debootstrap", "unshare")
COMMAND_S = 600.0
BUILD_S = 1200.0

# Fewer than most hosts allow, for a host that may not raise its own limits cannot hand out more.
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=8192:8192", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{run}/libpod"
"""
STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{store}"
runroot = "{run}"
"""


class NoEngine(Exception):
    """Nothing here can build and run an image; the message says what to install."""


class Failed(Exception):
    """A command of the engine failed; the message holds its last words."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A command that takes Docker's words, and how it has to be called."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    build_options: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ("--read-only",)
    """Options that leave a container no part of its root to write to."""
    transient: Path | None = None
    """Where it keeps what lasts no longer than the tests."""

    @property
    def is_docker(self) -> bool:
        """Whether this is Docker's own engine, a service that watches its containers."""
        return self.name == "docker"

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """A command that goes on in the background."""
        return subprocess.Popen([self.name, *arguments], env={**os.environ, **self.environment}, text=True, **options)

    def ask(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """What a command prints. Raises Failed."""
        code, said, complaint = self.attempt(*arguments, timeout_s=timeout_s)
        if code:
            raise Failed(f"{self.name} {' '.join(arguments)}: exit code {code}\n{said[-4000:]}{complaint[-4000:]}")
        return said

    def attempt(self, *arguments: str, timeout_s: float = COMMAND_S) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command."""
        done = subprocess.run(
            [self.name, *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
        return done.returncode, done.stdout, done.stderr

    def inspect(self, name: str) -> dict[str, Any]:
        """What the engine knows of an image or a container."""
        (known,) = json.loads(self.ask("inspect", name))
        return known

    def has_image(self, tag: str) -> bool:
        """Whether an image is there."""
        return self.attempt("image", "inspect", tag)[0] == 0

    def close(self) -> None:
        """Ends what is left of the containers of this store, where the store is ours alone."""
        if self.transient is not None:
            self.ask("rm", "--all", "--force", "--time", "0")
            shutil.rmtree(self.transient, ignore_errors=True)


def find_engine(folder: Path) -> Engine:
    """Docker, or podman with its images in `folder`, which it keeps from run to run. Raises NoEngine."""
    if (
        shutil.which("docker")
        and subprocess.run(["docker", "info"], capture_output=True, timeout=COMMAND_S).returncode == 0
    ):
        return Engine(name="docker")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.getuid() != 0:
        raise NoEngine(
            "no Docker engine answers here; without one, podman, runc and debootstrap are used, by root: "
            f"missing {', '.join(missing) or 'root'}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Paths of sockets are made from this one, and may have about a hundred characters.
    run = Path(tempfile.gettempdir()) / f"dqkv-podman-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    places = {"run": run, "store": folder / "store"}
    environment = {}
    for name, text in (("CONTAINERS_CONF", CONTAINERS_CONF), ("CONTAINERS_STORAGE_CONF", STORAGE_CONF)):
        path = folder / f"{name.lower()}.toml"
        path.write_text(text.format(**places))
        environment[name] = str(path)
    # With docker's format an image keeps its HEALTHCHECK; chroot is the isolation that asks least of the host.
    options = ("--format", "docker", "--isolation", "chroot", "--network", "host")
    # By itself podman covers several folders of a read-only root with memory.
    read_only = ("--read-only", "--read-only-tmpfs=false")
    engine = Engine(name="podman", environment=environment, build_options=options, read_only=read_only, transient=run)
    # What a killed run left.
    engine.close()
    return engine
