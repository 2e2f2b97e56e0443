"""Memory that a caller gives for gradients: whether it fits the problem, can be written, and is nobody else's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from dqkv import errors
from dqkv.client.arrays import Array, HostArray, dtype_of, host_tensor, is_on_host, refuse_unwritable
from dqkv.memory.footprint import Footprint
from dqkv.problem import Problem
from dqkv.tensor import Tensor

OVERLAP_WORK = 100_000
"""Steps spent on telling interleaved views apart; what is harder counts as overlapping."""


def check_outputs(problem: Problem[HostArray], outputs: Mapping[str, Array]) -> None:
    """Refuses memory for gradients that does not fit the problem, or that an input or another gradient lies in.

    outputs: arrays by role, of the shapes and dtypes of `problem.gradients`, any strides; torch tensors may be another
    device's. Raises ShapeMismatch, DTypeMismatch, OptionInvalid (not writable, elements that share bytes, a role the
    problem does not give) and RegionOverlap: a request that is sent again after half an answer would read its own
    gradients as inputs, and of two gradients in the same bytes only the last would be right.
    """
    wanted = problem.gradients
    for role, array in outputs.items():
        if role not in wanted:
            raise errors.OptionInvalid(f"{role} was given memory, but this problem has no such gradient", field=role)
        _check_fit(role, array, wanted[role])
        if not _footprint(array, 0).is_exclusive:
            raise errors.OptionInvalid(
                f"{role} is memory with elements that share bytes (shape {tuple(array.shape)}, strides in bytes "
                f"{_strides(array)}): an expanded or overlapping view cannot hold a gradient",
                field=role,
            )
        if is_on_host(array):
            _check_inputs(role, array, problem)
    for one, other in combinations(outputs, 2):
        if _share(outputs[one], outputs[other]):
            raise errors.RegionOverlap(f"{other} overlaps {one}: each gradient needs memory of its own", field=other)


def _check_fit(role: str, array: Array, wanted: Tensor[None]) -> None:
    shape = tuple(array.shape)
    dtype = host_tensor(role, array).dtype if is_on_host(array) else dtype_of(role, array.dtype)
    if shape != wanted.shape:
        raise errors.ShapeMismatch(f"{role} has shape {shape}, must be {wanted.shape}", field=role)
    if dtype is not wanted.dtype:
        raise errors.DTypeMismatch(f"{role} is {dtype}, this problem's is {wanted.dtype} (grad_dtype)", field=role)
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise errors.OptionInvalid(f"{role} is memory that cannot be written", field=role)
    else:
        refuse_unwritable(role, array)


def _check_inputs(role: str, array: HostArray, problem: Problem[HostArray]) -> None:
    for other, tensor in problem.tensors.items():
        if _overlap(array, tensor.data):
            raise errors.RegionOverlap(f"{role} overlaps the input {other}", field=role)


def _overlap(one: HostArray, other: HostArray) -> bool:
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _share(one: Array, other: Array) -> bool:
    if _device(one) != _device(other):
        return False
    return not _footprint(one, _address(one)).is_disjoint(_footprint(other, _address(other)))


def _footprint(array: Array, address: int) -> Footprint:
    """The bytes of an array of any strides whose first element lies at `address`."""
    if 0 in array.shape:
        return Footprint(address, (), 0, expanded=False)
    steps = [(size, stride) for size, stride in zip(array.shape, _strides(array), strict=True) if size > 1]
    behind = sum((size - 1) * stride for size, stride in steps if stride < 0)
    dims = sorted(((size, abs(stride)) for size, stride in steps if stride), key=lambda dim: dim[1], reverse=True)
    return Footprint(address + behind, tuple(dims), array.itemsize, expanded=any(not stride for _, stride in steps))


def _address(array: Array) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def _strides(array: Array) -> Sequence[int]:
    """Strides in bytes."""
    if isinstance(array, np.ndarray):
        return array.strides
    return tuple(stride * array.itemsize for stride in array.stride())


def _device(array: Array) -> str:
    return "cpu" if isinstance(array, np.ndarray) else str(array.device)
