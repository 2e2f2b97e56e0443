"""How near is right: the rounding that a kernel cannot avoid sizes the error it may make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .case import AS_IS, Case, Dtype, Variant
from .exact import F64, Exact, solved
from .geometry import NEG_INF, geometry, request_keys, request_shape, visible
from .inputs import Inputs, build_inputs
from .values import TORCH_DTYPES, make_values

EPS: dict[Dtype, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20}
"""Relative spacing of the 16-bit dtypes; for fp32 what its accumulation leaves, not its spacing."""
EMULATION_MULTIPLE = 3.0
"""The largest error of another order of summation is within this factor of the emulation's."""
ABSOLUTE_FLOOR = 1e-6
EMULATED_KEPT = 4
BIAS_LIMIT = 0.2
"""Largest mean signed error, as a part of the root mean square."""
DP_NOISE = 2.0**-22
"""Error of a fp32 sum of products, as a part of the product of the two rows' lengths; a few times the usual one."""
LOG2E = 1.4426950408889634
FROBENIUS_SEQLEN = 2048
"""From this length on the largest error of a tensor hides lost accumulation and wrong small heads."""
FROBENIUS_MULTIPLE = 1.3
FROBENIUS_FLOOR = 2.0**-22
"""Relative error that rounding the answer to fp32 alone may leave."""
TELLING_VALUES = 16
"""So many unrounded values are not all in a 16-bit dtype by chance."""
GRADIENTS = ("dq", "dk", "dv")
BITWISE_CHECKS = {"BITWISE": ("dq", "dk", "dv", "dsink"), "BITWISE_DKDV": ("dk", "dv")}


