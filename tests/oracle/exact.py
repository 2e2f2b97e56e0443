"""The exact answer: attention and its gradients in float64, written out over the whole score matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .case import Case
from .geometry import NEG_INF, geometry, request_keys, visible
from .values import Values, make_values

F64 = torch.float64
SOLVED_KEPT = 128
"""How many cases' exact answers stay in memory: the tables ask for each case several times in a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Scoring:
    """What turns q and k into probabilities: visible (q_len, k_len), sink (num_heads_q,); softcap 0 is none."""

    visible: Tensor
    scale: float
    softcap: float
    sink: Tensor | None


class Forward(NamedTuple):
    """Outputs of attention over one sequence: out (q_len, heads, head_dim_v), softmax_lse (heads, q_len)."""

    out: Tensor
    softmax_lse: Tensor


class Upstream(NamedTuple):
    """Gradients that flow into them: dout (q_len, heads, head_dim_v), dlse (heads, q_len)."""

    dout: Tensor
    dlse: Tensor | None


class Flow(NamedTuple):
    """Gradients of one sequence: dq, dk, dv in the shapes of q, k, v; dsink (heads,)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Exact:
    """The float64 answer in flat rows, and which rows must be 0; nobody may write to it.

    out, dq (total_q, num_heads_q, ...), dk, dv (total_k, num_heads_kv, ...), softmax_lse (total_q,
    num_heads_q), dsink (num_heads_q,). zero_*_rows see, or are seen by, nothing; unused_*_rows belong to no sequence.
    """

    out: Tensor
    softmax_lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    zero_q_rows: Tensor
    zero_k_rows: Tensor
    unused_q_rows: Tensor
    unused_k_rows: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Forward:
    """Masked softmax of one sequence: q (q_len, heads, head_dim), k, v (k_len, kv heads, ...)."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, wide_k) * scoring.scale
    if scoring.softcap > 0:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    s = s.masked_fill(~scoring.visible, NEG_INF)
    heads, q_len, k_len = s.shape
    top = s.amax(-1) if k_len else torch.full((heads, q_len), NEG_INF, dtype=s.dtype, device=s.device)
    if scoring.sink is not None:
        top = torch.maximum(top, scoring.sink[:, None])
    shift = torch.where(top == NEG_INF, torch.zeros_like(top), top)
    z = torch.exp(s - shift[..., None]).sum(-1)
    if scoring.sink is not None:
        z = z + torch.exp(scoring.sink[:, None] - shift)
    lse = torch.where(z > 0, shift + torch.log(z), torch.full_like(z, NEG_INF))
    p = torch.exp(s - torch.where(lse == NEG_INF, torch.zeros_like(lse), lse)[..., None])
    p = p.masked_fill(~scoring.visible, 0.0)
    return Forward(torch.einsum("hij,jhd->ihd", p, wide_v), lse)


def attend_grad(q: Tensor, k: Tensor, v: Tensor, forward: Forward, upstream: Upstream, scoring: Scoring) -> Flow:
    """Gradients of sum(out * dout) + sum(softmax_lse * dlse) from the given out and softmax_lse.

    These may come from more keys than k and v hold: then the gradients are this block's part of the whole.
    """
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.einsum("ihd,jhd->hij", q, wide_k) * scoring.scale
    slope = None
    if scoring.softcap > 0:
        t = torch.tanh(s / scoring.softcap)
        s, slope = scoring.softcap * t, 1.0 - t * t
    alive = torch.isfinite(forward.softmax_lse)
    lse = torch.where(alive, forward.softmax_lse, torch.zeros_like(forward.softmax_lse))
    keep = scoring.visible & alive[..., None]
    p = torch.exp((s - lse[..., None]).masked_fill(~keep, NEG_INF))
    delta = (upstream.dout * forward.out).sum(-1).T
    dlse = torch.zeros_like(delta) if upstream.dlse is None else upstream.dlse
    dp = torch.einsum("ihd,jhd->hij", upstream.dout, wide_v)
    ds = (p * (dp - delta[..., None] + dlse[..., None])).masked_fill(~keep, 0.0)
    if slope is not None:
        ds = ds * slope
    dq = scoring.scale * torch.einsum("hij,jhd->ihd", ds, wide_k)
    dk = scoring.scale * torch.einsum("hij,ihd->jhd", ds, q)
    dv = torch.einsum("hij,ihd->jhd", p, upstream.dout)
    if group > 1:
        dk, dv = (t.reshape(k.shape[0], kv_heads, group, t.shape[-1]).sum(2) for t in (dk, dv))
    dsink = None
    if scoring.sink is not None:
        p_sink = torch.where(alive, torch.exp(scoring.sink[:, None] - lse), torch.zeros_like(lse))
        dsink = (p_sink * (dlse - delta)).sum(-1)
    return Flow(dq, dk, dv, dsink)


