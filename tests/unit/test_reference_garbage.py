"""Whatever lies where nothing flows, NaN and infinities included, changes no bit of an answer and gets exactly 0."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import dqkv_kernels
from dqkv.problem import Lengths, Options, Problem, Window
from dqkv.tensor import DType, Tensor

ROW_TENSORS = ("q", "dout", "out", "delta", "softmax_lse", "dlse")
KEY_TENSORS = ("k", "v")
STATISTICS = ("delta", "softmax_lse", "dlse")
GRADIENTS = ("dq", "dk", "dv", "dsink")
HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_V = 4, 2, 16, 8
BEHIND = 3
"""Packed rows that belong to no sequence, and allocated ones that do not count."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Sequences that one of the CPU's ways of computing takes: (queries, keys) of each, and options."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    kernel: str
    softcap: float = 0.0
    dense: bool = False


WAYS = (
    Way(name="flash", lengths=((90, 50), (37, 70)), kernel="cpu/flash-fp32"),
    Way(name="tiled", lengths=((90, 50), (37, 70)), kernel="cpu/tiled-fp32", softcap=5.0),
    Way(name="batched", lengths=((7, 4), (5, 8), (8, 5), (6, 0)) * 9, kernel="cpu/tiled-fp32"),
    Way(name="dense", lengths=((60, 44), (60, 31), (47, 44)), kernel="cpu/flash-fp32", dense=True),
    Way(name="dense_batched", lengths=((9, 5), (6, 6), (9, 6), (7, 3)) * 9, kernel="cpu/tiled-fp32", dense=True),
)
WINDOWS = {
    "causal": Window(right=0),
    "window": Window(left=20, right=-3),
    "window_right": Window(left=-2, right=60),
    "sink_tokens": Window(left=-3, right=40, sink_token_length=2),
    "hollow": Window(left=-5, right=2, sink_token_length=1),
    "full": Window(),
}


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A request, and bool arrays of its flat rows: which rows see nothing, are seen by nobody, belong to nobody."""

    problem: Problem[None]
    tensors: dict[str, torch.Tensor]
    blind: torch.Tensor
    unseen: torch.Tensor
    unowned_q: torch.Tensor
    unowned_k: torch.Tensor


def flat(tensor, role, problem):
    """A view of a tensor with its rows first, (rows, ...), writes to which reach it."""
    if role in STATISTICS:
        tensor = tensor.transpose(-1, -2)
    is_packed = problem.keys.is_packed if role in (*KEY_TENSORS, "dk", "dv") else problem.queries.is_packed
    return [tensor] if is_packed else list(tensor)


def put(tensor, role, problem, rows, value):
    """Write a value to the flat rows (bool) of a tensor of any layout."""
    parts = flat(tensor, role, problem)
    for part, chosen in zip(parts, rows.chunk(len(parts)), strict=True):
        part[chosen] = value


def picked(tensor, role, problem, rows):
    parts = flat(tensor, role, problem)
    return torch.cat([part[chosen] for part, chosen in zip(parts, rows.chunk(len(parts)), strict=True)])


def draw(way, window, *, given=("out", "softmax_lse"), sink=False):
    generator = torch.Generator().manual_seed(zlib.crc32(way.name.encode()))
    q_lens, k_lens = (np.array([pair[side] for pair in way.lengths]) for side in (0, 1))
    allocated = [np.full(len(lens), lens.max()) if way.dense else lens for lens in (q_lens, k_lens)]
    rows = [int(lens.sum()) + (0 if way.dense else BEHIND) for lens in allocated]
    widths = {"q": (0, HEADS, HEAD_DIM), "k": (1, KV_HEADS, HEAD_DIM), "v": (1, KV_HEADS, HEAD_DIM_V)}
    widths |= dict.fromkeys(("dout", "out"), (0, HEADS, HEAD_DIM_V))
    tensors = {}
    for role in ("q", "k", "v", "dout", *given):
        if role in widths:
            side, heads, width = widths[role]
            flat_rows = torch.randn(rows[side], heads, width, generator=generator)
            tensors[role] = flat_rows.unflatten(0, (len(q_lens), -1)) if way.dense else flat_rows
        else:
            statistic = torch.randn(HEADS, rows[0], generator=generator) + (4.0 if role == "softmax_lse" else 0.0)
            tensors[role] = (
                statistic.unflatten(1, (len(q_lens), -1)).transpose(0, 1).contiguous() if way.dense else statistic
            )
    if sink:
        tensors["sink"] = torch.randn(HEADS, generator=generator)
    sides = (
        [Lengths(seqused=tuple(lens.tolist())) for lens in (q_lens, k_lens)]
        if way.dense
        else [Lengths(cu_seqlens=(0, *np.cumsum(lens).tolist())) for lens in (q_lens, k_lens)]
    )
    problem = Problem(
        **{role: Tensor.dense(DType.FP32, tuple(tensor.shape), None) for role, tensor in tensors.items()},
        queries=sides[0],
        keys=sides[1],
        options=Options(window=window, softcap=way.softcap),
    )
    blind, unowned_q = torch.zeros(rows[0], dtype=torch.bool), torch.ones(rows[0], dtype=torch.bool)
    unseen, unowned_k = torch.zeros(rows[1], dtype=torch.bool), torch.ones(rows[1], dtype=torch.bool)
    for q_start, q_len, k_start, k_len in problem.rows:
        i, j = torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)[None, :]
        seen = torch.ones(q_len, k_len, dtype=torch.bool)
        if window.right is not None:
            seen &= j <= i + window.right
        if window.left is not None:
            seen &= (j >= i - window.left) | (j < window.sink_token_length)
        blind[q_start : q_start + q_len] = ~seen.any(1)
        unseen[k_start : k_start + k_len] = ~seen.any(0)
        unowned_q[q_start : q_start + q_len] = False
        unowned_k[k_start : k_start + k_len] = False
    return Drawn(problem=problem, tensors=tensors, blind=blind, unseen=unseen, unowned_q=unowned_q, unowned_k=unowned_k)


def backward(drawn):
    """The answer into memory that holds NaN before."""
    memory = {role: torch.full(spec.shape, torch.nan) for role, spec in drawn.problem.gradients.items()}
    return dqkv_kernels.attention_backward(drawn.problem, drawn.tensors, memory)


def poisoned(drawn, garbage, roles=ROW_TENSORS + KEY_TENSORS):
    """The same request with garbage in these tensors wherever it must not matter.

    The gradient of a sink is taken over blind rows too: only q is nothing to it there.
    """
    tensors = {role: tensor.clone() for role, tensor in drawn.tensors.items()}
    for role in ROW_TENSORS:
        if role in tensors and role in roles:
            is_free = role == "q" or "sink" not in tensors
            rows = drawn.unowned_q | drawn.blind if is_free else drawn.unowned_q
            put(tensors[role], role, drawn.problem, rows, garbage)
    for role in set(KEY_TENSORS) & set(roles):
        put(tensors[role], role, drawn.problem, drawn.unowned_k | drawn.unseen, garbage)
    return replace(drawn, tensors=tensors)


GIVEN = {
    "out_lse": ("out", "softmax_lse"),
    "delta_lse_dlse": ("delta", "softmax_lse", "dlse"),
    "out": ("out",),
    "delta_dlse": ("delta", "dlse"),
}


@pytest.mark.parametrize(
    ("given", "sink"),
    [("out_lse", False), ("out", False), ("delta_lse_dlse", False), ("delta_lse_dlse", True), ("out", True)],
)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_garbage_where_nothing_flows_is_nothing(way, window, given, sink):
    drawn = draw(way, WINDOWS[window], given=GIVEN[given], sink=sink)
    clean = backward(drawn)
    assert way.kernel in clean.report.kernel
    every = ROW_TENSORS + KEY_TENSORS
    changes = [(torch.nan, every), (torch.inf, every), (3e38, every)]
    changes += [(torch.nan, (role,)) for role in ("q", "dout", "softmax_lse", "k", "v") if role in drawn.tensors]
    for garbage, roles in changes:
        found = backward(poisoned(drawn, garbage, roles))
        assert found.report.kernel == clean.report.kernel, (garbage, roles)
        for role in GRADIENTS:
            have, want = getattr(found, role), getattr(clean, role)
            assert (have is want is None) or torch.equal(have, want), (role, garbage, roles)
        assert not picked(found.dq, "dq", drawn.problem, drawn.blind | drawn.unowned_q).any()
        for role in ("dk", "dv"):
            assert not picked(getattr(found, role), role, drawn.problem, drawn.unseen | drawn.unowned_k).any()
    statistics = dqkv_kernels.softmax_statistics(drawn.problem, poisoned(drawn, torch.nan).tensors)
    seen = picked(statistics, "softmax_lse", drawn.problem, ~drawn.unowned_q)
    assert not seen.isnan().any()
