"""A whole problem through the host model: what its preprocess hands over, every CTA, and what its postprocess makes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from oracle.inputs import Inputs
from oracle.problems import as_given, to_problem
from torch import Tensor

from dqkv_kernels.device.sm100.program import Program, dq_index, narrow, wide
from dqkv_kernels.launch_plan import LOG2_E, LaunchPlan
from dqkv_kernels.tiles import Tile as Row
from dqkv_kernels.tiles import rows_of
from sm100.masks import masks
from sm100.model import Cta, Tile

TARGET = "sm_100a"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Gradients by name, as the oracle's judge takes them."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None


def row_of(head_dim: int, head_dim_v: int) -> Row:
    """The tile row that holds these widths. Raises StopIteration when none does."""
    rows = rows_of(100, TARGET)
    return next(row for row in rows if head_dim <= row.head_dim and head_dim_v <= row.head_dim_v)


def program_of(row: Row) -> Program:
    """The program of a tile row, as the device code chooses it."""
    if row.main_loop == "sm100":
        return narrow(row.head_dim, row.head_dim_v, row.stages_q, row.stages_dout)
    return wide(row.head_dim, row.head_dim_v)


def answer(inputs: Inputs, seed: int, program: Program | None = None) -> Answer:
    """The gradients of a request, in its dtypes. program: instead of the table's. Raises Stuck."""
    problem = to_problem(inputs, as_given)
    plan = LaunchPlan(problem=problem, target=TARGET)
    row = row_of(problem.shape.head_dim, problem.shape.head_dim_v)
    program = program or program_of(row)
    chance = random.Random(seed)
    packed_q, packed_k = problem.queries.is_packed, problem.keys.is_packed
    q, dout, out = (_rows(tensor, packed_q) for tensor in (inputs.q, inputs.dout, inputs.out))
    k, v = (_rows(tensor, packed_k) for tensor in (inputs.k, inputs.v))
    lse, dlse = (None if t is None else t[None] if packed_q else t for t in (inputs.softmax_lse, inputs.dlse))
    dq, dk, dv = (torch.zeros(tensor.shape) for tensor in (q, k, v))
    dsink = None if inputs.sink is None else torch.zeros(problem.shape.num_heads_q)
    group = problem.shape.num_heads_q // max(problem.shape.num_heads_kv, 1)
    lengths = problem.rows
    for batch in range(problem.shape.batch_size):
        begin_q, count_q = int(lengths.q_start[batch]) if packed_q else 0, int(lengths.q_len[batch])
        begin_k, count_k = int(lengths.k_start[batch]) if packed_k else 0, int(lengths.k_len[batch])
        at_q = (0 if packed_q else batch, slice(begin_q, begin_q + count_q))
        at_k = (0 if packed_k else batch, slice(begin_k, begin_k + count_k))
        sequence = SimpleNamespace(seqlen_q=count_q, seqlen_k=count_k)
        mask = masks().Mask(sequence, plan.window, program.tile_m, program.tile_n)
        tiles_m = -(-count_q // program.tile_m)
        for head_kv in range(problem.shape.num_heads_kv):
            heads = slice(head_kv * group, (head_kv + 1) * group)
            statistics = _prepared(program, tiles_m, (lse, dlse), out, dout, at_q, heads)
            if dsink is not None:
                sink = inputs.sink[heads].float()  # type: ignore[index]
                weight = torch.exp2(sink[:, None] * LOG2_E - statistics[0])
                dsink[heads] -= (weight * statistics[1]).sum(1)
            dq_accum = torch.zeros(group, tiles_m, program.tile_m * program.head_dim)
            for n in range(-(-count_k // program.tile_n)):
                tile = Tile(
                    n=n,
                    k=_wide(k[at_k][:, head_kv], program.head_dim),
                    v=_wide(v[at_k][:, head_kv], program.head_dim_v),
                    q=_wide(q[at_q][:, heads].transpose(0, 1), program.head_dim),
                    dout=_wide(dout[at_q][:, heads].transpose(0, 1), program.head_dim_v),
                    lse_log2=statistics[0],
                    delta=statistics[1],
                    mask=mask,
                    scales=plan.scales,
                    softcap=problem.options.softcap > 0,
                    head_dim=problem.shape.head_dim,
                )
                part_k, part_v = Cta(program=program, tile=tile, dq_accum=dq_accum, chance=chance).run()
                keys = slice(begin_k + n * program.tile_n, min(begin_k + (n + 1) * program.tile_n, at_k[1].stop))
                count = keys.stop - keys.start
                dk[at_k[0], keys, head_kv] = part_k[:count, : k.shape[3]] * problem.softmax_scale
                dv[at_k[0], keys, head_kv] = part_v[:count, : v.shape[3]]
            rows = _unpacked(dq_accum, program)[:, :count_q, : q.shape[3]] * problem.softmax_scale
            dq[at_q[0], at_q[1], heads] = rows.transpose(0, 1)
    dtype = inputs.q.dtype
    dq, dk, dv = dq.to(dtype), dk.to(dtype), dv.to(dtype)
    return Answer(
        dq=dq[0] if packed_q else dq,
        dk=dk[0] if packed_k else dk,
        dv=dv[0] if packed_k else dv,
        dsink=None if dsink is None else dsink.to(inputs.sink.dtype),  # type: ignore[union-attr]
    )


def _rows(tensor: Tensor, packed: bool) -> Tensor:
    return tensor[None] if packed else tensor


def _wide(rows: Tensor, width: int) -> Tensor:
    """(..., rows, columns) with zeros up to a padded width, as copies past a tensor's columns bring them."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))


def _prepared(
    program: Program,
    tiles_m: int,
    given: tuple[Tensor | None, Tensor | None],
    out: Tensor,
    dout: Tensor,
    at: tuple[int, slice],
    heads: slice,
) -> tuple[Tensor, Tensor]:
    """lse_log2 and delta (heads, rows padded to tiles), as device/preprocess.py says."""
    lse, dlse = (None if tensor is None else tensor[at[0], heads, at[1]] for tensor in given)
    delta = (out[at].float() * dout[at].float()).sum(-1)[:, heads].T
    if dlse is not None:
        delta = delta - dlse
    alive = torch.isfinite(lse)  # type: ignore[arg-type]
    shape = (delta.shape[0], tiles_m * program.tile_m)
    lse_log2, padded = torch.full(shape, torch.inf), torch.zeros(shape)
    lse_log2[:, : delta.shape[1]] = torch.where(alive, lse * LOG2_E, torch.inf)  # type: ignore[operator]
    padded[:, : delta.shape[1]] = torch.where(alive, delta, 0.0)
    return lse_log2, padded


def _unpacked(dq_accum: Tensor, program: Program) -> Tensor:
    """(heads, rows, columns) from the order of dq_accum."""
    row = torch.arange(program.tile_m)[:, None]
    column = torch.arange(program.head_dim)[None]
    index: Any = dq_index(row, column, program.tile_m)  # type: ignore[arg-type]
    return dq_accum[:, :, index].flatten(1, 2)
