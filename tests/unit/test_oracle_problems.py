"""Every case becomes a problem or is refused for its reason, and every refusal of the table is the error it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle.case import VARIANTS, variants
from oracle.cases import ANSWERED_CASES, BY_NAME, HEAD_DIM_CASES, REFUSED_CASES
from oracle.inputs import build_inputs
from oracle.problems import as_given, inline, streamed, to_problem, unchecked_problem
from oracle.refusals import REASONS, REFUSALS

from dqkv import errors
from dqkv.codec import decode_problem, encode_problem
from dqkv.problem import Arch, LseScope
from dqkv.tensor import DType

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANT = {variant.name: variant for variant in VARIANTS}


def each(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@each(ANSWERED_CASES + HEAD_DIM_CASES)
def test_an_answerable_case_is_a_problem_in_every_variant(row):
    for variant in variants(row):
        inputs = build_inputs(row, variant)
        problem = to_problem(inputs, as_given)
        assert problem.q.strides == inputs.q.stride()
        assert set(problem.tensors) >= {"q", "k", "v", "dout"}
        assert problem.gradients["dq"].dtype == variant.answer_dtype(row)
        assert problem.shape.batch_size == row.batch_size


@each(REFUSED_CASES)
def test_a_refused_case_names_field_and_reason(row):
    with pytest.raises(errors.InvalidRequest) as caught:
        to_problem(build_inputs(row), as_given)
    assert (caught.value.field, caught.value.reason) == REASONS[row.name]


def test_every_refused_case_has_a_reason():
    assert set(REASONS) == {case.name for case in REFUSED_CASES}
    assert len({refusal.name for refusal in REFUSALS}) == len(REFUSALS)
    assert {refusal.reason for refusal in REFUSALS} <= set(errors.table())


@each(REFUSALS)
def test_a_refusal_is_of_its_change_alone(row):
    assert to_problem(build_inputs(BY_NAME[row.base]), as_given).q.shape


@each([refusal for refusal in REFUSALS if refusal.found_by == "problem"])
def test_a_refused_problem_names_field_and_reason(row):
    with pytest.raises(errors.InvalidRequest) as caught:
        to_problem(row.inputs(), as_given)
    assert (caught.value.field, caught.value.reason) == (row.field, row.reason)


@each([refusal for refusal in REFUSALS if refusal.found_by == "server"])
def test_what_only_a_server_refuses_is_a_problem(row):
    assert to_problem(row.inputs(), as_given).options.arch is not Arch.AUTO


@each([refusal for refusal in REFUSALS if refusal.found_by == "problem" and refusal.travels != "never"])
def test_the_far_side_of_the_wire_refuses_for_the_same_reason(row):
    unchecked = unchecked_problem(row.inputs(), inline if row.travels == "inline" else streamed)
    message = encode_problem(unchecked)
    with pytest.raises(errors.InvalidRequest) as caught:
        decode_problem(message)
    assert (caught.value.field, caught.value.reason) == (row.field, row.reason)


def test_options_reach_the_problem():
    inputs = replace(build_inputs(BY_NAME["ring_block_0_of_4"], VARIANT["grad_fp32"]), arch="cpu")
    options = to_problem(inputs, as_given).options
    assert (options.lse_scope, options.grad_dtype, options.arch) == (LseScope.GLOBAL, DType.FP32, Arch.CPU)
    window = to_problem(build_inputs(BY_NAME["sink_token_det"]), as_given).options.window
    assert (window.left, window.right, window.sink_token_length) == (40, 8, 7)
    window = to_problem(build_inputs(BY_NAME["causal_with_right_window"]), as_given).options.window
    assert (window.left, window.right) == (30, 0)
    assert to_problem(build_inputs(BY_NAME["scale_negative"]), as_given).softmax_scale == -0.125


def test_inline_bytes_are_dense_whatever_the_strides():
    inputs = build_inputs(BY_NAME["dO_slice_of_cat"])
    assert not inputs.dout.is_contiguous()
    tensor = inline(inputs.dout)
    assert tensor.is_dense
    assert len(tensor.data.view) == tensor.nbytes
    back = torch.frombuffer(bytearray(tensor.data.view), dtype=torch.bfloat16).reshape(tensor.shape)
    assert torch.equal(back, inputs.dout)
