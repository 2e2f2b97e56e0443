"""What ran on a GPU, as tests/gpu/record.json says, is what this source compiles to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from assembly import DIRECTORY, gated_keys

from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.tiles import ARCH_TARGETS

RECORD = Path(__file__).parents[1] / "gpu" / "record.json"
MARGIN = 1.0
"""Errors over their budgets: above one is wrong."""

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


def test_the_kernels_that_ran_are_these(built, record):
    artifacts = Artifacts(DIRECTORY)
    now = {key.name: artifacts.verify(key)["ptx_sha256"] for key in gated_keys() if key.target == "sm_90a"}
    changed = sorted(name for name, digest in record["kernels"].items() if now.get(name) != digest)
    assert changed == []


def test_every_kernel_of_the_recorded_target_ran(record):
    families = {arch for arch, targets in ARCH_TARGETS.items() if "sm_90a" in targets}
    names = {key.name for key in gated_keys() if key.target == "sm_90a" and key.arch in families}
    assert names <= set(record["kernels"])


def test_every_answer_was_within_its_budget(record):
    assert record["error_over_budget"]
    for answers in record["error_over_budget"].values():
        for name, gradients in answers.items():
            assert max(gradients.values(), default=0.0) <= MARGIN, name
