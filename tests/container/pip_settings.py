"""The host's settings of pip, handed to a build: as secrets and a folder of wheels, none of which enters the image."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

PASSED_ON = frozenset({"index-url", "trusted-host", "proxy", "default-timeout", "timeout", "retries"})


def build_options(folder: Path) -> list[str]:
    """Options of `build`; the files they name are written to `folder`."""
    settings = _settings()
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items() if name in PASSED_ON)]
    options = ["--build-context", f"wheels={wheels}"]
    # Indexes on this host's disk stay out: what they have, the index or a folder of wheels has too.
    remote = [url for url in settings.get("extra-index-url", "").split() if not url.startswith("file:")]
    if remote:
        lines.append(f"extra-index-url = {' '.join(remote)}")
    for place in settings.get("find-links", "").split():
        for wheel in Path(place).glob("*.whl"):
            _link(wheel, wheels / wheel.name)
    if any(wheels.iterdir()):
        lines.append("find-links = /run/wheels")
        # torch is among them; the index of torch's own builds may be out of reach.
        options += ["--build-arg", "CPU_INDEX="]
    if certificates := settings.get("cert"):
        lines.append("cert = /run/ca.pem")
        options += ["--secret", f"id=ca,src={certificates}"]
    written = folder / "pip.conf"
    written.touch(mode=0o600)
    written.write_text("\n".join(lines) + "\n")
    return [*options, "--secret", f"id=pip,src={written}"]


def _settings() -> dict[str, str]:
    """What pip goes by here, the environment before its files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return found


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
