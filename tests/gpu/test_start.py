"""A server with a GPU serves soon after its start: within twice what importing torch and initialising CUDA take."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

import pytest
from gpu_rig import Gpu
from rig.server import running

pytestmark = pytest.mark.gpu

PAIRS = 2
LIMIT = 2.0
BARE = "import torch; torch.zeros(1, device='cuda'); torch.cuda.synchronize()"


def test_a_start_takes_at_most_twice_what_torch_and_cuda_take(gpu: Gpu, request: pytest.FixtureRequest):
    kernels = str(request.config.getoption("--kernels"))
    _bare()  # so that no pair reads torch from a cold disk
    bare, whole = [], []
    for _ in range(PAIRS):
        bare.append(_bare())
        begun = time.monotonic()
        with running(kernels=kernels, gpus="0", cpu_devices="0", cpu_threads="4") as server:
            whole.append(time.monotonic() - begun)
            for event in server.events:
                print(f"\n{event.get('timestamp')} {event.get('event')}", end="")
    print(f"\nbare {bare} s, a server {whole} s, {median(whole) / median(bare):.2f}")
    gpu.record.facts["start_s"] = {"torch_and_cuda": round(median(bare), 2), "server": round(median(whole), 2)}
    assert median(whole) <= LIMIT * median(bare)


def _bare() -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", BARE], check=True)
    return time.monotonic() - begun
