"""Each fuzz target for a few seconds: the invariants that it asserts hold for whatever the fuzzer makes up."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import seeds

TESTS = Path(__file__).parents[1]
SEED = "20"
"""The same inputs on every run: what fails here fails again."""
SECONDS = "100"
"""An end for a slow machine; the runs are fewer than fit into it on two cores."""

TARGETS: dict[str, tuple[Callable[[], list[bytes]], int]] = {
    "frames": (seeds.frames, 60_000),
    "problems": (seeds.requests, 20_000),
    "regions": (seeds.choices, 30_000),
    "headers": (seeds.headers, 10_000),
}
"""Targets with the inputs that they start from and how many more are tried."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python"
)


def fuzz(target: str, runs: int, folder: Path) -> subprocess.CompletedProcess[str]:
    corpus = folder / "corpus"
    corpus.mkdir()
    make, _ = TARGETS[target]
    for number, seed in enumerate(make()):
        (corpus / f"seed-{number}").write_bytes(seed)
    command = [
        *(sys.executable, "-m", f"fuzz.{target}", f"-runs={runs}", f"-seed={SEED}", f"-max_total_time={SECONDS}"),
        *("-max_len=2048", f"-artifact_prefix={folder}/", str(corpus)),
    ]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_arrives_is_taken_whole_or_refused_by_type(target: str, tmp_path: Path) -> None:
    _, runs = TARGETS[target]
    result = fuzz(target, runs, tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
    done = re.search(r"Done (\d+) runs", result.stderr)
    assert done is not None
    assert int(done.group(1)) >= runs // 10, f"only {done.group(1)} runs: too slow to say anything"
    # Inputs that reach new code are kept: the fuzzer got past the first check.
    reached = max(map(int, re.findall(r"cov: (\d+)", result.stderr)))
    print(f"{target}: {done.group(1)} runs, {reached} branches")
    assert reached > 20
