"""The whole server with a GPU: cases by every way, clients at once, a killed process, and memory that is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle.budget import bitwise_complaints, judge
from oracle.case import AS_IS, variants
from oracle.cases import BY_NAME
from oracle.exact import solved
from oracle.inputs import build_inputs
from rig.process import wait_for
from rig.server import Running, running
from rig.ways import TIMEOUT_S, Way, Ways

from dqkv import Client, Retry, errors

pytestmark = pytest.mark.gpu

ARCHS = ("sm90", "sm80")
CASES = (
    "single_token_d16_fp16",
    "varlen_rows_behind_last_offset",
    "dense_batch0",
    "dense_sk0_causal",
    "packed_q_dense_k_seqused",
    "mqa_71_1",
    "det_hd256_causal",
    "window_right_minus3",
    "mla_192_128_causal",
    "hd64_dv256",
    "dO_sbhd_mqa",
    "last_dim_stride_2",
    "misaligned_base_pointer",
    "kv_broadcast_over_heads",
    "softcap50_window_gqa",
    "sink_dlse_varlen_empty",
    "ring_sink_in_global_lse",
    "sink_token_seqused_packed",
)
"""Every theme, and every kind of layout on the way to the device."""
GAP = 24
LARGE = (1, 32768, 16, 128)
"""128 MiB a tensor in bf16: half a second from its arrival to its answer."""
FREE_NBYTES = 512 << 20
"""What other programs leave of the device: enough for a small request, not for a large one."""
ONCE = Retry(attempts=1)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server of one GPU and one CPU device."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU that this PyTorch can use")
    kernels = request.config.getoption("--kernels")
    begun = time.monotonic()
    with running(kernels=str(kernels), gpus="0", cpu_devices="1", cpu_threads="4") as one:
        print(f"\nserving {time.monotonic() - begun:.1f} s after its start")
        yield one


@pytest.fixture(scope="module")
def ways(server: Running) -> Iterator[Ways]:
    with Ways(server.target) as one:
        yield one


def test_it_says_what_it_computes_on(server: Running) -> None:
    info = json.loads(server.http("/v1/info")[1])
    device = next(device for device in info["devices"] if device["name"] == "cuda:0")
    assert (device["state"], device["fault"]) == ("ok", "")
    assert device["model"] == torch.cuda.get_device_name(0)
    assert device["archs"] == list(ARCHS)
    assert device["dtypes"] == ["bf16", "fp16"]
    assert info["notes"] == []


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_answered_by_every_way(name: str, arch: str, ways: Ways) -> None:
    case = BY_NAME[name]
    complaints = []
    for index, variant in enumerate(variants(case)):
        if variant.dtype == "fp32":
            continue
        inputs = replace(build_inputs(case, variant), arch=arch)
        answers = [ways.ask(inputs, way, gap=GAP * (index % 2)) for way in Way]
        for way, answer in zip(Way, answers, strict=True):
            found = judge(case, solved(variant.of(case)), answer, variant)
            complaints += [f"{variant.name} by {way}: {text}" for text in found]
            report = answer.report
            assert (report.arch, report.device) == (arch, "cuda:0")
            assert report.kernel.startswith(f"main_loop-arch{arch[2:]}-sm_90a-")
            assert report.device_s > 0
            assert report.transfer_s > 0
        if case.deterministic:
            complaints += bitwise_complaints(replace(case, checks=("BITWISE",)), answers)
    assert complaints == []


def test_what_the_kernels_do_not_take_goes_to_the_cpu_or_is_refused(ways: Ways) -> None:
    case = BY_NAME["hd32_gqa"]
    variant = next(variant for variant in variants(case) if variant.dtype == "fp32")
    inputs = build_inputs(case, variant)
    answer = ways.ask(inputs, Way.UNARY)
    assert (answer.report.arch, answer.report.device) == ("cpu", "cpu:0")
    assert judge(case, solved(variant.of(case)), answer, variant) == []
    with pytest.raises(errors.ArchUnavailable, match=r"fp32.*runs sm90"):
        ways.ask(replace(inputs, arch="sm90"), Way.UNARY)
    with pytest.raises(errors.ArchUnavailable, match="sm100"):
        ways.ask(replace(build_inputs(case, AS_IS), arch="sm100"), Way.UNARY)


def test_auto_takes_the_best_kernels_of_the_fastest_device(server: Running) -> None:
    with Client(server.target) as client:
        report = client.backward(**_large(), timeout_s=TIMEOUT_S).report
    assert (report.arch, report.device) == ("sm90", "cuda:0")
    print(f"\n{LARGE} bf16 causal by stream: {report}")


def test_two_clients_at_once_do_not_disturb_each_other(server: Running) -> None:
    names = ("det_mha_s512", "sink_token_det")

    def ask(name: str) -> list[str]:
        case = BY_NAME[name]
        with Ways(server.target) as own:
            inputs = [replace(build_inputs(case, AS_IS), arch="sm90") for _ in range(20)]
            answers = [own.ask(each, way) for each in inputs for way in Way]
        found = [text for answer in answers for text in judge(case, solved(case), answer, AS_IS)]
        return found + bitwise_complaints(case, answers)

    with ThreadPoolExecutor(len(names)) as pool:
        assert [text for found in pool.map(ask, names) for text in found] == []


def test_memory_of_the_device_does_not_grow_from_request_to_request(server: Running) -> None:
    with Client(server.target) as client:
        client.backward(**_large(), timeout_s=TIMEOUT_S)
        before = torch.cuda.mem_get_info()[0]
        for _ in range(5):
            client.backward(**_large(), timeout_s=TIMEOUT_S)
        assert torch.cuda.mem_get_info()[0] == before


def test_memory_that_others_hold_fails_the_request_alone(server: Running, ways: Ways) -> None:
    _kill_device(server)  # so that it holds little
    ballast = [torch.empty(torch.cuda.mem_get_info()[0] - FREE_NBYTES, dtype=torch.uint8, device="cuda")]
    with Client(server.target, retry=ONCE) as client:
        with pytest.raises(errors.DeviceOutOfMemory, match="cuda:0 has not enough free memory"):
            client.backward(**_large(), timeout_s=TIMEOUT_S)
        _assert_right(ways)
        ballast.clear()
        torch.cuda.empty_cache()
        assert client.backward(**_large(), timeout_s=TIMEOUT_S).report.device == "cuda:0"
    assert server.metric("dqkv_worker_restarts_total", device="cuda:0", cause="broken") == 0


def test_a_killed_process_fails_its_request_and_comes_back(server: Running, ways: Ways) -> None:
    with Client(server.target, retry=ONCE) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: client.backward(**_large(), timeout_s=TIMEOUT_S))
        deadline = time.monotonic() + TIMEOUT_S
        while not _device(server)["running"]:
            assert time.monotonic() < deadline, "the device never began"
        os.kill(_worker(server), signal.SIGKILL)
        with pytest.raises(errors.DeviceLost, match="cuda:0 ended"):
            asked.result()
    begun = time.monotonic()
    wait_for(lambda: _device(server)["state"] == "ok", "the device is back", timeout_s=60.0)
    print(f"\nback {time.monotonic() - begun:.1f} s after it was killed")
    _assert_right(ways)


BROKEN = """
import sys, threading
from pathlib import Path
import torch
from blocks import Sizes, placed
from dqkv.backend.base import DeviceBroken, Task
from dqkv.backend.cute import CuteBackend
from dqkv.tensor import DType

