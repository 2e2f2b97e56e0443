"""What problems cost: pairs against brute force, operations, and predictions that learn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dqkv.problem import Arch, Lengths, Options, Problem, Rows, Window
from dqkv.scheduler.cost import CostModel, Mask, Sample, Work, visible_pairs
from dqkv.tensor import DType, Tensor

FAR = 2**62 - 1

bounds = st.none() | st.integers(-14, 14) | st.sampled_from([-FAR, -(2**31), 2**31, FAR])
windows = st.builds(Window, left=bounds, right=bounds, sink_token_length=st.integers(0, 14) | st.just(FAR))
lengths = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=4)


def rows_of(pairs: list[tuple[int, int]]) -> Rows:
    q_len, k_len = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    return Rows(q_start=np.zeros_like(q_len), q_len=q_len, k_start=np.zeros_like(k_len), k_len=k_len)


def counted(seqlen_q: int, seqlen_k: int, window: Window) -> int:
    """Every pair looked at, in Python's integers."""
    pairs = 0
    for i in range(seqlen_q):
        middle = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            right = window.right is None or j <= middle + window.right
            left = window.left is None or j >= middle - window.left or j < window.sink_token_length
            pairs += right and left
    return pairs


def problem(
    seqlen_q: int = 8,
    seqlen_k: int = 8,
    *,
    num_heads: tuple[int, int] = (4, 2),
    head_dims: tuple[int, int] = (64, 64),
    dtype: DType = DType.BF16,
    with_lse: bool = True,
    seqused: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None),
    options: Options | None = None,
) -> Problem[None]:
    def rows(seqlen: int, heads: int, width: int) -> Tensor[None]:
        return Tensor.dense(dtype, (2, seqlen, heads, width), None)

    statistics = Tensor.dense(DType.FP32, (2, num_heads[0], seqlen_q), None)
    return Problem(
        q=rows(seqlen_q, num_heads[0], head_dims[0]),
        k=rows(seqlen_k, num_heads[1], head_dims[0]),
        v=rows(seqlen_k, num_heads[1], head_dims[1]),
        dout=rows(seqlen_q, num_heads[0], head_dims[1]),
        delta=statistics,
        softmax_lse=statistics if with_lse else None,
        queries=Lengths(seqused=seqused[0]),
        keys=Lengths(seqused=seqused[1]),
        options=options or Options(),
    )


def packed(lengths: list[tuple[int, int]], window: Window, *, with_sink: bool = False) -> Problem[None]:
    """A problem of packed sequences whose (seqlen_q, seqlen_k) are given."""
    offsets = [tuple(np.cumsum([0, *(pair[side] for pair in lengths)]).tolist()) for side in (0, 1)]
    queries, keys = (Tensor.dense(DType.BF16, (rows[-1], 2, 64), None) for rows in offsets)
    statistics = Tensor.dense(DType.FP32, (2, offsets[0][-1]), None)
    return Problem(
        q=queries,
        k=keys,
        v=keys,
        dout=queries,
        delta=statistics,
        softmax_lse=statistics,
        sink=Tensor.dense(DType.FP32, (2,), None) if with_sink else None,
        queries=Lengths(cu_seqlens=offsets[0]),
        keys=Lengths(cu_seqlens=offsets[1]),
        options=Options(window=window),
    )


@given(lengths, windows)
@settings(max_examples=600, deadline=None)
def test_pairs_are_those_that_brute_force_counts(pairs: list[tuple[int, int]], window: Window) -> None:
    assert visible_pairs(rows_of(pairs), window) == sum(counted(*pair, window) for pair in pairs)


