"""Where and when something was measured, and where the results are kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("dqkv", "grpcio", "numpy", "torch")


def describe() -> dict[str, Any]:
    """The machine: processor, cores this process may use, system, versions, and the day."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Keeps a result with the machine it was measured on, as benchmarks/results/NAME.json; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **result}, indent=1) + "\n")
    return path


def _processor() -> str:
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return (
        f"{facts.get('model name', platform.processor())}, family {facts.get('cpu family')} model {facts.get('model')}"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
