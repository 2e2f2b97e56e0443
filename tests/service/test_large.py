"""One request whose q alone has 2.2 GiB: streamed and by region, in bounded memory, and every gradient right."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from oracle.budget import error_budget, judge
from oracle.case import VARIANTS, Case
from oracle.exact import solved
from oracle.inputs import build_inputs
from rig.peak import Clock, PeakMemory, available_nbytes, status_nbytes
from rig.process import children
from rig.server import Running, running
from torch import Tensor

from dqkv import Client, Gradients, Window

GIB = 1 << 30
NEEDED_NBYTES = 20 * GIB
PEAK_LIMIT_NBYTES = 18 * GIB
Q_NBYTES = round(2.2 * GIB)
TIMEOUT_S = 600.0
ALIGNMENT = 64
HEADS, WIDTH = 32, 128
WINDOW = Window(left=64, right=0)
TAIL_ROWS = 37
"""Rows behind the last offset; they hold NaN."""
LENGTHS = (1, 64, 65, 129, 300, 640)
"""A single row, a window's edge from both sides, and what spans several windows."""
FACTORS = (1.0, -0.5, 2.0, -4.0)
"""Of dout: gradients are linear in it, and these change no bit but exponent and sign."""
DELTA = next(variant for variant in VARIANTS if variant.name == "delta")

pytestmark = [pytest.mark.big, pytest.mark.timeout(1200)]

Make = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One packed sequence: rows from `start` on that are those of `case`, its dout times `factor`."""

    case: Case
    start: int
    factor: float

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.case.seqlen_q)


def _case(length: int) -> Case:
    return Case(
        name=f"large_{length}",
        theme="LARGE",
        seqlen_q=length,
        seqlen_k=length,
        num_heads_q=HEADS,
        num_heads_kv=1,
        head_dim=WIDTH,
        head_dim_v=WIDTH,
        window_left=WINDOW.left,
        window_right=WINDOW.right,
    )


@cache
def pieces() -> tuple[Piece, ...]:
    """Sequences in an order without period, so that what is read or written elsewhere shows, until q is large."""
    random = np.random.default_rng(0)
    cases, found, start = [_case(length) for length in LENGTHS], [], 0
    while start * HEADS * WIDTH * 2 < Q_NBYTES:
        case, factor = cases[random.integers(len(cases))], FACTORS[random.integers(len(FACTORS))]
        found.append(Piece(case=case, start=start, factor=factor))
        start += case.seqlen_q
    return tuple(found)


def sizes() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of the request and its answer."""
    rows = pieces()[-1].rows.stop + TAIL_ROWS
    of_queries, of_keys = (rows, HEADS, WIDTH), (rows, 1, WIDTH)
    statistics = ((HEADS, rows), torch.float32)
    bf16 = torch.bfloat16
    return {
        **dict.fromkeys(("q", "dout", "dq"), (of_queries, bf16)),
        **dict.fromkeys(("k", "v", "dk", "dv"), (of_keys, bf16)),
        **dict.fromkeys(("softmax_lse", "delta"), statistics),
    }


def draw(make: Make) -> dict[str, Tensor]:
    """The request's tensors, in memory that `make` gives; NaN where no sequence is, and where gradients come."""
    tensors = {role: make(*size) for role, size in sizes().items()}
    for role in ("dq", "dk", "dv"):
        tensors[role].fill_(torch.nan)
    for piece in pieces():
        inputs = build_inputs_once(piece.case)
        for role in ("q", "k", "v"):
            tensors[role][piece.rows] = inputs[role]
        tensors["dout"][piece.rows] = inputs["dout"] * piece.factor
        tensors["softmax_lse"][:, piece.rows] = inputs["softmax_lse"]
        tensors["delta"][:, piece.rows] = inputs["delta"] * piece.factor
    end = pieces()[-1].rows.stop
    for role in ("q", "k", "v", "dout"):
        tensors[role][end:] = torch.nan
    for role in ("softmax_lse", "delta"):
        tensors[role][:, end:] = torch.nan
    return tensors


@cache
def build_inputs_once(case: Case) -> dict[str, Tensor]:
    """The tensors of one sequence, without the batch."""
    inputs = build_inputs(case, DELTA)
    return {role: getattr(inputs, role)[0] for role in ("q", "k", "v", "dout", "softmax_lse", "delta")}


