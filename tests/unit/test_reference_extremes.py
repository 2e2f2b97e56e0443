"""Inputs near the end of their dtype: an answer that exists is right, one beyond its dtype is seen, none is made up."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle.exact import F64, Scoring, Upstream, attend, attend_grad

import dqkv_kernels
from dqkv.problem import Lengths, Options, Problem, Window
from dqkv.tensor import DType, Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 16
LARGE = {
    "q": {"q": 1.0},
    "k": {"k": 1.0},
    "v": {"v": 1.0},
    "dout": {"dout": 1.0},
    "q_k": {"q": 1.0, "k": 1.0},
    "v_dout": {"v": 1.0, "dout": 1.0},
    "q_dout": {"q": 1.0, "dout": 1.0},
    "q_k_v_dout": {"q": 1.0, "k": 1.0, "v": 1.0, "dout": 1.0},
    "square_roots": {"q": 0.5, "k": 0.5, "v": 0.5, "dout": 0.5},
    "q_large_k_small": {"q": 1.0, "k": -0.95},
    "dout_large_v_small": {"dout": 1.0, "v": -0.9},
}
"""Tensors whose values are not about 1, and the power of the dtype's largest number that they are about."""
SEQUENCES = {"one": ((40, 56),), "many": ((5, 7),) * 20}
"""One sequence is computed on its own, many short ones together."""


