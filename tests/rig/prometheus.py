"""A real Prometheus on a free port, asked over its API."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig.server import eventually


@dataclass(frozen=True)
class Prometheus:
    """Where it listens."""

    url: str

    def ask(self, path: str, **words: str) -> Any:
        """What the API answers; raises HTTPError for an expression that it does not take."""
        query = urllib.parse.urlencode(words)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        return self.ask("query", query=expr)["result"]

    def ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return answer.status == 200
        return False


@contextlib.contextmanager
def running_prometheus(program: str, config: Path, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus with this configuration, its data in a folder; killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        one = Prometheus(f"http://127.0.0.1:{port}")
        eventually(one.ready)
        yield one
    finally:
        process.kill()
        process.wait(30)
