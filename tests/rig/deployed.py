"""What is deployed, as a cluster reads it, and the programs that judge it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "k8s" / "overlays").iterdir())
TOOLS = ROOT / ".venvs" / "tools"
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

Manifests = dict[str, dict[str, Any]]
"""Of one overlay, by kind."""


def find(program: str) -> str:
    """Where a program is; skips the test where it is nowhere, and fails it in CI, which installs them all."""
    path = os.pathsep.join((str(TOOLS / "bin"), str(TOOLS / "programs"), os.environ["PATH"]))
    found = shutil.which(program, path=path)
    if found is None and "CI" in os.environ:
        pytest.fail(f"{program} is not installed")
    if found is None:
        pytest.skip(f"{program} is not installed: make check-deploy installs it")
    return found


def pod_of(manifests: Manifests) -> dict[str, Any]:
    """The specification of the pods of the overlay's Deployment or Job."""
    workload = manifests.get("Deployment") or manifests["Job"]
    return workload["spec"]["template"]["spec"]


def server_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The container that serves."""
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    return next(container for container in containers if container["name"] == "server")


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """Its variables; one that is a resource of the container has that resource's value."""
    found = {}
    for variable in container["env"]:
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            side, name = variable["valueFrom"]["resourceFieldRef"]["resource"].split(".")
            found[variable["name"]] = str(container["resources"][side][name])
    return found


def given(environment: dict[str, str]) -> dict[str, str]:
    """Settings by their own names, as Settings.load takes them."""
    return {name.removeprefix("DQKV_").lower(): value for name, value in environment.items()}


def nbytes(quantity: str) -> int:
    """A quantity of memory."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]
