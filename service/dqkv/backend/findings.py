"""What the probe found of GPUs, which of them the server is to use, and in words why not the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dqkv.problem import Arch

PROBE_TIMEOUT_S = 120.0
"""Drivers of many GPUs take long to start, and cold disks to read the kernels."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: its number as CUDA counts in this environment, its model, the archs it can run now, best first.

    faults say of the installation, the device or the other archs why they cannot be used; unproven are those archs that
    could run but have yet to pass their selftest on this GPU, whose UUID is then known.
    """

    index: int
    model: str
    archs: tuple[Arch, ...] = ()
    faults: tuple[str, ...] = ()
    unproven: tuple[Arch, ...] = ()
    uuid: str = ""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Every GPU of this machine; `absence` says in words why there is none, "" when there is one."""

    gpus: tuple[Gpu, ...] = ()
    absence: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs that get a process, by number, and what is to be said of those that do not.

    untested: of GPUs that were wanted and wait for their selftest, why.
    """

    indices: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()


async def look(kernels: Path, *, builds: bool = False, timeout_s: float = PROBE_TIMEOUT_S) -> Findings:
    """What a process of its own finds; one that crashes, hangs or talks nonsense found nothing, and that is said.

    kernels, builds: as `probe.find` takes them.
    """
    options = ["--build-kernels"] if builds else []
    try:
        process = await asyncio.create_subprocess_exec(
            # -P: what lies in the working directory is not imported.
            *(sys.executable, "-P", "-m", "dqkv.backend.probe", str(kernels), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return Findings(absence=f"the process that looks for one could not be started: {error.strerror}")
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await process.communicate()
    except TimeoutError:
        return Findings(absence=f"the process that looks for one did not answer within {timeout_s:g} s")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        return msgspec.json.decode(said, type=Findings)
    except msgspec.MsgspecError:
        return Findings(absence=f"the process that looks for one failed with status {process.returncode}")


def choose(findings: Findings, wanted: Sequence[int] | None) -> Choice:
    """Every GPU that can run a family of kernels, or those of `wanted` (numbers), with a note for each other one."""
    if findings.absence:
        return Choice(notes=(f"GPU: {findings.absence}",))
    there = {gpu.index: gpu for gpu in findings.gpus}
    indices, notes, untested = [], [], []
    for index in there if wanted is None else wanted:
        gpu = there.get(index)
        if gpu is None:
            numbers = ", ".join(str(number) for number in there)
            notes.append(f"GPU: DQKV_GPUS names {index}, this machine has {numbers}")
            continue
        if gpu.archs:
            indices.append(index)
        state = "computes without" if gpu.archs else "is not used:"
        notes += [f"GPU: cuda:{index} ({gpu.model}) {state} {fault}" for fault in gpu.faults]
        waiting = [fault for fault in gpu.faults if fault.partition(":")[0] in gpu.unproven]
        untested += [f"cuda:{index} ({gpu.model}): {fault}" for fault in waiting]
    return Choice(indices=tuple(indices), notes=tuple(notes), untested=tuple(untested))
