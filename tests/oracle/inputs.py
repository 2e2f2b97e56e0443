"""Everything one request carries, in the dtypes, strides and on the device that its case asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .case import AS_IS, Case, LseScope, Variant, Window
from .exact import solved
from .geometry import NEG_INF, geometry, offsets, request_keys, request_shape, statistics_shape
from .layouts import FUSED, LAYOUTS, fuse
from .values import TORCH_DTYPES, make_values

ROW_TENSORS_Q = ("q", "dout", "out", "softmax_lse", "dlse", "delta")


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The tensors and options of one request; fresh memory at every call of `build_inputs`.

    Dense sides are (batch_size, seqlen, heads, width), packed sides (rows, heads, width). softmax_lse, dlse and
    delta are fp32 (batch_size, num_heads_q, seqlen_q), or (num_heads_q, total_q) where q is packed. Offsets and
    seqused are int32. softmax_scale None is head_dim ** -0.5, grad_dtype None the dtype of q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor | None
    delta: Tensor | None
    softmax_lse: Tensor | None
    dlse: Tensor | None
    sink: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    window: Window
    softcap: float
    deterministic: bool
    grad_dtype: torch.dtype | None
    lse_scope: LseScope
    arch: str = "auto"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """The tensors of a request as flat rows, before they are shaped and laid out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    delta: Tensor
    softmax_lse: Tensor
    dlse: Tensor | None


def build_inputs(case: Case, variant: Variant = AS_IS, device: str | torch.device = "cpu") -> Inputs:
    """The request that asks for the gradients of a case in one of its variants.

    With delta, out is absent. Raises KeyError for a layout that does not exist.
    """
    case = variant.of(case)
    values, rows = make_values(case), _poisoned(case, _rows(case))
    laid = _laid_out(case, rows, device)
    softmax_lse = statistics_shape(case, rows.softmax_lse).contiguous().to(device)
    delta = statistics_shape(case, rows.delta).contiguous().to(device)
    if case.override.softmax_lse_dtype is not None:
        softmax_lse = softmax_lse.to(TORCH_DTYPES[case.override.softmax_lse_dtype])
    return Inputs(
        q=laid["q"],
        k=laid["k"],
        v=laid["v"],
        dout=laid["dout"],
        out=laid["out"] if variant.row_sums == "out" else None,
        delta=delta if variant.row_sums == "delta" else None,
        softmax_lse=softmax_lse if variant.softmax_lse == "given" else None,
        dlse=None if rows.dlse is None else statistics_shape(case, rows.dlse).contiguous().to(device),
        sink=None if values.sink is None else values.sink.clone().to(device),
        cu_seqlens_q=_ints(None if case.seqlens_q is None else offsets(case.seqlens_q), device),
        cu_seqlens_k=_ints(_offsets_k(case), device),
        seqused_q=_ints(case.seqused_q, device),
        seqused_k=_ints(case.seqused_k, device),
        max_seqlen_q=None if case.seqlens_q is None else max(case.seqlens_q, default=0),
        max_seqlen_k=_max_seqlen_k(case),
        softmax_scale=case.softmax_scale,
        window=_window(case),
        softcap=case.softcap,
        deterministic=case.deterministic,
        grad_dtype=None if variant.grad_dtype is None else TORCH_DTYPES[variant.grad_dtype],
        lse_scope=case.lse_scope,
    )


def _rows(case: Case) -> _Rows:
    values = make_values(case)
    k, v = values.k, values.v
    if case.ring is not None:
        sequences = enumerate(geometry(case).sequences)
        pairs = [request_keys(case, index, sequence) for index, sequence in sequences]
        k, v = (torch.cat([t[whole][held] for whole, held in pairs]) for t in (k, v))
    if case.num_heads_q % case.num_heads_kv:
        # Nothing can be solved; the request is refused before anything reads these.
        out, lse = torch.zeros_like(values.dout), torch.zeros(values.q.shape[:2])
    else:
        exact = solved(case)
        out, lse = exact.out.to(values.q.dtype), exact.softmax_lse.to(torch.float32)
        lse = lse.masked_fill(exact.unused_q_rows[:, None], NEG_INF)
    dout = values.dout.clone()
    dlse = None if values.dlse is None else values.dlse.clone()
    delta = (dout.float() * out.float()).sum(-1)
    q, k, v = values.q.clone(), k.clone(), v.clone()
    return _Rows(q=q, k=k, v=v, dout=dout, out=out, delta=delta, softmax_lse=lse, dlse=dlse)


def _poisoned(case: Case, rows: _Rows) -> _Rows:
    if "poison_unused" not in case.special:
        return rows
    exact = solved(case)
    for name in ROW_TENSORS_Q:
        tensor = getattr(rows, name)
        if tensor is not None:
            tensor[exact.unused_q_rows] = float("nan")
    for tensor in (rows.k, rows.v):
        tensor[exact.unused_k_rows] = float("nan")
    return rows


def _laid_out(case: Case, rows: _Rows, device: str | torch.device) -> dict[str, Tensor]:
    sides = {"q": "q", "k": "k", "v": "k", "dout": "q", "out": "q"}
    shaped = {name: request_shape(case, getattr(rows, name), side).to(device) for name, side in sides.items()}
    fused = case.layouts.q == FUSED
    laid = {
        name: LAYOUTS[getattr(case.layouts, name)](tensor)
        for name, tensor in shaped.items()
        if not (fused and name in ("q", "k", "v"))
    }
    if fused:
        laid["q"], laid["k"], laid["v"] = fuse(shaped["q"], shaped["k"], shaped["v"])
    if case.override.k_width is not None:
        laid["k"] = laid["k"].new_zeros(*laid["k"].shape[:-1], case.override.k_width)
    if case.override.dout_dtype is not None:
        laid["dout"] = laid["dout"].to(TORCH_DTYPES[case.override.dout_dtype])
    return laid


def _ints(numbers: tuple[int, ...] | None, device: str | torch.device) -> Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int32, device=device)


def _offsets_k(case: Case) -> tuple[int, ...] | None:
    if case.seqlens_k is None or case.override.cu_seqlens_k is not None:
        return case.override.cu_seqlens_k
    return offsets(case.seqlens_k)


def _max_seqlen_k(case: Case) -> int | None:
    if case.seqlens_k is None or case.override.max_seqlen_k is not None:
        return case.override.max_seqlen_k
    return max(case.seqlens_k, default=0)


def _window(case: Case) -> Window:
    """The window over the keys that the request holds: only the last block of a causal ring has a bound."""
    ring = case.ring
    if ring is None or ring.block == ring.count - 1:
        return case.window
    return replace(case.window, right=None)
