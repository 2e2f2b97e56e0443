"""Images of this checkout, built as an operator builds them, and what can be asked of them."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from container.engine import BUILD_S, Engine

ROOT = Path(__file__).parents[2]
CONTEXT = ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "deploy/image")
CONTEXT_SOURCES = ("service", "kernels")
REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image, and the seconds that its build took (seconds when every layer was there)."""

    engine: Engine
    tag: str
    build_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of its layers, unpacked."""
        return int(self.engine.inspect(self.tag)["Size"])

    @property
    def healthcheck(self) -> list[str]:
        """Its HEALTHCHECK: "CMD", and the command."""
        known = self.engine.inspect(self.tag)
        return list({**known, **known["Config"]}["Healthcheck"]["Test"])

    def run(self, *command: str, user: str = "", entrypoint: str = "", options: Sequence[str] = ()) -> str:
        """What a command prints in a container of its own with a read-only root. Raises Failed."""
        return self.engine.ask(*self._command(command, user, entrypoint, options))

    def attempt(
        self, *command: str, user: str = "", entrypoint: str = "", options: Sequence[str] = ()
    ) -> tuple[int, str, str]:
        """The same, with its exit code and what it said to standard error."""
        return self.engine.attempt(*self._command(command, user, entrypoint, options))

    def python(self, program: str, *, user: str = "") -> str:
        """What a program prints, run by the image's Python."""
        return self.run("-c", program, entrypoint="python3", user=user)

    def _command(self, command: Sequence[str], user: str, entrypoint: str, options: Sequence[str]) -> list[str]:
        network = [] if "--network" in options else ["--network", "none"]
        given = ["--rm", *network, *self.engine.read_only, "--tmpfs", "/tmp", *options]
        given += ["--user", user] if user else []
        given += ["--entrypoint", entrypoint] if entrypoint else []
        return ["run", *given, self.tag, *command]


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds images of this checkout with one engine; `options` are those that every build takes."""

    engine: Engine
    folder: Path
    options: Sequence[str]
    base: str

    def build(self, tag: str, arguments: Mapping[str, str], *, artifacts: Path | None = None) -> Image:
        """An image by build arguments; `artifacts` is a folder of kernels that come into the context. Raises Failed."""
        given = {"REVISION": REVISION, **arguments}
        if self.base:
            given["BASE_IMAGE"] = self.base
        named = [part for name, value in given.items() for part in ("--build-arg", f"{name}={value}")]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="context-") as scratch:
            context = Path(scratch)
            _lay_out(context)
            if artifacts is not None:
                shutil.copytree(artifacts, context / "build" / "kernels")
            command = ["build", *self.engine.build_options, *self.options, *named, "--tag", tag, str(context)]
            self.engine.ask(*command, timeout_s=BUILD_S)
        return Image(engine=self.engine, tag=tag, build_s=time.monotonic() - began)


def _lay_out(context: Path) -> None:
    """The checkout as a clone has it: without what was built or installed here."""
    for name in CONTEXT:
        source, target = ROOT / name, context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
    for name in CONTEXT_SOURCES:
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
