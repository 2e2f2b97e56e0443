"""A server in a container, started as an operator starts it: read-only, no capabilities, ports of the host."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rig.server import DEFAULTS, Running

from container.image import Image

USER = 10001
"""The image's user and group."""
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
CONFINED = ("--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges")
LOOPBACK = {"DQKV_HOST": "127.0.0.1", "DQKV_HTTP_HOST": "127.0.0.1"}
STOP_S = 180


@dataclass(eq=False, kw_only=True)
class Contained(Running):
    """A server in a container; its process is the engine's command that is attached to it."""

    image: Image
    name: str
    _reader: threading.Thread | None = field(default=None, repr=False)

    def ask(self, *command: str) -> str:
        """What a command prints that is run beside the server. Raises Failed."""
        return self.image.engine.ask("exec", self.name, *command)

    def state(self) -> dict[str, object]:
        """What the engine says of it."""
        return dict(self.image.engine.inspect(self.name)["State"])

    def send(self, signal: str) -> None:
        """Sends a signal to the container's first process."""
        self.image.engine.ask("kill", "--signal", signal, self.name)

    def stop(self, number: int = 0) -> int:
        """Stops it as the engine does, by the image's own signal, and returns the exit code."""
        self.image.engine.ask("stop", "--time", str(STOP_S), self.name)
        return self.ended()

    def ended(self) -> int:
        """The exit code, once it ended."""
        code = self.process.wait(STOP_S)
        self.close()
        return code

    @contextlib.contextmanager
    def again(self) -> Iterator[Contained]:
        """The same container, started again; stopped at the end."""
        process = self.image.engine.start("start", "--attach", self.name, **PIPES)
        server = Contained(image=self.image, name=self.name, process=process)
        server.read()
        try:
            server.wait_for("serving")
            yield server
        finally:
            server.stop()

    def read(self) -> None:
        """Begins to read the log of the process."""
        self._reader = threading.Thread(target=self.read_log, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Reads the rest of the log."""
        if self._reader is not None:
            self._reader.join(STOP_S)
        if self.process.stderr is not None:
            self.process.stderr.close()


@contextlib.contextmanager
def contained(
    image: Image, *, options: Sequence[str] = (), network: str = "host", ready: bool = True, **settings: str
) -> Iterator[Contained]:
    """A server with these settings (DQKV_ names in lower case without the prefix); removed at the end."""
    name = f"dqkv-test-{secrets.token_hex(4)}"
    own = {f"DQKV_{key.upper()}": value for key, value in settings.items()}
    given = {**DEFAULTS, **LOOPBACK, **own} if network == "host" else own
    variables = [part for key, value in given.items() for part in ("--env", f"{key}={value}")]
    command = [
        "run",
        "--name",
        name,
        "--network",
        network,
        *image.engine.read_only,
        *CONFINED,
        *options,
        *variables,
        image.tag,
    ]
    server = Contained(image=image, name=name, process=image.engine.start(*command, **PIPES))
    server.read()
    try:
        if ready:
            server.wait_for("serving")
        yield server
    finally:
        image.engine.attempt("rm", "--force", "--time", "0", name)
        server.process.wait(STOP_S)
        server.close()
