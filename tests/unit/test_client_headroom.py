"""How much memory may still be taken: the narrowest limit of the machine and its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from dqkv.client.headroom import MARGIN_NBYTES, headroom

pytestmark = pytest.mark.numpy_only

GIB = 1 << 30
MEMINFO = f"MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   {8 * GIB >> 10} kB\n"
UNLIMITED_V1 = "9223372036854771712\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str, limit: object, used: int, stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/{group}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def v1(group: str, limit: str, used: int, stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def test_here_some_limit_is_known_and_it_is_below_what_the_machine_has() -> None:
    room = headroom()
    assert room is not None
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) << 10
    assert 0 <= room.nbytes < total


CASES = {
    "nothing known": ({}, None),
    "not a number": ({"proc/meminfo": "MemAvailable: much kB\n"}, None),
    "the machine alone": ({"proc/meminfo": MEMINFO}, 8 * GIB - MARGIN_NBYTES),
    "a machine that is full": ({"proc/meminfo": "MemAvailable:   1024 kB\n"}, 0),
    "v2 narrower": ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n", **v2("a/b", 2 * GIB, GIB)}, GIB),
    "v2 unlimited": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **v2("a", "max", GIB)},
        8 * GIB - MARGIN_NBYTES,
    ),
    "v2 bound by a group above": (
        {"proc/self/cgroup": "0::/a/b\n", **v2("a/b", "max", 0), **v2("a", 3 * GIB, 2 * GIB)},
        GIB,
    ),
    "v2 in a container, where the path is the host's": (
        {"proc/self/cgroup": "0::/kube/pod\n", **v2("", 4 * GIB, GIB)},
        3 * GIB,
    ),
    "v2 with pages that can be dropped": (
        {
            "proc/self/cgroup": "0::/\n",
            **v2("", 4 * GIB, 4 * GIB, f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\nshmem {GIB}\n"),
        },
        3 * GIB,
    ),
    "v2 over its limit": ({"proc/self/cgroup": "0::/\n", **v2("", GIB, 2 * GIB)}, 0),
    "v1 narrower": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/c\n4:hugetlb,memory:/a/b\n0::/\n",
            **v1("a/b", f"{2 * GIB}\n", 2 * GIB, f"inactive_file 7\ntotal_inactive_file {GIB >> 1}\n"),
            **v1("a", UNLIMITED_V1, GIB),
        },
        GIB >> 1,
    ),
    "v1 unlimited": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/\n", **v1("", UNLIMITED_V1, GIB)},
        8 * GIB - MARGIN_NBYTES,
    ),
    "a line that is none": ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "words\n\n"}, 8 * GIB - MARGIN_NBYTES),
}


@pytest.mark.parametrize("name", CASES)
def test_the_narrowest_limit_binds(name: str, tmp_path: Path) -> None:
    files, want = CASES[name]
    room = headroom(tree(tmp_path, files))
    assert (None if room is None else room.nbytes) == want
    assert room is None or room.limit