backend = CuteBackend("cuda:0", kernels=Path(sys.argv[1]), num_threads=1)
with placed(Sizes(seqlen=64, dtype=DType.BF16)) as one:
    import os
    from dataclasses import replace
    backend.add_block(replace(one.block, fd=os.dup(one.block.fd)))
    task = Task(task_id=1, problem=one.problem, gradients=one.gradients)
    print(backend.run(task, lambda: False).arch)
    real = backend._chain.backward
    def failing(*given):
        torch._assert_async(torch.zeros(1, device="cuda"))
        return real(*given)
    backend._chain.backward = failing
    for _ in range(2):
        try:
            backend.run(task, lambda: False)
        except DeviceBroken as error:
            print("broken:", error)
os._exit(0)
"""
"""A kernel that fails leaves every later call of the process failing."""


def test_an_error_that_stays_is_told_from_one_that_passes(server: Running, request: pytest.FixtureRequest) -> None:
    kernels = request.config.getoption("--kernels")
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, str(kernels)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert lines[:1] == ["sm90"], done.stderr
    assert len(lines) == 3, done.stderr
    assert all(line.startswith("broken: CUDA fails on cuda:0") for line in lines[1:])


def _assert_right(ways: Ways) -> None:
    case = BY_NAME["gqa_12_3_dv128"]
    answer = ways.ask(replace(build_inputs(case, AS_IS), arch="sm90"), Way.REGION)
    assert answer.report.device == "cuda:0"
    assert judge(case, solved(case), answer, AS_IS) == []


def _large() -> dict[str, object]:
    """Zeros, which are a problem like any other: a softmax_lse of 0 leaves finite gradients."""
    rows = torch.zeros(LARGE, dtype=torch.bfloat16)
    statistics = torch.zeros(LARGE[0], LARGE[2], LARGE[1])
    tensors = {"q": rows, "k": rows, "v": rows, "dout": rows, "delta": statistics, "softmax_lse": statistics}
    return {**tensors, "causal": True}


def _device(server: Running) -> dict[str, object]:
    info = json.loads(server.http("/v1/info")[1])
    return next(device for device in info["devices"] if device["name"] == "cuda:0")


def _worker(server: Running) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("PPid:"))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"dqkv.backend.worker" in words and b"cuda:0" in words and int(parent.split()[1]) == server.process.pid:
            return int(folder.name)
    raise AssertionError("the GPU has no process")


def _kill_device(server: Running) -> None:
    pid = _worker(server)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "it is gone")
    wait_for(lambda: _device(server)["state"] == "ok", "the device is back", timeout_s=60.0)
