"""A server for as long as a command needs one: `dqkv serve` in a process of its own, on free loopback ports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 120.0
"""Longest wait for the server to say that it serves; torch alone can take a quarter of it on a cold disk."""
STOP_TIMEOUT_S = 60.0
LINES_KEPT = 20


class NotServing(Exception):
    """The server ended, or said nothing, before it served; the message holds its last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Where the server listens."""

    grpc: str
    http: str


class OwnServer:
    """Starts on entering and stops on leaving, with its queue drained.

    settings: by their names in the environment without DQKV_, as `dqkv serve --set` takes them.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = {"port": "0", "stream_port": "0", "http_port": "0", "log_format": "json", **(settings or {})}
        self._process: subprocess.Popen[str] | None = None
        self._last: deque[str] = deque(maxlen=LINES_KEPT)
        self._serving = threading.Event()
        self._fields: dict[str, Any] = {}
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Addresses:
        """Where it listens. Raises NotServing."""
        given = [part for name, value in self._settings.items() for part in ("--set", f"{name}={value}")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dqkv", "serve", *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        if not self._serving.wait(START_TIMEOUT_S) or not self._fields:
            self._end()
            raise NotServing("the server did not start:\n" + "\n".join(self._last))
        host = self._fields["host"]
        return Addresses(grpc=f"{host}:{self._fields['grpc_port']}", http=f"{host}:{self._fields['http_port']}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._last.append(line.rstrip())
            fields = _fields(line)
            if fields.get("event") == "serving":
                self._fields = fields
                self._serving.set()
        # It ended: whoever waits need not wait any longer.
        self._serving.set()

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()


def _fields(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
