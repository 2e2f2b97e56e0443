"""Many short sequences are computed together: the same answers, in few jobs, and none knows of another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import dqkv_kernels
from dqkv import errors
from dqkv.problem import Lengths, Options, Problem, Window
from dqkv.tensor import DType, Tensor
from dqkv_kernels import batches
from dqkv_kernels.places import JOB_BYTES, live_sequences

pytestmark = pytest.mark.usefixtures("one_thread")

GRADIENTS = ("dq", "dk", "dv", "dsink")
TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
LENGTHS = [(5, 9), (9, 5), (6, 0), (12, 12), (1, 1), (7, 10), (64, 50), (0, 3), (8, 12), (70, 4)] * 9
"""Queries and keys: of shapes that are padded and not, empty ones, and one too long for a batch."""


def packed(lengths, *, options=None, heads=(4, 2), widths=(16, 8), given=("out", "softmax_lse"), dtype=DType.FP32):
    """A problem of packed sequences, with three rows that belong to none, and its tensors."""
    generator = torch.Generator().manual_seed(5)
    q_lens, k_lens = zip(*lengths, strict=True)
    q_rows, k_rows = sum(q_lens) + 3, sum(k_lens) + 3
    shapes = {
        "q": (q_rows, heads[0], widths[0]),
        "k": (k_rows, heads[1], widths[0]),
        "v": (k_rows, heads[1], widths[1]),
        "dout": (q_rows, heads[0], widths[1]),
        "out": (q_rows, heads[0], widths[1]),
        "sink": heads[:1],
    }
    statistic = (heads[0], q_rows)
    tensors = {}
    for role in ("q", "k", "v", "dout", *given):
        tensor = torch.randn(shapes.get(role, statistic), generator=generator)
        if role == "softmax_lse":
            tensor += 3
        tensors[role] = tensor.to(TORCH_DTYPES[dtype]) if role in shapes and role != "sink" else tensor
    names = {kind: name for name, kind in TORCH_DTYPES.items()}
    problem = Problem(
        **{role: Tensor.dense(names[t.dtype], tuple(t.shape), None) for role, t in tensors.items()},
        queries=Lengths(cu_seqlens=(0, *np.cumsum(q_lens).tolist())),
        keys=Lengths(cu_seqlens=(0, *np.cumsum(k_lens).tolist())),
        options=options or Options(),
    )
    return problem, tensors


def backward(problem, tensors):
    """The answer into memory that holds NaN before."""
    memory = {
        role: torch.full(spec.shape, torch.nan, dtype=TORCH_DTYPES[spec.dtype])
        for role, spec in problem.gradients.items()
    }
    return dqkv_kernels.attention_backward(problem, tensors, memory)


def split(problem):
    return batches.split(problem, live_sequences(problem))


OPTIONS = {
    "full": Options(),
    "causal": Options(window=Window(right=0)),
    "window": Options(window=Window(left=4, right=2)),
    "negative": Options(window=Window(left=30, right=-2)),
    "sink_tokens": Options(window=Window(left=-1, right=5, sink_token_length=2)),
    "far": Options(window=Window(left=2**61, right=-(2**61))),
    "softcap": Options(softcap=2.0, softmax_scale=-0.7),
    "fp32_sums": Options(grad_dtype=DType.FP32, window=Window(right=0)),
}
GIVEN = {
    "out_lse": ("out", "softmax_lse"),
    "no_lse": ("out",),
    "delta_dlse_sink": ("delta", "softmax_lse", "dlse", "sink"),
    "no_lse_sink_dlse": ("out", "dlse", "sink"),
}


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)], ids=str)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("options", OPTIONS)
def test_together_they_get_what_each_gets_alone(options, given, dtype, heads, monkeypatch):
    problem, tensors = packed(LENGTHS, options=OPTIONS[options], given=GIVEN[given], dtype=dtype, heads=heads)
    found = backward(problem, tensors)
    statistics = dqkv_kernels.softmax_statistics(problem, tensors)
    assert split(problem)[0] or options == "far"
    monkeypatch.setattr(batches, "SEQUENCES_LEAST", 10**9)
    assert not split(problem)[0]
    alone = backward(problem, tensors)
    tolerance = 1e-5 if dtype is DType.FP32 or options == "fp32_sums" else 2**-8
    for role in GRADIENTS:
        have, want = getattr(found, role), getattr(alone, role)
        assert (have is None) == (want is None)
        if have is not None:
            torch.testing.assert_close(have, want, rtol=tolerance, atol=max(1e-5, tolerance * float(want.abs().max())))
    torch.testing.assert_close(statistics, dqkv_kernels.softmax_statistics(problem, tensors), rtol=1e-6, atol=2e-6)


def test_dense_sequences_of_any_strides_are_taken_together():
    count, rows, keys, heads, width = 24, 9, 11, 2, 16
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(count, keys, heads, 3 * width, generator=generator)
    q_fused = torch.randn(rows, count, heads, 2 * width, generator=generator).transpose(0, 1)
    tensors = {
        "q": q_fused[..., :width],
        "k": fused[..., :width],
        "v": fused[..., width : 2 * width],
        "dout": torch.randn(1, 1, heads, width, generator=generator).expand(count, rows, heads, width),
        "out": q_fused[..., width:],
        "softmax_lse": torch.randn(count, heads, rows, generator=generator) + 3,
    }
    problem = Problem(
        **{role: Tensor.dense(DType.FP32, tuple(tensor.shape), None) for role, tensor in tensors.items()},
        queries=Lengths(seqused=tuple(range(1, rows + 1)) * 2 + (rows,) * (count - 2 * rows)),
        options=Options(window=Window(right=0)),
    )
    assert split(problem)[0]
    answer = torch.full((rows, count, heads, width + 3), torch.nan)
    dq = answer[..., :width].transpose(0, 1)
    found = dqkv_kernels.attention_backward(problem, tensors, {"dq": dq})
    assert answer[..., width:].isnan().all()
    specs = {role: tensor.contiguous() for role, tensor in tensors.items()}
    want = backward(problem, specs)
    for role in ("dq", "dk", "dv"):
        assert torch.equal(getattr(found, role), getattr(want, role))


@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_changes_no_bit(threads):
    problem, tensors = packed(LENGTHS, given=("out", "dlse", "sink"), options=Options(window=Window(right=0)))
    first = backward(problem, tensors)
    torch.set_num_threads(threads)
    try:
        again = backward(problem, tensors)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(getattr(first, role), getattr(again, role)) for role in GRADIENTS)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38, -3e38])
@pytest.mark.parametrize("role", ["q", "k", "v", "dout", "out", "softmax_lse", "delta"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_one_bad_sequence_changes_no_bit_of_the_others(role, bad, softcap):
    given = (
        ("delta", "softmax_lse") if role == "delta" else ("out", "softmax_lse") if role == "softmax_lse" else ("out",)
    )
    problem, tensors = packed([(6, 8)] * 20, given=given, options=Options(softcap=softcap, window=Window(right=0)))
    clean = backward(problem, tensors)
    mine = {"q": slice(42, 48), "k": slice(56, 64)}
    at = mine["k" if role in "kv" else "q"]
    if role in ("softmax_lse", "delta"):
        tensors[role][:, at] = bad
    else:
        tensors[role][at] = bad
    found = backward(problem, tensors)
    for answer, side in (("dq", "q"), ("dk", "k"), ("dv", "k")):
        for gradients in (found, clean):
            getattr(gradients, answer)[mine[side]] = 0
        assert torch.equal(getattr(found, answer), getattr(clean, answer)), answer


def test_a_hundred_thousand_sequences_are_few_jobs_of_bounded_size():
    rng = np.random.default_rng(2)
    lengths = list(zip(rng.integers(1, 9, 100_000).tolist(), rng.integers(1, 9, 100_000).tolist(), strict=True))
    problem, _ = packed(lengths, heads=(2, 1), widths=(8, 8))
    together, alone = split(problem)
    assert not alone.any()
    assert len(together) < 1000
    numbers = np.concatenate([batch.numbers for batch in together])
    assert np.array_equal(np.sort(numbers), np.arange(100_000))
    for batch in together:
        assert (batch.q_len <= batch.rows).all()
        assert (batch.k_len <= batch.keys).all()
        per_sequence = max(2 * batch.rows * 8, batch.keys * 8, 2 * batch.rows * batch.keys)
        assert 4 * per_sequence * len(batch.numbers) <= JOB_BYTES


def test_few_of_a_shape_and_wide_ones_go_alone():
    problem, _ = packed([(5, 5)] * 7 + [(30, 30)] * 9)
    together, alone = split(problem)
    assert [len(batch.numbers) for batch in together] == [2, 2, 2, 2, 1]
    assert alone.tolist() == [True] * 7 + [False] * 9
    problem, _ = packed([(30, 30)] * 9, heads=(64, 64), widths=(128, 128))
    assert not split(problem)[0]


def test_should_stop_ends_a_call_between_batches():
    problem, tensors = packed([(5, 5)] * 2000)
    calls = []

    def stop():
        calls.append(None)
        return len(calls) > 3

    with pytest.raises(errors.Cancelled):
        dqkv_kernels.attention_backward(problem, tensors, should_stop=stop)
    assert len(calls) == 4


def test_what_a_sequence_gets_depends_on_no_company():
    problem, tensors = packed([(6, 8)] * 20, options=Options(window=Window(right=0)))
    found = backward(problem, tensors)
    half = {
        role: tensor[:, :60] if role == "softmax_lse" else tensor[: 80 if role in "kv" else 60]
        for role, tensor in tensors.items()
    }
    lengths = [replace(side, cu_seqlens=side.cu_seqlens[:11]) for side in (problem.queries, problem.keys)]
    specs = {role: Tensor.dense(DType.FP32, tuple(tensor.shape), None) for role, tensor in half.items()}
    fewer = backward(replace(problem, **specs, queries=lengths[0], keys=lengths[1]), half)
    torch.testing.assert_close(fewer.dq, found.dq[:60], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fewer.dk, found.dk[:80], rtol=1e-6, atol=1e-6)
