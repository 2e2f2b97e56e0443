"""The validators: pinned, and asked for everything but what has a reason not to be."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from rig.deployed import DEPLOY, OVERLAYS, ROOT, find

CHECKOV = DEPLOY / "checkov.yaml"


def test_every_validator_and_what_it_brings_is_one_exact_version() -> None:
    lines = (DEPLOY / "tools.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len({one.name for one in pinned}) == len(pinned) > 6
    for one in pinned:
        (specifier,) = one.specifier
        assert specifier.operator == "=="
        assert "*" not in specifier.version


def test_every_skip_has_a_reason_above_it() -> None:
    above = ""
    for line in CHECKOV.read_text().splitlines():
        if re.fullmatch(r" +- CKV\w+", line):
            assert above.lstrip().startswith("# "), line
        above = line


def test_every_skip_is_needed_and_nothing_else_is_found(tmp_path: Path) -> None:
    checkov, kubectl = find("checkov"), find("kubectl")
    settings = yaml.safe_load(CHECKOV.read_text())
    skipped = settings.pop("skip-check")
    for overlay in OVERLAYS:
        with (tmp_path / f"{overlay}.yaml").open("wb") as file:
            command = [kubectl, "kustomize", str(DEPLOY / "k8s" / "overlays" / overlay)]
            subprocess.run(command, stdout=file, check=True, timeout=60)
    (tmp_path / "Dockerfile").write_bytes((ROOT / "Dockerfile").read_bytes())
    (tmp_path / "config").write_text(yaml.safe_dump({**settings, "output": ["json"], "directory": [str(tmp_path)]}))
    said = subprocess.run([checkov, "--config-file", str(tmp_path / "config")], capture_output=True, timeout=100)
    failed = {one["check_id"] for report in json.loads(said.stdout) for one in report["results"]["failed_checks"]}
    assert failed == set(skipped), said.stderr.decode()
