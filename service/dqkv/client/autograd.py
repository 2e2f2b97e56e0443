"""Attention as a torch function: the forward runs where the tensors are, the backward on a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch.autograd.function import once_differentiable

from dqkv import errors
from dqkv.client.arrays import Array, dtype_of, is_torch, refuse_meta
from dqkv.client.client import Client
from dqkv.client.forward import attend
from dqkv.client.request import GivenOptions, Request, known_only
from dqkv.problem import Problem
from dqkv.tensor import Tensor

ARGUMENTS = ("q", "k", "v", "client", "sink", "return_lse", *GivenOptions.__annotations__)
ROWS_AT_ONCE = 1024
"""Rows of dout and out that are multiplied in fp32 at the same time."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    client: Client,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Unpack[GivenOptions],
) -> Any:
    """softmax(q k^T) v; its gradients come from the server of `client`.

    q (batch_size, seqlen_q, num_heads_q, head_dim), k (batch_size, seqlen_k, num_heads_kv, head_dim), v (...,
    head_dim_v), or packed (rows, heads, width) with cu_seqlens_q and cu_seqlens_k; sink (num_heads_q,). Options as
    `dqkv.client.request.Given` says; grad_dtype counts where the tensor's own grad_dtype lets it. Returns out (like q
    with head_dim_v), and with `return_lse` (out, softmax_lse), softmax_lse fp32 (batch_size, num_heads_q, seqlen_q)
    or (num_heads_q, rows); a gradient may flow into both. The backward sends rowsum(dout * out) in place of out.

    Raises an InvalidRequest at once when the arguments do not fit, or the client is no dqkv.Client; the backward raises
    what Client.backward raises.
    """
    known_only("attention", options, ARGUMENTS)
    if not isinstance(client, Client):
        raise errors.OptionInvalid(
            f"client is a {type(client).__name__}, must be a dqkv.Client: the backward of torch waits for its answer",
            field="client",
        )
    for role, tensor in (("q", q), ("k", k), ("v", v), ("sink", sink)):
        if tensor is not None and not is_torch(tensor):
            raise errors.DTypeMismatch(f"{role} is a {type(tensor).__name__}, must be a torch tensor", field=role)
        if tensor is not None:
            refuse_meta(role, tensor)
    out, softmax_lse = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sink, _Plan(client=client, options=options)
    )
    return (out, softmax_lse) if return_lse else out


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What an attention was called with, besides its tensors."""

    client: Client
    options: GivenOptions

    def problem(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
    ) -> Problem[torch.Tensor]:
        """The checked problem, with gradients that hold no memory in place of those that will come."""
        if q.dim() not in (3, 4):
            raise errors.ShapeMismatch(f"q has shape {tuple(q.shape)}, must have 3 or 4 dimensions", field="q")
        statistics = (q.shape[-2], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[-2], q.shape[1])
        nothing = q.new_zeros(())
        request = Request(
            q=q,
            k=k,
            v=v,
            dout=nothing.expand(*q.shape[:-1], v.shape[-1]),
            delta=nothing.float().expand(statistics),
            sink=sink,
            **self.options,
        )
        return request.described(_describe)


def _describe(role: str, tensor: Array) -> Tensor[torch.Tensor]:
    return Tensor.dense(dtype_of(role, tensor.dtype), tuple(tensor.shape), tensor)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        q, k, v, sink, plan = arguments
        found = attend(plan.problem(q, k, v, sink), q, k, v, sink)
        ctx.save_for_backward(q, k, v, sink, found.out, found.softmax_lse)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return found.out, found.softmax_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *flowing: Any) -> Any:
        (dout, dlse), (q, k, v, sink, out, softmax_lse) = flowing, ctx.saved_tensors
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        gradients = ctx.plan.client.backward(
            q,
            k,
            v,
            dout,
            delta=_row_sums(dout, out).transpose(-1, -2),
            softmax_lse=softmax_lse,
            dlse=dlse,
            sink=sink,
            **ctx.plan.options,
        )
        return gradients.dq, gradients.dk, gradients.dv, gradients.dsink, None


def _row_sums(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out) in fp32: (..., rows, heads) of (..., rows, heads, head_dim_v)."""
    parts = zip(*(torch.split(t, ROWS_AT_ONCE, -3) for t in (dout, out)), strict=True)
    return torch.cat([(one.float() * other.float()).sum(-1) for one, other in parts], -2)
