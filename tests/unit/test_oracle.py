"""The oracle agrees with automatic differentiation and finite differences, and its judge lets nothing wrong pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from oracle.big import big_fill, big_forward, big_rows, big_samples, shrink
from oracle.budget import (
    FROBENIUS_SEQLEN,
    bitwise_complaints,
    emulate,
    error_budget,
    frobenius_complaints,
    judge,
    reference,
)
from oracle.case import AS_IS, VARIANTS, variants, with_dtype
from oracle.cases import (
    ALL_CASES,
    ANSWERED_CASES,
    BIG_CASES,
    BY_NAME,
    CASES,
    HEAD_DIM_CASES,
    REFUSED_CASES,
    RUNTIME_CASES,
    SINK_TOKEN_CASES,
)
from oracle.exact import F64, solve, solved
from oracle.geometry import geometry, request_shape, visible
from oracle.inputs import build_inputs
from oracle.selfcheck import (
    autograd_difference,
    differentiate,
    finite_difference_error,
    layout_complaints,
    solution_complaints,
)
from oracle.values import TORCH_DTYPES, Values, make_values

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANT = {variant.name: variant for variant in VARIANTS}
FINITE_DIFFERENCE_CASES = ("window_left_inclusive_tiny", "tiny_all_options", "sink_token_tiny")


@dataclass(kw_only=True)
class Gradients:
    dq: object
    dk: object
    dv: object
    dsink: object = None


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


EACH_WAY = pytest.mark.parametrize(
    ("case", "variant"),
    [(case, variant) for case in ANSWERED_CASES for variant in variants(case)],
    ids=lambda value: value.name,
)


def answer(case, solution, variant=AS_IS):
    """A solution in the shapes and dtypes that the request asks for."""
    dtype = TORCH_DTYPES[variant.answer_dtype(case)]
    given = {
        name: request_shape(case, getattr(solution, name), side).to(dtype)
        for name, side in (("dq", "q"), ("dk", "k"), ("dv", "k"))
    }
    sink = build_inputs(case, variant).sink
    if sink is not None:
        sink_dtype = dtype if variant.grad_dtype else sink.dtype
        given["dsink"] = solution.dsink.to(sink_dtype)
    return Gradients(**given)


def complaints_about(case, solution, variant=AS_IS):
    return judge(case, solved(variant.of(case)), answer(case, solution, variant), variant)


def test_tables_are_whole():
    assert (len(CASES), len(REFUSED_CASES), len(BIG_CASES), len(RUNTIME_CASES)) == (84, 8, 3, 10)
    assert len(ANSWERED_CASES) == 73 + len(SINK_TOKEN_CASES)
    assert len(BY_NAME) == len(ALL_CASES + HEAD_DIM_CASES)
    assert {case.head_dim for case in HEAD_DIM_CASES} == set(range(8, 257, 8))
    assert {case.head_dim_v for case in HEAD_DIM_CASES if case.head_dim_v != case.head_dim} == set(range(8, 257, 8))


@each(ANSWERED_CASES + HEAD_DIM_CASES)
def test_exact_answer_agrees_with_autograd(case):
    assert autograd_difference(case) < 1e-10
    assert solution_complaints(solved(case)) == []


@pytest.mark.parametrize("name", FINITE_DIFFERENCE_CASES)
def test_exact_answer_agrees_with_finite_differences(name):
    assert finite_difference_error(BY_NAME[name]) < 1e-6


@each(BIG_CASES)
def test_samples_of_a_big_case_agree_with_autograd_on_a_small_clone(case):
    small = shrink(case)
    shape = geometry(small)
    values = Values(
        q=big_rows(small, "q", range(shape.total_q)),
        k=big_rows(small, "k", range(shape.total_k)),
        v=big_rows(small, "v", range(shape.total_k)),
        dout=big_rows(small, "dout", range(shape.total_q)),
        dlse=None,
        sink=None,
    )
    auto = differentiate(small, values)
    picks = [0, 100, 200, 336] if case.big == "swa" else range(len(shape.sequences))
    samples = big_samples(small, picks)
    assert len(samples) == len(picks)
    for sample in samples:
        assert (sample.dq - auto.q[sample.q_rows]).abs().max() < 1e-10
        assert (sample.dk - auto.k[sample.k_rows]).abs().max() < 1e-10
        assert (sample.dv - auto.v[sample.k_rows]).abs().max() < 1e-10


@each(BIG_CASES)
def test_a_big_case_is_filled_and_attended_in_parts(case):
    small = shrink(case)
    shape = (small.batch_size, small.seqlen_q, small.num_heads_q)
    q = big_fill(small, "q", torch.empty(*shape, small.head_dim, dtype=torch.bfloat16))
    assert torch.equal(q.flatten(0, 1), big_rows(small, "q", range(shape[0] * shape[1])))
    sample = big_samples(small, [0])[0]
    k, v = big_rows(small, "k", sample.k_rows), big_rows(small, "v", sample.k_rows)
    half = len(sample.q_rows) // 2
    part = big_forward(small, big_rows(small, "q", sample.q_rows)[half:], k, v, first_query=half)
    assert (part.out - sample.out[half:]).abs().max() < 1e-4
    assert (part.softmax_lse - sample.softmax_lse[:, half:]).abs().max() < 1e-4


def test_the_same_case_is_solved_the_same_way_twice():
    case = BY_NAME["gqa_12_3_dv128"]
    first, second = solve(case, make_values(case)), solve(case, make_values(case))
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("dq", "dk", "dv"))


@each(ANSWERED_CASES)
def test_requests_hold_the_drawn_values_in_the_layouts_asked_for(case):
    assert layout_complaints(case, build_inputs(case)) == []


@EACH_WAY
def test_a_kernels_rounding_is_within_budget(case, variant):
    assert complaints_about(case, emulate(case, variant), variant) == []


@each(HEAD_DIM_CASES)
def test_a_kernels_rounding_is_within_budget_at_every_width(case):
    assert complaints_about(case, emulate(case)) == []


def test_delta_is_the_row_sum_of_dout_and_the_rounded_out():
    case = BY_NAME["varlen_rows_behind_last_offset"]
    given, asked = build_inputs(case), build_inputs(case, VARIANT["delta"])
    assert asked.out is None
    assert given.delta is None
    assert asked.delta.shape == given.softmax_lse.shape
    unused = solved(case).unused_q_rows
    want = (given.dout.float() * given.out.float()).sum(-1).T
    assert torch.equal(asked.delta[:, ~unused], want[:, ~unused])
    assert unused.any()
    assert asked.delta[:, unused].isnan().all()


def test_only_a_local_softmax_lse_may_be_absent():
    ring, local = BY_NAME["ring_block_0_of_4"], BY_NAME["noncausal_square_128"]
    assert [variant.name for variant in variants(ring)] == ["as_is", "delta", "grad_fp32", "fp32"]
    assert [variant.name for variant in variants(local)] == ["as_is", "delta", "no_lse", "grad_fp32", "fp32"]
    assert build_inputs(local, VARIANT["no_lse"]).softmax_lse is None
    assert build_inputs(local, VARIANT["no_lse"]).out is not None
    assert (ring.lse_scope, build_inputs(ring).lse_scope) == ("GLOBAL", "GLOBAL")


def test_another_dtype_draws_the_same():
    case = BY_NAME["sink_basic_h6"]
    wide = with_dtype(case, "fp32")
    assert torch.equal(make_values(wide).q.to(torch.bfloat16), make_values(case).q)
    assert (wide.sink, make_values(wide).sink.dtype) == ("fp32", torch.float32)


def test_tighter_dtypes_have_tighter_budgets():
    case = BY_NAME["noncausal_square_128"]
    as_is, unrounded, wide = (error_budget(case, VARIANT[name]) for name in ("as_is", "grad_fp32", "fp32"))
    assert all(wide[name] < unrounded[name] / 10 < as_is[name] / 10 for name in ("dq", "dk", "dv"))


def test_writing_to_a_request_leaves_the_next_one_alone():
    case = BY_NAME["sink_basic_h6"]
    for tensor in vars(build_inputs(case)).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(7)
    for name in ("q", "k", "v", "dout", "sink"):
        assert torch.equal(getattr(build_inputs(case), name).flatten(), getattr(make_values(case), name).flatten())


# ---- what the judge must not let pass
@each(SINK_TOKEN_CASES)
def test_forgotten_sink_tokens_are_found(case):
    forgotten = solve(replace(case, sink_token_length=0), make_values(case))
    assert complaints_about(case, forgotten)


@each([case for case in SINK_TOKEN_CASES if case.name not in ("sink_token_beyond_sequence",)])
def test_one_sink_token_less_is_found(case):
    fewer = solve(replace(case, sink_token_length=case.sink_token_length - 1), make_values(case))
    assert complaints_about(case, fewer)


def test_sink_tokens_ahead_of_the_right_bound_are_found():
    case = BY_NAME["sink_token_sq_gt_sk"]
    ahead = replace(solved(case), dq=solved(case).dq + solved(case).zero_q_rows[:, None, None] * 1e-30)
    assert any("nothing can flow" in text for text in complaints_about(case, ahead))


def test_a_window_one_key_off_is_found():
    case = BY_NAME["det_local_window"]
    for change in ({"window_left": case.window_left + 1}, {"window_right": case.window_right - 1}):
        assert complaints_about(case, solve(replace(case, **change), make_values(case)))


@pytest.mark.parametrize("name", ["grad_fp32", "fp32"])
def test_16_bit_rounding_is_found_where_fp32_was_asked_for(name):
    case, variant = BY_NAME["noncausal_square_128"], VARIANT[name]
    exact = solved(variant.of(case))
    rounded = replace(exact, dk=exact.dk.to(torch.bfloat16).to(F64))
    assert complaints_about(case, exact, variant) == []
    assert complaints_about(case, rounded, variant)


@pytest.mark.parametrize("name", ["noncausal_square_128", "gqa_12_3_dv128", "softcap10_causal", "sink_token_det"])
def test_10_bit_products_are_found_where_fp32_was_sent(name):
    case, variant = BY_NAME[name], VARIANT["fp32"]
    values = make_values(with_dtype(case, "fp32"))
    # The mantissa that matrix units keep of a float32 unless they are told not to.
    short = {
        role: ((getattr(values, role).view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        for role in ("q", "k", "v", "dout")
    }
    found = complaints_about(case, solve(with_dtype(case, "fp32"), replace(values, **short)), variant)
    assert [text.split(":")[0] for text in found] == ["dq", "dk", "dv"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda given: {"dk": None}, "dk: missing"),
        (lambda given: {"dsink": torch.zeros(2)}, "dsink: given, though there is no sink"),
        (lambda given: {"dq": given.dq[:, :-1]}, "dq: shape"),
        (lambda given: {"dq": given.dq.float()}, "dq: dtype"),
        (lambda given: {"dv": given.dv * float("nan")}, "not finite"),
        (lambda given: {"dv": given.dv.roll(1, dims=-2)}, "dv: error"),
    ],
    ids=["missing", "unasked", "shape", "dtype", "nan", "heads_swapped"],
)
def test_a_wrong_answer_is_found(change, complaint):
    case = BY_NAME["noncausal_square_128"]
    right = answer(case, solved(case))
    assert judge(case, solved(case), right) == []
    found = judge(case, solved(case), replace(right, **change(right)))
    assert any(complaint in text for text in found)


def test_a_missing_dsink_is_found():
    case = BY_NAME["sink_basic_h6"]
    right = answer(case, solved(case))
    assert judge(case, solved(case), right) == []
    assert judge(case, solved(case), replace(right, dsink=None)) == ["dsink: missing"]


def test_a_biased_answer_is_found():
    case = BY_NAME["ties_and_common_mean_bias"]
    exact = solved(case)
    step = error_budget(case)["dv"] / 2
    assert any("mean error" in text for text in complaints_about(case, replace(exact, dv=exact.dv + step)))


def test_gradients_may_be_numpy_arrays():
    case = BY_NAME["single_token_d16_fp16"]
    right = answer(case, solved(case))
    arrays = Gradients(dq=right.dq.numpy(), dk=right.dk.numpy(), dv=right.dv.numpy())
    assert judge(case, solved(case), arrays) == []
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = BY_NAME["noncausal_square_128"]
    right = answer(case, solved(case))
    arrays = Gradients(
        **{name: getattr(right, name).view(torch.int16).numpy().view(ml_dtypes.bfloat16) for name in ("dq", "dk", "dv")}
    )
    assert judge(case, solved(case), arrays) == []


def test_bits_that_differ_are_found_where_they_must_not():
    case, loose = BY_NAME["det_mha_s512"], BY_NAME["noncausal_square_128"]
    first = answer(case, solved(case))
    other = replace(first, dq=first.dq.clone())
    other.dq.view(torch.int16)[0, 0, 0, 0] ^= 1
    assert bitwise_complaints(case, [first, first, first]) == []
    assert bitwise_complaints(case, [first, first, other]) == ["dq: call 2 differs from call 0"]
    assert bitwise_complaints(BY_NAME["uniform_inputs_repeat"], [first, other]) == []
    assert bitwise_complaints(loose, [first, other]) == []


# ---- long sequences
LONG = replace(
    BY_NAME["noncausal_square_128"],
    name="long_causal",
    batch_size=1,
    seqlen_q=FROBENIUS_SEQLEN,
    seqlen_k=FROBENIUS_SEQLEN,
    head_dim=16,
    head_dim_v=16,
    causal=True,
)


def test_a_wrong_small_head_is_found_only_by_its_frobenius_error():
    torch.manual_seed(0)
    want = torch.randn(64, 2, 16, dtype=F64) * torch.tensor([1.0, 1e-4], dtype=F64)[None, :, None]
    emulated = want * (1 + 2.0**-9 * torch.randn_like(want))
    assert frobenius_complaints(want * (1 + 2.0**-9), want, emulated) == []
    dropped = emulated.clone()
    dropped[:, 1] = 0.0
    assert (dropped - want).abs().max() < 3 * (emulated - want).abs().max()
    assert [text.split(":")[0] for text in frobenius_complaints(dropped, want, emulated)] == ["head 1"]


def test_lost_accumulation_of_a_long_sequence_is_found():
    case = LONG
    assert complaints_about(case, emulate(case)) == []
    exact = solved(case)
    # Every value within two units in the last place: far inside the largest error that is allowed.
    jitter = 1 + 2.0**-8 * torch.randn(exact.dk.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = complaints_about(case, replace(exact, dk=exact.dk * jitter))
    assert found
    assert all("dk: head" in text and "Frobenius" in text for text in found)


def test_visible_keys_of_a_window_with_sink_tokens_by_hand():
    case = replace(BY_NAME["sink_token_tiny"], seqlen_q=4, seqlen_k=6)
    want = [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    assert np.array_equal(visible(4, 6, case.window).numpy().astype(int), want)


def test_a_reference_is_a_request_with_its_answer_and_budget():
    case = BY_NAME["gqa_12_3_dv128"]
    found = reference(case, VARIANT["fp32"])
    assert found.inputs.q.dtype == torch.float32
    assert found.exact is solved(with_dtype(case, "fp32"))
    assert set(found.budget) == {"dq", "dk", "dv"}
