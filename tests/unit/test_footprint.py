"""A footprint covers a tensor's bytes exactly, and never calls two tensors disjoint that share a byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dqkv.memory.footprint import Footprint
from dqkv.tensor import DType, Tensor

pytestmark = pytest.mark.numpy_only


def tensor(shape, strides, dtype=DType.BF16):
    return Tensor(dtype=dtype, shape=tuple(shape), strides=tuple(strides), data=None)


def touched(t, byte_offset):
    """Every byte of every element, one entry an index that reaches it."""
    indices = itertools.product(*(range(size) for size in t.shape))
    starts = (byte_offset + t.dtype.itemsize * sum(map(int.__mul__, index, t.strides)) for index in indices)
    return [start + byte for start in starts for byte in range(t.dtype.itemsize)]


def covered(footprint):
    if not footprint.run_nbytes:
        return []
    size, stride = footprint.dims[-1] if footprint.dims else (1, 1)
    starts = [base + index * stride for base in footprint.bases() for index in range(size)]
    return [start + byte for start in starts for byte in range(footprint.run_nbytes)]


tensors = st.integers(0, 4).flatmap(
    lambda rank: st.builds(
        tensor,
        st.lists(st.integers(0, 4), min_size=rank, max_size=rank),
        st.lists(st.integers(0, 24), min_size=rank, max_size=rank),
        st.sampled_from(DType),
    )
)
offsets = st.integers(0, 30).map(lambda elements: 4 * elements)


@settings(max_examples=400, deadline=None)
@given(tensors, offsets)
def test_runs_cover_exactly_the_bytes_of_the_elements(t, offset):
    footprint = Footprint.of(t, offset)
    bytes_of_elements = touched(t, offset)
    assert set(covered(footprint)) == set(bytes_of_elements)
    if bytes_of_elements:
        assert (min(bytes_of_elements), max(bytes_of_elements) + 1) == (footprint.start, footprint.end)
        assert footprint.end == offset + t.extent_nbytes
    if footprint.is_exclusive:
        assert len(set(bytes_of_elements)) == len(bytes_of_elements)


@settings(max_examples=400, deadline=None)
@given(tensors, offsets, tensors, offsets)
def test_tensors_called_disjoint_share_no_byte(a, a_offset, b, b_offset):
    first, second = Footprint.of(a, a_offset), Footprint.of(b, b_offset)
    assert first.is_disjoint(second) == second.is_disjoint(first)
    if first.is_disjoint(second):
        assert not set(touched(a, a_offset)) & set(touched(b, b_offset))


B, S, H, D = 2, 3, 4, 8
FUSED = {
    "(batch, seqlen, 3, heads, width)": ((S * 3 * H * D, 3 * H * D, D, 1), H * D),
    "(batch, seqlen, heads, 3, width)": ((S * 3 * H * D, 3 * H * D, 3 * D, 1), D),
    "(batch, 3, seqlen, heads, width)": ((3 * S * H * D, H * D, D, 1), S * H * D),
    "(seqlen, batch, heads, 3 * width)": ((3 * H * D, B * 3 * H * D, 3 * D, 1), D),
}


@pytest.mark.parametrize(("strides", "step"), FUSED.values(), ids=FUSED)
def test_parts_of_a_fused_tensor_are_told_apart(strides, step):
    parts = [Footprint.of(tensor((B, S, H, D), strides), 2 * index * step) for index in range(3)]
    assert all(part.is_exclusive for part in parts)
    assert all(a.is_disjoint(b) for a, b in itertools.combinations(parts, 2))
    moved = Footprint.of(tensor((B, S, H, D), strides), 2 * (step - 1))
    assert not moved.is_disjoint(parts[0])
    assert not moved.is_disjoint(parts[1])


def test_expanded_and_sliding_outputs_are_not_exclusive():
    assert not Footprint.of(tensor((4, 8), (0, 1)), 0).is_exclusive
    assert not Footprint.of(tensor((4, 8), (4, 1)), 0).is_exclusive
    assert Footprint.of(tensor((1, 8), (0, 1)), 0).is_exclusive


def test_an_empty_tensor_touches_nothing():
    empty = Footprint.of(tensor((0, 8), (8, 1)), 16)
    assert empty.nbytes == 0
    assert empty.is_disjoint(Footprint.of(tensor((64,), (1,)), 0))
    assert empty.is_exclusive
