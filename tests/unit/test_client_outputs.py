"""A caller's own memory for gradients is refused, before anything is sent, where a gradient would come out wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dqkv
from dqkv import errors
from dqkv.client.outputs import check_outputs
from dqkv.client.request import Request

pytestmark = pytest.mark.numpy_only

QUERIES, KEYS = (2, 8, 4, 16), (2, 10, 2, 16)
NOBODY = "127.0.0.1:1"
"""Where nobody listens: whatever is sent there is a TransportError."""


def f16(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


def given(**more: Any) -> dict[str, Any]:
    q, k, v, dout = f16(*QUERIES), f16(*KEYS), f16(*KEYS), f16(*QUERIES)
    return {"q": q, "k": k, "v": v, "dout": dout, "out": dout.copy(), **more}


def strided(shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> np.ndarray:
    """A view, strides in elements, of memory that is large enough."""
    memory = f16(1 << 14)[start:]
    return np.lib.stride_tricks.as_strided(memory, shape, tuple(2 * stride for stride in strides))


def as_numpy(array: np.ndarray) -> Any:
    return array


def as_torch(array: np.ndarray) -> Any:
    """The same memory as a torch tensor, expanded and overlapping views too."""
    torch = pytest.importorskip("torch")
    if array.flags.c_contiguous:
        return torch.from_numpy(array)
    base: Any = array
    while base.base is not None:
        base = base.base
    flat = torch.from_numpy(base.reshape(-1))
    start = (array.ctypes.data - base.ctypes.data) // 2
    return torch.as_strided(flat, array.shape, [stride // 2 for stride in array.strides], start)


BOTH = pytest.mark.parametrize("kind", [as_numpy, as_torch])
KEY_BUFFER, WIDE = f16(*KEYS), f16(2, 20, 2, 16)
QUERY_ROWS = f16(2, 18, 4, 16)
SHARED: dict[str, dict[str, np.ndarray]] = {
    "the same array": {"dk": KEY_BUFFER, "dv": KEY_BUFFER},
    "another view of the same array": {"dk": KEY_BUFFER, "dv": KEY_BUFFER.reshape(-1).reshape(KEYS)},
    "one row in common": {"dk": WIDE[:, :10], "dv": WIDE[:, 9:19]},
    "every other row against all": {"dk": WIDE[:, ::2], "dv": WIDE[:, :10]},
    "queries and keys": {"dq": QUERY_ROWS[:, :8], "dv": QUERY_ROWS[:, 7:17, :2]},
    "one element in common": {"dk": (tail := f16(1279))[:640].reshape(KEYS), "dv": tail[639:].reshape(KEYS)},
}
APART: dict[str, dict[str, np.ndarray]] = {
    "halves of rows": {"dk": WIDE[:, :10], "dv": WIDE[:, 10:]},
    "every other row": {"dk": WIDE[:, ::2], "dv": WIDE[:, 1::2]},
    "heads of one projection": {"dk": (fused := f16(2, 10, 4, 16))[:, :, :2], "dv": fused[:, :, 2:]},
    "widths of one projection": {"dk": (wide := f16(2, 10, 2, 32))[..., :16], "dv": wide[..., 16:]},
    "one after the other": {"dk": (line := f16(1280))[:640].reshape(KEYS), "dv": line[640:].reshape(KEYS)},
    "heads before rows": {"dk": f16(2, 2, 10, 16).transpose(0, 2, 1, 3), "dv": f16(2, 2, 10, 16).transpose(0, 2, 1, 3)},
}


@BOTH
@pytest.mark.parametrize("name", SHARED)
def test_gradients_that_share_bytes_are_refused_by_both_names(name: str, kind: Callable[[np.ndarray], Any]) -> None:
    outputs = {role: kind(array) for role, array in SHARED[name].items()}
    with dqkv.Client(NOBODY) as client, pytest.raises(errors.RegionOverlap) as caught:
        client.backward(**given(**outputs))
    for role in outputs:
        assert role in caught.value.message
    assert caught.value.field in outputs


@BOTH
@pytest.mark.parametrize("name", APART)
def test_gradients_side_by_side_in_one_buffer_are_taken(name: str, kind: Callable[[np.ndarray], Any]) -> None:
    request = Request(**given(**{role: kind(array) for role, array in APART[name].items()}))
    problem = request.problem()
    check_outputs(problem, request.outputs(problem))


def test_gradients_that_run_backwards_are_told_apart_too() -> None:
    problem = Request(**given()).problem()
    check_outputs(problem, {"dk": WIDE[:, 9::-1], "dv": WIDE[:, :9:-1]})
    with pytest.raises(errors.RegionOverlap):
        check_outputs(problem, {"dk": WIDE[:, 9::-1], "dv": WIDE[:, 18:8:-1]})


@BOTH
@pytest.mark.parametrize(
    "strides",
    [(0, 64, 16, 1), (512, 0, 16, 1), (512, 64, 0, 1), (512, 64, 16, 0), (1, 1, 1, 1), (511, 64, 16, 1),
     (512, 63, 16, 1), (512, 64, 15, 1), (16, 64, 16, 1)],
)  # fmt: skip
def test_an_output_whose_own_elements_share_bytes_is_refused(
    strides: tuple[int, ...], kind: Callable[[np.ndarray], Any]
) -> None:
    with dqkv.Client(NOBODY) as client, pytest.raises(errors.OptionInvalid, match="share bytes") as caught:
        client.backward(**given(dq=kind(strided(QUERIES, strides))))
    assert caught.value.field == "dq"


@BOTH
@pytest.mark.parametrize("strides", [(512, 64, 16, 1), (16, 64, 512, 1), (1024, 128, 32, 2), (1, 2, 16, 64)])
def test_an_output_with_any_strides_that_keep_elements_apart_is_taken(
    strides: tuple[int, ...], kind: Callable[[np.ndarray], Any]
) -> None:
    request = Request(**given(dq=kind(strided(QUERIES, strides))))
    problem = request.problem()
    check_outputs(problem, request.outputs(problem))


@BOTH
@pytest.mark.parametrize(
    ("queries", "keys"), [((3, 0, 2, 8), (3, 4, 2, 8)), ((3, 4, 2, 8), (3, 0, 2, 8)), ((0, 4, 2, 8), (0, 4, 2, 8))]
)
def test_empty_outputs_are_taken(
    queries: tuple[int, ...], keys: tuple[int, ...], kind: Callable[[np.ndarray], Any]
) -> None:
    q, k = f16(*queries), f16(*keys)
    outputs = {"dq": kind(np.zeros_like(q)), "dk": kind(np.zeros_like(k)), "dv": kind(np.zeros_like(k))}
    request = Request(q=q, k=k, v=k, dout=q, out=q, **outputs)
    problem = request.problem()
    check_outputs(problem, request.outputs(problem))


def test_a_view_that_negates_is_refused() -> None:
    torch = pytest.importorskip("torch")
    negated = torch.zeros(QUERIES, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    with dqkv.Client(NOBODY) as client, pytest.raises(errors.OptionInvalid, match="negates"):
        client.backward(**given(dq=negated, grad_dtype="fp32"))


ELSEWHERE: dict[str, tuple[Callable[[Any], dict[str, Any]], type[errors.DqkvError], str]] = {
    "shape": (lambda torch: {"dq": torch.zeros(2, 8, 4, 24, dtype=torch.float16)}, errors.ShapeMismatch, "dq"),
    "dtype": (lambda torch: {"dk": torch.zeros(KEYS, dtype=torch.bfloat16)}, errors.DTypeMismatch, "dk"),
    "no float": (lambda torch: {"dk": torch.zeros(KEYS, dtype=torch.int16)}, errors.DTypeMismatch, "dk"),
    "role": (lambda torch: {"dsink": torch.zeros(4, dtype=torch.float16)}, errors.OptionInvalid, "dsink"),
    "sparse": (lambda torch: {"dv": torch.zeros(KEYS, dtype=torch.float16).to_sparse()}, errors.DTypeMismatch, "dv"),
    "expanded": (
        lambda torch: {"dv": torch.zeros(1, 1, 1, 16, dtype=torch.float16).expand(KEYS)}, errors.OptionInvalid, "dv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wrong", ELSEWHERE)
def test_memory_that_does_not_fit_is_refused_before_anything_is_sent_on_any_device(wrong: str, device: str) -> None:
    torch = pytest.importorskip("torch")
    make, kind, field = ELSEWHERE[wrong]
    outputs = make(torch)
    if device == "cuda":
        fake = pytest.importorskip("torch._subclasses.fake_tensor")
        if wrong == "sparse":
            pytest.skip("a stand-in for another device's tensor is always strided")
        with fake.FakeTensorMode():
            outputs = {
                role: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                for role, tensor in outputs.items()
            }
    with dqkv.Client(NOBODY) as client, pytest.raises(kind) as caught:
        client.backward(**given(**outputs))
    assert caught.value.field == field
