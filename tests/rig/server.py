"""A real server, started as an operator starts it, on free ports, with its log read as it comes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from .process import PATIENCE_S, wait_for

START_S = 120.0
STOP_S = 60.0
COMMAND = (sys.executable, "-m", "dqkv", "serve")

DEFAULTS = {
    "DQKV_PORT": "0",
    "DQKV_STREAM_PORT": "0",
    "DQKV_HTTP_PORT": "0",
    "DQKV_CPU_THREADS": "1",
    # What is tested with a GPU asks for it.
    "DQKV_GPUS": "none",
    "DQKV_LOG_FORMAT": "json",
    "DQKV_LOG_LEVEL": "debug",
    # A machine that stands still for a while is no idle caller, no full queue and no lease that ran out.
    "DQKV_STREAM_IDLE_S": "120",
    "DQKV_QUEUE_SECONDS": "3600",
    "DQKV_LEASE_DEFAULT_S": "3600",
    "DQKV_DRAIN_S": "120",
}


@dataclass(eq=False)
class Running:
    """A server's process; `events` are its log lines so far."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    _fresh: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    _whole: threading.Event = field(default_factory=threading.Event)

    def read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue
            self.events.append(event)
            self._fresh.put(event)
        self._fresh.put(None)
        self._whole.set()

    def wait_for(self, name: str, timeout_s: float = START_S, **facts: Any) -> dict[str, Any]:
        """The next log line with this event and these facts; what came before is passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._fresh.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise AssertionError(f"not within {timeout_s:g} s: {name} {facts}\n{''.join(self.lines)}") from None
            if event is None:
                raise AssertionError(f"the server ended:\n{''.join(self.lines)}")
            if event.get("event") == name and all(event.get(key) == value for key, value in facts.items()):
                return event

    @property
    def address(self) -> dict[str, Any]:
        return next(event for event in self.events if event.get("event") == "serving")

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.address['grpc_port']}"

    @property
    def stream_target(self) -> str:
        return f"127.0.0.1:{self.address['stream_port']}"

    def http(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        url = f"http://127.0.0.1:{self.address['http_port']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, summed over what `labels` leaves open; 0 when it was never counted."""
        return total(self.http("/metrics")[1].decode(), name, **labels)

    def is_quiet(self) -> bool:
        """Whether every call has ended and was counted."""
        text = self.http("/metrics")[1].decode()
        return not total(text, "dqkv_inflight_requests") and total(text, "grpc_server_started_total") == total(
            text, "dqkv_requests_total"
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal, and returns the exit code; all of the log has been read by then."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(STOP_S)
        assert self._whole.wait(STOP_S), "somebody still holds the server's log"
        return code


@contextlib.contextmanager
def running(*, ready: bool = True, **settings: str) -> Iterator[Running]:
    """A server with these settings (DQKV_ names in lower case without the prefix); killed at the end."""
    with attended(spawn(**settings)) as server:
        if ready:
            server.wait_for("serving")
        yield server


@contextlib.contextmanager
def attended(process: subprocess.Popen[str]) -> Iterator[Running]:
    """A server's process whose log is read as it comes; killed at the end."""
    server = Running(process)
    reader = threading.Thread(target=server.read_log, daemon=True)
    reader.start()
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(STOP_S)
        reader.join(STOP_S)
        if process.stderr is not None:
            process.stderr.close()


def spawn(**settings: str) -> subprocess.Popen[str]:
    """The process alone."""
    own = {f"DQKV_{name.upper()}": value for name, value in settings.items()}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DQKV_")}
    return subprocess.Popen(COMMAND, env={**clean, **DEFAULTS, **own}, stderr=subprocess.PIPE, text=True)


def open_channel(target: str, **options: Any) -> grpc.Channel:
    """A channel whose connection is its own, and so a caller of its own."""
    return grpc.insecure_channel(
        target,
        [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            *options.items(),
        ],
    )


def total(text: str, name: str, **labels: str) -> float:
    """A metric's value in what /metrics says, summed over what `labels` leaves open."""
    found = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.split("{")[0] == name and all(f'{key}="{want}"' in head for key, want in labels.items()):
            found += float(value)
    return found


def eventually(truth: Callable[[], bool]) -> None:
    """Waits until something holds."""
    wait_for(truth, "it comes true")
