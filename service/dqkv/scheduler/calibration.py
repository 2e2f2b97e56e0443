"""The small runs that tell how fast a device is before its first request."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from dqkv.backend.base import Device, DeviceInfo, Task
from dqkv.memory import memfd
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Options, Problem, Window
from dqkv.scheduler.cost import Sample, Work
from dqkv.tensor import DType, Tensor

HEAD_DIM = 64
REPEATS = 2
"""The first run of a kind also pays for what is set up once; the faster one counts."""

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One kind of small run: self-attention of one sequence."""

    seqlen: int
    num_heads: int
    window: Window


LAUNCH = Probe(seqlen=8, num_heads=1, window=Window())
"""Next to no work: what is left is the cost of a task."""

RATES = (
    # About 1e9 operations: tens of milliseconds on one core, enough to drown the cost of a task.
    Probe(seqlen=512, num_heads=4, window=Window()),
    Probe(seqlen=512, num_heads=4, window=Window(right=0)),
    # A band of keys fills its tiles badly, so that the rate of the others promises too much.
    Probe(seqlen=512, num_heads=4, window=Window(left=128, right=0)),
)


async def measure(
    device: Device, info: DeviceInfo, *, block_ids: Iterator[int], task_ids: Iterator[int]
) -> list[Sample]:
    """Run the probes on the device in each of its dtypes, with its best arch.

    Raises DeviceLost, QuotaBytes, OSError when no memory can be opened, and what the device answers.
    """
    return [
        await _run(device, info.archs[0], dtype, probe, next(block_ids), task_ids)
        for dtype in info.dtypes
        for probe in (LAUNCH, *RATES)
    ]


async def _run(
    device: Device, arch: Arch, dtype: DType, probe: Probe, block_id: int, task_ids: Iterator[int]
) -> Sample:
    layout = _Layout(block_id)
    problem = _problem(layout, arch, dtype, probe)
    gradients = {role: layout.place(tensor.dtype, tensor.shape) for role, tensor in problem.gradients.items()}
    fd = memfd.create("dqkv-calibration", layout.nbytes)
    try:
        block = Block(block_id=block_id, fd=fd, nbytes=layout.nbytes, sealed=True, writable=True)
        seconds = math.inf
        for _ in range(REPEATS):
            task = Task(task_id=next(task_ids), problem=problem, gradients=gradients)
            report = await device.run(task, [block])
            seconds = min(seconds, report.device_s + report.transfer_s)
    finally:
        device.drop_block(block_id)
        os.close(fd)
    return Sample(arch=arch, work=Work.of(problem), seconds=seconds)


class _Layout:
    """Tensors one behind the other in a block that is yet to be made."""

    def __init__(self, block_id: int) -> None:
        self.nbytes = 0
        self._block_id = block_id

    def place(self, dtype: DType, shape: tuple[int, ...]) -> Tensor[InBlock]:
        """A dense tensor behind the last one."""
        tensor = Tensor.dense(dtype, shape, InBlock(self._block_id, self.nbytes))
        self.nbytes += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        return tensor


def _problem(layout: _Layout, arch: Arch, dtype: DType, probe: Probe) -> Problem[InBlock]:
    """All zeros, which is a problem like any other: every logit is 0, and an LSE of 0 leaves finite gradients."""
    rows = (1, probe.seqlen, probe.num_heads, HEAD_DIM)
    statistics = (1, probe.num_heads, probe.seqlen)
    return Problem(
        q=layout.place(dtype, rows),
        k=layout.place(dtype, rows),
        v=layout.place(dtype, rows),
        dout=layout.place(dtype, rows),
        delta=layout.place(DType.FP32, statistics),
        softmax_lse=layout.place(DType.FP32, statistics),
        options=Options(window=probe.window, arch=arch),
    )
