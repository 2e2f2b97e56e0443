"""The server's log: what its level leaves of it, and that no line gives a caller's bytes away."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

LEVELS = ("debug", "info", "warning", "error")
PROGRAM = """
import logging, structlog, sys
from dqkv.server import logs

early = structlog.get_logger("dqkv.server")
logs.configure(level=sys.argv[1], form="json")
for level in ("debug", "info", "warning", "error"):
    getattr(early, level)("ours", level=level, rpc="Backward")
    getattr(logging.getLogger("dqkv.theirs"), level)("theirs %s", level)
try:
    secret = "of a caller"
    raise ValueError("broken")
except ValueError:
    early.exception("fault", rpc="Backward")
"""


def lines_at(level: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert "of a caller" not in done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_drops_what_is_below_it_whoever_says_it(level: str) -> None:
    *lines, fault = lines_at(level)
    kept = LEVELS[LEVELS.index(level) :]
    assert [(line["event"], line["level"]) for line in lines] == [
        said for name in kept for said in (("ours", name), (f"theirs {name}", name))
    ]
    assert all(line["rpc"] == "Backward" for line in lines if line["event"] == "ours")
    assert {line["logger"] for line in lines} == {"dqkv.server", "dqkv.theirs"}
    assert (fault["event"], fault["level"]) == ("fault", "error")
    (raised,) = fault["exception"]
    assert (raised["exc_type"], raised["exc_value"]) == ("ValueError", "broken")
    assert raised["frames"]
