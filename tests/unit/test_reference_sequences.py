"""What sees nothing costs the CPU backend next to nothing, and changes no bit of what sees something."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import dqkv_kernels
from dqkv import errors
from dqkv.problem import Lengths, Options, Problem, Window
from dqkv.tensor import DType, Tensor
from dqkv_kernels import reference
from dqkv_kernels.places import chains, live_sequences
from dqkv_kernels.workers import Crew

ROLES = ("dq", "dk", "dv")


def offsets(lengths):
    return (0, *np.cumsum(lengths).tolist())


def packed(q_lens, k_lens=None, *, heads=(4, 2), head_dim=16, window=None, sink=False, dlse=False, delta=False):
    """A problem of packed sequences with random tensors, and these."""
    k_lens = q_lens if k_lens is None else k_lens
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    q_rows, k_rows = sum(q_lens), sum(k_lens)
    tensors = {role: random(q_rows, heads[0], head_dim) for role in ("q", "dout")}
    tensors |= {role: random(k_rows, heads[1], head_dim) for role in ("k", "v")}
    tensors["softmax_lse"] = random(heads[0], q_rows) + 3
    tensors["delta" if delta else "out"] = random(heads[0], q_rows) if delta else random(q_rows, heads[0], head_dim)
    if sink:
        tensors["sink"] = random(heads[0])
    if dlse:
        tensors["dlse"] = random(heads[0], q_rows)
    problem = Problem(
        **{role: Tensor.dense(DType.FP32, tuple(tensor.shape), None) for role, tensor in tensors.items()},
        queries=Lengths(cu_seqlens=offsets(q_lens)),
        keys=Lengths(cu_seqlens=offsets(k_lens)),
        options=Options(window=window or Window()),
    )
    return problem, tensors


def nans(problem):
    return {role: torch.full(spec.shape, torch.nan) for role, spec in problem.gradients.items()}


def places_of(problem):
    return [place for chain in chains(problem, live_sequences(problem)) for place in chain.places]


NOTHING_SEEN = [
    ([0] * 300, [0] * 300, None),
    ([3] * 300, [0] * 300, None),
    ([0] * 300, [3] * 300, None),
    ([3] * 300, [2] * 300, Window(left=-5)),
    ([3] * 300, [2] * 300, Window(right=-3)),
    ([0, 4, 0, 2] * 75, [5, 0, 0, 1] * 75, Window(left=-1, right=-1)),
]


@pytest.mark.parametrize(("q_lens", "k_lens", "window"), NOTHING_SEEN)
@pytest.mark.parametrize("heads", [(1, 1), (64, 4)])
def test_sequences_that_see_nothing_are_zeroed_without_a_place(q_lens, k_lens, window, heads):
    problem, tensors = packed(q_lens, k_lens, window=window, heads=heads)
    assert places_of(problem) == []
    found = dqkv_kernels.attention_backward(problem, tensors, nans(problem))
    assert all(not getattr(found, role).any() for role in ROLES)
    assert found.report.kernel == "cpu/none"
    assert dqkv_kernels.softmax_statistics(problem, tensors).isneginf().all()


@pytest.mark.parametrize("gaps", [0, 10**6])
@pytest.mark.parametrize("empty", [(0, 0), (2, 0), (0, 3)])
def test_they_change_no_bit_of_the_others(gaps, empty, monkeypatch):
    monkeypatch.setattr(reference, "GAPS_MOST", gaps)
    lone, tensors = packed([40, 9], [40, 17])
    want = dqkv_kernels.attention_backward(lone, tensors)
    q_lens, k_lens = ([40, *[length] * 50, other, *[length] * 50] for length, other in zip(empty, (9, 17), strict=True))
    problem, more = packed(q_lens, k_lens)
    q_own, k_own = ([*range(40), *range(40 + 50 * n, 40 + 50 * n + m)] for n, m in zip(empty, (9, 17), strict=True))
    for role, tensor in tensors.items():
        rows = k_own if role in "kv" else q_own
        if role == "softmax_lse":
            more[role][:, rows] = tensor
        else:
            more[role][rows] = tensor
    found = dqkv_kernels.attention_backward(problem, more, nans(problem))
    for role, rows in (("dq", q_own), ("dk", k_own), ("dv", k_own)):
        gradient = getattr(found, role)
        assert torch.equal(gradient[rows], getattr(want, role))
        gradient[rows] = 0
        assert not gradient.any()


def test_dense_rows_that_nobody_uses_are_zeroed_in_few_or_many_pieces(monkeypatch):
    tensors = {role: torch.randn(6, 5, 2, 16) for role in ("q", "k", "v", "dout", "out")}
    tensors["softmax_lse"] = torch.randn(6, 2, 5) + 3
    problem = Problem(
        **{role: Tensor.dense(DType.FP32, tuple(tensor.shape), None) for role, tensor in tensors.items()},
        queries=Lengths(seqused=(5, 0, 2, 3, 0, 1)),
        keys=Lengths(seqused=(4, 5, 0, 3, 0, 5)),
    )
    answers = []
    for most in (0, 1000):
        monkeypatch.setattr(reference, "GAPS_MOST", most)
        answers.append(dqkv_kernels.attention_backward(problem, tensors, nans(problem)))
    for role, used in (("dq", (5, 0, 0, 3, 0, 1)), ("dk", (4, 0, 0, 3, 0, 5)), ("dv", (4, 0, 0, 3, 0, 5))):
        assert torch.equal(getattr(answers[0], role), getattr(answers[1], role))
        for index, length in enumerate(used):
            assert getattr(answers[0], role)[index, :length].abs().sum(-1).bool().all()
            assert not getattr(answers[0], role)[index, length:].any()


def test_rows_without_keys_feed_the_sink_and_nothing_else():
    problem, tensors = packed([3] * 200, [0] * 200, sink=True, dlse=True)
    found = dqkv_kernels.attention_backward(problem, tensors, nans(problem))
    delta = (tensors["dout"].double() * tensors["out"].double()).sum(-1).T
    weight = (tensors["sink"].double()[:, None] - tensors["softmax_lse"].double()).exp()
    torch.testing.assert_close(found.dsink.double(), (weight * (tensors["dlse"] - delta)).sum(-1), rtol=1e-5, atol=1e-5)
    assert not found.dq.any()
    del tensors["softmax_lse"]
    absent = problem.__class__(
        **{name: None if name == "softmax_lse" else getattr(problem, name) for name in problem.__dataclass_fields__}
    )
    statistics = dqkv_kernels.softmax_statistics(absent, tensors)
    assert torch.equal(statistics, tensors["sink"][:, None].expand_as(statistics))


def test_short_sequences_join_their_heads():
    problem, _ = packed([2] * 50, heads=(256, 8), head_dim=64)
    assert len(places_of(problem)) == 50
    problem, _ = packed([1500] * 3, heads=(64, 8), head_dim=64)
    assert len(places_of(problem)) > 3


@pytest.mark.parametrize("threads", [1, 3])
def test_no_job_is_made_before_a_thread_is_free_for_it(threads):
    made, done = [], []

    def jobs():
        for number in range(1000):
            made.append(number)
            yield lambda crew: done.append(None)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(errors.Cancelled):
            Crew(lambda: len(done) >= 5).run(jobs(), torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    assert len(made) <= 5 + 3 * threads


def test_ten_million_heads_of_empty_sequences_take_no_time():
    problem, tensors = packed([1, *[0] * 20_000], heads=(512, 1), head_dim=8)
    begin = time.process_time()
    dqkv_kernels.attention_backward(problem, tensors)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("role", ["q", "dout", "out", "delta", "dlse"])
def test_what_rows_without_keys_hold_changes_no_bit_of_the_others(garbage, role):
    delta = role == "delta"
    problem, tensors = packed([60], [40], window=Window(right=0), delta=delta, dlse=role == "dlse")
    tensors["softmax_lse"][:, :20] = -torch.inf
    want = dqkv_kernels.attention_backward(problem, tensors)
    rows = tensors[role].T if role in ("delta", "dlse") else tensors[role]
    rows[:20] = garbage
    found = dqkv_kernels.attention_backward(problem, tensors)
    assert found.report.kernel == want.report.kernel == "cpu/flash-fp32"
    assert all(torch.equal(getattr(found, answer), getattr(want, answer)) for answer in ROLES)
