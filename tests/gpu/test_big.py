"""Problems with more than 2^31 elements in a tensor: sampled rows around the ends of 32-bit offsets are exact."""

from __future__ import annotations

import pytest
import torch
from gpu_rig import Gpu
from oracle.big import big_fill, big_forward, big_samples
from oracle.cases import BIG_CASES
from oracle.problems import as_given

from dqkv.problem import Arch, Options, Problem, Window
from dqkv_kernels.chain import Chain, Workspace

pytestmark = pytest.mark.gpu

ARCHS = (Arch.SM80, Arch.SM90)
RELATIVE_ERROR_LIMIT = 5e-3
"""Of a head's gradient (Frobenius); rounding P and dS to bf16 leaves about 3e-3."""
CHUNK_ELEMENTS = 1 << 26
CHUNK_ROWS = 1024


@pytest.mark.parametrize("case", BIG_CASES, ids=lambda case: case.name)
def test_no_offset_ends_at_32_bits(gpu: Gpu, case):
    tensors = _inputs(case, gpu.device)
    window = Window(left=case.window_left, right=0 if case.causal else case.window_right)
    samples = big_samples(case)
    for arch in ARCHS:
        problem = Problem(
            **{role: as_given(tensor) for role, tensor in tensors.items()}, options=Options(window=window, arch=arch)
        )
        answer = gpu.answer(problem, tensors, Chain(gpu.artifacts, Workspace(gpu.device)))
        worst = dict.fromkeys(("dq", "dk", "dv"), 0.0)
        for sample in samples:
            for name, rows in (("dq", sample.q_rows), ("dk", sample.k_rows), ("dv", sample.k_rows)):
                got = getattr(answer, name).flatten(0, 1)[rows.to(gpu.device)].double().cpu()
                want = getattr(sample, name)
                error = (got - want).square().sum((0, 2)).sqrt() / want.square().sum((0, 2)).sqrt()
                assert torch.isfinite(error).all()
                worst[name] = max(worst[name], error.max().item())
        assert max(worst.values()) < RELATIVE_ERROR_LIMIT
        gpu.record.facts[f"{case.name}-{arch}-relative_error"] = {
            name: round(error, 6) for name, error in worst.items()
        }


def _inputs(case, device):
    """q, k, v, dout from the case's table, out and softmax_lse from plain PyTorch, some rows at a time."""

    def filled(role, rows, heads):
        tensor = torch.empty(case.batch_size, rows, heads, case.head_dim, dtype=torch.bfloat16, device=device)
        return big_fill(case, role, tensor)

    q, dout = (filled(role, case.seqlen_q, case.num_heads_q) for role in ("q", "dout"))
    k, v = (filled(role, case.seqlen_k, case.num_heads_kv) for role in ("k", "v"))
    out = torch.empty_like(q)
    lse = torch.empty(case.batch_size, case.num_heads_q, case.seqlen_q, device=device)
    if case.big == "batch":
        step = max(1, CHUNK_ELEMENTS // (case.num_heads_q * case.seqlen_q * max(case.seqlen_k, case.head_dim)))
        for a in range(0, case.batch_size, step):
            part = slice(a, a + step)
            scores = torch.einsum("bihd,bjhd->bhij", q[part].float(), k[part].float()) * case.scale
            lse[part] = scores.logsumexp(-1)
            weights = (scores - lse[part][..., None]).exp()
            out[part] = torch.einsum("bhij,bjhd->bihd", weights, v[part].float()).to(out.dtype)
    else:
        for a in range(0, case.seqlen_q, CHUNK_ROWS):
            first, end = max(0, a - case.window_left), min(case.seqlen_q, a + CHUNK_ROWS)
            forward = big_forward(case, q[0, a:end], k[0, first:end], v[0, first:end], first_query=a, first_key=first)
            out[0, a:end] = forward.out.to(out.dtype)
            lse[0, :, a:end] = forward.softmax_lse
    return {"q": q, "k": k, "v": v, "dout": dout, "out": out, "softmax_lse": lse}
