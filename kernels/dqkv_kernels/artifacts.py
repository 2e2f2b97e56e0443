"""Compiled kernels on disk: loads the one a key names, and refuses what is not that key's, this source's or whole."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TypeVar

from dqkv.errors import ArtifactForeign, ArtifactMissing
from dqkv_kernels.key import KernelKey

ENTRY = "launch"
MANIFEST_SUFFIX = ".json"
SOURCE_DISTRIBUTION = "nvidia-cutlass-dsl"
COMPILER_VERSION = "4.8.1"
"""The compiler whose artifacts this source accepts; its runtime library must be of the same version."""
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"

K = TypeVar("K")

_SOURCES = ("device", "compiler.py", "key.py", "tiles.py")


@cache
def source_digest() -> str:
    """SHA-256 over the files that decide what a kernel does, in hexadecimal."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = here / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(here).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass
class Artifacts:
    """The kernels in one directory, loaded when first asked for and then kept."""

    directory: Path
    _loaded: dict[KernelKey, Callable[..., None]] = field(default_factory=dict)

    def load(self, key: KernelKey) -> Callable[..., None]:
        """The launch function of a key. Raises ArtifactMissing or ArtifactForeign."""
        launch = self._loaded.get(key)
        if launch is None:
            self.verify(key)
            launch = self._loaded[key] = _open(self.directory / f"{key.name}.so")
        return launch

    def load_all(self, keys: Mapping[K, KernelKey]) -> dict[K, Callable[..., None]]:
        """The launch functions of the keys, by the same names. Raises as `load`, for the first that fails."""
        return {name: self.load(key) for name, key in keys.items()}

    @property
    def builds(self) -> bool:
        """Whether what is missing is built once it is needed."""
        return False

    @property
    def lack(self) -> str:
        """What keeps this from building what it should build, in words; "" when nothing does."""
        return ""

    def __contains__(self, key: KernelKey) -> bool:
        """Whether a key was loaded, or could be."""
        return key in self._loaded or (self.directory / f"{key.name}{MANIFEST_SUFFIX}").exists()

    def forget(self, key: KernelKey) -> None:
        """Makes the next load read the disk again, after a key was built anew."""
        self._loaded.pop(key, None)

    def verify(self, key: KernelKey) -> dict[str, Any]:
        """The manifest of a key, every field checked. Raises ArtifactMissing or ArtifactForeign."""
        path = self.directory / f"{key.name}.so"
        manifest_path = path.with_suffix(MANIFEST_SUFFIX)
        if not path.exists() or not manifest_path.exists():
            raise ArtifactMissing(
                f"kernel {key.name} is not in {self.directory}: build it with "
                f"`dqkv kernels build --out {self.directory} --key {key.name}`",
                field="arch",
            )
        try:
            manifest: dict[str, Any] = json.loads(manifest_path.read_text())
            said = KernelKey.from_dict(manifest["key"])
            wanted = {"source": source_digest(), "compiler": COMPILER_VERSION}
            found = {name: manifest[name] for name in wanted}
            digest = manifest["object_sha256"]
        except (OSError, ValueError, TypeError, KeyError) as problem:
            raise ArtifactForeign(f"{manifest_path} is not a kernel's manifest: {problem!r}") from problem
        if said != key:
            raise ArtifactForeign(
                f"{path} was built for {said.target} as {said.name}, not for {key.target} as {key.name}"
            )
        for name, value in wanted.items():
            if found[name] != value:
                raise ArtifactForeign(f"{path} was built with {name} {found[name]}, not {value}: build it again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ArtifactForeign(f"{path} does not have the SHA-256 {digest} that its manifest says: it is damaged")
        return manifest


def _open(path: Path) -> Callable[..., None]:
    import tvm_ffi

    _runtime(path.parent)
    function: Callable[..., None] = tvm_ffi.load_module(str(path))[ENTRY]
    return function


@cache
def _runtime(directory: Path) -> None:
    """Loads the compiler's small runtime library before a kernel asks for it. Raises OSError when it is nowhere."""
    candidates = [directory / RUNTIME_LIBRARY]
    for name in ("nvidia-cutlass-dsl-libs-cu13", SOURCE_DISTRIBUTION):
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        candidates += [Path(str(file.locate())) for file in files if file.name == RUNTIME_LIBRARY]
    found = next((str(path) for path in candidates if path.exists()), RUNTIME_LIBRARY)
    ctypes.CDLL(found, ctypes.RTLD_GLOBAL)
