"""The small runs that tell how fast a device is before its first request."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from dqkv.backend.base import Device, DeviceInfo, Task
from dqkv.memory import memfd
from dqkv.memory.block import Block, InBlock
from dqkv.problem import Arch, Options, Problem, Window
from dqkv.scheduler.cost import CostModel, Sample, Work
from dqkv.tensor import DType, Tensor

HEAD_DIM = 64
REPEATS = 2
"""The first run of a kind also pays for what is set up once; the faster one counts."""

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One kind of small run: self-attention of sequences of one length."""

    batch_size: int = 1
    seqlen: int
    num_heads: int
    window: Window = field(default_factory=Window)


LAUNCH = Probe(seqlen=8, num_heads=1)
"""Next to no work: what is left is the cost of a task."""

SEQUENCES = Probe(batch_size=1024, seqlen=1, num_heads=1)
"""Next to no work in many pieces: what is left is the cost of a sequence. With fewer it would be that of the jobs, of
which a CPU makes as many.
"""

RATES = (
    # About 1e9 operations: tens of milliseconds on one core, enough to drown the cost of a task.
    Probe(seqlen=512, num_heads=4),
    Probe(seqlen=512, num_heads=4, window=Window(right=0)),
    # A band of keys fills its tiles badly, so that the rate of the others promises too much.
    Probe(seqlen=512, num_heads=4, window=Window(left=128, right=0)),
)


async def measure(device: Device, info: DeviceInfo, *, block_ids: Iterator[int], task_ids: Iterator[int]) -> CostModel:
    """A cost model from runs of the probes on the device, with its best arch, the rates in each of its dtypes.

    Raises DeviceLost, QuotaBytes, OSError when no memory can be opened, and what the device answers.
    """

    async def sample(dtype: DType, probe: Probe) -> Sample:
        return await _run(device, _layout(next(block_ids), info.archs[0], dtype, probe), task_ids)

    launch = await sample(info.dtypes[0], LAUNCH)
    sequences = await sample(info.dtypes[0], SEQUENCES)
    model = CostModel()
    model.fit(launch, sequences, [await sample(dtype, probe) for dtype in info.dtypes for probe in RATES])
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """A problem, its gradients, and the block that they will lie in, one behind the other."""

    block_id: int
    nbytes: int
    arch: Arch
    problem: Problem[InBlock]
    gradients: dict[str, Tensor[InBlock]]


def _layout(block_id: int, arch: Arch, dtype: DType, probe: Probe) -> _Layout:
    """All zeros, which is a problem like any other: every logit is 0, and an LSE of 0 leaves finite gradients."""
    nbytes = 0

    def place(dtype: DType, shape: tuple[int, ...]) -> Tensor[InBlock]:
        nonlocal nbytes
        tensor = Tensor.dense(dtype, shape, InBlock(block_id, nbytes))
        nbytes += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        return tensor

    rows = (probe.batch_size, probe.seqlen, probe.num_heads, HEAD_DIM)
    statistics = (probe.batch_size, probe.num_heads, probe.seqlen)
    problem = Problem(
        q=place(dtype, rows),
        k=place(dtype, rows),
        v=place(dtype, rows),
        dout=place(dtype, rows),
        delta=place(DType.FP32, statistics),
        softmax_lse=place(DType.FP32, statistics),
        options=Options(window=probe.window, arch=arch),
    )
    gradients = {role: place(tensor.dtype, tensor.shape) for role, tensor in problem.gradients.items()}
    return _Layout(block_id=block_id, nbytes=nbytes, arch=arch, problem=problem, gradients=gradients)


async def _run(device: Device, layout: _Layout, task_ids: Iterator[int]) -> Sample:
    fd = memfd.create("dqkv-calibration", layout.nbytes)
    try:
        block = Block(block_id=layout.block_id, fd=fd, nbytes=layout.nbytes, sealed=True, writable=True)
        seconds = math.inf
        for _ in range(REPEATS):
            task = Task(task_id=next(task_ids), problem=layout.problem, gradients=layout.gradients)
            report = await device.run(task, [block])
            seconds = min(seconds, report.device_s + report.transfer_s)
    finally:
        device.drop_block(layout.block_id)
        os.close(fd)
    return Sample(arch=layout.arch, work=Work.of(layout.problem), seconds=seconds)
