"""The GPU of this machine and its kernels; `--kernels DIR` names them, `--record FILE` keeps what was seen."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from gpu_rig import Gpu, NotedArtifacts, Record

from dqkv_kernels.chain import Chain, Workspace

ROOT = Path(__file__).parents[2]
_RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the artifacts are, and where to write the record."""
    parser.addoption("--kernels", type=Path, default=ROOT / "build" / "kernels", help="directory of built kernels")
    parser.addoption("--record", type=Path, default=None, help="write what ran and how near it was to this file")
    parser.addoption("--add", action="store_true", help="keep in that file what this run did not see")


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """The first GPU with its kernels; every test here needs one."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU that this PyTorch can use")
    record = request.config.stash[_RECORD] = Record()
    device = torch.device("cuda", 0)
    artifacts = NotedArtifacts(request.config.getoption("--kernels"), record)
    chain = Chain(artifacts, Workspace(device))
    return Gpu(device=device, artifacts=artifacts, chain=chain, record=record)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes the record of a run in which everything passed; with --add, over what it held of other tests."""
    path = session.config.getoption("--record")
    record = session.config.stash.get(_RECORD, None)
    if path is None or record is None or exitstatus != 0:
        return
    before = json.loads(path.read_text()) if session.config.getoption("--add") else {}
    kernels = {**before.get("kernels", {}), **record.kernels}
    facts = {**before.get("facts", {}), **record.facts}
    errors = {
        arch: {**before.get("error_over_budget", {}).get(arch, {}), **record.errors.get(arch, {})}
        for arch in sorted({*before.get("error_over_budget", {}), *record.errors})
    }
    worst = {
        arch: max(max(gradients.values(), default=0.0) for gradients in answers.values())
        for arch, answers in errors.items()
    }
    content = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tvm_ffi": version("apache-tvm-ffi"),
        "tests": max(session.testscollected, before.get("tests", 0)),
        "facts": facts,
        "worst_error_over_budget": worst,
        "error_over_budget": errors,
        "kernels": kernels,
    }
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
