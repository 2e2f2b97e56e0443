"""What a caller passes becomes a checked problem, and what cannot be one is refused by name before anything is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dqkv
from dqkv import errors
from dqkv.client.arrays import dense_bytes, dtype_of, host_array, integers, raw_view
from dqkv.client.outputs import check_outputs
from dqkv.client.request import BACKWARD_ARGUMENTS, ELSEWHERE, Request
from dqkv.problem import Arch, LseScope, Window
from dqkv.tensor import DType

pytestmark = pytest.mark.numpy_only


def request(**given: Any) -> Request:
    q = np.zeros((2, 8, 4, 16), np.float16)
    k = np.zeros((2, 10, 2, 16), np.float16)
    delta = np.zeros((2, 4, 8), np.float32)
    return Request(**{"q": q, "k": k, "v": k.copy(), "dout": q.copy(), "delta": delta, **given})


def test_arrays_and_options_arrive_in_the_problem() -> None:
    problem = request(
        causal=True,
        window=(3, 5),
        sink_token_length=2,
        softcap=1.5,
        softmax_scale=np.float32(0.5),
        deterministic=True,
        grad_dtype="fp32",
        arch="cpu",
        seqused_k=np.array([10, 4], np.int64),
        max_seqlen_q=np.int32(8),
    ).problem()
    assert problem.q.dtype is DType.FP16
    assert problem.options.window == Window(left=3, right=0, sink_token_length=2)
    assert (problem.options.softcap, problem.options.softmax_scale) == (1.5, 0.5)
    assert problem.options.deterministic
    assert problem.options.grad_dtype is DType.FP32
    assert problem.options.arch is Arch.CPU
    assert problem.options.lse_scope is LseScope.LOCAL
    assert problem.keys.seqused == (10, 4)
    assert problem.queries.max_seqlen == 8


@pytest.mark.parametrize("yes", [True, 1, np.True_])
def test_flags_may_be_numpys_or_one(yes: Any) -> None:
    options = request(causal=yes, deterministic=yes).problem().options
    assert options.deterministic is True
    assert options.window.right == 0


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5)])
def test_numbers_may_be_numpys(number: Any) -> None:
    assert request(softmax_scale=number).problem().options.softmax_scale == 0.5


ALL_ARGUMENTS = {field.name for field in dataclasses.fields(Request)} | {"timeout_s"}


def test_every_argument_of_a_request_is_known() -> None:
    assert set(BACKWARD_ARGUMENTS) == ALL_ARGUMENTS
    assert set(ELSEWHERE.values()) <= ALL_ARGUMENTS
    assert not set(ELSEWHERE) & ALL_ARGUMENTS


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("window_size", "window"),
        ("lse", "softmax_lse"),
        ("scale", "softmax_scale"),
        ("is_causal", "causal"),
        ("casual", "causal"),
        ("cu_seqlens", "cu_seqlens_"),
        ("grad_dtpye", "grad_dtype"),
        ("dropout_p", ""),
        ("lambda", ""),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_known_one(name: str, near: str) -> None:
    q = np.zeros((1, 8, 2, 16), np.float16)
    with dqkv.Client("127.0.0.1:1") as client, pytest.raises(TypeError) as caught:
        client.backward(q, q, q, q, out=q, **{name: None})
    said = str(caught.value)
    assert said.startswith(f"backward() has no argument {name!r}; the nearest is '{near}")
    assert said.rsplit("'", 2)[1] in ALL_ARGUMENTS


async def test_an_unknown_argument_of_an_asynchronous_client_too() -> None:
    q = np.zeros((1, 8, 2, 16), np.float16)
    async with dqkv.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=r"^backward\(\) has no argument 'window_size'; the nearest is 'window'$"):
            await client.backward(q, q, q, q, out=q, window_size=(1, 1))


def test_a_time_that_is_no_number_is_refused() -> None:
    q = np.zeros((1, 8, 2, 16), np.float16)
    for wrong in ("5", None, [1]):
        with pytest.raises(errors.OptionInvalid, match="timeout_s"):
            dqkv.Client("127.0.0.1:1", timeout_s=wrong)
    with dqkv.Client("127.0.0.1:1") as client, pytest.raises(errors.OptionInvalid, match="timeout_s"):
        client.backward(q, q, q, q, out=q, timeout_s="5")


@pytest.mark.parametrize(
    ("dtype", "order"), [("f8", False), ("i4", False), ("c8", False), (">f2", True), (">f4", True), (">f8", True)]
)
def test_the_byte_order_is_spoken_of_only_where_it_is_another(dtype: str, order: bool) -> None:
    with pytest.raises(errors.DTypeMismatch) as caught:
        host_array("q", np.zeros(4, dtype))
    assert "must be bf16, fp16 or fp32" in caught.value.message
    assert ("byte order" in caught.value.message) == order


def test_minus_one_is_an_offset_like_any_other() -> None:
    assert request(window=(-1, None)).problem().options.window == Window(left=-1)


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [
        ({"q": np.zeros((2, 8, 4, 16))}, errors.DTypeMismatch, "q"),
        ({"q": [[1.0]]}, errors.DTypeMismatch, "q"),
        ({"k": np.zeros((2, 10, 2, 16), ">f2")}, errors.DTypeMismatch, "k"),
        ({"v": np.zeros((2, 10, 2, 16), np.int16)}, errors.DTypeMismatch, "v"),
        ({"delta": np.zeros((2, 4, 8), np.float16)}, errors.DTypeMismatch, "delta"),
        ({"dout": np.zeros((2, 8, 4, 24), np.float16)}, errors.ShapeMismatch, "dout"),
        ({"q": np.zeros((), np.float16)}, errors.ShapeMismatch, "q"),
        ({"delta": None}, errors.OutOrDelta, "out"),
        ({"grad_dtype": "fp64"}, errors.DTypeMismatch, "grad_dtype"),
        ({"grad_dtype": np.int32}, errors.DTypeMismatch, "grad_dtype"),
        ({"grad_dtype": object()}, errors.DTypeMismatch, "grad_dtype"),
        ({"arch": "sm70"}, errors.OptionInvalid, "arch"),
        ({"lse_scope": "both"}, errors.OptionInvalid, "lse_scope"),
        ({"lse_scope": "global"}, errors.LseScopeInvalid, "softmax_lse"),
        ({"window": 3}, errors.OptionInvalid, "window"),
        ({"window": (1, 2, 3)}, errors.OptionInvalid, "window"),
        ({"window": (0.5, None)}, errors.OptionInvalid, "window"),
        ({"softcap": -1.0}, errors.OptionInvalid, "softcap"),
        ({"softmax_scale": float("nan")}, errors.OptionInvalid, "softmax_scale"),
        ({"softmax_scale": "x"}, errors.OptionInvalid, "softmax_scale"),
        ({"softmax_scale": "0.5"}, errors.OptionInvalid, "softmax_scale"),
        ({"softmax_scale": True}, errors.OptionInvalid, "softmax_scale"),
        ({"softmax_scale": [1.0]}, errors.OptionInvalid, "softmax_scale"),
        ({"softmax_scale": 10**400}, errors.OptionInvalid, "softmax_scale"),
        ({"softmax_scale": 10**5000}, errors.OptionInvalid, "softmax_scale"),
        ({"softmax_scale": 1j}, errors.OptionInvalid, "softmax_scale"),
        ({"softcap": 1e-46}, errors.OptionInvalid, "softcap"),
        ({"softcap": 10**400}, errors.OptionInvalid, "softcap"),
        ({"softcap": None}, errors.OptionInvalid, "softcap"),
        ({"softcap": "1"}, errors.OptionInvalid, "softcap"),
        ({"causal": "no"}, errors.OptionInvalid, "causal"),
        ({"causal": None}, errors.OptionInvalid, "causal"),
        ({"causal": 2}, errors.OptionInvalid, "causal"),
        ({"deterministic": 1.5}, errors.OptionInvalid, "deterministic"),
        ({"deterministic": np.array([True])}, errors.OptionInvalid, "deterministic"),
        ({"sink_token_length": "2"}, errors.OptionInvalid, "sink_token_length"),
        ({"sink_token_length": 0.0}, errors.OptionInvalid, "sink_token_length"),
        ({"sink_token_length": None}, errors.OptionInvalid, "sink_token_length"),
        ({"arch": 3}, errors.OptionInvalid, "arch"),
        ({"max_seqlen_q": 7.5}, errors.OptionInvalid, "max_seqlen_q"),
        ({"max_seqlen_k": 9}, errors.MaxSeqlenTooSmall, "max_seqlen_k"),
        ({"max_seqlen_k": -(2**40)}, errors.MaxSeqlenTooSmall, "max_seqlen_k"),
        ({"max_seqlen_q": 2**31}, errors.OptionInvalid, "max_seqlen_q"),
        ({"max_seqlen_q": 2**40}, errors.OptionInvalid, "max_seqlen_q"),
        ({"max_seqlen_q": 10**5000}, errors.OptionInvalid, "max_seqlen_q"),
        ({"window": (2**80, 0)}, errors.OptionInvalid, "window.left"),
        ({"window": (0, 10**5000)}, errors.OptionInvalid, "window"),
        ({"sink_token_length": 2**80}, errors.OptionInvalid, "sink_token_length"),
        ({"sink_token_length": 10**5000}, errors.OptionInvalid, "sink_token_length"),
        ({"seqused_k": [10, 2**40]}, errors.SequsedInvalid, "seqused_k"),
        ({"seqused_k": [10, 2**63]}, errors.SequsedInvalid, "seqused_k"),
        ({"seqused_k": [10, 2**80]}, errors.SequsedInvalid, "seqused_k"),
        ({"seqused_k": [[10], [1, 2]]}, errors.SequsedInvalid, "seqused_k"),
        ({"cu_seqlens_q": [0, 10**5000]}, errors.OffsetsInvalid, "cu_seqlens_q"),
        ({"cu_seqlens_k": [[0], [1, 2]]}, errors.OffsetsInvalid, "cu_seqlens_k"),
        ({"seqused_k": [10, 11]}, errors.SequsedInvalid, "seqused_k"),
        ({"seqused_k": [[10, 1]]}, errors.SequsedInvalid, "seqused_k"),
        ({"seqused_k": [1.0, 2.0]}, errors.SequsedInvalid, "seqused_k"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Any], kind: type[errors.DqkvError], field: str) -> None:
    with pytest.raises(kind) as caught:
        request(**given).problem()
    assert caught.value.field == field


def test_an_array_that_hides_elements_is_refused() -> None:
    masked = np.ma.masked_array(np.zeros((1, 8, 2, 16), np.float32), mask=True)
    with pytest.raises(errors.DTypeMismatch, match="masked") as refused:
        Request(q=masked, k=masked, v=masked, dout=masked, out=masked).problem()
    assert refused.value.field == "q"


def test_offsets_must_be_integers_of_one_dimension() -> None:
    assert integers("cu_seqlens_q", np.array([0, 3], np.int32)) == (0, 3)
    assert integers("cu_seqlens_q", []) == ()
    for wrong in ([[0, 1]], [0.0, 1.0], 3):
        with pytest.raises(errors.OffsetsInvalid):
            integers("cu_seqlens_q", wrong)


@pytest.mark.parametrize(
    "offsets", [[0, 2**31], [0, 2**40], np.array([0, 2**63], np.uint64), [0, 2**80], [-(2**40), 0]]
)
def test_offsets_of_any_size_are_refused_by_name(offsets: Any) -> None:
    q = np.zeros((16, 4, 16), np.float16)
    packed = request(q=q, dout=q, delta=np.zeros((4, 16), np.float32), cu_seqlens_q=offsets)
    with pytest.raises(errors.OffsetsInvalid) as caught:
        packed.problem()
    assert caught.value.field == "cu_seqlens_q"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (ml_dtypes.bfloat16, DType.BF16),
        (np.float16, DType.FP16),
        (np.dtype("f4"), DType.FP32),
        (DType.BF16, DType.BF16),
    ],
)
def test_dtypes_have_several_names(given: object, want: DType) -> None:
    assert dtype_of("dtype", given) is want


def test_views_are_taken_as_they_lie() -> None:
    wide = np.arange(48, dtype=np.float32).reshape(2, 3, 8)
    for array in (wide[..., ::2], wide.transpose(1, 0, 2), wide[:, ::-1], np.broadcast_to(wide[:1], wide.shape)):
        host = host_array("q", array)
        assert np.shares_memory(host, wide)
        assert bytes(dense_bytes(host)) == np.ascontiguousarray(array).tobytes()
        assert np.array_equal(np.asarray(raw_view(host)), array.view(np.uint32))


def test_memory_for_gradients_must_fit_the_problem() -> None:
    problem = request().problem()
    q = problem.q.data
    good = np.empty_like(q)
    check_outputs(problem, {"dq": good, "dk": np.empty((2, 10, 2, 32), np.float16)[..., :16]})
    read_only = np.empty_like(q)
    read_only.flags.writeable = False
    for wrong, kind in (
        (np.empty((2, 8, 4, 24), np.float16), errors.ShapeMismatch),
        (np.empty((2, 8, 4, 16), np.float32), errors.DTypeMismatch),
        (read_only, errors.OptionInvalid),
        (np.lib.stride_tricks.as_strided(good, good.shape, (*good.strides[:2], 0, 2)), errors.OptionInvalid),
        (q, errors.RegionOverlap),
    ):
        with pytest.raises(kind) as caught:
            check_outputs(problem, {"dq": wrong})
        assert caught.value.field == "dq"
    with pytest.raises(errors.OptionInvalid):
        check_outputs(problem, {"dsink": np.empty(4, np.float16)})


def test_interleaved_gradients_of_one_projection_are_no_overlap() -> None:
    fused = np.zeros((2, 8, 3, 4, 16), np.float16)
    q, k, v = fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
    grads = np.zeros((2, 8, 6, 4, 16), np.float16)
    problem = request(q=q, k=k, v=v, dout=np.zeros_like(q)).problem()
    check_outputs(problem, {"dq": grads[:, :, 0], "dk": grads[:, :, 1], "dv": grads[:, :, 2]})
    with pytest.raises(errors.RegionOverlap):
        check_outputs(problem, {"dq": fused[:, :, 1]})
