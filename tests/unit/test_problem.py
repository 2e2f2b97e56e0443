"""The vocabulary checks itself: sizes follow from the tensors, and what does not fit is refused by field."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dqkv import errors
from dqkv.problem import FLOAT32_MAX, SOFTCAP_MIN, Arch, Lengths, LseScope, Options, Problem, Window
from dqkv.tensor import DType, Tensor, dense_strides

pytestmark = pytest.mark.numpy_only


def tensor(*shape, dtype=DType.BF16):
    return Tensor.dense(dtype, shape, None)


def problem(**changes):
    fields = {
        "q": tensor(2, 5, 4, 16),
        "k": tensor(2, 7, 2, 16),
        "v": tensor(2, 7, 2, 24),
        "dout": tensor(2, 5, 4, 24),
        "out": tensor(2, 5, 4, 24),
        "softmax_lse": tensor(2, 4, 5, dtype=DType.FP32),
    }
    return Problem(**{**fields, **changes})


def packed(**changes):
    fields = {
        "q": tensor(12, 4, 16),
        "k": tensor(9, 2, 16),
        "v": tensor(9, 2, 16),
        "dout": tensor(12, 4, 16),
        "delta": tensor(4, 12, dtype=DType.FP32),
        "queries": Lengths(cu_seqlens=(0, 5, 5, 10)),
        "keys": Lengths(cu_seqlens=(0, 0, 4, 9)),
    }
    return Problem(**{**fields, **changes})


def test_sizes_of_a_dense_problem():
    shape = problem().shape
    assert (shape.batch_size, shape.seqlen_q, shape.seqlen_k, shape.rows_q, shape.rows_k) == (2, 5, 7, 10, 14)
    assert (shape.num_heads_q, shape.num_heads_kv, shape.group_size) == (4, 2, 2)
    assert (shape.head_dim, shape.head_dim_v) == (16, 24)


def test_rows_of_a_packed_problem_with_seqused():
    value = packed(queries=Lengths(cu_seqlens=(0, 5, 5, 10), seqused=(3, 0, 5)))
    assert list(value.rows) == [(0, 3, 0, 0), (5, 0, 0, 4), (5, 5, 4, 5)]
    assert value.shape.seqlen_q == 5


def test_rows_with_one_side_packed():
    value = problem(
        q=tensor(11, 4, 16),
        dout=tensor(11, 4, 24),
        out=tensor(11, 4, 24),
        softmax_lse=tensor(4, 11, dtype=DType.FP32),
        queries=Lengths(cu_seqlens=(0, 4, 10)),
        keys=Lengths(seqused=(7, 0)),
    )
    assert list(value.rows) == [(0, 4, 0, 7), (4, 6, 7, 0)]


def test_scale_defaults_to_the_root_of_head_dim():
    assert problem().softmax_scale == 0.25
    assert problem(options=Options(softmax_scale=0.0)).softmax_scale == 0.0
    assert problem(options=Options(softmax_scale=-3.5)).softmax_scale == -3.5


def test_gradients_have_the_shapes_of_their_inputs():
    value = problem(sink=tensor(4, dtype=DType.FP32))
    assert {role: (item.dtype, item.shape) for role, item in value.gradients.items()} == {
        "dq": (DType.BF16, (2, 5, 4, 16)),
        "dk": (DType.BF16, (2, 7, 2, 16)),
        "dv": (DType.BF16, (2, 7, 2, 24)),
        "dsink": (DType.FP32, (4,)),
    }
    wide = problem(options=Options(grad_dtype=DType.FP32)).gradients
    assert {item.dtype for item in wide.values()} == {DType.FP32}


def test_empty_problems_are_problems():
    assert list(problem(q=tensor(0, 5, 4, 16), k=tensor(0, 7, 2, 16), v=tensor(0, 7, 2, 24), dout=tensor(0, 5, 4, 24),
                        out=tensor(0, 5, 4, 24), softmax_lse=None).rows) == []  # fmt: skip
    assert problem(k=tensor(2, 0, 2, 16), v=tensor(2, 0, 2, 24)).shape.seqlen_k == 0


FIVE = tensor(2, 5, 4, 16, 1)
REFUSED = {
    "k of another dtype": ({"k": tensor(2, 7, 2, 16, dtype=DType.FP16)}, errors.DTypeMismatch, "k"),
    "dout of another dtype": ({"dout": tensor(2, 5, 4, 24, dtype=DType.FP32)}, errors.DTypeMismatch, "dout"),
    "softmax_lse in 16 bit": ({"softmax_lse": tensor(2, 4, 5)}, errors.DTypeMismatch, "softmax_lse"),
    "fp16 gradients of bf16": ({"options": Options(grad_dtype=DType.FP16)}, errors.DTypeMismatch, "grad_dtype"),
    "q with five dimensions": ({"q": FIVE}, errors.ShapeMismatch, "q"),
    "head_dim 20": ({"q": tensor(2, 5, 4, 20), "k": tensor(2, 7, 2, 20)}, errors.HeadDimUnsupported, "q"),
    "head_dim 264": ({"q": tensor(2, 5, 4, 264), "k": tensor(2, 7, 2, 264)}, errors.HeadDimUnsupported, "q"),
    "head_dim_v 0": ({"v": tensor(2, 7, 2, 0)}, errors.HeadDimUnsupported, "v"),
    "3 key heads for 4": ({"k": tensor(2, 7, 3, 16), "v": tensor(2, 7, 3, 24)}, errors.HeadsNotDivisible, "q"),
    "no key heads": ({"k": tensor(2, 7, 0, 16), "v": tensor(2, 7, 0, 24)}, errors.HeadsNotDivisible, "q"),
    "k of another width": ({"k": tensor(2, 7, 2, 24)}, errors.ShapeMismatch, "k"),
    "v of other heads": ({"v": tensor(2, 7, 4, 24)}, errors.ShapeMismatch, "v"),
    "k of another batch": ({"k": tensor(3, 7, 2, 16), "v": tensor(3, 7, 2, 24)}, errors.ShapeMismatch, "k"),
    "dout of another length": ({"dout": tensor(2, 6, 4, 24)}, errors.ShapeMismatch, "dout"),
    "out of q's width": ({"out": tensor(2, 5, 4, 16)}, errors.ShapeMismatch, "out"),
    "softmax_lse transposed": ({"softmax_lse": tensor(2, 5, 4, dtype=DType.FP32)}, errors.ShapeMismatch, "softmax_lse"),
    "dlse of q's shape": ({"dlse": tensor(2, 5, 4, 16, dtype=DType.FP32)}, errors.ShapeMismatch, "dlse"),
    "sink a key head": ({"sink": tensor(2)}, errors.ShapeMismatch, "sink"),
    "out and delta": ({"delta": tensor(2, 4, 5, dtype=DType.FP32)}, errors.OutOrDelta, "out"),
    "neither out nor delta": ({"out": None}, errors.OutOrDelta, "out"),
    "global without softmax_lse": (
        {"softmax_lse": None, "options": Options(lse_scope=LseScope.GLOBAL)}, errors.LseScopeInvalid, "softmax_lse",
    ),
    "seqused beyond the rows": ({"keys": Lengths(seqused=(7, 8))}, errors.SequsedInvalid, "seqused_k"),
    "seqused negative": ({"queries": Lengths(seqused=(-1, 5))}, errors.SequsedInvalid, "seqused_q"),
    "seqused of one sequence": ({"queries": Lengths(seqused=(5,))}, errors.SequsedInvalid, "seqused_q"),
    "max_seqlen below a dense side's": ({"keys": Lengths(max_seqlen=6)}, errors.MaxSeqlenTooSmall, "max_seqlen_k"),
    "max_seqlen beyond int32": ({"queries": Lengths(max_seqlen=2**31)}, errors.OptionInvalid, "max_seqlen_q"),
    "max_seqlen beyond int64": ({"keys": Lengths(max_seqlen=2**80)}, errors.OptionInvalid, "max_seqlen_k"),
    "seqused beyond int64": ({"keys": Lengths(seqused=(7, 2**80))}, errors.SequsedInvalid, "seqused_k"),
    "more rows than offsets count": (
        {name: tensor(2**16, 2**16, 4, width) for name, width in (("q", 16), ("dout", 24), ("out", 24))}
        | {"softmax_lse": None, "k": tensor(2**16, 7, 2, 16), "v": tensor(2**16, 7, 2, 24)}, errors.SizeOverflow, "q",
    ),
}  # fmt: skip
PACKED_REFUSED = {
    "offsets that decrease": ({"keys": Lengths(cu_seqlens=(0, 6, 4, 9))}, errors.OffsetsInvalid, "cu_seqlens_k"),
    "offsets that leave the tensor": (
        {"keys": Lengths(cu_seqlens=(0, 0, 4, 10))}, errors.OffsetsInvalid, "cu_seqlens_k",
    ),
    "offsets that start at 1": ({"queries": Lengths(cu_seqlens=(1, 5, 5, 10))}, errors.OffsetsInvalid, "cu_seqlens_q"),
    "offsets below 0": ({"queries": Lengths(cu_seqlens=(0, -5, 5, 10))}, errors.OffsetsInvalid, "cu_seqlens_q"),
    "offsets beyond int32": ({"keys": Lengths(cu_seqlens=(0, 0, 4, 2**31))}, errors.OffsetsInvalid, "cu_seqlens_k"),
    "offsets beyond int64": ({"keys": Lengths(cu_seqlens=(0, 0, 4, 2**80))}, errors.OffsetsInvalid, "cu_seqlens_k"),
    "offsets below int64": ({"queries": Lengths(cu_seqlens=(0, -(2**80)))}, errors.OffsetsInvalid, "cu_seqlens_q"),
    "one offset too many": ({"keys": Lengths(cu_seqlens=(0, 0, 4, 4, 9))}, errors.OffsetsInvalid, "cu_seqlens_k"),
    "no offsets": ({"keys": Lengths(cu_seqlens=())}, errors.OffsetsInvalid, "cu_seqlens_k"),
    "max_seqlen below the longest": (
        {"keys": Lengths(cu_seqlens=(0, 0, 4, 9), max_seqlen=4)}, errors.MaxSeqlenTooSmall, "max_seqlen_k",
    ),
    "dense delta": ({"delta": tensor(1, 4, 12, dtype=DType.FP32)}, errors.ShapeMismatch, "delta"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "row"), [
    *(pytest.param(problem, row, id=name) for name, row in REFUSED.items()),
    *(pytest.param(packed, row, id=name) for name, row in PACKED_REFUSED.items()),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_field(build, row):
    changes, kind, field = row
    with pytest.raises(kind) as caught:
        build(**changes)
    assert caught.value.field == field
    assert caught.value.status is errors.INVALID_ARGUMENT


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.5e38])
def test_a_scale_that_is_no_finite_float32_is_refused(value):
    with pytest.raises(errors.OptionInvalid, match="softmax_scale"):
        Options(softmax_scale=value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e39, 5e-324, 1e-50, 1e-46, 1e-38, 9e-31])
def test_a_softcap_that_means_nothing_or_leaves_float32_is_refused(value):
    with pytest.raises(errors.OptionInvalid) as caught:
        Options(softcap=value)
    assert caught.value.field == "softcap"
    assert str(value) in caught.value.message
    assert str(SOFTCAP_MIN) in caught.value.message


@pytest.mark.parametrize("value", [0.0, -0.0, SOFTCAP_MIN, 50.0, FLOAT32_MAX])
def test_a_softcap_is_none_or_any_that_float32_can_divide_by(value):
    assert Options(softcap=value).softcap == value


def test_windows_take_any_bounds_but_no_negative_sink_tokens():
    Window(left=-5, right=-7)
    with pytest.raises(errors.OptionInvalid, match="sink_token_length"):
        Window(sink_token_length=-1)
    with pytest.raises(errors.OptionInvalid, match=r"window\.left"):
        Window(left=2**62)


@pytest.mark.parametrize("shape", [(2**40, 2**40), (-1, 4), (2**62,)])
def test_a_size_that_no_tensor_has_is_refused(shape):
    with pytest.raises(errors.SizeOverflow):
        Tensor(dtype=DType.FP32, shape=shape, strides=(0,) * len(shape), data=None)
    with pytest.raises(errors.SizeOverflow):
        Tensor(dtype=DType.FP32, shape=(2, 2), strides=(2**61, 1), data=None)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=4))
def test_the_extent_is_the_bytes_that_numpy_reaches(dimensions):
    shape = tuple(size for size, _ in dimensions)
    strides = tuple(stride for _, stride in dimensions)
    value = Tensor(dtype=DType.FP32, shape=shape, strides=strides, data=None)
    base = np.zeros(256, dtype=np.float32)
    low, high = np.lib.array_utils.byte_bounds(
        np.lib.stride_tricks.as_strided(base, shape, tuple(4 * stride for stride in strides))
    )
    assert value.extent_nbytes == (0 if 0 in shape else high - low)


@given(st.lists(st.integers(0, 4), max_size=4))
def test_dense_strides_are_numpy_s(shape):
    value = Tensor.dense(DType.BF16, shape, None)
    assert value.is_dense
    if 0 not in shape:
        assert value.strides == tuple(stride // 2 for stride in np.zeros(shape, dtype=np.uint16).strides)
    assert dense_strides(shape) == value.strides


def test_every_arch_has_a_name_users_write():
    assert {arch.value for arch in Arch} == {"auto", "cpu", "sm80", "sm90", "sm100"}