@pytest.mark.parametrize(
    ("window", "want"),
    [
        (Window(), (2**31 - 1) ** 2),
        (Window(right=0), (2**31 - 1) * 2**31 // 2),
        (Window(left=FAR, right=FAR, sink_token_length=FAR), (2**31 - 1) ** 2),
        (Window(left=-FAR, right=FAR, sink_token_length=0), 0),
        (Window(left=0, right=0), 2**31 - 1),
    ],
)
def test_the_longest_sequences_do_not_overflow(window: Window, want: int) -> None:
    assert visible_pairs(rows_of([(2**31 - 1, 2**31 - 1)]), window) == want


def test_a_hundred_thousand_sequences_are_counted_exactly() -> None:
    generator = np.random.default_rng(5)
    q_len, k_len = generator.integers(0, 300, (2, 100_000))
    rows = Rows(q_start=q_len * 0, q_len=q_len, k_start=k_len * 0, k_len=k_len)
    # Bottom-right causal: row i sees i + 1 + k_len - q_len keys, where that is above 0.
    want = 0
    for queries, keys in zip(q_len.tolist(), k_len.tolist(), strict=True):
        seen = min(queries, keys)
        want += seen * keys - seen * (seen - 1) // 2
    assert visible_pairs(rows, Window(right=0)) == want


def test_pairs_count_heads_and_only_used_rows() -> None:
    given_problem = problem(8, 8, num_heads=(4, 2), seqused=((8, 3), (5, 0)))
    assert Work.of(given_problem).pairs == 4 * (8 * 5 + 3 * 0)


def test_flops_are_those_of_the_five_products_and_of_the_recomputed_statistics() -> None:
    given_problem = problem(8, 8, head_dims=(128, 64))
    pairs = 2 * 4 * 8 * 8
    assert Work.of(given_problem).flops == 2 * pairs * (3 * 128 + 2 * 64)
    without_lse = Work.of(problem(8, 8, head_dims=(128, 64), with_lse=False))
    assert without_lse.flops == 2 * pairs * (3 * 128 + 2 * 64) + 2 * pairs * 128


def test_bytes_are_those_of_inputs_and_of_gradients_in_their_dtype() -> None:
    work = Work.of(problem(8, 16, options=Options(grad_dtype=DType.FP32)))
    q, kv, statistics = 2 * 8 * 4 * 64, 2 * 16 * 2 * 64, 2 * 4 * 8
    assert work.input_nbytes == 2 * (2 * q + 2 * kv) + 4 * 2 * statistics
    assert work.gradient_nbytes == 4 * (q + 2 * kv)


@pytest.mark.parametrize(
    ("window", "mask"),
    [
        (Window(), Mask.FULL),
        (Window(right=0), Mask.CAUSAL),
        (Window(right=5), Mask.CAUSAL),
        (Window(left=5), Mask.WINDOW),
        (Window(left=0, right=0), Mask.WINDOW),
    ],
)
def test_masks_are_sorted_by_the_tiles_they_leave(window: Window, mask: Mask) -> None:
    assert Mask.of(window) is mask


@pytest.mark.parametrize(("head_dims", "bucket"), [((8, 8), 64), ((64, 72), 128), ((136, 8), 256), ((256, 256), 256)])
def test_the_wider_head_dim_names_the_bucket(head_dims: tuple[int, int], bucket: int) -> None:
    assert Work.of(problem(head_dims=head_dims)).head_dim == bucket


def long_work(seqlen: int = 4096, **changes: object) -> Work:
    return Work.of(problem(seqlen, seqlen, **changes))  # type: ignore[arg-type]


def fitted() -> CostModel:
    model = CostModel()
    fit(model, long_work(), 5e10)
    return model


def fit(model: CostModel, work: Work, rate: float, *, sequence_s: float = 0.0) -> None:
    empty = Work.of(problem(0, 0))
    short = replace(empty, sequences=2)
    model.fit(
        Sample(arch=Arch.CPU, work=empty, seconds=0.002),
        Sample(arch=Arch.CPU, work=short, seconds=0.002 + short.sequences * sequence_s),
        [Sample(arch=Arch.CPU, work=work, seconds=0.002 + work.flops / rate)],
    )


def test_a_fitted_model_predicts_what_it_was_fitted_to() -> None:
    work = long_work()
    assert fitted().predict(Arch.CPU, work) == pytest.approx(0.002 + work.flops / 5e10)
    assert fitted().predict(Arch.CPU, Work.of(problem(0, 8))) == pytest.approx(0.002)


def test_a_kind_never_measured_takes_the_rate_of_the_most_alike_one() -> None:
    model, wide = fitted(), long_work(head_dims=(256, 256), dtype=DType.FP32)
    assert model.predict(Arch.CPU, wide) == pytest.approx(0.002 + wide.flops / 5e10)
    fit(model, long_work(dtype=DType.FP32), 1e10)
    assert model.predict(Arch.CPU, wide) == pytest.approx(0.002 + wide.flops / 1e10)


def test_predictions_converge_on_what_is_measured_and_leave_other_kinds_alone() -> None:
    model, work = fitted(), long_work()
    causal = long_work(options=Options(window=Window(right=0)))
    before = model.predict(Arch.CPU, causal)
    for _ in range(60):
        model.observe(Sample(arch=Arch.CPU, work=causal, seconds=3 * before))
    assert model.predict(Arch.CPU, causal) == pytest.approx(3 * before, rel=0.01)
    assert model.predict(Arch.CPU, work) == pytest.approx(0.002 + work.flops / 5e10)


def test_short_requests_correct_the_launch_and_not_the_rate() -> None:
    model, work, short = fitted(), long_work(), Work.of(problem(8, 8))
    for _ in range(60):
        model.observe(Sample(arch=Arch.CPU, work=short, seconds=0.010))
    assert model.predict(Arch.CPU, short) == pytest.approx(0.010, rel=0.02)
    assert model.predict(Arch.CPU, work) == pytest.approx(0.010 + work.flops / 5e10, rel=0.02)


def test_sequences_cost_even_where_they_hold_next_to_nothing() -> None:
    model, empty = CostModel(), Work.of(problem(0, 0))
    fit(model, long_work(), 5e10, sequence_s=1e-3)
    many = replace(empty, sequences=100_000)
    assert model.predict(Arch.CPU, many) == pytest.approx(100.002)
    for _ in range(60):
        model.observe(Sample(arch=Arch.CPU, work=many, seconds=10.0))
    assert model.predict(Arch.CPU, many) == pytest.approx(10.0, rel=0.01)
    one = replace(empty, sequences=1)
    assert model.predict(Arch.CPU, one) == pytest.approx(0.002, rel=0.1)


@pytest.mark.parametrize(
    ("lengths", "window", "want"),
    [
        ([(0, 0)] * 1000 + [(4, 4)], Window(), 1),
        ([(3, 0), (0, 3), (3, 2)], Window(left=-5), 0),
        ([(3, 2)] * 5, Window(right=-3), 0),
        ([(3, 2)] * 5, Window(right=0), 5),
    ],
)
def test_sequences_that_see_nothing_cost_nothing(lengths: list[tuple[int, int]], window: Window, want: int) -> None:
    assert Work.of(packed(lengths, window)).sequences == want


def test_a_sink_makes_every_row_count() -> None:
    assert Work.of(packed([(3, 0), (0, 3), (3, 2)], Window(left=-5), with_sink=True)).sequences == 2


def test_short_sequences_cost_more_the_more_heads_they_have() -> None:
    model, empty = CostModel(), Work.of(problem(0, 0, num_heads=(1, 1)))
    fit(model, long_work(num_heads=(1, 1)), 5e10, sequence_s=1e-3)
    few, many = (replace(empty, sequences=10_000, heads=heads) for heads in (1, 512))
    assert model.predict(Arch.CPU, many) > 5 * model.predict(Arch.CPU, few)


def test_one_hiccup_does_not_undo_what_was_learnt() -> None:
    model, work = fitted(), long_work()
    before = model.predict(Arch.CPU, work)
    model.observe(Sample(arch=Arch.CPU, work=work, seconds=1e6))
    assert before < model.predict(Arch.CPU, work) < 2 * before
    model.observe(Sample(arch=Arch.CPU, work=work, seconds=0.0))
    assert math.isfinite(model.predict(Arch.CPU, work))


def test_a_device_that_was_never_measured_still_predicts() -> None:
    assert CostModel().predict(Arch.CPU, long_work()) > 0