def solve(case: Case, values: Values) -> Exact:
    """The exact answer of a case for the given (already rounded) values in flat rows."""
    q, k, v, dout = (t.to(F64) for t in (values.q, values.k, values.v, values.dout))
    dlse = None if values.dlse is None else values.dlse.to(F64)
    sink = None if values.sink is None else values.sink.to(F64)
    exact = _empty(case, with_sink=sink is not None)
    for index, sequence in enumerate(geometry(case).sequences):
        q_start, q_len, k_start, k_len = sequence
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        exact.unused_q_rows[rows], exact.unused_k_rows[keys] = False, False
        whole, held = request_keys(case, index, sequence)
        k_whole, v_whole = k[whole], v[whole]
        seen = visible(q_len, k_whole.shape[0], case.window)
        scoring = Scoring(visible=seen, scale=case.scale, softcap=case.softcap, sink=sink)
        forward = attend(q[rows], k_whole, v_whole, scoring)
        seen = seen[:, held]
        scoring = Scoring(visible=seen, scale=case.scale, softcap=case.softcap, sink=sink)
        upstream = Upstream(dout[rows], None if dlse is None else dlse[rows].T)
        flow = attend_grad(q[rows], k_whole[held], v_whole[held], forward, upstream, scoring)
        exact.out[rows], exact.softmax_lse[rows] = forward.out, forward.softmax_lse.T
        exact.dq[rows], exact.dk[keys], exact.dv[keys] = flow.dq, flow.dk, flow.dv
        if exact.dsink is not None and flow.dsink is not None:
            exact.dsink.add_(flow.dsink)
        exact.zero_q_rows[rows] = ~seen.any(1) if k_len else True
        exact.zero_k_rows[keys] = ~seen.any(0) if q_len else True
    return exact


@lru_cache(maxsize=SOLVED_KEPT)
def solved(case: Case) -> Exact:
    """The exact answer of a case for its own values, kept between calls."""
    return solve(case, make_values(case))


def _empty(case: Case, *, with_sink: bool) -> Exact:
    shape, heads, kv_heads = geometry(case), case.num_heads_q, case.num_heads_kv
    return Exact(
        out=torch.zeros(shape.total_q, heads, case.head_dim_v, dtype=F64),
        softmax_lse=torch.full((shape.total_q, heads), NEG_INF, dtype=F64),
        dq=torch.zeros(shape.total_q, heads, case.head_dim, dtype=F64),
        dk=torch.zeros(shape.total_k, kv_heads, case.head_dim, dtype=F64),
        dv=torch.zeros(shape.total_k, kv_heads, case.head_dim_v, dtype=F64),
        dsink=torch.zeros(heads, dtype=F64) if with_sink else None,
        zero_q_rows=torch.ones(shape.total_q, dtype=torch.bool),
        zero_k_rows=torch.ones(shape.total_k, dtype=torch.bool),
        unused_q_rows=torch.ones(shape.total_q, dtype=torch.bool),
        unused_k_rows=torch.ones(shape.total_k, dtype=torch.bool),
    )
