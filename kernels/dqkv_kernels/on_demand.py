"""Kernels that are built when a problem first needs them: out of its way, each once, and failures are remembered."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from dqkv.errors import ArtifactForeign, ArtifactMissing, BuildFailed, KernelBuilding
from dqkv_kernels.artifacts import SOURCE_DISTRIBUTION, Artifacts
from dqkv_kernels.build import Built, build
from dqkv_kernels.key import KernelKey

COMPILER = "cutlass"
"""The module whose presence says that the compiler is installed; it is never imported here."""
BUILDS_AT_ONCE = 2
"""Problems whose kernels are built at once; each has a process of its own, and one more problem waits for its turn."""
RETRY_AFTER_S = 10.0
"""About what the kernels of one problem take, the start of the compiler included."""
ROOM_NBYTES = 1 << 20
"""More than the kernels of one problem take on the disk."""

K = TypeVar("K")
_log = logging.getLogger(__name__)


class OnDemandArtifacts(Artifacts):
    """The kernels in one directory; what it lacks is built into it by processes of their own.

    A directory that cannot be written is replaced, for what is built, by one that lives as long as this process, and
    that is logged once. build: builds keys into a directory and reports each, as `build.build` does.
    """

    def __init__(
        self, directory: Path, build: Callable[[Sequence[KernelKey], Path], Sequence[Built]] | None = None
    ) -> None:
        super().__init__(directory)
        self._build = build or _in_one_process
        self._lock = threading.Lock()
        self._building: set[KernelKey] = set()
        self._failed: dict[KernelKey, str] = {}
        self._spare: tempfile.TemporaryDirectory[str] | None = None
        self._builders = ThreadPoolExecutor(BUILDS_AT_ONCE, thread_name_prefix="builder")

    @property
    def builds(self) -> bool:
        """As the base class: where there is a compiler."""
        return not self.lack

    @property
    def lack(self) -> str:
        """As the base class."""
        return "" if find_spec(COMPILER) else f"the compiler, {SOURCE_DISTRIBUTION}, is not installed"

    def load_all(self, keys: Mapping[K, KernelKey]) -> dict[K, Callable[..., None]]:
        """The launch functions of the keys, by the same names.

        Raises KernelBuilding when some are not there yet, whose building has then begun, and BuildFailed for a key that
        the compiler refused before.
        """
        lacking = [key for key in keys.values() if not self._can_load(key)]
        building = self._order(lacking) if lacking else []
        if building:
            names = ", ".join(key.name for key in building)
            raise KernelBuilding(
                f"kernels that this problem needs are being built, {len(building)} of them ({names}): "
                "it can be sent again in a few seconds",
                retry_after_s=RETRY_AFTER_S,
            )
        return super().load_all(keys)

    def load(self, key: KernelKey) -> Callable[..., None]:
        """As the base class; what was built into the spare directory is loaded from there."""
        try:
            return super().load(key)
        except (ArtifactMissing, ArtifactForeign):
            if self._spare is None:
                raise
            launch = self._loaded[key] = Artifacts(Path(self._spare.name)).load(key)
            return launch

    def _can_load(self, key: KernelKey) -> bool:
        try:
            self.load(key)
        except (ArtifactMissing, ArtifactForeign):
            return False
        return True

    def _order(self, lacking: Sequence[KernelKey]) -> list[KernelKey]:
        """Begins what is not begun yet; returns what is being built. Raises BuildFailed."""
        with self._lock:
            for key in lacking:
                if key in self._failed:
                    raise BuildFailed(f"kernel {key.name} cannot be built: {self._failed[key]}")
            # again, since it may have been finished a moment ago
            fresh = [key for key in lacking if key not in self._building and not self._can_load(key)]
            self._building.update(fresh)
            if fresh:
                self._builders.submit(self._make, fresh)
            return [key for key in lacking if key in self._building]

    def _make(self, keys: Sequence[KernelKey]) -> None:
        try:
            errors = {built.key: built.error for built in self._build(keys, self._place()) if built.error}
        except Exception as error:  # noqa: BLE001 - the thread has nobody to tell but those who ask for the keys
            errors = dict.fromkeys(keys, f"the builder failed: {type(error).__name__}: {error}")
        for key, words in errors.items():
            _log.error("kernel %s cannot be built: %s", key.name, words)
        with self._lock:
            self._failed.update(errors)
            self._building.difference_update(keys)

    def _place(self) -> Path:
        """Where to build: the directory, or the spare one from the first time that the directory refused a file."""
        with self._lock:
            if self._spare is None:
                refusal = _refusal(self.directory)
                if not refusal:
                    return self.directory
                self._spare = tempfile.TemporaryDirectory(prefix="dqkv-kernels-")
                _log.warning(
                    "kernels that are built cannot be kept in %s (%s): they are kept in %s until this process ends",
                    self.directory,
                    refusal,
                    self._spare.name,
                )
            return Path(self._spare.name)


def _refusal(directory: Path) -> str:
    """Why a few kernels cannot be written into a directory, in words; "" when they can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(ROOM_NBYTES))
            file.flush()
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _in_one_process(keys: Sequence[KernelKey], directory: Path) -> Sequence[Built]:
    return build(keys, directory, processes=1)
