"""The programs that these tests run, and the manifests as a cluster would get them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
import yaml
from rig.deployed import DEPLOY, Manifests, find


@pytest.fixture(autouse=True)
def _no_settings_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("DQKV_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def promtool() -> str:
    return find("promtool")


@pytest.fixture(scope="session")
def render() -> Callable[[str], Manifests]:
    """An overlay's manifests by kind."""
    kubectl, known = find("kubectl"), {}

    def manifests(overlay: str) -> Manifests:
        if overlay not in known:
            command = [kubectl, "kustomize", str(DEPLOY / "k8s" / "overlays" / overlay)]
            text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
            known[overlay] = {item["kind"]: item for item in yaml.safe_load_all(text)}
        return known[overlay]

    return manifests
