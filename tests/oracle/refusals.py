"""Every refusal of a problem once: a valid request, what is changed in it, and the error that must come back.

Byte counts and the bounds of regions are the transport's, not a problem's, and are not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from .cases import BY_NAME
from .inputs import Inputs, build_inputs

ROWS_BEYOND_INT32 = 2**31

Change = Callable[[Inputs], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Refusal:
    """One refused request.

    base: the case that is valid before the change. field and reason: of the error. found_by: "problem" where the
    problem cannot even be built, "server" where only the server knows that none of its devices runs it. travels: how
    a client that checks nothing gets it to a server: "inline" with all bytes, "described" by a header alone because
    the bytes are too many, "never" where no field of the wire holds it.
    """

    name: str
    base: str
    change: Change
    field: str
    reason: str
    found_by: Literal["problem", "server"] = "problem"
    travels: Literal["inline", "described", "never"] = "inline"

    def inputs(self) -> Inputs:
        """The refused request; fresh memory at every call."""
        valid = build_inputs(BY_NAME[self.base])
        return replace(valid, **self.change(valid))


REASONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "err_seqlen_exceeds_max": ("max_seqlen_k", "MAX_SEQLEN_TOO_SMALL"),
        "err_cu_decreasing": ("cu_seqlens_k", "OFFSETS_INVALID"),
        "err_cu_wrong_count": ("cu_seqlens_k", "OFFSETS_INVALID"),
        "err_heads_not_divisible": ("q", "HEADS_NOT_DIVISIBLE"),
        "err_hd264": ("q", "HEAD_DIM_UNSUPPORTED"),
        "err_q_k_width_differ": ("k", "SHAPE_MISMATCH"),
        "err_mixed_dtype": ("dout", "DTYPE_MISMATCH"),
        "err_lse_dtype": ("softmax_lse", "DTYPE_MISMATCH"),
    }
)
"""For each refused case of `cases.REFUSED_CASES`, the field and the reason of its error."""

RING = "ring_block_0_of_4"
PACKED_Q = "packed_q_dense_k_seqused"
DENSE = "causal_bottom_right_sq_lt_sk"
PACKED = "varlen_tile_straddle"
USED = "seqused_both_dense"
SINK = "sink_basic_h6"
DLSE = "dlse_rows_without_keys"


def _replaced(**fields: Any) -> Change:
    return lambda inputs: fields


def _resized(role: str, **sizes: int) -> Change:
    """One dimension of one tensor another size, by name: batch, rows, heads or width."""

    def change(inputs: Inputs) -> Mapping[str, Any]:
        tensor: Tensor = getattr(inputs, role)
        names = _dimensions(role, tensor)
        shape = [sizes.get(name, size) for name, size in zip(names, tensor.shape, strict=True)]
        return {role: tensor.new_zeros(shape)}

    return change


def _dimensions(role: str, tensor: Tensor) -> tuple[str, ...]:
    if role == "sink":
        return ("heads",)
    if role in ("softmax_lse", "delta", "dlse"):
        return ("batch", "heads", "rows")[3 - tensor.dim() :]
    return ("batch", "rows", "heads", "width")[4 - tensor.dim() :]


def _all(*changes: Change) -> Change:
    """Several changes of different tensors at once."""
    return lambda inputs: {name: value for change in changes for name, value in change(inputs).items()}


def _cast(role: str, dtype: torch.dtype) -> Change:
    return lambda inputs: {role: getattr(inputs, role).to(dtype)}


def _without_last_dimension(role: str) -> Change:
    return lambda inputs: {role: getattr(inputs, role)[..., 0]}


def _delta(inputs: Inputs) -> Mapping[str, Any]:
    """Both: the valid request has out."""
    return {"delta": torch.zeros_like(inputs.softmax_lse) if inputs.softmax_lse is not None else None}


def _delta_of(dtype: torch.dtype, **sizes: int) -> Change:
    def change(inputs: Inputs) -> Mapping[str, Any]:
        with_delta = replace(inputs, **_delta(inputs), out=None)
        resized = _resized("delta", **sizes)(with_delta)
        return {"out": None, "delta": resized["delta"].to(dtype)}

    return change


def _edited(name: str, edit: Callable[[list[int]], list[int]]) -> Change:
    """Offsets or used lengths other than the true ones."""

    def change(inputs: Inputs) -> Mapping[str, Any]:
        numbers: Tensor = getattr(inputs, name)
        return {name: torch.tensor(edit(numbers.tolist()), dtype=torch.int64)}

    return change


def _window(**fields: int) -> Change:
    return lambda inputs: {"window": replace(inputs.window, **fields)}


def _widths(width: int, *roles: str) -> Change:
    return _all(*(_resized(role, width=width) for role in roles))


def _transposed(role: str) -> Change:
    return lambda inputs: {role: getattr(inputs, role).mT.contiguous()}


def _replaced_q_dense(inputs: Inputs) -> Mapping[str, Any]:
    """One dense sequence where the offsets say packed rows."""
    return {"q": inputs.q[None]}


def _fp32_on(arch: str) -> Change:
    casts = _all(*(_cast(role, torch.float32) for role in ("q", "k", "v", "dout", "out")))
    return _all(casts, _replaced(arch=arch))


def _huge_dense(inputs: Inputs) -> Mapping[str, Any]:
    """More query rows than int32 counts, in no memory: every row is the same one."""
    width, width_v = inputs.q.shape[-1], inputs.v.shape[-1]
    rows = ROWS_BEYOND_INT32
    heads = inputs.q.shape[-2]
    return {
        "q": inputs.q[:1, :1].expand(1, rows, heads, width),
        "dout": inputs.dout[:1, :1].expand(1, rows, heads, width_v),
        "out": inputs.dout[:1, :1].expand(1, rows, heads, width_v),
        "k": inputs.k[:1],
        "v": inputs.v[:1],
        "softmax_lse": torch.zeros(1, heads, 1).expand(1, heads, rows),
    }


def _refused(name: str, base: str, change: Change, *, error: tuple[str, str], **given: Any) -> Refusal:
    field, reason = error
    return Refusal(name=name, base=base, change=change, field=field, reason=reason, **given)


# A refusal reads as a line; one argument a line would hide the table.
# fmt: off
REFUSALS: tuple[Refusal, ...] = (
    # ---- shapes
    _refused("q_rank", DENSE, _without_last_dimension("q"), error=("q", "SHAPE_MISMATCH")),
    _refused("q_dense_with_offsets", PACKED, _replaced_q_dense, error=("q", "SHAPE_MISMATCH")),
    _refused("k_width", DENSE, _resized("k", width=128), error=("k", "SHAPE_MISMATCH")),
    _refused("k_batch", DENSE, _resized("k", batch=3), error=("k", "SHAPE_MISMATCH")),
    _refused("v_rows", DENSE, _resized("v", rows=199), error=("v", "SHAPE_MISMATCH")),
    _refused("v_heads", DENSE, _resized("v", heads=4), error=("v", "SHAPE_MISMATCH")),
    _refused("dout_rows", DENSE, _resized("dout", rows=63), error=("dout", "SHAPE_MISMATCH")),
    _refused("dout_width", DENSE, _resized("dout", width=72), error=("dout", "SHAPE_MISMATCH")),
    _refused("out_heads", DENSE, _resized("out", heads=2), error=("out", "SHAPE_MISMATCH")),
    _refused("softmax_lse_rows", DENSE, _resized("softmax_lse", rows=65), error=("softmax_lse", "SHAPE_MISMATCH")),
    _refused("softmax_lse_rows_before_heads", PACKED, _transposed("softmax_lse"),
             error=("softmax_lse", "SHAPE_MISMATCH")),
    _refused("delta_heads", DENSE, _delta_of(torch.float32, heads=3), error=("delta", "SHAPE_MISMATCH")),
    _refused("dlse_batch", DLSE, _resized("dlse", batch=2), error=("dlse", "SHAPE_MISMATCH")),
    _refused("sink_heads", SINK, _resized("sink", heads=5), error=("sink", "SHAPE_MISMATCH")),
    _refused("rows_beyond_int32", DENSE, _huge_dense, error=("q", "SIZE_OVERFLOW"), travels="described"),
    # ---- dtypes
    _refused("k_dtype", DENSE, _cast("k", torch.float16), error=("k", "DTYPE_MISMATCH")),
    _refused("v_dtype", DENSE, _cast("v", torch.float32), error=("v", "DTYPE_MISMATCH")),
    _refused("dout_dtype", DENSE, _cast("dout", torch.float32), error=("dout", "DTYPE_MISMATCH")),
    _refused("out_dtype", DENSE, _cast("out", torch.float16), error=("out", "DTYPE_MISMATCH")),
    _refused("softmax_lse_dtype", DENSE, _cast("softmax_lse", torch.bfloat16),
             error=("softmax_lse", "DTYPE_MISMATCH")),
    _refused("delta_dtype", DENSE, _delta_of(torch.bfloat16), error=("delta", "DTYPE_MISMATCH")),
    _refused("dlse_dtype", DLSE, _cast("dlse", torch.float16), error=("dlse", "DTYPE_MISMATCH")),
    _refused("grad_dtype", DENSE, _replaced(grad_dtype=torch.float16), error=("grad_dtype", "DTYPE_MISMATCH")),
    # ---- heads and widths
    _refused("heads_no_multiple", DENSE, _all(_resized("k", heads=3), _resized("v", heads=3)),
             error=("q", "HEADS_NOT_DIVISIBLE")),
    _refused("heads_fewer_than_kv", DENSE, _all(_resized("k", heads=8), _resized("v", heads=8)),
             error=("q", "HEADS_NOT_DIVISIBLE")),
    _refused("heads_zero", DENSE, _all(_resized("k", heads=0), _resized("v", heads=0)),
             error=("q", "HEADS_NOT_DIVISIBLE")),
    _refused("head_dim_60", DENSE, _widths(60, "q", "k"), error=("q", "HEAD_DIM_UNSUPPORTED")),
    _refused("head_dim_264", DENSE, _widths(264, "q", "k"), error=("q", "HEAD_DIM_UNSUPPORTED")),
    _refused("head_dim_0", DENSE, _widths(0, "q", "k"), error=("q", "HEAD_DIM_UNSUPPORTED")),
    _refused("head_dim_v_60", DENSE, _widths(60, "v", "dout", "out"), error=("v", "HEAD_DIM_UNSUPPORTED")),
    _refused("head_dim_v_264", DENSE, _widths(264, "v", "dout", "out"), error=("v", "HEAD_DIM_UNSUPPORTED")),
    _refused("head_dim_v_0", DENSE, _widths(0, "v", "dout", "out"), error=("v", "HEAD_DIM_UNSUPPORTED")),
    # ---- lengths
    _refused("offsets_decrease", PACKED, _edited("cu_seqlens_q", lambda n: [n[0], n[2], n[1], *n[3:]]),
             error=("cu_seqlens_q", "OFFSETS_INVALID")),
    _refused("offsets_leave_the_tensor", PACKED, _edited("cu_seqlens_k", lambda n: [*n[:-1], n[-1] + 1]),
             error=("cu_seqlens_k", "OFFSETS_INVALID")),
    _refused("offsets_one_too_many", PACKED_Q, _edited("cu_seqlens_q", lambda n: [*n, n[-1]]),
             error=("cu_seqlens_q", "OFFSETS_INVALID")),
    _refused("offsets_one_too_few", PACKED, _edited("cu_seqlens_k", lambda n: n[:-1]),
             error=("cu_seqlens_k", "OFFSETS_INVALID")),
    _refused("offsets_start_at_1", PACKED, _edited("cu_seqlens_k", lambda n: [1, *n[1:]]),
             error=("cu_seqlens_k", "OFFSETS_INVALID")),
    _refused("offsets_negative", PACKED, _edited("cu_seqlens_q", lambda n: [0, -1, *n[2:]]),
             error=("cu_seqlens_q", "OFFSETS_INVALID")),
    _refused("offsets_beyond_int32", PACKED, _edited("cu_seqlens_k", lambda n: [*n[:-1], ROWS_BEYOND_INT32]),
             error=("cu_seqlens_k", "OFFSETS_INVALID"), travels="never"),
    _refused("seqused_beyond_the_rows", USED, _edited("seqused_q", lambda n: [97, *n[1:]]),
             error=("seqused_q", "SEQUSED_INVALID")),
    _refused("seqused_beyond_its_sequence", PACKED, _replaced(seqused_k=torch.tensor([129, 2, 64, 127, 65])),
             error=("seqused_k", "SEQUSED_INVALID")),
    _refused("seqused_negative", USED, _edited("seqused_k", lambda n: [n[0], -1, n[2]]),
             error=("seqused_k", "SEQUSED_INVALID")),
    _refused("seqused_one_too_few", USED, _edited("seqused_q", lambda n: n[:-1]),
             error=("seqused_q", "SEQUSED_INVALID")),
    _refused("max_seqlen_of_dense", DENSE, _replaced(max_seqlen_q=63), error=("max_seqlen_q", "MAX_SEQLEN_TOO_SMALL")),
    _refused("max_seqlen_of_packed", PACKED, _replaced(max_seqlen_k=128),
             error=("max_seqlen_k", "MAX_SEQLEN_TOO_SMALL")),
    # ---- options
    _refused("scale_nan", DENSE, _replaced(softmax_scale=math.nan), error=("softmax_scale", "OPTION_INVALID")),
    _refused("scale_inf", DENSE, _replaced(softmax_scale=math.inf), error=("softmax_scale", "OPTION_INVALID")),
    _refused("scale_minus_inf", DENSE, _replaced(softmax_scale=-math.inf), error=("softmax_scale", "OPTION_INVALID")),
    _refused("scale_beyond_float32", DENSE, _replaced(softmax_scale=1e39), error=("softmax_scale", "OPTION_INVALID")),
    _refused("softcap_negative", DENSE, _replaced(softcap=-1.0), error=("softcap", "OPTION_INVALID")),
    _refused("softcap_nan", DENSE, _replaced(softcap=math.nan), error=("softcap", "OPTION_INVALID")),
    _refused("softcap_inf", DENSE, _replaced(softcap=math.inf), error=("softcap", "OPTION_INVALID")),
    _refused("sink_token_length_negative", DENSE, _window(sink_token_length=-1),
             error=("sink_token_length", "OPTION_INVALID")),
    # ---- what the softmax ran over
    _refused("both_out_and_delta", DENSE, _delta, error=("out", "OUT_OR_DELTA")),
    _refused("neither_out_nor_delta", DENSE, _replaced(out=None), error=("out", "OUT_OR_DELTA")),
    _refused("global_with_neither", RING, _replaced(out=None), error=("out", "OUT_OR_DELTA")),
    _refused("global_without_softmax_lse", RING, _replaced(softmax_lse=None), error=("softmax_lse", "LSE_SCOPE")),
    # ---- devices
    _refused("arch_of_no_device", DENSE, _replaced(arch="sm90"), error=("arch", "ARCH_UNAVAILABLE"),
             found_by="server"),
    _refused("fp32_on_a_gpu_arch", DENSE, _fp32_on("sm80"), error=("arch", "ARCH_UNAVAILABLE"), found_by="server"),
)
# fmt: on
