"""How much more memory may be taken here: what the machine has left, and what the control groups allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARGIN_NBYTES = 256 << 20
"""Left to everybody else: a machine without any ends processes, and not always the one that took it."""

KIB = 1 << 10
ROOT = Path("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """The bytes that may still be taken, and whose limit that is."""

    nbytes: int
    limit: str


def headroom(root: Path = ROOT) -> Headroom | None:
    """The narrowest of all limits that can be read below `root`; None where none can.

    The machine's is MemAvailable of /proc/meminfo less MARGIN_NBYTES. A control group's (version 2 and 1, with all
    that lie above it) is its limit less its use, where pages of files that the kernel can drop count as free.
    """
    found = [*_machine(root), *_groups(root)]
    return min(found, key=lambda room: room.nbytes, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """Where one version of control groups says what a group may use and uses, below the folder of its memory."""

    folder: str
    limit: str
    usage: str
    droppable: tuple[str, ...]


_V2 = _Files(
    folder="sys/fs/cgroup",
    limit="memory.max",
    usage="memory.current",
    droppable=("inactive_file", "active_file"),
)
_V1 = _Files(
    folder="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    droppable=("total_inactive_file", "total_active_file"),
)


def _machine(root: Path) -> Iterator[Headroom]:
    for name, value in _pairs(_read(root / "proc/meminfo")):
        if name == "MemAvailable:":
            nbytes = max(0, value * KIB - MARGIN_NBYTES)
            yield Headroom(nbytes=nbytes, limit="what this machine has available, less a margin")


def _groups(root: Path) -> Iterator[Headroom]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            files = _V2
        elif "memory" in controllers.split(","):
            files = _V1
        else:
            continue
        top = root / files.folder
        own = top / group.strip("/")
        # A limit above binds as well; in a container the group's own path may not exist, and the top is the group.
        for folder in (own, *(above for above in own.parents if above.is_relative_to(top))):
            yield from _group(folder, files)


def _group(folder: Path, files: _Files) -> Iterator[Headroom]:
    limit, usage = (_read(folder / name).strip() for name in (files.limit, files.usage))
    if not limit.isdecimal() or not usage.isdecimal():
        return
    droppable = sum(value for name, value in _pairs(_read(folder / "memory.stat")) if name in files.droppable)
    used = max(0, int(usage) - droppable)
    yield Headroom(nbytes=max(0, int(limit) - used), limit="what this process's control group may still use")


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        value = rest.split()[:1]
        if value and value[0].isdecimal():
            yield name, int(value[0])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
