"""The short-lived process that finds GPUs (`python -m dqkv.backend.probe DIRECTORY`): one line of JSON on stdout.

The server's front never loads the driver; this does, and ends. Neither loads torch, which takes seconds: a start waits
for this, and then for torch in the process of each GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import runpy
import sys
from functools import partial
from pathlib import Path

import msgspec

from dqkv import errors
from dqkv.backend.driver import DRIVER
from dqkv.backend.findings import Findings, Gpu
from dqkv.backend.kernel_sets import artifacts_in, kernel_sets
from dqkv.backend.proof import device_id

CUDA_NO_DEVICE = 100
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
NAME_NBYTES = 256
RUNTIME = "tvm_ffi"


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(prog="dqkv.backend.probe", description="Finds the GPUs of this machine.")
    parser.add_argument("kernels", type=Path, help="directory of the built kernels")
    parser.add_argument("--build-kernels", action="store_true", help="a kernel that is missing there will be built")
    given = parser.parse_args()
    found = find(given.kernels, builds=given.build_kernels)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


def find(kernels: Path, *, builds: bool = False) -> Findings:
    """The GPUs that the driver shows, each with the families of kernels that it can run.

    kernels: the directory that they are in; builds: whether one that is missing there will be built.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return Findings(absence=f"this machine has no NVIDIA driver ({DRIVER} cannot be loaded)")
    status = driver.cuInit(0)
    count = ctypes.c_int(0)
    if status == 0:
        status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, CUDA_NO_DEVICE):
        return Findings(absence=f"the NVIDIA driver does not start (CUDA error {status})")
    if count.value == 0:
        return Findings(absence="the NVIDIA driver shows no device")
    lack = _lack()
    return Findings(gpus=tuple(_gpu(driver, index, lack, kernels, builds) for index in range(count.value)))


def _lack() -> str:
    """What of this installation keeps every GPU idle, in words; "" when nothing does."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return "PyTorch is not installed"
    facts = runpy.run_path(str(Path(torch.submodule_search_locations[0]) / "version.py"))
    if facts.get("cuda") is None:
        return f"PyTorch {facts.get('__version__')} is built without CUDA"
    if importlib.util.find_spec(RUNTIME) is None:
        return "apache-tvm-ffi, which loads the kernels, is not installed"
    return ""


def _gpu(driver: ctypes.CDLL, index: int, lack: str, kernels: Path, builds: bool) -> Gpu:
    handle, name = ctypes.c_int(0), ctypes.create_string_buffer(NAME_NBYTES)
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetName(name, NAME_NBYTES, handle)
    capability = []
    for attribute in (MAJOR, MINOR):
        value = ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        capability.append(value.value)
    model = name.value.decode(errors="replace")
    if lack:
        return Gpu(index=index, model=model, faults=(lack,))
    try:
        artifacts = artifacts_in(kernels, builds=builds)
        sets = kernel_sets((capability[0], capability[1]), artifacts, partial(device_id, driver, index))
    except errors.ArchUnavailable as error:
        return Gpu(index=index, model=model, faults=(error.message,))
    return Gpu(
        index=index,
        model=model,
        archs=tuple(each.arch for each in sets if not each.fault),
        faults=tuple(f"{each.arch}: {each.fault}" for each in sets if each.fault),
        unproven=(unproven := tuple(each.arch for each in sets if each.is_unproven)),
        uuid=device_id(driver, index) if unproven else "",
    )


if __name__ == "__main__":
    main()
