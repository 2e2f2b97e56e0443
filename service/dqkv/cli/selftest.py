"""`dqkv kernels selftest`: holds a family of kernels against the oracle on the GPUs here, and keeps the outcome."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from dqkv.backend import probe
from dqkv.backend.findings import Gpu
from dqkv.backend.proof import drop_proof, keep_proof
from dqkv.backend.selftest import Outcome, trials
from dqkv.problem import Arch
from dqkv_kernels.launch_plan import ARCHS
from dqkv_kernels.tiles import ARCH_TARGETS


@dataclass(frozen=True, kw_only=True)
class Selftest:
    """What to run: kernels of a family, on GPUs, each within timeout_s.

    command: begins the process that tests one GPU; kernels, arch and its number follow.
    """

    kernels: Path
    arch: Arch
    timeout_s: float
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "dqkv.backend.selftest")


def run_selftest(arch: int, kernels: Path, timeout_s: float) -> int:
    """Tests a family on every GPU that could run it; 0 when there is one and all passed, else 1."""
    console = Console()
    family = next((name for name, number in ARCHS.items() if number == arch), None)
    if family is None:
        known = ", ".join(str(number) for number in ARCHS.values())
        console.print(f"--arch has {arch}, must be of {known}", style="bold red", markup=False)
        return 1
    found = probe.find(kernels)
    gpus = [gpu for gpu in found.gpus if family in (*gpu.archs, *gpu.unproven)]
    faults = [fault for gpu in found.gpus for fault in gpu.faults]
    if not gpus:
        why = found.absence or "; ".join(faults) or "no GPU runs this family"
        console.print(f"{family} is not tested: {why}", style="bold red", markup=False)
        return 1
    test = Selftest(kernels=kernels, arch=family, timeout_s=timeout_s)
    return max(test_gpu(test, gpu, console) for gpu in gpus)


def test_gpu(test: Selftest, gpu: Gpu, console: Console) -> int:
    """Tests one GPU in a process of its own and keeps the outcome; 0 when every trial passed in time, else 1."""
    expected = len(trials(test.arch, ARCH_TARGETS[ARCHS[test.arch]][-1]))
    done, end = _outcomes(test, gpu, console)
    wrong = [outcome for outcome in done if outcome.wrong]
    passed = not end and not wrong and len(done) == expected
    where = f"{test.arch} on cuda:{gpu.index} ({gpu.model}, {gpu.uuid})"
    said = f"{where}: {len(done) - len(wrong)} of {expected} trials passed" + (f"; {end}" if end else "")
    console.print(said, style="" if passed else "bold red", markup=False)
    try:
        if passed:
            keep_proof(test.kernels, test.arch, gpu.uuid, expected)
        else:
            drop_proof(test.kernels, test.arch, gpu.uuid)
    except OSError as error:
        console.print(f"the outcome cannot be kept in {test.kernels}: {error.strerror}", style="bold red", markup=False)
        return 1
    return 0 if passed else 1


def _outcomes(test: Selftest, gpu: Gpu, console: Console) -> tuple[list[Outcome], str]:
    """What the process said, and why it ended before its time, in words; "" when it did not."""
    command: Sequence[str] = (*test.command, str(test.kernels), test.arch.value, str(gpu.index))
    done: list[Outcome] = []
    late = threading.Event()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(test.timeout_s, end)
        timer.start()
        for line in process.stdout or ():
            try:
                outcome = msgspec.json.decode(line, type=Outcome)
            except msgspec.MsgspecError:
                continue
            done.append(outcome)
            for fault in outcome.wrong:
                console.print(f"{outcome.trial}: {fault}", style="bold red", markup=False)
        status = process.wait()
        timer.cancel()
    if late.is_set():
        return done, f"it did not end within {test.timeout_s:g} s"
    return done, f"its process ended with status {status}" if status else ""
