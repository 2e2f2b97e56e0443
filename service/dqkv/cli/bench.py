"""`dqkv bench`: how long a running server takes for problems of several sizes, by each transport."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from dqkv import errors
from dqkv.client.arrays import HostArray
from dqkv.courier import Courier, Door, Transport
from dqkv.problem import Options, Problem, Report, Window
from dqkv.tensor import NUMPY_DTYPES, DType, Tensor

ROUNDS_LIMIT = 200
WARM_UP_ROUNDS = 1
"""The first request of a size touches fresh memory on both sides."""
TENSORS = 5
"""q, k, v, dout and out."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Size:
    """One causal problem with as many key heads as query heads."""

    batch_size: int = 1
    seqlen: int
    num_heads: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each of its tensors."""
        return (self.batch_size, self.seqlen, self.num_heads, self.head_dim)

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.seqlen}x{self.num_heads}x{self.head_dim}"


SIZES = (
    Size(seqlen=16, num_heads=1, head_dim=64),  # nearly no work: what a call costs
    Size(seqlen=256, num_heads=8, head_dim=64),  # fits in one message
    Size(seqlen=1024, num_heads=16, head_dim=128),  # 28 MB: bytes and work both count
    Size(seqlen=4096, num_heads=16, head_dim=128),  # 112 MB: work grows faster than bytes
    Size(seqlen=16384, num_heads=16, head_dim=128),  # 448 MB: for a GPU
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one size by one transport took, in seconds, each the median over its rounds."""

    round_trip_s: float
    queued_s: float
    transfer_s: float
    device_s: float
    moved_nbytes: int


def run(door: Door, *, dtype: DType, seconds: float) -> int:
    """Prints a table, a row for at most `seconds` each; 0 when every request was answered, else 1."""
    console = Console()
    try:
        with Courier(door) as courier:
            control_s = _median(courier.client.capabilities, seconds)
            console.print(f"{door.address}: a call that moves no tensors takes {control_s * 1e3:.2f} ms")
            return _measure(console, courier, dtype, seconds)
    except errors.DqkvError as error:
        console.print(f"{door.address}: {error.reason}: {error.message}", style="bold red", markup=False)
        return 1


def _measure(console: Console, courier: Courier, dtype: DType, seconds: float) -> int:
    # Narrow enough that a terminal of 80 columns shows every name whole.
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.title = f"causal, {dtype}: batch x rows x heads x width; times in ms"
    for name in ("problem", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("round trip", "queued", "moved", "device", "GB/s", "GFLOP/s"):
        table.add_column(name, justify="right")
    left_out = []
    answered = True
    for size in SIZES:
        bare = Tensor.dense(dtype, size.shape, None)
        estimate = courier.client.estimate(_problem([bare] * TENSORS))
        if estimate.device_s > seconds:
            left_out.append(f"{size} was left out: one takes about {estimate.device_s:.0f} s on {estimate.device}")
            continue
        problem = _problem(_drawn(size, dtype))
        for transport in Transport:
            try:
                row = _time(courier, problem, transport, seconds)
            except errors.DqkvError as error:
                answered = answered and isinstance(error, errors.RegionInvalid | errors.TooLarge)
                table.add_row(str(size), str(transport), "-")
                left_out.append(f"{size} by {transport}: {error.reason}: {error.message}")
                continue
            table.add_row(str(size), str(transport), *_cells(row, estimate.flops))
    console.print(table, *left_out, sep="\n")
    return 0 if answered else 1


def _time(courier: Courier, problem: Problem[HostArray], transport: Transport, seconds: float) -> Row:
    with courier.load(problem, transport) as load:
        for _ in range(WARM_UP_ROUNDS):
            load.send()
        times: list[float] = []
        reports: list[Report] = []
        end = time.perf_counter() + seconds
        while not times or (time.perf_counter() < end and len(times) < ROUNDS_LIMIT):
            answer = load.send()
            times.append(answer.round_trip_s)
            reports.append(answer.gradients.report)
    tensors = [*problem.tensors.values(), *problem.gradients.values()]
    return Row(
        round_trip_s=statistics.median(times),
        queued_s=statistics.median(report.queued_s for report in reports),
        transfer_s=statistics.median(report.transfer_s for report in reports),
        device_s=statistics.median(report.device_s for report in reports),
        moved_nbytes=sum(tensor.nbytes for tensor in tensors),
    )


def _cells(row: Row, flops: float) -> list[str]:
    parts = (row.round_trip_s, row.queued_s, row.transfer_s, row.device_s)
    rates = (row.moved_nbytes / row.round_trip_s / 1e9, flops / row.round_trip_s / 1e9)
    return [*(f"{part * 1e3:.1f}" for part in parts), f"{rates[0]:.3f}", f"{rates[1]:.1f}"]


def _problem(tensors: Sequence[Tensor[T]]) -> Problem[T]:
    q, k, v, dout, out = tensors
    return Problem(q=q, k=k, v=v, dout=dout, out=out, options=Options(window=Window(right=0)))


def _drawn(size: Size, dtype: DType) -> list[Tensor[HostArray]]:
    rng = np.random.default_rng(0)
    arrays = (rng.standard_normal(size.shape, np.float32).astype(NUMPY_DTYPES[dtype]) for _ in range(TENSORS))
    return [Tensor.dense(dtype, size.shape, array) for array in arrays]


def _median(call: Callable[[], object], seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end and len(times) < ROUNDS_LIMIT):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