class Answer(Protocol):
    """Gradients in the shapes of q, k, v and sink: torch tensors or numpy arrays (bf16 as ml_dtypes)."""

    @property
    def dq(self) -> Any: ...
    @property
    def dk(self) -> Any: ...
    @property
    def dv(self) -> Any: ...
    @property
    def dsink(self) -> Any: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Emulated:
    """Gradients as a kernel rounds them, in flat rows, and what rounding may leave where they cancel to zero.

    dsink_noise (heads,) is of rounding out, dq_noise and dk_noise, in the shapes of dq and dk, of summing dP in fp32.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None
    dsink_noise: Tensor
    dq_noise: Tensor
    dk_noise: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """A request and what its answer must be: exact in flat rows, budget by gradient name."""

    inputs: Inputs
    exact: Exact
    budget: Mapping[str, float]


def reference(case: Case, variant: Variant = AS_IS, device: str | torch.device = "cpu") -> Reference:
    """The request of an answerable case on a device, with the exact answer and its budget."""
    return Reference(
        inputs=build_inputs(case, variant, device),
        exact=solved(variant.of(case)),
        budget=error_budget(case, variant),
    )


@lru_cache(maxsize=EMULATED_KEPT)
def emulate(case: Case, variant: Variant = AS_IS) -> Emulated:
    """The gradients with a kernel's rounding: fp32 sums, P and dS in the inputs' dtype, then the answer's.

    Not a reference: only used to size the tolerance.
    """
    answer_dtype = TORCH_DTYPES[variant.answer_dtype(case)]
    case = variant.of(case)
    values, exact, dtype = make_values(case), solved(case), TORCH_DTYPES[case.dtype]
    group, shape = case.group_size, geometry(case)
    q, k, v, dout = (t.float() for t in (values.q, values.k, values.v, values.dout))
    out, lse = exact.out.to(dtype).float(), exact.softmax_lse.float()
    dq = torch.zeros(shape.total_q, case.num_heads_q, case.head_dim)
    dk = torch.zeros(shape.total_k, case.num_heads_kv, case.head_dim)
    dv = torch.zeros(shape.total_k, case.num_heads_kv, case.head_dim_v)
    sink = None if values.sink is None else values.sink.float()
    dq_noise, dk_noise = torch.zeros_like(dq), torch.zeros_like(dk)
    dsink, noise = torch.zeros(case.num_heads_q), torch.zeros(case.num_heads_q)
    for index, sequence in enumerate(shape.sequences):
        q_start, q_len, k_start, k_len = sequence
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        whole, held = request_keys(case, index, sequence)
        seen = visible(q_len, k[whole].shape[0], case.window)[:, held]
        wide_k, wide_v = (t[whole][held].repeat_interleave(group, 1) for t in (k, v))
        s, slope = _logits(case, q[rows], wide_k)
        row_lse = lse[rows].T if variant.softmax_lse == "given" else _statistics(s, seen, sink)
        alive = torch.isfinite(row_lse)
        keep = seen & alive[..., None]
        lse2 = torch.where(alive, row_lse, torch.zeros_like(row_lse)) * LOG2E
        p = torch.exp2((s - lse2[..., None]).masked_fill(~keep, NEG_INF))
        delta = (dout[rows] * out[rows]).sum(-1).T
        dlse = torch.zeros_like(delta) if values.dlse is None else values.dlse[rows].T
        if sink is not None:
            p_sink = torch.exp2(sink[:, None] * LOG2E - lse2).masked_fill(~alive, 0.0)
            dsink += (p_sink * (dlse - delta)).sum(-1)
            noise += ((p_sink * (dout[rows] * out[rows]).square().sum(-1).sqrt().T) ** 2).sum(-1)
        dp = torch.einsum("ihd,jhd->hij", dout[rows], wide_v)
        ds = (p * (dp - delta[..., None] + dlse[..., None]) * slope).masked_fill(~keep, 0.0)
        unsure = (case.scale * DP_NOISE * p * _norms(dout[rows])[..., None] * _norms(wide_v)[:, None]).square()
        dq_noise[rows] = torch.einsum("hij,jhd->ihd", unsure, wide_k.square()).sqrt()
        wide_noise = torch.einsum("hij,ihd->jhd", unsure, q[rows].square())
        dk_noise[keys] = wide_noise.reshape(k_len, case.num_heads_kv, group, case.head_dim).sum(2).sqrt()
        p, ds = p.to(dtype).float(), ds.to(dtype).float()
        dq[rows] = case.scale * torch.einsum("hij,jhd->ihd", ds, wide_k)
        wide_dk = case.scale * torch.einsum("hij,ihd->jhd", ds, q[rows])
        wide_dv = torch.einsum("hij,ihd->jhd", p, dout[rows])
        dk[keys] = wide_dk.reshape(k_len, case.num_heads_kv, group, case.head_dim).sum(2)
        dv[keys] = wide_dv.reshape(k_len, case.num_heads_kv, group, case.head_dim_v).sum(2)
    return Emulated(
        dq=dq.to(answer_dtype),
        dk=dk.to(answer_dtype),
        dv=dv.to(answer_dtype),
        dsink=None if sink is None else dsink.to(TORCH_DTYPES[_sink_dtype(case, variant)]),
        dsink_noise=noise.sqrt(),
        dq_noise=dq_noise,
        dk_noise=dk_noise,
    )


@cache
def error_budget(case: Case, variant: Variant = AS_IS) -> Mapping[str, float]:
    """Largest allowed error by gradient name (maximum norm).

    A multiple of the emulation's error, two units in the last place of the largest value, and what fp32
    accumulation alone may leave where the exact gradient cancels to zero.
    """
    emulated, answer_eps = emulate(case, variant), EPS[variant.answer_dtype(case)]
    sink_dtype = _sink_dtype(case, variant)
    case = variant.of(case)
    values, exact = make_values(case), solved(case)
    if variant.answer_dtype(case) == "fp32":
        floors = {"dq": _largest(emulated.dq_noise), "dk": _largest(emulated.dk_noise), "dv": 0.0}
    else:
        cancel = 2.0**-20 * abs(case.scale) * _largest(_norms(values.dout.to(F64))) * _largest(_norms(values.v.to(F64)))
        over_rows = math.sqrt(max(1, case.seqlen_q * case.group_size))
        floors = {"dq": cancel * _largest(values.k), "dk": cancel * _largest(values.q) * over_rows, "dv": 0.0}
    budget = {}
    for name in GRADIENTS:
        want = getattr(exact, name)
        rounding = EMULATION_MULTIPLE * _largest(getattr(emulated, name).to(F64) - want)
        budget[name] = rounding + 2 * answer_eps * _largest(want) + floors[name] + ABSOLUTE_FLOOR
        if want.numel() == 0:
            budget[name] = 0.0
    if exact.dsink is not None and emulated.dsink is not None:
        rounding = EMULATION_MULTIPLE * _largest(emulated.dsink.to(F64) - exact.dsink)
        rounding += 3 * EPS[case.dtype] * emulated.dsink_noise.max().item()
        budget["dsink"] = rounding + 2 * EPS[sink_dtype] * _largest(exact.dsink) + ABSOLUTE_FLOOR
    return MappingProxyType(budget)


def judge(case: Case, exact: Exact, gradients: Answer, variant: Variant = AS_IS) -> list[str]:
    """What is wrong with one answer to `build_inputs(case, variant)`; empty when it is right.

    exact is `solved(variant.of(case))`. Checks shapes, dtypes, finiteness, the error budget, rows that must
    be exactly 0, that an fp32 answer was never rounded to 16 bits, bias where the case asks for it, and each head's
    Frobenius error from FROBENIUS_SEQLEN rows on.
    """
    complaints = []
    for name in (*GRADIENTS, "dsink"):
        given, want = getattr(gradients, name), getattr(exact, name)
        if given is None or want is None:
            if given is not want:
                complaints.append(f"{name}: missing" if given is None else f"{name}: given, though there is no sink")
            continue
        got = as_tensor(given)
        if name == "dsink":
            shape, dtype = want.shape, _sink_dtype(case, variant)
        else:
            shape = request_shape(case, want, "q" if name == "dq" else "k").shape
            dtype = variant.answer_dtype(case)
        if got.shape != shape:
            complaints.append(f"{name}: shape {tuple(got.shape)} instead of {tuple(shape)}")
            continue
        if got.dtype != TORCH_DTYPES[dtype]:
            complaints.append(f"{name}: dtype {got.dtype} instead of {dtype}")
        got = got.detach().to("cpu").to(F64).reshape(want.shape)
        complaints += [f"{name}: {text}" for text in _value_complaints(case, exact, name, got, variant)]
    return complaints


def frobenius_complaints(got: Tensor, want: Tensor, emulated: Tensor) -> list[str]:
    """Heads whose Frobenius error is above that of the emulation by more than the multiple.

    All are float64 (rows, heads, width) of one sequence.
    """
    error, limit, size = (t.square().sum((0, 2)).sqrt() for t in (got - want, emulated - want, want))
    limit = FROBENIUS_MULTIPLE * limit + FROBENIUS_FLOOR * size
    return [
        f"head {head}: Frobenius error {error[head]:.3e} above {limit[head]:.3e} of {size[head]:.3e}"
        for head in (error > limit).nonzero().flatten().tolist()
    ]


def bitwise_complaints(case: Case, answers: Sequence[Answer]) -> list[str]:
    """Gradients that differ between answers to one request where the case says they must not."""
    names = sorted({name for check in case.checks for name in BITWISE_CHECKS.get(check, ())})
    complaints = []
    for name in names:
        first, *rest = (getattr(answer, name) for answer in answers)
        if first is None and all(other is None for other in rest):
            continue
        bits = as_tensor(first).contiguous().view(torch.uint8)
        for index, other in enumerate(rest, start=1):
            if other is None or not torch.equal(bits, as_tensor(other).contiguous().view(torch.uint8)):
                complaints.append(f"{name}: call {index} differs from call 0")
    return complaints


def as_tensor(array: Any) -> Tensor:
    """A torch view of a torch tensor or a numpy array, bf16 of ml_dtypes included."""
    if isinstance(array, Tensor):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _value_complaints(case: Case, exact: Exact, name: str, got: Tensor, variant: Variant) -> list[str]:
    """What is wrong with the values of one gradient; got is float64 in flat rows."""
    want = getattr(exact, name)
    if not torch.isfinite(got).all():
        return [f"{int((~torch.isfinite(got)).sum())} values are not finite"]
    if got.numel() == 0:
        return []
    complaints, error, limit = [], got - want, error_budget(case, variant)[name]
    if _largest(error) > limit:
        complaints.append(f"error {_largest(error):.3e} above {limit:.3e}")
    if name == "dsink":
        return complaints
    if got[exact.zero_q_rows if name == "dq" else exact.zero_k_rows].any():
        complaints.append("not zero where nothing can flow")
    if _only_rounded_values(got, want, case.dtype, limit) and variant.answer_dtype(case) == "fp32":
        complaints.append(f"every value was rounded to {case.dtype}")
    if "BIAS" in case.checks:
        mean, rms = abs(error.mean().item()), error.square().mean().sqrt().item()
        if mean > BIAS_LIMIT * rms + 1e-9:
            complaints.append(f"mean error {mean:.2e} against root mean square {rms:.2e}")
    for q_start, q_len, k_start, k_len in geometry(case).sequences:
        if max(q_len, k_len) >= FROBENIUS_SEQLEN:
            rows = slice(q_start, q_start + q_len) if name == "dq" else slice(k_start, k_start + k_len)
            emulated = getattr(emulate(case, variant), name)[rows].to(F64)
            complaints += frobenius_complaints(got[rows], want[rows], emulated)
    return complaints


def _only_rounded_values(got: Tensor, want: Tensor, dtype: Dtype, limit: float) -> bool:
    """Whether all of got is in a narrow dtype where what is wanted is large enough to tell and is not.

    The budget of 16-bit inputs is too wide to see one rounding of the answer.
    """
    telling = (want.abs() > limit) & (want != want.to(TORCH_DTYPES[dtype]).to(F64))
    values = got[telling]
    return len(values) >= TELLING_VALUES and torch.equal(values, values.to(TORCH_DTYPES[dtype]).to(F64))


def _logits(case: Case, q: Tensor, wide_k: Tensor) -> tuple[Tensor, Tensor | float]:
    """(scores in units of log2, slope of the softcap), in fp32."""
    s = torch.einsum("ihd,jhd->hij", q, wide_k)
    if case.softcap > 0:
        t = torch.tanh(s * case.scale / case.softcap)
        return t * (case.softcap * LOG2E), 1.0 - t * t
    return s * (case.scale * LOG2E), 1.0


def _statistics(s: Tensor, seen: Tensor, sink: Tensor | None) -> Tensor:
    """softmax_lse (heads, q_len) in fp32 from scores in units of log2, as a server recomputes it."""
    columns = s.masked_fill(~seen, NEG_INF)
    if sink is not None:
        columns = torch.cat([columns, (sink * LOG2E)[:, None, None].expand(-1, s.shape[1], 1)], -1)
    if columns.shape[-1] == 0:
        return s.new_full(s.shape[:2], NEG_INF)
    return torch.logsumexp(columns / LOG2E, -1)


def _sink_dtype(case: Case, variant: Variant) -> Dtype:
    """The dtype of dsink: that of the sink, unless the variant asks for another."""
    return variant.grad_dtype or variant.of(case).sink or "fp32"


def _largest(t: Tensor) -> float:
    return t.to(F64).abs().max().item() if t.numel() else 0.0


def _norms(t: Tensor) -> Tensor:
    """(heads, rows) lengths of the rows of (rows, heads, width)."""
    return t.square().sum(-1).sqrt().T
