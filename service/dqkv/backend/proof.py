"""The word, kept beside the kernels, that a family of them has passed its selftest on one GPU of this machine."""

from __future__ import annotations

import ctypes
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dqkv.backend.driver import DRIVER
from dqkv.problem import Arch
from dqkv_kernels.artifacts import source_digest

UUID_NBYTES = 16


def device_id(driver: Any, index: int) -> str:
    """The UUID of a GPU, which no other has, by its number as CUDA counts in this environment; "" when it has none.

    driver: libcuda.so.1, started.
    """
    handle, raw = ctypes.c_int(0), ctypes.create_string_buffer(UUID_NBYTES)
    if driver.cuDeviceGet(ctypes.byref(handle), index) or driver.cuDeviceGetUuid(raw, handle):
        return ""
    return str(uuid.UUID(bytes=raw.raw))


def device_id_of(index: int) -> str:
    """As `device_id`, of the driver of this machine; "" where none starts."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return ""
    return "" if driver.cuInit(0) else device_id(driver, index)


def lack_of_proof(kernels: Path, arch: Arch, device: Callable[[], str]) -> str:
    """Why a family that has to prove itself is not to be used on a GPU, in words; "" once it has passed there.

    kernels: the directory of the kernels. device: tells the GPU's UUID.
    """
    remedy = f"`dqkv kernels selftest --arch {arch.removeprefix('sm')}` has to pass on it first"
    name = device()
    path = _path(kernels, arch, name)
    if not name or not path.exists():
        return f"it has run on no such device yet, and {remedy}"
    try:
        said = json.loads(path.read_text())
        tested = said["source"], said["arch"], said["device"]
    except (OSError, ValueError, TypeError, KeyError):
        return f"what its selftest left is damaged, and {remedy} again"
    if tested != (source_digest(), arch.value, name):
        return f"its selftest passed with kernels of another version, and {remedy} again"
    return ""


def keep_proof(kernels: Path, arch: Arch, device: str, trials: int) -> Path:
    """Notes that all trials passed on the GPU of a UUID, with the kernels of this source. Raises OSError."""
    path = _path(kernels, arch, device)
    said = {"arch": arch.value, "device": device, "source": source_digest(), "trials": trials}
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    os.replace(draft, path)
    return path


def drop_proof(kernels: Path, arch: Arch, device: str) -> None:
    """Takes the word back: what fails now did not pass, whatever it did before. Raises OSError."""
    _path(kernels, arch, device).unlink(missing_ok=True)


def _path(kernels: Path, arch: Arch, device: str) -> Path:
    return kernels / "selftests" / f"{arch.value}-{device}.json"