def draw(name, dtype, sequences, *, lse, softcap=0.0):
    """A problem, its tensors, the exact gradients from just these values, and an eager program's in fp32."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {dtype}".encode()))
    kind = TORCH_DTYPES[dtype]
    q_lens, k_lens = zip(*sequences, strict=True)
    rows = {"q": sum(q_lens), "k": sum(k_lens), "v": sum(k_lens), "dout": sum(q_lens)}
    tensors = {}
    for role, count in rows.items():
        heads = HEADS if role in ("q", "dout") else KV_HEADS
        size = torch.finfo(kind).max ** LARGE[name].get(role, 0.0)
        share = torch.rand(count, heads, HEAD_DIM, generator=generator, dtype=torch.float64) * 0.5 + 0.5
        sign = torch.randint(0, 2, share.shape, generator=generator) * 2 - 1
        tensors[role] = (share * sign * size).to(kind)
    bare = Problem(
        **{role: Tensor.dense(dtype, tuple(t.shape), None) for role, t in tensors.items()},
        out=Tensor.dense(dtype, tuple(tensors["dout"].shape), None),
        queries=Lengths(cu_seqlens=(0, *np.cumsum(q_lens).tolist())),
        keys=Lengths(cu_seqlens=(0, *np.cumsum(k_lens).tolist())),
        options=Options(window=Window(right=0), softcap=softcap),
    )
    tensors["out"] = torch.zeros_like(tensors["dout"])
    statistics = torch.zeros(HEADS, rows["q"])
    exact, eager = (
        {role: torch.zeros(t.shape, dtype=work) for role, t in bare.gradients.items()} for work in (F64, torch.float32)
    )
    for q_start, q_len, k_start, k_len in bare.rows:
        at, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        i, j = torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)[None, :]
        for answer, work in ((exact, F64), (eager, torch.float32)):
            q, k, v, dout = (
                tensors[role][rows].to(work) for role, rows in (("q", at), ("k", keys), ("v", keys), ("dout", at))
            )
            scoring = Scoring(visible=j <= i, scale=bare.softmax_scale, softcap=softcap, sink=None)
            forward = attend(q, k, v, scoring)
            if answer is exact:
                tensors["out"][at] = forward.out.to(kind)
                statistics[:, at] = forward.softmax_lse.float()
            forward = forward._replace(out=tensors["out"][at].to(work))
            if lse:
                forward = forward._replace(softmax_lse=statistics[:, at].to(work))
            flow = attend_grad(q, k, v, forward, Upstream(dout, None), scoring)
            answer["dq"][at], answer["dk"][keys], answer["dv"][keys] = flow.dq, flow.dk, flow.dv
    if not lse:
        return bare, tensors, exact, eager
    tensors["softmax_lse"] = statistics
    spec = Tensor.dense(DType.FP32, tuple(statistics.shape), None)
    return replace(bare, softmax_lse=spec), tensors, exact, eager


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no_lse"])
@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@pytest.mark.parametrize("name", LARGE)
def test_what_exists_is_right_and_what_does_not_is_seen(name, dtype, lse, softcap, sequences):
    problem, tensors, exact, eager = draw(name, dtype, SEQUENCES[sequences], lse=lse, softcap=softcap)
    found = dqkv_kernels.attention_backward(problem, tensors)
    kind = torch.finfo(TORCH_DTYPES[dtype])
    for role in ("dq", "dk", "dv"):
        have, want = getattr(found, role).double(), exact[role]
        finite = torch.isfinite(want) & torch.isfinite(eager[role])
        eager_errors = (eager[role].double() - want)[finite].abs()
        eager_error = 3 * float(eager_errors.max()) if finite.any() else 0.0
        if dtype is not DType.FP16:
            # Sums beyond fp32 are taken in fp64, and owe an eager program nothing.
            within = want[want.abs() < kind.max].abs().flatten().tolist()
            eager_error = min(eager_error, 1e-3 * max(within, default=0.0))
        # Where all terms cancel, what an eager program's rounding leaves may itself be beyond fp16.
        exists = want.abs() + eager_error < kind.max * (1 - kind.eps)
        is_beyond = ~(want.abs() - eager_error <= kind.max * (1 + kind.eps))
        assert torch.isfinite(have[exists]).all(), role
        assert not torch.isfinite(have[is_beyond]).any(), role
        if exists.any():
            want, error = want[exists], (have - want)[exists].abs()
            rounding = 2 * kind.eps * want.abs() + kind.smallest_normal * kind.eps + 1e-5 * want.abs().max()
            assert (error <= rounding + eager_error).all(), (role, error.max(), eager_error, want.abs().max())


@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no_lse"])
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_a_product_beyond_fp32_that_the_scale_makes_small_keeps_its_weight(dtype, sequences, lse):
    """In fp32 such a logit is -inf: a weight of exactly 0, and a gradient that is finite and wrong."""
    problem, tensors, _, _ = draw("v", dtype, SEQUENCES[sequences], lse=False)
    tensors["v"] = tensors["v"].sign()
    tensors["q"] = tensors["q"].abs() * 1e20
    is_third = torch.arange(len(tensors["k"]))[:, None, None] % 3 == 0
    tensors["k"] = torch.where(is_third, tensors["k"].abs() * -1e19, tensors["k"] * 1e17)
    scale = 1e-40
    options = replace(problem.options, softmax_scale=scale)
    want = {role: torch.zeros(spec.shape, dtype=F64) for role, spec in problem.gradients.items()}
    statistics = torch.zeros(HEADS, len(tensors["q"]))
    for q_start, q_len, k_start, k_len in problem.rows:
        at, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        i, j = torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)[None, :]
        scoring = Scoring(visible=j <= i, scale=scale, softcap=0.0, sink=None)
        q, k, v, dout = (
            tensors[r][rows].double() for r, rows in zip(("q", "k", "v", "dout"), (at, keys, keys, at), strict=True)
        )
        forward = attend(q, k, v, scoring)
        tensors["out"][at], statistics[:, at] = forward.out.to(tensors["out"]), forward.softmax_lse.float()
        forward = forward._replace(out=tensors["out"][at].double())
        flow = attend_grad(q, k, v, forward, Upstream(dout, None), scoring)
        want["dq"][at], want["dk"][keys], want["dv"][keys] = flow.dq, flow.dk, flow.dv
    changes = {"options": options}
    if lse:
        tensors["softmax_lse"] = statistics
        changes["softmax_lse"] = Tensor.dense(DType.FP32, tuple(statistics.shape), None)
    found = dqkv_kernels.attention_backward(replace(problem, **changes), tensors)
    for role in ("dq", "dk", "dv"):
        size = float(want[role].abs().max())
        assert size > 0
        worst = float((getattr(found, role).double() - want[role]).abs().max())
        assert worst < 2 * torch.finfo(TORCH_DTYPES[dtype]).eps * size + 1e-5 * size, role