def ask(client: Client, tensors: dict[str, Tensor]) -> Gradients[Any]:
    lengths = [0, *(piece.rows.stop for piece in pieces())]
    return client.backward(
        **tensors,
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=max(LENGTHS),
        window=WINDOW,
        timeout_s=TIMEOUT_S,
    )


def complaints_of(answer: Gradients[Any]) -> list[str]:
    """What is wrong anywhere: every row of every sequence is held against the exact gradients of its case."""
    found, judged = [], set()
    for piece in pieces():
        exact, budget = solved(piece.case), error_budget(piece.case, DELTA)
        given = {name: getattr(answer, name)[piece.rows].float() / piece.factor for name in ("dq", "dk", "dv")}
        for name, got in given.items():
            error = (got - getattr(exact, name)).abs().max().item()
            if not error <= budget[name]:
                found.append(f"{name} of rows {piece.rows}: error {error:.3e} above {budget[name]:.3e}")
        # The first of each case, and what lies around the end of a 32-bit byte offset, in all that is to be said.
        edge = 2**31 // (HEADS * WIDTH * 2)
        if piece.case not in judged or piece.start <= edge < piece.rows.stop:
            judged.add(piece.case)
            one = {name: got.bfloat16()[None] for name, got in given.items()}
            whole = Gradients(**one, dsink=None, report=answer.report)
            found += [f"rows {piece.rows}: {text}" for text in judge(piece.case, exact, whole, DELTA)]
    end = pieces()[-1].rows.stop
    found += [
        f"{name}: not zero behind the last sequence"
        for name in ("dq", "dk", "dv")
        if getattr(answer, name)[end:].count_nonzero()
    ]
    return found


def measured(way: str, server: Running, client: Client, make: Make) -> str:
    """Sends the request, judges the answer, and says what it took; raises AssertionError."""
    pids = [os.getpid(), server.process.pid, *children(server.process.pid)]
    clock = Clock()
    with PeakMemory(pids) as peak:
        tensors = draw(make)
        drawn_s = clock.lap()
        answer = ask(client, tensors)
        answered_s = clock.lap()
    assert answer.dq.data_ptr() == tensors["dq"].data_ptr()
    assert complaints_of(answer) == []
    checked_s = clock.lap()
    assert tensors["q"].nbytes >= Q_NBYTES
    assert peak.nbytes < PEAK_LIMIT_NBYTES
    report = answer.report
    moved = {each: server.metric("dqkv_bytes_total", transport=each) / GIB for each in ("unary", "stream", "region")}
    assert [each for each, nbytes in moved.items() if nbytes] == [way]
    high = ", ".join(f"{status_nbytes(pid, 'VmHWM') / GIB:.2f}" for pid in pids)
    return (
        f"\n{way}: q {tensors['q'].nbytes / GIB:.2f} GiB, {len(pieces())} sequences, {moved[way]:.2f} GiB moved; "
        f"peak of client, server and device together {peak.nbytes / GIB:.2f} GiB (VmHWM of each {high} GiB)\n"
        f"    drawn in {drawn_s:.1f} s, answered in {answered_s:.1f} s "
        f"(device {report.device_s:.1f} s, transfer {report.transfer_s:.1f} s, queue {report.queued_s:.2f} s, "
        f"server {report.total_s:.1f} s), every row checked in {checked_s:.1f} s"
    )


@pytest.fixture(autouse=True)
def enough_memory() -> None:
    """A machine that has too little would swap or kill, and say nothing about dqkv."""
    free = available_nbytes()
    if free < NEEDED_NBYTES:
        pytest.skip(f"needs {NEEDED_NBYTES / GIB:.0f} GiB of available memory, this machine has {free / GIB:.1f} GiB")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The device has the cores; what is drawn and checked here is bound by memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_request_of_gigabytes_is_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    with running(cpu_threads="0") as server, Client(server.target) as client:
        said = measured("stream", server, client, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    with capsys.disabled():
        print(said)


def test_a_request_of_gigabytes_is_read_and_written_in_a_region(capsys: pytest.CaptureFixture[str]) -> None:
    places, end = [], 0
    for shape, dtype in sizes().values():
        places.append(end)
        end += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    with running(cpu_threads="0") as server, Client(server.target) as client, client.region(end) as region:
        free = iter(places)
        said = measured(
            "region", server, client, lambda shape, dtype: region.torch(shape, dtype, byte_offset=next(free))
        )
    with capsys.disabled():
        print(said)
