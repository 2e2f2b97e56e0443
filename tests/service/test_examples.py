"""The examples, run as a reader runs them, against real servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rig.server import Running, running

EXAMPLES = Path(__file__).parents[2] / "examples"
PROCESSES = 4


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("mask", [(), ("--full",)], ids=["causal", "full"])
def test_a_ring_of_four_processes_over_two_servers_equals_the_whole(server: Running, mask: tuple[str, ...]) -> None:
    with running() as other:
        before = [one.metric("dqkv_requests_total", code="OK", rpc="Backward") for one in (server, other)]
        done = run("ring.py", server.target, other.target, "--seqlen", "256", *mask)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()[1:]
        assert [line.split()[-1] for line in lines] == ["right"] * PROCESSES
        after = [one.metric("dqkv_requests_total", code="OK", rpc="Backward") for one in (server, other)]
        # of 4 x 4 blocks a causal mask leaves 1, 2, 3 and 4 to the four processes, which take the servers in turn
        blocks = [8, 8] if mask else [1 + 3, 2 + 4]
        assert [now - then for now, then in zip(after, before, strict=True)] == blocks


def test_a_small_gpt_learns_as_well_with_its_backward_on_a_server(server: Running) -> None:
    done = run("train.py", server.target, "--steps", "50")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[2]) for line in done.stdout.splitlines()[1:-1]]
    assert len(losses) == 50
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("example", "arguments", "says"),
    [
        ("ring.py", ("127.0.0.1:1", "--seqlen", "510"), "--seqlen is 510, must be a positive multiple of 4"),
        ("train.py", ("127.0.0.1:1", "--steps", "0"), "--steps is 0, must be at least 1"),
        ("train.py", (), "server"),
    ],
)
def test_what_an_example_cannot_do_it_says(example: str, arguments: tuple[str, ...], says: str) -> None:
    done = run(example, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
