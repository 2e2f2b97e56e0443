"""The NVIDIA driver of this machine, asked without torch, whose import takes longer than the driver's start."""

from __future__ import annotations

import ctypes
import threading

DRIVER = "libcuda.so.1"


def warm_up(index: int) -> threading.Thread:
    """Begin to make the context of a GPU, which torch will use, on a thread that need not be waited for.

    index: as CUDA counts in this environment. Whatever fails here fails again, and is said, when torch asks for it.
    """
    thread = threading.Thread(target=_retain, args=(index,), name="driver", daemon=True)
    thread.start()
    return thread


def _retain(index: int) -> None:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return
    device, context = ctypes.c_int(0), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
